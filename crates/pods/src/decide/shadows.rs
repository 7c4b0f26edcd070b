//! What pods of other schedulers use of each node is held by shadow jobs.
//!
//! A shadow job is pinned to one rank. What a rank's pods use more is one more job, and what they use less ends one. If Flux can't give a
//! shadow job its cores yet, because another job has them, the job waits: both run on, and nothing is killed.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use api::{Account, Rank};

use super::{pins::Again, round::Round};
use crate::{
    action::{Action, ShadowStep},
    jobs::{Cause, Job, JobClass, JobState},
    shadow::{Shadow, ShadowRequest, used_cores},
    target::Target,
    time::{Moment, SECOND},
    world::{PAUSE, Queues},
};

// Notes of cancels.
const FEWER: &str = "pods of other schedulers use fewer cores";
const MORE: &str = "pods of other schedulers use more cores";
const MERGED: &str = "one job holds the cores of all";
const IN_PARTS: &str = "its cores are asked for in parts";
const NO_MEMBER: &str = "its node is no member any more";
const REPLACED: &str = "the broker has restarted, and another job is for the same pods";

/// Most jobs of a rank that wait: the largest one is then exchanged for a larger one. The scheduler looks at 1024 jobs.
const MOST_WAITING: usize = 8;
/// If more jobs of a rank run, they are merged once no job waits.
const MOST_RUNNING: usize = 4;

/// What brings the shadow jobs of all ranks to what pods use there.
pub(super) fn keep(round: &mut Round, accounts: &BTreeMap<Rank, Account>) -> Vec<Action> {
    let (all, none) = (by_rank(round), Shadows::default());
    let is_idle = is_idle(round);
    let mut steps = Vec::new();
    for (rank, target) in &round.world.targets {
        let shadows = all.get(rank).unwrap_or(&none);
        let Account { host_jobs, gangs, other_pods, .. } = accounts.get(rank).copied().unwrap_or_default();
        let mut wanted = wanted_on(round, target, other_pods);
        // Until a pin shows that is to hold cores in their place, shadow jobs keep them: another job would be faster.
        if round.gang_cores(*rank).is_incomplete {
            wanted = wanted.max(shadows.cores());
        }
        let free = target.cores.saturating_sub(host_jobs.saturating_add(gangs)).saturating_sub(shadows.allocated());
        steps.extend(shadows.steps(wanted, free, is_idle && target.is_ready, |cores| request(round, target, cores)));
    }
    // A member whose Node can't be read may still have its pods.
    let left = round.jobs.shadows().filter(|(job, shadow)| job.is_active() && !is_of_member(round, shadow));
    steps.extend(left.map(|(job, shadow)| ShadowStep::Cancel { job: job.id, rank: shadow.rank, why: NO_MEMBER }));
    possible(round, &all, steps)
}

/// No job waits that could get the cores of a shadow job, no gang does, and Flux gives out cores as soon as one comes.
fn is_idle(round: &Round) -> bool {
    let none_waits = round.jobs.iter().all(|job| !job.is_waiting() || matches!(job.class, JobClass::Shadow(_)));
    let no_gang_waits = round.gangs.iter().all(|(gang, _)| gang.problem.is_some() || gang.waiting().next().is_none());
    none_waits && no_gang_waits && round.world.under_way.is_empty() && round.broker.queues == Queues::AllStarted
}

/// After a start of the lead's broker: asks for what other pods use. Only more is asked for, up to the cores of each rank, so this ends
/// however often pods change. A rank whose job is refused is added to `given_up`, and not waited for until the recovery ends.
pub(super) fn ask_for_all(round: &mut Round, given_up: &mut BTreeSet<Rank>) -> Again {
    let (all, none) = (by_rank(round), Shadows::default());
    let (mut again, mut steps) = (Again::Asked, Vec::new());
    for (rank, target) in &round.world.targets {
        let shadows = all.get(rank).unwrap_or(&none);
        let wanted = wanted_now(round, target);
        if shadows.pending() >= wanted {
            continue;
        }
        if round.world.refused_ranks.contains(rank) || shadows.paused_until(round.now).is_some() {
            given_up.insert(*rank);
        }
        match () {
            () if !round.broker.accepts_jobs && shadows.cores() < wanted => again = Again::Disabled,
            () if !round.broker.accepts_jobs || given_up.contains(rank) => {}
            () => {
                again = Again::Submitting;
                steps.push(shadows.ask_for_more(wanted - shadows.pending(), |cores| request(round, target, cores)));
            }
        }
    }
    let actions = possible(round, &all, steps);
    round.actions.extend(actions);
    again
}

