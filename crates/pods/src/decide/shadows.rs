//! What pods of other schedulers use of each node is held by shadow jobs.
//!
//! A shadow job is pinned to one rank. What a rank's pods use more is one more job, and what they use less ends one. If Flux can't give a
//! shadow job its cores yet, because another job has them, the job waits: both run on, and nothing is killed.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use api::Rank;

use super::round::{Round, held_by};
use crate::{
    action::{Action, ShadowStep},
    jobs::{Cause, Job, JobClass, JobState},
    shadow::{Shadow, ShadowRequest, wanted},
    target::Target,
    time::{Millis, SECOND},
    world::{PAUSE, Queues},
};

// Notes of cancels.
const FEWER: &str = "pods of other schedulers use fewer cores";
const MORE: &str = "pods of other schedulers use more cores";
const IN_PARTS: &str = "its cores are asked for in parts";
const NO_MEMBER: &str = "its node is no member any more";
const REPLACED: &str = "the broker has restarted, and another job is for the same pods";

/// If so many jobs of a rank wait, the largest one is exchanged for a larger one, and none is added: the scheduler looks at 1024 jobs.
const MOST_WAITING: usize = 8;

/// What pods of other schedulers use of all nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OtherPods {
    /// How many cores shadow jobs are to hold.
    pub cores: u32,
    /// How many of these other jobs have.
    pub overlapping: u32,
}

/// What brings the shadow jobs of all ranks to what pods use there, beside what they use.
pub(super) fn keep(round: &mut Round) -> (OtherPods, Vec<Action>) {
    let (all, none) = (by_rank(round), Shadows::default());
    let by_others = held_by(round.jobs, |job| !matches!(job.class, JobClass::Shadow(_)));
    let (mut found, mut steps) = (OtherPods::default(), Vec::new());
    for (rank, target) in &round.world.targets {
        let shadows = all.get(rank).unwrap_or(&none);
        let by_others = by_others.get(rank).copied().unwrap_or_default();
        let wanted = wanted_on(round, target);
        found.cores = found.cores.saturating_add(wanted);
        let overlapping = by_others.saturating_add(wanted).saturating_sub(target.cores).min(wanted);
        found.overlapping = found.overlapping.saturating_add(overlapping);
        let free = target.cores.saturating_sub(by_others).saturating_sub(shadows.allocated());
        steps.extend(shadows.steps(wanted, free, |cores| request(round, target, cores)));
    }
    // A member whose Node can't be read may still have its pods.
    let left = round.jobs.shadows().filter(|(job, shadow)| job.is_active() && !is_of_member(round, shadow));
    steps.extend(left.map(|(job, shadow)| ShadowStep::Cancel { job: job.id, rank: shadow.rank, why: NO_MEMBER }));
    (found, possible(round, &all, steps))
}

/// How far a recovery has asked for what other pods use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Asked {
    /// Jobs are being submitted.
    pub is_submitting: bool,
    /// Flux takes no jobs at all, and pods use cores that no job holds.
    pub is_disabled: bool,
}

/// After a start of the lead's broker: asks for what other pods use. Jobs are only added, up to the cores of each rank, so this ends
/// however often pods change. A rank whose job is refused is added to `given_up`, and not waited for until the recovery ends.
pub(super) fn ask_for_all(round: &mut Round, given_up: &mut BTreeSet<Rank>) -> Asked {
    let (all, none) = (by_rank(round), Shadows::default());
    let (mut asked, mut steps) = (Asked::default(), Vec::new());
    for (rank, target) in &round.world.targets {
        let shadows = all.get(rank).unwrap_or(&none);
        let wanted = wanted_on(round, target);
        if shadows.pending() >= wanted {
            continue;
        }
        if round.world.refused_ranks.contains(rank) || shadows.is_paused(round.now) {
            given_up.insert(*rank);
        }
        match () {
            () if !round.broker.accepts_jobs => asked.is_disabled |= shadows.cores() < wanted,
            () if given_up.contains(rank) => {}
            () => {
                asked.is_submitting = true;
                steps.push(ShadowStep::Submit(request(round, target, wanted - shadows.pending())));
            }
        }
    }
    let actions = possible(round, &all, steps);
    round.actions.extend(actions);
    asked
}

