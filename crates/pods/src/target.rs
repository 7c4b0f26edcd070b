//! Targets: the nodes that pods can be bound to.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Taint};

use api::{Nodes, Rank, RosterEntry};
use model::eligibility::{NodeView, is_dedicated};

use crate::{
    node_rules::Labels,
    requests::{Amounts, UnreadableRequest},
};

/// The taint of a cordoned node.
const CORDONED: &str = "node.kubernetes.io/unschedulable";
/// Beginning of the taints that report a node's condition. They come and go with it.
const CONDITION_TAINTS: &str = "node.kubernetes.io/";

/// First minor version of Kubernetes 1 whose kubelet resizes pods in place by default.
const RESIZES_SINCE: u32 = 33;

/// A Node that holds a rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Target {
    /// The rank of its broker.
    pub rank: Rank,
    /// The Node's name.
    pub node: String,
    /// The Node's uid.
    pub uid: String,
    /// The Node's labels.
    pub labels: Labels,
    /// The Node's taints. A cordoned Node has that of a cordon.
    pub taints: Vec<Taint>,
    /// Condition Ready is True.
    pub is_ready: bool,
    /// status.allocatable
    pub allocatable: Allocatable,
    /// Number of cores that the rank declares to Flux.
    pub cores: u32,
    /// Hardware threads of a core.
    pub threads: u32,
    /// What these cores are in thousandths of a hardware thread, as the Node counts CPUs.
    pub declared_cpu: u64,
    /// kubelet can resize a pod in place (Kubernetes 1.33).
    pub can_resize: bool,
    /// A taint that the spec tolerates keeps ordinary pods off, so neither side accounts for the other here.
    pub is_dedicated: bool,
    /// kubelet's CPU manager has policy `static`: it gives whole CPUs to single pods alone.
    pub static_cpus: bool,
}

/// What a node has for pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allocatable {
    /// Thousandths of a hardware thread.
    pub cpu: u64,
    /// Bytes.
    pub memory: u64,
    /// Bytes of local ephemeral storage.
    pub ephemeral: u64,
    /// Number of pods.
    pub pods: u64,
    /// All other resources by name.
    pub extended: BTreeMap<String, u64>,
}