/// Cancels what [`ask_for_all`] has replaced: the jobs of the broker's earlier life. One that nothing replaces yet stays. Returns true until
/// all others have ended.
pub(super) fn cancel_old(round: &mut Round) -> bool {
    let all = by_rank(round);
    let is_replaced = |shadow: &Shadow| match round.world.targets.get(&shadow.rank) {
        _ if !is_of_member(round, shadow) => true,
        Some(target) => all.get(&shadow.rank).map_or(0, Shadows::pending) >= wanted_now(round, target),
        None => false,
    };
    let old = round
        .jobs
        .shadows()
        .filter(|(job, shadow)| job.state != JobState::Ended && is_old(round, job, shadow) && is_replaced(shadow));
    let old: Vec<_> = old.map(|(job, shadow)| (job, shadow.rank)).collect();
    let cancel = |(job, rank): &(&Job, Rank)| ShadowStep::Cancel { job: job.id, rank: *rank, why: REPLACED };
    let steps = old.iter().filter(|(job, _)| job.is_active()).map(cancel).collect();
    let actions = possible(round, &all, steps);
    round.actions.extend(actions);
    !old.is_empty()
}

/// True during a recovery, for a job of the broker's earlier life. Any job with cores is one, because stopped queues give out none. One that
/// waits would be in front of the pins.
fn is_old(round: &Round, job: &Job, shadow: &Shadow) -> bool {
    !round.broker.is_recovered && (job.state != JobState::Pending || shadow.life != round.broker.life)
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
        let paused_until = all.get(&rank).and_then(|shadows| shadows.paused_until(round.now));
        if let Some(until) = paused_until.filter(|_| !is_cancel) {
            round.wake_at(until);
        } else if is_cancel || (round.broker.accepts_jobs && !round.world.refused_ranks.contains(&rank)) {
            actions.push(Action::Shadow(step));
        }
    }
    actions
}

/// How many cores of `target` shadow jobs are to hold now.
pub(super) fn wanted_now(round: &Round, target: &Target) -> u32 {
    wanted_on(round, target, used_on(round, target))
}

/// How many cores of `target` pods use that no job of a gang holds, or will use once kubelet grants the resizes that it has deferred. If it
/// can't grant all of these beside the other pods, none of them holds anything: no end of a host job would make room for them.
pub(super) fn used_on(round: &Round, target: &Target) -> u32 {
    let (wished, of_gangs) = (round.usage.all(&target.node).requests.cpu, round.gang_cores(target.rank).requested);
    match wished <= target.allocatable.cpu {
        true => used_beside_gangs(round, target, wished, of_gangs),
        false => used_now_on(round, target),
    }
}

/// As [`used_on`], without what kubelet has not granted yet.
pub(super) fn used_now_on(round: &Round, target: &Target) -> u32 {
    let (granted, of_gangs) = (round.usage.all(&target.node).granted().cpu, round.gang_cores(target.rank).granted);
    used_beside_gangs(round, target, granted, of_gangs)
}

fn used_beside_gangs(round: &Round, target: &Target, all: u64, of_gangs: u64) -> u32 {
    if target.is_dedicated {
        return 0;
    }
    used_cores(target, all.saturating_sub(of_gangs), round.world.settings.tolerance)
}

/// How many cores of `target` shadow jobs are to hold if pods use that many: never more than is left of the rank, because Flux
/// refuses a job that asks for more.
fn wanted_on(round: &Round, target: &Target, used: u32) -> u32 {
    used.min(target.cores.saturating_sub(round.gang_cores(target.rank).cores))
}

