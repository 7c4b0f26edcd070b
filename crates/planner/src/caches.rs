//! The objects that the planner watches, cached.

use std::{future::ready, sync::Arc, time::Duration};

use futures::{Stream, StreamExt, stream::select_all};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::{DeserializeGuard, error_boundary::InvalidObject},
    runtime::{WatchStreamExt, reflector, reflector::Store, watcher},
};
use tokio::time::timeout;
use tracing::warn;

use super::views::{Views, arrived, watch_views};
use api::{AGENT_SELECTOR, FluxInstance, FluxNode, INSTANCE, NAMESPACE, NodePhase};
use model::{agents::AgentPod, eligibility::NodeView};

/// Longest text of a FluxNode's status that is copied, in bytes.
const LONGEST_TEXT: usize = 8192;

/// A FluxNode without its resourceVersion; Err, with its name, if this version can't read it, so that it doesn't hide the others.
pub(super) type ReadNode = Result<FluxNode, String>;

/// The watched objects, as last received from the API server.
pub(super) struct Caches {
    pub(super) nodes: Views<NodeView>,
    pub(super) flux_nodes: Views<ReadNode>,
    pub(super) instances: Store<FluxInstance>,
    /// The agents' pods that run on a node. Empty if they can't be read, because an older manifest does not grant that right.
    pub(super) pods: Views<AgentPod>,
    /// Only our own Namespace.
    namespaces: Store<Namespace>,
}

impl Caches {
    /// Returns empty caches, and a stream that fills them while it is polled. It yields an item for each change that
    /// planning may depend on.
    pub(super) fn watch(client: &Client) -> (Self, impl Stream<Item = ()> + Send + use<>) {
        let all = watcher::Config::default;
        let (nodes, node_changes) =
            watch_views(Api::<Node>::all(client.clone()), all(), |node| Some(NodeView::from(&node)));
        let (flux_nodes, flux_node_changes) =
            watch_views(Api::namespaced(client.clone(), NAMESPACE), all(), |node| Some(read(node)));
        let (instances, instance_changes) = watch(Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE), all());
        let ours = all().fields(&format!("metadata.name={NAMESPACE}"));
        let (namespaces, namespace_changes) = watch(Api::<Namespace>::all(client.clone()), ours);
        let agents = all().labels(AGENT_SELECTOR);
        let pods = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
        let (pods, pod_changes) = watch_views(pods, agents, |pod| AgentPod::of(&pod));
        let changes = [
            node_changes.boxed(),
            flux_node_changes.boxed(),
            instance_changes.map(drop).boxed(),
            namespace_changes.map(drop).boxed(),
            pod_changes.boxed(),
        ];
        (Self { nodes, flux_nodes, instances, pods, namespaces }, select_all(changes))
    }

    /// True if there is no instance, or it is being deleted, or the Namespace is.
    pub(super) fn is_over(&self) -> bool {
        let is_ending = self.namespaces.state().iter().any(|ours| ours.metadata.deletion_timestamp.is_some());
        let stays = |flux: &FluxInstance| flux.name_any() == INSTANCE && flux.metadata.deletion_timestamp.is_none();
        is_ending || !self.instances.state().iter().any(|flux| stays(flux))
    }

    /// True once Nodes, FluxNodes and FluxInstances have been listed: before that, a missing object proves nothing. It
    /// doesn't wait for the Namespace and the pods, because no decision follows from a missing Namespace or an empty
    /// list of pods.
    pub(super) async fn are_complete(&self) -> bool {
        let instances = timeout(Duration::from_millis(1), self.instances.wait_until_ready());
        self.nodes.are_complete() && self.flux_nodes.are_complete() && instances.await.is_ok()
    }
}

/// The FluxNodes that this version can read. The planner leaves the others alone, as if their agents had not reported
/// yet, because the version that wrote them may still use them.
pub(super) fn readable(nodes: &[Arc<ReadNode>]) -> impl Iterator<Item = &FluxNode> {
    nodes.iter().filter_map(|node| node.as_ref().as_ref().ok())
}

