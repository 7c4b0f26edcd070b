//! Which nodes may get a rank. Which nodes *lose* one is a different question, answered in [`super::roster`]: NotReady,
//! a cordon and taints never take a rank away.

use std::{collections::BTreeMap, net::IpAddr};

use k8s_openapi::{
    api::core::v1::{Node, Taint},
    apimachinery::pkg::api::resource::Quantity,
};

use crate::matching::{keeps_pods_off, selects, tolerates};
use api::{ANNOTATION_PROTECTS, Nodes};

/// The annotations that keep autoscalers away. Sources: Cluster Autoscaler's FAQ, "How can I prevent Cluster Autoscaler
/// from scaling down a particular node?"; Karpenter's documentation, "Disruption", node-level controls.
pub const PROTECTING: [&str; 2] =
    ["cluster-autoscaler.kubernetes.io/scale-down-disabled", "karpenter.sh/do-not-disrupt"];

/// The part of a Node that planning depends on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeView {
    /// metadata.name
    pub name: String,
    /// metadata.uid
    pub uid: String,
    /// status.nodeInfo.bootID; empty if kubelet has not reported it.
    pub boot_id: String,
    /// metadata.creationTimestamp, seconds since the Unix epoch.
    pub created: i64,
    /// Condition Ready is True.
    pub ready: bool,
    /// spec.unschedulable
    pub cordoned: bool,
    /// metadata.deletionTimestamp is set.
    pub deleting: bool,
    /// status.nodeInfo.operatingSystem is `linux` or unknown.
    pub linux: bool,
    /// metadata.labels
    pub labels: BTreeMap<String, String>,
    /// The entries of metadata.annotations that are about autoscalers.
    pub annotations: BTreeMap<String, String>,
    /// spec.taints
    pub taints: Vec<Taint>,
    /// The first numeric InternalIP.
    pub address: Option<IpAddr>,
    /// status.nodeInfo.architecture, else label kubernetes.io/arch, such as `amd64`; empty if the Node has neither.
    pub architecture: String,
    /// status.capacity.cpu and status.allocatable.cpu; None if the Node lacks one of them.
    pub cpu: Option<Cpu>,
    /// A device plugin advertises the node's GPUs to pods.
    pub advertises_gpus: bool,
}

/// The Node's hardware threads, in thousandths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cpu {
    /// status.capacity.cpu
    pub capacity: u64,
    /// status.allocatable.cpu
    pub allocatable: u64,
}

impl From<&Node> for NodeView {
    fn from(node: &Node) -> Self {
        let spec = node.spec.as_ref();
        let status = node.status.as_ref();
        let is_ready = |conditions: &Vec<_>| {
            conditions
                .iter()
                .any(|c: &k8s_openapi::api::core::v1::NodeCondition| c.type_ == "Ready" && c.status == "True")
        };
        Self {
            name: node.metadata.name.clone().unwrap_or_default(),
            uid: node.metadata.uid.clone().unwrap_or_default(),
            boot_id: status.and_then(|s| s.node_info.as_ref()).map(|info| info.boot_id.clone()).unwrap_or_default(),
            created: node.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
            ready: status.and_then(|s| s.conditions.as_ref()).is_some_and(is_ready),
            cordoned: spec.and_then(|s| s.unschedulable).unwrap_or(false),
            deleting: node.metadata.deletion_timestamp.is_some(),
            linux: status
                .and_then(|s| s.node_info.as_ref())
                .is_none_or(|info| matches!(info.operating_system.as_str(), "linux" | "")),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            annotations: PROTECTING
                .into_iter()
                .chain([ANNOTATION_PROTECTS])
                .filter_map(|key| Some((key.to_owned(), node.metadata.annotations.as_ref()?.get(key)?.clone())))
                .collect(),
            taints: spec.and_then(|s| s.taints.clone()).unwrap_or_default(),
            address: status.and_then(|s| s.addresses.as_ref()).and_then(|addresses| {
                addresses.iter().filter(|a| a.type_ == "InternalIP").find_map(|a| a.address.parse().ok())
            }),
            architecture: status
                .and_then(|s| s.node_info.as_ref())
                .map(|info| info.architecture.clone())
                .filter(|architecture| !architecture.is_empty())
                .or_else(|| node.metadata.labels.as_ref()?.get("kubernetes.io/arch").cloned())
                .unwrap_or_default(),
            cpu: status.and_then(|s| {
                let cpu = |list: &Option<Quantities>| milli(&list.as_ref()?.get("cpu")?.0);
                Some(Cpu { capacity: cpu(&s.capacity)?, allocatable: cpu(&s.allocatable)? })
            }),
            // A count of 0 matters too: kubelet reports it while the plugin's pod restarts.
            advertises_gpus: status.is_some_and(|s| {
                let names = [&s.capacity, &s.allocatable].into_iter().flatten().flat_map(Quantities::keys);
                names.into_iter().any(|name| is_gpu(name))
            }),
        }
    }
}