fn request(round: &Round, target: &Target, cores: u32) -> ShadowRequest {
    let (life, duration) = (round.broker.life.clone(), round.world.settings.default_duration);
    ShadowRequest { rank: target.rank, node: target.node.clone(), life, cores, duration }
}

/// The shadow jobs of a rank.
#[derive(Default)]
struct Shadows<'a> {
    /// Those that are active.
    jobs: Vec<OfRank<'a>>,
    /// Until when none is submitted, because Flux has ended one.
    paused_until: Option<Moment>,
}

/// A shadow job of a rank.
#[derive(Clone, Copy)]
struct OfRank<'a> {
    job: &'a Job,
    rank: Rank,
    /// How many of its rank's cores it holds or waits for.
    cores: u32,
    /// It waits for its cores, and does so in this life of the broker.
    is_pending: bool,
}

fn by_rank<'a>(round: &Round<'a>) -> BTreeMap<Rank, Shadows<'a>> {
    let mut all: BTreeMap<Rank, Shadows> = BTreeMap::new();
    for (job, shadow) in round.jobs.shadows().filter(|(_, shadow)| is_of_member(round, shadow)) {
        let of_rank = all.entry(shadow.rank).or_default();
        if job.is_active() {
            let is_pending = job.state == JobState::Pending && !is_old(round, job, shadow);
            let of_slots = job.held().iter().filter(|slot| slot.rank == shadow.rank).map(|slot| slot.cores.len());
            let held = u32::try_from(of_slots.sum::<usize>()).unwrap_or(u32::MAX);
            // What a forged record says of a job on another rank counts for nothing.
            let cores = if job.state == JobState::Pending { shadow.cores } else { held };
            of_rank.jobs.push(OfRank { job, rank: shadow.rank, cores, is_pending });
        } else if let Some((cause, at)) = &job.ended_by {
            let pause = match cause {
                Cause::Denied(_) => PAUSE,
                // A scheduler that is reloaded, or starts with the broker, ends what holds cores that are not declared any more. That is
                // no refusal: a reload takes less than a second.
                Cause::Other(_) if shadow.life == round.broker.life => SECOND,
                Cause::Other(_) | Cause::Canceled | Cause::Ours => continue,
            };
            of_rank.paused_until = of_rank.paused_until.max(Some(at.saturating_add(pause)));
        }
    }
    all
}

impl<'a> Shadows<'a> {
    fn paused_until(&self, now: Moment) -> Option<Moment> {
        self.paused_until.filter(|until| now < *until)
    }

    /// How many cores they hold or wait for.
    fn cores(&self) -> u32 {
        sum(self.jobs.iter())
    }

    /// How many cores they wait for.
    fn pending(&self) -> u32 {
        sum(self.waiting())
    }

    /// How many cores they hold.
    fn allocated(&self) -> u32 {
        self.cores() - self.pending()
    }