/// The names of the FluxNodes that this version can't read.
pub(super) fn unreadable(nodes: &[Arc<ReadNode>]) -> impl Iterator<Item = String> {
    nodes.iter().filter_map(|node| node.as_ref().as_ref().err().cloned())
}

/// All of a FluxNode that planning may depend on.
fn read(node: DeserializeGuard<FluxNode>) -> ReadNode {
    let name = node.name_any();
    match node.0 {
        Ok(mut node) => {
            keep_for_planning(&mut node);
            Ok(node)
        }
        Err(InvalidObject { error, .. }) => {
            let advice = "finish the upgrade, or delete it: its agent makes it again";
            warn!(node = name, error, "this version can't read a FluxNode: {advice}");
            Err(name)
        }
    }
}

/// Drops account and counts of jobs, on which planning does not depend and which change every few seconds, and cuts texts that no agent of ours
/// writes that long. The planner copies them into the FluxInstance's status and into the specs of other
/// FluxNodes, which have to fit into etcd. Sets of ranks stay whole: a part of one says that jobs run nowhere else.
fn keep_for_planning(node: &mut FluxNode) {
    (node.metadata.resource_version, node.metadata.managed_fields) = (None, None);
    let Some(status) = &mut node.status else { return };
    (status.account, status.jobs) = (None, None);
    let phase = if let NodePhase::Other(word) = &mut status.phase { Some(word) } else { None };
    let last_words = status.lead_failed.as_mut().and_then(|failed| failed.last_words.as_mut());
    let of_pods = status.pods.as_mut().map(|pods| [pods.waits_for.as_mut(), pods.placeholder_refused.as_mut()]);
    let [waits_for, placeholder_refused] = of_pods.unwrap_or_default();
    let dump = status.dump.as_mut().map(|dump| &mut dump.name);
    let prefix = status.facts.as_mut().map(|facts| &mut facts.prefix);
    let new_instance = status.takeover.as_mut().and_then(|takeover| takeover.new_instance_id.as_mut());
    let own = [
        &mut status.message,
        &mut status.flux_version,
        &mut status.held_back_job,
        &mut status.stopped_queues,
        &mut status.restart_pending,
        &mut status.lacks_packages,
        &mut status.damage,
    ];
    let own = own.into_iter().filter_map(Option::as_mut).chain(status.rejected.values_mut());
    for text in
        own.chain([phase, last_words, waits_for, placeholder_refused, dump, prefix, new_instance].into_iter().flatten())
    {
        text.truncate(text.floor_char_boundary(LONGEST_TEXT));
    }
}

