//! The objects that kubelets, the DaemonSet and an administrator make.

use std::{
    net::Ipv4Addr,
    sync::atomic::{AtomicU32, Ordering},
};

use api::{AGENT_CONTAINER, CONDITION_POD_READY, DAEMONSET, FluxInstance, INSTANCE, NAMESPACE};
use futures::{StreamExt, stream};
use k8s_openapi::{
    api::{
        apps::v1::DaemonSet,
        core::v1::{Namespace, Node, Pod},
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams, PostParams, Request},
};
use serde_json::{Value, json};

/// Cores of each node.
pub const CORES: u32 = 64;
/// Requests to the API server at a time.
const AT_ONCE: usize = 32;

/// Name of node `number`, as a cloud gives them.
pub fn node_name(number: u32) -> String {
    format!("ip-{}.eu-central-1.compute.internal", address(number).to_string().replace('.', "-"))
}

/// Name of its agent's pod.
pub fn pod_name(node: &str) -> String {
    format!("{DAEMONSET}-{}", node.split('.').next().unwrap())
}

/// The boot of node `number`.
pub fn boot_id(number: u32) -> String {
    format!("00000000-0000-4000-8000-{number:012}")
}

fn address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 1, 0, 1).to_bits() + number)
}

/// The FluxInstance's spec for this many nodes.
pub fn spec(nodes: u32) -> Value {
    let bundle = json!({"url": "https://packages.example.org/flux.tar.gz", "sha256": "ab".repeat(32)});
    json!({"packages": {"bundle": bundle}, "broker": {"runAs": "0"}, "maxSize": nodes.max(64)})
}

/// Makes all that is there before the first agent starts; returns the FluxInstance's uid.
pub async fn make(client: &Client, nodes: u32) -> String {
    let parameters = PostParams::default();
    let namespace: Namespace = typed(json!({"metadata": {"name": NAMESPACE}}));
    Api::all(client.clone()).create(&parameters, &namespace).await.unwrap();
    let sets = Api::<DaemonSet>::namespaced(client.clone(), NAMESPACE);
    sets.create(&parameters, &daemon_set()).await.unwrap();
    let counts = json!({"currentNumberScheduled": nodes, "desiredNumberScheduled": nodes, "numberMisscheduled": 0,
                        "numberReady": 0});
    sets.patch_status(DAEMONSET, &PatchParams::default(), &Patch::Merge(json!({"status": counts}))).await.unwrap();
    let made = stream::iter(0..nodes).for_each_concurrent(AT_ONCE, async |number| {
        make_node(client, number).await;
        make_pod(client, number).await;
    });
    made.await;
    let instance = FluxInstance::new(INSTANCE, serde_json::from_value(spec(nodes)).unwrap());
    let instances = Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE);
    instances.create(&parameters, &instance).await.unwrap().uid().unwrap()
}

fn typed<K: serde::de::DeserializeOwned>(object: Value) -> K {
    serde_json::from_value(object).unwrap()
}

fn daemon_set() -> DaemonSet {
    let template = json!({"metadata": {"labels": {"app": DAEMONSET}},
                          "spec": {"containers": [{"name": AGENT_CONTAINER, "image": "flux-distribute"}]}});
    typed(json!({"metadata": {"name": DAEMONSET},
                 "spec": {"selector": {"matchLabels": {"app": DAEMONSET}}, "template": template}}))
}

/// As large as a cloud's nodes are: 15 kB, of which most is the list of images.
pub async fn make_node(client: &Client, number: u32) {
    let (name, nodes) = (node_name(number), Api::<Node>::all(client.clone()));
    let labels = json!({"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
                        "node.kubernetes.io/instance-type": "c7i.16xlarge", "topology.kubernetes.io/zone": "eu-central-1a"});
    let annotations = json!({"csi.volume.kubernetes.io/nodeid": "x".repeat(600)});
    let node = json!({"metadata": {"name": name, "labels": labels, "annotations": annotations}, "spec": {}});
    nodes.create(&PostParams::default(), &typed(node)).await.unwrap();
    // An admission plugin adds this taint to each new Node; its controller does not run here.
    let untainted = Patch::Merge(json!({"spec": {"taints": null}}));
    nodes.patch(&name, &PatchParams::default(), &untainted).await.unwrap();
    let image = |image: u32| {
        let digest = format!("{image:064}");
        json!({"names": [format!("registry.example.org/team/application-{image}@sha256:{digest}"),
                         format!("registry.example.org/team/application-{image}:1.2.3")], "sizeBytes": 123_456_789})
    };
    let resources = json!({"cpu": CORES.to_string(), "memory": "131072Mi", "pods": "110"});
    let status = json!({
        "addresses": [{"type": "InternalIP", "address": address(number)}, {"type": "Hostname", "address": name}],
        "capacity": resources, "allocatable": resources, "conditions": conditions(),
        "images": (0..62).map(image).collect::<Vec<_>>(),
        "nodeInfo": {"architecture": "amd64", "bootID": boot_id(number), "operatingSystem": "linux", "osImage": "Linux",
                     "kernelVersion": "6.12.0", "kubeletVersion": "v1.36.0", "containerRuntimeVersion": "containerd://2.1.0",
                     "kubeProxyVersion": "", "machineID": boot_id(number), "systemUUID": boot_id(number)},
    });
    nodes.patch_status(&name, &PatchParams::default(), &Patch::Merge(json!({"status": status}))).await.unwrap();
}

