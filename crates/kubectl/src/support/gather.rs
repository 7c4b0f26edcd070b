//! Reads what goes into the archive.

use futures::{AsyncReadExt, StreamExt, stream};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    coordination::v1::Lease,
    core::v1::{self, Event, Pod, Secret},
};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams, LogParams},
};
use serde::Serialize;
use serde_json::Value;

use super::looks::MASK;
use crate::{
    doctor,
    error::chain,
    observed::{Cluster, list},
    overview::{Attention, Overview, overview},
};
use api::{
    AGENT_CONTAINER, CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_KEY,
    CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, FluxInstance, FluxNode, NAMESPACE,
};
use base::words::many;
use cluster::{ApiError, call, clock, store};
use model::agents::AgentPod;

/// Most logs, unless all are asked for: an archive of these can still be sent by mail.
const MOST_LOGS: usize = 30;
/// The last lines of a log: an agent writes a few in a minute, so this is more than a day.
const LINES: i64 = 20_000;
/// Most bytes of a log: an agent that fails in a circle may write long lines.
const LONGEST_LOG: i64 = 8 << 20;
/// Logs that are asked for at once: each one is a connection of the API server to a kubelet.
const AT_ONCE: usize = 8;

/// A file of the archive.
#[derive(Debug, PartialEq)]
pub(super) struct BundleFile {
    pub name: String,
    pub content: Content,
}

/// What a file holds.
#[derive(Debug, PartialEq)]
pub(super) enum Content {
    Text(String),
    /// To be written as YAML.
    Tree(Value),
    /// Why it can't be read.
    Unread(String),
}

/// What must not be in the archive: the values of all Secrets of our namespace, by the names of their fields. They are read only to be
/// looked for.
///
/// # Errors
/// Why they can't be read.
pub(super) async fn secrets(cluster: &Cluster) -> Result<Vec<(String, Vec<u8>)>, String> {
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    let found = list(&secrets, "list Secrets", ListParams::default()).await.map_err(|error| chain(&error))?;
    let data = found.into_iter().filter_map(|secret| secret.data);
    Ok(data.flatten().map(|(name, value)| (name, value.0)).collect())
}

/// Everything that helps, each in a file of its own. What can't be read is a file that says why.
pub(super) async fn gather(cluster: &Cluster, all_logs: bool) -> Vec<BundleFile> {
    let inputs = cluster.doctor_inputs().await;
    let checks = doctor::checks(&inputs, clock::now());
    // Text by text, so that what one node has written can't have other nodes' checks masked.
    let mut files = vec![BundleFile { name: "doctor.yaml".to_owned(), content: tree(&checks) }];
    let overview = inputs.observed.as_ref().map(overview);
    files.push(BundleFile {
        name: "status.yaml".to_owned(),
        content: overview.as_ref().map_or_else(|error| Content::Unread(chain(*error)), tree),
    });
    let documents = [
        (CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY),
        (CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY),
        (CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_KEY),
    ];
    for (name, key) in documents {
        let content = match store::read(&cluster.client, name, key).await {
            Ok(Some(found)) => Content::Text(found.text),
            Ok(None) => Content::Text("not there\n".to_owned()),
            Err(error) => Content::Unread(chain(&error)),
        };
        files.push(BundleFile { name: key.to_owned(), content });
    }
    let kinds = [
        ApiResource::erase::<FluxInstance>(&()),
        ApiResource::erase::<FluxNode>(&()),
        ApiResource::erase::<DaemonSet>(&()),
        ApiResource::erase::<Pod>(&()),
        ApiResource::erase::<Lease>(&()),
        ApiResource::erase::<Event>(&()),
    ];
    for kind in kinds {
        files.push(objects(Api::namespaced_with(cluster.client.clone(), NAMESPACE, &kind), &kind.plural).await);
    }
    let nodes = ApiResource::erase::<v1::Node>(&());
    files.push(objects(Api::all_with(cluster.client.clone(), &nodes), &nodes.plural).await);
    match &inputs.agents {
        Ok(agents) => files.extend(logs(cluster, agents, overview.as_ref().ok(), all_logs).await),
        Err(error) => {
            files.push(BundleFile { name: "logs.txt".to_owned(), content: Content::Unread(chain(error)) });
        }
    }
    files
}

fn tree(value: &impl Serialize) -> Content {
    serde_json::to_value(value).map_or_else(|error| Content::Unread(error.to_string()), Content::Tree)
}

/// All objects of a kind, also those of another version.
async fn objects(all: Api<DynamicObject>, kind: &str) -> BundleFile {
    let content = match list(&all, &format!("list {kind}"), ListParams::default()).await {
        Ok(mut found) => {
            found.iter_mut().for_each(|object| drop(object.managed_fields_mut().drain(..)));
            match tree(&found) {
                Content::Tree(mut tree) => {
                    hide(&mut tree);
                    Content::Tree(tree)
                }
                unread => unread,
            }
        }
        Err(error) => Content::Unread(chain(&error)),
    };
    BundleFile { name: format!("{kind}.yaml"), content }
}

/// Takes away values of environment variables and of headers, which other tools may have put there, and copies of whole objects.
fn hide(tree: &mut Value) {
    const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
    match tree {
        Value::Array(items) => items.iter_mut().for_each(hide),
        Value::Object(fields) => {
            fields.remove(LAST_APPLIED);
            for name in ["env", "httpHeaders"] {
                for item in fields.get_mut(name).and_then(Value::as_array_mut).into_iter().flatten() {
                    if let Some(value) = item.get_mut("value") {
                        *value = MASK.into();
                    }
                }
            }
            fields.values_mut().for_each(hide);
        }
        _ => {}
    }
}

