//! Writing what keeps autoscalers away from Nodes.

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
    runtime::reflector::{ObjectRef, Store},
};
use serde_json::json;
use tracing::debug;

use cluster::{ApiError, call, gone_is_fine};
use model::protect::Change;

/// At the end of a job many nodes are given back at once, and at the end of an instance there is little time.
const AT_ONCE: usize = 16;

/// Writes `changes` to the very versions of the Nodes that they were made from: what somebody else annotates meanwhile
/// stays. A change that fails does not keep the others from being written.
///
/// # Errors
/// The API server's last; code 409 where a Node has changed meanwhile.
pub async fn write(client: &Client, nodes: &Store<Node>, changes: Vec<Change>) -> Result<(), ApiError> {
    let api = Api::<Node>::all(client.clone());
    let patches = changes.into_iter().filter_map(|Change { node, uid, annotations }| {
        let seen = nodes.get(&ObjectRef::new(&node)).filter(|seen| seen.uid().as_ref() == Some(&uid))?;
        debug!(node, ?annotations, "telling autoscalers");
        let patch = json!({"metadata": {"annotations": annotations, "resourceVersion": seen.resource_version()}});
        let api = api.clone();
        Some(async move {
            let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
            gone_is_fine(call(format!("annotations of Node {node}"), api.patch_metadata(&node, &params, &patch)).await)
        })
    });
    stream::iter(patches).buffer_unordered(AT_ONCE).fold(Ok(()), async |all, one| one.and(all)).await
}