type Quantities = BTreeMap<String, Quantity>;

/// True for a resource name that a GPU device plugin advertises.
fn is_gpu(name: &str) -> bool {
    matches!(name, "nvidia.com/gpu" | "amd.com/gpu") || name.starts_with("nvidia.com/mig-")
}

/// Parses a CPU quantity as Kubernetes writes it (`4`, `3920m`, `0.5`) into thousandths.
fn milli(quantity: &str) -> Option<u64> {
    let (number, factor) = match quantity.strip_suffix('m') {
        Some(number) => (number, 1.0),
        None => (quantity, 1000.0),
    };
    let milli = number.parse::<f64>().ok()? * factor;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of CPUs, checked")]
    (0.0..1e9).contains(&milli).then(|| milli.round() as u64)
}

/// Why a node gets no rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Ineligible {
    /// The node does not run Linux.
    #[error("not a linux node")]
    NotLinux,
    /// Condition Ready is not True.
    #[error("the node is not Ready")]
    NotReady,
    /// spec.unschedulable is set.
    #[error("the node is cordoned")]
    Cordoned,
    /// spec.nodes.selector does not match the node's labels.
    #[error("its labels don't match spec.nodes.selector")]
    NotSelected,
    /// The node has this NoSchedule or NoExecute taint, and spec.nodes.tolerations does not tolerate it.
    #[error("taint {0} is not in spec.nodes.tolerations")]
    Tainted(String),
    /// The node has no numeric InternalIP.
    #[error("the node has no numeric InternalIP")]
    NoAddress,
}

/// Checks whether a node without a rank may get one.
///
/// # Errors
/// The first reason that excludes the node.
pub fn eligible(node: &NodeView, spec: &Nodes) -> Result<(), Ineligible> {
    if !node.linux {
        return Err(Ineligible::NotLinux);
    }
    if !selected(node, spec) {
        return Err(Ineligible::NotSelected);
    }
    if !node.ready {
        return Err(Ineligible::NotReady);
    }
    if node.cordoned {
        return Err(Ineligible::Cordoned);
    }
    if let Some(taint) = node.taints.iter().find(|taint| keeps_pods_off(taint) && !is_tolerated(taint, spec)) {
        return Err(Ineligible::Tainted(format!("{}:{}", taint.key, taint.effect)));
    }
    if node.address.is_none() {
        return Err(Ineligible::NoAddress);
    }
    Ok(())
}

fn is_tolerated(taint: &Taint, spec: &Nodes) -> bool {
    spec.tolerations.iter().any(|toleration| tolerates(toleration, taint))
}

/// True if a taint that the spec tolerates keeps pods off the node, so that the node's GPUs are left for Flux. Taints
/// of node conditions don't count, because they come and go. Nor do taints that name a GPU: the admission plugin
/// ExtendedResourceToleration lets exactly the pods that request a GPU tolerate those.
pub fn is_dedicated(node: &NodeView, spec: &Nodes) -> bool {
    let is_condition = |taint: &Taint| {
        taint.key.starts_with("node.kubernetes.io/") || taint.key.starts_with("node.cloudprovider.kubernetes.io/")
    };
    let dedicates = |taint: &&Taint| keeps_pods_off(taint) && !is_condition(taint) && !is_gpu(&taint.key);
    node.taints.iter().filter(dedicates).any(|taint| is_tolerated(taint, spec))
}

