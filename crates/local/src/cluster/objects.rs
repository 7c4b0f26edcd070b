//! The Kubernetes objects that a real cluster would get from kubelets and from the manifest.

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, DaemonSetSpec},
        core::v1::{
            ConfigMap, Container, Namespace, Node, NodeAddress, NodeCondition, NodeStatus, NodeSystemInfo, PodSpec,
            PodTemplateSpec,
        },
    },
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{LabelSelector, Time},
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::json;

use super::{
    io::read_line,
    kind::{Kind, machine_cpus},
    layout::{Cluster, Layout},
};
use crate::error::{Context, LocalError};
use host::{Root, facts};

/// A client for the local cluster's API. Not built from the kubeconfig, whose loader would also apply the machine's
/// proxy settings.
pub(crate) fn client(layout: &Layout, cluster: &Cluster) -> Result<Client, LocalError> {
    let failed = || "can't make a client for the local cluster's API".to_owned();
    let mut config = kube::Config::new(cluster.server().parse().context(failed)?);
    api::NAMESPACE.clone_into(&mut config.default_namespace);
    config.auth_info.token = Some(cluster.token.clone().into());
    config.root_cert = Some(super::api::certificates(layout)?);
    cluster::client(config).context(failed)
}

/// Creates the objects of the manifest. `spec` is the YAML for the first FluxInstance.
pub(crate) async fn install(client: &Client, spec: &str) -> Result<(), LocalError> {
    let namespace =
        Namespace { metadata: ObjectMeta { name: Some(api::NAMESPACE.to_owned()), ..named() }, ..Namespace::default() };
    create(&Api::all(client.clone()), &namespace).await?;
    let default = ConfigMap {
        metadata: ObjectMeta { name: Some(api::CONFIGMAP_DEFAULT.to_owned()), ..named() },
        data: Some([(api::CONFIGMAP_DEFAULT_KEY.to_owned(), spec.to_owned())].into()),
        ..ConfigMap::default()
    };
    create(&Api::default_namespaced(client.clone()), &default).await?;
    create(&Api::default_namespaced(client.clone()), &daemon_set()).await
}

fn named() -> ObjectMeta {
    ObjectMeta { labels: Some([("app".to_owned(), api::DAEMONSET.to_owned())].into()), ..ObjectMeta::default() }
}

fn daemon_set() -> DaemonSet {
    let container = Container {
        name: api::AGENT_CONTAINER.to_owned(),
        image: Some("flux-distribute".to_owned()),
        args: Some(vec!["agent".to_owned()]),
        ..Container::default()
    };
    DaemonSet {
        metadata: ObjectMeta { name: Some(api::DAEMONSET.to_owned()), ..named() },
        spec: Some(DaemonSetSpec {
            selector: LabelSelector { match_labels: named().labels, ..LabelSelector::default() },
            template: PodTemplateSpec {
                metadata: Some(named()),
                spec: Some(PodSpec { containers: vec![container], ..PodSpec::default() }),
            },
            ..DaemonSetSpec::default()
        }),
        ..DaemonSet::default()
    }
}

/// Creates the Node object. An existing one stays: a node that is off keeps its object and uid.
pub(crate) async fn register(client: &Client, name: &str, kind: &Kind) -> Result<(), LocalError> {
    let labels =
        [("kubernetes.io/hostname", name), ("kubernetes.io/os", "linux"), ("kubernetes.io/arch", architecture(kind))];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into_iter().chain(kind.labels.clone());
    let node = Node {
        metadata: ObjectMeta { name: Some(name.to_owned()), labels: Some(labels.collect()), ..ObjectMeta::default() },
        ..Node::default()
    };
    create(&Api::all(client.clone()), &node).await
}

/// Writes into the DaemonSet's status how many agents there are to be, one on each Node, as its controller does in a real cluster: if they are few, all of
/// them watch the planner's Lease. A DaemonSet that somebody has deleted stays so.
pub(crate) async fn count_agents(client: &Client) -> Result<(), LocalError> {
    let nodes = Api::<Node>::all(client.clone()).list(&ListParams::default()).await;
    let count = nodes.context(|| "can't list the Nodes".to_owned())?.items.len();
    let status = json!({"currentNumberScheduled": count, "desiredNumberScheduled": count, "numberMisscheduled": 0, "numberReady": 0});
    let sets = Api::<DaemonSet>::default_namespaced(client.clone());
    let patch = Patch::Merge(json!({ "status": status }));
    match sets.patch_status(api::DAEMONSET, &PatchParams::default(), &patch).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        done => done.map(drop).context(|| format!("can't write the status of DaemonSet {}", api::DAEMONSET)),
    }
}

