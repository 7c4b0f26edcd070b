//! The roster: who holds which rank. One function, [`decide`], from what was observed to the next roster.
//!
//! Invariants within an epoch, whatever is observed: no rank has two members and no member two ranks; a member's rank changes
//! only where its broker is out of the overlay and its parent's rank can't come back; resources never shrink under a job;
//! the lead never changes once the instance was online, unless an administrator says so ([`takeover`]).

#[cfg(test)]
mod another_tests;
#[cfg(test)]
mod deep_tests;
mod drain;
pub(super) mod epoch;
#[cfg(test)]
mod epoch_tests;
#[cfg(test)]
mod failed_tests;
mod first;
mod join;
mod keep;
mod limits;
mod properties;
#[cfg(test)]
mod random_tests;
#[cfg(test)]
mod resources_tests;
#[cfg(test)]
mod scale_tests;
pub mod takeover;
#[cfg(test)]
mod takeover_tests;
#[cfg(test)]
pub(crate) mod tests;
mod turns;
#[cfg(test)]
mod turns_tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use super::{
    eligibility::{NodeView, eligible},
    resources::declared,
    topology::Topology,
};
pub use limits::{MovedDeadline, move_limits};

use api::{
    Adopted, Declared, EpochSettings, FailedLeads, FluxInstanceSpec, FluxInstanceStatus, FluxNodeStatus, IdSet, Member,
    NodePhase, ROSTER_FORMAT, Rank, Resources, Roster, RosterEntry,
};

/// A planner that has lost the roster waits so long for the agents of all Ready nodes before it believes that nothing runs.
const REPORTS_TIMEOUT: Duration = Duration::from_secs(60);
/// So long the first eligible node may take over preflight before the next one becomes lead.
pub(super) const LEAD_PATIENCE: Duration = Duration::from_secs(10);
/// How long a rank is kept for a Node that is gone, and what has vanished from a host is declared, unless the spec says
/// otherwise.
const DEFAULT_RETAIN_SECS: i64 = 600;

/// Everything a planner has seen.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// metadata.uid of the FluxInstance.
    pub instance_uid: &'a str,
    /// Its spec, which has passed `validate` but for [`decide_unserved`].
    pub spec: &'a FluxInstanceSpec,
    /// metadata.generation of the FluxInstance: counts the changes of its spec.
    pub generation: i64,
    /// Its status.
    pub status: &'a FluxInstanceStatus,
    /// All Nodes.
    pub nodes: &'a [NodeView],
    /// What the agents say, by node name.
    pub reports: &'a BTreeMap<String, FluxNodeStatus>,
    /// ConfigMap flux-roster, where it is there.
    pub roster: Option<&'a Roster>,
    /// Digest of the published package set.
    pub digest: Option<&'a str>,
    /// Fingerprint of the certificate in its Secret.
    pub certificate: Option<&'a str>,
    /// The Secret is gone, and brokers may use what was in it.
    pub is_certificate_gone: bool,
    /// Seconds since the Unix epoch.
    pub now: i64,
    /// How long this planner has held the Lease, and from the moment the roster is gone, how long it has been without.
    pub waited: Duration,
    /// The word of annotation [`ANNOTATION_RESTART`](api::ANNOTATION_RESTART).
    pub restart_word: Option<&'a str>,
    /// A random id, used if a new instance begins now.
    pub fresh_id: &'a str,
    /// Nodes whose agent does not run, and why, by name.
    pub agentless: &'a BTreeMap<String, String>,
}

/// What to do about the roster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// It is right as it is.
    Keep,
    /// Write this one.
    Write(Box<Roster>),
    /// Nothing can be decided before what the sentence names has happened.
    Wait(String),
}

/// Decides the next roster.
pub fn decide(seen: &Observed) -> Decision {
    match seen.roster {
        Some(roster) if roster.instance_uid == seen.instance_uid => with_roster(seen, roster),
        _ => first::without_roster(seen),
    }
}

