//! Reads and writes the planner's objects: the roster, `broker.toml`, the packages and each FluxNode's spec.

use std::{
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures::{Stream, StreamExt, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client, ResourceExt, api::Patch};
use serde_json::json;
use tokio::time::Instant;
use tracing::{debug, info};

use api::{
    CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, CONFIGMAP_PACKAGES, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, FluxNode,
    FluxNodeSpec, MOST_DECLARED, NAMESPACE, Roster, RosterEntry, RosterError,
};
use base::error_chain;
use cluster::{
    ApiError, call, certificate, gone_is_fine, merge_patch, of_version, patch_params,
    store::{self, Document},
};
use model::broker_toml;

/// Replaces exactly the roster that was read as `before`, or creates it if that is None. Returns it as it is stored.
///
/// # Errors
/// If the call to the API server fails; with code 409 if another planner wrote the roster first. [`ApiError::UnreadableRoster`]
/// if it could not be read again: many captured nodes can report more cores than all nodes of an instance may have.
pub async fn write_roster(
    client: &Client,
    roster: &Roster,
    before: Option<&Document>,
) -> Result<(Roster, Document), ApiError> {
    let (text, read) = to_text(roster)?;
    info!(revision = roster.revision, epoch = roster.epoch, ranks = roster.ranks.len(), "writing the roster");
    Ok((read, store::write(client, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, text, before).await?))
}

/// The roster as it is stored, and as it is read again from that.
fn to_text(roster: &Roster) -> Result<(String, Roster), ApiError> {
    let unreadable = |reason: String| ApiError::UnreadableRoster { reason };
    if roster.declared_ids() > MOST_DECLARED {
        return Err(unreadable(format!("{}{}", RosterError::TooLarge, largest(roster))));
    }
    let text = serde_json::to_string(roster).map_err(|error| unreadable(error.to_string()))?;
    match Roster::parse(&text) {
        Ok(read) => Ok((text, read)),
        Err(error) => Err(unreadable(format!(
            "{}. A number that only grows has reached its end, which the planner can't have written: see docs/threat-model.md, after a \
             break-in",
            error_chain(&error)
        ))),
    }
}

/// What declares the most, as the end of a sentence with the remedy: the spares, or a rank.
fn largest(roster: &Roster) -> String {
    let of_ranks = roster.ranks.values().map(RosterEntry::declared_ids).sum::<u64>();
    if of_ranks <= MOST_DECLARED {
        return ". Most of them are those of spares: set a smaller spec.spares.shape or spec.maxSize".to_owned();
    }
    let largest = roster.ranks.iter().max_by_key(|(_, entry)| entry.declared_ids());
    largest.map_or_else(String::new, |(rank, entry)| {
        let node = entry.member.as_ref().map_or_else(String::new, |member| format!(" (node {})", member.node));
        format!(
            ". Rank {rank}{node} declares the most: {}. Remove nodes whose hardware is not what they report",
            entry.declared_ids()
        )
    })
}

/// Renders `broker.toml` from the roster and writes it if it differs from `before`, which is what is stored. Returns what is stored then.
///
/// # Errors
/// If a call to the API server fails, with code 409 if `before` is not stored any more; [`ApiError::Content`] if the roster can't be rendered.
pub async fn write_broker_toml(
    client: &Client,
    roster: &Roster,
    before: Option<Document>,
) -> Result<Document, ApiError> {
    let text = broker_toml::render(roster).map_err(|error| ApiError::Content {
        object: format!("ConfigMap {CONFIGMAP_BROKER}"),
        reason: error_chain(&error),
    })?;
    // A planner that has just lost its Lease must not overwrite the newer file of its successor.
    let made_from = |document: &Document| broker_toml::made_from(&document.text, &roster.instance_id);
    let is_newer = |document: &Document| made_from(document) > Some((roster.epoch, roster.revision));
    match before {
        Some(before) if before.text == text || is_newer(&before) => Ok(before),
        before => store::write(client, CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, text, before.as_ref()).await,
    }
}

/// How many FluxNodes are written at once: so many that those of 5,000 nodes are written within seconds, and so few that agents' reports still get their
/// part of the priority level that both share (`deploy/parts/3-flow-control.yaml`).
const AT_ONCE: usize = 16;

/// Writes the FluxNodes' specs that have changed. Yields each FluxNode's name and the result, in any order. The first one, which is the
/// lead's or that of the likeliest lead, is written before all others, and even after `until`. A FluxNode that can't be written keeps no other one back. But if the API server does not answer or is
/// too busy, or from `until` on, no further write begins; those under way are awaited, so that none of them can overtake one of a later round.
pub fn write_nodes<'a>(
    client: &'a Client,
    projected: Vec<(&'a FluxNode, FluxNodeSpec)>,
    until: Instant,
) -> impl Stream<Item = (String, Result<(), ApiError>)> + Send + 'a {
    let mut projected = projected.into_iter();
    let lead = projected.next();
    let is_left_alone = Arc::new(AtomicBool::new(false));
    let seen = is_left_alone.clone();
    let write = move |(node, spec): (&'a FluxNode, FluxNodeSpec)| {
        let is_left_alone = is_left_alone.clone();
        async move {
            let written = write_node(client, node, &spec).await;
            if written.as_ref().is_err_and(|error| matches!(error.code(), None | Some(429))) {
                is_left_alone.store(true, Ordering::Relaxed);
            }
            (node.name_any(), written)
        }
    };
    let others =
        stream::iter(projected).take_while(move |_| ready(!seen.load(Ordering::Relaxed) && Instant::now() < until));
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

/// Deletes the FluxNode of a Node that is gone. `resource_version`: that which was read.
///
/// # Errors
/// The API server's; code 409 where it has changed since it was read: its agent may be back.
pub async fn delete_node(client: &Client, node: &FluxNode, resource_version: Option<String>) -> Result<(), ApiError> {
    let nodes: Api<FluxNode> = Api::namespaced(client.clone(), NAMESPACE);
    let name = node.name_any();
    info!(node = name, "the Node is gone for good: deleting its FluxNode");
    let as_read = of_version(&ObjectMeta { resource_version, ..node.metadata.clone() });
    gone_is_fine(call(format!("delete FluxNode {name}"), nodes.delete(&name, &as_read)).await)
}

/// Deletes the ConfigMaps and the certificate that the planner made for an instance that is gone from every host, so
/// that the next instance gets its own.
///
/// # Errors
/// If a call to the API server fails; with code 409 if one of the objects has changed meanwhile.
pub async fn forget_instance(client: &Client) -> Result<(), ApiError> {
    for map in [CONFIGMAP_ROSTER, CONFIGMAP_BROKER, CONFIGMAP_PACKAGES] {
        store::delete(client, map).await?;
    }
    certificate::forget(client).await
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Mutex, time::Duration};

    use http::{Request, Response};
    use kube::client::Body;
    use model::fixture::roster;

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
        let written: Vec<_> = write_nodes(&client, projected, Instant::now() + limit).collect().await;
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

    #[test]
    fn a_roster_that_could_not_be_read_again_is_not_written_and_names_who_reports_the_most() {
        let names: Vec<String> = (0..260).map(|number| format!("node{number}")).collect();
        let mut nodes: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 65_000)).collect();
        assert!(to_text(&roster(256, &nodes[..256])).is_ok());
        nodes[7].1 = 65_536;
        let error = error_chain(&to_text(&roster(300, &nodes)).unwrap_err());
        assert!(
            error.contains("its ranks, spares among them, declare more than 16777216 ids of cores and GPUs"),
            "{error}"
        );
        let end = Roster { revision: u64::MAX, ..roster(2, &nodes[..2]) };
        let last = error_chain(&to_text(&end).unwrap_err());
        assert!(last.contains("an epoch or revision is 18446744073709551615") && !last.contains("ank "), "{last}");
        assert!(error.contains(". Rank 7 (node node7) declares the most: 65536. Remove nodes"), "{error}");
    }
}
