//! The roster: which member holds which rank. One function, [`decide`], computes the next roster from what was
//! observed.
//!
//! Invariants within an epoch, whatever is observed: no rank has two members and no member has two ranks; a member's
//! rank changes only if its broker is out of the overlay and its parent's rank can't come back; resources never shrink
//! under a job; once the instance was online, the lead changes only if an administrator orders it ([`takeover`]).

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

/// If the roster is lost, how long the planner waits for reports from the agents of all Ready nodes before it concludes
/// that no broker runs.
const REPORTS_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the planner waits for preflight on the first eligible node before a later one may become the lead.
pub(super) const LEAD_PATIENCE: Duration = Duration::from_secs(10);
/// Default of `spec.ranks.retain` (how long a rank is kept for a Node that is gone) and of `spec.resources.retain` (how
/// long hardware that has vanished from a host stays declared).
const DEFAULT_RETAIN_SECS: i64 = 600;

/// Everything the planner has observed.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// metadata.uid of the FluxInstance.
    pub instance_uid: &'a str,
    /// Its spec. It has passed `validate`, except for [`decide_unserved`].
    pub spec: &'a FluxInstanceSpec,
    /// metadata.generation of the FluxInstance, which counts the changes of its spec.
    pub generation: i64,
    /// Its status.
    pub status: &'a FluxInstanceStatus,
    /// All Nodes.
    pub nodes: &'a [NodeView],
    /// The agents' reports (FluxNode.status), by node name.
    pub reports: &'a BTreeMap<String, FluxNodeStatus>,
    /// The roster in ConfigMap flux-roster; None if the ConfigMap does not exist.
    pub roster: Option<&'a Roster>,
    /// Digest of the published package set.
    pub digest: Option<&'a str>,
    /// Fingerprint of the certificate in Secret flux-curve.
    pub certificate: Option<&'a str>,
    /// The Secret is gone, but brokers may still use the certificate that was in it.
    pub is_certificate_gone: bool,
    /// Seconds since the Unix epoch.
    pub now: i64,
    /// How long this planner has held the Lease or, if the roster vanished later, how long it has been gone.
    pub waited: Duration,
    /// Value of annotation [`ANNOTATION_RESTART`](crate::api::ANNOTATION_RESTART).
    pub restart_word: Option<&'a str>,
    /// A random instance ID, used if a new instance begins now.
    pub fresh_id: &'a str,
    /// The reason why the agent is not running, by node name, for each node without an agent.
    pub agentless: &'a BTreeMap<String, String>,
}

/// What to do about the roster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The roster needs no change.
    Keep,
    /// Write this roster.
    Write(Box<Roster>),
    /// The planner can't decide yet; the sentence says what it waits for.
    Wait(String),
}

/// Decides the next roster.
pub fn decide(seen: &Observed) -> Decision {
    match seen.roster {
        Some(roster) if roster.instance_uid == seen.instance_uid => with_roster(seen, roster),
        _ => first::without_roster(seen),
    }
}

/// As [`decide`], if the spec can't be served: the roster stays as it is, but the instance doesn't stay stopped. An
/// epoch that was about to end continues, and one that does not come up goes back to the previous settings.
pub fn decide_unserved(seen: &Observed) -> Decision {
    let own = |roster: &&Roster| roster.instance_uid == seen.instance_uid;
    let roster = seen.roster.filter(own).filter(|roster| roster.established);
    let next = roster.and_then(|roster| epoch::carry_on(seen, roster));
    next.map_or(Decision::Keep, |next| Decision::Write(Box::new(next)))
}

pub use turns::no_lead;

pub use drain::{is_former_idle, is_overdue, may_carry_jobs, may_stop, orphan_broker_rank};

/// True if the member of `rank` is in the overlay: its agent reports it online, and the lead does not report it
/// offline. The agent's report alone is not enough, because a broker whose parent is gone believes for minutes that it
/// is online.
pub fn is_online(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let is_silent = || rank == 0 && is_lead_silent(seen, roster);
    says_online(seen, roster, rank) && !does_lead_miss(seen, roster, rank) && !is_silent()
}

