//! The state of every member, computed once from the roster, the agents' reports and the Nodes. The rules of the plan
//! ask it; none derives a member's state itself.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{eligibility::NodeView, topology::Topology};
use crate::{
    observed::{Observed, facts as host_facts, no_room},
    tree::topology,
};
use api::{Facts, FluxNodeStatus, IdSet, NodePhase, Rank, Roster, RosterEntry};

/// What is known about the member of a rank and its broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemberState {
    /// The rank has no member.
    Vacant,
    /// There is no report about the member's node.
    NotReported,
    /// The agent reports that no broker runs.
    NotRunning,
    /// The agent reports a broker, but of another rank, epoch or instance.
    Elsewhere,
    /// The broker runs and has not joined the overlay yet.
    ComingUp,
    /// The broker is in the overlay: its agent reports it online, and the other brokers do not report it lost. The
    /// agent's report alone is not enough, because a broker whose parent is gone believes for minutes that it is
    /// online.
    Online,
    /// The broker doesn't answer its agent, but may still be in the overlay.
    Offline,
    /// The broker is lost to the others. Either its agent's last report says online, but the lead reports it offline
    /// (or it is the lead itself, and silent: see [`Members::is_lead_silent`]). Or it doesn't answer its agent, and the
    /// lead either reports it offline or gives it no jobs.
    Lost,
}

/// What is known about one rank of the roster.
#[derive(Debug, Clone)]
struct Known<'a> {
    state: MemberState,
    /// The report of the member's agent, if it names the broker of this rank in this epoch.
    report: Option<&'a FluxNodeStatus>,
    /// The member's Node; None if it doesn't exist.
    node: Option<&'a NodeView>,
    /// What is known about the host of that Node, as [`host_facts`] says.
    host: Option<&'a Facts>,
    /// What the lead reports of jobs there.
    load: Load,
}

impl Known<'_> {
    fn is_ready(&self) -> bool {
        self.node.is_some_and(|node| node.ready)
    }
}

/// What the lead reports of jobs on a rank.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    /// It gives the rank no jobs.
    is_drained: bool,
    /// Host jobs hold none of its resources.
    is_without_host_jobs: bool,
    /// Gangs hold none of its resources.
    is_without_gangs: bool,
    /// Nothing holds any of its resources.
    is_free: bool,
}

impl Load {
    /// No host job runs there, and none will.
    fn gets_no_host_jobs(self) -> bool {
        self.is_drained && self.is_without_host_jobs
    }
}

/// The members of one roster, as observed at one moment.
#[derive(Debug, Clone)]
pub struct Members<'a> {
    instance_id: String,
    epoch: u64,
    max_size: u32,
    topology: Option<Topology>,
    ranks: BTreeMap<Rank, Known<'a>>,
    is_lead_silent: bool,
    lost_by_lead: BTreeSet<Rank>,
    /// The ranks above another one that has a job or may get one; None if the lead doesn't report where jobs run.
    above_jobs: Option<BTreeSet<Rank>>,
}

/// A roster and its members, observed once for everything that the planner writes from it in one round.
#[derive(Debug, Clone)]
pub struct Planned<'a> {
    /// The roster.
    pub roster: &'a Roster,
    /// Its members.
    pub members: Members<'a>,
    /// Why a node without a rank gets none now; None if there is room.
    pub(crate) no_room: Option<String>,
    rank_by_uid: HashMap<&'a str, Rank>,
    rank_by_node: HashMap<&'a str, Rank>,
}

impl<'a> Planned<'a> {
    /// Observes `roster` and its members.
    pub fn observe(seen: &Observed<'a>, roster: &'a Roster) -> Self {
        let (mut rank_by_uid, mut rank_by_node) = (HashMap::new(), HashMap::new());
        for (rank, entry) in &roster.ranks {
            if let Some(member) = &entry.member {
                rank_by_uid.entry(member.uid.as_str()).or_insert(*rank);
                rank_by_node.entry(member.node.as_str()).or_insert(*rank);
            }
        }
        let members = Members::observe(seen, roster);
        Self { roster, members, no_room: no_room(seen, roster), rank_by_uid, rank_by_node }
    }

