//! Updates the members that stay, come back, or are gone for good.

use super::drain::has_no_jobs_for_sure;
use crate::{
    eligibility::NodeView,
    lead::is_lead_fixed,
    members::Members,
    observed::{Observed, facts, lacks_since, may_declare_less, resources, retain_secs},
};
use api::{Member, Roster, RosterEntry};

/// Updates each rank that has a member: its declared resources, and whether its Node is gone or back.
pub(super) fn keep_members(seen: &Observed, members: &Members, roster: &mut Roster) {
    let retain = retain_secs(seen.spec);
    let is_lead_fixed = is_lead_fixed(roster);
    let mut again = Vec::new();
    for (rank, entry) in &mut roster.ranks {
        // While a broker starts, we don't know which R it will verify its hardware against.
        let is_idle = members.is_online(*rank) && has_no_jobs_for_sure(seen, members, *rank, entry);
        let Some(member) = &mut entry.member else {
            // A rank whose member is gone stays excluded while its broker is in the overlay: otherwise that broker
            // would get the jobs that its member was not to get.
            if let Some(declared) = entry.resources.as_mut().filter(|_| members.has_lead_lost(*rank)) {
                declared.excluded = false;
            }
            continue;
        };
        // Only the host of that name has the lead's queue, so a new Node of the lead's name takes over rank 0. If
        // another machine has the name, its agent refuses to start without the queue, unless the instance is to begin
        // with an empty one.
        let is_lead_again = |node: &NodeView| *rank == 0 && is_lead_fixed && node.uid != member.uid;
        let is_member_again = |node: &NodeView| members.runs(*rank) && is_registered_again(seen, node, member);
        let known = members.node(*rank);
        // A member whose Node has its uid and its name was not registered again.
        let is_same = known.is_some_and(|node| node.name == member.node);
        let namesake = if is_same { None } else { seen.nodes.named(&member.node) };
        let new_node = namesake.filter(|node| is_lead_again(node) || is_member_again(node));
        if let Some(node) = new_node {
            entry.reserved_for = entry.reserved_for.take().map(|_| node.uid.clone());
            member.uid.clone_from(&node.uid);
            again.push((*rank, node.uid.as_str()));
        }
        let Some(node) = new_node.or(known) else {
            let since = *member.gone_since.get_or_insert(seen.now);
            // The lead's statedir holds the queue: no other node can take its rank.
            if *rank != 0 && seen.now - since >= retain {
                entry.vacate();
            }
            continue;
        };
        member.gone_since = None;
        if let Some(address) = node.address {
            member.address = address;
        }
        let host = if new_node.is_some() { facts(seen, node) } else { members.host(*rank) };
        if let Some(mut now) = resources(seen.spec, &roster.settings, node, host, *rank, entry.resources.as_ref()) {
            // Flux can't drain a rank while it excludes it. If the exclusion ended while a drain is wanted, the rank
            // would get jobs before it is drained.
            now.excluded |= entry.is_excluded() && entry.drain.is_some();
            entry.lacks_since = lacks_since(seen, host, entry);
            // A reloaded scheduler kills jobs that hold resources that are no longer declared, and refuses jobs that
            // wait for them.
            let takes_nothing = entry.resources.as_ref().is_none_or(|before| now.covers(before));
            if takes_nothing || (is_idle && may_declare_less(seen, entry.lacks_since)) {
                (entry.resources, entry.lacks_since) = (Some(now), None);
            }
        }
    }
    // A node whose broker was reported late may have got another rank meanwhile. It runs nothing there, so take that
    // rank back.
    for (rank, uid) in again {
        let twice = |entry: &RosterEntry| entry.member.as_ref().is_some_and(|member| member.uid == uid);
        for (_, entry) in roster.ranks.iter_mut().filter(|(other, entry)| **other != rank && twice(entry)) {
            entry.vacate();
        }
    }
}

/// True if `node` is the machine of `member` under a new Node object, as after `kubectl delete node` and a restart of
/// kubelet: its boot ID is the one that the agent with the member's broker reports. Another machine with that name has
/// another boot ID.
fn is_registered_again(seen: &Observed, node: &NodeView, member: &Member) -> bool {
    let boot = seen.report(&node.name).and_then(|report| report.facts.as_ref()).map(|facts| &facts.boot_id);
    node.name == member.node && node.uid != member.uid && !node.boot_id.is_empty() && boot == Some(&node.boot_id)
}