/// True if the other brokers no longer reach the lead's broker. When the lead's machine goes off, its agent can't
/// correct its last report, and Kubernetes takes most of a minute to mark the Node NotReady. So if most children of the
/// lead report that they don't hear it, it is silent; children that the lead itself reports offline don't count. If the
/// lead's Node is not Ready, which alone proves nothing, one report from any broker is enough.
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
    let (unheard, heard): (Vec<bool>, Vec<bool>) = children.partition(|is_unheard| *is_unheard);
    unheard.len() > heard.len()
}

/// True if the lead's agent reports that an administrator has ended the running epoch with flux-shutdown(1).
pub fn is_shut_down(seen: &Observed, roster: &Roster) -> bool {
    let report = roster.lead().and_then(|lead| seen.reports.get(&lead.node));
    report.is_some_and(|report| report.adopted.is_none() && report.shut_down == Some(roster.epoch))
}

/// True if the broker of `rank` is lost to the others: its agent's last report says online but the overlay disagrees
/// (see [`is_online`]), or it doesn't answer its agent and the lead either reports it offline or gives it no jobs.
pub fn is_missed(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let is_lost = does_lead_miss(seen, roster, rank);
    (says_online(seen, roster, rank) && !is_online(seen, roster, rank))
        || (says_offline(seen, roster, rank) && (is_lost || is_idle_and_torpid(seen, roster, rank)))
}

/// True if the lead finds the broker of `rank` slow to answer (torpid) and no job runs on that rank or below it. A
/// broker process that is suspended keeps its connection, so the lead never loses it but gives it no jobs; giving up
/// such a broker costs no job.
fn is_idle_and_torpid(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let topology = topology(roster);
    let is_in_subtree = |other: u32| {
        other == rank || topology.is_none_or(|topology| topology.ancestors(other).any(|above| above == rank))
    };
    lead_report(seen, roster).is_some_and(|lead| {
        let allocated = lead.allocated.as_ref();
        lead.torpid.contains(rank) && allocated.is_some_and(|ranks| !ranks.0.iter().copied().any(is_in_subtree))
    })
}

fn says_offline(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    holds(seen, roster, rank).is_some_and(|(status, _)| status.phase == NodePhase::Offline)
}

fn says_online(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    holds(seen, roster, rank).is_some_and(|(status, _)| matches!(status.phase, NodePhase::Online | NodePhase::Draining))
}

/// True if the lead reports that `rank` is not in the overlay. False without a report from the lead.
pub fn does_lead_miss(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    holds(seen, roster, 0).is_some_and(|(lead, _)| lead.offline.contains(&rank))
}

/// Returns the report of the member of `rank`, and the broker it names, if that is the broker of this rank in this
/// epoch.
pub fn holds<'a>(seen: &Observed<'a>, roster: &Roster, rank: Rank) -> Option<(&'a FluxNodeStatus, &'a Adopted)> {
    let member = roster.member(rank)?;
    let status = seen.reports.get(&member.node)?;
    let adopted = status.adopted.as_ref()?;
    let same = adopted.rank == rank && adopted.epoch == roster.epoch && adopted.instance_id == roster.instance_id;
    same.then_some((status, adopted))
}

/// Returns the report of the lead's agent while the lead is online: only then is its information about other ranks
/// current.
pub(super) fn lead_report<'a>(seen: &Observed<'a>, roster: &Roster) -> Option<&'a FluxNodeStatus> {
    holds(seen, roster, 0).filter(|_| is_online(seen, roster, 0)).map(|(report, _)| report)
}

/// True if the Node of `member` exists and is Ready.
pub fn is_ready(seen: &Observed, member: &Member) -> bool {
    seen.nodes.iter().any(|node| node.uid == member.uid && node.ready)
}

