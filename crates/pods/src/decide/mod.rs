//! The decision: what is to be done now.

mod accounts;
mod cancels;
mod complete;
mod gang_cores;
mod hold;
mod memory;
mod order;
mod patience;
mod pause;
mod pins;
mod placeholders;
mod preempt;
mod queue;
mod recovery;
mod request;
mod round;
mod shadows;
mod start;
#[cfg(test)]
mod tests;
mod words;

use std::collections::BTreeSet;

use broker::{job_id::JobId, queues::SCHEDULER_STAYS_OFFLINE};

pub use self::{accounts::Accounts, memory::Memory, recovery::Recovery, words::AUTOSCALE_AFTER};
use self::{
    hold::Holdings,
    memory::RecoveryMemory,
    pause::is_paused,
    queue::{WaitingJob, may_change_at},
    round::{Round, being_bound, listed},
    start::Progress,
    words::Words,
};
use crate::{
    action::Action,
    gangs::{Gang, Problem},
    jobs::JobState,
    pod::PodView,
    record::GangId,
    requests::cores,
    time::Moment,
    world::{Queues, World},
};

/// What is to be done now.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// In this order, as far as there is time before the next decision: what is not begun by then is dropped, because the
    /// next decision repeats what is still right.
    pub actions: Vec<Action>,
    /// What to report about the bridge.
    pub report: Report,
    /// When to decide again, if nothing happens before.
    pub wake: Option<Moment>,
}

impl Decision {
    /// Nothing is to be done: pods or jobs are not known yet.
    pub fn loading() -> Self {
        Self { report: Report { standing: Standing::Loading, ..Report::default() }, ..Self::default() }
    }
}

/// What people want to know about the bridge.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What it does.
    pub standing: Standing,
    /// Gangs that run; a single pod counts as a gang of one.
    pub running: usize,
    /// Gangs that wait in the queue.
    pub queued: usize,
    /// Gangs that can't be submitted as they are.
    pub refused: usize,
    /// Pods whose cores nobody holds.
    pub uncovered: usize,
    /// What Flux and Kubernetes hold of each node for each other.
    pub accounts: Accounts,
}

/// What the bridge does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Standing {
    /// It waits for the broker, or for the broker to be in state run.
    #[default]
    NoBroker,
    /// It waits for the list of pods, or of jobs. If the queues are stopped, they stay so.
    Loading,
    /// The broker has restarted.
    Recovering(Recovery),
    /// The scheduler has gone offline.
    NoScheduler,
    /// It serves pods.
    Serving,
}

impl Standing {
    /// What it waits for before it serves pods.
    pub fn waits_for(self) -> Option<String> {
        match self {
            Self::NoBroker => Some("the lead's broker is not in state run".to_owned()),
            Self::Loading => Some("pods or jobs are not known yet".to_owned()),
            Self::Recovering(recovery) => Some(format!("after a restart of the lead's broker, the bridge {recovery}")),
            Self::NoScheduler => Some(SCHEDULER_STAYS_OFFLINE.to_owned()),
            Self::Serving => None,
        }
    }
}

/// Decides what is to be done, by `world`, `memory` and `now` alone. What shows in the world as done is not decided again.
pub fn decide(world: &World, memory: &mut Memory, now: Moment) -> Decision {
    let Some(broker) = world.broker.as_ref().filter(|broker| broker.in_run_since.is_some()) else {
        return Decision::default();
    };
    let (Some(jobs), Some(pods)) = (&world.jobs, &world.pods) else { return Decision::loading() };
    let (bound, listed) = (being_bound(world, pods, now), listed(jobs));
    let first_queued = std::mem::take(&mut memory.first_queued);
    let mut round = Round::new((world, broker, jobs, pods), &bound, &listed, first_queued, now);
    memory.told.retain(|uid, _| pods.by_uid.contains_key(uid));
    let since = memory.started_since.unwrap_or(now);
    memory.started_since = (broker.queues == Queues::AllStarted).then_some(since);
    round.started_since = memory.started_since;
    let report = match broker.is_recovered {
        false => {
            let standing = Standing::Recovering(recovery::recover(&mut round, memory));
            Report { standing, ..Report::default() }
        }
        true => serve(&mut round, memory),
    };
    memory.first_queued = round.first_queued;
    round.actions.retain(|action| may_begin(world, action));
    Decision { actions: round.actions, report, wake: round.wake }
}

/// False for an action that is dropped for now, whichever rule decided it; the next decision has it again.
fn may_begin(world: &World, action: &Action) -> bool {
    let is_refused = action.paused_by_refusal().is_some_and(|gang| world.refused.contains_key(gang));
    let is_too_late = world.is_closing && *action == Action::StartQueues;
    !is_refused && !is_too_late
}