/// Writes the Node's status: whether it is Ready, and the facts that a kubelet reports. `boot_id`: that of the node; None if it is
/// off.
pub(crate) async fn report(
    client: &Client,
    cluster: &Cluster,
    number: u32,
    name: &str,
    kind: &Kind,
    boot_id: Option<String>,
) -> Result<(), LocalError> {
    let ready = boot_id.is_some();
    let now = Time(Timestamp::now());
    let address = |kind: &str, address: String| NodeAddress { type_: kind.to_owned(), address };
    let capacity: std::collections::BTreeMap<String, Quantity> = [
        ("cpu".to_owned(), Quantity(kind.cores.unwrap_or_else(machine_cpus).to_string())),
        ("memory".to_owned(), Quantity(format!("{}Mi", facts::memory_mib(&Root::host())))),
        ("pods".to_owned(), Quantity("110".to_owned())),
    ]
    .into();
    let status = NodeStatus {
        addresses: Some(vec![
            address("InternalIP", cluster.address(number).to_string()),
            address("Hostname", name.to_owned()),
        ]),
        allocatable: Some(capacity.clone()),
        capacity: Some(capacity),
        conditions: Some(vec![NodeCondition {
            type_: "Ready".to_owned(),
            status: if ready { "True" } else { "False" }.to_owned(),
            reason: Some(if ready { "KubeletReady" } else { "PoweredOff" }.to_owned()),
            message: Some(if ready { "the node is up" } else { "the node is powered off" }.to_owned()),
            last_heartbeat_time: Some(now.clone()),
            last_transition_time: Some(now),
        }]),
        // While the node is off, the last boot's stay.
        node_info: boot_id.map(|boot_id| NodeSystemInfo {
            boot_id,
            architecture: architecture(kind).to_owned(),
            operating_system: "linux".to_owned(),
            kernel_version: read_line("/proc/sys/kernel/osrelease"),
            kubelet_version: concat!("v0.0.0-flux-distribute-local-", env!("CARGO_PKG_VERSION")).to_owned(),
            container_runtime_version: "local://".to_owned(),
            os_image: "flux-distribute local node".to_owned(),
            ..NodeSystemInfo::default()
        }),
        ..NodeStatus::default()
    };
    let patch = Patch::Merge(json!({ "status": status }));
    let nodes = Api::<Node>::all(client.clone());
    let written = nodes.patch_status(name, &PatchParams::default(), &patch).await;
    let node = written.context(|| format!("can't write the status of Node {name}"))?;
    if ready { untaint(&nodes, name, &node).await } else { Ok(()) }
}

/// Removes the not-ready taint. A real API server adds it to each new Node, and the node lifecycle controller removes
/// it once the Node is Ready; that controller doesn't run here.
async fn untaint(nodes: &Api<Node>, name: &str, node: &Node) -> Result<(), LocalError> {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    let kept: Vec<_> = taints.iter().filter(|taint| taint.key != "node.kubernetes.io/not-ready").collect();
    if kept.len() == taints.len() {
        return Ok(());
    }
    let patch = Patch::Merge(json!({ "spec": { "taints": kept } }));
    let written = nodes.patch(name, &PatchParams::default(), &patch).await;
    written.map(drop).context(|| format!("can't remove the taint from Node {name}"))
}

/// Deletes the Node object, as an administrator does after removing a machine.
pub(crate) async fn unregister(client: &Client, name: &str) -> Result<(), LocalError> {
    match Api::<Node>::all(client.clone()).delete(name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        done => done.map(drop).context(|| format!("can't delete Node {name}")),
    }
}

async fn create<K>(objects: &Api<K>, object: &K) -> Result<(), LocalError>
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    match objects.create(&PostParams::default(), object).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        made => made
            .map(drop)
            .context(|| format!("can't make {} {}", K::kind(&()), object.meta().name.as_deref().unwrap_or_default())),
    }
}

fn architecture(kind: &Kind) -> &str {
    match (&kind.arch, std::env::consts::ARCH) {
        (Some(given), _) => given,
        (None, "x86_64") => "amd64",
        (None, "aarch64") => "arm64",
        (None, other) => other,
    }
}