/// Ranks that someone other than flux-distribute has drained, from the last report of the lead's agent. Flux stores a
/// drain by rank and name, so a node that took such a rank would get no jobs.
fn drained_by_others(seen: &Observed, roster: &Roster) -> IdSet {
    let lead = roster.lead().and_then(|lead| seen.reports.get(&lead.node));
    lead.map(|report| report.drained_by_others.clone()).unwrap_or_default()
}

/// The maximum number of members. Ignores a size of 0: this also runs for a spec that can't be served.
fn limit(spec: &FluxInstanceSpec, max_size: u32) -> usize {
    spec.size.filter(|size| *size > 0).unwrap_or(u32::MAX).min(max_size) as usize
}

/// Why a node without a rank gets none now: the instance is full. None if there is room.
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
            "each of the {max_size} ranks (maxSize) has a member, is reserved for the node whose name it has, or was drained by \
             an administrator"
        )
    })
}

/// True if the broker was started for this FluxInstance, and not for a deleted one whose removal this node missed
/// because it was off. Older agents don't report the FluxInstance's uid. Their broker can't belong to a FluxInstance
/// that never had a roster, or whose known ID differs from the broker's.
pub fn is_of_instance(seen: &Observed, adopted: &Adopted) -> bool {
    let by_id = || seen.status.instance_id.as_ref().map_or(seen.status.epoch > 0, |id| *id == adopted.instance_id);
    adopted.instance_uid.as_ref().map_or_else(by_id, |uid| uid == seen.instance_uid)
}

/// True if the node's host still has a broker of an earlier instance. The host must be cleaned first, and its report
/// may be about that instance.
pub fn holds_another(seen: &Observed, node: &str) -> bool {
    let adopted = seen.reports.get(node).and_then(|report| report.adopted.as_ref());
    adopted.is_some_and(|adopted| !is_of_instance(seen, adopted))
}

/// The roster format of an epoch that begins now: the newest that the agents of all nodes read. In the middle of an
/// upgrade, an agent that can't read the roster would start no broker.
fn format(seen: &Observed) -> u32 {
    let agents =
        seen.nodes.iter().filter_map(|node| seen.reports.get(&node.name)).filter(|report| report.agent.is_some());
    // Agents that don't report a format read the one before.
    let oldest = agents.map(|report| report.roster_format.max(ROSTER_FORMAT - 1)).min();
    oldest.unwrap_or(ROSTER_FORMAT).min(ROSTER_FORMAT)
}

/// True if the host of `node` has passed preflight for this instance.
fn has_passed(seen: &Observed, node: &NodeView) -> bool {
    let is_removing = seen.reports.get(&node.name).is_some_and(|report| report.phase == NodePhase::Removing);
    facts(seen, node).is_some() && !holds_another(seen, &node.name) && !is_removing
}

/// True if the last step on the host of `node` failed.
fn has_failed(seen: &Observed, node: &str) -> bool {
    seen.reports.get(node).is_some_and(|report| report.phase == NodePhase::Failed)
}

/// True if brokers of this FluxInstance run, or may start at any moment, with the published certificate.
pub fn is_certificate_in_use(seen: &Observed) -> bool {
    let own = |roster: &Roster| roster.instance_uid == seen.instance_uid && roster.established;
    let mut adopted = seen.reports.values().filter_map(|report| report.adopted.as_ref());
    seen.roster.is_some_and(own)
        || seen.status.instance_id.is_some()
        || adopted.any(|adopted| is_of_instance(seen, adopted))
}

/// True if the certificate was made for an earlier FluxInstance and this one has not started anything with it.
/// `made_for`: uid of the FluxInstance that it was made for; None if unknown. The planner then replaces it, because a
/// disconnected broker of the earlier instance could join this one with it.
pub fn is_certificate_of_another(seen: &Observed, made_for: Option<&str>) -> bool {
    let is_planned = seen.roster.is_some_and(|roster| roster.instance_uid == seen.instance_uid);
    made_for != Some(seen.instance_uid) && !is_planned && !is_certificate_in_use(seen)
}

