//! The roster: who holds which rank. One function, [`decide`], from what was observed to the next roster.
//!
//! Invariants, whatever is observed: no rank has two members and no member two ranks; a member's rank changes only where its
//! broker is out of the overlay and its parent's rank can't come back; resources never shrink; the lead never changes once
//! the instance was online.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{
    broker_toml::spare_name,
    eligibility::{NodeView, eligible},
    settings::{pending, settings},
    topology::Topology,
};
use crate::api::{
    Adopted, FluxInstanceSpec, FluxInstanceStatus, FluxNodeStatus, Member, NodePhase, ROSTER_FORMAT, Rank, Resources,
    Roster, RosterEntry,
};

/// A planner that has lost the roster waits so long for the agents of all Ready nodes before it believes that nothing runs.
const REPORTS_TIMEOUT: Duration = Duration::from_secs(60);
/// So long the first eligible node may take over preflight before the next one becomes lead.
const LEAD_PATIENCE: Duration = Duration::from_secs(10);
/// How long a rank is kept for a Node that is gone, unless the spec says otherwise.
const DEFAULT_RETAIN_SECS: i64 = 600;

/// Everything a planner has seen.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// metadata.uid of the FluxInstance.
    pub instance_uid: &'a str,
    /// Its spec, which has passed `validate`.
    pub spec: &'a FluxInstanceSpec,
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
    /// Seconds since the Unix epoch.
    pub now: i64,
    /// How long this planner has held the Lease.
    pub waited: Duration,
    /// A random id, used if a new instance begins now.
    pub fresh_id: &'a str,
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
        Some(roster) if roster.format > ROSTER_FORMAT => Decision::Wait(format!(
            "the roster has format {}, which a newer flux-distribute made; this one knows {ROSTER_FORMAT}: finish the upgrade",
            roster.format
        )),
        Some(roster) if roster.instance_uid == seen.instance_uid => with_roster(seen, roster),
        _ => without_roster(seen),
    }
}

/// The member of `rank` is in the overlay, by its own agent's word, and the lead does not miss it: under a parent that is
/// gone a broker believes for minutes that it is online.
pub fn is_online(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let missed = || holds(seen, roster, 0).is_some_and(|(lead, _)| lead.offline.contains(&rank));
    holds(seen, roster, rank).is_some_and(|(status, _)| status.phase == NodePhase::Online) && !missed()
}

/// The member of `rank` runs the broker of that rank in this epoch: its report.
pub fn holds<'a>(seen: &Observed<'a>, roster: &Roster, rank: Rank) -> Option<(&'a FluxNodeStatus, &'a Adopted)> {
    let member = roster.ranks.get(&rank)?.member.as_ref()?;
    let status = seen.reports.get(&member.node)?;
    let adopted = status.adopted.as_ref()?;
    let same = adopted.rank == rank && adopted.epoch == roster.epoch && adopted.instance_id == roster.instance_id;
    same.then_some((status, adopted))
}

/// The rank that the Node with `uid` holds.
pub fn rank_of(roster: &Roster, uid: &str) -> Option<Rank> {
    let holds = |entry: &RosterEntry| entry.member.as_ref().is_some_and(|member| member.uid == uid);
    roster.ranks.iter().find(|(_, entry)| holds(entry)).map(|(rank, _)| *rank)
}

/// How long a rank is kept for a Node that is gone, in seconds.
pub fn retain_secs(spec: &FluxInstanceSpec) -> i64 {
    spec.ranks
        .retain
        .as_deref()
        .and_then(crate::api::parse_duration)
        .map_or(DEFAULT_RETAIN_SECS, |duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX))
}

/// Nodes that may get a rank, oldest first.
pub fn candidates<'a>(seen: &Observed<'a>) -> Vec<&'a NodeView> {
    let mut nodes: Vec<_> = seen.nodes.iter().filter(|node| eligible(node, &seen.spec.nodes).is_ok()).collect();
    nodes.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
    nodes
}