/// True if the spec's selector matches the node's labels. A member that no longer matches is drained and then loses its
/// rank.
pub fn selected(node: &NodeView, spec: &Nodes) -> bool {
    spec.selector.as_ref().is_none_or(|selector| selects(selector, &node.labels))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> NodeView {
        NodeView {
            name: "node1".into(),
            ready: true,
            linux: true,
            labels: [("pool".to_owned(), "hpc".to_owned())].into(),
            address: Some([10, 0, 0, 1].into()),
            ..NodeView::default()
        }
    }

    fn taint(key: &str, value: &str, effect: &str) -> Taint {
        Taint { key: key.into(), value: Some(value.into()), effect: effect.into(), time_added: None }
    }

    fn spec(yaml: &str) -> Nodes {
        serde_norway::from_str(yaml).unwrap()
    }

    #[test]
    fn a_control_plane_label_alone_never_excludes() {
        let mut node = node();
        node.labels.insert("node-role.kubernetes.io/control-plane".into(), String::new());
        assert_eq!(eligible(&node, &Nodes::default()), Ok(()));
    }

    #[test]
    fn each_ineligible_node_gets_its_reason() {
        let none = Nodes::default();
        for (change, expected) in [
            ((|n: &mut NodeView| n.linux = false) as fn(&mut NodeView), Ineligible::NotLinux),
            (|n| n.ready = false, Ineligible::NotReady),
            (|n| n.cordoned = true, Ineligible::Cordoned),
            (|n| n.address = None, Ineligible::NoAddress),
            (|n| n.taints = vec![taint("a", "b", "NoSchedule")], Ineligible::Tainted("a:NoSchedule".into())),
            (|n| n.taints = vec![taint("a", "b", "NoExecute")], Ineligible::Tainted("a:NoExecute".into())),
        ] {
            let mut node = node();
            change(&mut node);
            assert_eq!(eligible(&node, &none), Err(expected));
        }
    }

    #[test]
    fn taints_that_are_tolerated_or_only_preferences_do_not_exclude() {
        for (taints, tolerations, expected) in [
            (vec![taint("a", "b", "PreferNoSchedule")], "{}", true),
            (vec![taint("hpc", "flux", "NoSchedule")], "tolerations: [{key: hpc, value: flux}]", true),
            (vec![taint("hpc", "flux", "NoSchedule")], "tolerations: [{key: hpc, value: other}]", false),
            (vec![taint("hpc", "flux", "NoSchedule")], "tolerations: [{key: hpc, operator: Exists}]", true),
            (vec![taint("hpc", "flux", "NoSchedule")], "tolerations: [{operator: Exists, effect: NoExecute}]", false),
            (vec![taint("hpc", "flux", "NoSchedule")], "tolerations: [{operator: Exists}]", true),
        ] {
            let node = NodeView { taints, ..node() };
            assert_eq!(eligible(&node, &spec(tolerations)).is_ok(), expected, "{tolerations}");
        }
    }

    #[test]
    fn selectors_select_as_in_kubernetes() {
        for (selector, expected) in [
            ("selector: {matchLabels: {pool: hpc}}", true),
            ("selector: {matchLabels: {pool: web}}", false),
            ("selector: {matchExpressions: [{key: pool, operator: In, values: [hpc, gpu]}]}", true),
            ("selector: {matchExpressions: [{key: pool, operator: NotIn, values: [hpc]}]}", false),
            ("selector: {matchExpressions: [{key: zone, operator: NotIn, values: [a]}]}", true),
            ("selector: {matchExpressions: [{key: zone, operator: Exists}]}", false),
            ("selector: {matchExpressions: [{key: zone, operator: DoesNotExist}]}", true),
            ("selector: {matchExpressions: [{key: zone, operator: Gt, values: ['1']}]}", false),
        ] {
            assert_eq!(selected(&node(), &spec(selector)), expected, "{selector}");
        }
    }
}