fn conditions() -> Value {
    let now = Timestamp::now().to_string();
    let condition = |kind: &str, status: &str| {
        json!({"type": kind, "status": status, "reason": "KubeletHasNoTrouble", "message": "kubelet is posting ready status",
               "lastHeartbeatTime": now, "lastTransitionTime": "2026-01-01T00:00:00Z"})
    };
    let pressures = ["MemoryPressure", "DiskPressure", "PIDPressure"].map(|kind| condition(kind, "False"));
    pressures.into_iter().chain([condition("Ready", "True")]).collect()
}

/// The agent's pod on node `number`, which runs.
pub async fn make_pod(client: &Client, number: u32) {
    let (node, pods) = (node_name(number), Api::<Pod>::namespaced(client.clone(), NAMESPACE));
    let name = pod_name(&node);
    let containers = json!([{"name": AGENT_CONTAINER, "image": "flux-distribute"}]);
    let pod = json!({"metadata": {"name": name, "labels": {"app": DAEMONSET}},
                     "spec": {"nodeName": node, "containers": containers, "readinessGates": [{"conditionType": CONDITION_POD_READY}]}});
    pods.create(&PostParams::default(), &typed(pod)).await.unwrap();
    let container = json!({"name": AGENT_CONTAINER, "image": "flux-distribute", "imageID": "", "ready": true, "restartCount": 0,
                           "state": {"running": {"startedAt": Timestamp::now()}}});
    let status = json!({"status": {"phase": "Running", "containerStatuses": [container]}});
    pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
}

/// True if the agent has said that its node is as the planner wants it.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let is_set = |kind: &str, status: &str| kind == CONDITION_POD_READY && status == "True";
    conditions.is_some_and(|all| all.iter().any(|condition| is_set(&condition.type_, &condition.status)))
}

/// A kubelet tries a failed write of the status this often before it waits for its next turn (`nodeStatusUpdateRetry` in its source).
const TRIES: usize = 5;

/// Writes the time into the conditions of these Nodes, as each kubelet does. Returns how many could be written. The answers, which are whole Nodes, are
/// not parsed: that would take time from the agents that are counted.
pub async fn heartbeat(client: &Client, nodes: impl IntoIterator<Item = &str>) -> u32 {
    let requests = Request::new(Node::url_path(&(), None));
    let status = Patch::Merge(json!({"status": {"conditions": conditions()}}));
    let written = AtomicU32::new(0);
    let beats = stream::iter(nodes).for_each_concurrent(AT_ONCE, async |node| {
        for _ in 0..TRIES {
            let beat = requests.patch_subresource("status", node, &PatchParams::default(), &status).unwrap();
            match client.request_text(beat).await {
                Ok(_) => {
                    written.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                Err(error) => eprintln!("the heartbeat of {node}: {error}"),
            }
        }
    });
    beats.await;
    written.into_inner()
}

/// Does what kubelets and the DaemonSet's controller do in a rollout: the pods of these nodes become unready and ready again, and each time the
/// DaemonSet says how many are.
pub async fn flip_readiness(client: &Client, nodes: &[String]) {
    let pods = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    let sets = Api::<DaemonSet>::namespaced(client.clone(), NAMESPACE);
    let flips = stream::iter(nodes).for_each_concurrent(AT_ONCE, async |node| {
        for (status, fewer) in [("False", 1), ("True", 0)] {
            let condition = json!([{"type": "Ready", "status": status}]);
            let status = Patch::Strategic(json!({"status": {"conditions": condition}}));
            pods.patch_status(&pod_name(node), &PatchParams::default(), &status).await.unwrap();
            let ready = json!({"status": {"numberReady": nodes.len() - fewer}});
            sets.patch_status(DAEMONSET, &PatchParams::default(), &Patch::Merge(ready)).await.unwrap();
        }
    });
    flips.await;
}
