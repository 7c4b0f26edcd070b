//! Writes annotations and labels of Nodes.

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, api::Patch};
use serde_json::json;
use tracing::debug;

use super::views::Views;
use cluster::{ApiError, call, gone_is_fine, patch_params};
use model::{eligibility::NodeView, marks::NodeChange, members::NodeIndex};

/// How many Nodes are written concurrently: the end of a large job frees many at once, and when an instance ends there
/// is little time.
const AT_ONCE: usize = 16;

/// Writes `changes`, which were computed from `planned`. A Node that has changed since then, in what planning reads of it, stays as it is: what
/// others write stays, and the next round sees it. If one change fails, the others are still written.
///
/// # Errors
/// The last error of a call to the API server; code 409 if a Node has changed meanwhile.
pub async fn write(
    client: &Client,
    nodes: &Views<NodeView>,
    planned: &[&NodeView],
    changes: Vec<NodeChange>,
) -> Result<(), ApiError> {
    let planned = NodeIndex::of(planned);
    let api = Api::<Node>::all(client.clone());
    let patches = changes.into_iter().filter_map(|NodeChange { node, uid, annotations, labels }| {
        let seen = nodes.named(&node).filter(|seen| planned.with_uid(&uid) == Some(&*seen.view))?;
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use http::{Request, Response};
    use kube::{ResourceExt, client::Body};

    use super::*;

    #[tokio::test]
    async fn a_node_that_has_changed_since_the_round_began_is_left_alone() {
        let node = |name: &str, version: &str, labels: serde_json::Value| -> Node {
            let metadata = json!({"name": name, "uid": name, "resourceVersion": version, "labels": labels});
            serde_json::from_value(json!({"metadata": metadata})).unwrap()
        };
        let before = ["same", "beats", "changed", "gone"].map(|name| node(name, "1", json!({})));
        let now = [
            node("same", "1", json!({})),
            node("beats", "2", json!({})),
            node("changed", "3", json!({"by": "an administrator"})),
        ];
        let asked = Arc::<Mutex<Vec<_>>>::default();
        let seen = asked.clone();
        let serve = tower::service_fn(move |request: Request<Body>| {
            let seen = seen.clone();
            async move {
                let body = request.into_body().collect_bytes().await.unwrap();
                let patch: serde_json::Value = serde_json::from_slice(&body).unwrap();
                seen.lock().unwrap().push(patch["metadata"]["resourceVersion"].as_str().unwrap().to_owned());
                let body = json!({"metadata": {"name": "any"}}).to_string().into_bytes();
                Ok::<_, std::io::Error>(Response::new(Body::from(body)))
            }
        });
        let planned = before.each_ref().map(NodeView::from);
        let changes = before.iter().map(|node| {
            let labels = [("l".to_owned(), Some("v".to_owned()))].into();
            NodeChange { node: node.name_any(), uid: node.name_any(), labels, ..NodeChange::default() }
        });
        let views = Views::of(now, |node| Some(NodeView::from(node)));
        let client = Client::new(serve, "default");
        write(&client, &views, &planned.each_ref(), changes.collect()).await.unwrap();
        asked.lock().unwrap().sort();
        assert_eq!(*asked.lock().unwrap(), ["1", "2"], "the version is the newest, for heartbeats change it");
    }
}
