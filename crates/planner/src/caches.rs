//! The objects that the planner watches, cached.

use std::{
    collections::HashMap,
    future::ready,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use futures::{Stream, StreamExt, stream::select_all};
use k8s_openapi::{
    api::core::v1::{Namespace, Node, NodeStatus, Pod, PodSpec},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::{DeserializeGuard, error_boundary::InvalidObject},
    runtime::{WatchStreamExt, reflector, reflector::Store, watcher},
};
use tokio::time::timeout;
use tracing::{debug, warn};

use api::{AGENT_SELECTOR, ANNOTATION_PROTECTS, FluxInstance, FluxNode, INSTANCE, NAMESPACE, NodePhase};
use model::{
    agents::AgentPod,
    eligibility::{NodeView, PROTECTING},
};

/// Longest text of a FluxNode's status that is copied, in bytes.
const LONGEST_TEXT: usize = 8192;

/// The watched objects, as last received from the API server.
pub(super) struct Caches {
    pub(super) nodes: Store<Node>,
    /// Guarded, so that a FluxNode that this version can't read doesn't hide the others; see [`readable`].
    pub(super) flux_nodes: Store<DeserializeGuard<FluxNode>>,
    pub(super) instances: Store<FluxInstance>,
    /// The pods of the agents.
    pods: Store<Pod>,
    /// Only our own Namespace.
    namespaces: Store<Namespace>,
}

impl Caches {
    /// Returns empty caches, and a stream that fills them while it is polled. It yields an item for each change that
    /// planning may depend on.
    pub(super) fn watch(client: &Client) -> (Self, impl Stream<Item = ()> + Send + use<>) {
        let all = watcher::Config::default;
        let nodes = watcher(Api::<Node>::all(client.clone()), all()).default_backoff();
        let (nodes, node_changes) = cached(nodes.modify(keep_of_node));
        let flux_nodes = watcher(Api::namespaced(client.clone(), NAMESPACE), all()).default_backoff();
        let (flux_nodes, flux_node_changes) = cached(flux_nodes.modify(keep_for_planning));
        let flux_node_changes = skip_irrelevant(flux_node_changes.inspect(warn_if_unreadable), planned_by);
        let (instances, instance_changes) = watch(Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE), all());
        let ours = all().fields(&format!("metadata.name={NAMESPACE}"));
        let (namespaces, namespace_changes) = watch(Api::<Namespace>::all(client.clone()), ours);
        let agents = all().labels(AGENT_SELECTOR);
        let pods = watcher(Api::<Pod>::namespaced(client.clone(), NAMESPACE), agents).default_backoff();
        let (pods, pod_changes) = cached(pods.modify(keep_of_pod));
        let view = |node: &Node| Some(NodeView::from(node));
        let node_changes = skip_irrelevant(node_changes, view);
        let pod_changes = skip_irrelevant(pod_changes, AgentPod::of);
        let changes = [
            node_changes.map(drop).boxed(),
            flux_node_changes.map(drop).boxed(),
            instance_changes.map(drop).boxed(),
            namespace_changes.map(drop).boxed(),
            pod_changes.map(drop).boxed(),
        ];
        (Self { nodes, flux_nodes, instances, pods, namespaces }, select_all(changes))
    }

    /// The agents' pods that have a node. Empty if they can't be read, because an older manifest does not grant that
    /// right.
    pub(super) fn agents(&self) -> Vec<AgentPod> {
        self.pods.state().iter().filter_map(|pod| AgentPod::of(pod)).collect()
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
        let ready = async {
            let _ = tokio::join!(
                self.nodes.wait_until_ready(),
                self.flux_nodes.wait_until_ready(),
                self.instances.wait_until_ready()
            );
        };
        timeout(Duration::from_millis(1), ready).await.is_ok()
    }
}

/// The FluxNodes that this version can read. The planner leaves the others alone, as if their agents had not reported
/// yet, because the version that wrote them may still use them.
pub(super) fn readable(nodes: &[Arc<DeserializeGuard<FluxNode>>]) -> impl Iterator<Item = &FluxNode> {
    nodes.iter().filter_map(|node| node.0.as_ref().ok())
}

/// The names of the FluxNodes that this version can't read.
pub(super) fn unreadable(nodes: &[Arc<DeserializeGuard<FluxNode>>]) -> impl Iterator<Item = String> {
    nodes.iter().filter(|node| node.0.is_err()).map(|node| node.name_any())
}

fn warn_if_unreadable(event: &watcher::Event<DeserializeGuard<FluxNode>>) {
    if let watcher::Event::Apply(node) | watcher::Event::InitApply(node) = event
        && let DeserializeGuard(Err(InvalidObject { error, .. })) = node
    {
        warn!(
            node = node.name_any(),
            error, "this version can't read a FluxNode: finish the upgrade, or delete it: its agent makes it again"
        );
    }
}

