//! Writes annotations and labels of Nodes.

use std::{
    collections::HashMap,
    pin::pin,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, api::Patch};
use serde_json::json;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::{LONGEST_WRITES, views::Views};
use base::error_chain;
use cluster::{ApiError, call, gone_is_fine, patch_params};
use model::{eligibility::NodeView, marks::NodeChange, members::NodeIndex};

/// How many Nodes are written concurrently: the end of a large job frees many at once, and when an instance ends there
/// is little time.
const AT_ONCE: usize = 16;
/// How long a Node that refuses a mark is left alone.
const AGAIN: Duration = Duration::from_mins(1);
/// The same after an error that may pass by itself. Shorter, because an autoscaler may take a node with jobs until its annotations are there.
const SOON_AGAIN: Duration = Duration::from_secs(10);

/// Writes one kind of mark, annotations or labels, onto Nodes: a Node may refuse one and take the other. A failed write is logged, and stops nothing else.
pub struct MarkWriter {
    client: Client,
    /// For the log.
    kind: &'static str,
    /// uids of Nodes that could not be written, and until when they are left alone.
    left_alone: HashMap<String, Instant>,
}

impl MarkWriter {
    /// No write has failed yet. `kind`: what is written, for the log.
    pub fn new(client: Client, kind: &'static str) -> Self {
        Self { client, kind, left_alone: HashMap::new() }
    }

    /// Writes `changes`, which were decided from the Nodes as `observed`, for [`LONGEST_WRITES`].
    pub async fn write(&mut self, nodes: &Views<NodeView>, observed: &[&NodeView], mut changes: Vec<NodeChange>) {
        let now = Instant::now();
        self.left_alone.retain(|_, until| now < *until);
        changes.retain(|change| !self.left_alone.contains_key(&change.uid));
        let failed = self.write_all(nodes, observed, changes, Some(now + LONGEST_WRITES)).await;
        let now = Instant::now();
        self.left_alone.extend(failed.into_iter().map(|(uid, pause)| (uid, now + pause)));
    }

    /// Writes all `changes` at the instance's end, also onto Nodes that are left alone: the right to write may be gone within seconds.
    pub async fn write_at_the_end(&self, nodes: &Views<NodeView>, observed: &[&NodeView], changes: Vec<NodeChange>) {
        self.write_all(nodes, observed, changes, None).await;
    }

    /// Writes `changes`. If somebody has written meanwhile what a change concerns, that Node is left alone, and the next round decides again. If one
    /// change fails, the others are still written. With `until`, no further write begins from then on, nor once the API server does not answer or is
    /// too busy. Returns the uids of the Nodes to leave alone, and for how long.
    async fn write_all(
        &self,
        nodes: &Views<NodeView>,
        observed: &[&NodeView],
        changes: Vec<NodeChange>,
        until: Option<Instant>,
    ) -> Vec<(String, Duration)> {
        if changes.is_empty() {
            return Vec::new();
        }
        let (observed, api) = (NodeIndex::of(observed), Api::<Node>::all(self.client.clone()));
        let is_busy = AtomicBool::new(false);
        let goes_on =
            |_: &NodeChange| until.is_none_or(|until| Instant::now() < until && !is_busy.load(Ordering::Relaxed));
        let patches = changes.into_iter().take_while(goes_on).filter_map(|change| {
            let decided_from = observed.with_uid(&change.uid)?;
            let newest = nodes.named(&change.node)?;
            if !change.fits(decided_from, &newest.view) {
                debug!(
                    node = change.node,
                    "somebody has written meanwhile what this would change: leaving the Node alone"
                );
                return None;
            }
            let NodeChange { node, uid, annotations, labels } = change;
            debug!(node, ?annotations, ?labels, "writing onto a Node");
            // The newest version, for each heartbeat makes another one.
            let metadata = json!({"annotations": annotations, "labels": labels, "resourceVersion": newest.version});
            let patch = json!({"metadata": metadata});
            let api = api.clone();
            Some(async move {
                let (params, patch) = (patch_params(), Patch::Merge(patch));
                let written =
                    call(format!("metadata of Node {node}"), api.patch_metadata(&node, &params, &patch)).await;
                (uid, gone_is_fine(written).err())
            })
        });
        let (mut failed, mut last) = (Vec::new(), None);
        let mut written = pin!(stream::iter(patches).buffer_unordered(AT_ONCE));
        while let Some((uid, error)) = written.next().await {
            let Some(error) = error else { continue };
            match error.code() {
                // The Node has changed meanwhile: the next round tries again.
                Some(409) => continue,
                // A webhook may hang for this Node alone, and each round would wait for it again.
                None if matches!(error, ApiError::Timeout(_)) => failed.push((uid, AGAIN)),
                None | Some(429) => is_busy.store(true, Ordering::Relaxed),
                Some(400..=403 | 422) => failed.push((uid, AGAIN)),
                Some(_) => failed.push((uid, SOON_AGAIN)),
            }
            last = Some((error, last.map_or(0, |(_, nodes)| nodes) + 1));
        }
        if let Some((error, nodes)) = last {
            warn!(
                error = error_chain(&error),
                kind = self.kind,
                nodes,
                "can't write onto Nodes; the error is the last one's"
            );
        }
        failed
    }
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

