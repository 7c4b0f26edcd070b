//! What this host's own copy of the roster tells: the one that its broker was configured by last.

use api::{FluxNodeSpec, FluxNodeStatus, Roster};
use hostapi::{HostView, RunningBroker};

/// The roster that this host was configured by last.
pub fn host_roster(host: &HostView) -> Option<Roster> {
    let roster = Roster::parse(host.roster.as_deref()?).ok()?;
    let ours = host.state.as_ref().is_some_and(|state| state.instance_uid == roster.instance_uid);
    ours.then_some(roster)
}

/// This host is the lead's: it runs rank 0, or it would by the roster that it was configured by last.
pub fn leads(host: &HostView, spec: Option<&FluxNodeSpec>) -> bool {
    if let Some(broker) = &host.broker {
        return broker.record.rank == 0;
    }
    let (Some(spec), Some(text)) = (spec, &host.roster) else { return false };
    Roster::parse(text).is_ok_and(|copy| {
        let lead = copy.lead();
        spec.instance_uid.as_deref() == Some(&copy.instance_uid) && lead.is_some_and(|lead| lead.node == spec.node_name)
    })
}

/// Another machine has this node's name, as where ours was cut off and taken for lost: a broker is reported that was started
/// for the Node that has the name now, and when this host was configured last its Node was another one. What runs here may be
/// ended by what is said to that name, but never begun, or two machines answered under one rank.
pub fn names_another_machine(host: &HostView, spec: &FluxNodeSpec, told: Option<&FluxNodeStatus>) -> bool {
    let Some(adopted) = told.and_then(|told| told.adopted.as_ref()) else { return false };
    // The newcomer's copy may have both: the other's rank is kept for it.
    let is_known_otherwise = || {
        let copy = host_roster(host);
        let members = copy.iter().flat_map(Roster::members);
        let uids: Vec<_> = members.filter(|member| member.node == spec.node_name).map(|member| &member.uid).collect();
        !uids.is_empty() && !uids.contains(&&adopted.node_uid)
    };
    let is_adopted_here = |broker: &RunningBroker| broker.record.node_uid == adopted.node_uid;
    spec.node_uid.as_ref() == Some(&adopted.node_uid)
        && !host.broker.as_ref().is_some_and(is_adopted_here)
        && is_known_otherwise()
}
