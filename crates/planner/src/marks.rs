//! Writes annotations and labels of Nodes.

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, api::Patch};
use serde_json::json;
use tokio::time::Instant;
use tracing::debug;

use super::views::Views;
use cluster::{ApiError, call, gone_is_fine, patch_params};
use model::{eligibility::NodeView, marks::NodeChange, members::NodeIndex};

/// How many Nodes are written concurrently: the end of a large job frees many at once, and when an instance ends there
/// is little time.
const AT_ONCE: usize = 16;

/// Writes `changes`, which were decided from the Nodes as `observed`. If somebody has written meanwhile what a change concerns, that Node is left alone, and
/// the next round decides again. If one change fails, the others are still written. From `until` on, no further write begins.
///
/// # Errors
/// The last error of a call to the API server; code 409 if nothing else is wrong than that a Node has changed meanwhile.
pub async fn write(
    client: &Client,
    nodes: &Views<NodeView>,
    observed: &[&NodeView],
    changes: Vec<NodeChange>,
    until: Option<Instant>,
) -> Result<(), ApiError> {
    let observed = NodeIndex::of(observed);
    let api = Api::<Node>::all(client.clone());
    let is_in_time = |_: &NodeChange| until.is_none_or(|until| Instant::now() < until);
    let patches = changes.into_iter().take_while(is_in_time).filter_map(|change| {
        let decided_from = observed.with_uid(&change.uid)?;
        let newest = nodes.named(&change.node)?;
        if !change.fits(decided_from, &newest.view) {
            debug!(node = change.node, "somebody has written meanwhile what this would change: leaving the Node alone");
            return None;
        }
        let NodeChange { node, annotations, labels, .. } = change;
        debug!(node, ?annotations, ?labels, "writing onto a Node");
        // The newest version, for each heartbeat makes another one.
        let metadata = json!({"annotations": annotations, "labels": labels, "resourceVersion": newest.version});
        let patch = json!({"metadata": metadata});
        let api = api.clone();
        Some(async move {
            let (params, patch) = (patch_params(), Patch::Merge(patch));
            gone_is_fine(call(format!("metadata of Node {node}"), api.patch_metadata(&node, &params, &patch)).await)
        })
    });
    let has_changed = |error: &ApiError| error.code() == Some(409);
    let worse = async |all: Result<(), ApiError>, one: Result<(), ApiError>| match one {
        Err(error) if has_changed(&error) => all.and(Err(error)),
        one => one.and(all),
    };
    stream::iter(patches).buffer_unordered(AT_ONCE).fold(Ok(()), worse).await
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::{Arc, Mutex},
    };

    use http::{Request, Response};
    use kube::client::Body;

    use super::*;

    #[tokio::test]
    async fn a_node_that_has_changed_since_the_round_began_is_left_alone() {
        let node = |name: &str, uid: &str, version: &str, label: Option<&str>| -> Node {
            let labels = json!(label.map(|label| ("l", label)).into_iter().collect::<BTreeMap<_, _>>());
            let metadata = json!({"name": name, "uid": uid, "resourceVersion": version, "labels": labels});
            serde_json::from_value(json!({"metadata": metadata})).unwrap()
        };
        let before = ["same", "beats", "labelled", "another", "gone"].map(|name| node(name, name, "1", None));
        let now = [
            node("same", "same", "1", None),
            node("beats", "beats", "2", None),
            node("labelled", "labelled", "3", Some("by an administrator")),
            node("another", "another machine", "4", None),
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
        let observed = before.each_ref().map(NodeView::from);
        let changes = observed
            .each_ref()
            .map(|node| NodeChange { labels: [("l".to_owned(), Some("v".to_owned()))].into(), ..NodeChange::of(node) });
        let views = Views::of(now, |node| Some(NodeView::from(&node)));
        let client = Client::new(serve, "default");
        write(&client, &views, &observed.each_ref(), changes.into(), None).await.unwrap();
        asked.lock().unwrap().sort();
        assert_eq!(*asked.lock().unwrap(), ["1", "2"], "the version is the newest, for heartbeats change it");
    }

    #[tokio::test]
    async fn no_node_is_written_from_the_end_of_its_time_on() {
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "a", "uid": "a"}})).unwrap();
        let observed = NodeView::from(&node);
        let change =
            NodeChange { labels: [("l".to_owned(), Some("v".to_owned()))].into(), ..NodeChange::of(&observed) };
        let views = Views::of([node], |node| Some(NodeView::from(&node)));
        // No request is answered.
        let serve =
            tower::service_fn(async |_: Request<Body>| Err::<Response<Body>, _>(std::io::Error::other("asked")));
        let client = Client::new(serve, "default");
        for (until, is_written) in [(Some(Instant::now()), false), (None, true)] {
            let written = write(&client, &views, &[&observed], vec![change.clone()], until).await;
            assert_eq!(written.is_err(), is_written, "{until:?}");
        }
    }

    #[tokio::test]
    async fn a_node_that_has_changed_meanwhile_hides_no_refusal_of_another() {
        for (codes, expected) in
            [([200, 200], None), ([200, 409], Some(409)), ([409, 403], Some(403)), ([403, 409], Some(403))]
        {
            let nodes = codes.iter().enumerate().map(|(number, code)| -> Node {
                let metadata = json!({"name": format!("{number}-{code}"), "uid": number.to_string()});
                serde_json::from_value(json!({"metadata": metadata})).unwrap()
            });
            let nodes: Vec<_> = nodes.collect();
            let serve = tower::service_fn(async |request: Request<Body>| {
                let code: u16 = request.uri().path().rsplit('-').next().unwrap().parse().unwrap();
                let body = match code {
                    200 => json!({"metadata": {"name": "any"}}),
                    _ => {
                        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "no", "reason": "No"})
                    }
                };
                let response = Response::builder().status(code).body(Body::from(body.to_string().into_bytes()));
                Ok::<_, std::io::Error>(response.unwrap())
            });
            let observed: Vec<_> = nodes.iter().map(NodeView::from).collect();
            let observed: Vec<_> = observed.iter().collect();
            let change = |node: &&NodeView| NodeChange {
                labels: [("l".to_owned(), Some("v".to_owned()))].into(),
                ..NodeChange::of(node)
            };
            let changes = observed.iter().map(change).collect();
            let views = Views::of(nodes, |node| Some(NodeView::from(&node)));
            let written = write(&Client::new(serve, "default"), &views, &observed, changes, None).await;
            assert_eq!(written.err().and_then(|error| error.code()), expected, "{codes:?}");
        }
    }
}