    /// Nodes 0, 1, … without labels.
    fn numbered(count: usize) -> Vec<Node> {
        let node = |number: usize| {
            let metadata = json!({"name": number.to_string(), "uid": number.to_string()});
            serde_json::from_value(json!({"metadata": metadata})).unwrap()
        };
        (0..count).map(node).collect()
    }

    /// The change that puts a label onto this Node.
    fn labelled(node: &NodeView) -> NodeChange {
        NodeChange { labels: [("l".to_owned(), Some("v".to_owned()))].into(), ..NodeChange::of(node) }
    }

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
        let changes = observed.each_ref().map(labelled);
        let views = Views::of(now, |node| Some(NodeView::from(&node)));
        let client = Client::new(serve, "default");
        let failed =
            MarkWriter::new(client, "labels").write_all(&views, &observed.each_ref(), changes.into(), None).await;
        assert_eq!(failed, []);
        asked.lock().unwrap().sort();
        assert_eq!(*asked.lock().unwrap(), ["1", "2"], "the version is the newest, for heartbeats change it");
    }

    #[tokio::test]
    async fn no_write_begins_late_or_while_the_api_server_is_away_except_at_the_end() {
        let nodes = numbered(100);
        let observed: Vec<_> = nodes.iter().map(NodeView::from).collect();
        let (observed, changes): (Vec<_>, Vec<_>) = observed.iter().map(|node| (node, labelled(node))).unzip();
        let views = Views::of(nodes, |node| Some(NodeView::from(&node)));
        let in_an_hour = Instant::now() + Duration::from_hours(1);
        for (until, asked_for) in
            [(Some(Instant::now()), 0..=0), (Some(in_an_hour), 1..=2 * AT_ONCE), (None, 100..=100)]
        {
            let asked = Arc::<Mutex<usize>>::default();
            let counted = asked.clone();
            // No request is answered.
            let serve = tower::service_fn(move |_: Request<Body>| {
                *counted.lock().unwrap() += 1;
                async { Err::<Response<Body>, _>(std::io::Error::other("away")) }
            });
            let marks = MarkWriter::new(Client::new(serve, "default"), "labels");
            let failed = marks.write_all(&views, &observed, changes.clone(), until).await;
            assert_eq!(failed, [], "a Node is not left alone because the API server is away");
            let asked = *asked.lock().unwrap();
            assert!(asked_for.contains(&asked), "{until:?}: {asked}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_whose_writes_hang_hold_others_up_once_only() {
        let nodes = numbered(AT_ONCE + 1);
        let observed: Vec<_> = nodes.iter().map(NodeView::from).collect();
        let (observed, changes): (Vec<_>, Vec<_>) = observed.iter().map(|node| (node, labelled(node))).unzip();
        let views = Views::of(nodes, |node| Some(NodeView::from(&node)));
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let seen = asked.clone();
        // Only the last Node is answered for.
        let serve = tower::service_fn(move |request: Request<Body>| {
            let name = request.uri().path().rsplit('/').next().unwrap().to_owned();
            let is_last = name == AT_ONCE.to_string();
            seen.lock().unwrap().push(name);
            async move {
                if !is_last {
                    std::future::pending::<()>().await;
                }
                let body = json!({"metadata": {"name": "any"}}).to_string().into_bytes();
                Ok::<_, std::io::Error>(Response::new(Body::from(body)))
            }
        });
        let mut marks = MarkWriter::new(Client::new(serve, "default"), "labels");
        marks.write(&views, &observed, changes.clone()).await;
        assert_eq!(asked.lock().unwrap().len(), AT_ONCE);
        asked.lock().unwrap().clear();
        marks.write(&views, &observed, changes).await;
        assert_eq!(*asked.lock().unwrap(), [AT_ONCE.to_string()]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_refuses_a_mark_is_left_alone_and_holds_no_other_one_up() {
        let nodes = [200, 409, 403, 503].map(|code| -> Node {
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
        let changes = observed.each_ref().map(labelled);
        let views = Views::of(nodes, |node| Some(NodeView::from(&node)));
        let mut marks = MarkWriter::new(Client::new(serve, "default"), "labels");
        let mut asked_by = async |is_at_the_end: bool| {
            asked.lock().unwrap().clear();
            let (observed, changes) = (observed.each_ref(), changes.to_vec());
            if is_at_the_end {
                marks.write_at_the_end(&views, &observed, changes).await;
            } else {
                marks.write(&views, &observed, changes).await;
            }
            let mut asked = asked.lock().unwrap().clone();
            asked.sort_unstable();
            asked
        };
        assert_eq!(asked_by(false).await, [200, 403, 409, 503]);
        assert_eq!(asked_by(false).await, [200, 409]);
        assert_eq!(asked_by(true).await, [200, 403, 409, 503], "at the end");
        tokio::time::advance(SOON_AGAIN).await;
        assert_eq!(asked_by(false).await, [200, 409, 503], "an error that may pass by itself");
        tokio::time::advance(AGAIN).await;
        assert_eq!(asked_by(false).await, [200, 403, 409, 503]);
    }
}