/// Cancels what [`ask_for_all`] has replaced: the jobs of the broker's earlier life. One that nothing replaces yet stays. Returns true until
/// all others have ended.
pub(super) fn cancel_old(round: &mut Round) -> bool {
    let all = by_rank(round);
    let is_replaced = |shadow: &Shadow| match round.world.targets.get(&shadow.rank) {
        _ if !is_of_member(round, shadow) => true,
        Some(target) => all.get(&shadow.rank).map_or(0, Shadows::pending) >= wanted_on(round, target),
        None => false,
    };
    let old = round
        .jobs
        .shadows()
        .filter(|(job, shadow)| job.state != JobState::Ended && is_old(round, job) && is_replaced(shadow));
    let old: Vec<_> = old.map(|(job, shadow)| (job, shadow.rank)).collect();
    let cancel = |(job, rank): &(&Job, Rank)| ShadowStep::Cancel { job: job.id, rank: *rank, why: REPLACED };
    let steps = old.iter().filter(|(job, _)| job.is_active()).map(cancel).collect();
    let actions = possible(round, &all, steps);
    round.actions.extend(actions);
    !old.is_empty()
}

/// During a recovery: `job` is of the broker's earlier life. Nothing is allocated while the queues are stopped. One that waited before would
/// be in front of the pins.
fn is_old(round: &Round, job: &Job) -> bool {
    let is_recovering = !round.broker.is_recovered;
    let began = round.broker.in_run_since.unwrap_or_default();
    is_recovering && (job.state != JobState::Pending || job.submitted.saturating_add(SECOND) < began)
}

/// The node that it is for is still a member, with the same rank.
fn is_of_member(round: &Round, shadow: &Shadow) -> bool {
    round.ranks.get(shadow.node.as_str()) == Some(&shadow.rank)
}

/// Those of the steps that may begin now.
fn possible(round: &mut Round, all: &BTreeMap<Rank, Shadows>, steps: Vec<ShadowStep>) -> Vec<Action> {
    // What ends while the scheduler is offline keeps its cores for ever.
    if round.broker.queues == Queues::Offline {
        return Vec::new();
    }
    let mut actions = Vec::new();
    let rank = |action: &Action| if let Action::Shadow(step) = action { Some(step.rank()) } else { None };
    let busy: BTreeSet<Rank> = round.world.under_way.iter().filter_map(rank).collect();
    for step in steps.into_iter().filter(|step| !busy.contains(&step.rank())) {
        let (rank, is_cancel) = (step.rank(), matches!(step, ShadowStep::Cancel { .. }));
        let paused_until = all.get(&rank).and_then(|shadows| shadows.paused_until).filter(|until| round.now < *until);
        if let Some(until) = paused_until.filter(|_| !is_cancel) {
            round.wake_at(until);
        } else if is_cancel || (round.broker.accepts_jobs && !round.world.refused_ranks.contains(&rank)) {
            actions.push(Action::Shadow(step));
        }
    }
    actions
}

/// How many cores of `target` shadow jobs are to hold.
fn wanted_on(round: &Round, target: &Target) -> u32 {
    let requested = round.usage.all(&target.node).requests.cpu;
    wanted(target, requested, round.cores_of_gangs(target.rank), round.world.settings.tolerance)
}

fn request(round: &Round, target: &Target, cores: u32) -> ShadowRequest {
    let duration = round.world.settings.default_duration;
    ShadowRequest { rank: target.rank, node: target.node.clone(), cores, duration }
}

/// The shadow jobs of a rank.
#[derive(Default)]
struct Shadows<'a> {
    /// Those that are active.
    jobs: Vec<OfRank<'a>>,
    /// Until when none is submitted, because Flux has ended one.
    paused_until: Option<Millis>,
}

/// A shadow job of a rank.
#[derive(Clone, Copy)]
struct OfRank<'a> {
    job: &'a Job,
    shadow: &'a Shadow,
    /// It waits for its cores, and does so in this life of the broker.
    is_pending: bool,
}

fn by_rank<'a>(round: &Round<'a>) -> BTreeMap<Rank, Shadows<'a>> {
    let mut all: BTreeMap<Rank, Shadows> = BTreeMap::new();
    for (job, shadow) in round.jobs.shadows().filter(|(_, shadow)| is_of_member(round, shadow)) {
        let of_rank = all.entry(shadow.rank).or_default();
        if job.is_active() {
            let is_pending = job.state == JobState::Pending && !is_old(round, job);
            of_rank.jobs.push(OfRank { job, shadow, is_pending });
        } else if let Some((cause, at)) = &job.ended_by {
            let pause = match cause {
                Cause::Denied(_) => PAUSE,
                // A reloaded scheduler ends what holds cores that are not declared any more. Nothing is wrong then.
                Cause::Other(_) => SECOND,
                Cause::Canceled | Cause::Ours => continue,
            };
            of_rank.paused_until = of_rank.paused_until.max(Some(at.saturating_add(pause)));
        }
    }
    all
}

