//! Reads what goes into the archive.

use std::collections::BTreeSet;

use api::{
    CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_KEY, CONFIGMAP_ROSTER,
    CONFIGMAP_ROSTER_KEY, FluxInstance, FluxNode, NAMESPACE, NodePhase,
};
use base::{error_chain, words::many};
use cluster::{ApiError, call, clock, store};
use futures::{StreamExt, stream};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    coordination::v1::Lease,
    core::v1::{self, Event, Pod, Secret},
};
use kube::{
    Api, Resource,
    api::{ApiResource, DynamicObject, ListParams, LogParams},
};

use crate::{
    doctor,
    observed::Cluster,
    overview::{Node, overview},
    screen::yaml,
};

/// Most logs, unless all are asked for.
const MOST_LOGS: usize = 30;
/// The last lines of a log.
const LINES: i64 = 20_000;
/// Most bytes of a log.
const LONGEST_LOG: i64 = 8 << 20;
/// Logs that are asked for at once.
const AT_ONCE: usize = 8;

/// A file of the archive.
pub(super) struct Piece {
    pub name: String,
    pub text: String,
}

/// What must not be in the archive.
pub(super) struct Secrets {
    pub values: Vec<Vec<u8>>,
    /// Why they are not known.
    pub note: Option<Piece>,
}

/// The values of all Secrets of our namespace: they are read only to be looked for.
pub(super) async fn secrets(cluster: &Cluster) -> Secrets {
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    match call("list Secrets", secrets.list(&ListParams::default())).await {
        Ok(list) => {
            let data = list.items.into_iter().filter_map(|secret| secret.data);
            Secrets { values: data.flat_map(|data| data.into_values().map(|value| value.0)).collect(), note: None }
        }
        Err(error) => {
            let text = format!(
                "The Secrets could not be read ({}), so only what looks like a secret was taken out.\n",
                error_chain(&error)
            );
            Secrets { values: Vec::new(), note: Some(Piece { name: "READ-BEFORE-SENDING.txt".to_owned(), text }) }
        }
    }
}

/// Everything that helps, each in a file of its own. What can't be read is a file that says why.
pub(super) async fn gather(cluster: &Cluster, all_logs: bool) -> Vec<Piece> {
    let surroundings = cluster.surroundings().await;
    let mut pieces = vec![Piece {
        name: "doctor.txt".to_owned(),
        text: doctor::text(&doctor::checks(&surroundings, clock::now()), u16::MAX),
    }];
    let overview = surroundings.observed.as_ref().map(overview);
    let status = overview.as_ref().map_err(|error| error_chain(*error));
    pieces.push(piece("status.yaml", status.and_then(|seen| yaml(seen).map_err(|error| error_chain(&error)))));
    let documents = [
        (CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY),
        (CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY),
        (CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_KEY),
    ];
    for (name, key) in documents {
        let document = store::read(&cluster.client, name, key).await.map_err(|error| error_chain(&error));
        pieces.push(piece(key, document.and_then(|found| found.map(|found| found.text).ok_or("not there".to_owned()))));
    }
    pieces.push(objects::<FluxInstance>(cluster, true).await);
    pieces.push(objects::<FluxNode>(cluster, true).await);
    pieces.push(objects::<DaemonSet>(cluster, true).await);
    pieces.push(objects::<Pod>(cluster, true).await);
    pieces.push(objects::<Lease>(cluster, true).await);
    pieces.push(objects::<Event>(cluster, true).await);
    pieces.push(objects::<v1::Node>(cluster, false).await);
    let nodes = overview.map_or(Vec::new(), |overview| overview.nodes);
    pieces.extend(logs(cluster, &nodes, all_logs).await);
    pieces
}

fn piece(name: &str, text: Result<String, String>) -> Piece {
    Piece { name: name.to_owned(), text: text.unwrap_or_else(|why| format!("can't be read: {why}\n")) }
}

/// All objects of a kind, as YAML.
async fn objects<K>(cluster: &Cluster, namespaced: bool) -> Piece
where
    K: Resource<DynamicType = ()>,
{
    let resource = ApiResource::erase::<K>(&());
    let client = cluster.client.clone();
    let all: Api<DynamicObject> = match namespaced {
        true => Api::namespaced_with(client, NAMESPACE, &resource),
        false => Api::all_with(client, &resource),
    };
    let listed = call(format!("list {}", resource.plural), all.list(&ListParams::default())).await;
    let text = listed.map_err(|error| error_chain(&error)).and_then(|list| {
        let objects: Vec<_> = list.items.into_iter().map(shown).collect();
        yaml(&objects).map_err(|error| error_chain(&error))
    });
    piece(&format!("{}.yaml", resource.plural), text)
}

/// Without what nobody reads, and without values of environment variables, which other tools may have put there.
fn shown(mut object: DynamicObject) -> DynamicObject {
    const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
    object.metadata.managed_fields = None;
    object.metadata.annotations.as_mut().map(|annotations| annotations.remove(LAST_APPLIED));
    for template in ["", "/spec/template"] {
        for list in ["containers", "initContainers"] {
            let containers = object.data.pointer_mut(&format!("{template}/spec/{list}"));
            for container in containers.and_then(|list| list.as_array_mut()).into_iter().flatten() {
                for variable in container["env"].as_array_mut().into_iter().flatten() {
                    if variable.get("value").is_some() {
                        variable["value"] = "***".into();
                    }
                }
            }
        }
    }
    object
}

/// The logs of the agents, those of the lead and of nodes with trouble first.
async fn logs(cluster: &Cluster, nodes: &[Node], all: bool) -> Vec<Piece> {
    let agents = match cluster.agents().await {
        Ok(agents) => agents,
        Err(error) => return vec![piece("logs.txt", Err(error_chain(&error)))],
    };
    let first: BTreeSet<&str> = nodes
        .iter()
        .filter(|node| node.rank == Some(0) || node.phase != NodePhase::Online)
        .map(|node| node.name.as_str())
        .collect();
    let mut agents: Vec<_> = agents.iter().collect();
    agents.sort_by_key(|agent| (!first.contains(agent.node.as_str()), agent.node.clone()));
    let left_out = if all { 0 } else { agents.len().saturating_sub(MOST_LOGS) };
    agents.truncate(agents.len() - left_out);
    let wanted = agents.iter().flat_map(|agent| [(&agent.name, false), (&agent.name, true)]);
    let mut pieces: Vec<Piece> = stream::iter(wanted)
        .map(|(pod, previous)| async move { Some((pod, previous, log(cluster, pod, previous).await)) })
        .buffered(AT_ONCE)
        // Most containers have none before them.
        .filter_map(|found| async { found.filter(|(_, previous, text)| !previous || text.is_ok()) })
        .map(|(pod, previous, text)| {
            let suffix = if previous { ".previous" } else { "" };
            piece(&format!("logs/{pod}{suffix}.log"), text.map_err(|error| error_chain(&error)))
        })
        .collect()
        .await;
    if left_out > 0 {
        let text = format!("{} left out; --all-logs has them\n", many(left_out as u64, "log"));
        pieces.push(Piece { name: "logs/LEFT-OUT.txt".to_owned(), text });
    }
    pieces
}

async fn log(cluster: &Cluster, pod: &str, previous: bool) -> Result<String, ApiError> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    let parameters = LogParams {
        container: Some("agent".to_owned()),
        tail_lines: Some(LINES),
        limit_bytes: Some(LONGEST_LOG),
        previous,
        timestamps: true,
        ..LogParams::default()
    };
    call(format!("read the log of pod {pod}"), pods.logs(pod, &parameters)).await
}
