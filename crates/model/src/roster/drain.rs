//! Drains members, so that they get no new jobs. A member that leaves is drained, becomes idle, is stopped, and only
//! then loses its rank. A member that has less than it declares is drained, becomes idle, and then declares what it
//! has.

use std::collections::BTreeSet;

use crate::{
    eligibility::{NodeView, selected},
    members::{MemberState, Members},
    observed::{Observed, limit, resources},
    resources::lack,
    tree::topology,
};
use api::{Draining, Rank, Roster, RosterEntry};

/// Maximum age of the drained ranks in the lead's report, in seconds: its agent asks the broker every 2 s. If a node is
/// uncordoned and at once drained again for another reason, it may have got a job in between, and the report may be
/// about the first drain.
const REPORT_SECS: i64 = 5;

/// The taints with which autoscalers keep pods off a node that they are about to delete: Cluster Autoscaler's
/// (utils/taints) and Karpenter's (v1, "Disruption"). The autoscaler removes its taint if it decides to keep the node.
const DELETES: [&str; 2] = ["ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted"];

/// Sets and clears the drain of each member, and frees the ranks of members that have left.
pub(super) fn drain(seen: &Observed, members: &Members, roster: &mut Roster) {
    let limit = limit(seen.spec, roster.settings.max_size);
    let ranks: Vec<Rank> = roster.ranks.iter().filter(|(_, e)| e.member.is_some()).map(|(rank, _)| *rank).collect();
    let topology = topology(roster);
    // Ranks whose brokers are going to end. All brokers below them end too, so those are drained as well.
    let mut ending: BTreeSet<Rank> =
        seen.reports.values().filter_map(|report| members.orphan_broker_rank(report)).collect();
    for (place, rank) in ranks.into_iter().enumerate() {
        let ending_ancestor = || topology?.ancestors(rank).find(|above| ending.contains(above));
        let below =
            || ending_ancestor().map(|above| (format!("rank {above}, above it in the tree, is leaving"), false));
        let wanted = reason(seen, members, roster, rank, place >= limit).or_else(below);
        let stopped = has_left(seen, members, roster, rank);
        let Some(entry) = roster.ranks.get_mut(&rank) else { continue };
        if members.node(rank).is_none() {
            // The Node is deleted. Keep its drain: its broker may still run and must not get jobs again.
            continue;
        }
        let before = entry.drain.take();
        let wanted = match wanted {
            None if before.is_some() => waits_for_broker(members, rank).map(|reason| (reason.to_owned(), false)),
            wanted => wanted,
        };
        entry.drain = wanted.map(|(reason, leave)| {
            let since = before.filter(|before| before.leave == leave).map_or(seen.now, |before| before.since);
            Draining { reason, leave, since }
        });
        match &entry.drain {
            Some(drain) if drain.leave && stopped => entry.vacate(),
            Some(drain) if drain.leave => drop(ending.insert(rank)),
            _ => {}
        }
    }
}

/// Why `rank` is to be drained, and whether its member is to leave. None if it is not to be drained.
fn reason(
    seen: &Observed,
    members: &Members,
    roster: &Roster,
    rank: Rank,
    is_too_many: bool,
) -> Option<(String, bool)> {
    let node = members.node(rank)?;
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
    let now = resources(seen.spec, &roster.settings, node, members.host(rank), rank, Some(declared))?;
    lack(declared, &now).map(|reason| (reason, false))
}

/// Why a drained rank stays drained although nothing else asks for it. After a reboot, Flux takes the old broker for alive for
/// some seconds, would start jobs on it, and lose them when the new one joins.
fn waits_for_broker(members: &Members, rank: Rank) -> Option<&'static str> {
    match () {
        () if !members.is_online(rank) => Some("its broker is not online yet"),
        () if !members.is_report_of_this_boot(rank) => Some("its agent has not reported since the node booted"),
        () => None,
    }
}

/// Why a node is about to go, if an administrator or an autoscaler has marked it. Taints of node conditions don't
/// count.
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

/// Returns the drain of `rank` if its member is to leave.
pub(super) fn leaving(roster: &Roster, rank: Rank) -> Option<&Draining> {
    roster.ranks.get(&rank)?.drain.as_ref().filter(|drain| drain.leave)
}

/// True if a leaving member's broker may be stopped: the lead has drained the rank and no host job and no gang runs on it, and no
/// host job below it, or `spec.drain.timeout` has passed. Single pods run on, on a node that is a member no more.
pub fn may_stop(seen: &Observed, members: &Members, roster: &Roster, rank: Rank) -> bool {
    let is_unused = || may_be_left(members, roster, rank) && !members.may_carry_jobs(rank);
    leaving(roster, rank).is_some() && (is_overdue(seen, roster, rank) || is_unused())
}

/// True if, according to the lead, no host job and no gang runs on `rank` and none will: the roster drains the rank, and the lead
/// has done so.
fn may_be_left(members: &Members, roster: &Roster, rank: Rank) -> bool {
    roster.ranks.get(&rank).is_some_and(|entry| entry.drain.is_some()) && members.gets_no_jobs_but_single_pods(rank)
}

/// As [`may_stop`], for a rank that has no member any more but still a broker.
pub fn is_former_idle(members: &Members, rank: Rank) -> bool {
    members.state(rank) == MemberState::Vacant && members.gets_no_host_jobs(rank) && !members.may_carry_jobs(rank)
}

/// True if `spec.drain.timeout` has passed since the member of `rank` was told to leave. Jobs that still run there are
/// lost.
pub fn is_overdue(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let Some(drain) = leaving(roster, rank) else { return false };
    let timeout = seen.spec.drain.timeout.as_deref().and_then(api::parse_duration);
    let waited = u64::try_from(seen.now - drain.since).unwrap_or(0);
    timeout.is_some_and(|timeout| waited >= timeout.as_secs())
}

/// True if, according to the lead, nothing holds resources of `rank` and nothing will, and the drain is old enough that the lead's
/// report can't be about an earlier one. `entry`: that of `rank`.
pub(super) fn has_no_jobs_for_sure(seen: &Observed, members: &Members, rank: Rank, entry: &RosterEntry) -> bool {
    entry.drain.as_ref().is_some_and(|drain| seen.now - drain.since > REPORT_SECS) && members.gets_no_jobs_at_all(rank)
}

/// True if the member of `rank` has left: its agent reports that it stopped the broker in order to leave. A report
/// without a broker is not enough, because the broker may be between two starts. [`may_stop`] must hold as well,
/// because the agent's report may be about an earlier order to leave.
fn has_left(seen: &Observed, members: &Members, roster: &Roster, rank: Rank) -> bool {
    let Some(member) = roster.member(rank) else { return false };
    let report = seen.report(&member.node);
    report.is_some_and(|report| report.leave_completed && report.adopted.is_none())
        && may_stop(seen, members, roster, rank)
}
