//! Writes annotations and labels of Nodes.

use std::{collections::BTreeMap, pin::pin, time::Duration};

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, api::Patch};
use serde_json::json;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::{LONGEST_WRITES, views::Views};
use base::error_chain;
use cluster::{call, gone_is_fine, patch_params};
use model::{eligibility::NodeView, marks::NodeChange, members::NodeIndex};

/// How many Nodes are written concurrently: the end of a large job frees many at once, and when an instance ends there
/// is little time.
const AT_ONCE: usize = 16;
/// How long a Node that refuses a mark is left alone.
const AGAIN: Duration = Duration::from_mins(1);

/// What the planner writes onto Nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mark {
    /// Annotations that keep autoscalers away.
    Protection,
    /// What pods can select by.
    Label,
}

/// Writes onto Nodes. What fails is logged, and stops nothing else.
pub struct Marks {
    client: Client,
    /// Names of Nodes that refused a mark, and until when they are left alone.
    refused: BTreeMap<(Mark, String), Instant>,
}

impl Marks {
    /// No Node has refused anything yet.
    pub fn new(client: Client) -> Self {
        Self { client, refused: BTreeMap::new() }
    }

    /// Writes `changes`, which were decided from the Nodes as `observed`, for [`LONGEST_WRITES`].
    pub async fn write(
        &mut self,
        nodes: &Views<NodeView>,
        observed: &[&NodeView],
        mark: Mark,
        mut changes: Vec<NodeChange>,
    ) {
        let now = Instant::now();
        self.refused.retain(|_, until| now < *until);
        changes.retain(|change| !self.refused.contains_key(&(mark, change.node.clone())));
        let refused = write_all(&self.client, nodes, observed, changes, Some(now + LONGEST_WRITES)).await;
        let until = Instant::now() + AGAIN;
        self.refused.extend(refused.into_iter().map(|node| ((mark, node), until)));
    }

    /// Writes all `changes` at the instance's end, whichever Node refused them before: the right to write may be gone within seconds.
    pub async fn write_at_the_end(&self, nodes: &Views<NodeView>, observed: &[&NodeView], changes: Vec<NodeChange>) {
        write_all(&self.client, nodes, observed, changes, None).await;
    }
}

/// Writes `changes`, which were decided from the Nodes as `observed`. If somebody has written meanwhile what a change concerns, that Node is left alone, and
/// the next round decides again. If one change fails, the others are still written. From `until` on, no further write begins. Returns the names of the
/// Nodes that refused.
async fn write_all(
    client: &Client,
    nodes: &Views<NodeView>,
    observed: &[&NodeView],
    changes: Vec<NodeChange>,
    until: Option<Instant>,
) -> Vec<String> {
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
            let written = call(format!("metadata of Node {node}"), api.patch_metadata(&node, &params, &patch)).await;
            (node, gone_is_fine(written).err())
        })
    });
    let (mut refused, mut last) = (Vec::new(), None);
    let mut written = pin!(stream::iter(patches).buffer_unordered(AT_ONCE));
    while let Some((node, error)) = written.next().await {
        // With code 409 the Node has changed meanwhile: the next round tries again.
        if let Some(error) = error.filter(|error| error.code() != Some(409)) {
            refused.push(node);
            last = Some(error);
        }
    }
    if let Some(error) = last {
        warn!(
            error = error_chain(&error),
            nodes = refused.len(),
            "can't write onto Nodes; the error is the last one's"
        );
    }
    refused
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
        let refused = write_all(&client, &views, &observed.each_ref(), changes.into(), None).await;
        assert_eq!(refused, [""; 0]);
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
            let refused = write_all(&client, &views, &[&observed], vec![change.clone()], until).await;
            assert_eq!(!refused.is_empty(), is_written, "{until:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_refuses_a_mark_is_left_alone_for_a_minute_and_keeps_no_other_one_waiting() {
        let nodes = [200, 409, 403].map(|code| -> Node {
            serde_json::from_value(json!({"metadata": {"name": format!("node-{code}"), "uid": code.to_string()}}))
                .unwrap()
        });
        let asked = Arc::<Mutex<Vec<_>>>::default();
        let seen = asked.clone();
        let serve = tower::service_fn(move |request: Request<Body>| {
            let code: u16 = request.uri().path().rsplit('-').next().unwrap().parse().unwrap();
            seen.lock().unwrap().push(code);
            let body = match code {
                200 => json!({"metadata": {"name": "any"}}),
                _ => {
                    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "no", "reason": "No"})
                }
            };
            let response = Response::builder().status(code).body(Body::from(body.to_string().into_bytes()));
            async { Ok::<_, std::io::Error>(response.unwrap()) }
        });
        let observed = nodes.each_ref().map(NodeView::from);
        let changes = observed
            .each_ref()
            .map(|node| NodeChange { labels: [("l".to_owned(), Some("v".to_owned()))].into(), ..NodeChange::of(node) });
        let views = Views::of(nodes, |node| Some(NodeView::from(&node)));
        let mut marks = Marks::new(Client::new(serve, "default"));
        let mut asked_by = async |mark: Option<Mark>| {
            asked.lock().unwrap().clear();
            let (observed, changes) = (observed.each_ref(), changes.to_vec());
            match mark {
                Some(mark) => marks.write(&views, &observed, mark, changes).await,
                None => marks.write_at_the_end(&views, &observed, changes).await,
            }
            let mut asked = asked.lock().unwrap().clone();
            asked.sort_unstable();
            asked
        };
        assert_eq!(asked_by(Some(Mark::Label)).await, [200, 403, 409]);
        assert_eq!(asked_by(Some(Mark::Label)).await, [200, 409]);
        assert_eq!(asked_by(Some(Mark::Protection)).await, [200, 403, 409], "each mark by itself");
        assert_eq!(asked_by(None).await, [200, 403, 409], "at the end");
        tokio::time::advance(AGAIN).await;
        assert_eq!(asked_by(Some(Mark::Label)).await, [200, 403, 409]);
    }
}