/// Serves every gang.
fn serve(round: &mut Round, memory: &mut Memory) -> Report {
    memory.recovery = RecoveryMemory::default();
    if round.broker.queues.has_stopped_by_us() && !round.world.under_way.contains(&Action::StartQueues) {
        round.actions.push(Action::StartQueues);
    }
    round.gang_cores = gang_cores::count(round, |gang| !is_paused(round, gang));
    // Before pods are bound, which is not what other pods use.
    let accounts = accounts::by_rank(round);
    let of_shadows = shadows::keep(round, &accounts);
    let accounts = accounts::report(round, &accounts, &mut memory.overlaps);
    preempt::forget(round, &mut memory.preempt);
    let standing = if round.broker.queues == Queues::Offline { Standing::NoScheduler } else { Standing::Serving };
    let mut report = Report { standing, accounts, ..Report::default() };
    let mut queue = Vec::new();
    let places = words::places(round);
    let gangs = std::mem::take(&mut round.gangs);
    for (gang, holdings) in &gangs {
        report.running += usize::from(gang.is_started());
        let is_queued = round.jobs_of(&gang.id).iter().any(|(job, _)| job.state == JobState::Pending);
        report.queued += usize::from(is_queued);
        if !round.is_busy(&gang.id) {
            serve_gang(round, memory, gang, holdings, &mut queue, &places, &mut report);
        }
    }
    let known: BTreeSet<&GangId> = gangs.iter().map(|(gang, _)| &gang.id).collect();
    memory.avoided.retain(|gang, _| known.contains(gang));
    memory.dealt_out.retain(|gang| known.contains(gang));
    memory.incomplete.retain(|gang, _| known.contains(gang));
    round.first_queued.retain(|gang, _| known.contains(gang));
    let left: Vec<_> = round.gangs_with_jobs().into_iter().filter(|gang| !known.contains(gang)).collect();
    for gang in left {
        if round.is_busy(gang) {
            continue;
        }
        for (job, gang_job) in round.jobs_of(gang) {
            if job.is_active() && !round.has_unseen(&gang_job.record) {
                round.end(job, &gang_job.record, "its pods are gone");
            }
        }
    }
    round.gangs = gangs;
    round.actions.extend(of_shadows);
    patience::resume(round);
    order::keep_order(round, queue);
    preempt::preempt(round, &mut memory.preempt);
    placeholders::keep(round, &mut memory.placeholders);
    report
}

fn serve_gang<'a>(
    round: &mut Round<'a>,
    memory: &mut Memory,
    gang: &Gang<'a>,
    holdings: &Holdings<'a>,
    queue: &mut Vec<WaitingJob<'a>>,
    places: &[JobId],
    report: &mut Report,
) {
    let jobs = round.jobs_of(&gang.id);
    let is_canceled = cancels::evict(round, gang, &jobs);
    let is_paused = !holdings.uncovered.is_empty() && pause::reason_to_pause(round, &gang.id).is_some();
    let pins = pins::submit_pins(round, gang, holdings, holdings.uncovered.iter().copied(), is_paused);
    let mut progress = match &gang.problem {
        _ if gang.waiting().next().is_none() || is_canceled => Progress::default(),
        Some(problem) => {
            if let Problem::JobsMissing { until, .. } = problem {
                round.wake_at(*until);
            }
            let needed = not_yet_replaceable(round, holdings);
            // Whoever could give it up and have it again would have all younger gangs submitted again each time.
            if needed.is_empty() && problem.is_of_pods() {
                round.first_queued.remove(&gang.id);
            }
            Progress { needed, words: Some(Words::problem(problem)) }
        }
        None if gang.is_started() => complete::complete(round, memory, gang, holdings, queue),
        None => start::start(round, memory, gang, holdings, queue),
    };
    progress.needed.extend(pins.pending);
    for held in &holdings.jobs {
        let record = &held.gang_job.record;
        let is_needed = held.is_used() || progress.needed.contains(&held.job.id);
        if !is_needed && !is_being_replaced(round, held.job.id) && !round.has_unseen(record) {
            round.end(held.job, record, "no pod needs it");
        }
    }
    let now = round.now;
    for until in gang.members.iter().filter_map(|pod| pod.holds_until(now)) {
        round.wake_at(until);
    }
    let held_by = |pod: &PodView| {
        let mut slots = holdings.jobs.iter().flat_map(|held| held.slots.iter().map(move |slot| (held, slot)));
        let (held, _) = slots.find(|(_, (_, user))| user.is_some_and(|user| user.uid == pod.uid))?;
        Some((cores(pod.requests.cpu, held.gang_job.record.threads), held.gang_job.shape.cores))
    };
    words::tell_bound(round, memory, gang, held_by);
    if !is_canceled {
        patience::suspend_if_stuck(round, memory, gang);
    }
    report.uncovered += holdings.uncovered.len();
    let refused = round.world.refused.get(&gang.id).map(|words| Words::refused(words));
    if let Some(words) = refused.or(progress.words) {
        report.refused += usize::from(progress.needed.is_empty());
        let place_of = |job| places.iter().position(|first| first == job);
        let place = progress.needed.iter().find_map(place_of).filter(|_| gang.problem.is_none());
        words::tell_waiting(round, memory, gang, &words.with_place(place.map(|place| place + 1)));
    }
}

/// The pending jobs that may not be replaced yet (see [`may_change_at`]). They stay although the gang has a problem: otherwise, whoever
/// changes a pod back and forth would make the bridge submit and cancel a job each time.
fn not_yet_replaceable(round: &mut Round, holdings: &Holdings) -> BTreeSet<JobId> {
    let pending = holdings.jobs.iter().map(|held| held.job).filter(|job| job.state == JobState::Pending);
    let young: Vec<_> = pending.filter(|job| round.now < may_change_at(job)).collect();
    young.iter().for_each(|job| round.wake_at(may_change_at(job)));
    young.into_iter().map(|job| job.id).collect()
}

/// An action of this round replaces or ends the job already.
fn is_being_replaced(round: &Round, id: JobId) -> bool {
    round.actions.iter().rev().any(|action| matches!(action, Action::Resubmit { job, .. } if *job == id))
}
