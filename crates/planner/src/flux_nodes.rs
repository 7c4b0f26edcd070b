//! Writes the FluxNodes' specs, and deletes the FluxNodes of Nodes that are gone.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, btree_map::Entry},
    future::ready,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client, ResourceExt, api::Patch};
use serde_json::json;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::{
    LONGEST_WRITES,
    caches::{ReadNode, unreadable},
    is_unavailable,
    views::Views,
};
use api::{FluxNode, FluxNodeSpec, NAMESPACE};
use base::error_chain;
use cluster::{ApiError, call, gone_is_fine, merge_patch, of_version, patch_params};
use model::{
    forsaken::forsaken,
    members::Planned,
    observed::{Observed, Unusable, retain_secs},
};

/// How many FluxNodes are written at once: so many that those of 5,000 nodes are written within seconds, and so few that agents' reports still get their
/// part of the priority level that both share (`deploy/parts/3-flow-control.yaml`).
const AT_ONCE: usize = 16;
/// A FluxNode that can't be written is reported after this long: most failures are over sooner.
const REPORT_AFTER: Duration = Duration::from_secs(10);

/// Writes FluxNodes' specs and deletes stale FluxNodes. Remembers which ones could not be written, and since when.
pub struct FluxNodeWriter {
    client: Client,
    /// Those that could not be written, by name.
    failed: BTreeMap<String, FailedWrites>,
    /// Those that nothing needs any more, and since when, or when their deletion last failed.
    stale: HashMap<String, Instant>,
}

/// What is known of a FluxNode that could not be written.
struct FailedWrites {
    /// The first failed attempt.
    since: Instant,
    /// The last one: a round may end before its turn comes again.
    last: Instant,
    why: String,
}

impl FluxNodeWriter {
    /// Nothing is known of any FluxNode yet.
    pub fn new(client: Client) -> Self {
        Self { client, failed: BTreeMap::new(), stale: HashMap::new() }
    }

    /// Writes the specs that have changed. After [`LONGEST_WRITES`], no further write begins. A FluxNode that can't be written, perhaps because its own
    /// agent has filled it, keeps no other one back; see [`FluxNodeWriter::unusable`].
    pub async fn write(&mut self, mut projected: Vec<(&FluxNode, FluxNodeSpec)>) {
        // Collecting the names of thousands of FluxNodes takes time, and in most rounds no write has failed before.
        if !self.failed.is_empty() {
            let names: BTreeSet<_> = projected.iter().map(|(flux_node, _)| flux_node.name_any()).collect();
            // The planner does not write the others any more.
            self.failed.retain(|name, _| names.contains(name));
            // Those that have failed come last: if they hang again, they must not take the others' time. The lead's stays the first.
            if let Some((_, others)) = projected.split_first_mut() {
                others.sort_by_key(|(flux_node, _)| self.failed.contains_key(&flux_node.name_any()));
            }
        }
        let client = self.client.clone();
        let mut written = pin!(write_all(&client, projected));
        while let Some((name, result)) = written.next().await {
            match result {
                Ok(()) => drop(self.failed.remove(&name)),
                Err(error) => self.remember_failure(name, error_chain(&error)),
            }
        }
    }

    /// Remembers that FluxNode `name` could not be written, and why.
    fn remember_failure(&mut self, name: String, why: String) {
        let now = Instant::now();
        match self.failed.entry(name) {
            Entry::Occupied(mut known) => {
                let known = known.get_mut();
                (known.last, known.why) = (now, why);
            }
            Entry::Vacant(new) => {
                warn!(error = why, "can't write a FluxNode");
                new.insert(FailedWrites { since: now, last: now, why });
            }
        }
    }

    /// The FluxNodes that can't be read, or have not been written for [`REPORT_AFTER`].
    pub fn unusable(&self, flux_nodes: &[Arc<ReadNode>]) -> BTreeMap<String, Unusable> {
        let failed = self.failed.iter().filter(|(_, failed)| failed.last - failed.since >= REPORT_AFTER);
        let failed = failed.map(|(name, failed)| (name.clone(), Unusable::NotWritten(failed.why.clone())));
        unreadable(flux_nodes).map(|name| (name, Unusable::NotRead)).chain(failed).collect()
    }

