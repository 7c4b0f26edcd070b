//! The check before binding: what kubelet would refuse a pod by. kubelet has the last word.
//!
//! Host jobs are not counted: Flux gives no core to two jobs. kubelet does count the placeholder pod that stands for them, so a pod is bound only
//! once that one leaves room for it.

use std::collections::BTreeMap;

use api::Rank;

use crate::{
    pod::PodView,
    requests::Requests,
    target::{Allocatable, Target},
    usage::{Usage, UsageByNode},
};

/// Why a pod can't be bound to a node now.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Shortfall {
    /// The rank has no node.
    #[error("the node is gone")]
    Gone,
    /// Condition Ready is not True.
    #[error("the node is not Ready")]
    NotReady,
    /// A taint that the pod does not tolerate.
    #[error("the node has taint {0}")]
    Taint(String),
    /// kubelet's CPU manager has policy `static`, and the node is not dedicated to Flux: [`Target::refuses_pods`].
    #[error("the node's kubelet has CPU manager policy static, and the node is not dedicated to Flux")]
    StaticCpus,
    /// nodeSelector or node affinity don't permit it.
    #[error("its nodeSelector or node affinity does not permit the node")]
    NotSelected,
    /// Too little of a resource.
    #[error("the node has {free} of {resource} left, and the pod asks for {wanted}")]
    Room {
        /// Its name; `cpu` is in thousandths.
        resource: String,
        /// What no pod has asked for.
        free: u64,
        /// What the pod asks for.
        wanted: u64,
    },
    /// Another pod has the port.
    #[error("port {0} of the node is taken")]
    Port(i32),
}

impl Shortfall {
    /// It reports a condition of the node that may pass within a minute.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::NotReady => true,
            Self::Taint(taint) => taint.starts_with("node.kubernetes.io/") && !taint.contains("unschedulable"),
            _ => false,
        }
    }
}

/// What is left of each resource that a pod may ask for on a node with `usage`, and how much of it is `wanted`: name, free, wanted.
fn resources<'a>(
    allocatable: &'a Allocatable,
    usage: &'a Usage,
    wanted: &'a Requests,
) -> impl Iterator<Item = (&'a str, u64, u64)> {
    let used = &usage.requests;
    let extended = wanted.extended.iter().map(|(name, wanted)| {
        let amount = |of: &BTreeMap<String, u64>| of.get(name).copied().unwrap_or_default();
        (name.as_str(), amount(&allocatable.extended), amount(&used.extended), *wanted)
    });
    [
        ("pods", allocatable.pods, usage.pods, 1),
        ("cpu", allocatable.cpu, used.cpu, wanted.cpu),
        ("memory", allocatable.memory, used.memory, wanted.memory),
        ("ephemeral-storage", allocatable.ephemeral, used.ephemeral, wanted.ephemeral),
    ]
    .into_iter()
    .chain(extended)
    .map(|(name, allocatable, used, wanted)| (name, allocatable.saturating_sub(used), wanted))
}

/// The first reason for which a node with `usage` has no room for a pod.
pub fn room(allocatable: &Allocatable, usage: &Usage, wanted: &Requests) -> Option<Shortfall> {
    let short = resources(allocatable, usage, wanted).find(|(_, free, wanted)| wanted > free);
    let port = || wanted.ports.iter().find(|port| port.conflicts_with_any(&usage.requests.ports));
    match short {
        Some((resource, free, wanted)) => Some(Shortfall::Room { resource: resource.to_owned(), free, wanted }),
        None => port().map(|port| Shortfall::Port(port.port)),
    }
}

/// How many pods with these requests a node with `usage` has room for.
pub fn pods_in(allocatable: &Allocatable, usage: &Usage, wanted: &Requests) -> u64 {
    // One pod takes a port for itself.
    let ports = if wanted.ports.is_empty() { u64::MAX } else { 1 };
    let fit = resources(allocatable, usage, wanted).filter_map(|(_, free, wanted)| free.checked_div(wanted));
    fit.fold(ports, u64::min)
}

/// The first reason for which `pod` can't be bound to `target`, with `usage` on it.
pub fn check_pod(target: &Target, usage: &Usage, pod: &PodView) -> Option<Shortfall> {
    if !target.is_ready {
        return Some(Shortfall::NotReady);
    }
    if target.refuses_pods() {
        return Some(Shortfall::StaticCpus);
    }
    if let Some(plan) = &pod.plan {
        if let Some(taint) = plan.rules.untolerated(&target.taints) {
            return Some(Shortfall::Taint(format!("{}:{}", taint.key, taint.effect)));
        }
        if !plan.rules.select(&target.node, &target.labels) {
            return Some(Shortfall::NotSelected);
        }
    }
    room(&target.allocatable, usage, &pod.requests)
}

/// All nodes to which those of `pods` that were dealt to them can't be bound together, each with its first reason.
pub fn check(
    pods: &[(&PodView, Rank)],
    targets: &BTreeMap<Rank, Target>,
    usage: &UsageByNode<'_>,
) -> BTreeMap<Rank, Shortfall> {
    let mut usages: BTreeMap<Rank, Usage> = BTreeMap::new();
    let mut failing = BTreeMap::new();
    for (pod, rank) in pods {
        let Some(target) = targets.get(rank) else {
            failing.entry(*rank).or_insert(Shortfall::Gone);
            continue;
        };
        let usage = usages.entry(*rank).or_insert_with(|| usage.all(&target.node).clone());
        if let Some(shortfall) = check_pod(target, usage, pod) {
            failing.entry(*rank).or_insert(shortfall);
        }
        usage.add(&pod.requests);
    }
    failing
}
