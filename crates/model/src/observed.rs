//! What the planner has observed, and what follows from it for one node or for the roster as it is.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use super::{
    eligibility::{NodeView, eligible},
    nodes::Nodes,
    resources::declared,
    settings::owner,
};
use api::{
    Adopted, Declared, EpochSettings, Facts, FluxInstanceSpec, FluxInstanceStatus, FluxNodeStatus, IdSet, Member,
    NodePhase, ROSTER_FORMAT, Rank, Roster, RosterEntry,
};

/// Default of `spec.ranks.retain` (how long a rank is kept for a Node that is gone) and of `spec.resources.retain` (how
/// long hardware that has vanished from a host stays declared).
pub(crate) const DEFAULT_RETAIN_SECS: i64 = 600;

/// The agents' reports (FluxNode.status), by node name. They have no order, so no decision may depend on one.
pub type Reports<'a> = HashMap<&'a str, &'a FluxNodeStatus>;

/// Everything the planner has observed.
#[derive(Debug)]
pub struct Observed<'a> {
    /// metadata.uid of the FluxInstance.
    pub instance_uid: &'a str,
    /// Its spec. It has passed `validate`, except for [`decide_unserved`](crate::roster::decide_unserved).
    pub spec: &'a FluxInstanceSpec,
    /// metadata.generation of the FluxInstance, which counts the changes of its spec.
    pub generation: i64,
    /// Its status.
    pub status: &'a FluxInstanceStatus,
    /// All Nodes.
    pub nodes: Nodes<'a>,
    /// What their agents have reported.
    pub reports: Reports<'a>,
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
    /// Value of annotation [`ANNOTATION_RESTART`](api::ANNOTATION_RESTART).
    pub restart_word: Option<&'a str>,
    /// A random instance ID, used if a new instance begins now.
    pub fresh_id: &'a str,
    /// The reason why the agent is not running, by node name, for each node without an agent.
    pub agentless: &'a BTreeMap<String, String>,
    /// The FluxNodes that the planner can't use, by node name.
    pub unusable: &'a BTreeMap<String, Unusable>,
}

/// Why the planner can't use a FluxNode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unusable {
    /// This version can't read it. Why is only in the log, because the error may quote what anybody wrote there.
    NotRead,
    /// The API server refuses to change it, in these words. They quote the planner's own change, and if the status is wrong, what its
    /// agent wrote.
    NotWritten(String),
}

impl Unusable {
    /// CamelCase, for the condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotRead => "FluxNodeNotRead",
            Self::NotWritten(_) => "FluxNodeNotWritten",
        }
    }

    /// What is wrong with the FluxNode of `node`, and the remedy.
    pub fn message(&self, node: &str) -> String {
        match self {
            Self::NotRead => format!(
                "the planner can't read FluxNode {node}, and plans as if its agent had not reported: finish the upgrade; if that \
                 does not help, delete it: the node's agent makes it again"
            ),
            Self::NotWritten(why) => format!(
                "the planner can't change FluxNode {node} ({why}): if it is too large, delete it: the node's agent makes it \
                 again; otherwise apply the manifests of this version again"
            ),
        }
    }
}

impl<'a> Observed<'a> {
    /// What the agent of the node with this name has reported.
    pub fn report(&self, node: &str) -> Option<&'a FluxNodeStatus> {
        self.reports.get(node).copied()
    }

    /// The user that owns the brokers and runs every job: the one that the instance has had since it was online first, else the one
    /// that its spec asks for. Whoever was this user could write jobs into the queue, which would run as the next one, and knows the
    /// certificate. The status counts only if this instance has no roster, because an agent's token may write the status.
    pub fn owner(&self) -> &str {
        let remembered = self.status.run_as.as_deref().filter(|_| self.status.instance_id.is_some());
        self.fixed_owner().or(remembered).unwrap_or_else(|| owner(self.spec))
    }

    /// The user of the brokers' last epoch that came up, from the roster; None if none has. The status has it too, but an earlier
    /// version, or a definition of the FluxInstance that lacks the field, may have dropped it.
    pub fn fixed_owner(&self) -> Option<&str> {
        self.fixed_owner_in(self.roster)
    }

    /// As [`Self::fixed_owner`], from this roster.
    pub(crate) fn fixed_owner_in<'r>(&self, roster: Option<&'r Roster>) -> Option<&'r str> {
        let was_online = |roster: &&Roster| roster.established || self.status.instance_id.is_some();
        let roster = roster.filter(|roster| roster.instance_uid == self.instance_uid).filter(was_online)?;
        // Earlier versions changed the user with the epoch.
        Some(&roster.previous.as_ref().unwrap_or(&roster.settings).run_as)
    }
}