/// Returns the rank whose member is the Node with `uid`.
pub fn rank_of(roster: &Roster, uid: &str) -> Option<Rank> {
    let holds = |entry: &RosterEntry| entry.member.as_ref().is_some_and(|member| member.uid == uid);
    roster.ranks.iter().find(|(_, entry)| holds(entry)).map(|(rank, _)| *rank)
}

/// How long a rank is kept for a Node that is gone, in seconds.
pub fn retain_secs(spec: &FluxInstanceSpec) -> i64 {
    secs(spec.ranks.retain.as_deref())
}

/// How long hardware that has vanished from a host stays declared, in seconds.
fn retain_resources_secs(spec: &FluxInstanceSpec) -> i64 {
    secs(spec.resources.retain.as_deref())
}

fn secs(retain: Option<&str>) -> i64 {
    let retain = retain.and_then(api::parse_duration);
    retain.map_or(DEFAULT_RETAIN_SECS, |duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX))
}

/// Eligible nodes, oldest first; those of the same age by name.
pub fn candidates<'a>(seen: &Observed<'a>) -> Vec<&'a NodeView> {
    let mut nodes: Vec<_> = seen.nodes.iter().filter(|node| eligible(node, &seen.spec.nodes).is_ok()).collect();
    nodes.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
    nodes
}

/// The number of nodes that take part by default: all members of `roster` and all eligible nodes. Members count even if
/// they are not eligible now, because administrators often cordon all of them for a restart.
pub(super) fn participant_count(seen: &Observed, roster: &Roster) -> usize {
    let members = roster.members().map(|member| member.uid.as_str());
    members.chain(candidates(seen).into_iter().map(|node| node.uid.as_str())).collect::<BTreeSet<_>>().len()
}

/// Returns the Nodes by uid.
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
    properties::assign(seen, &mut next);
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

/// The shape of the roster's tree; None if the roster's topology doesn't parse.
pub fn topology(roster: &Roster) -> Option<Topology> {
    Topology::parse(&roster.settings.topology, roster.settings.max_size).ok()
}

/// True if only the host of rank 0 has the instance's queue: the instance was online, or an administrator named the
/// host whose queue this epoch begins with.
pub fn is_lead_fixed(roster: &Roster) -> bool {
    roster.established || was_named(roster)
}

/// True if an administrator named the lead of this epoch (see [`takeover`]).
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

/// What `rank` is to declare while `node` is its member; `before`: what it declares now. None if the facts are unknown
/// at the moment: then `before` stays.
pub(super) fn resources(seen: &Observed, node: &NodeView, rank: Rank, before: Option<&Declared>) -> Option<Declared> {
    let found = facts(seen, node)?;
    (before.is_none() || node.cpu.is_some()).then(|| declared(seen.spec, node, found, rank == 0))
}

/// Since when the host of `node` has had fewer cores or GPUs than the rank of `entry` declares; None if it has them
/// all. If the facts are unknown at the moment, the stored time stays. Cores and GPUs that only the spec, kubelet or a
/// device plugin takes away have not vanished.
pub(super) fn lacks_since(seen: &Observed, node: &NodeView, entry: &RosterEntry) -> Option<i64> {
    let (Some(found), Some(declared)) = (facts(seen, node), &entry.resources) else { return entry.lacks_since };
    let lacks = found.cores < declared.cores || found.gpus < declared.gpus;
    lacks.then(|| entry.lacks_since.unwrap_or(seen.now))
}

/// True if nothing has vanished, or `spec.resources.retain` has passed since: a reloaded driver would be back by now.
pub(super) fn may_declare_less(seen: &Observed, lacks_since: Option<i64>) -> bool {
    lacks_since.is_none_or(|since| seen.now - since >= retain_resources_secs(seen.spec))
}

/// Makes `node` a member; None if it has no address at which other brokers could reach it.
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