    /// Deletes FluxNodes that have been stale for as long as a rank would be kept (`spec.ranks.retain`). One that can't be deleted keeps nothing else
    /// from being written, and is tried again after the same time, but already in the next round if the FluxNode had changed or the API server was away.
    pub async fn delete_stale(&mut self, cached: &Views<ReadNode>, seen: &Observed<'_>, planned: Option<&Planned<'_>>) {
        let retain = Duration::from_secs(retain_secs(seen.spec).unsigned_abs());
        let stale = forsaken(seen, planned);
        let until = Instant::now() + LONGEST_WRITES;
        self.stale.retain(|name, _| stale.contains(name));
        let mut is_away = false;
        for name in stale {
            let since = *self.stale.entry(name.clone()).or_insert_with(Instant::now);
            if since.elapsed() >= retain
                && !is_away
                && Instant::now() < until
                && let Some(newest) = cached.named(&name)
                && let Ok(node) = &*newest.view
                // With another report than the observed one, its agent may be back.
                && seen.report(&name) == Some(&node.status.clone().unwrap_or_default())
                && let Err(error) = delete(&self.client, node, newest.version).await
            {
                warn!(node = name, error = error_chain(&error), "can't delete the FluxNode of a Node that is gone");
                is_away = is_unavailable(&error);
                if !is_away && error.code() != Some(409) {
                    self.stale.insert(name, Instant::now());
                }
            }
        }
    }
}

/// Writes the FluxNodes' specs that have changed, and yields each FluxNode's name and result, in any order. The first of `projected` is the lead's
/// or the likeliest lead's, and is written before all others. A failed write keeps no other one back, unless the API server is away or too busy. Then,
/// and once the others have had [`LONGEST_WRITES`], no further write begins. Those under way are awaited, so that none can overtake one of a later round. If
/// the round is dropped, one may; the round after it then writes that FluxNode again.
fn write_all<'a>(
    client: &'a Client,
    projected: Vec<(&'a FluxNode, FluxNodeSpec)>,
) -> impl Stream<Item = (String, Result<(), ApiError>)> + Send + 'a {
    let mut projected = projected.into_iter();
    let lead = projected.next();
    let is_away = Arc::new(AtomicBool::new(false));
    let away = is_away.clone();
    let write = move |(node, spec): (&'a FluxNode, FluxNodeSpec)| {
        let is_away = is_away.clone();
        async move {
            let written = write_node(client, node, &spec).await;
            if written.as_ref().is_err_and(is_unavailable) {
                is_away.store(true, Ordering::Relaxed);
            }
            (node.name_any(), written)
        }
    };
    let mut until = None;
    let others = stream::iter(projected).take_while(move |_| {
        let until = *until.get_or_insert_with(|| Instant::now() + LONGEST_WRITES);
        ready(!away.load(Ordering::Relaxed) && Instant::now() < until)
    });
    stream::iter(lead).then(write.clone()).chain(others.map(write).buffer_unordered(AT_ONCE))
}

/// Writes a FluxNode's spec if it has changed.
///
/// # Errors
/// If the call to the API server fails. That the FluxNode is gone is no error.
async fn write_node(client: &Client, node: &FluxNode, spec: &FluxNodeSpec) -> Result<(), ApiError> {
    if node.spec == *spec {
        return Ok(());
    }
    let name = node.name_any();
    debug!(node = name, ?spec, "projecting the roster");
    let nodes: Api<FluxNode> = Api::namespaced(client.clone(), NAMESPACE);
    let change = merge_patch(&json!(node.spec), &json!(spec));
    let (params, patch) = (patch_params(), Patch::Merge(json!({"spec": change})));
    // If the agent or a user has deleted the FluxNode, the agent creates it again if it still needs it.
    gone_is_fine(call(format!("spec of FluxNode {name}"), nodes.patch(&name, &params, &patch)).await)
}