/// True if the lead's agent reports that an administrator has ended the running epoch with flux-shutdown(1).
pub fn is_shut_down(seen: &Observed, roster: &Roster) -> bool {
    lead_report(seen, roster).is_some_and(|report| report.adopted.is_none() && report.shut_down == Some(roster.epoch))
}

/// Ranks that someone other than flux-distribute has drained, from the last report of the lead's agent. Flux stores a
/// drain by rank and name, so a node that took such a rank would get no jobs.
pub(crate) fn drained_by_others<'a>(seen: &'a Observed, roster: &Roster) -> Option<&'a IdSet> {
    lead_report(seen, roster).map(|report| &report.drained_by_others)
}

/// The last report of the lead's agent.
pub(crate) fn lead_report<'a>(seen: &'a Observed, roster: &Roster) -> Option<&'a FluxNodeStatus> {
    seen.report(&roster.lead()?.node)
}

/// The maximum number of members. Ignores a size of 0: this also runs for a spec that can't be served.
pub(crate) fn limit(spec: &FluxInstanceSpec, max_size: u32) -> usize {
    spec.size.filter(|size| *size > 0).unwrap_or(u32::MAX).min(max_size) as usize
}

/// Why a node without a rank gets none now: the instance is full. None if there is room.
pub(crate) fn no_room(seen: &Observed, roster: &Roster) -> Option<String> {
    let max_size = roster.settings.max_size;
    if roster.members().count() >= limit(seen.spec, max_size) {
        let size = seen.spec.size.filter(|size| *size <= max_size);
        return Some(size.map_or_else(|| format!("maxSize is {max_size}"), |size| format!("size is {size}")));
    }
    let drained = drained_by_others(seen, roster);
    let is_taken = |rank| {
        let entry = roster.ranks.get(&rank);
        entry.is_some_and(|entry| entry.member.is_some() || entry.reserved_for.is_some())
            || drained.is_some_and(|drained| drained.contains(rank))
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
    let adopted = seen.report(node).and_then(|report| report.adopted.as_ref());
    adopted.is_some_and(|adopted| !is_of_instance(seen, adopted))
}

/// The roster format of an epoch that begins now: the newest that the agents of all nodes read. In the middle of an
/// upgrade, an agent that can't read the roster would start no broker.
pub(crate) fn format(seen: &Observed) -> u32 {
    let agents =
        seen.nodes.iter().filter_map(|node| seen.report(&node.name)).filter(|report| report.agent_version.is_some());
    // Agents that don't report a format read the one before.
    let oldest = agents.map(|report| report.roster_format.max(ROSTER_FORMAT - 1)).min();
    oldest.unwrap_or(ROSTER_FORMAT).min(ROSTER_FORMAT)
}

/// True if the host of `node` has passed preflight for this instance.
pub(crate) fn has_passed(seen: &Observed, node: &NodeView) -> bool {
    let is_removing = seen.report(&node.name).is_some_and(|report| report.phase == NodePhase::Removing);
    facts(seen, node).is_some() && !holds_another(seen, &node.name) && !is_removing
}

/// True if the last step on the host of `node` failed.
pub(crate) fn has_failed(seen: &Observed, node: &str) -> bool {
    seen.report(node).is_some_and(|report| report.phase == NodePhase::Failed)
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

/// How long a rank is kept for a Node that is gone, in seconds.
pub fn retain_secs(spec: &FluxInstanceSpec) -> i64 {
    secs(spec.ranks.retain.as_deref())
}

/// How long hardware that has vanished from a host stays declared, in seconds.
pub(crate) fn retain_resources_secs(spec: &FluxInstanceSpec) -> i64 {
    secs(spec.resources.retain.as_deref())
}

fn secs(retain: Option<&str>) -> i64 {
    let retain = retain.and_then(api::parse_duration);
    retain.map_or(DEFAULT_RETAIN_SECS, |duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX))
}

/// Eligible nodes, oldest first; those of the same age by name.
pub fn candidates<'a>(seen: &Observed<'a>) -> Vec<&'a NodeView> {
    candidates_among(seen, |_| true)
}

