//! Carries out steps: the only effects of a decision. Each step can be killed at any point and carried out again.

pub(super) mod ask;
pub(super) mod close;
pub(super) mod install;
pub(super) mod installation;
pub(super) mod queues;
pub(super) mod remove;
mod start;

use tokio::{sync::watch, time::timeout};
use tracing::{info, warn};

use super::{
    agent::Agent,
    decide::jobs::why_stop_waits,
    drains::{self, DrainChange},
    error::StepError,
    inputs::{
        assignment::Assignment,
        broker_state,
        node_inputs::NodeInputs,
        watched_objects::{WatchedObjects, Wish},
    },
    node_ops::Content,
    step::{Overtaking, Step},
};
use broker::reload::reload;
use hostapi::Preflight;
use model::names::{are_settled, live_configuration};

/// What a step has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The step.
    Done,
    /// It stopped the broker on purpose.
    Stopped,
    /// It removed everything from the host.
    Removed,
    /// Something cut it short, see [`Step::overtaken_by`].
    Overtaken,
}

/// Carries out `step` until it is done, has failed, or is overtaken.
///
/// # Errors
/// Why the step was not carried out.
pub async fn execute(agent: &mut Agent, inputs: &NodeInputs, step: &Step) -> Result<Outcome, StepError> {
    let watched = agent.sources.watched.clone();
    until_overtaken(watched, &inputs.wish, step, carry_out(agent, inputs, step)).await
}

/// Drops `work` once something overtakes `step`, which began with `wish`.
async fn until_overtaken(
    mut watched: watch::Receiver<WatchedObjects>,
    wish: &Wish,
    step: &Step,
    work: impl Future<Output = Result<Outcome, StepError>>,
) -> Result<Outcome, StepError> {
    let is_overtaken = |now: &WatchedObjects| match step.overtaken_by() {
        Overtaking::Nothing => false,
        Overtaking::EndOfInstance => now.is_over(),
        Overtaking::AnotherWish => now.is_over() || now.wish() != *wish,
    };
    tokio::select! {
        outcome = work => outcome,
        Ok(_) = watched.wait_for(is_overtaken) => Ok(Outcome::Overtaken),
    }
}

async fn carry_out(agent: &mut Agent, inputs: &NodeInputs, step: &Step) -> Result<Outcome, StepError> {
    if *step == Step::Remove {
        return remove::remove(agent, &inputs.host, false).await;
    }
    let Some(preflight) = &inputs.preflight else {
        let passed = agent.ops.preflight(&agent.sources.running_spec(), None).await?;
        passed.warnings.iter().for_each(|warning| warn!("{warning}"));
        agent.sources.preflight = Some(passed);
        return Ok(Outcome::Done);
    };
    match step {
        Step::Install { digest } | Step::Prepare { digest } => {
            installation::install_package_set(agent, inputs, step, digest).await
        }
        Step::Start(decided) => start::start(agent, inputs, preflight, step, decided).await,
        Step::Reload(assignment) => {
            let loaded = reload_resources(agent, inputs, preflight, assignment).await;
            agent.metrics.live_change(loaded.is_ok());
            loaded
        }
        Step::Drain(change) => drain(agent, change).await,
        Step::Close(closing) => close::close(agent, inputs, preflight, *closing).await,
        Step::Stop { reason, waits_for_jobs } => stop(agent, inputs, reason, *waits_for_jobs).await,
        Step::Hold | Step::Wait(_) | Step::GiveWay(_) | Step::Preflight | Step::Remove => Ok(Outcome::Done),
    }
}