fn without_roster(seen: &Observed) -> Decision {
    // The lead's own copy has everybody in it: nobody is started before the lead has taken him in.
    let copies = seen.reports.values().filter_map(|status| status.roster.as_deref());
    let copies = copies.filter_map(|text| serde_json::from_str::<Roster>(text).ok());
    let own = copies.filter(|copy| copy.instance_uid == seen.instance_uid && copy.format <= ROSTER_FORMAT);
    if let Some(mut copy) = own.max_by_key(|copy| (copy.epoch, copy.revision)) {
        copy.revision += 1;
        return Decision::Write(Box::new(copy));
    }
    let running = seen.reports.iter().find(|(_, status)| status.adopted.is_some());
    if running.is_none() && seen.status.instance_id.is_none() {
        return first_roster(seen, seen.fresh_id, 1, None);
    }
    let silent = seen.nodes.iter().filter(|node| node.ready && !seen.reports.contains_key(&node.name)).count();
    if silent > 0 && seen.waited < REPORTS_TIMEOUT {
        return Decision::Wait(format!(
            "the roster is gone: waiting for the agents of {silent} nodes to tell what runs there"
        ));
    }
    match (running, &seen.status.instance_id, &seen.status.lead) {
        // Without the lead's table of names, any rank given out now could be refused or be somebody else's.
        (Some((node, _)), _, _) => Decision::Wait(format!(
            "the roster is gone and the lead's host has not told its copy, but a broker runs on node {node}: bring the lead's \
             node back, or stop all brokers"
        )),
        (None, Some(id), Some(lead)) => first_roster(seen, id, seen.status.epoch + 1, Some(lead)),
        (None, _, _) => first_roster(seen, seen.fresh_id, seen.status.epoch + 1, None),
    }
}

/// A roster of all eligible nodes under their real names. `statedir_of`: the node whose statedir has the queue of an
/// instance that was online before; nobody else can be its lead.
fn first_roster(seen: &Observed, instance_id: &str, epoch: u64, statedir_of: Option<&str>) -> Decision {
    let nodes = candidates(seen);
    if nodes.is_empty() {
        return Decision::Wait(no_candidates(seen));
    }
    let (Some(digest), Some(certificate)) = (seen.digest, seen.certificate) else {
        return Decision::Wait("packages and certificate are not published yet".to_owned());
    };
    let lead = match choose_lead(seen, &nodes, statedir_of.or(seen.spec.lead.as_deref())) {
        Ok(lead) => lead,
        Err(reason) => return Decision::Wait(reason),
    };
    let settings = settings(seen.spec, nodes.len(), digest, certificate);
    let deep = is_deep(&settings.topology, settings.max_size);
    let limit = settings.max_size.min(seen.spec.size.unwrap_or(u32::MAX)) as usize;
    // In a deep tree an interior rank whose node never comes would strand its children.
    let others = nodes.iter().filter(|node| node.uid != lead.uid && (!deep || facts(seen, node).is_some()));
    let mut roster = Roster {
        format: ROSTER_FORMAT,
        instance_uid: seen.instance_uid.to_owned(),
        instance_id: instance_id.to_owned(),
        established: statedir_of.is_some(),
        epoch,
        revision: 1,
        settings,
        ranks: BTreeMap::new(),
    };
    for (rank, node) in (0..).zip(std::iter::once(&lead).chain(others).take(limit)) {
        let real = is_broker_name(&node.name);
        let broker_name = if real { node.name.clone() } else { spare_name(rank) };
        let reserved_for = real.then(|| node.uid.clone());
        roster.ranks.insert(rank, entry(seen, node, broker_name, reserved_for, 1));
    }
    Decision::Write(Box::new(roster))
}

fn no_candidates(seen: &Observed) -> String {
    let reasons: Vec<_> = seen
        .nodes
        .iter()
        .filter_map(|node| eligible(node, &seen.spec.nodes).err().map(|reason| format!("{}: {reason}", node.name)))
        .take(3)
        .collect();
    match seen.nodes.len() {
        0 => "no eligible node: the cluster has no nodes".to_owned(),
        count if count > reasons.len() => format!("no eligible node among {count}: {}, …", reasons.join("; ")),
        _ => format!("no eligible node: {}", reasons.join("; ")),
    }
}

fn choose_lead<'a>(seen: &Observed, nodes: &[&'a NodeView], wanted: Option<&str>) -> Result<&'a NodeView, String> {
    let passed = |node: &&&NodeView| facts(seen, node).is_some();
    if let Some(name) = wanted {
        let node = nodes.iter().find(|node| node.name == name);
        return node.filter(passed).copied().ok_or_else(|| format!("waiting for node {name}, which is to be the lead"));
    }
    let undecided =
        |node: &&NodeView| seen.reports.get(&node.name).is_none_or(|report| report.phase != NodePhase::Failed);
    let first = nodes.iter().find(passed).copied();
    match first {
        Some(lead) if seen.waited >= LEAD_PATIENCE => Ok(lead),
        Some(lead) if !nodes.iter().take_while(|node| node.uid != lead.uid).any(undecided) => Ok(lead),
        _ => {
            let failed = nodes.iter().find_map(|node| {
                let report = seen.reports.get(&node.name).filter(|report| report.phase == NodePhase::Failed)?;
                Some(format!("; {}: {}", node.name, report.message.as_deref()?))
            });
            Err(format!("waiting for preflight on {} nodes{}", nodes.len(), failed.unwrap_or_default()))
        }
    }
}