/// The same where the spec can't be served: everything stays as it is, but nothing stays stopped for an epoch that does not
/// come.
pub fn decide_unserved(seen: &Observed) -> Decision {
    let own = |roster: &&Roster| roster.instance_uid == seen.instance_uid;
    let roster = seen.roster.filter(own).filter(|roster| roster.established);
    let next = roster.and_then(|roster| epoch::carry_on(seen, roster));
    next.map_or(Decision::Keep, |next| Decision::Write(Box::new(next)))
}

pub use turns::no_lead;

pub use drain::{is_former_idle, is_overdue, lingers, may_carry_jobs, may_stop};

/// The member of `rank` is in the overlay, by its own agent's word, and the lead does not miss it: under a parent that is
/// gone a broker believes for minutes that it is online.
pub fn is_online(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let is_silent = || rank == 0 && is_lead_silent(seen, roster);
    says_online(seen, roster, rank) && !does_lead_miss(seen, roster, rank) && !is_silent()
}

/// The lead's agent can't take back its word when its machine goes off, and it takes Kubernetes most of a minute to see that
/// the Node is not Ready. So most of the brokers that hang on the lead's own have to miss it, not counting those that it misses
/// itself; if its Node is not Ready, which alone is no evidence, any broker's word is enough.
pub fn is_lead_silent(seen: &Observed, roster: &Roster) -> bool {
    let Some(lead) = roster.lead().filter(|_| seen.reports.values().any(|report| report.unheard)) else { return false };
    let reports = |rank: Rank| holds(seen, roster, rank).filter(|_| rank != 0).map(|(report, _)| report.unheard);
    if !is_ready(seen, lead) {
        return roster.ranks.keys().any(|rank| reports(*rank) == Some(true));
    }
    let topology = topology(roster);
    let hangs_on_lead = |rank: &&Rank| topology.is_none_or(|topology| topology.parent(**rank) == Some(0));
    let children = roster.ranks.keys().filter(hangs_on_lead).filter(|rank| !does_lead_miss(seen, roster, **rank));
    let children = children.filter_map(|rank| reports(*rank));
    let (missed, heard): (Vec<bool>, Vec<bool>) = children.partition(|is_unheard| *is_unheard);
    missed.len() > heard.len()
}

/// An administrator has ended the running epoch by flux-shutdown(1), by the word of the lead's agent.
pub fn is_shut_down(seen: &Observed, roster: &Roster) -> bool {
    let report = roster.lead().and_then(|lead| seen.reports.get(&lead.node));
    report.is_some_and(|report| report.adopted.is_none() && report.shut_down == Some(roster.epoch))
}

/// The other brokers do not hear from the broker of `rank`, although the last word of its agent is that it is online; or it does
/// not answer its agent, and the lead has given it up.
pub fn is_missed(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let is_lost = does_lead_miss(seen, roster, rank);
    (says_online(seen, roster, rank) && !is_online(seen, roster, rank))
        || (says_offline(seen, roster, rank) && (is_lost || is_idle_and_torpid(seen, roster, rank)))
}

/// A broker that was stopped keeps its connection, so the lead never loses it: it finds the broker slow to answer, and gives it
/// no jobs. If none runs there nor below, nothing is lost with it.
fn is_idle_and_torpid(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let topology = topology(roster);
    let hangs_on_it = |other: u32| {
        other == rank || topology.is_none_or(|topology| topology.ancestors(other).any(|above| above == rank))
    };
    lead_report(seen, roster).is_some_and(|lead| {
        let allocated = lead.allocated.as_ref();
        lead.torpid.contains(rank) && allocated.is_some_and(|ranks| !ranks.0.iter().copied().any(hangs_on_it))
    })
}

fn says_offline(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    holds(seen, roster, rank).is_some_and(|(status, _)| status.phase == NodePhase::Offline)
}

fn says_online(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    holds(seen, roster, rank).is_some_and(|(status, _)| matches!(status.phase, NodePhase::Online | NodePhase::Draining))
}

/// The lead says that `rank` is not in the overlay. Without a word from it nobody is missed.
pub fn does_lead_miss(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    holds(seen, roster, 0).is_some_and(|(lead, _)| lead.offline.contains(&rank))
}

