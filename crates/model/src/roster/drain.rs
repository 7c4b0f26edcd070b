//! Members that get no new jobs: those that leave are drained, idle, stopped, and only then without rank; those that have
//! less than they declare are drained, idle, and then declare what they have.

use std::collections::{BTreeSet, HashMap};

use super::{Observed, by_uid, does_lead_miss, lead_report, limit, resources, topology};
use crate::{
    eligibility::{NodeView, selected},
    resources::lack,
};
use api::{Draining, FluxNodeStatus, IdSet, Rank, Roster, RosterEntry};

/// What the lead says of its drained ranks can be so old: its agent asks the broker every 2 s. A node that is uncordoned and
/// at once drained again for another reason may have got a job in between.
const REPORT_SECS: i64 = 5;

/// The taints by which autoscalers keep pods off a node that they are about to delete, and which they take back if they change
/// their mind: Cluster Autoscaler's (utils/taints) and Karpenter's (v1, "Disruption").
const DELETES: [&str; 2] = ["ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted"];

/// Says who is to be drained and why, takes it back where the reason is gone, and frees the ranks of those who have left.
pub(super) fn drain(seen: &Observed, roster: &mut Roster) {
    let limit = limit(seen.spec, roster.settings.max_size);
    let nodes = by_uid(seen);
    let members: Vec<Rank> = roster.ranks.iter().filter(|(_, e)| e.member.is_some()).map(|(rank, _)| *rank).collect();
    let topology = topology(roster);
    // Those whose brokers end, and all below them with them.
    let mut ending: BTreeSet<Rank> = seen.reports.values().filter_map(|report| lingers(seen, roster, report)).collect();
    for (place, rank) in members.into_iter().enumerate() {
        let hangs_on = || topology?.ancestors(rank).find(|above| ending.contains(above));
        let below = || hangs_on().map(|above| (format!("rank {above}, which it hangs on, leaves"), false));
        let wanted = reason(seen, &nodes, roster, rank, place >= limit).or_else(below);
        let stopped = has_left(seen, roster, rank);
        let Some(entry) = roster.ranks.get_mut(&rank) else { continue };
        if entry.member.as_ref().is_some_and(|member| !nodes.contains_key(member.uid.as_str())) {
            // A Node that was deleted is no reason to give jobs to its broker again.
            continue;
        }
        entry.drain = wanted.map(|(reason, leave)| {
            let since =
                entry.drain.as_ref().filter(|before| before.leave == leave).map_or(seen.now, |before| before.since);
            Draining { reason, leave, since }
        });
        match &entry.drain {
            Some(drain) if drain.leave && stopped => entry.vacate(),
            Some(drain) if drain.leave => drop(ending.insert(rank)),
            _ => {}
        }
    }
}

/// Why rank `rank` is to be drained, and whether it is to leave.
fn reason(
    seen: &Observed,
    nodes: &HashMap<&str, &NodeView>,
    roster: &Roster,
    rank: Rank,
    is_too_many: bool,
) -> Option<(String, bool)> {
    let member = roster.member(rank)?;
    let node = *nodes.get(member.uid.as_str())?;
    // The lead's statedir holds the queue: it never leaves.
    if rank != 0 && is_too_many {
        return Some((format!("size is {}", seen.spec.size.unwrap_or_default()), true));
    }
    if rank != 0 && !selected(node, &seen.spec.nodes) {
        return Some(("its labels don't match spec.nodes.selector".to_owned(), true));
    }
    if let Some(reason) = going(node) {
        return Some((reason.to_owned(), false));
    }
    let declared = roster.ranks.get(&rank)?.resources.as_ref()?;
    let now = resources(seen, node, rank, Some(declared))?;
    lack(declared, &now).map(|reason| (reason, false))
}

/// What an administrator or an autoscaler says of a node before it goes. Taints that kubelet's conditions set are no such word.
fn going(node: &NodeView) -> Option<&'static str> {
    match () {
        () if node.deleting => Some("the node is being deleted"),
        () if node.cordoned => Some("the node is cordoned"),
        () if node.taints.iter().any(|taint| DELETES.contains(&taint.key.as_str())) => {
            Some("an autoscaler is about to delete the node")
        }
        () => None,
    }
}

/// The member of `rank` is to leave.
pub(super) fn leaving(roster: &Roster, rank: Rank) -> Option<&Draining> {
    roster.ranks.get(&rank)?.drain.as_ref().filter(|drain| drain.leave)
}