fn with_roster(seen: &Observed, roster: &Roster) -> Decision {
    let mut next = roster.clone();
    if !roster.established {
        if is_online(seen, roster, 0) {
            next.established = true;
        } else if let Some(again) = begin_again(seen, roster) {
            return again;
        }
    }
    keep_members(seen, &mut next);
    relocate_stranded(seen, &mut next);
    join(seen, &mut next);
    if next == *roster {
        return Decision::Keep;
    }
    next.revision += 1;
    for (rank, entry) in &mut next.ranks {
        let before = roster.ranks.get(rank);
        let same = before.is_some_and(|before| {
            before.resources == entry.resources
                && before.member.as_ref().map(|m| (&m.uid, m.address))
                    == entry.member.as_ref().map(|m| (&m.uid, m.address))
        });
        if !same {
            entry.revision = next.revision;
        }
    }
    Decision::Write(Box::new(next))
}

/// Until the lead was online once, nothing depends on the roster: a lost lead or a changed spec makes a new one.
fn begin_again(seen: &Observed, roster: &Roster) -> Option<Decision> {
    let (digest, certificate) = (seen.digest?, seen.certificate?);
    let lead = roster.ranks.get(&0).and_then(|entry| entry.member.as_ref())?;
    let nodes = candidates(seen);
    let lead_is_there = nodes.iter().any(|node| node.uid == lead.uid)
        && seen.spec.lead.as_ref().is_none_or(|wanted| *wanted == lead.node);
    if lead_is_there && pending(&roster.settings, seen.spec, digest, certificate).is_none() {
        return None;
    }
    match first_roster(seen, seen.fresh_id, roster.epoch + 1, None) {
        Decision::Write(mut next) => {
            next.revision = roster.revision + 1;
            next.ranks.values_mut().for_each(|entry| entry.revision = next.revision);
            Some(Decision::Write(next))
        }
        other => Some(other),
    }
}

/// What changes for those who hold a rank: facts that have grown, a Node that is gone, one that is back.
fn keep_members(seen: &Observed, roster: &mut Roster) {
    let retain = retain_secs(seen.spec);
    let running: Vec<Rank> = roster.ranks.keys().copied().filter(|rank| holds(seen, roster, *rank).is_some()).collect();
    for (rank, entry) in &mut roster.ranks {
        let Some(member) = &mut entry.member else { continue };
        if let Some(node) =
            seen.nodes.iter().find(|node| running.contains(rank) && is_registered_again(seen, node, member))
        {
            entry.reserved_for = entry.reserved_for.take().map(|_| node.uid.clone());
            member.uid.clone_from(&node.uid);
        }
        let Some(node) = seen.nodes.iter().find(|node| node.uid == member.uid) else {
            let since = *member.gone_since.get_or_insert(seen.now);
            // The lead's statedir holds the queue: nobody else can take its rank.
            if *rank != 0 && seen.now - since >= retain {
                entry.member = None;
            }
            continue;
        };
        member.gone_since = None;
        if let Some(address) = node.address {
            member.address = address;
        }
        if let Some(found) = facts(seen, node) {
            let known = entry.resources.unwrap_or_default();
            let grown = Resources { cores: found.cores.max(known.cores), gpus: found.gpus.max(known.gpus) };
            entry.resources = Some(grown);
        }
    }
}

/// `node` is the very machine of `member` under a new Node object, as after `kubectl delete node` and a restart of kubelet:
/// the agent that reports the member's broker speaks of the same boot. Another machine of that name has another.
fn is_registered_again(seen: &Observed, node: &NodeView, member: &Member) -> bool {
    let boot = seen.reports.get(&node.name).and_then(|report| report.facts.as_ref()).map(|facts| &facts.boot_id);
    node.name == member.node && node.uid != member.uid && !node.boot_id.is_empty() && boot == Some(&node.boot_id)
}

/// In a deep tree: a member whose broker is out of the overlay, under a parent that can't come back by itself, takes a free
/// rank elsewhere.
fn relocate_stranded(seen: &Observed, roster: &mut Roster) {
    if !is_deep(&roster.settings.topology, roster.settings.max_size) || !is_online(seen, roster, 0) {
        return;
    }
    let stranded: Vec<Rank> = roster
        .ranks
        .iter()
        .filter_map(|(rank, entry)| {
            let member = entry.member.as_ref()?;
            let parent = parent(roster, *rank)?;
            let here = member.gone_since.is_none() && !is_online(seen, roster, *rank);
            (here && is_hopeless(seen, roster, parent)).then_some(*rank)
        })
        .collect();
    for rank in stranded {
        let Some(free) = free_rank(seen, roster) else { return };
        let Some(old) = roster.ranks.get_mut(&rank) else { continue };
        let (member, resources) = (old.member.take(), old.resources);
        let broker_name = super::broker_toml::broker_name(roster, free);
        let moved = RosterEntry { broker_name, reserved_for: None, member, resources, revision: 0 };
        roster.ranks.insert(free, moved);
    }
}

