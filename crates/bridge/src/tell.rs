//! Conditions of pods, and Events about them.

use k8s_openapi::{
    api::core::v1::{ObjectReference, Pod},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{Api, Client, api::Patch};
use serde_json::json;

use cluster::{ApiError, call, gone_is_fine, patch_params, publish};
use pods::action::{PodRef, Reason, Tell};

/// Writes condition PodScheduled=False, which `kubectl describe` and autoscalers read.
///
/// # Errors
/// The API server's; a pod that is gone is no error.
pub(crate) async fn condition(client: &Client, tell: &Tell) -> Result<(), ApiError> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &tell.pod.namespace);
    let condition = json!({
        "type": "PodScheduled",
        "status": "False",
        "reason": tell.reason.word(),
        "message": tell.message,
        "lastTransitionTime": Time(Timestamp::now()),
    });
    let patch = json!({ "metadata": { "uid": tell.pod.uid }, "status": { "conditions": [condition] } });
    let what = format!("tell about pod {}/{}", tell.pod.namespace, tell.pod.name);
    let (parameters, patch) = (patch_params(), Patch::Strategic(patch));
    gone_is_fine(call(what, pods.patch_status(&tell.pod.name, &parameters, &patch)).await)
}

/// Publishes an Event, from the agent's pod `identity`.
pub(crate) async fn event(client: &Client, identity: &str, tell: &Tell) {
    let is_warning = matches!(tell.reason, Reason::Refused | Reason::NotStarted | Reason::NotOptedIn);
    publish(client, identity, &reference(&tell.pod), is_warning, tell.reason.word(), &tell.message).await;
}

fn reference(pod: &PodRef) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.clone()),
        name: Some(pod.name.clone()),
        uid: Some(pod.uid.clone()),
        ..ObjectReference::default()
    }
}
