//! The phase of this node and the message beside it.

use std::time::Duration;

use crate::{inputs::node_inputs::NodeInputs, memory::Trouble, step::Step};
use api::{FluxNodeStatus, NodePhase, STAND_IN};
use hostapi::HostView;

/// A new agent may need this long to connect to the broker that it found.
pub const NEW: Duration = Duration::from_secs(10);

/// Reasons that a message may name.
pub struct Reasons<'a> {
    /// Why the step failed last.
    pub trouble: Option<&'a Trouble>,
    /// Why the broker keeps failing to start, or the steps before its start do.
    pub failing: Option<&'a str>,
    /// How far a long step is.
    pub progress: Option<&'a str>,
}

/// The message about a broker that has ended.
pub fn has_ended(why: &str) -> String {
    format!("the broker has ended; its log says: {why}")
}

/// The phase, and the message for people.
pub fn phase(
    inputs: &NodeInputs,
    step: &Step,
    reasons: &Reasons<'_>,
    before: &FluxNodeStatus,
) -> (NodePhase, Option<String>) {
    let host = &inputs.host;
    let trouble = || reasons.trouble.map(|trouble| trouble.words.clone());
    let progress = || reasons.progress.map(str::to_owned);
    let is_to_end = matches!(step, Step::Remove | Step::Stop { .. });
    if let Some(broker) = host.broker.as_ref().filter(|_| inputs.broker.hangs(inputs.at) && !is_to_end) {
        return (NodePhase::Offline, Some(hangs(broker.pid, broker.record.rank == 0)));
    }
    if inputs.is_online() && *step != Step::Remove {
        return online(inputs, step, reasons);
    }
    if inputs.agent_age < NEW
        && is_about_running_broker(before, host)
        && inputs.broker.pid.is_none()
        && is_up(&before.phase)
    {
        // That a new agent has not connected to the broker yet says nothing about the broker.
        return (before.phase.clone(), repeated(before));
    }
    if *step == Step::Remove {
        return (NodePhase::Removing, trouble().or_else(progress));
    }
    let was_online = is_up(&before.phase) || before.phase == NodePhase::Offline;
    // What is for the next epoch says nothing about this one.
    if let Some(trouble) = reasons.trouble.filter(|_| !matches!(step, Step::Prepare { .. })) {
        let phase = match trouble.waiting {
            true if was_online => NodePhase::Offline,
            true => NodePhase::Waiting,
            false => NodePhase::Failed,
        };
        return (phase, Some(trouble.words.clone()));
    }
    match step {
        Step::Preflight => (NodePhase::Preflight, None),
        Step::Install { .. } => (NodePhase::Installing, progress()),
        Step::Stop { reason, .. } => (NodePhase::Starting, Some(reason.clone())),
        Step::Drain(_) => (NodePhase::Starting, None),
        Step::Close(_) => (NodePhase::Starting, Some("the instance is being stopped for the next epoch".to_owned())),
        Step::Start(_) => starting(inputs, reasons.failing, was_online),
        Step::Reload(_) | Step::Prepare { .. } | Step::Hold if host.broker.is_some() => {
            starting(inputs, reasons.failing, was_online)
        }
        Step::Wait(reason) => (NodePhase::Waiting, Some(reason.clone())),
        Step::GiveWay(why) => (NodePhase::Failed, Some(has_ended(why))),
        Step::Reload(_) | Step::Prepare { .. } | Step::Hold | Step::Remove => {
            let without_rank = inputs.own_spec().filter(|spec| spec.rank.is_none());
            let reason = without_rank.and_then(|spec| spec.reason.as_ref());
            let no_rank = reason.map(|reason| format!("; this node gets no rank: {reason}")).unwrap_or_default();
            (NodePhase::Waiting, Some(format!("the packages are ready{no_rank}")))
        }
    }
}

/// True if `before`, the last report, is about the broker that runs now. A host that rebooted within seconds has another
/// one, and the planner must not count that one as online because the old one was.
fn is_about_running_broker(before: &FluxNodeStatus, host: &HostView) -> bool {
    let boot = before.facts.as_ref().map(|facts| facts.boot_id.as_str());
    let pid = before.adopted.as_ref().map(|adopted| adopted.pid);
    boot == Some(&host.boot_id) && pid.is_some() && pid == host.broker.as_ref().map(|broker| broker.pid)
}

fn hangs(pid: i32, is_lead: bool) -> String {
    let next = if is_lead {
        "it is not restarted, because jobs may be running"
    } else {
        "it is restarted once the lead has given it up, if it runs no job"
    };
    format!(
        "the broker (process {pid}) has not answered for more than a minute: it hangs, or somebody has stopped it \
         (`kill -CONT {pid}`); {next}"
    )
}

/// The message names a step that fails beside an online broker, but the phase stays Online.
fn online(inputs: &NodeInputs, step: &Step, reasons: &Reasons<'_>) -> (NodePhase, Option<String>) {
    // The message of an online node shows a reason to wait only if somebody must act: the agent is too old, or a statedir
    // is gone.
    let must_act = match step {
        Step::Wait(reason) if inputs.host.statedir_lost || inputs.newer_roster.is_some() => Some(reason.clone()),
        _ => None,
    };
    let trouble = reasons.trouble.map(|trouble| trouble.words.clone());
    let said = trouble.or(reasons.progress.map(str::to_owned)).or(must_act).or(inputs.damage.clone());
    match inputs.own_spec().and_then(|spec| spec.drain_reason.clone()) {
        Some(reason) => (NodePhase::Draining, said.or(Some(reason))),
        None => (NodePhase::Online, said),
    }
}

/// The broker is coming up, or keeps failing to.
fn starting(inputs: &NodeInputs, failing: Option<&str>, was_online: bool) -> (NodePhase, Option<String>) {
    let (phase, message) = match (failing, &inputs.refusal, &inputs.host.died) {
        (Some(_), Some(refusal), _) => (NodePhase::Failed, refusal.clone()),
        (Some(last_line), None, _) => (NodePhase::Failed, has_ended(last_line)),
        (None, _, Some(why)) if was_online => (NodePhase::Offline, has_ended(why)),
        (None, Some(refusal), _) => (NodePhase::Starting, refusal.clone()),
        _ if inputs.broker.state.is_empty() => (NodePhase::Starting, "the broker has not answered yet".to_owned()),
        _ => (NodePhase::Starting, format!("the broker is in state {}", inputs.broker.state)),
    };
    (phase, Some(message))
}

fn is_up(phase: &NodePhase) -> bool {
    matches!(phase, NodePhase::Online | NodePhase::Draining)
}

/// The message of `before`, without the prefix that every message of a stand-in gets.
fn repeated(before: &FluxNodeStatus) -> Option<String> {
    let words = before.message.as_deref()?;
    let words = words.strip_prefix(STAND_IN).unwrap_or(words).trim_start_matches(": ");
    (!words.is_empty()).then(|| words.to_owned())
}
