//! The status of this node's FluxNode, and whether the node is as the planner wants it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::phase::{NEW, Reasons, has_ended, phase};
use crate::{
    drains,
    inputs::{
        applied::Applied, assignment::Assignment, broker_log::Rejected, broker_state::BrokerState, local_roster::leads,
        node_inputs::NodeInputs, shutdown::is_shut_down,
    },
    memory::Memory,
    node_ops::launch_order,
    step::Step,
};
use api::{
    Adopted, Dump, Facts, FluxNodeStatus, JobCounts, LeadFailed, NodePhase, ROSTER_FORMAT, Rank, Roster, STAND_IN,
    Takeover, Want, packed,
};
use broker::queues::SCHEDULER_STAYS_OFFLINE;
use host::dumps::is_of;
use hostapi::Preflight;
use model::lead::is_lead_fixed;

/// The scheduler gives cores that are free to the first job of the queue within seconds.
const HELD_BACK: Duration = Duration::from_mins(1);
/// A live change takes the scheduler away for less time.
const SCHEDULER_AWAY: Duration = Duration::from_secs(10);

/// Whether the node is as the planner wants it. None: a new agent has not connected to the broker yet, and the last report stands.
pub fn readiness(inputs: &NodeInputs) -> Option<bool> {
    if inputs.is_replaced {
        return Some(false);
    }
    let is_ready = is_ready(inputs) || inputs.nothing_wanted;
    (is_ready || inputs.agent_age >= NEW || inputs.host.broker.is_none()).then_some(is_ready)
}

fn is_ready(inputs: &NodeInputs) -> bool {
    let Some(spec) = inputs.own_spec().filter(|spec| spec.instance_uid.is_some()) else { return false };
    match (spec.rank, &spec.want) {
        (Some(_), _) => inputs.is_online() && !inputs.broker.hangs(inputs.at),
        (None, Want::Nothing) => true,
        (None, _) => inputs.wanted_digest().is_some_and(|digest| inputs.host.has_environment(digest)),
    }
}