/// Lead: makes the running broker load what the roster declares.
async fn reload_resources(
    agent: &mut Agent,
    inputs: &NodeInputs,
    preflight: &Preflight,
    assignment: &Assignment,
) -> Result<Outcome, StepError> {
    let roster = agent.sources.published.roster()?;
    let live_change = agent.live_change.clone();
    let _until_finished = live_change.lock().await;
    let Content { roster, revision, .. } = agent.ops.configure(preflight, &roster, assignment, true).await?;
    let mut settled = true;
    reload(&broker_state::connect_on(&*agent.ops.host).await?, |held| {
        settled = are_settled(&roster, held);
        live_configuration(&roster, held)
    })
    .await?;
    info!(revision, "the lead has loaded the roster's resources");
    // A broker that was asked while it had no scheduler did not say what is drained.
    agent.sources.ask_broker.notify_one();
    agent.ops.remember(preflight, &roster, &inputs.host, revision, settled).await?;
    Ok(Outcome::Done)
}

async fn drain(agent: &mut Agent, change: &DrainChange) -> Result<Outcome, StepError> {
    info!(?change, "draining");
    let mut broker = agent.sources.broker.clone();
    broker.mark_unchanged();
    drains::apply(&broker_state::connect_on(&*agent.ops.host).await?, change).await?;
    agent.sources.ask_broker.notify_one();
    // The same request again, before the broker reports this one, would be one more event in Flux's log for ever.
    let _ = timeout(2 * broker_state::ASK_EVERY, broker.changed()).await;
    Ok(Outcome::Done)
}

async fn stop(
    agent: &mut Agent,
    inputs: &NodeInputs,
    reason: &str,
    waits_for_jobs: bool,
) -> Result<Outcome, StepError> {
    if let Some(reason) = why_stop_waits(&inputs.host, reason, waits_for_jobs) {
        return Err(StepError::NotYet(reason));
    }
    info!(reason, "stopping the broker");
    agent.memory.starts.forget();
    let rank = inputs.host.broker.as_ref().map_or(0, |broker| broker.record.rank);
    agent.ops.stop(rank).await?;
    Ok(Outcome::Stopped)
}

#[cfg(test)]
mod tests {
    use std::{future::pending, time::Duration};

    use super::*;
    use crate::{fixture::inputs, inputs::watched_objects::Presence};
    use api::{Closing, FetchFrom};

    fn watched_from(source: &str) -> WatchedObjects {
        let mut node = inputs().flux_node.expect("the fixture has a FluxNode");
        node.spec.fetch_from = Some(FetchFrom { digest: source.to_owned(), ..FetchFrom::default() });
        let mut watched = WatchedObjects::default();
        watched.flux_node = Presence::Here(Box::new(node));
        watched
    }

    /// Time is the test's own: a step that nothing overtakes uses it up at once.
    #[tokio::test(start_paused = true)]
    async fn an_installation_is_overtaken_by_another_wish_and_a_reload_never() {
        let own = inputs().assignment().expect("the fixture has a rank");
        let digest = || "digest".to_owned();
        let stop = || Step::Stop { reason: String::new(), waits_for_jobs: true };
        for (step, by_another_source, by_the_end) in [
            (Step::Preflight, false, true),
            (Step::Install { digest: digest() }, true, true),
            (Step::Prepare { digest: digest() }, false, true),
            (Step::Start(own.clone()), false, true),
            (Step::Reload(own), false, false),
            (Step::Drain(DrainChange::default()), false, true),
            (Step::Close(Closing::WhenIdle), false, true),
            (stop(), false, true),
            (Step::Remove, false, false),
        ] {
            let begun = watched_from("a");
            let mut over = begun.clone();
            over.instance = Presence::Gone;
            for (event, now, is_overtaken) in [
                ("nothing", begun.clone(), false),
                ("another source", watched_from("b"), by_another_source),
                ("the end of the instance", over, by_the_end),
            ] {
                let (sender, watched) = watch::channel(begun.clone());
                let wish = begun.wish();
                let work = until_overtaken(watched, &wish, &step, pending());
                let outcome = tokio::join!(timeout(Duration::from_hours(1), work), async { sender.send_replace(now) });
                let was_overtaken = matches!(outcome.0, Ok(Ok(Outcome::Overtaken)));
                assert_eq!(was_overtaken, is_overtaken, "{step:?}: {event}");
            }
        }
    }
}
