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
    refused: BTreeMap<String, Refused>,
    /// Those that nothing needs any more, and since when, or when their deletion last failed.
    stale: HashMap<String, Instant>,
}

/// A FluxNode that could not be written.
struct Refused {
    /// The first failed attempt.
    since: Instant,
    /// The last one: a round may end before its turn comes again.
    last: Instant,
    why: String,
}

impl FluxNodeWriter {
    /// Nothing is known of any FluxNode yet.
    pub fn new(client: Client) -> Self {
        Self { client, refused: BTreeMap::new(), stale: HashMap::new() }
    }

    /// Writes the specs that have changed, for [`LONGEST_WRITES`]. A FluxNode that can't be written, perhaps because its own agent has filled it, stops
    /// no other one; see [`FluxNodeWriter::unusable`].
    pub async fn write(&mut self, projected: Vec<(&FluxNode, FluxNodeSpec)>) {
        // None, in nearly all rounds.
        if !self.refused.is_empty() {
            let names: BTreeSet<_> = projected.iter().map(|(flux_node, _)| flux_node.name_any()).collect();
            // The planner does not write the others any more.
            self.refused.retain(|name, _| names.contains(name));
        }
        let client = self.client.clone();
        let mut written = pin!(write_all(&client, projected, Instant::now() + LONGEST_WRITES));
        while let Some((name, result)) = written.next().await {
            match result {
                Ok(()) => drop(self.refused.remove(&name)),
                Err(error) => self.remember_failure(name, error_chain(&error)),
            }
        }
    }

    /// Remembers that FluxNode `name` could not be written, and why.
    fn remember_failure(&mut self, name: String, why: String) {
        let now = Instant::now();
        match self.refused.entry(name) {
            Entry::Occupied(mut known) => {
                let known = known.get_mut();
                (known.last, known.why) = (now, why);
            }
            Entry::Vacant(new) => {
                warn!(error = why, "can't write a FluxNode");
                new.insert(Refused { since: now, last: now, why });
            }
        }
    }

    /// The FluxNodes that can't be read, or have not been written for [`REPORT_AFTER`].
    pub fn unusable(&self, flux_nodes: &[Arc<ReadNode>]) -> BTreeMap<String, Unusable> {
        let refused = self.refused.iter().filter(|(_, refused)| refused.last - refused.since >= REPORT_AFTER);
        let refused = refused.map(|(name, refused)| (name.clone(), Unusable::NotWritten(refused.why.clone())));
        unreadable(flux_nodes).map(|name| (name, Unusable::NotRead)).chain(refused).collect()
    }

    /// Deletes FluxNodes that have been stale for as long as a rank would be kept (`spec.ranks.retain`). One that can't be deleted keeps nothing else
    /// from being written, and is tried again after the same time.
    pub async fn delete_stale(&mut self, cached: &Views<ReadNode>, seen: &Observed<'_>, planned: Option<&Planned<'_>>) {
        let retain = Duration::from_secs(retain_secs(seen.spec).unsigned_abs());
        let stale = forsaken(seen, planned);
        let until = Instant::now() + LONGEST_WRITES;
        self.stale.retain(|name, _| stale.contains(name));
        for name in stale {
            let since = *self.stale.entry(name.clone()).or_insert_with(Instant::now);
            if since.elapsed() >= retain
                && Instant::now() < until
                && let Some(newest) = cached.named(&name)
                && let Ok(node) = &*newest.view
                // With another report than the observed one, its agent may be back.
                && seen.report(&name) == Some(&node.status.clone().unwrap_or_default())
                && let Err(error) = delete(&self.client, node, newest.version).await
            {
                warn!(node = name, error = error_chain(&error), "can't delete the FluxNode of a Node that is gone");
                self.stale.insert(name, Instant::now());
            }
        }
    }
}