/// The member of `rank` runs the broker of that rank in this epoch: its report.
pub fn holds<'a>(seen: &Observed<'a>, roster: &Roster, rank: Rank) -> Option<(&'a FluxNodeStatus, &'a Adopted)> {
    let member = roster.member(rank)?;
    let status = seen.reports.get(&member.node)?;
    let adopted = status.adopted.as_ref()?;
    let same = adopted.rank == rank && adopted.epoch == roster.epoch && adopted.instance_id == roster.instance_id;
    same.then_some((status, adopted))
}

/// What the lead's agent says, while the lead is online: only then its word on the others is new.
pub(super) fn lead_report<'a>(seen: &Observed<'a>, roster: &Roster) -> Option<&'a FluxNodeStatus> {
    holds(seen, roster, 0).filter(|_| is_online(seen, roster, 0)).map(|(report, _)| report)
}

/// The Node of `member` is there and Ready.
pub fn is_ready(seen: &Observed, member: &Member) -> bool {
    seen.nodes.iter().any(|node| node.uid == member.uid && node.ready)
}

/// Ranks that somebody has drained, by the last word of the lead that there is. Flux keeps that by rank and name: whoever takes
/// such a rank gets no jobs.
fn drained_by_others(seen: &Observed, roster: &Roster) -> IdSet {
    let lead = roster.lead().and_then(|lead| seen.reports.get(&lead.node));
    lead.map(|report| report.drained_by_others.clone()).unwrap_or_default()
}

/// How many members there can be. A size that is no size counts for nothing: the spec may be one that can't be served.
fn limit(spec: &FluxInstanceSpec, max_size: u32) -> usize {
    spec.size.filter(|size| *size > 0).unwrap_or(u32::MAX).min(max_size) as usize
}

/// Why nodes that have no rank get none now: as many as there can be have one.
pub(super) fn no_room(seen: &Observed, roster: &Roster) -> Option<String> {
    let max_size = roster.settings.max_size;
    if roster.members().count() >= limit(seen.spec, max_size) {
        let size = seen.spec.size.filter(|size| *size <= max_size);
        return Some(size.map_or_else(|| format!("maxSize is {max_size}"), |size| format!("size is {size}")));
    }
    let drained = drained_by_others(seen, roster);
    let is_taken = |rank| {
        let entry = roster.ranks.get(&rank);
        entry.is_some_and(|entry| entry.member.is_some() || entry.reserved_for.is_some()) || drained.contains(rank)
    };
    (1..max_size).all(is_taken).then(|| {
        format!(
            "each of {max_size} ranks (maxSize) has a member, is kept for the node whose name it has, or was drained by somebody"
        )
    })
}

/// The broker was started for this FluxInstance, not for one before it whose node was off when that was deleted. An older agent
/// doesn't say so: it can't be of a FluxInstance that never had a roster, nor under another ID than the one that is known.
pub fn is_of_instance(seen: &Observed, adopted: &Adopted) -> bool {
    let by_id = || seen.status.instance_id.as_ref().map_or(seen.status.epoch > 0, |id| *id == adopted.instance_id);
    adopted.instance_uid.as_ref().map_or_else(by_id, |uid| uid == seen.instance_uid)
}

/// The node's host has a broker of an instance before this one: what it says of itself may be from before, and it is cleaned
/// first.
pub fn holds_another(seen: &Observed, node: &str) -> bool {
    let adopted = seen.reports.get(node).and_then(|report| report.adopted.as_ref());
    adopted.is_some_and(|adopted| !is_of_instance(seen, adopted))
}

/// The format in which an epoch begins: this version's, once the agents of all nodes read it. In the middle of an upgrade, those
/// that don't would start no broker.
fn format(seen: &Observed) -> u32 {
    let agents =
        seen.nodes.iter().filter_map(|node| seen.reports.get(&node.name)).filter(|report| report.agent.is_some());
    // Agents that don't say what they read, read the format before.
    let oldest = agents.map(|report| report.roster_format.max(ROSTER_FORMAT - 1)).min();
    oldest.unwrap_or(ROSTER_FORMAT).min(ROSTER_FORMAT)
}