    /// The rank whose member is the Node with `uid`.
    pub fn rank_of(&self, uid: &str) -> Option<Rank> {
        self.rank_by_uid.get(uid).copied()
    }

    /// The rank whose member is on node `name`; the lowest if there are two (see [`names`](super::names)).
    pub fn rank_on(&self, name: &str) -> Option<Rank> {
        self.rank_by_node.get(name).copied()
    }
}

impl<'a> Members<'a> {
    /// Computes the state of every member of `roster`. It stays valid while the roster's drains change, while members
    /// without a broker lose their ranks, and while nodes without a broker get ranks; only [`Self::node`] and
    /// [`Self::host`] of such a rank are from before.
    pub fn observe(seen: &Observed<'a>, roster: &Roster) -> Self {
        let mut members = Self {
            instance_id: roster.instance_id.clone(),
            epoch: roster.epoch,
            max_size: roster.settings.max_size,
            topology: topology(roster),
            ranks: BTreeMap::new(),
            is_lead_silent: false,
            lost_by_lead: BTreeSet::new(),
            above_jobs: None,
        };
        for (rank, entry) in &roster.ranks {
            let known = members.known(seen, *rank, entry);
            members.ranks.insert(*rank, known);
        }
        members.lost_by_lead = members.report(0).into_iter().flat_map(|lead| lead.offline.iter().copied()).collect();
        members.is_lead_silent = members.hears_nobody_the_lead();
        members.find_lost(roster);
        members
    }

