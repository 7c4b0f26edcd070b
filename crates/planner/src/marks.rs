//! Writes annotations and labels of Nodes.

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, api::Patch};
use serde_json::json;
use tracing::debug;

use super::views::Views;
use cluster::{ApiError, call, gone_is_fine, patch_params};
use model::{eligibility::NodeView, marks::NodeChange};

/// How many Nodes are written concurrently: the end of a large job frees many at once, and when an instance ends there
/// is little time.
const AT_ONCE: usize = 16;

/// Writes `changes` to exactly the versions of the Nodes that they were computed from, so that what others write
/// meanwhile stays. If one change fails, the others are still written.
///
/// # Errors
/// The last error of a call to the API server; code 409 if a Node has changed meanwhile.
pub async fn write(client: &Client, nodes: &Views<NodeView>, changes: Vec<NodeChange>) -> Result<(), ApiError> {
    let api = Api::<Node>::all(client.clone());
    let patches = changes.into_iter().filter_map(|NodeChange { node, uid, annotations, labels }| {
        let seen = nodes.named(&node).filter(|seen| seen.view.uid == uid)?;
        debug!(node, ?annotations, ?labels, "writing onto a Node");
        let metadata = json!({"annotations": annotations, "labels": labels, "resourceVersion": seen.version});
        let patch = json!({"metadata": metadata});
        let api = api.clone();
        Some(async move {
            let (params, patch) = (patch_params(), Patch::Merge(patch));
            gone_is_fine(call(format!("metadata of Node {node}"), api.patch_metadata(&node, &params, &patch)).await)
        })
    });
    stream::iter(patches).buffer_unordered(AT_ONCE).fold(Ok(()), async |all, one| one.and(all)).await
}
