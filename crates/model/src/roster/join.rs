//! Gives ranks to new members, and other ranks to members of a deep tree that are cut off.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::{
    Observed, candidates, does_lead_miss, drain::leaving, drained_by_others, entry, facts, has_failed, holds, is_deep,
    is_online, is_ready, limit, parent, topology,
};
use crate::{broker_toml::broker_name, prefix};
use api::{Rank, Roster, RosterEntry};

/// In a deep tree, moves a member to a free rank elsewhere if its broker is out of the overlay and its parent can't
/// come back by itself.
pub(super) fn relocate_stranded(seen: &Observed, roster: &mut Roster) {
    if !is_deep(&roster.settings) || !is_online(seen, roster, 0) {
        return;
    }
    let stranded: Vec<Rank> = roster
        .ranks
        .iter()
        .filter_map(|(rank, entry)| {
            let member = entry.member.as_ref()?;
            let parent = parent(roster, *rank)?;
            // A missing report says nothing about the broker.
            let is_silent = !seen.reports.contains_key(&member.node) && !does_lead_miss(seen, roster, *rank);
            // A broker that does not answer its agent may still be in the overlay.
            let may_be_in = holds(seen, roster, *rank).is_some() && !does_lead_miss(seen, roster, *rank);
            let is_out = member.gone_since.is_none() && !is_silent && !may_be_in && !is_online(seen, roster, *rank);
            (is_out && is_hopeless(seen, roster, parent)).then_some(*rank)
        })
        .collect();
    for rank in stranded {
        let Some(free) = free_rank(seen, roster) else { return };
        let Some(old) = roster.ranks.get_mut(&rank) else { continue };
        let moved = old.clone();
        old.vacate();
        let broker_name = broker_name(roster, free);
        roster.ranks.insert(free, RosterEntry { broker_name, reserved_for: None, revision: 0, ..moved });
    }
}

/// True if `rank` will not be in the overlay soon: it has no member, the member's Node is gone or not Ready, or its
/// broker can't start.
fn is_hopeless(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let Some(member) = roster.member(rank) else { return true };
    let never_starts = || holds(seen, roster, rank).is_none() && prefix::differs(seen, roster, &member.node).is_some();
    rank != 0 && (!is_ready(seen, member) || has_failed(seen, &member.node) || never_starts())
}

/// Gives a rank to each eligible node that has passed preflight and has none, while there is room.
pub(super) fn join(seen: &Observed, roster: &mut Roster) {
    let limit = limit(seen.spec, roster.settings.max_size);
    let mut members: HashSet<String> = roster.members().map(|member| member.uid.clone()).collect();
    let mut nodes = candidates(seen);
    let kept = roster.ranks.iter().filter(|(_, entry)| entry.member.is_none());
    let kept: HashMap<String, Rank> =
        kept.filter_map(|(rank, entry)| Some((entry.reserved_for.clone()?, *rank))).collect();
    // Nodes that come back to their own rank go before nodes that never had one.
    nodes.sort_by_key(|node| !kept.contains_key(&node.uid));
    let mut is_full = false;
    for node in nodes {
        if members.len() >= limit {
            return;
        }
        // If the node already runs a broker of this instance, for whatever rank, a second one must not start there.
        let runs = seen.reports.get(&node.name).and_then(|report| report.adopted.as_ref());
        let runs = runs.is_some_and(|adopted| adopted.instance_id == roster.instance_id);
        let differs = prefix::differs(seen, roster, &node.name).is_some();
        if members.contains(&node.uid) || facts(seen, node).is_none() || runs || differs {
            continue;
        }
        let is_held = |rank: &Rank| parent(roster, *rank).is_none_or(|parent| can_carry(seen, roster, parent));
        let own = kept.get(&node.uid).copied().filter(is_held);
        let free = || if is_full { None } else { free_rank(seen, roster) };
        let Some(rank) = own.or_else(free) else {
            // Go on: a later node may still have a rank of its own.
            is_full = true;
            continue;
        };
        let broker_name = broker_name(roster, rank);
        let reserved_for = roster.ranks.get(&rank).and_then(|entry| entry.reserved_for.clone());
        let joined = entry(seen, node, rank, broker_name, reserved_for, 0);
        roster.ranks.insert(rank, joined);
        members.insert(node.uid.clone());
    }
}

/// A rank that any node may take: without a member, kept for no node, not drained, claimed by no broker that runs, and
/// under a parent that is online. If the rank was held before, the lead must report the old broker offline first: that
/// node's agent no longer reports. It returns interior ranks first, so that holes in a deep tree are filled before
/// leaves are added.
fn free_rank(seen: &Observed, roster: &Roster) -> Option<Rank> {
    let size = roster.settings.max_size;
    let claimed: BTreeSet<Rank> = seen
        .reports
        .values()
        .filter_map(|report| report.adopted.as_ref())
        .filter(|adopted| adopted.instance_id == roster.instance_id)
        .map(|adopted| adopted.rank)
        .collect();
    let allocated = holds(seen, roster, 0).and_then(|(lead, _)| lead.allocated.as_ref());
    let has_jobs = |rank: &Rank| allocated.is_some_and(|ranks| ranks.contains(*rank));
    let (topology, drained) = (topology(roster)?, drained_by_others(seen, roster));
    let free = (1..size).filter(|rank| {
        let is_free = |entry: &RosterEntry| entry.member.is_none() && entry.reserved_for.is_none();
        roster.ranks.get(rank).is_none_or(|entry| is_free(entry) && does_lead_miss(seen, roster, *rank))
            && !claimed.contains(rank)
            && !drained.contains(*rank)
            && !has_jobs(rank)
            && topology.parent(*rank).is_none_or(|parent| can_carry(seen, roster, parent))
    });
    free.min_by_key(|rank| (!topology.is_interior(*rank, size), *rank))
}

/// True if a rank may be given out under `parent`: it is online and not leaving. Ranks under the lead may always be
/// given out, because the joiner's broker waits for the lead anyway.
fn can_carry(seen: &Observed, roster: &Roster, parent: Rank) -> bool {
    parent == 0 || (is_online(seen, roster, parent) && leaving(roster, parent).is_none())
}