    /// What is known about one rank, from the report of its own agent only.
    fn known(&self, seen: &Observed<'a>, rank: Rank, entry: &RosterEntry) -> Known<'a> {
        let unknown = |state| Known { state, report: None, node: None, host: None, load: Load::default() };
        let Some(member) = &entry.member else { return unknown(MemberState::Vacant) };
        let node = seen.nodes.with_uid(&member.uid);
        let host = node.and_then(|node| host_facts(seen, node));
        let without_broker = |state| Known { node, host, ..unknown(state) };
        let Some(report) = seen.report(&member.node) else { return without_broker(MemberState::NotReported) };
        let Some(adopted) = &report.adopted else { return without_broker(MemberState::NotRunning) };
        if adopted.rank != rank || adopted.epoch != self.epoch || adopted.instance_id != self.instance_id {
            return without_broker(MemberState::Elsewhere);
        }
        let state = match report.phase {
            NodePhase::Online | NodePhase::Draining => MemberState::Online,
            NodePhase::Offline => MemberState::Offline,
            _ => MemberState::ComingUp,
        };
        Known { report: Some(report), ..without_broker(state) }
    }

    /// Corrects the states by what the other brokers report, and finds out where jobs run or may start.
    fn find_lost(&mut self, roster: &Roster) {
        for (rank, known) in &mut self.ranks {
            let is_lost = self.lost_by_lead.contains(rank);
            known.state = match known.state {
                MemberState::Online if is_lost || (*rank == 0 && self.is_lead_silent) => MemberState::Lost,
                MemberState::Offline if is_lost => MemberState::Lost,
                state => state,
            };
        }
        // Only the report of a lead that is online is current.
        let Some(lead) = self.lead_report() else { return };
        let host_jobs = lead.ranks_of_host_jobs();
        if let Some(host_jobs) = host_jobs {
            // A broker process that is suspended keeps its connection, so the lead never loses it; but it finds it slow
            // to answer (torpid) and gives it no jobs. If no job runs on that rank or below it, giving up the broker
            // costs no job.
            let above_busy = self.above(host_jobs.0.iter().copied());
            let is_used = |rank: &Rank| match self.topology {
                Some(_) => host_jobs.contains(*rank) || above_busy.contains(rank),
                None => !host_jobs.is_empty(),
            };
            for (rank, known) in &mut self.ranks {
                if known.state == MemberState::Offline && lead.torpid.contains(*rank) && !is_used(rank) {
                    known.state = MemberState::Lost;
                }
            }
            self.above_jobs = Some(above_busy);
        }
        for (rank, entry) in &roster.ranks {
            // Flux can't drain a rank that it excludes; the exclusion keeps jobs away as well.
            let is_excluded = entry.is_excluded() && lead.applied_revision >= Some(entry.revision);
            let is_drained = lead.drained.as_ref().is_some_and(|drained| is_excluded || drained.contains(*rank));
            let is_without = |ranks: Option<&IdSet>| ranks.is_some_and(|ranks| !ranks.contains(*rank));
            if let Some(known) = self.ranks.get_mut(rank) {
                known.load = Load {
                    is_drained,
                    is_without_host_jobs: is_without(host_jobs),
                    is_without_gangs: is_without(Some(&lead.gangs)),
                    is_free: is_without(lead.allocated.as_ref()),
                };
            }
        }
        let may_get_jobs = |(rank, known): (&Rank, &Known)| {
            (!known.load.gets_no_host_jobs() && !self.lost_by_lead.contains(rank)).then_some(*rank)
        };
        let above_others = self.above(self.ranks.iter().filter_map(may_get_jobs));
        if let Some(above_jobs) = &mut self.above_jobs {
            above_jobs.extend(above_others);
        }
    }

    /// The ranks above any of `ranks`.
    fn above(&self, ranks: impl Iterator<Item = Rank>) -> BTreeSet<Rank> {
        let Some(topology) = self.topology else { return BTreeSet::new() };
        ranks.flat_map(|rank| topology.ancestors(rank)).collect()
    }

    /// See [`Self::is_lead_silent`].
    fn hears_nobody_the_lead(&self) -> bool {
        let Some(lead) = self.ranks.get(&0).filter(|known| known.state != MemberState::Vacant) else { return false };
        let others = || self.ranks.iter().filter(|(rank, _)| **rank != 0);
        if !lead.is_ready() {
            return others().any(|(_, known)| known.report.is_some_and(|report| report.lead_unreachable));
        }
        let hangs_on_lead = |rank: Rank| self.topology.is_none_or(|topology| topology.parent(rank) == Some(0));
        let children = others().filter(|(rank, _)| hangs_on_lead(**rank) && !self.lost_by_lead.contains(rank));
        let children = children.filter_map(|(_, known)| known.report);
        let (unheard, heard): (Vec<_>, Vec<_>) = children.partition(|report| report.lead_unreachable);
        unheard.len() > heard.len()
    }

    /// The state of the member of `rank`.
    pub fn state(&self, rank: Rank) -> MemberState {
        self.ranks.get(&rank).map_or(MemberState::Vacant, |known| known.state)
    }

    /// True if the member of `rank` is [`MemberState::Online`].
    pub fn is_online(&self, rank: Rank) -> bool {
        self.state(rank) == MemberState::Online
    }

    /// Whether status and messages show the member of `rank` as online. As [`Self::is_online`], but not of a lead whose Node is gone or
    /// not Ready, and which no broker that is online hears: its last report stays. Decisions go by that report, because such a lead may live, and
    /// brokers that come up can join it.
    pub fn is_shown_online(&self, rank: Rank) -> bool {
        let hears = |(other, known): (&Rank, &Known)| {
            known.is_ready() && known.state == MemberState::Online && *other != 0 && !self.lost_by_lead.contains(other)
        };
        self.is_online(rank) && (rank != 0 || self.is_ready(0) || self.ranks.iter().any(hears))
    }

    /// True if the member of `rank` is [`MemberState::Lost`].
    pub fn is_lost(&self, rank: Rank) -> bool {
        self.state(rank) == MemberState::Lost
    }

    /// The report of the member's agent, if it names the broker of this rank in this epoch.
    pub fn report(&self, rank: Rank) -> Option<&'a FluxNodeStatus> {
        self.ranks.get(&rank)?.report
    }

    /// True if the agent of the member reports the broker of this rank in this epoch, in whatever state.
    pub fn runs(&self, rank: Rank) -> bool {
        self.report(rank).is_some()
    }

    /// True if the agent of the member of `rank` reports its broker online, whatever the other brokers report.
    pub fn is_reported_online(&self, rank: Rank) -> bool {
        self.report(rank).is_some_and(|report| matches!(report.phase, NodePhase::Online | NodePhase::Draining))
    }

    /// True if the agent of the member of `rank` reports a broker of this rank and epoch, in the boot that the Node names.
    pub fn is_report_of_this_boot(&self, rank: Rank) -> bool {
        self.ranks.get(&rank).is_some_and(|known| known.report.is_some() && known.host.is_some())
    }