/// Deletes the FluxNode of a Node that is gone. `resource_version`: of the FluxNode as it was read.
///
/// # Errors
/// If the call to the API server fails; with code 409 if the FluxNode has changed since it was read: its agent may be back.
async fn delete(client: &Client, node: &FluxNode, resource_version: Option<String>) -> Result<(), ApiError> {
    let nodes: Api<FluxNode> = Api::namespaced(client.clone(), NAMESPACE);
    let name = node.name_any();
    info!(node = name, "the Node is gone for good: deleting its FluxNode");
    let as_read = of_version(&ObjectMeta { resource_version, ..node.metadata.clone() });
    gone_is_fine(call(format!("delete FluxNode {name}"), nodes.delete(&name, &as_read)).await)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use http::{Request, Response};
    use kube::client::Body;

    use super::*;

    /// What an API server was asked.
    #[derive(Default)]
    struct Asked {
        names: Vec<String>,
        under_way: usize,
        most_at_once: usize,
    }

    /// What the API server answers for one FluxNode.
    #[derive(Clone, Copy)]
    struct OddAnswer {
        name: &'static str,
        /// None: it never answers.
        code: Option<u16>,
    }

    /// Has `writer` write node0, which is the lead's, to node99.
    async fn write_100(writer: &mut FluxNodeWriter) {
        let node = |number: u32| {
            let node_name = format!("node{number}");
            FluxNode::new(&node_name, FluxNodeSpec { node_name: node_name.clone(), ..FluxNodeSpec::default() })
        };
        let nodes: Vec<_> = (0..100).map(node).collect();
        writer
            .write(nodes.iter().map(|node| (node, FluxNodeSpec { revision: 1, ..node.spec.clone() })).collect())
            .await;
    }

    /// A writer, and what its API server is asked. That answers each request after `answers_after`, but for one FluxNode.
    fn writer_with(answers_after: Duration, odd: OddAnswer) -> (FluxNodeWriter, Arc<Mutex<Asked>>) {
        let asked = Arc::<Mutex<Asked>>::default();
        let seen = asked.clone();
        let serve = tower::service_fn(move |request: Request<Body>| {
            let seen = seen.clone();
            async move {
                let name = request.uri().path().rsplit('/').next().unwrap().to_owned();
                let is_odd = name == odd.name;
                {
                    let mut seen = seen.lock().unwrap();
                    seen.names.push(name.clone());
                    seen.under_way += 1;
                    seen.most_at_once = seen.most_at_once.max(seen.under_way);
                }
                tokio::time::sleep(answers_after).await;
                if is_odd && odd.code.is_none() {
                    std::future::pending::<()>().await;
                }
                seen.lock().unwrap().under_way -= 1;
                let refused = odd.code.filter(|_| is_odd);
                let body = match refused {
                    Some(code) => json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                                         "message": "no", "reason": "Forbidden"}),
                    None => json!(FluxNode::new(&name, FluxNodeSpec::default())),
                };
                let response = Response::builder().status(refused.unwrap_or(200));
                Ok::<_, std::io::Error>(response.body(Body::from(body.to_string().into_bytes())).unwrap())
            }
        });
        (FluxNodeWriter::new(Client::new(serve, NAMESPACE)), asked)
    }

    const SOON: Duration = Duration::from_millis(5);

    #[tokio::test(start_paused = true)]
    async fn a_flux_node_that_can_not_be_written_keeps_no_other_one_back() {
        for code in [422, 403, 500] {
            let (mut writer, asked) = writer_with(SOON, OddAnswer { name: "node7", code: Some(code) });
            write_100(&mut writer).await;
            let asked = asked.lock().unwrap();
            assert_eq!(writer.failed.keys().collect::<Vec<_>>(), ["node7"], "{code}");
            assert_eq!((asked.names.len(), asked.most_at_once), (100, AT_ONCE), "{code}");
            assert_eq!(asked.names[0], "node0", "the lead's is written first");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flux_node_whose_write_hangs_lets_all_others_be_written() {
        for name in ["node0", "node7"] {
            let (mut writer, asked) = writer_with(SOON, OddAnswer { name, code: None });
            write_100(&mut writer).await;
            assert_eq!(asked.lock().unwrap().names.len(), 100, "{name}");
            assert_eq!(writer.failed.keys().collect::<Vec<_>>(), [name]);
            write_100(&mut writer).await;
            assert!(writer.unusable(&[]).contains_key(name), "it is reported");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_further_flux_node_is_written_while_the_api_server_is_busy() {
        let (mut writer, asked) = writer_with(SOON, OddAnswer { name: "node7", code: Some(429) });
        write_100(&mut writer).await;
        assert_eq!(writer.failed.keys().collect::<Vec<_>>(), ["node7"]);
        let names = asked.lock().unwrap().names.clone();
        assert!(names.len() <= 2 * AT_ONCE, "{names:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_flux_node_whose_write_has_failed_comes_after_all_others_but_the_leads_stays_the_first() {
        for (name, last) in [("node7", "node7"), ("node0", "node99")] {
            let (mut writer, asked) = writer_with(SOON, OddAnswer { name, code: Some(422) });
            write_100(&mut writer).await;
            asked.lock().unwrap().names.clear();
            write_100(&mut writer).await;
            let names = asked.lock().unwrap().names.clone();
            assert_eq!((names.len(), names[0].as_str(), names[99].as_str()), (100, "node0", last));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn writes_of_flux_nodes_end_with_their_time_and_those_under_way_are_awaited() {
        let (mut writer, asked) = writer_with(LONGEST_WRITES, OddAnswer { name: "node7", code: Some(422) });
        write_100(&mut writer).await;
        let asked = asked.lock().unwrap();
        // The lead's by itself, and then as many as are written at once.
        assert_eq!((writer.failed.len(), asked.names.len(), asked.under_way), (1, 1 + AT_ONCE, 0));
    }
}
