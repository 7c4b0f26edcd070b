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

use super::{LONGEST_WRITES, is_unavailable, views::Views};
use base::error_chain;
use cluster::{ApiError, call, gone_is_fine, patch_params};
use model::{eligibility::NodeView, marks::NodeChange, nodes::Nodes};

/// How many Nodes are written concurrently: the end of a large job frees many at once, and when an instance ends there
/// is little time.
const AT_ONCE: usize = 16;
/// The longest time for all writes at the instance's end, when no other write waits for them.
const LONGEST_AT_THE_END: Duration = Duration::from_mins(1);

/// How long all Nodes are left alone if the API server answers for none, and the first pause of a Node whose write has failed. Short, because an autoscaler
/// may take a node with jobs until its annotations are there.
const PAUSE: Duration = Duration::from_secs(10);
/// The longest pause of one Node.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// Writes one kind of mark, annotations or labels, onto Nodes: a Node may refuse one and take the other. A failed write is logged, and stops nothing else.
pub struct MarkWriter {
    client: Client,
    /// For the log.
    kind: &'static str,
    /// No Node is written before this time.
    all_rest_until: Option<Instant>,
    /// Nodes whose writes have failed, by uid.
    pauses: HashMap<String, Pause>,
}

/// How long a Node is left alone after a write that has failed.
struct Pause {
    length: Duration,
    until: Instant,
}

impl Pause {
    /// The pause after another failure, at `now`: twice as long as `before`.
    fn after(before: Option<&Self>, now: Instant) -> Self {
        let length = before.map_or(PAUSE, |before| (2 * before.length).min(LONGEST_PAUSE));
        Self { length, until: now + length }
    }

    /// True from [`LONGEST_PAUSE`] after its end on: then it says nothing about the next failure.
    fn is_forgotten(&self, now: Instant) -> bool {
        now >= self.until + LONGEST_PAUSE
    }
}

/// Which writes have failed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Failures {
    /// uids of the Nodes whose writes the API server has refused, or did not answer in time.
    nodes: Vec<String>,
    /// The API server did not answer for any Node in time, as if a webhook hangs for all of them.
    are_about_all: bool,
}

impl MarkWriter {
    /// No write has failed yet. `kind`: what is written, for the log.
    pub fn new(client: Client, kind: &'static str) -> Self {
        Self { client, kind, all_rest_until: None, pauses: HashMap::new() }
    }

    /// Writes `changes`, which were decided from the Nodes as `observed`. After [`LONGEST_WRITES`], no further write begins. Skips Nodes whose pauses last.
    pub async fn write(&mut self, nodes: &Views<NodeView>, observed: &Nodes<'_>, mut changes: Vec<NodeChange>) {
        let now = Instant::now();
        if self.all_rest_until.is_some_and(|until| now < until) {
            return;
        }
        self.pauses.retain(|_, pause| !pause.is_forgotten(now));
        changes.retain(|change| self.pauses.get(&change.uid).is_none_or(|pause| now >= pause.until));
        let failures = self.write_all(nodes, observed, changes, now + LONGEST_WRITES, false).await;
        let now = Instant::now();
        self.all_rest_until = failures.are_about_all.then_some(now + PAUSE);
        for uid in failures.nodes {
            let pause = Pause::after(self.pauses.get(&uid), now);
            self.pauses.insert(uid, pause);
        }
    }

    /// Writes `changes` at the instance's end, whatever has failed before: the right to write may be gone within a second.
    pub async fn write_at_the_end(&self, nodes: &Views<NodeView>, observed: &Nodes<'_>, changes: Vec<NodeChange>) {
        self.write_all(nodes, observed, changes, Instant::now() + LONGEST_AT_THE_END, true).await;
    }