/// The status of this node, where `step` is the next step and `progress` says how far it is. None: there is no FluxNode, or it
/// describes another machine.
pub fn node_status(
    inputs: &NodeInputs,
    memory: &Memory,
    step: &Step,
    progress: Option<&str>,
) -> Option<FluxNodeStatus> {
    let node = inputs.flux_node.as_ref().filter(|_| !inputs.is_replaced)?;
    let before = node.status.clone().unwrap_or_default();
    let failing = (inputs.roster.as_ref().and_then(|roster| memory.starts.start_keeps_failing(roster.epoch)))
        .or(memory.attempts.step_keeps_failing(step, inputs.generation));
    let trouble = memory.attempts.trouble(step, inputs.generation);
    let (phase, message) = phase(inputs, step, &Reasons { trouble, failing, progress }, &before);
    let message = with_ports(&phase, message, &inputs.port_problems);
    let flux = Some(&inputs.broker.version).filter(|version| !version.is_empty()).or(before.flux_version.as_ref());
    let flux = flux.filter(|_| !inputs.host.environments.is_empty()).cloned();
    let message = if flux.as_deref() == Some(STAND_IN) {
        Some(message.map_or_else(|| STAND_IN.to_owned(), |message| format!("{STAND_IN}: {message}")))
    } else {
        message
    };
    let host = &inputs.host;
    let is_lead = inputs.runs_lead();
    let instance = inputs.broker.instance.as_ref().filter(|_| is_lead);
    let occupied = inputs.broker.occupied.as_ref().filter(|_| is_lead);
    let allocated = instance.map(|instance| match occupied {
        Some(occupied) => occupied.in_use(&bridge::drained(Some(instance))),
        None => instance.allocated.ranks.clone(),
    });
    let newest = || host.environments.last().cloned();
    let no_drains = BTreeMap::new();
    let copy = host.roster.as_ref().filter(|_| inputs.roster_is_gone && leads(host, inputs.own_spec()));
    let wanted_drains = inputs.own_spec().map_or(&no_drains, |spec| &spec.drain);
    let holds = if inputs.published.is_empty() { before.cached_package_sets } else { inputs.held_archives.clone() };
    // While the broker is stopped for the next epoch, the planner needs what it had drained.
    let (drained_by_others, drain_reasons) = match instance {
        Some(instance) => (drains::by_others(&instance.drained), drains::reasons_of_others(&instance.drained)),
        None if leads(host, inputs.own_spec()) => (before.drained_by_others, before.drain_reasons),
        None => Default::default(),
    };
    Some(FluxNodeStatus {
        needs_attention: phase == NodePhase::Failed && trouble.is_some_and(|trouble| trouble.lasting),
        phase,
        message,
        facts: inputs.preflight.as_ref().map(facts).or(before.facts),
        digest: inputs.wanted_digest().filter(|digest| host.has_environment(digest)).map(str::to_owned).or_else(newest),
        cached_package_sets: holds,
        peer: inputs.peer.clone(),
        flux_version: flux,
        adopted: host.broker.as_ref().map(|broker| Adopted {
            rank: broker.record.rank,
            broker_name: broker.record.broker_name.clone(),
            node_uid: broker.record.node_uid.clone(),
            instance_uid: Some(broker.record.instance_uid.clone()),
            instance_id: broker.record.instance_id.clone(),
            epoch: broker.record.epoch,
            pid: broker.pid,
            digest: broker.record.digest.clone(),
        }),
        unknown_broker: host.unknown.is_some(),
        // Without pods, all that is allocated is host jobs'.
        host_jobs: occupied
            .map(|occupied| occupied.by_host_jobs.clone())
            .filter(|host_jobs| allocated.as_ref().is_some_and(|allocated| allocated != host_jobs)),
        allocated,
        gangs: occupied.map(|occupied| occupied.by_gangs.clone()).unwrap_or_default(),
        jobs: job_counts(inputs).filter(|_| is_lead),
        pending_nodes: inputs.broker.pending.filter(|_| is_lead).map(|pending| pending.missing_nodes),
        pods: inputs.pods.clone().filter(|_| is_lead),
        // The lead's agent writes it, while the node has a rank there.
        account: before.account.filter(|_| {
            inputs.roster.as_ref().is_none_or(|roster| roster.settings.pods)
                && inputs.own_spec().is_some_and(|spec| spec.rank.is_some())
        }),
        held_back_job: inputs.broker.fits_since.filter(|_| is_lead).and_then(|held| held_back(held, inputs.at)),
        stopped_queues: stopped_queues(&inputs.broker, inputs.at).filter(|_| is_lead),
        drained: instance.map(|instance| drains::in_effect(wanted_drains, &instance.drained)),
        drained_by_others,
        drain_reasons,
        closed_epoch: closed(inputs),
        shut_down: shut_down(inputs),
        applied_revision: is_lead.then(|| Applied::of(host)).flatten().map(|applied| applied.revision),
        torpid: instance.map(|instance| instance.torpid.clone()).unwrap_or_default(),
        offline: if is_lead { offline(inputs) } else { Vec::new() },
        roster: copy.map(|copy| packed::to_field(copy.text().to_owned())),
        dump: newest_dump(inputs).cloned(),
        takeover: takeover(inputs).cloned(),
        restart_pending: restart_pending(inputs),
        lacks_packages: lacks_packages(inputs, memory, step),
        damage: inputs.damage.clone(),
        leave_completed: nothing_runs(inputs) && inputs.own_spec().is_some_and(|spec| spec.want == Want::Leave),
        start_failing_epoch: failing.and(inputs.roster.as_ref()).map(|roster| roster.epoch),
        lead_failed: lead_failed(inputs, memory, step),
        // A broker that hangs receives nothing, which says nothing about the lead.
        lead_unreachable: inputs.broker.lead_unreachable_since.is_some() && inputs.broker.silent_since.is_none(),
        rejected: if is_lead { inputs.rejected.clone() } else { Rejected::new() },
        roster_format: ROSTER_FORMAT,
        agent_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
    })
}

/// How many jobs run and wait; None while one of the two is not known.
pub(super) fn job_counts(inputs: &NodeInputs) -> Option<JobCounts> {
    let (occupied, pending) = (inputs.broker.occupied.as_ref()?, inputs.broker.pending?);
    Some(JobCounts { running: occupied.running, pending: pending.jobs })
}

/// The status if the host can't be observed: the last report stands, but nothing supervises the broker.
pub fn unobserved(why: String, before: Option<&FluxNodeStatus>) -> FluxNodeStatus {
    let before = before.cloned().unwrap_or_default();
    // The last report may name the failed lead of an earlier attempt. The planner would then count no failure of this attempt, and would try no other lead.
    FluxNodeStatus { phase: NodePhase::Failed, message: Some(why), lead_failed: None, ..before }
}

