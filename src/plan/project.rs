//! What each node is told: the roster as far as it concerns that node.

use super::{
    eligibility::{NodeView, eligible},
    roster::{Observed, is_online, parent, rank_of},
};
use crate::api::{FluxNodeSpec, Rank, Roster, Want};

/// The spec of a node's FluxNode.
///
/// A broker is started only after the lead has its resources (so that nobody is ever seen with a wrong R) and under a parent
/// that is online (else it would wait in JOIN for ever, silently).
pub fn project(seen: &Observed, roster: Option<&Roster>, node: &NodeView) -> FluxNodeSpec {
    let mut spec = FluxNodeSpec {
        node_name: node.name.clone(),
        instance_uid: Some(seen.instance_uid.to_owned()),
        node_uid: Some(node.uid.clone()),
        ..FluxNodeSpec::default()
    };
    if let Some((roster, rank)) = roster.and_then(|roster| Some((roster, rank_of(roster, &node.uid)?))) {
        spec.rank = Some(rank);
        spec.epoch = roster.epoch;
        spec.revision = revision_for(roster, rank);
        spec.want = if may_run(seen, roster, rank) { Want::Run } else { Want::Install };
    } else {
        match eligible(node, &seen.spec.nodes) {
            Ok(()) => spec.want = Want::Install,
            Err(reason) => spec.reason = Some(reason.to_string()),
        }
    }
    spec
}

/// The lead follows every change of what is declared, anybody else only his own.
fn revision_for(roster: &Roster, rank: Rank) -> u64 {
    let own = |rank: &Rank| roster.ranks.get(rank).map(|entry| entry.revision);
    if rank == 0 { roster.ranks.keys().filter_map(own).max().unwrap_or(0) } else { own(&rank).unwrap_or(0) }
}

fn may_run(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    if rank == 0 || super::roster::holds(seen, roster, rank).is_some() {
        return true;
    }
    let lead = roster.ranks.get(&0).and_then(|entry| entry.member.as_ref());
    let applied = lead.and_then(|lead| seen.reports.get(&lead.node)).and_then(|report| report.applied_revision);
    let declared = roster.ranks.get(&rank).filter(|entry| entry.resources.is_some()).map(|entry| entry.revision);
    let taken_in = declared.is_some_and(|declared| applied >= Some(declared));
    taken_in && is_online(seen, roster, 0) && parent(roster, rank).is_none_or(|parent| is_online(seen, roster, parent))
}