/// The broker that the node's agent reports is of this epoch, its rank has no member any more, and the lead has not told that
/// it is out of the overlay: its rank.
pub fn lingers(seen: &Observed, roster: &Roster, report: &FluxNodeStatus) -> Option<Rank> {
    let adopted = report.adopted.as_ref()?;
    let is_ours = adopted.instance_id == roster.instance_id && adopted.epoch == roster.epoch;
    let has_no_member = roster.ranks.get(&adopted.rank).is_some_and(|entry| entry.member.is_none());
    (is_ours && has_no_member && !does_lead_miss(seen, roster, adopted.rank)).then_some(adopted.rank)
}

/// A leaving member may be stopped: the lead has drained it and no job runs there nor below it, or its time is over.
pub fn may_stop(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let is_of_no_use = || gets_no_jobs(seen, roster, rank) && !may_carry_jobs(seen, roster, rank);
    leaving(roster, rank).is_some() && (is_overdue(seen, roster, rank) || is_of_no_use())
}

/// Jobs run below `rank` in a deep tree, or may be given to somebody there any moment: with its broker all those below it
/// end, and their jobs.
pub fn may_carry_jobs(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let size = roster.settings.max_size;
    let Some(topology) = topology(roster).filter(|topology| topology.is_interior(rank, size)) else { return false };
    let allocated = lead_report(seen, roster).and_then(|lead| lead.allocated.as_ref());
    let is_below = |other: Rank| topology.ancestors(other).any(|above| above == rank);
    let gets_none = |rank, entry| does_lead_miss(seen, roster, rank) || does_lead_keep_idle(seen, roster, rank, entry);
    allocated.is_none_or(|IdSet(ranks)| ranks.iter().any(|busy| is_below(*busy)))
        || roster.ranks.iter().any(|(other, entry)| is_below(*other) && !gets_none(*other, entry))
}

/// No job runs on `rank`, by the lead's word, and none will: it is to be drained, and the lead has done so.
pub(super) fn gets_no_jobs(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let entry = roster.ranks.get(&rank).filter(|entry| entry.drain.is_some());
    entry.is_some_and(|entry| does_lead_keep_idle(seen, roster, rank, entry))
}

/// As [`may_stop`], of a rank whose member is gone and whose broker is not.
pub fn is_former_idle(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let entry = roster.ranks.get(&rank).filter(|entry| entry.member.is_none());
    entry.is_some_and(|entry| does_lead_keep_idle(seen, roster, rank, entry)) && !may_carry_jobs(seen, roster, rank)
}

fn does_lead_keep_idle(seen: &Observed, roster: &Roster, rank: Rank, entry: &RosterEntry) -> bool {
    // Flux drains nobody whom it has excluded.
    let is_excluded = |lead: &FluxNodeStatus| entry.is_excluded() && lead.applied_revision >= Some(entry.revision);
    lead_report(seen, roster).is_some_and(|lead| is_idle(lead, rank, is_excluded(lead)))
}

/// Its time is over: jobs that still run there are lost.
pub fn is_overdue(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let Some(drain) = leaving(roster, rank) else { return false };
    let timeout = seen.spec.drain.timeout.as_deref().and_then(api::parse_duration);
    let waited = u64::try_from(seen.now - drain.since).unwrap_or(0);
    timeout.is_some_and(|timeout| waited >= timeout.as_secs())
}

/// As [`gets_no_jobs`], and not by a word of the lead that is about an earlier drain.
pub(super) fn has_no_jobs_for_sure(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let drain = roster.ranks.get(&rank).and_then(|entry| entry.drain.as_ref());
    drain.is_some_and(|drain| seen.now - drain.since > REPORT_SECS) && gets_no_jobs(seen, roster, rank)
}

fn is_idle(lead: &FluxNodeStatus, rank: Rank, is_excluded: bool) -> bool {
    let (Some(drained), Some(allocated)) = (&lead.drained, &lead.allocated) else { return false };
    (is_excluded || drained.contains(rank)) && !allocated.contains(rank)
}

/// The agent of a member that is to stop its broker says that it has. That none runs is not enough: it may be between two
/// starts. And the lead has the last word: the agent's may be of an earlier time that the member was to leave.
fn has_left(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let Some(member) = roster.member(rank) else { return false };
    let report = seen.reports.get(&member.node);
    report.is_some_and(|report| report.left && report.adopted.is_none()) && may_stop(seen, roster, rank)
}