/// The part of preflight that the planner needs.
pub fn facts(preflight: &Preflight) -> Facts {
    Facts {
        resources: preflight.resources,
        memory_mib: preflight.memory_mib,
        platform: preflight.platform.clone(),
        glibc: preflight.glibc.clone(),
        boot_id: preflight.boot_id.clone(),
        systemd: preflight.systemd,
        static_cpus: preflight.static_cpus,
        prefix: preflight.prefix.display().to_string(),
    }
}

/// Adds `ports` to the message, except to a Failed node's. A new agent repeats the message of the one before it, which may have
/// them already.
fn with_ports(phase: &NodePhase, message: Option<String>, ports: &[String]) -> Option<String> {
    let ports = ports.iter().filter(|_| *phase != NodePhase::Failed);
    let new = ports.filter(|said| message.as_ref().is_none_or(|message| !message.contains(said.as_str())));
    let all = message.iter().chain(new).cloned().collect::<Vec<_>>();
    (!all.is_empty()).then(|| all.join("; "))
}

/// This host could not start the lead of an instance that was never online.
fn lead_failed(inputs: &NodeInputs, memory: &Memory, step: &Step) -> Option<LeadFailed> {
    let roster = inputs.roster.as_deref().filter(|roster| !is_lead_fixed(roster))?;
    inputs.assignment().filter(|own| own.rank == 0)?;
    let trouble = memory.attempts.trouble(step, inputs.generation);
    let refused = trouble.filter(|trouble| !trouble.waiting).map(|trouble| trouble.words.clone());
    let last_words = match (step, refused) {
        (Step::GiveWay(why), _) => Some(has_ended(why)),
        (Step::Start(_), Some(words)) => Some(words),
        (Step::Preflight | Step::Install { .. }, Some(_)) => None,
        _ => return None,
    };
    Some(LeadFailed { instance_id: roster.instance_id.clone(), last_words })
}

/// The newest dump of the instance that this host belonged to last; a dump of another instance does not help it.
fn newest_dump(inputs: &NodeInputs) -> Option<&Dump> {
    let running = inputs.host.broker.as_ref().map(|broker| broker.record.instance_id.as_str());
    let instance_id = inputs.roster.as_ref().map(|roster| roster.instance_id.as_str()).or(running)?;
    inputs.host.dumps.iter().rev().find(|dump| is_of(dump, instance_id))
}

/// An administrator's request that this node lead. The planner has acted on one of an earlier epoch.
fn takeover(inputs: &NodeInputs) -> Option<&Takeover> {
    let is_open = |takeover: &&Takeover| inputs.own_spec().is_none_or(|spec| spec.epoch <= takeover.epoch);
    inputs.host.takeover.as_ref().filter(is_open)
}

fn nothing_runs(inputs: &NodeInputs) -> bool {
    inputs.host.broker.is_none() && inputs.host.unknown.is_none()
}

/// The epoch that has ended on this host: nothing of it runs, and nothing of it will be started.
fn closed(inputs: &NodeInputs) -> Option<u64> {
    let is_closed = |roster: &Roster| roster.closing.is_some() && nothing_runs(inputs);
    inputs.roster.as_deref().is_some_and(is_closed).then(|| led_epoch(inputs)).flatten()
}

/// The epoch that an administrator has shut down on this host.
fn shut_down(inputs: &NodeInputs) -> Option<u64> {
    let is_down = |roster: &Roster| is_shut_down(&inputs.host, roster);
    inputs.roster.as_deref().is_some_and(is_down).then(|| led_epoch(inputs)).flatten()
}

/// The roster's epoch, if this node leads it.
fn led_epoch(inputs: &NodeInputs) -> Option<u64> {
    inputs.assignment().filter(|own| own.rank == 0).map(|own| own.epoch)
}

/// What to say about a job that has been first in the queue since then, while what it asks for was free.
fn held_back((job, since): (u64, Instant), now: Instant) -> Option<String> {
    (now.saturating_duration_since(since) >= HELD_BACK).then(|| {
        format!(
            "job {job} waits although Flux calls free what it asks for, so the scheduler has lost cores: run `flux-distribute \
             reload` in the pod of the lead's node; it reloads the scheduler while jobs keep running"
        )
    })
}

/// What to say about queues that start no jobs. While no scheduler is online, Flux does not say which ones are stopped.
fn stopped_queues(broker: &BrokerState, now: Instant) -> Option<String> {
    if broker.scheduler_offline_for(now) >= SCHEDULER_AWAY {
        return Some(SCHEDULER_STAYS_OFFLINE.to_owned());
    }
    Some(broker.stopped_queues.join("; ")).filter(|queues| !queues.is_empty())
}

