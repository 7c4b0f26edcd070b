//! Creates the FluxInstance, once, from ConfigMap `flux-default`, and writes its status.

use k8s_openapi::api::core::v1::{ConfigMap, ObjectReference};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PostParams},
};
use serde_json::json;
use tracing::info;

use api::{
    ANNOTATION_CONSUMED, CONFIGMAP_DEFAULT, CONFIGMAP_DEFAULT_KEY, FluxInstance, FluxInstanceSpec, FluxInstanceStatus,
    INSTANCE, InstancePhase, NAMESPACE, in_one_line,
};
use cluster::{ApiError, call, clock, patch_params};
use model::{conditions::ConditionValue, read::read_default};

/// Creates the first FluxInstance from ConfigMap `flux-default`, once. The manifest can't hold the FluxInstance itself,
/// because `kubectl apply` refuses an object whose CRD is new in the same file.
///
/// Call this even if there is a FluxInstance: a ConfigMap that was created again has no mark yet, and without the mark the FluxInstance
/// would come back as soon as a user deletes it. A FluxInstance that is being deleted does not consume the ConfigMap: a call after its end creates a new one.
///
/// Returns true if the next call is needed only after a change of the ConfigMap.
///
/// # Errors
/// If a call to the API server fails; [`ApiError::Content`] if the ConfigMap has no valid spec.
pub async fn ensure(client: &Client) -> Result<bool, ApiError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let Some(map) = call("get ConfigMap flux-default", maps.get_opt(CONFIGMAP_DEFAULT)).await? else { return Ok(true) };
    if map.annotations().contains_key(ANNOTATION_CONSUMED) {
        return Ok(true);
    }
    let instances: Api<FluxInstance> = Api::namespaced(client.clone(), NAMESPACE);
    // Not from the caches: they may still hold a FluxInstance that was deleted before the ConfigMap was applied.
    let uid = match call("get FluxInstance flux", instances.get_opt(INSTANCE)).await? {
        Some(instance) if instance.metadata.deletion_timestamp.is_some() => return Ok(false),
        Some(instance) => instance.uid(),
        None => {
            let text = map.data.as_ref().and_then(|data| data.get(CONFIGMAP_DEFAULT_KEY)).map_or("{}", String::as_str);
            let spec = parse_default(text)?;
            let (params, flux) = (PostParams::default(), FluxInstance::new(INSTANCE, spec));
            info!("creating the FluxInstance from ConfigMap flux-default");
            call("create FluxInstance flux", instances.create(&params, &flux)).await?.uid()
        }
    };
    // Mark the ConfigMap only now: a planner that dies before this line finds the FluxInstance in its next round and
    // adds the mark.
    let patch = json!({"metadata": {"annotations": {ANNOTATION_CONSUMED: uid.unwrap_or_default()}}});
    let (params, patch) = (patch_params(), Patch::Merge(patch));
    call("mark ConfigMap flux-default", maps.patch(CONFIGMAP_DEFAULT, &params, &patch)).await.map(|_| true)
}

/// A reference to ConfigMap `flux-default`, for an Event about it.
pub fn default_reference() -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("ConfigMap".to_owned()),
        name: Some(CONFIGMAP_DEFAULT.to_owned()),
        namespace: Some(NAMESPACE.to_owned()),
        ..ObjectReference::default()
    }
}

fn parse_default(text: &str) -> Result<FluxInstanceSpec, ApiError> {
    read_default(text).map_err(|findings| ApiError::Content {
        object: format!("ConfigMap {CONFIGMAP_DEFAULT}"),
        reason: format!("{CONFIGMAP_DEFAULT_KEY} can't be served: {}", in_one_line(&findings)),
    })
}

/// Writes the status if it has changed.
///
/// # Errors
/// If the call to the API server fails; with code 409 if the FluxInstance has changed since it was read.
pub async fn write_status(client: &Client, instance: &FluxInstance, next: &FluxInstanceStatus) -> Result<(), ApiError> {
    if instance.status.as_ref() == Some(next) {
        return Ok(());
    }
    let instances: Api<FluxInstance> = Api::namespaced(client.clone(), NAMESPACE);
    let name = instance.name_any();
    let mut changed = instance.clone();
    changed.status = Some(next.clone());
    // Replace, not patch: it names the resourceVersion, so a planner that has lost its Lease can't overwrite the next
    // one's status.
    let params = PostParams::default();
    let written = instances.replace_status(&name, &params, &changed);
    call(format!("status of FluxInstance {name}"), written).await.map(drop)
}

/// Sets the condition `Ignored` on a FluxInstance with a name that is not served.
///
/// # Errors
/// As [`write_status`].
pub async fn ignore(client: &Client, instance: &FluxInstance) -> Result<(), ApiError> {
    if instance.status.as_ref().is_some_and(|old| old.phase == InstancePhase::Ignored) {
        return Ok(());
    }
    // Nothing of the status before: a captured agent's token can have filled it.
    let mut status = FluxInstanceStatus::default();
    let message = format!("only the FluxInstance named {INSTANCE} is served");
    let generation = instance.meta().generation.unwrap_or_default();
    let reason = "AnotherName";
    ConditionValue::yes(reason, &*message).set("Ignored", &mut status.conditions, generation, clock::now());
    status.phase = InstancePhase::Ignored;
    status.reason = Some(reason.to_owned());
    status.message = Some(message);
    write_status(client, instance, &status).await
}
