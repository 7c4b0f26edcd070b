//! The fresh look before a broker starts. The inputs of the round may be the memory of an agent that was suspended for minutes: a
//! broker of a rank that another node has by now would push that node's broker out. So the agent asks the API server again and
//! decides again, by [`next_step`].

use std::sync::Arc;

use super::next_step::next_step;
use crate::{
    error::StepError,
    inputs::{
        assignment::Assignment,
        node_inputs::{Instance, NodeInputs},
    },
    memory::Memory,
    step::Step,
};
use api::{FluxNode, Roster};

/// What the API server says about this node right before a start.
pub struct FreshLook {
    /// Our FluxNode.
    pub flux_node: Option<FluxNode>,
    /// The published roster.
    pub roster: Option<Arc<Roster>>,
}

/// The assignment to start with, if the decision still is to start a broker of the same rank.
///
/// # Errors
/// [`StepError::NotYet`] with what this node waits for instead.
pub fn confirm(
    inputs: &NodeInputs,
    memory: &Memory,
    decided: &Assignment,
    fresh: FreshLook,
) -> Result<Assignment, StepError> {
    // A new agent may not have read the FluxInstance yet; then the host knows whose it is.
    let claimed_for = inputs.host.state.as_ref().map(|state| state.instance_uid.clone());
    let instance = match (&inputs.instance, claimed_for) {
        (Instance::Unknown, Some(uid)) => Instance::Here { uid },
        (known, _) => known.clone(),
    };
    // A roster that was deleted contradicts nothing.
    let roster = fresh.roster.or_else(|| inputs.roster.clone());
    let node_uid = inputs.node_uid.clone().or_else(|| Some(decided.node_uid.clone()));
    let now = NodeInputs { instance, flux_node: fresh.flux_node, roster, node_uid, ..inputs.clone() };
    match next_step(&now, memory) {
        Step::Start(assignment) if assignment.is_same_rank(decided) => Ok(assignment),
        Step::Wait(reason) => Err(StepError::NotYet(reason)),
        _ => Err(StepError::NotYet(format!(
            "waiting for the planner: rank {} is not this node's as it was",
            decided.rank
        ))),
    }
}

/// How to go on with a broker whose files of the last start are still on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithoutApi {
    /// Do what the API server says, also if it refuses.
    FollowApi,
    /// Neither the API server nor the parent's broker answers: this host may be cut off, and its rank another node's soon. Without
    /// its parent no broker gets in anyway.
    WaitForParent,
    /// The agent was suspended, and may have missed what the API server said.
    WaitForApi,
    /// Start the broker with the files that are there.
    UseLocalFiles,
}

/// Decides how to go on.
pub fn without_api(api_is_silent: bool, parent_answers: bool, was_suspended: bool) -> WithoutApi {
    match (api_is_silent, parent_answers, was_suspended) {
        (false, _, _) => WithoutApi::FollowApi,
        (true, false, _) => WithoutApi::WaitForParent,
        (true, true, true) => WithoutApi::WaitForApi,
        (true, true, false) => WithoutApi::UseLocalFiles,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broker_starts_from_its_files_only_if_the_api_is_silent_and_its_parent_answers() {
        for (api_is_silent, parent_answers, was_suspended, expected) in [
            (false, true, false, WithoutApi::FollowApi),
            (false, false, true, WithoutApi::FollowApi),
            (true, false, false, WithoutApi::WaitForParent),
            (true, false, true, WithoutApi::WaitForParent),
            (true, true, true, WithoutApi::WaitForApi),
            (true, true, false, WithoutApi::UseLocalFiles),
        ] {
            let found = without_api(api_is_silent, parent_answers, was_suspended);
            assert_eq!(found, expected, "{api_is_silent} {parent_answers} {was_suspended}");
        }
    }
}