/// Preflight has passed on `node`'s host, and by a word that is about this instance.
fn has_passed(seen: &Observed, node: &NodeView) -> bool {
    let is_removing = seen.reports.get(&node.name).is_some_and(|report| report.phase == NodePhase::Removing);
    facts(seen, node).is_some() && !holds_another(seen, &node.name) && !is_removing
}

/// The last step on the host of `node` failed.
fn has_failed(seen: &Observed, node: &str) -> bool {
    seen.reports.get(node).is_some_and(|report| report.phase == NodePhase::Failed)
}

/// Brokers of this FluxInstance run, or may start any moment, with the certificate that was published.
pub fn is_certificate_in_use(seen: &Observed) -> bool {
    let own = |roster: &Roster| roster.instance_uid == seen.instance_uid && roster.established;
    let mut adopted = seen.reports.values().filter_map(|report| report.adopted.as_ref());
    seen.roster.is_some_and(own)
        || seen.status.instance_id.is_some()
        || adopted.any(|adopted| is_of_instance(seen, adopted))
}

/// A certificate that was made `made_for` a FluxInstance (None: not known) is of one before this, and nothing of this one has
/// been started with it: it is made anew, else a broker of that instance which has been cut off could join this one.
pub fn is_certificate_of_another(seen: &Observed, made_for: Option<&str>) -> bool {
    let is_planned = seen.roster.is_some_and(|roster| roster.instance_uid == seen.instance_uid);
    made_for != Some(seen.instance_uid) && !is_planned && !is_certificate_in_use(seen)
}

/// The rank that the Node with `uid` holds.
pub fn rank_of(roster: &Roster, uid: &str) -> Option<Rank> {
    let holds = |entry: &RosterEntry| entry.member.as_ref().is_some_and(|member| member.uid == uid);
    roster.ranks.iter().find(|(_, entry)| holds(entry)).map(|(rank, _)| *rank)
}

/// How long a rank is kept for a Node that is gone, in seconds.
pub fn retain_secs(spec: &FluxInstanceSpec) -> i64 {
    secs(spec.ranks.retain.as_deref())
}

/// How long what has vanished from a host stays declared, in seconds.
fn retain_resources_secs(spec: &FluxInstanceSpec) -> i64 {
    secs(spec.resources.retain.as_deref())
}

fn secs(retain: Option<&str>) -> i64 {
    let retain = retain.and_then(api::parse_duration);
    retain.map_or(DEFAULT_RETAIN_SECS, |duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX))
}

/// Nodes that may get a rank, oldest first.
pub fn candidates<'a>(seen: &Observed<'a>) -> Vec<&'a NodeView> {
    let mut nodes: Vec<_> = seen.nodes.iter().filter(|node| eligible(node, &seen.spec.nodes).is_ok()).collect();
    nodes.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
    nodes
}

/// How many take part by default: `roster`'s members whatever they are like just now, since an epoch often begins when all of
/// them are cordoned, and those that may join.
pub(super) fn takers(seen: &Observed, roster: &Roster) -> usize {
    let members = roster.members().map(|member| member.uid.as_str());
    members.chain(candidates(seen).into_iter().map(|node| node.uid.as_str())).collect::<BTreeSet<_>>().len()
}

/// The Nodes by uid.
fn by_uid<'a>(seen: &Observed<'a>) -> HashMap<&'a str, &'a NodeView> {
    seen.nodes.iter().map(|node| (node.uid.as_str(), node)).collect()
}