/// Rank `rank` will not be in the overlay soon: nobody holds it, its Node is gone or not Ready, or its broker can't start.
fn is_hopeless(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let Some(member) = roster.ranks.get(&rank).and_then(|entry| entry.member.as_ref()) else { return true };
    let ready = seen.nodes.iter().any(|node| node.uid == member.uid && node.ready);
    let failed = seen.reports.get(&member.node).is_some_and(|report| report.phase == NodePhase::Failed);
    rank != 0 && (!ready || failed)
}

/// New members: eligible, looked at, without a rank.
fn join(seen: &Observed, roster: &mut Roster) {
    let limit = seen.spec.size.unwrap_or(u32::MAX).min(roster.settings.max_size) as usize;
    for node in candidates(seen) {
        let members = roster.ranks.values().filter(|entry| entry.member.is_some()).count();
        if members >= limit {
            return;
        }
        // One whose broker runs, whatever it was started for, is not to be started for another rank.
        let runs = seen.reports.get(&node.name).and_then(|report| report.adopted.as_ref());
        let runs = runs.is_some_and(|adopted| adopted.instance_id == roster.instance_id);
        if rank_of(roster, &node.uid).is_some() || facts(seen, node).is_none() || runs {
            continue;
        }
        let own = roster.ranks.iter().find(|(rank, entry)| {
            let parent_is_there = parent(roster, **rank).is_none_or(|parent| can_carry(seen, roster, parent));
            entry.member.is_none() && entry.reserved_for.as_deref() == Some(&node.uid) && parent_is_there
        });
        let Some(rank) = own.map(|(rank, _)| *rank).or_else(|| free_rank(seen, roster)) else { return };
        let broker_name = super::broker_toml::broker_name(roster, rank);
        let reserved_for = roster.ranks.get(&rank).and_then(|entry| entry.reserved_for.clone());
        let joined = entry(seen, node, broker_name, reserved_for, 0);
        roster.ranks.insert(rank, joined);
    }
}

/// A rank that anybody may take: without member, waiting for nobody, claimed by no broker that runs, and under a parent that
/// is online; interior ranks first, so that holes in a deep tree are filled before leaves are hung on.
fn free_rank(seen: &Observed, roster: &Roster) -> Option<Rank> {
    let size = roster.settings.max_size;
    let claimed: BTreeSet<Rank> = seen
        .reports
        .values()
        .filter_map(|report| report.adopted.as_ref())
        .filter(|adopted| adopted.instance_id == roster.instance_id)
        .map(|adopted| adopted.rank)
        .collect();
    let topology = Topology::parse(&roster.settings.topology, size).ok()?;
    let free = (1..size).filter(|rank| {
        roster.ranks.get(rank).is_none_or(|entry| entry.member.is_none() && entry.reserved_for.is_none())
            && !claimed.contains(rank)
            && topology.parent(*rank).is_none_or(|parent| can_carry(seen, roster, parent))
    });
    free.min_by_key(|rank| (!topology.is_interior(*rank, size), *rank))
}

/// A rank may be given out under `parent`. Under the lead always: it is waited for anyway.
fn can_carry(seen: &Observed, roster: &Roster, parent: Rank) -> bool {
    parent == 0 || is_online(seen, roster, parent)
}

/// The parent of `rank` in the roster's tree.
pub fn parent(roster: &Roster, rank: Rank) -> Option<Rank> {
    Topology::parse(&roster.settings.topology, roster.settings.max_size).ok()?.parent(rank)
}

fn is_deep(topology: &str, size: u32) -> bool {
    Topology::parse(topology, size).is_ok_and(|topology| (1..size).any(|rank| topology.parent(rank) != Some(0)))
}

fn facts(seen: &Observed, node: &NodeView) -> Option<Resources> {
    seen.reports.get(&node.name).and_then(|report| report.facts.as_ref()).map(|facts| facts.resources)
}

fn entry(
    seen: &Observed,
    node: &NodeView,
    broker_name: String,
    reserved_for: Option<String>,
    revision: u64,
) -> RosterEntry {
    let member = node.address.map(|address| Member {
        node: node.name.clone(),
        uid: node.uid.clone(),
        address,
        gone_since: None,
    });
    RosterEntry { broker_name, reserved_for, member, resources: facts(seen, node), revision }
}

/// flux-core takes names of RFC 1035 (conf_bootstrap_validate_domain_name); ours for spares are taken.
fn is_broker_name(name: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    name.len() <= 253 && name.split('.').all(label) && !name.starts_with("flux-spare-")
}

#[cfg(test)]
pub(crate) mod tests;