/// Drops what [`NodeView`] does not read and what makes a Node large, such as its list of images: the planner keeps one of each node.
fn keep_of_node(node: &mut Node) {
    node.metadata.managed_fields = None;
    if let Some(annotations) = &mut node.metadata.annotations {
        annotations.retain(|key, _| PROTECTING.contains(&key.as_str()) || key == ANNOTATION_PROTECTS);
    }
    let Some(status) = node.status.take() else { return };
    let mut conditions = status.conditions;
    conditions.iter_mut().for_each(|conditions| conditions.retain(|condition| condition.type_ == "Ready"));
    let (addresses, allocatable, capacity, node_info) =
        (status.addresses, status.allocatable, status.capacity, status.node_info);
    let kept = NodeStatus { addresses, allocatable, capacity, conditions, node_info, ..NodeStatus::default() };
    node.status = Some(kept);
}

/// As [`keep_of_node`], for [`AgentPod`].
fn keep_of_pod(pod: &mut Pod) {
    pod.metadata.managed_fields = None;
    let node_name = pod.spec.take().and_then(|spec| spec.node_name);
    pod.spec = Some(PodSpec { node_name, ..PodSpec::default() });
    if let Some(status) = &mut pod.status {
        (status.conditions, status.init_container_statuses) = (None, None);
    }
}

/// A hash of all that planning may depend on; a copy of each FluxNode would double what they take of the memory. None: this
/// version can't read it.
fn planned_by(node: &DeserializeGuard<FluxNode>) -> Option<u64> {
    let FluxNode { metadata, spec, status } = node.0.as_ref().ok()?;
    let metadata = ObjectMeta { resource_version: None, managed_fields: None, ..metadata.clone() };
    let mut hasher = DefaultHasher::new();
    serde_json::to_vec(&(metadata, spec, status)).ok()?.hash(&mut hasher);
    Some(hasher.finish())
}

/// Drops account and counts of jobs, on which planning does not depend and which change every few seconds, and cuts texts that no agent of ours
/// writes that long. The planner copies them into the FluxInstance's status and into the specs of other
/// FluxNodes, which have to fit into etcd. Sets of ranks stay whole: a part of one says that jobs run nowhere else.
fn keep_for_planning(node: &mut DeserializeGuard<FluxNode>) {
    let Ok(FluxNode { metadata, status, .. }) = &mut node.0 else { return };
    metadata.managed_fields = None;
    let Some(status) = status else { return };
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

/// Drops the changes that planning does not depend on, such as kubelet's heartbeats, image lists and probe results.
fn skip_irrelevant<K, V>(
    changes: impl Stream<Item = watcher::Event<K>> + Send,
    view: impl Fn(&K) -> Option<V> + Send + 'static,
) -> impl Stream<Item = watcher::Event<K>> + Send
where
    K: Resource<DynamicType = ()> + Send,
    V: PartialEq + Send,
{
    let mut known = HashMap::new();
    changes.filter(move |event| ready(is_relevant(&mut known, event, &view)))
}

/// True unless the event leaves the `view` of its object, the part that planning depends on, unchanged.
fn is_relevant<K, V>(
    known: &mut HashMap<String, Option<V>>,
    event: &watcher::Event<K>,
    view: impl Fn(&K) -> Option<V>,
) -> bool
where
    K: Resource<DynamicType = ()>,
    V: PartialEq,
{
    match event {
        watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
            let seen = view(object);
            let before = known.get(&object.name_any());
            let has_changed = before != Some(&seen);
            if has_changed {
                known.insert(object.name_any(), seen);
            }
            has_changed
        }
        watcher::Event::Delete(object) => known.remove(&object.name_any()).is_some(),
        watcher::Event::Init | watcher::Event::InitDone => true,
    }
}

/// An empty cache, and the stream that fills it.
fn watch<K>(api: Api<K>, config: watcher::Config) -> (Store<K>, impl Stream<Item = watcher::Event<K>> + Send)
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + Sync + 'static,
{
    cached(watcher(api, config).default_backoff())
}