    /// The report of the lead's agent while the lead is online: only then is its information about other ranks current.
    pub fn lead_report(&self) -> Option<&'a FluxNodeStatus> {
        self.report(0).filter(|_| self.is_online(0))
    }

    /// True if the lead reports that `rank`, with or without a member, is not in the overlay. False without a report
    /// from the lead.
    pub fn has_lead_lost(&self, rank: Rank) -> bool {
        self.lost_by_lead.contains(&rank)
    }

    /// True if the other brokers no longer reach the lead's broker. When the lead's machine goes off, its agent can't
    /// correct its last report, and Kubernetes takes most of a minute to mark the Node NotReady. So if most children of
    /// the lead report that they don't hear it, it is silent; children that the lead itself reports offline don't
    /// count. If the lead's Node is not Ready, which alone proves nothing, one report from any broker is enough.
    pub fn is_lead_silent(&self) -> bool {
        self.is_lead_silent
    }

    /// True if the Node of the member of `rank` exists and is Ready.
    pub fn is_ready(&self, rank: Rank) -> bool {
        self.ranks.get(&rank).is_some_and(Known::is_ready)
    }

    /// The Node of the member of `rank`; None if it doesn't exist, or there is no member.
    pub fn node(&self, rank: Rank) -> Option<&'a NodeView> {
        self.ranks.get(&rank)?.node
    }

    /// What the agent on the Node of the member of `rank` has reported of its host, if the report is of the boot that the Node names, or the Node names
    /// none.
    pub fn host(&self, rank: Rank) -> Option<&'a Facts> {
        self.ranks.get(&rank)?.host
    }

    fn load(&self, rank: Rank) -> Load {
        self.ranks.get(&rank).map(|known| known.load).unwrap_or_default()
    }

    /// True if, according to the lead, no host job runs on `rank`, and the lead gives it none: it is drained or excluded.
    pub fn gets_no_host_jobs(&self, rank: Rank) -> bool {
        self.load(rank).gets_no_host_jobs()
    }

    /// As [`Self::gets_no_host_jobs`], and no gang runs there. Single pods may.
    pub fn gets_no_jobs_but_single_pods(&self, rank: Rank) -> bool {
        self.gets_no_host_jobs(rank) && self.load(rank).is_without_gangs
    }

    /// As [`Self::gets_no_host_jobs`], and no pod runs there either: nothing holds any of its resources.
    pub fn gets_no_jobs_at_all(&self, rank: Rank) -> bool {
        self.gets_no_host_jobs(rank) && self.load(rank).is_free
    }

    /// True if jobs run below `rank` in a deep tree, or a rank there may get one at any moment. If the broker of `rank`
    /// ends, all brokers below it end with their jobs.
    pub fn may_carry_jobs(&self, rank: Rank) -> bool {
        self.topology.is_some_and(|topology| topology.is_interior(rank, self.max_size))
            && self.above_jobs.as_ref().is_none_or(|above| above.contains(&rank))
    }

    /// The rank of the broker that `report` names if that broker belongs to this epoch, the rank no longer has a
    /// member, and the lead has not reported the broker out of the overlay.
    pub fn orphan_broker_rank(&self, report: &FluxNodeStatus) -> Option<Rank> {
        let adopted = report.adopted.as_ref()?;
        let is_ours = adopted.instance_id == self.instance_id && adopted.epoch == self.epoch;
        let has_no_member = self.ranks.get(&adopted.rank).is_some_and(|known| known.state == MemberState::Vacant);
        (is_ours && has_no_member && !self.has_lead_lost(adopted.rank)).then_some(adopted.rank)
    }
}

/// Returns the rank whose member is the Node with `uid`. In a loop, ask [`Planned::rank_of`].
pub(crate) fn rank_of(roster: &Roster, uid: &str) -> Option<Rank> {
    let holds = |entry: &RosterEntry| entry.member.as_ref().is_some_and(|member| member.uid == uid);
    roster.ranks.iter().find(|(_, entry)| holds(entry)).map(|(rank, _)| *rank)
}

#[cfg(test)]
#[path = "members_tests.rs"]
mod tests;