/// An empty cache, and the stream that fills it.
fn watch<K>(api: Api<K>, config: watcher::Config) -> (Store<K>, impl Stream<Item = watcher::Event<K>> + Send)
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + Sync + 'static,
{
    let (store, writer) = reflector::store();
    let changes = watcher(api, config).default_backoff().reflect(writer).filter_map(|event| ready(arrived(event)));
    (store, changes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use api::IdSet;
    use kube::CustomResourceExt;
    use serde_json::{Value, json};

    use super::*;

    /// What is read from a FluxNode's status and never copied to another object.
    const ONLY_COMPARED: [&str; 16] = [
        "/adopted/brokerName",
        "/adopted/digest",
        "/adopted/instanceID",
        "/adopted/instanceUID",
        "/adopted/nodeUID",
        "/agentVersion",
        "/cachedPackageSets/0",
        "/digest",
        "/facts/bootID",
        "/facts/glibc",
        "/facts/platform",
        "/leadFailed/instanceID",
        "/peer",
        "/roster",
        "/takeover/dump",
        "/takeover/instanceID",
    ];
    /// A part of one says that jobs run nowhere else.
    const SETS: [&str; 6] = ["/allocated", "/drained", "/drainedByOthers", "/gangs", "/hostJobs", "/torpid"];

    /// A status that has each field of the `schema`, with texts that are too long.
    fn filled(schema: &Value, path: &str, set: &Value) -> Value {
        let below = |name: &str, schema: &Value| filled(schema, &format!("{path}/{name}"), set);
        let fields = || schema["properties"].as_object().into_iter().flatten();
        match schema["type"].as_str() {
            Some("object") if schema["additionalProperties"].is_object() => {
                json!({"key": below("key", &schema["additionalProperties"])})
            }
            Some("object") => fields().map(|(name, schema)| (name.clone(), below(name, schema))).collect(),
            Some("array") => json!([below("0", &schema["items"])]),
            Some("integer") => json!(1),
            Some("boolean") => json!(true),
            _ if schema["format"] == "date-time" => json!("2026-01-01T00:00:00Z"),
            _ if SETS.contains(&path) => set.clone(),
            _ => json!("x".repeat(2 * LONGEST_TEXT)),
        }
    }

    /// The places of texts that are longer than [`LONGEST_TEXT`].
    fn long_texts(value: &Value, path: &str) -> BTreeSet<String> {
        let below = |(name, value): (String, &Value)| long_texts(value, &format!("{path}/{name}"));
        match value {
            Value::Object(fields) => fields.iter().flat_map(|(name, value)| below((name.clone(), value))).collect(),
            Value::Array(items) => {
                items.iter().enumerate().flat_map(|(at, value)| below((at.to_string(), value))).collect()
            }
            Value::String(text) if text.len() > LONGEST_TEXT => BTreeSet::from([path.to_owned()]),
            _ => BTreeSet::new(),
        }
    }

    #[test]
    fn no_text_of_a_flux_node_is_longer_than_its_copies_may_be() {
        // Every other rank of the largest instance: longer than any text may be.
        let ranks: IdSet = (0..16384).step_by(2).collect();
        let crd = json!(FluxNode::crd());
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"];
        let node =
            json!({"metadata": {"name": "a"}, "spec": {"nodeName": "a"}, "status": filled(schema, "", &json!(ranks))});
        let status = read(serde_json::from_value(node).unwrap()).unwrap().status.unwrap();
        let whole = ONLY_COMPARED.into_iter().chain(SETS).map(str::to_owned).collect();
        assert_eq!(long_texts(&json!(status), ""), whole);
        assert_eq!(status.host_jobs, Some(ranks));
    }

    #[test]
    fn a_text_is_cut_between_two_characters() {
        let status = json!({"phase": "Failed", "message": format!("a{}", "ä".repeat(LONGEST_TEXT))});
        let node = json!({"metadata": {"name": "a"}, "spec": {"nodeName": "a"}, "status": status});
        let status = read(serde_json::from_value(node).unwrap()).unwrap().status.unwrap();
        let message = status.message.unwrap();
        assert_eq!(message, format!("a{}", "ä".repeat(LONGEST_TEXT / 2 - 1)));
    }

    #[test]
    fn planning_does_not_depend_on_accounts_counts_of_jobs_and_versions() {
        let node = |version: &str, phase: &str, host_jobs: u32| {
            let fields = json!([{"manager": "agent", "time": "2026-01-01T00:00:00Z"}]);
            let metadata = json!({"name": "node1", "resourceVersion": version, "managedFields": fields});
            let status = json!({"phase": phase, "account": {"hostJobs": host_jobs}, "jobs": {"running": host_jobs}});
            let node = json!({"metadata": metadata, "spec": {"nodeName": "node1"}, "status": status});
            read(serde_json::from_value(node).unwrap())
        };
        assert_eq!(node("1", "Online", 0), node("2", "Online", 1));
        assert_ne!(node("2", "Online", 1), node("3", "Failed", 1));
    }

    #[test]
    fn a_flux_node_that_this_version_cannot_read_hides_no_other() {
        let node = |name: &str, rank: Value| {
            let node = json!({"metadata": {"name": name}, "spec": {"nodeName": name, "rank": rank}});
            Arc::new(read(serde_json::from_value(node).unwrap()))
        };
        let nodes = [node("a", json!(1)), node("b", json!("first"))];
        assert_eq!(readable(&nodes).map(ResourceExt::name_any).collect::<Vec<_>>(), ["a"]);
        assert_eq!(unreadable(&nodes).collect::<Vec<_>>(), ["b"]);
    }
}