/// An empty cache, and the stream that fills it with `changes`.
fn cached<K>(
    changes: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
) -> (Store<K>, impl Stream<Item = watcher::Event<K>> + Send)
where
    K: Resource<DynamicType = ()> + Clone + Send + Sync + 'static,
{
    let (store, writer) = reflector::store();
    let changes = changes.reflect(writer).filter_map(|event| async move {
        if let Err(error) = &event {
            debug!(%error, "a watch was interrupted");
        }
        event.ok()
    });
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
        let mut node: DeserializeGuard<FluxNode> = serde_json::from_value(node).unwrap();
        keep_for_planning(&mut node);
        let status = node.0.unwrap().status.unwrap();
        let whole = ONLY_COMPARED.into_iter().chain(SETS).map(str::to_owned).collect();
        assert_eq!(long_texts(&json!(status), ""), whole);
        assert_eq!(status.host_jobs, Some(ranks));
    }

    #[test]
    fn a_text_is_cut_between_two_characters() {
        let status = json!({"phase": "Failed", "message": format!("a{}", "ä".repeat(LONGEST_TEXT))});
        let node = json!({"metadata": {"name": "a"}, "spec": {"nodeName": "a"}, "status": status});
        let mut node: DeserializeGuard<FluxNode> = serde_json::from_value(node).unwrap();
        keep_for_planning(&mut node);
        let message = node.0.unwrap().status.unwrap().message.unwrap();
        assert_eq!(message, format!("a{}", "ä".repeat(LONGEST_TEXT / 2 - 1)));
    }

    #[test]
    fn accounts_and_counts_of_jobs_are_not_relevant() {
        let node = |version: &str, phase: &str, host_jobs: u32| {
            let metadata = json!({"name": "node1", "resourceVersion": version});
            let status = json!({"phase": phase, "account": {"hostJobs": host_jobs}, "jobs": {"running": host_jobs}});
            let node = json!({"metadata": metadata, "spec": {"nodeName": "node1"}, "status": status});
            let mut node: DeserializeGuard<FluxNode> = serde_json::from_value(node).unwrap();
            keep_for_planning(&mut node);
            watcher::Event::Apply(node)
        };
        let mut known = HashMap::new();
        for (event, expected) in [
            (node("1", "Online", 0), true),
            (node("2", "Online", 1), false),
            (node("3", "Failed", 1), true),
            (node("4", "Failed", 1), false),
        ] {
            assert_eq!(is_relevant(&mut known, &event, planned_by), expected, "{event:?}");
        }
    }

    #[test]
    fn what_is_kept_of_nodes_and_pods_says_all_that_planning_reads_and_is_small() {
        let conditions: Vec<_> = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"]
            .map(|type_| json!({"type": type_, "status": "True", "message": "x".repeat(100)}))
            .into();
        let image =
            json!({"names": ["registry.example.org/image@sha256:".to_owned() + &"0".repeat(64)], "sizeBytes": 1});
        let info = json!({"architecture": "amd64", "bootID": "boot", "containerRuntimeVersion": "containerd://2", "kernelVersion": "6.12",
            "kubeProxyVersion": "", "kubeletVersion": "v1.36.0", "machineID": "m", "operatingSystem": "linux", "osImage": "Debian",
            "systemUUID": "s"});
        let cpu = json!({"cpu": "3920m", "nvidia.com/gpu": "1"});
        let annotations =
            json!({PROTECTING[0]: "true", ANNOTATION_PROTECTS: "x", "example.org/state": "x".repeat(2000)});
        let managers: Vec<_> =
            (0..4).map(|n| json!({"manager": n.to_string(), "fieldsV1": {"f:a": "x".repeat(1000)}})).collect();
        let mut node: Node = serde_json::from_value(json!({
            "metadata": {"name": "node1", "uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": {"zone": "a"}, "annotations": annotations, "managedFields": managers},
            "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}], "unschedulable": true},
            "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}], "capacity": cpu, "allocatable": cpu,
                "conditions": conditions, "images": vec![image; 50], "nodeInfo": info}}))
        .unwrap();
        let (whole, size) = (NodeView::from(&node), json!(node).to_string().len());
        keep_of_node(&mut node);
        assert_eq!(NodeView::from(&node), whole);
        assert_eq!(node.metadata.resource_version.as_deref(), Some("1"), "a write names it");
        let kept = json!(node).to_string().len();
        assert!(size > 12_000 && kept < 1200, "{kept} of {size}");

        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "agent1", "managedFields": managers},
            "spec": {"nodeName": "node1", "containers": [{"name": "agent", "image": "x".repeat(1000)}]},
            "status": {"phase": "Running", "containerStatuses": [{"name": "agent", "image": "i", "imageID": "", "ready": false,
                "restartCount": 1, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}}))
        .unwrap();
        let whole = AgentPod::of(&pod);
        keep_of_pod(&mut pod);
        assert!(whole.as_ref().is_some_and(|pod| pod.down.is_some()) && AgentPod::of(&pod) == whole);
    }

    #[test]
    fn a_heartbeat_of_a_node_is_not_relevant() {
        let node = |uid: &str, ready: &str, heartbeat: &str| -> Node {
            let condition = json!({"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat});
            let node = json!({"metadata": {"name": "node1", "uid": uid}, "status": {"conditions": [condition]}});
            serde_json::from_value(node).unwrap()
        };
        let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z");
        let mut known = HashMap::new();
        for (event, expected) in [
            (watcher::Event::InitApply(node("a", "False", early)), true),
            (watcher::Event::InitDone, true),
            (watcher::Event::Apply(node("a", "False", late)), false),
            (watcher::Event::Apply(node("a", "True", late)), true),
            (watcher::Event::Delete(node("a", "True", late)), true),
            (watcher::Event::Apply(node("a", "True", late)), true),
            (watcher::Event::Apply(node("b", "True", late)), true),
        ] {
            assert_eq!(is_relevant(&mut known, &event, |node| Some(NodeView::from(node))), expected, "{event:?}");
        }
    }
}
