//! Lead: the end of an epoch.

use tracing::{info, warn};

use super::{Outcome, ask::jobs_may_run, queues};
use crate::{
    agent::Agent,
    decide::jobs::{EpochEnd, end_epoch},
    error::StepError,
    inputs::node_inputs::NodeInputs,
    memory::Memory,
    node_ops::NodeOps,
    other_process::uninstall_is_under_way,
};
use api::Closing;
use base::error_chain;
use hostapi::Preflight;

/// Stops the instance in order. With [`Closing::WhenIdle`], only once no job runs and none can start.
pub async fn close(
    agent: &mut Agent,
    inputs: &NodeInputs,
    preflight: &Preflight,
    closing: Closing,
) -> Result<Outcome, StepError> {
    let roster = agent.sources.published.roster()?;
    let (host, prefix) = (&*agent.ops.host, &preflight.prefix);
    info!(epoch = roster.epoch, ?closing, "stopping the instance for the next epoch");
    let jobs_run = || StepError::NotYet("jobs run: the next epoch begins when they have ended".to_owned());
    let mut queues_are_stopped = false;
    loop {
        let may_run = closing == Closing::WhenIdle && jobs_may_run(&inputs.host).await.is_some();
        match end_epoch(closing, may_run, queues_are_stopped) {
            EpochEnd::Wait => return Err(jobs_run()),
            EpochEnd::StopQueues => {
                agent.memory.queues.may_be_stopped = true;
                queues::stop(host, prefix, &roster, queues::EPOCH_ENDS).await?;
                queues_are_stopped = true;
            }
            EpochEnd::StartQueuesAndWait => {
                queues::start(host, prefix, &roster, &[queues::EPOCH_ENDS]).await?;
                agent.memory.queues.may_be_stopped = false;
                return Err(jobs_run());
            }
            EpochEnd::StopBroker => break,
        }
    }
    agent.memory.starts.forget();
    agent.ops.close().await?;
    Ok(Outcome::Stopped)
}

/// Starts the queues that an agent stopped for an end of the epoch which did not come. If `flux-distribute uninstall` is at work on
/// this host, its queues stay stopped, and are looked at again: the command may be killed.
pub async fn start_queues(ops: &NodeOps, memory: &mut Memory, inputs: &NodeInputs) {
    let (Some(preflight), Some(roster)) = (&inputs.preflight, &inputs.roster) else { return };
    let is_uninstalled = uninstall_is_under_way();
    let messages: &[&str] =
        if is_uninstalled { &[queues::EPOCH_ENDS] } else { &[queues::EPOCH_ENDS, queues::UNINSTALLED_BY_HAND] };
    match queues::start(&*ops.host, &preflight.prefix, roster, messages).await {
        Ok(()) => memory.queues.may_be_stopped = is_uninstalled,
        Err(error) => warn!(error = error_chain(&error), "can't look at the queues"),
    }
}
