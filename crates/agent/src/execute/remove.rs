//! Removes everything from the host: as a step, and at the end of the pod.

use std::{fs::OpenOptions, io::Write, path::Path, time::Duration};

use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::{Outcome, ask::ask, queues};
use crate::{
    agent::Agent,
    decide::{
        SOON,
        jobs::{QueuesAtRemoval, Removal, jobs_win, removal, running_jobs},
    },
    error::StepError,
    inputs::local_roster::host_roster,
    node_ops::removal_grace,
};
use base::error_chain;
use hostapi::HostView;

/// A watch delivers a deletion within milliseconds.
const FLUX_NODE_GONE_IN: Duration = Duration::from_secs(5);
/// What to do about a host that is not clean when the pod's grace is over.
const AFTERWARDS: &str = "The pod ends within 120 s, and the host stays as it is. Afterwards: apply the manifest again, which \
                          cleans the host once its jobs have ended, then run `make undeploy`.";

/// Removes everything from the host `view`, unless jobs run and spec.uninstall says that they win. `pod_ends`: within the grace of
/// the pod.
///
/// # Errors
/// [`StepError::NotYet`] while jobs may be running; what the host stage refuses.
pub async fn remove(agent: &mut Agent, view: &HostView, pod_ends: bool) -> Result<Outcome, StepError> {
    let state = view.state.as_ref();
    let known = state.and_then(|state| agent.sources.watched.borrow().uninstall_of(&state.instance_uid));
    let uninstall = known.or(state.map(|state| state.uninstall.clone())).unwrap_or_default();
    let mut stop_was_tried = false;
    // If jobs are cancelled anyway, a broker that hangs must not use up the pod's grace.
    while jobs_win(&uninstall) {
        let answer = ask().await;
        let jobs = running_jobs(view, &answer, |_| true);
        let roster = host_roster(view).filter(|_| answer.lead.is_ok());
        let queues = QueuesAtRemoval {
            can_be_stopped: state.is_some() && roster.is_some(),
            stop_was_tried,
            were_stopped: agent.memory.queues.were_stopped,
        };
        match removal(&uninstall, jobs, queues) {
            Removal::Wait(reason) => return Err(StepError::NotYet(reason)),
            Removal::Remove => break,
            Removal::StopQueues => stop_was_tried = true,
        }
        let (Some(state), Some(roster)) = (state, roster) else { continue };
        match queues::end(&*agent.ops.host, &state.prefix, &roster).await {
            Ok(()) => agent.memory.queues.were_stopped = true,
            Err(error) => warn!(error = error_chain(&error), "can't stop the queues"),
        }
    }
    agent.sources.stop_log();
    agent.background.stop_mending().await;
    let rank = view.broker.as_ref().map(|broker| broker.record.rank);
    agent.ops.remove(uninstall.keep_state, removal_grace(rank, uninstall.keep_state, pod_ends)).await?;
    agent.sources.forget_instance();
    match agent.reporter.delete().await {
        // At a teardown the agent's rights go first; the host is clean all the same.
        Err(error) if error.code() != Some(403) && error.code() != Some(401) => {
            debug!(error = error_chain(&error), "the FluxNode stays");
        }
        Err(_) => {}
        Ok(()) if pod_ends => {}
        Ok(()) => {
            // As long as this agent sees its FluxNode, the next round would remove everything once more.
            let mut watched = agent.sources.watched.clone();
            let _ = timeout(FLUX_NODE_GONE_IN, watched.wait_for(|now| now.flux_node.here().is_none())).await;
        }
    }
    Ok(Outcome::Removed)
}

/// Cleans the host at the end of the pod, within its grace; needs no API. Only the pod can show then why it takes long: at a
/// teardown nothing of ours may write to the API any more.
pub async fn clean(agent: &mut Agent) {
    let mut said = String::new();
    loop {
        // Whether jobs run must not be judged by an old observation, nor by none.
        let words = match agent.ops.observe().await {
            Err(error) => format!("can't observe the host: {}", error_chain(&error)),
            Ok(view) => match remove(agent, &view, true).await {
                Ok(_) => return last_words(&agent.termination_log, "this host is clean"),
                Err(error) => error_chain(&error),
            },
        };
        if words != said {
            warn!(reason = words, "the host is not clean yet");
            last_words(&agent.termination_log, &format!("this host is not clean: {words}. {AFTERWARDS}"));
            said = words;
        }
        sleep(SOON).await;
    }
}

/// Writes what `kubectl describe pod` shows of this container when it has ended. Only a container has such a file.
fn last_words(termination_log: &Path, words: &str) {
    let written = OpenOptions::new().write(true).truncate(true).open(termination_log);
    if let Err(error) = written.and_then(|mut file| file.write_all(words.as_bytes())) {
        debug!(%error, "no message for kubelet");
    }
}