    /// Writes `changes`. Skips a Node if somebody has written meanwhile what its change concerns: the next round decides again. If one change fails, the
    /// others are still written. Begins no further write from `until` on, nor, unless `insists`, once the API server is away or too busy.
    async fn write_all(
        &self,
        nodes: &Views<NodeView>,
        observed: &Nodes<'_>,
        changes: Vec<NodeChange>,
        until: Instant,
        insists: bool,
    ) -> Failures {
        if changes.is_empty() {
            return Failures::default();
        }
        let api = Api::<Node>::all(self.client.clone());
        let is_away = AtomicBool::new(false);
        let goes_on = |_: &NodeChange| Instant::now() < until && (insists || !is_away.load(Ordering::Relaxed));
        let patches = changes.into_iter().take_while(goes_on).filter_map(|change| {
            let decided_from = observed.with_uid(&change.uid)?;
            let newest = nodes.named(&change.node)?;
            if !change.fits(decided_from, &newest.view) {
                debug!(node = change.node, "somebody has written meanwhile what this would change: skipping the Node");
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
        let (mut failures, mut answered, mut unanswered, mut errors, mut last) = (Failures::default(), 0, 0, 0, None);
        let mut written = pin!(stream::iter(patches).buffer_unordered(AT_ONCE));
        while let Some((uid, error)) = written.next().await {
            let Some(error) = error else {
                answered += 1;
                continue;
            };
            match &error {
                ApiError::Timeout(_) => {
                    unanswered += 1;
                    failures.nodes.push(uid);
                }
                _ if is_unavailable(&error) => is_away.store(true, Ordering::Relaxed),
                // The Node has changed meanwhile: the next round tries again.
                _ if error.code() == Some(409) => {
                    answered += 1;
                    continue;
                }
                _ => {
                    answered += 1;
                    failures.nodes.push(uid);
                }
            }
            errors += 1;
            last = Some(error);
        }
        if let Some(error) = last {
            let error = error_chain(&error);
            warn!(error, kind = self.kind, nodes = errors, "can't write onto Nodes; the error is the last one's");
        }
        failures.are_about_all = answered == 0 && unanswered >= AT_ONCE;
        failures
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
    async fn a_node_that_has_changed_since_the_round_began_is_skipped() {
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
        let mut marks = MarkWriter::new(client, "labels");
        marks.write(&views, &observed.iter().collect(), changes.into()).await;
        assert!(marks.pauses.is_empty());
        asked.lock().unwrap().sort();
        assert_eq!(*asked.lock().unwrap(), ["1", "2"], "the version is the newest, for heartbeats change it");
    }

    #[tokio::test(start_paused = true)]
    async fn no_write_begins_late_or_while_the_api_server_is_away_except_at_the_end() {
        let nodes = numbered(100);
        let observed: Vec<_> = nodes.iter().map(NodeView::from).collect();
        let changes: Vec<_> = observed.iter().map(labelled).collect();
        let observed = observed.iter().collect();
        let views = Views::of(nodes, |node| Some(NodeView::from(&node)));
        let asked = Arc::<Mutex<usize>>::default();
        let counted = asked.clone();
        // No request is answered.
        let serve = tower::service_fn(move |_: Request<Body>| {
            *counted.lock().unwrap() += 1;
            async { Err::<Response<Body>, _>(std::io::Error::other("away")) }
        });
        let mut marks = MarkWriter::new(Client::new(serve, "default"), "labels");
        let failures = marks.write_all(&views, &observed, changes.clone(), Instant::now(), false).await;
        assert_eq!((failures, *asked.lock().unwrap()), (Failures::default(), 0), "too late");
        marks.write(&views, &observed, changes.clone()).await;
        let once = *asked.lock().unwrap();
        assert!((1..=2 * AT_ONCE).contains(&once), "{once}");
        assert!(marks.pauses.is_empty(), "no Node is left alone because the API server is away");
        marks.write_at_the_end(&views, &observed, changes.clone()).await;
        assert_eq!(*asked.lock().unwrap(), once + 100, "at the end");
        marks.write(&views, &observed, changes).await;
        assert!(*asked.lock().unwrap() > once + 100, "the next round tries again");
    }

    /// A writer whose API server never answers for the first `hanging` Nodes, and the names of the Nodes that the API server was asked to write.
    fn with_hanging(hanging: usize) -> (MarkWriter, Arc<Mutex<Vec<usize>>>) {
        let asked = Arc::<Mutex<Vec<usize>>>::default();
        let seen = asked.clone();
        let serve = tower::service_fn(move |request: Request<Body>| {
            let number: usize = request.uri().path().rsplit('/').next().unwrap().parse().unwrap();
            seen.lock().unwrap().push(number);
            async move {
                if number < hanging {
                    std::future::pending::<()>().await;
                }
                let body = json!({"metadata": {"name": "any"}}).to_string().into_bytes();
                Ok::<_, std::io::Error>(Response::new(Body::from(body)))
            }
        });
        (MarkWriter::new(Client::new(serve, "default"), "labels"), asked)
    }

    /// Which Nodes are asked for if the Nodes from `first` to before `end` have changes.
    async fn asked_for(
        (marks, asked): &mut (MarkWriter, Arc<Mutex<Vec<usize>>>),
        first: usize,
        end: usize,
    ) -> Vec<usize> {
        let nodes = numbered(end);
        let observed: Vec<_> = nodes.iter().map(NodeView::from).collect();
        let changes = observed.iter().skip(first).map(labelled).collect();
        let views = Views::of(nodes, |node| Some(NodeView::from(&node)));
        asked.lock().unwrap().clear();
        marks.write(&views, &observed.iter().collect(), changes).await;
        let mut asked = asked.lock().unwrap().clone();
        asked.sort_unstable();
        asked
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_whose_writes_hang_hold_others_up_ever_more_seldom() {
        let mut writer = with_hanging(2);
        let begun = Instant::now();
        let mut tried = Vec::new();
        for _ in 0..100 {
            if asked_for(&mut writer, 0, 2).await == [0, 1] {
                tried.push(begun.elapsed().as_secs());
            }
            assert_eq!(asked_for(&mut writer, 0, 3).await.last(), Some(&2), "another Node");
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let apart: Vec<_> = tried.windows(2).map(|two| two[1] - two[0]).collect();
        assert_eq!(apart, [20, 30, 50], "10 s until the write is given up, and the pause");
    }

    #[tokio::test(start_paused = true)]
    async fn if_no_node_is_answered_for_all_of_them_rest() {
        let mut writer = with_hanging(1000);
        let all: Vec<_> = (0..100).collect();
        assert_eq!(asked_for(&mut writer, 0, 100).await, all[..AT_ONCE]);
        assert!(asked_for(&mut writer, 50, 100).await.is_empty());
        tokio::time::advance(PAUSE).await;
        assert_eq!(asked_for(&mut writer, 50, 100).await, all[50..50 + AT_ONCE]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_refuses_a_mark_is_left_alone_for_a_while_and_holds_no_other_one_up() {
        let nodes = [200, 409, 403, 500].map(|code| -> Node {
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
            let (observed, changes) = (observed.iter().collect(), changes.to_vec());
            if is_at_the_end {
                marks.write_at_the_end(&views, &observed, changes).await;
            } else {
                marks.write(&views, &observed, changes).await;
            }
            let mut asked = asked.lock().unwrap().clone();
            asked.sort_unstable();
            asked
        };
        assert_eq!(asked_by(false).await, [200, 403, 409, 500]);
        assert_eq!(asked_by(false).await, [200, 409]);
        assert_eq!(asked_by(true).await, [200, 403, 409, 500], "at the end");
        tokio::time::advance(PAUSE).await;
        assert_eq!(asked_by(false).await, [200, 403, 409, 500]);
    }
}