impl<'a> Shadows<'a> {
    fn is_paused(&self, now: Millis) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// How many cores they hold or wait for.
    fn cores(&self) -> u32 {
        self.jobs.iter().map(|job| job.shadow.cores).sum()
    }

    /// How many cores they wait for.
    fn pending(&self) -> u32 {
        self.jobs.iter().filter(|job| job.is_pending).map(|job| job.shadow.cores).sum()
    }

    /// How many cores they hold.
    fn allocated(&self) -> u32 {
        self.cores() - self.pending()
    }

    /// What makes them hold `wanted` cores. `free`: how many cores of the rank no job holds.
    fn steps(&self, wanted: u32, free: u32, request: impl Fn(u32) -> ShadowRequest) -> Vec<ShadowStep> {
        match wanted.checked_sub(self.cores()) {
            Some(0) => self.split(free, request),
            Some(more) => self.grow(more, free.saturating_sub(self.pending()), request),
            None => self.shrink(self.cores() - wanted, request),
        }
    }

    fn grow(&self, more: u32, free: u32, request: impl Fn(u32) -> ShadowRequest) -> Vec<ShadowStep> {
        let waiting = || self.jobs.iter().filter(|job| job.is_pending);
        match waiting().max_by_key(|job| job.shadow.cores).filter(|_| free == 0 && waiting().count() >= MOST_WAITING) {
            Some(largest) => {
                let request = request(largest.shadow.cores.saturating_add(more));
                vec![ShadowStep::Exchange { job: largest.job.id, request, why: MORE }]
            }
            None => sizes(more, free).into_iter().map(|cores| ShadowStep::Submit(request(cores))).collect(),
        }
    }

    /// If all jobs that wait are larger than what is free, because others were faster: takes what is free.
    fn split(&self, free: u32, request: impl Fn(u32) -> ShadowRequest) -> Vec<ShadowStep> {
        let waiting = self.jobs.iter().filter(|job| job.is_pending);
        match waiting.min_by_key(|job| job.shadow.cores) {
            Some(least) if (1..least.shadow.cores).contains(&free) => {
                let rest = request(least.shadow.cores - free);
                let exchange = ShadowStep::Exchange { job: least.job.id, request: rest, why: IN_PARTS };
                vec![ShadowStep::Submit(request(free)), exchange]
            }
            _ => Vec::new(),
        }
    }

    /// Gives up `excess` cores: those first that are waited for.
    fn shrink(&self, mut excess: u32, request: impl Fn(u32) -> ShadowRequest) -> Vec<ShadowStep> {
        let mut steps = Vec::new();
        for is_pending in [true, false] {
            let mut jobs: Vec<OfRank<'a>> =
                self.jobs.iter().filter(|job| job.is_pending == is_pending).copied().collect();
            jobs.sort_by_key(|job| (Reverse(job.shadow.cores), Reverse(job.job.id)));
            let mut larger = None;
            for OfRank { job, shadow, .. } in jobs {
                if shadow.cores <= excess {
                    excess -= shadow.cores;
                    steps.push(ShadowStep::Cancel { job: job.id, rank: shadow.rank, why: FEWER });
                } else {
                    larger = Some((job.id, shadow.cores));
                }
            }
            if let Some((job, cores)) = larger.filter(|_| excess > 0) {
                steps.push(ShadowStep::Exchange { job, request: request(cores - excess), why: FEWER });
                excess = 0;
            }
        }
        steps
    }
}

/// How `more` cores are asked for: what is free by one job, and the rest by jobs of 1, 2, 4 cores and so on, so that whatever comes free
/// is held at once, by few jobs.
fn sizes(more: u32, free: u32) -> Vec<u32> {
    let at_once = more.min(free);
    let mut left = more - at_once;
    let mut sizes: Vec<u32> = (at_once > 0).then_some(at_once).into_iter().collect();
    let mut next = 1;
    while left > 0 {
        let size = left.min(next);
        sizes.push(size);
        left -= size;
        next *= 2;
    }
    sizes
}

#[cfg(test)]
mod size_tests {
    use super::sizes;

    #[test]
    fn what_is_free_is_asked_for_at_once_and_the_rest_in_parts() {
        for (more, free, expected) in [
            (3, 8, &[3][..]),
            (3, 0, &[1, 2]),
            (8, 2, &[2, 1, 2, 3]),
            (128, 0, &[1, 2, 4, 8, 16, 32, 64, 1]),
            (u32::MAX, u32::MAX, &[u32::MAX]),
            (0, 4, &[]),
        ] {
            assert_eq!(sizes(more, free), expected, "{more} cores, {free} free");
        }
    }
}
