//! The FluxInstance itself: made once from ConfigMap `flux-default`, and its status.

use k8s_openapi::api::core::v1::{ConfigMap, ObjectReference};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tracing::info;

use api::{
    ANNOTATION_CONSUMED, CONFIGMAP_DEFAULT, CONFIGMAP_DEFAULT_KEY, FluxInstance, FluxInstanceSpec, FluxInstanceStatus,
    INSTANCE, InstancePhase, NAMESPACE, in_one_line,
};
use cluster::{ApiError, call, clock};
use model::{read::read_instance, status::set_condition};

/// Makes the first FluxInstance from ConfigMap `flux-default`, once: a file can't hold an object beside its own new CRD.
/// `existing` is the FluxInstance that is there. To be called in every round also while it is: a ConfigMap that was made
/// anew beside it has no mark, and unless it gets one the FluxInstance comes back as soon as it is deleted.
///
/// # Errors
/// The API server's; [`ApiError::Content`] where the ConfigMap holds no spec.
pub async fn ensure(client: &Client, existing: Option<&FluxInstance>) -> Result<(), ApiError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let Some(map) = call("get ConfigMap flux-default", maps.get_opt(CONFIGMAP_DEFAULT)).await? else { return Ok(()) };
    if map.annotations().contains_key(ANNOTATION_CONSUMED) {
        return Ok(());
    }
    let uid = match existing {
        Some(instance) => instance.uid(),
        None => {
            let text = map.data.as_ref().and_then(|data| data.get(CONFIGMAP_DEFAULT_KEY)).map_or("{}", String::as_str);
            let spec = parse_default(text)?;
            let instances: Api<FluxInstance> = Api::namespaced(client.clone(), NAMESPACE);
            let (params, flux) = (PostParams::default(), FluxInstance::new(INSTANCE, spec));
            info!("making the FluxInstance from ConfigMap flux-default");
            call("create FluxInstance flux", instances.create(&params, &flux)).await?.uid()
        }
    };
    // The durable mark, after the deed: a planner that dies between the two finds the instance and only marks.
    let patch = json!({"metadata": {"annotations": {ANNOTATION_CONSUMED: uid.unwrap_or_default()}}});
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    call("mark ConfigMap flux-default", maps.patch(CONFIGMAP_DEFAULT, &params, &patch)).await.map(drop)
}

/// What an Event about ConfigMap `flux-default` is about.
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
    read_instance(text).map_err(|findings| ApiError::Content {
        object: format!("ConfigMap {CONFIGMAP_DEFAULT}"),
        reason: format!("{CONFIGMAP_DEFAULT_KEY} can't be served: {}", in_one_line(&findings)),
    })
}

/// Writes the status where it differs.
///
/// # Errors
/// The API server's.
pub async fn write_status(client: &Client, instance: &FluxInstance, next: &FluxInstanceStatus) -> Result<(), ApiError> {
    if instance.status.as_ref() == Some(next) {
        return Ok(());
    }
    let instances: Api<FluxInstance> = Api::namespaced(client.clone(), NAMESPACE);
    let name = instance.name_any();
    let mut changed = instance.clone();
    changed.status = Some(next.clone());
    // By replace, so that a planner that has lost its Lease can't overwrite the next one's words.
    let params = PostParams::default();
    let written = instances.replace_status(&name, &params, &changed);
    call(format!("status of FluxInstance {name}"), written).await.map(drop)
}

/// Says of a FluxInstance of another name that it is ignored.
///
/// # Errors
/// The API server's.
pub async fn ignore(client: &Client, instance: &FluxInstance) -> Result<(), ApiError> {
    let mut status = instance.status.clone().unwrap_or_default();
    let message = format!("only the FluxInstance named {INSTANCE} is served");
    let generation = instance.meta().generation.unwrap_or_default();
    set_condition(&mut status.conditions, "Ignored", true, "AnotherName", &message, generation, clock::now());
    status.phase = InstancePhase::Ignored;
    status.message = Some(message);
    if instance.status.as_ref().is_some_and(|old| old.phase == InstancePhase::Ignored) {
        return Ok(());
    }
    write_status(client, instance, &status).await
}