/// The pods whose logs are taken, and how many are left out: unless all are asked for, those of the lead and of nodes with trouble come
/// first. Pure.
fn chosen<'a>(agents: &'a [AgentPod], overview: Option<&Overview>, all: bool) -> (Vec<&'a AgentPod>, usize) {
    let place = |agent: &AgentPod| {
        let is_lead = overview.is_some_and(|overview| overview.instance.lead.as_ref() == Some(&agent.node));
        let node = overview.and_then(|overview| overview.nodes.iter().find(|node| node.name == agent.node));
        // A pod without a node of ours, or none that can be read, is trouble too.
        (!is_lead, std::cmp::Reverse(node.map_or(Attention::Look, |node| node.attention)), agent.node.clone())
    };
    let mut chosen: Vec<&AgentPod> = agents.iter().collect();
    chosen.sort_by_cached_key(|agent| place(agent));
    let left_out = if all { 0 } else { chosen.len().saturating_sub(MOST_LOGS) };
    chosen.truncate(agents.len() - left_out);
    (chosen, left_out)
}

/// The logs of the agents, and of the containers that ran before them.
async fn logs(cluster: &Cluster, agents: &[AgentPod], overview: Option<&Overview>, all: bool) -> Vec<BundleFile> {
    let (chosen, left_out) = chosen(agents, overview, all);
    let wanted = chosen.into_iter().flat_map(|agent| [(&agent.name, false), (&agent.name, true)]);
    let mut files: Vec<BundleFile> = stream::iter(wanted)
        .map(|(pod, previous)| async move { (pod, previous, log(cluster, pod, previous).await) })
        .buffered(AT_ONCE)
        .filter_map(|(pod, previous, text)| async move {
            let suffix = if previous { ".previous" } else { "" };
            let name = format!("logs/{pod}{suffix}.log");
            match text {
                Ok(text) => Some(BundleFile { name, content: Content::Text(text) }),
                // Most containers have none before them.
                Err(_) if previous => None,
                Err(error) => Some(BundleFile { name, content: Content::Unread(chain(&error)) }),
            }
        })
        .collect()
        .await;
    if left_out > 0 {
        let text = format!("{} left out; --all-logs has them\n", many(left_out as u64, "log"));
        files.push(BundleFile { name: "logs/LEFT-OUT.txt".to_owned(), content: Content::Text(text) });
    }
    files
}

/// A log. Jobs and libraries may write bytes into it that are no text.
///
/// # Errors
/// The API server fails, or the log doesn't come in time.
async fn log(cluster: &Cluster, pod: &str, previous: bool) -> Result<String, ApiError> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    let parameters = LogParams {
        container: Some(AGENT_CONTAINER.to_owned()),
        tail_lines: Some(LINES),
        limit_bytes: Some(LONGEST_LOG),
        previous,
        timestamps: true,
        ..LogParams::default()
    };
    let bytes = async {
        let mut bytes = Vec::new();
        let mut stream = std::pin::pin!(pods.log_stream(pod, &parameters).await?);
        stream.read_to_end(&mut bytes).await.map_err(kube::Error::ReadEvents)?;
        Ok(bytes)
    };
    Ok(String::from_utf8_lossy(&call(format!("read the log of pod {pod}"), bytes).await?).into_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::{change, observed};

    #[test]
    fn logs_of_the_lead_and_of_nodes_with_trouble_come_first() {
        let mut observed = observed(50, &Value::Null, &Value::Null);
        change(&mut observed, 44, &Value::Null, &json!({"phase": "Failed"}));
        change(&mut observed, 47, &Value::Null, &json!({"phase": "Starting"}));
        let pod = |n: u32| AgentPod { name: format!("p{n}"), node: format!("n{n}"), down: None, has_ended: false };
        let agents: Vec<_> = (1..=50).rev().map(pod).collect();
        let overview = overview(&observed);
        let (some, left_out) = chosen(&agents, Some(&overview), false);
        let names: Vec<_> = some.iter().take(4).map(|agent| agent.name.as_str()).collect();
        assert_eq!((names, some.len(), left_out), (vec!["p1", "p45", "p48", "p10"], 30, 20));
        let (all, left_out) = chosen(&agents, None, true);
        assert_eq!((all.len(), left_out), (50, 0));
    }

    #[test]
    fn no_variable_and_no_header_keeps_its_value() {
        let probe = json!({"httpGet": {"httpHeaders": [{"name": "X", "value": "secret"}]}});
        let container =
            json!({"env": [{"name": "A", "value": "secret"}, {"name": "B", "valueFrom": 1}], "livenessProbe": probe});
        let last = json!({"kubectl.kubernetes.io/last-applied-configuration": "secret", "a": "b"});
        let spec = json!({"containers": [container.clone()], "ephemeralContainers": [container.clone()], "template": {"spec": {"initContainers": [container]}}});
        let mut tree = json!([{"metadata": {"annotations": last}, "spec": spec}]);
        hide(&mut tree);
        let text = tree.to_string();
        assert!(!text.contains("secret") && text.contains("valueFrom") && text.contains(MASK), "{text}");
    }
}