    fn waiting(&self) -> impl Iterator<Item = &OfRank<'a>> {
        self.jobs.iter().filter(|job| job.is_pending)
    }

    /// What makes them hold `wanted` cores. `free`: how many cores of the rank no job holds.
    /// `may_merge`: nobody else would get their cores meanwhile.
    fn steps(
        &self,
        wanted: u32,
        free: u32,
        may_merge: bool,
        request: impl Fn(u32) -> ShadowRequest,
    ) -> Vec<ShadowStep> {
        match wanted.checked_sub(self.cores()) {
            Some(0) if self.pending() > 0 => self.split(free, request),
            Some(0) if may_merge => self.merge(request).into_iter().collect(),
            Some(0) => Vec::new(),
            Some(more) => self.grow(more, free.saturating_sub(self.pending()), request),
            None => self.shrink(self.cores() - wanted, request),
        }
    }

    /// Asks for `more` cores: for what is free by one job, and for the rest in parts.
    fn grow(&self, more: u32, free: u32, request: impl Fn(u32) -> ShadowRequest) -> Vec<ShadowStep> {
        let at_once = more.min(free);
        let of_free = (at_once > 0).then(|| ShadowStep::Submit(request(at_once)));
        let places = MOST_WAITING.saturating_sub(self.waiting().count());
        let rest = match more - at_once {
            0 => Vec::new(),
            rest if places == 0 => vec![self.ask_for_more(rest, request)],
            rest => parts(rest, places).into_iter().map(|cores| ShadowStep::Submit(request(cores))).collect(),
        };
        of_free.into_iter().chain(rest).collect()
    }

    /// Asks for `more` cores by one job, in the place of another one if many wait.
    fn ask_for_more(&self, more: u32, request: impl Fn(u32) -> ShadowRequest) -> ShadowStep {
        let largest = self.waiting().max_by_key(|job| job.cores);
        match largest.filter(|_| self.waiting().count() >= MOST_WAITING) {
            Some(largest) => {
                let request = request(largest.cores.saturating_add(more));
                ShadowStep::Exchange { jobs: vec![largest.job.id], request, why: MORE }
            }
            None => ShadowStep::Submit(request(more)),
        }
    }

    /// Replaces many jobs by one, because a scheduler that is reloaded takes back each job by itself. Only while nobody waits: the cores
    /// come free one after another, and a smaller job could be planned for them.
    fn merge(&self, request: impl Fn(u32) -> ShadowRequest) -> Option<ShadowStep> {
        (self.jobs.len() > MOST_RUNNING).then(|| ShadowStep::Exchange {
            jobs: self.jobs.iter().map(|job| job.job.id).collect(),
            request: request(self.cores()),
            why: MERGED,
        })
    }

    /// If all jobs that wait are larger than what is free, because others were faster: takes what is free.
    fn split(&self, free: u32, request: impl Fn(u32) -> ShadowRequest) -> Vec<ShadowStep> {
        match self.waiting().min_by_key(|job| job.cores) {
            Some(least) if (1..least.cores).contains(&free) => {
                let rest = request(least.cores - free);
                let exchange = ShadowStep::Exchange { jobs: vec![least.job.id], request: rest, why: IN_PARTS };
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
            jobs.sort_by_key(|job| (Reverse(job.cores), Reverse(job.job.id)));
            let mut larger = None;
            for OfRank { job, rank, cores, .. } in jobs {
                if cores <= excess {
                    excess -= cores;
                    steps.push(ShadowStep::Cancel { job: job.id, rank, why: FEWER });
                } else {
                    larger = Some((job.id, cores));
                }
            }
            if let Some((job, cores)) = larger.filter(|_| excess > 0) {
                steps.push(ShadowStep::Exchange { jobs: vec![job], request: request(cores - excess), why: FEWER });
                excess = 0;
            }
        }
        steps
    }
}

fn sum<'a>(jobs: impl Iterator<Item = &'a OfRank<'a>>) -> u32 {
    jobs.fold(0, |sum, job| sum.saturating_add(job.cores))
}

/// How cores that are not free are asked for: by at most `most` jobs of 1, 2, 4 cores and so on, so that whatever comes free is held at
/// once, by few jobs.
fn parts(cores: u32, most: usize) -> Vec<u32> {
    let (mut parts, mut left) = (Vec::new(), cores);
    while left > 0 {
        let part = if parts.len() + 1 < most { left.min(1 << parts.len()) } else { left };
        parts.push(part);
        left -= part;
    }
    parts
}

#[cfg(test)]
mod part_tests {
    use super::parts;

    #[test]
    fn what_is_not_free_is_asked_for_in_few_parts() {
        for (cores, most, expected) in [
            (0, 8, &[][..]),
            (3, 8, &[1, 2]),
            (6, 8, &[1, 2, 3]),
            (128, 8, &[1, 2, 4, 8, 16, 32, 64, 1]),
            (256, 8, &[1, 2, 4, 8, 16, 32, 64, 129]),
            (121, 1, &[121]),
            (u32::MAX, 2, &[1, u32::MAX - 1]),
        ] {
            assert_eq!(parts(cores, most), expected, "{cores} cores by {most} jobs");
        }
    }
}
