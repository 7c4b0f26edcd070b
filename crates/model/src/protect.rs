//! Which Nodes tell autoscalers to leave them alone. Kubernetes sees no pod of a Flux job, so an autoscaler takes the node
//! for idle and deletes it under the job.
//!
//! What somebody else has annotated stays as it is: a marker on the Node names the annotations that are ours.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    eligibility::NodeView,
    roster::{Observed, lead_report, topology},
};
use api::{ANNOTATION_PROTECTS, FluxNodeStatus, IdSet, Rank, Roster, RunningJobs};

/// Cluster Autoscaler's FAQ, "How can I prevent Cluster Autoscaler from scaling down a particular node?"; Karpenter's
/// documentation, "Disruption", node-level controls.
pub const PROTECTING: [&str; 2] =
    ["cluster-autoscaler.kubernetes.io/scale-down-disabled", "karpenter.sh/do-not-disrupt"];
/// The value of each.
const SAYS_SO: &str = "true";
/// Seconds without a job before a node is given back. Jobs come and go each second; autoscalers take minutes.
const REST_SECS: i64 = 60;

/// What is to change in one Node's annotations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The Node's name.
    pub node: String,
    /// Its uid.
    pub uid: String,
    /// New values; None: the annotation goes.
    pub annotations: BTreeMap<String, Option<String>>,
}

/// What a planner remembers of nodes. All of it can be lost: nodes keep their annotations a little longer then.
#[derive(Debug, Clone, Default)]
pub struct Protection {
    /// When a node was needed last, by its uid, in seconds since the Unix epoch.
    needed: BTreeMap<String, i64>,
    /// The policy of the instance that was seen last.
    running_jobs: RunningJobs,
}

impl Protection {
    /// What is to change while there is an instance. Nothing, where its lead is not heard: then nobody knows what runs.
    pub fn changes(&mut self, seen: &Observed, roster: Option<&Roster>) -> Vec<Change> {
        self.running_jobs = seen.spec.uninstall.running_jobs.clone();
        if !seen.spec.autoscaling.protect {
            return seen.nodes.iter().filter_map(taken_off).collect();
        }
        let Some((roster, needed)) = roster.and_then(|roster| Some((roster, needed(seen, roster)?))) else {
            return Vec::new();
        };
        let uids: BTreeSet<_> =
            needed.iter().filter_map(|rank| Some(roster.ranks.get(rank)?.member.as_ref()?.uid.as_str())).collect();
        let is_marked = |node: &&NodeView| node.annotations.contains_key(ANNOTATION_PROTECTS);
        self.needed.retain(|uid, _| seen.nodes.iter().any(|node| node.uid == *uid && is_marked(&node)));
        let mut changes = Vec::new();
        for node in seen.nodes {
            if uids.contains(node.uid.as_str()) {
                self.needed.insert(node.uid.clone(), seen.now);
                changes.extend(put_on(node));
            } else if is_marked(&node) {
                // A planner that is new here doesn't know for how long.
                let since = *self.needed.entry(node.uid.clone()).or_insert(seen.now);
                if seen.now - since >= REST_SECS {
                    changes.extend(taken_off(node));
                }
            }
        }
        changes
    }

    /// What is to change once the instance is over: all of ours goes, but where hosts keep running for their jobs.
    pub fn at_the_end(&self, nodes: &[NodeView], reports: &BTreeMap<String, FluxNodeStatus>) -> Vec<Change> {
        let runs = |report: &FluxNodeStatus| report.adopted.is_some();
        let lead = reports.values().find(|report| report.adopted.as_ref().is_some_and(|broker| broker.rank == 0));
        let are_jobs_left = lead.is_some_and(|lead| lead.allocated.as_ref().is_none_or(|ranks| !ranks.is_empty()));
        let is_waited_for = self.running_jobs != RunningJobs::Cancel && are_jobs_left;
        let free = nodes.iter().filter(|node| !(is_waited_for && reports.get(&node.name).is_some_and(runs)));
        free.filter_map(taken_off).collect()
    }
}

/// The ranks on which jobs run, and those above them in the tree: a job ends with the broker that its own hangs on. The lead
/// always: the queue is on its disk. None: not known.
fn needed(seen: &Observed, roster: &Roster) -> Option<BTreeSet<Rank>> {
    let IdSet(busy) = lead_report(seen, roster)?.allocated.as_ref()?;
    let topology = topology(roster)?;
    let mut needed = BTreeSet::from([0]);
    for rank in busy {
        needed.extend(std::iter::once(*rank).chain(topology.ancestors(*rank)));
    }
    Some(needed)
}

fn put_on(node: &NodeView) -> Option<Change> {
    let missing = PROTECTING.iter().copied().filter(|key| !node.annotations.contains_key(*key));
    let missing: Vec<_> = missing.collect();
    let mut annotations: BTreeMap<_, _> =
        missing.iter().map(|key| ((*key).to_owned(), Some(SAYS_SO.to_owned()))).collect();
    let marked = PROTECTING.iter().copied().filter(|key| missing.contains(key) || is_ours(node, key));
    let marked = marked.collect::<Vec<_>>().join(",");
    annotations.insert(ANNOTATION_PROTECTS.to_owned(), Some(marked));
    (!missing.is_empty()).then(|| change(node, annotations))
}

fn taken_off(node: &NodeView) -> Option<Change> {
    node.annotations.get(ANNOTATION_PROTECTS)?;
    // A value that somebody else has changed stays.
    let ours = PROTECTING
        .iter()
        .filter(|key| is_ours(node, key) && node.annotations.get(**key).is_some_and(|value| value == SAYS_SO));
    let annotations = ours.chain([&ANNOTATION_PROTECTS]).map(|key| ((*key).to_owned(), None)).collect();
    Some(change(node, annotations))
}

fn is_ours(node: &NodeView, key: &str) -> bool {
    node.annotations.get(ANNOTATION_PROTECTS).is_some_and(|ours| ours.split(',').any(|name| name == key))
}

fn change(node: &NodeView, annotations: BTreeMap<String, Option<String>>) -> Change {
    Change { node: node.name.clone(), uid: node.uid.clone(), annotations }
}

#[cfg(test)]
#[path = "protect_tests.rs"]
mod tests;
