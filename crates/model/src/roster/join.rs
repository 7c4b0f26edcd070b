//! Gives ranks to new members, and other ranks to members of a deep tree that are cut off.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    vec,
};

use super::drain::leaving;
use crate::{
    broker_names::broker_name,
    members::{MemberState, Members},
    observed::{Observed, candidates_among, drained_by_others, entry, facts, has_failed, limit},
    prefix,
    tree::{is_deep, parent, topology},
};
use api::{Rank, Roster, RosterEntry};

/// The revision of an entry that is new in this round. [`super::decide`] numbers what has changed.
const NOT_NUMBERED: u64 = 0;

/// In a deep tree, moves a member to a free rank elsewhere if its broker is out of the overlay and its parent can't
/// come back by itself.
pub(super) fn relocate_stranded(seen: &Observed, members: &Members, roster: &mut Roster) {
    if !is_deep(&roster.settings) || !members.is_online(0) {
        return;
    }
    let stranded: Vec<Rank> = roster
        .ranks
        .iter()
        .filter_map(|(rank, entry)| {
            let member = entry.member.as_ref()?;
            let parent = parent(roster, *rank)?;
            // Without a report, nothing is known about the broker. A broker that runs may still be in the overlay, even if it does not
            // answer its agent.
            let is_unknown = members.state(*rank) == MemberState::NotReported;
            let may_be_in = (is_unknown || members.runs(*rank)) && !members.has_lead_lost(*rank);
            let is_out = member.gone_since.is_none() && !may_be_in;
            (is_out && is_hopeless(seen, members, roster, parent)).then_some(*rank)
        })
        .collect();
    for rank in stranded {
        let Some(free) = free_ranks(seen, members, roster).next() else { return };
        let Some(old) = roster.ranks.get_mut(&rank) else { continue };
        let moved = old.clone();
        old.vacate();
        let broker_name = broker_name(roster, free);
        roster.ranks.insert(free, RosterEntry { broker_name, reserved_for: None, revision: NOT_NUMBERED, ..moved });
    }
}

/// True if `rank` will not be in the overlay soon: it has no member, the member's Node is gone or not Ready, or its
/// broker can't start.
fn is_hopeless(seen: &Observed, members: &Members, roster: &Roster, rank: Rank) -> bool {
    let Some(member) = roster.member(rank) else { return true };
    let never_starts = || !members.runs(rank) && prefix::differs(seen, roster, &member.node).is_some();
    rank != 0 && (!members.is_ready(rank) || has_failed(seen, &member.node) || never_starts())
}

/// Gives a rank to each eligible node that has passed preflight and has none, while there is room.
pub(super) fn join(seen: &Observed, members: &Members, roster: &mut Roster) {
    let limit = limit(seen.spec, roster.settings.max_size);
    let with_rank: HashSet<&str> = roster.members().map(|member| member.uid.as_str()).collect();
    let members_before = with_rank.len();
    let mut nodes = candidates_among(seen, |node| !with_rank.contains(node.uid.as_str()));
    let empty = roster.ranks.iter().filter(|(_, entry)| entry.member.is_none());
    let reserved: HashMap<String, Rank> =
        empty.filter_map(|(rank, entry)| Some((entry.reserved_for.clone()?, *rank))).collect();
    // Nodes that come back to their own rank go before nodes that never had one.
    nodes.sort_by_key(|node| !reserved.contains_key(&node.uid));
    // Computed once, because nothing in this function makes a rank free: a reserved one is not, and a new member has no children before
    // it is online.
    let mut free = None;
    // By uid: an API server gives no two Nodes the same, but no member may have two ranks, whatever is observed.
    let mut joined = HashSet::new();
    for node in nodes {
        if members_before + joined.len() >= limit {
            return;
        }
        // If the node already runs a broker of this instance, for whatever rank, a second one must not start there.
        let runs = seen.report(&node.name).and_then(|report| report.adopted.as_ref());
        let runs = runs.is_some_and(|adopted| adopted.instance_id == roster.instance_id);
        let differs = prefix::differs(seen, roster, &node.name).is_some();
        if facts(seen, node).is_none() || runs || differs || joined.contains(node.uid.as_str()) {
            continue;
        }
        let parent_can_have_children =
            |rank: &Rank| parent(roster, *rank).is_none_or(|parent| can_have_children(members, roster, parent));
        let own = reserved.get(&node.uid).copied().filter(parent_can_have_children);
        let mut next = || free.get_or_insert_with(|| free_ranks(seen, members, roster)).next();
        // Without a rank, go on: a later node may still have a rank of its own.
        let Some(rank) = own.or_else(&mut next) else { continue };
        let broker_name = broker_name(roster, rank);
        let reserved_for = roster.ranks.get(&rank).and_then(|entry| entry.reserved_for.clone());
        let entry = entry(seen, &roster.settings, node, rank, broker_name, reserved_for, NOT_NUMBERED);
        roster.ranks.insert(rank, entry);
        joined.insert(node.uid.as_str());
    }
}

/// The ranks that any node may take: those
/// - without a member, and reserved for no node; if there was a member before, whose agent may report no more, the lead reports its
///   broker offline,
/// - that no agent reports as the rank of a broker that it has adopted,
/// - that nobody but us has drained,
/// - on which no job holds resources,
/// - under a parent that can have children ([`can_have_children`]).
///
/// Interior ranks come first, so that holes in a deep tree are filled before leaves are added.
fn free_ranks(seen: &Observed, members: &Members, roster: &Roster) -> vec::IntoIter<Rank> {
    let size = roster.settings.max_size;
    let adopted_ranks: BTreeSet<Rank> = seen
        .reports
        .values()
        .filter_map(|report| report.adopted.as_ref())
        .filter(|adopted| adopted.instance_id == roster.instance_id)
        .map(|adopted| adopted.rank)
        .collect();
    let allocated = members.report(0).and_then(|lead| lead.allocated.as_ref());
    let has_jobs = |rank: &Rank| allocated.is_some_and(|ranks| ranks.contains(*rank));
    let Some(topology) = topology(roster) else { return Vec::new().into_iter() };
    let drained = drained_by_others(seen, roster);
    let mut free: Vec<Rank> = (1..size)
        .filter(|rank| {
            let is_free = |entry: &RosterEntry| entry.member.is_none() && entry.reserved_for.is_none();
            roster.ranks.get(rank).is_none_or(|entry| is_free(entry) && members.has_lead_lost(*rank))
                && !adopted_ranks.contains(rank)
                && drained.is_none_or(|drained| !drained.contains(*rank))
                && !has_jobs(rank)
                && topology.parent(*rank).is_none_or(|parent| can_have_children(members, roster, parent))
        })
        .collect();
    free.sort_by_key(|rank| (!topology.is_interior(*rank, size), *rank));
    free.into_iter()
}

/// True if a rank may be given out under `parent`: it is online and not leaving. Ranks under the lead may always be
/// given out, because the joiner's broker waits for the lead anyway.
fn can_have_children(members: &Members, roster: &Roster, parent: Rank) -> bool {
    parent == 0 || (members.is_online(parent) && leaving(roster, parent).is_none())
}