fn with_roster(seen: &Observed, roster: &Roster) -> Decision {
    let mut next = roster.clone();
    if !roster.established && is_online(seen, roster, 0) {
        next.established = true;
        next.failed_leads = FailedLeads::default();
    } else if let Some(next) = takeover::advance(seen, roster) {
        return Decision::Write(Box::new(next));
    } else if roster.established {
        if let Some(next) = epoch::advance(seen, roster) {
            return Decision::Write(Box::new(next));
        }
    } else if let Some(again) = first::begin_again(seen, roster) {
        return again;
    } else if !is_lead_fixed(roster) {
        next.failed_leads = turns::failed_leads(seen, roster);
    }
    keep::keep_members(seen, &mut next);
    drain::drain(seen, &mut next);
    join::relocate_stranded(seen, &mut next);
    join::join(seen, &mut next);
    properties::tell(seen, &mut next);
    if next == *roster {
        return Decision::Keep;
    }
    next.revision += 1;
    for (rank, entry) in &mut next.ranks {
        let before = roster.ranks.get(rank);
        let same = before.is_some_and(|before| {
            before.resources == entry.resources
                && before.properties == entry.properties
                && before.member.as_ref().map(|m| (&m.uid, m.address))
                    == entry.member.as_ref().map(|m| (&m.uid, m.address))
        });
        if !same {
            entry.revision = next.revision;
        }
    }
    Decision::Write(Box::new(next))
}

/// The parent of `rank` in the roster's tree.
pub fn parent(roster: &Roster, rank: Rank) -> Option<Rank> {
    topology(roster)?.parent(rank)
}

/// The shape of the roster's tree.
pub fn topology(roster: &Roster) -> Option<Topology> {
    Topology::parse(&roster.settings.topology, roster.settings.max_size).ok()
}

/// Rank 0 has a queue that is on the host of its member and nowhere else: the instance was online, or an administrator has
/// said whose queue this epoch begins with.
pub fn is_lead_fixed(roster: &Roster) -> bool {
    roster.established || was_named(roster)
}

/// An administrator has named the lead of this epoch.
fn was_named(roster: &Roster) -> bool {
    roster.jobs_lost_before == roster.epoch
}

fn is_deep(settings: &EpochSettings) -> bool {
    let (topology, size) = (&settings.topology, settings.max_size);
    Topology::parse(topology, size).is_ok_and(|topology| (1..size).any(|rank| topology.parent(rank) != Some(0)))
}

fn facts(seen: &Observed, node: &NodeView) -> Option<Resources> {
    seen.reports.get(&node.name).and_then(|report| report.facts.as_ref()).map(|facts| facts.resources)
}

/// What `rank` is to declare while `node` is its member; `before`: what it declares. None: not known now, and what was known
/// stands.
pub(super) fn resources(seen: &Observed, node: &NodeView, rank: Rank, before: Option<&Declared>) -> Option<Declared> {
    let found = facts(seen, node)?;
    (before.is_none() || node.cpu.is_some()).then(|| declared(seen.spec, node, found, rank == 0))
}

/// Since when the host of `node` has had fewer cores or GPUs than the rank of `entry` declares; None: it has them all. What is
/// not known now is as it was. What the spec, kubelet or a device plugin takes away has not vanished.
pub(super) fn lacks_since(seen: &Observed, node: &NodeView, entry: &RosterEntry) -> Option<i64> {
    let (Some(found), Some(declared)) = (facts(seen, node), &entry.resources) else { return entry.lacks_since };
    let lacks = found.cores < declared.cores || found.gpus < declared.gpus;
    lacks.then(|| entry.lacks_since.unwrap_or(seen.now))
}

/// True once `spec.resources.retain` has passed: a reloaded driver would be back by now.
pub(super) fn may_declare_less(seen: &Observed, lacks_since: Option<i64>) -> bool {
    lacks_since.is_none_or(|since| seen.now - since >= retain_resources_secs(seen.spec))
}

/// `node` as a member; none where nobody could reach it.
fn member(node: &NodeView) -> Option<Member> {
    let address = node.address?;
    Some(Member { node: node.name.clone(), uid: node.uid.clone(), address, gone_since: None })
}

fn entry(
    seen: &Observed,
    node: &NodeView,
    rank: Rank,
    broker_name: String,
    reserved_for: Option<String>,
    revision: u64,
) -> RosterEntry {
    RosterEntry {
        broker_name,
        reserved_for,
        member: member(node),
        resources: resources(seen, node, rank, None),
        revision,
        ..RosterEntry::default()
    }
}
