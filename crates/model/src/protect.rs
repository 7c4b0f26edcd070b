//! Which Nodes get annotations that keep autoscalers away. A Flux job has no pod, so an autoscaler considers the node
//! idle and would delete it under the job.
//!
//! Annotations that others wrote stay as they are: a marker annotation on the Node names those that the planner wrote.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    eligibility::{NodeView, PROTECTING},
    members::Planned,
    nodes::Nodes,
};
use crate::{
    marks::NodeChange,
    observed::{Observed, Reports},
    tree::topology,
};
use api::{ANNOTATION_PROTECTS, FluxNodeStatus, Rank, RunningJobs};

/// The value of each of [`PROTECTING`].
const PROTECTED: &str = "true";
/// How long a node must be without a job before its annotations are removed, in seconds. Jobs may come and go each
/// second; autoscalers take minutes.
const REST_SECS: i64 = 60;

/// What the planner remembers from round to round. If it is lost, nodes only keep their annotations a little longer.
#[derive(Debug, Clone, Default)]
pub struct Protection {
    /// When each node was last needed, by uid, in seconds since the Unix epoch.
    needed: BTreeMap<String, i64>,
    /// `spec.uninstall.runningJobs` of the last instance.
    running_jobs: RunningJobs,
}

impl Protection {
    /// The changes while there is an instance. None while its lead is offline, because then it is unknown where jobs
    /// run.
    pub fn changes(&mut self, seen: &Observed, planned: Option<&Planned>) -> Vec<NodeChange> {
        self.running_jobs = seen.spec.uninstall.running_jobs.clone();
        if !seen.spec.autoscaling.protect {
            return seen.nodes.iter().filter_map(|node| unprotect(node)).collect();
        }
        let Some((roster, needed)) = planned.and_then(|planned| Some((planned.roster, needed(planned)?))) else {
            return Vec::new();
        };
        let uids: BTreeSet<_> =
            needed.iter().filter_map(|rank| Some(roster.ranks.get(rank)?.member.as_ref()?.uid.as_str())).collect();
        let is_marked = |node: &NodeView| node.annotations.contains_key(ANNOTATION_PROTECTS);
        self.needed.retain(|uid, _| seen.nodes.with_uid(uid).is_some_and(is_marked));
        let mut changes = Vec::new();
        for node in &seen.nodes {
            if uids.contains(node.uid.as_str()) {
                self.needed.insert(node.uid.clone(), seen.now);
                changes.extend(protect(node));
            } else if is_marked(node) {
                // A new planner doesn't know when the node was last needed, so it counts from now.
                let since = *self.needed.entry(node.uid.clone()).or_insert(seen.now);
                if seen.now - since >= REST_SECS {
                    changes.extend(unprotect(node));
                }
            }
        }
        // A round may not come to the last ones, and a node with jobs is in danger until its annotations are there.
        changes.sort_by_key(|change| change.annotations.values().all(Option::is_none));
        changes
    }

    /// The changes once the instance is being deleted: removes all of the planner's annotations, except on hosts whose
    /// brokers keep running until their jobs end. If two hosts report rank 0, either may be the lead, so the jobs of both count.
    pub fn at_the_end(&self, nodes: &Nodes, reports: &Reports) -> Vec<NodeChange> {
        let runs = |report: &FluxNodeStatus| report.adopted.is_some();
        let is_lead = |report: &FluxNodeStatus| report.adopted.as_ref().is_some_and(|broker| broker.rank == 0);
        let may_have_jobs = |lead: &FluxNodeStatus| lead.ranks_of_host_jobs().is_none_or(|ranks| !ranks.is_empty());
        let are_jobs_left = reports.values().any(|report| is_lead(report) && may_have_jobs(report));
        let is_waited_for = self.running_jobs != RunningJobs::Cancel && are_jobs_left;
        let free = nodes
            .iter()
            .filter(|node| !(is_waited_for && reports.get(node.name.as_str()).is_some_and(|report| runs(report))));
        free.filter_map(|node| unprotect(node)).collect()
    }
}

/// The ranks on which host jobs or gangs run, and all ranks above them in the tree, because a job ends if a broker above its own
/// ends. An autoscaler sees a pod by itself, but not that a gang is of no use without one of its pods. Always includes the lead,
/// because the queue is on its disk. None if it is unknown where jobs run.
fn needed(Planned { roster, members, .. }: &Planned) -> Option<BTreeSet<Rank>> {
    let lead = members.lead_report()?;
    let busy = lead.ranks_of_host_jobs()?.0.union(&lead.gangs.0);
    let topology = topology(roster)?;
    let mut needed = BTreeSet::from([0]);
    for rank in busy {
        needed.extend(std::iter::once(*rank).chain(topology.ancestors(*rank)));
    }
    Some(needed)
}

fn protect(node: &NodeView) -> Option<NodeChange> {
    let missing = PROTECTING.iter().copied().filter(|key| !node.annotations.contains_key(*key));
    let missing: Vec<_> = missing.collect();
    let mut annotations: BTreeMap<_, _> =
        missing.iter().map(|key| ((*key).to_owned(), Some(PROTECTED.to_owned()))).collect();
    let marked = PROTECTING.iter().copied().filter(|key| missing.contains(key) || is_ours(node, key));
    let marked = marked.collect::<Vec<_>>().join(",");
    annotations.insert(ANNOTATION_PROTECTS.to_owned(), Some(marked));
    (!missing.is_empty()).then(|| change(node, annotations))
}

fn unprotect(node: &NodeView) -> Option<NodeChange> {
    node.annotations.get(ANNOTATION_PROTECTS)?;
    // If the value differs from what the planner wrote, another writer has changed it: leave it.
    let ours = PROTECTING
        .iter()
        .filter(|key| is_ours(node, key) && node.annotations.get(**key).is_some_and(|value| value == PROTECTED));
    let annotations = ours.chain([&ANNOTATION_PROTECTS]).map(|key| ((*key).to_owned(), None)).collect();
    Some(change(node, annotations))
}

fn is_ours(node: &NodeView, key: &str) -> bool {
    node.annotations.get(ANNOTATION_PROTECTS).is_some_and(|ours| ours.split(',').any(|name| name == key))
}

fn change(node: &NodeView, annotations: BTreeMap<String, Option<String>>) -> NodeChange {
    NodeChange { annotations, ..NodeChange::of(node) }
}

#[cfg(test)]
#[path = "protect_tests.rs"]
mod tests;