/// Writes the FluxNodes' specs that have changed, and yields each FluxNode's name and result, in any order. The first of `projected` is the lead's
/// or the likeliest lead's: it is written before all others, and even after `until`. A failed write keeps no other one back, unless the API server
/// does not answer or is too busy. Then, and from `until` on, no further write begins. Those under way are awaited, so that none can overtake one of
/// a later round.
fn write_all<'a>(
    client: &'a Client,
    projected: Vec<(&'a FluxNode, FluxNodeSpec)>,
    until: Instant,
) -> impl Stream<Item = (String, Result<(), ApiError>)> + Send + 'a {
    let mut projected = projected.into_iter();
    let lead = projected.next();
    let is_busy = Arc::new(AtomicBool::new(false));
    let busy = is_busy.clone();
    let write = move |(node, spec): (&'a FluxNode, FluxNodeSpec)| {
        let is_busy = is_busy.clone();
        async move {
            let written = write_node(client, node, &spec).await;
            if written.as_ref().is_err_and(|error| matches!(error.code(), None | Some(429))) {
                is_busy.store(true, Ordering::Relaxed);
            }
            (node.name_any(), written)
        }
    };
    let others =
        stream::iter(projected).take_while(move |_| ready(!busy.load(Ordering::Relaxed) && Instant::now() < until));
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

    /// An API server that knows FluxNodes by their names, and what it was asked.
    #[derive(Default)]
    struct Asked {
        names: Vec<String>,
        under_way: usize,
        most_at_once: usize,
    }

    const ANSWERS_AFTER: Duration = Duration::from_millis(5);
    const AN_HOUR: Duration = Duration::from_hours(1);

    /// Writes node0 to node99, of which the API server answers for node7 with this code, or never. Begins no write after `limit`. Returns the
    /// names of those that could not be written, and what it was asked.
    async fn write_100(code: Option<u16>, limit: Duration) -> (BTreeSet<String>, Arc<Mutex<Asked>>) {
        let asked = Arc::<Mutex<Asked>>::default();
        let server = asked.clone();
        let serve = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move {
                let name = request.uri().path().rsplit('/').next().unwrap().to_owned();
                let count = |by: isize| {
                    let mut server = server.lock().unwrap();
                    server.under_way = server.under_way.wrapping_add_signed(by);
                    server.most_at_once = server.most_at_once.max(server.under_way);
                };
                server.lock().unwrap().names.push(name.clone());
                count(1);
                tokio::time::sleep(ANSWERS_AFTER).await;
                if name == "node7" && code.is_none() {
                    std::future::pending::<()>().await;
                }
                count(-1);
                let refused = code.filter(|_| name == "node7");
                let body = match refused {
                    Some(code) => json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                                         "message": "no", "reason": "Forbidden"}),
                    None => json!(FluxNode::new(&name, FluxNodeSpec::default())),
                };
                let response = Response::builder().status(refused.unwrap_or(200));
                Ok::<_, std::io::Error>(response.body(Body::from(body.to_string().into_bytes())).unwrap())
            }
        });
        let client = Client::new(serve, NAMESPACE);
        let node = |number: u32| {
            let node_name = format!("node{number}");
            FluxNode::new(&node_name, FluxNodeSpec { node_name: node_name.clone(), ..FluxNodeSpec::default() })
        };
        let nodes: Vec<_> = (0..100).map(node).collect();
        let projected = nodes.iter().map(|node| (node, FluxNodeSpec { revision: 1, ..node.spec.clone() })).collect();
        let written: Vec<_> = write_all(&client, projected, Instant::now() + limit).collect().await;
        let failed = written.into_iter().filter(|(_, result)| result.is_err()).map(|(name, _)| name).collect();
        (failed, asked)
    }

    #[tokio::test(start_paused = true)]
    async fn a_flux_node_that_can_not_be_written_keeps_no_other_one_back() {
        for code in [422, 403, 500] {
            let (failed, asked) = write_100(Some(code), AN_HOUR).await;
            let asked = asked.lock().unwrap();
            assert_eq!(failed, BTreeSet::from(["node7".to_owned()]), "{code}");
            assert_eq!((asked.names.len(), asked.most_at_once), (100, AT_ONCE), "{code}");
            assert_eq!(asked.names[0], "node0", "the lead's is written first");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_further_flux_node_is_written_while_the_api_server_is_busy() {
        let (failed, asked) = write_100(Some(429), AN_HOUR).await;
        assert_eq!(failed, BTreeSet::from(["node7".to_owned()]));
        let names = asked.lock().unwrap().names.clone();
        assert!(names.len() <= 2 * AT_ONCE, "{names:?}");
        // One that is never answered holds nobody up.
        let (failed, asked) = write_100(None, AN_HOUR).await;
        assert_eq!((failed.len(), asked.lock().unwrap().names.len()), (1, 100));
    }

    #[tokio::test(start_paused = true)]
    async fn writes_of_flux_nodes_end_with_their_time_and_those_under_way_are_awaited() {
        // The lead's by itself, and then as many as are written at once.
        let (failed, asked) = write_100(Some(422), ANSWERS_AFTER * 2).await;
        let asked = asked.lock().unwrap();
        assert_eq!((failed.len(), asked.names.len(), asked.under_way), (1, 1 + AT_ONCE, 0));
    }
}
