//! Starts the broker: with what the API server says right now, or with the files of the last start while it does not answer.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};
use tracing::warn;

use super::Outcome;
use crate::{
    agent::Agent,
    decide::{
        SOON,
        start::{FreshLook, WithoutApi, confirm, without_api},
    },
    error::StepError,
    inputs::{
        assignment::{Assignment, held_by},
        node_inputs::NodeInputs,
    },
    node_ops::{Content, NodeOps},
    step::Step,
};
use api::{Rank, Roster};
use base::chance::chance;
use cluster::ApiError;
use hostapi::Preflight;
use metrics::Start;
use model::tree::parent;

/// A connection to another node is made within milliseconds, or a second if its first packet is lost.
const PARENT_ANSWERS_IN: Duration = Duration::from_secs(2);
/// A broker that has died waits no longer than this for the API server if there are files to start it with.
const API_ANSWERS_IN: Duration = Duration::from_secs(4);
/// While the agent waits for the parent, it looks after nothing else.
const PARENT_PATIENCE: Duration = Duration::from_mins(1);

/// A broker that may be started.
struct Startable {
    assignment: Assignment,
    roster: Arc<Roster>,
    /// The roster's revision from which its files were made.
    revision: u64,
}

/// Starts the broker of `decided`, if the fresh look confirms it.
pub async fn start(
    agent: &mut Agent,
    inputs: &NodeInputs,
    preflight: &Preflight,
    step: &Step,
    decided: &Assignment,
) -> Result<Outcome, StepError> {
    let Startable { assignment, roster, revision } = make_ready(agent, inputs, preflight, decided).await?;
    NodeOps::can_listen(&roster, &assignment)?;
    agent.memory.starts.started(step, inputs.generation, Instant::now(), chance());
    let view = agent.ops.start(preflight, &roster, &assignment).await?;
    agent.metrics.broker_start(why(inputs, assignment.epoch));
    if assignment.rank == 0 {
        agent.ops.remember(preflight, &roster, &view, revision, false).await?;
    }
    Ok(Outcome::Done)
}

/// Why a broker of `epoch` has to be started on a host that looked like this.
fn why(inputs: &NodeInputs, epoch: u64) -> Start {
    match &inputs.local_roster {
        None => Start::First,
        // That the brokers of an epoch end with it is no failure.
        Some(last) if last.epoch < epoch => Start::Epoch,
        Some(_) if inputs.host.died.is_some() => Start::Died,
        Some(_) => Start::Again,
    }
}

/// Writes everything that the broker reads at its start. While the API server does not answer, the files of the last start do.
async fn make_ready(
    agent: &mut Agent,
    inputs: &NodeInputs,
    preflight: &Preflight,
    decided: &Assignment,
) -> Result<Startable, StepError> {
    // They lack what the agent has learned since they were written.
    let is_same = |held: &Assignment| (held.rank, held.epoch) == (decided.rank, decided.epoch);
    let is_of_attempt =
        |copy: &&Arc<Roster>| inputs.roster.as_ref().is_none_or(|known| known.instance_id == copy.instance_id);
    let copy = inputs.local_roster.as_ref().filter(|_| inputs.host.died.is_some()).filter(is_of_attempt);
    let Some(copy) = copy.filter(|copy| held_by(copy, &inputs.node).as_ref().is_some_and(is_same)) else {
        return configure_from_api(agent, inputs, preflight, decided, Duration::MAX).await;
    };
    // The parent is asked first: if the API server is silent later, that says nothing about the network.
    let mut parent_answers = answers(copy, decided.rank).await;
    loop {
        let answer = configure_from_api(agent, inputs, preflight, decided, API_ANSWERS_IN).await;
        match without_api(is_silence(&answer), parent_answers, agent.sources.stall.woke_up().is_some()) {
            WithoutApi::FollowApi => return answer,
            WithoutApi::WaitForParent => {
                wait_for_parent(agent, copy, decided.rank).await?;
                parent_answers = true;
            }
            WithoutApi::WaitForApi => {
                return Err(StepError::NotYet(
                    "this agent was suspended, and its rank may be another node's by now: waiting for the API server"
                        .to_owned(),
                ));
            }
            WithoutApi::UseLocalFiles => {
                warn!("the API server does not answer: starting the broker with the files of its last start");
                let roster = Arc::clone(copy);
                return Ok(Startable { assignment: decided.clone(), revision: copy.revision, roster });
            }
        }
    }
}

