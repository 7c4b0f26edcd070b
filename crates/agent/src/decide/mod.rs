//! The agent's one decision: from what a round observed to what it does, reports and waits for. Pure.
//!
//! [`next_step`](next_step::next_step) holds the rules of the ladder. The rules that a step needs while it is carried out, with
//! what only then is known, stand beside it: job safety in [`jobs`], the fresh look before a start in [`start`], the end of the
//! pod in [`teardown`].

pub(super) mod jobs;
pub(super) mod next_step;
pub(super) mod start;
pub(super) mod teardown;
#[cfg(test)]
mod tests;

use std::time::Duration;

use next_step::next_step;

use super::{
    inputs::node_inputs::{Instance, NodeInputs},
    memory::Memory,
    status::node_status,
    step::Step,
};
use api::{FluxNodeStatus, Uninstall};

/// The longest rest between two rounds, unless the agent may rest for [`CALM`].
pub const RESYNC: Duration = Duration::from_secs(10);
/// The rest while something is on its way.
pub const SOON: Duration = Duration::from_secs(1);
/// The rest if the API server or the broker will tell this agent of whatever is urgent: each round observes the host, which takes processor time
/// from jobs.
pub const CALM: Duration = Duration::from_secs(30);

/// What one round does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The next step.
    pub step: Step,
    /// What the FluxNode says; None if this agent must not write it.
    pub status: Option<FluxNodeStatus>,
    /// Whether the node is as the planner wants it; None if a new agent does not know yet, and the last report stands.
    pub readiness: Option<bool>,
    /// Rest for this long instead of carrying out the step: there is nothing to carry out, or it failed just now.
    pub rest: Option<Duration>,
}

impl Decision {
    /// A broker that has died must not wait for an API server that is away: the step comes before its report.
    pub fn is_urgent(&self, inputs: &NodeInputs) -> bool {
        matches!(self.step, Step::Start(_)) && inputs.host.died.is_some()
    }
}

/// Decides.
pub fn decide(inputs: &NodeInputs, memory: &Memory) -> Decision {
    let step = next_step(inputs, memory);
    let rest = if step.is_rest() {
        Some(rest(inputs, &step))
    } else {
        memory.pause(&step, inputs.generation, inputs.at).map(|pause| pause.min(RESYNC))
    };
    Decision {
        status: node_status::node_status(inputs, memory, &step, None),
        readiness: node_status::readiness(inputs),
        rest,
        step,
    }
}

/// How long to rest after a round without a step to carry out.
fn rest(inputs: &NodeInputs, step: &Step) -> Duration {
    let broker_comes_up = inputs.host.broker.is_some() && !inputs.is_online();
    match () {
        () if broker_comes_up || inputs.packages_expected => SOON,
        () if is_calm(inputs, step) => CALM,
        () => RESYNC,
    }
}

/// True if the API server or the broker will tell this agent of whatever is urgent. All else, such as upkeep and what only a look at the host
/// finds, may wait for [`CALM`].
fn is_calm(inputs: &NodeInputs, step: &Step) -> bool {
    let (Instance::Here { uid }, host) = (&inputs.instance, &inputs.host) else { return false };
    // New resources count once a second look confirms them.
    let are_resources_known = inputs.preflight.as_ref().is_some_and(|known| known.resources == host.resources);
    // Nobody tells the agent that a port is free again, or that a read which failed would succeed now.
    if inputs.is_behind || !inputs.port_problems.is_empty() || !are_resources_known {
        return false;
    }
    if host.broker.is_none() {
        // The agent waits for its first spec, which the planner writes into the FluxNode. If there is none, the next round has to create it.
        return host.unknown.is_none() && inputs.flux_node.is_some() && inputs.spec_for(uid).is_none();
    }
    // Scheduler, queues and the other nodes' brokers depend on what the lead's agent sees in time.
    let is_follower = inputs.assignment().is_some_and(|own| own.rank != 0);
    *step == Step::Hold && is_follower && inputs.broker.is_well()
}

/// Whether archives are on their way to this node, so that other nodes which ask for one wait instead of asking the source. None:
/// not known yet.
pub fn expects_archives(inputs: &NodeInputs, step: &Step) -> Option<bool> {
    match step {
        Step::Install { .. } | Step::Prepare { .. } => Some(true),
        _ if inputs.preflight.is_none() || inputs.own_spec().is_none() || inputs.published.is_empty() => None,
        _ => Some(false),
    }
}

/// How the instance is to end, if that differs from what the host remembers: when the agent needs it, the FluxInstance is
/// gone.
pub fn uninstall_to_remember<'a>(inputs: &'a NodeInputs, instance_uid: &str) -> Option<&'a Uninstall> {
    let state = inputs.host.state.as_ref().filter(|state| state.instance_uid == instance_uid)?;
    (inputs.preflight.is_some() && state.uninstall != inputs.uninstall).then_some(&inputs.uninstall)
}

/// Lead: the epoch goes on, so the queues that an agent may have stopped for its end must be started again.
pub fn must_start_queues(inputs: &NodeInputs, memory: &Memory) -> bool {
    let is_closing = inputs.roster.as_ref().is_none_or(|roster| roster.closing.is_some());
    memory.queues.may_be_stopped
        && inputs.runs_lead()
        && inputs.is_online()
        && !is_closing
        && inputs.preflight.is_some()
}
