//! This host's own copy of the roster: the one that its broker was configured by last.

use std::sync::Arc;

use api::{FluxNodeSpec, FluxNodeStatus, Roster};
use hostapi::{HostView, RunningBroker};

/// The roster that this host was configured by last; None if it belongs to another instance than the one that claimed the host.
pub fn host_roster(host: &HostView) -> Option<Arc<Roster>> {
    let roster = host.roster.as_ref()?.roster()?;
    let ours = host.state.as_ref().is_some_and(|state| state.instance_uid == roster.instance_uid);
    ours.then(|| Arc::clone(roster))
}

/// True if this host runs rank 0, or no broker while its copy of the roster gives it rank 0.
pub fn leads(host: &HostView, spec: Option<&FluxNodeSpec>) -> bool {
    if let Some(broker) = &host.broker {
        return broker.record.rank == 0;
    }
    let (Some(spec), Some(copy)) = (spec, &host.roster) else { return false };
    copy.roster().is_some_and(|copy| {
        let lead = copy.lead();
        spec.instance_uid.as_deref() == Some(&copy.instance_uid) && lead.is_some_and(|lead| lead.node == spec.node_name)
    })
}

/// True if another machine has this node's name, for example because this one was cut off and taken for lost: the FluxNode
/// reports a broker that was started for the Node that has the name now, and this host was configured last for another Node. What
/// the planner wants of that name may stop what runs here, but must start nothing, or two machines would answer under one rank.
pub fn names_another_machine(host: &HostView, spec: &FluxNodeSpec, status: Option<&FluxNodeStatus>) -> bool {
    let Some(adopted) = status.and_then(|status| status.adopted.as_ref()) else { return false };
    // The newcomer's copy may hold both machines: the planner keeps the other one's rank for a while.
    let is_known_otherwise = || {
        let copy = host_roster(host);
        let members = copy.iter().flat_map(|copy| copy.members());
        let uids: Vec<_> = members.filter(|member| member.node == spec.node_name).map(|member| &member.uid).collect();
        !uids.is_empty() && !uids.contains(&&adopted.node_uid)
    };
    let is_adopted_here = |broker: &RunningBroker| broker.record.node_uid == adopted.node_uid;
    spec.node_uid.as_ref() == Some(&adopted.node_uid)
        && !host.broker.as_ref().is_some_and(is_adopted_here)
        && is_known_otherwise()
}