/// Waits, at most [`PARENT_PATIENCE`], while neither the parent's broker answers nor the API server reports a change that may
/// begin a round.
async fn wait_for_parent(agent: &Agent, roster: &Roster, rank: Rank) -> Result<(), StepError> {
    warn!(
        "neither the API server nor the parent's broker answers: this node may be cut off, and its rank another node's soon"
    );
    let mut watched = agent.sources.watched.clone();
    watched.mark_unchanged();
    let answer = async {
        while !answers(roster, rank).await {
            sleep(SOON).await;
        }
    };
    let is_there = tokio::select! {
        answered = timeout(PARENT_PATIENCE, answer) => answered.is_ok(),
        _ = watched.changed() => false,
    };
    let waiting = || StepError::NotYet("waiting for the parent's broker, or for the API server".to_owned());
    is_there.then_some(()).ok_or_else(waiting)
}

/// Reads everything from the API server within `limit`, if its own time limits are longer, and writes it to the host.
async fn configure_from_api(
    agent: &mut Agent,
    inputs: &NodeInputs,
    preflight: &Preflight,
    decided: &Assignment,
    limit: Duration,
) -> Result<Startable, StepError> {
    let late = |_| ApiError::Timeout("get FluxNode, roster and what the broker reads".to_owned());
    let reading = read_from_api(agent, inputs, preflight, decided);
    let (assignment, roster, content) = timeout(limit, reading).await.map_err(late)??;
    let revision = content.revision;
    agent.ops.write(preflight, &assignment, &content, false).await?;
    Ok(Startable { assignment, roster, revision })
}

async fn read_from_api(
    agent: &mut Agent,
    inputs: &NodeInputs,
    preflight: &Preflight,
    decided: &Assignment,
) -> Result<(Assignment, Arc<Roster>, Content), StepError> {
    let roster = agent.sources.published.read_roster(&agent.ops.client);
    let (flux_node, roster) = futures::try_join!(agent.reporter.of(&inputs.node), roster)?;
    let fresh = FreshLook { flux_node, roster };
    let assignment = confirm(inputs, &agent.memory, decided, fresh)?;
    let roster = agent.sources.published.roster()?;
    let content = agent.ops.content(preflight, &roster, &assignment).await?;
    Ok((assignment, roster, content))
}

/// True if the API server said nothing. A roster of a newer version is an answer, though not one for us; one that can't be read is
/// none.
fn is_silence<T>(answer: &Result<T, StepError>) -> bool {
    matches!(answer, Err(StepError::Api(error)) if !matches!(error, ApiError::NewerRoster(_)))
}

/// The broker of `rank`'s parent can be reached. The lead has no parent that could be missing.
async fn answers(roster: &Roster, rank: Rank) -> bool {
    let Some(parent) = parent(roster, rank) else { return true };
    let Some(member) = roster.member(parent) else { return false };
    let connecting = TcpStream::connect((member.address, roster.settings.port));
    timeout(PARENT_ANSWERS_IN, connecting).await.is_ok_and(|connected| connected.is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use api::RosterError;

    #[test]
    fn a_start_is_counted_by_what_became_of_the_broker_before_it() {
        let copy = |epoch| Some(Arc::new(Roster { epoch, ..model::fixture::roster(4, &[("a", 4)]) }));
        let died = || Some("signal 9".to_owned());
        for (local_roster, died, expected) in [
            (None, None, Start::First),
            // What an instance that is no more has left behind.
            (None, died(), Start::First),
            (copy(2), None, Start::Epoch),
            (copy(2), died(), Start::Epoch),
            (copy(3), died(), Start::Died),
            (copy(3), None, Start::Again),
        ] {
            let mut inputs = NodeInputs { local_roster, ..fixture::inputs() };
            inputs.host.died = died;
            assert_eq!(why(&inputs, 3), expected, "{:?}", (&inputs.local_roster, &inputs.host.died));
        }
    }

    #[test]
    fn a_roster_of_a_newer_version_is_no_silence() {
        let late = ApiError::Timeout("get roster".to_owned());
        let spoilt = ApiError::Content { object: "ConfigMap flux-roster".to_owned(), reason: String::new() };
        let newer = ApiError::NewerRoster(RosterError::Newer(2));
        for (error, silence) in [
            (StepError::Api(late), true),
            (StepError::Api(spoilt), true),
            (StepError::Api(newer), false),
            (StepError::NotYet("waiting for the planner".to_owned()), false),
        ] {
            assert_eq!(is_silence::<()>(&Err(error)), silence);
        }
    }
}