/// Those of [`candidates`] for which `is_wanted` is true. It is asked before eligibility, which takes longer.
pub(crate) fn candidates_among<'a>(seen: &Observed<'a>, is_wanted: impl Fn(&NodeView) -> bool) -> Vec<&'a NodeView> {
    let wanted = seen.nodes.iter().copied().filter(|node| is_wanted(node));
    let mut nodes: Vec<_> = wanted.filter(|node| eligible(node, &seen.spec.nodes).is_ok()).collect();
    nodes.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
    nodes
}

/// The number of nodes that take part by default: all members of `roster` and all eligible nodes. Members count even if
/// they are not eligible now, because administrators often cordon all of them for a restart.
pub(crate) fn participant_count(seen: &Observed, roster: &Roster) -> usize {
    let members = roster.members().map(|member| member.uid.as_str());
    members.chain(candidates(seen).into_iter().map(|node| node.uid.as_str())).collect::<BTreeSet<_>>().len()
}

/// What is known about the host of `node`, from a report of the boot that the Node names. An older report may be from another machine
/// that had this node's name.
pub(crate) fn facts<'a>(seen: &Observed<'a>, node: &NodeView) -> Option<&'a Facts> {
    seen.report(&node.name)?.facts.as_ref().filter(|facts| is_of_boot(facts, node))
}

/// True if `facts` are of the boot that `node` names, or it names none.
fn is_of_boot(facts: &Facts, node: &NodeView) -> bool {
    node.boot_id.is_empty() || facts.boot_id == node.boot_id
}

/// What `rank` is to declare in an epoch with these `settings` while `node` is its member; `host`: its [`facts`]; `before`: what the rank declares now.
/// None if the facts are unknown at the moment: then `before` stays.
pub(crate) fn resources(
    spec: &FluxInstanceSpec,
    settings: &EpochSettings,
    node: &NodeView,
    host: Option<&Facts>,
    rank: Rank,
    before: Option<&Declared>,
) -> Option<Declared> {
    let found = host?.resources;
    let is_known = before.is_none() || node.cpu.is_some();
    is_known.then(|| declared(spec, node, found, rank == 0, settings.only_whole_cores))
}

/// Since when a `host` has had fewer cores or GPUs than the rank of `entry` declares; None if it has them
/// all. If the facts are unknown at the moment, the stored time stays. Cores and GPUs that only the spec, kubelet or a
/// device plugin takes away have not vanished.
pub(crate) fn lacks_since(seen: &Observed, host: Option<&Facts>, entry: &RosterEntry) -> Option<i64> {
    let (Some(host), Some(declared)) = (host, &entry.resources) else { return entry.lacks_since };
    let found = host.resources;
    let lacks = found.cores < declared.cores || found.gpus < declared.gpus;
    lacks.then(|| entry.lacks_since.unwrap_or(seen.now))
}

/// True if nothing has vanished, or `spec.resources.retain` has passed since: a reloaded driver would be back by now.
pub(crate) fn may_declare_less(seen: &Observed, lacks_since: Option<i64>) -> bool {
    lacks_since.is_none_or(|since| seen.now - since >= retain_resources_secs(seen.spec))
}

/// Makes `node` a member; None if it has no address at which other brokers could reach it.
pub(crate) fn member(node: &NodeView) -> Option<Member> {
    let address = node.address?;
    Some(Member { node: node.name.clone(), uid: node.uid.clone(), address, gone_since: None })
}

/// A new entry of a roster with these `settings`, with `node` as its member.
pub(crate) fn entry(
    seen: &Observed,
    settings: &EpochSettings,
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
        resources: resources(seen.spec, settings, node, facts(seen, node), rank, None),
        revision,
        ..RosterEntry::default()
    }
}