impl Target {
    /// The target that `node` is, the member of `entry`. `nodes`: spec.nodes. None if no job ever runs on that rank, or it is not known
    /// yet what it declares.
    ///
    /// A core has as many threads as the Node has CPUs for each core that hwloc counts. Where cores differ, that is
    /// rounded down, so that a pod holds rather more cores than fewer.
    ///
    /// # Errors
    /// A quantity in the Node's status can't be read.
    pub fn of(node: &Node, rank: Rank, entry: &RosterEntry, nodes: &Nodes) -> Result<Option<Self>, UnreadableRequest> {
        let Some(declared) = entry.resources.as_ref().filter(|declared| !declared.excluded) else { return Ok(None) };
        let (spec, status) = (node.spec.as_ref(), node.status.as_ref());
        let Amounts(capacity) = Amounts::read(status.and_then(|status| status.capacity.as_ref()))?;
        let Amounts(mut allocatable) = Amounts::read(status.and_then(|status| status.allocatable.as_ref()))?;
        let mut take = |name: &str| allocatable.remove(name).unwrap_or_default();
        let (cpu, memory, ephemeral, pods) = (take("cpu"), take("memory"), take("ephemeral-storage"), take("pods"));
        let capacity = capacity.get("cpu").copied().unwrap_or_default();
        let cpus = capacity / 1000;
        let cores = declared.core_ids().len();
        let threads = cpus.checked_div(u64::from(declared.cores)).unwrap_or(0);
        let mut taints = spec.and_then(|spec| spec.taints.clone()).unwrap_or_default();
        // The node controller adds the taint a moment after the cordon.
        if spec.and_then(|spec| spec.unschedulable) == Some(true) && !taints.iter().any(|taint| taint.key == CORDONED) {
            taints.push(Taint { key: CORDONED.into(), effect: "NoSchedule".into(), ..Taint::default() });
        }
        let mut conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
        Ok(Some(Self {
            rank,
            node: node.metadata.name.clone().unwrap_or_default(),
            uid: node.metadata.uid.clone().unwrap_or_default(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints,
            is_ready: conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True"),
            allocatable: Allocatable { cpu, memory, ephemeral, pods, extended: allocatable },
            cores: u32::try_from(cores).unwrap_or(u32::MAX),
            can_resize: kubelet_minor(node).is_some_and(|minor| minor >= RESIZES_SINCE),
            is_dedicated: is_dedicated(&NodeView::from(node), nodes),
            static_cpus: entry.static_cpus,
            threads: u32::try_from(threads).unwrap_or(u32::MAX).max(1),
            declared_cpu: (capacity.saturating_mul(cores as u64)).div_ceil(u64::from(declared.cores.max(1))),
        }))
    }

    /// It is offered to no pod, because kubelet would give CPUs to single pods alone that host jobs run on, too. An administrator who
    /// dedicates the node to Flux says that only Flux's pods come there.
    pub fn refuses_pods(&self) -> bool {
        self.static_cpus && !self.is_dedicated
    }

    /// What host jobs use of it may be requested by a placeholder pod.
    pub fn may_have_placeholder(&self) -> bool {
        self.can_resize && !self.is_dedicated
    }

    /// Somebody has cordoned it.
    pub fn is_cordoned(&self) -> bool {
        self.taints.iter().any(|taint| taint.key == CORDONED)
    }

    /// What a core is, in thousandths of a hardware thread.
    pub fn core(&self) -> u64 {
        u64::from(self.threads.max(1)) * 1000
    }

    /// The taints that somebody has set, a cordon among them, and not those that report a condition for a while.
    pub fn lasting_taints(&self) -> impl Iterator<Item = &Taint> {
        self.taints.iter().filter(|taint| taint.key == CORDONED || !taint.key.starts_with(CONDITION_TAINTS))
    }
}

/// Such as 36 for `v1.36.2`.
fn kubelet_minor(node: &Node) -> Option<u32> {
    let version = &node.status.as_ref()?.node_info.as_ref()?.kubelet_version;
    let digits: String = version.strip_prefix("v1.")?.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use api::Declared;
    use k8s_openapi::api::core::v1::NodeSystemInfo;
    use serde_json::{Value, json};

    use super::*;

    fn target(spec: Value, status: Value, declared: Declared) -> Option<Target> {
        let node = json!({"metadata": {"name": "node1", "uid": "u"}, "spec": spec, "status": status});
        Target::of(&serde_json::from_value(node).unwrap(), 3, &entry(declared), &Nodes::default()).unwrap()
    }

    fn entry(declared: Declared) -> RosterEntry {
        RosterEntry { resources: Some(declared), ..RosterEntry::default() }
    }

    fn declared(cores: u32) -> Declared {
        Declared { cores, ..Declared::default() }
    }

    #[test]
    fn a_target_is_read_from_its_node_and_rank() {
        let status = json!({"capacity": {"cpu": "16"}, "allocatable": {"cpu": "15940m", "memory": "1Gi", "pods": "110",
            "ephemeral-storage": "2Gi", "nvidia.com/gpu": "4"}, "conditions": [{"type": "Ready", "status": "True"}]});
        let declared = Declared { left_out: [0].into_iter().collect(), ..declared(8) };
        let target = target(json!({}), status, declared).unwrap();
        assert_eq!((target.rank, target.cores, target.threads, target.is_ready), (3, 7, 2, true));
        let Allocatable { cpu, memory, ephemeral, pods, extended } = target.allocatable;
        assert_eq!((cpu, memory, ephemeral, pods), (15_940, 1 << 30, 2 << 30, 110));
        assert_eq!(extended, [("nvidia.com/gpu".into(), 4)].into());
    }

    #[test]
    fn threads_are_cpus_for_each_core_and_at_least_one() {
        for (cpus, cores, expected) in
            [("8", 8, 1), ("16", 8, 2), ("24", 16, 1), ("4", 8, 1), ("128", 32, 4), ("8", 0, 1)]
        {
            let target = target(json!({}), json!({"capacity": {"cpu": cpus}}), declared(cores)).unwrap();
            assert_eq!(target.threads, expected, "{cpus} {cores}");
        }
    }

    #[test]
    fn a_cordon_is_a_lasting_taint_and_a_condition_is_not() {
        let taints = json!([{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]);
        let target = target(json!({"unschedulable": true, "taints": taints}), json!({}), declared(1)).unwrap();
        let keys = |taints: Vec<&Taint>| taints.into_iter().map(|taint| taint.key.clone()).collect::<Vec<_>>();
        assert_eq!(keys(target.taints.iter().collect()), ["node.kubernetes.io/not-ready", CORDONED]);
        assert_eq!(keys(target.lasting_taints().collect()), [CORDONED]);
    }

    #[test]
    fn a_kubelet_can_resize_pods_since_1_33() {
        for (version, expected) in [
            ("v1.32.9", false),
            ("v1.33.0", true),
            ("v1.36.2+k3s1", true),
            ("v1.33.1-eks-1", true),
            ("2", false),
            ("", false),
        ] {
            let info = NodeSystemInfo { kubelet_version: version.to_owned(), ..NodeSystemInfo::default() };
            let target = target(json!({}), json!({"nodeInfo": info}), declared(1)).unwrap();
            assert_eq!(target.may_have_placeholder(), expected, "{version}");
        }
    }

    #[test]
    fn a_taint_that_the_spec_tolerates_dedicates_a_node_also_one_with_static_cpus() {
        let tolerations = json!([{"key": "pool", "operator": "Equal", "value": "flux", "effect": "NoSchedule"}]);
        let nodes: Nodes = serde_json::from_value(json!({"tolerations": tolerations})).unwrap();
        for (key, static_cpus, expected) in [
            ("pool", false, (true, false)),
            ("other", false, (false, false)),
            ("pool", true, (true, false)),
            ("other", true, (false, true)),
        ] {
            let spec = json!({"taints": [{"key": key, "value": "flux", "effect": "NoSchedule"}]});
            let node = json!({"metadata": {"name": "n"}, "spec": spec, "status": {}});
            let entry = RosterEntry { static_cpus, ..entry(declared(1)) };
            let target = Target::of(&serde_json::from_value(node).unwrap(), 3, &entry, &nodes).unwrap().unwrap();
            assert_eq!((target.is_dedicated, target.refuses_pods()), expected, "{key} {static_cpus}");
        }
    }

    #[test]
    fn an_excluded_rank_is_no_target() {
        assert_eq!(target(json!({}), json!({}), Declared { excluded: true, ..declared(4) }), None);
    }
}
