//! Which rank this node holds, if FluxNode and roster agree on it. Pure.

use api::{FluxNodeSpec, Rank, Roster, RosterEntry};
use hostapi::HostView;

/// A rank that both our FluxNode and the roster give to this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// The rank.
    pub rank: Rank,
    /// The roster's entry for the rank.
    pub entry: RosterEntry,
    /// metadata.uid of our Node.
    pub node_uid: String,
    /// The epoch.
    pub epoch: u64,
    /// The broker's files must be made from this revision of the roster, or a later one.
    pub revision: u64,
}

impl Assignment {
    /// The same rank for the same Node in the same epoch; the roster's entry may have changed.
    pub fn is_same_rank(&self, other: &Self) -> bool {
        (self.rank, self.epoch, &self.node_uid) == (other.rank, other.epoch, &other.node_uid)
    }
}

/// The assignment, if FluxNode and roster agree on rank, Node UID and epoch.
pub fn agreed(spec: &FluxNodeSpec, roster: &Roster) -> Option<Assignment> {
    let rank = spec.rank?;
    let entry = roster.ranks.get(&rank)?;
    let node_uid = spec.node_uid.clone()?;
    let member = entry.member.as_ref()?;
    let same_instance = spec.instance_uid.as_deref() == Some(&roster.instance_uid);
    let ours = member.uid == node_uid && member.node == spec.node_name;
    (ours && spec.epoch == roster.epoch && same_instance).then(|| Assignment {
        rank,
        entry: entry.clone(),
        node_uid,
        epoch: roster.epoch,
        revision: spec.revision.max(entry.revision),
    })
}

/// The roster, too, wants this host's broker to leave, or has no such member: FluxNode.spec alone stops nothing.
pub fn may_leave(host: &HostView, spec: &FluxNodeSpec, roster: &Roster) -> bool {
    let is_same = spec.instance_uid.as_deref() == Some(&roster.instance_uid) && spec.epoch == roster.epoch;
    let rank = host.broker.as_ref().map(|broker| broker.record.rank).or(spec.rank);
    let entry = rank.and_then(|rank| roster.ranks.get(&rank));
    let is_ours = |entry: &&RosterEntry| entry.member.as_ref().is_some_and(|member| member.node == spec.node_name);
    let leaves = |entry: &RosterEntry| entry.drain.as_ref().is_some_and(|drain| drain.leave);
    is_same && entry.filter(is_ours).is_none_or(leaves)
}

/// The rank that the roster gives to `node`, without a FluxNode to compare: for a node that hears nothing from the API server.
pub fn held_by(roster: &Roster, node: &str) -> Option<Assignment> {
    let held = roster.ranks.iter().filter_map(|(rank, entry)| Some((rank, entry, entry.member.as_ref()?)));
    // A machine that this one has replaced keeps its rank for a while.
    let held = held.filter(|(.., member)| member.node == node);
    let (rank, entry, member) = held.min_by_key(|(.., member)| member.gone_since.is_some())?;
    Some(Assignment {
        rank: *rank,
        entry: entry.clone(),
        node_uid: member.uid.clone(),
        epoch: roster.epoch,
        revision: entry.revision,
    })
}