/// Ranks that have or had a member, and that the lead's broker does not count as online. Empty until it has told which ones are.
fn offline(inputs: &NodeInputs) -> Vec<Rank> {
    let online = &inputs.broker.online;
    let Some(roster) = inputs.roster.as_ref().filter(|_| inputs.is_online() && online.contains(0)) else {
        return Vec::new();
    };
    roster.ranks.keys().copied().filter(|rank| !online.contains(*rank)).collect()
}

/// Why the package set that the spec asks for is not here, as the last try has shown.
fn lacks_packages(inputs: &NodeInputs, memory: &Memory, step: &Step) -> Option<String> {
    let installs = matches!(step, Step::Install { .. } | Step::Prepare { .. });
    let trouble = memory.attempts.trouble(step, inputs.generation);
    trouble.filter(|trouble| installs && !trouble.waiting).map(|trouble| trouble.words.clone())
}

/// This version would start the running broker in another way.
fn restart_pending(inputs: &NodeInputs) -> Option<String> {
    let (broker, roster, preflight) =
        (inputs.host.broker.as_ref()?, inputs.roster.as_ref()?, inputs.preflight.as_ref()?);
    // A broker that is to be stopped here, for another rank or epoch, is no reason to restart all of them.
    let is_the_same = |own: &Assignment| (own.rank, own.epoch) == (broker.record.rank, broker.record.epoch);
    let assignment = inputs.assignment().filter(is_the_same)?;
    let order = launch_order(preflight, roster, &assignment);
    (order.record.launch != broker.record.launch)
        .then(|| "this version starts brokers with another command line".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fixture::lead_with_broker, memory::Trouble};
    use broker::status::{Drained, InstanceStatus};

    fn status_before(phase: NodePhase) -> FluxNodeStatus {
        FluxNodeStatus { phase, ..FluxNodeStatus::default() }
    }

    #[test]
    fn a_scheduler_that_stays_offline_is_reported_in_place_of_stopped_queues() {
        let since = Instant::now();
        let mut broker = BrokerState { stopped_queues: vec!["a is stopped".to_owned()], ..BrokerState::default() };
        assert_eq!(stopped_queues(&broker, since).as_deref(), Some("a is stopped"));
        broker = BrokerState { scheduler_offline_since: Some(since), ..BrokerState::default() };
        assert_eq!(stopped_queues(&broker, since + Duration::from_secs(9)), None);
        assert_eq!(stopped_queues(&broker, since + Duration::from_secs(10)).as_deref(), Some(SCHEDULER_STAYS_OFFLINE));
    }

    fn said(memory: &Memory, step: &Step, before: NodePhase) -> (NodePhase, String) {
        let status = node_status(&lead_with_broker(status_before(before)), memory, step, None).unwrap();
        (status.phase, status.message.unwrap_or_default())
    }

    #[test]
    fn a_taken_port_is_reported_once_beside_other_messages() {
        let ports = ["port 1 is taken".to_owned(), "port 2 is taken".to_owned()];
        for (phase, message, ports, expected) in [
            (NodePhase::Online, None, &ports[..0], None),
            (NodePhase::Online, None, &ports[..], Some("port 1 is taken; port 2 is taken")),
            (NodePhase::Waiting, Some("no rank"), &ports[..1], Some("no rank; port 1 is taken")),
            (NodePhase::Online, Some("old; port 1 is taken"), &ports[..1], Some("old; port 1 is taken")),
            (NodePhase::Failed, Some("no disk"), &ports[..], Some("no disk")),
        ] {
            let said = with_ports(&phase, message.map(str::to_owned), ports);
            assert_eq!(said.as_deref(), expected, "{phase:?} {message:?}");
        }
    }

    #[test]
    fn what_people_have_drained_is_reported_while_the_broker_is_silent() {
        let drained = |ranks: &str, reason: &str| Drained {
            ranks: ranks.parse().unwrap(),
            reason: reason.to_owned(),
            since: 0.0,
        };
        let drained = vec![
            drained("1", "flux-distribute: the node is cordoned"),
            drained("2", "rank 2 (node3) missing resources: core[2-7]"),
            drained("3", "bad disk"),
        ];
        let mut inputs = lead_with_broker(FluxNodeStatus::default());
        inputs.broker.instance = Some(InstanceStatus { drained, ..InstanceStatus::default() });
        let memory = Memory::default();
        let answering = node_status(&inputs, &memory, &Step::Hold, None).unwrap();
        assert_eq!(answering.drained_by_others.to_string(), "3");
        assert_eq!(answering.drain_reasons, [("bad disk".to_owned(), "3".parse().unwrap())].into());
        let silent = node_status(&lead_with_broker(answering), &memory, &Step::Hold, None).unwrap();
        assert_eq!((silent.drained_by_others.to_string(), silent.drain_reasons.len()), ("3".to_owned(), 1));
    }

    #[test]
    fn a_host_that_can_not_be_observed_fails_with_its_last_report_but_for_the_failed_lead() {
        let lead_failed = Some(LeadFailed { instance_id: "earlier".to_owned(), last_words: None });
        let before =
            FluxNodeStatus { lead_failed, rejected: [("b".to_owned(), "why".to_owned())].into(), ..Default::default() };
        let status = unobserved("no /proc".to_owned(), Some(&before));
        assert_eq!((status.phase, status.message.as_deref()), (NodePhase::Failed, Some("no /proc")));
        assert_eq!((status.rejected, status.lead_failed), (before.rejected, None));
    }

    #[test]
    fn a_broker_that_stopped_answering_is_not_reported_as_online() {
        let silent_for = |seconds| {
            let mut inputs = lead_with_broker(status_before(NodePhase::Online));
            inputs.broker.pid = Some(7);
            inputs.broker.state = "run".into();
            inputs.broker.silent_since = inputs.at.checked_sub(Duration::from_secs(seconds));
            node_status(&inputs, &Memory::default(), &Step::Hold, None).unwrap()
        };
        assert_eq!(silent_for(10).phase, NodePhase::Online);
        let status = silent_for(61);
        assert_eq!(status.phase, NodePhase::Offline);
        assert!(status.message.unwrap().contains("process 7"));
        assert!(status.adopted.is_some(), "it runs, and its rank is no other node's");
    }

    /// The planner would take the broker of a new boot for the one that was online, and give it jobs too early.
    #[test]
    fn a_new_agent_repeats_what_was_reported_about_this_broker_only() {
        for (what, boot, pid, expected) in [
            ("the agent was restarted", "boot", 7, NodePhase::Online),
            ("the broker was restarted too", "boot", 6, NodePhase::Starting),
            ("the host was rebooted", "boot before", 7, NodePhase::Starting),
        ] {
            let mut before =
                node_status(&lead_with_broker(status_before(NodePhase::Online)), &Memory::default(), &Step::Hold, None)
                    .unwrap();
            before.phase = NodePhase::Online;
            before.facts.as_mut().unwrap().boot_id = boot.to_owned();
            before.adopted.as_mut().unwrap().pid = pid;
            let mut inputs = lead_with_broker(before);
            inputs.host.boot_id = "boot".to_owned();
            inputs.agent_age = Duration::ZERO;
            let status = node_status(&inputs, &Memory::default(), &Step::Hold, None).unwrap();
            assert_eq!(status.phase, expected, "{what}");
        }
    }

    #[test]
    fn waiting_for_others_is_no_failure() {
        let install = Step::Install { digest: "digest".to_owned() };
        for (waiting, before, expected) in [
            (true, NodePhase::Installing, NodePhase::Waiting),
            (true, NodePhase::Online, NodePhase::Offline),
            (false, NodePhase::Installing, NodePhase::Failed),
            (false, NodePhase::Online, NodePhase::Failed),
        ] {
            let trouble = Trouble {
                words: "waiting for Secret flux-curve".to_owned(),
                waiting,
                lasting: false,
                by_others: false,
            };
            let mut memory = Memory::default();
            memory.attempts.failed(&install, 0, trouble.clone(), Instant::now(), 0.0);
            assert_eq!(said(&memory, &install, before), (expected, trouble.words.clone()));
        }
    }

    #[test]
    fn the_last_line_of_a_failing_broker_stands_while_the_next_one_is_tried() {
        let inputs = lead_with_broker(FluxNodeStatus::default());
        let start = Step::Start(inputs.assignment().unwrap());
        let mut memory = Memory::default();
        for _ in 0..2 {
            memory.starts.started(&start, 0, inputs.at, 0.0);
            memory.starts.seen(false, false, Some("broker.err[0]: no"), inputs.at);
        }
        let failing = said(&memory, &Step::Hold, NodePhase::Failed);
        assert_eq!(failing, (NodePhase::Failed, "the broker has ended; its log says: broker.err[0]: no".to_owned()));
        assert_eq!(said(&Memory::default(), &Step::Hold, NodePhase::Failed).0, NodePhase::Starting);
    }
}
