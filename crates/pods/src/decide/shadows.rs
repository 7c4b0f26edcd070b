//! What pods of other schedulers use of each node is held by shadow jobs.
//!
//! What a rank's pods use more is one more job, and what they use less ends one. If Flux can't give a shadow job its cores yet, because another
//! job has them, the job waits: both run on, and nothing is killed.
//!
//! A shadow job is pinned. Ranks whose pods use equally many cores more at one time share a job, because a job costs Flux about as much
//! whether it is for one rank or for a hundred. Flux gives it the cores of all its ranks at once, so it is only for ranks that have them. If
//! one of them turns out not to, that rank gets a job for itself.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use api::{Account, Rank};
use broker::job_id::JobId;

use super::{pins::Again, round::Round};
use crate::{
    action::{Action, ShadowStep},
    jobs::{Cause, Job, JobClass, JobState},
    jobspec::USED_CORES_URGENCY,
    shadow::{Shadow, ShadowRequest, used_cores},
    target::Target,
    time::{Millis, Moment, SECOND},
    world::{PAUSE, Queues},
};

// Notes of cancels.
const FEWER: &str = "pods of other schedulers use fewer cores";
const MORE: &str = "pods of other schedulers use more cores";
const MERGED: &str = "one job holds the cores of all";
const IN_PARTS: &str = "its cores are asked for in parts";
const NO_MEMBER: &str = "its node is no member any more";
const ALONE: &str = "one of its ranks gets a job for itself";
const FOREIGN_URGENCY: &str = "somebody has changed its urgency";
const REPLACED: &str = "the broker has restarted, and another job is for the same pods";

/// Most jobs of a rank that wait: the largest one is then exchanged for a larger one. The scheduler looks at 1024 jobs.
const MOST_WAITING: usize = 8;
/// If more jobs of a rank run, they are merged once no job waits.
const MOST_RUNNING: usize = 4;

/// How long a job for several ranks may wait. Flux takes that long at the most to give out cores that are free, if many jobs wait for some; a
/// rank whose cores it gives to nobody, for a reason that is not known here, keeps the others no longer.
const TOGETHER_FOR: Millis = 30 * SECOND;

/// How old a job must be before another one replaces it because of its urgency: somebody may change that of each job that comes.
const REPLACED_AFTER: Millis = 5 * SECOND;

/// Most ranks of a job. If what one of them holds changes, the others get another job.
const MOST_TOGETHER: usize = 128;

/// What brings the shadow jobs of all ranks to what pods use there.
pub(super) fn keep(round: &mut Round, accounts: &BTreeMap<Rank, Account>) -> Vec<Action> {
    let (all, none) = (by_rank(round), Shadows::default());
    wake_for_late(round);
    let is_idle = is_idle(round);
    let mut changes = ShadowChanges::default();
    for (rank, target) in &round.world.targets {
        let shadows = all.get(rank).unwrap_or(&none);
        let Account { host_jobs, gangs, other_pods, .. } = accounts.get(rank).copied().unwrap_or_default();
        let mut wanted = wanted_on(round, target, other_pods);
        // Until a pin shows that is to hold cores in their place, shadow jobs keep them: another job would be faster.
        if round.gang_cores(*rank).is_incomplete {
            wanted = wanted.max(shadows.cores());
        }
        let free = target.cores.saturating_sub(host_jobs.saturating_add(gangs)).saturating_sub(shadows.allocated());
        let may_share = gives_at_once(round, *rank, shadows);
        match shadows.leaves(free, may_share, round.world.drained.contains(*rank)) {
            Some(leaves) => changes.add(*rank, [leaves]),
            None => {
                let may_share = may_share && shadows.is_next(None);
                changes.add(*rank, shadows.changes(wanted, free, is_idle && target.is_ready, may_share));
            }
        }
    }
    // A member whose Node can't be read may still have its pods.
    for (job, shadow) in round.jobs.shadows().filter(|(job, _)| job.is_active()) {
        for (rank, _) in shadow.nodes.iter().filter(|(rank, node)| !is_member(round, **rank, node)) {
            changes.add(*rank, [ShadowChange::Set { job: job.id, cores: 0, may_share: false, why: NO_MEMBER }]);
        }
        if has_foreign_urgency(round.now, job) {
            let none = || ShadowChange::Set { job: job.id, cores: 0, may_share: false, why: FOREIGN_URGENCY };
            shadow.nodes.keys().for_each(|rank| changes.add(*rank, [none()]));
        }
    }
    let steps = changes.steps(round, &all);
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
    let (mut again, mut changes) = (Again::Asked, ShadowChanges::default());
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
                let may_share = gives_at_once(round, *rank, shadows);
                changes.add(*rank, [shadows.ask_for_more(wanted - shadows.pending(), may_share)]);
            }
        }
    }
    let steps = changes.steps(round, &all);
    let actions = possible(round, &all, steps);
    round.actions.extend(actions);
    again
}

/// Cancels what [`ask_for_all`] has replaced: the jobs of the broker's earlier life. One that nothing replaces yet stays. Returns true until
/// all others have ended.
pub(super) fn cancel_old(round: &mut Round) -> bool {
    let all = by_rank(round);
    let is_replaced = |(rank, node): (&Rank, &String)| match round.world.targets.get(rank) {
        _ if !is_member(round, *rank, node) => true,
        Some(target) => all.get(rank).map_or(0, Shadows::pending) >= wanted_now(round, target),
        None => false,
    };
    let old = round.jobs.shadows().filter(|(job, shadow)| {
        job.state != JobState::Ended && is_old(round, job, shadow) && shadow.nodes.iter().all(is_replaced)
    });
    let old: Vec<_> = old.collect();
    cancel(round, &all, &old);
    !old.is_empty()
}

/// Cancels the jobs of which [`Job::is_spoiled`] tells. True if there are any.
pub(super) fn cancel_spoiled(round: &mut Round) -> bool {
    let spoiled: Vec<_> = round.jobs.shadows().filter(|(job, _)| job.is_spoiled).collect();
    cancel(round, &by_rank(round), &spoiled);
    !spoiled.is_empty()
}

fn cancel<'a>(round: &mut Round<'a>, all: &BTreeMap<Rank, Shadows<'a>>, jobs: &[(&'a Job, &'a Shadow)]) {
    let cancel = |(job, shadow): &(&Job, &Shadow)| ShadowStep {
        cancel: vec![job.id],
        why: REPLACED,
        ranks: shadow.nodes.keys().copied().collect(),
        ..ShadowStep::default()
    };
    let steps = jobs.iter().filter(|(job, _)| job.is_active()).map(cancel).collect();
    let actions = possible(round, all, steps);
    round.actions.extend(actions);
}

/// True during a recovery, for a job of the broker's earlier life. Any job with cores is one, because stopped queues give out none. One that
/// waits would be in front of the pins.
fn is_old(round: &Round, job: &Job, shadow: &Shadow) -> bool {
    !round.broker.is_recovered && (job.state != JobState::Pending || shadow.life != round.broker.life)
}

/// The job waits with another urgency than that of shadow jobs: others come before it, or it is held. It counts for nothing, and another one is
/// asked for.
fn has_foreign_urgency(now: Moment, job: &Job) -> bool {
    is_out_of_order(job) && now >= job.submitted.saturating_add(REPLACED_AFTER)
}

fn is_out_of_order(job: &Job) -> bool {
    job.is_active() && job.state == JobState::Pending && job.urgency != USED_CORES_URGENCY
}

/// When a job for several ranks has waited for too long; None if it does not wait.
fn late_at(round: &Round, job: &Job, shadow: &Shadow) -> Option<Moment> {
    let is_waiting = shadow.nodes.len() > 1 && job.is_active() && job.state == JobState::Pending;
    // If the clock was set back, the job is of the future.
    let since = round.started_since.filter(|_| is_waiting)?.max(job.submitted.min(round.now));
    Some(since.saturating_add(TOGETHER_FOR))
}

fn wake_for_late(round: &mut Round) {
    let late = round.jobs.shadows().filter_map(|(job, shadow)| late_at(round, job, shadow));
    let of_urgency = round.jobs.shadows().filter(|(job, _)| is_out_of_order(job));
    let replaced = of_urgency.map(|(job, _)| job.submitted.saturating_add(REPLACED_AFTER));
    if let Some(next) = late.chain(replaced).filter(|at| *at > round.now).min() {
        round.wake_at(next);
    }
}

/// The node is still a member, with this rank.
fn is_member(round: &Round, rank: Rank, node: &str) -> bool {
    round.ranks.get(node) == Some(&rank)
}

/// Flux gives out cores of the rank at once if they are free, as far as is known.
fn gives_at_once(round: &Round, rank: Rank, shadows: &Shadows) -> bool {
    round.world.available.contains(rank) && !round.world.refused_together.contains(&rank) && !shadows.shared_job_ended
}

/// Those of the steps that may begin now.
fn possible(round: &mut Round, all: &BTreeMap<Rank, Shadows>, steps: Vec<ShadowStep>) -> Vec<Action> {
    // What ends while the scheduler is offline keeps its cores for ever.
    if round.broker.queues == Queues::Offline {
        return Vec::new();
    }
    let mut actions = Vec::new();
    let (world, now) = (round.world, round.now);
    let under_way = world.under_way.iter().filter_map(|action| match action {
        Action::Shadow(step) => Some(&step.ranks),
        _ => None,
    });
    let busy: BTreeSet<Rank> = under_way.flatten().copied().collect();
    let paused_until = |rank: &Rank| all.get(rank).and_then(|shadows| shadows.paused_until(now));
    for step in steps.into_iter().filter(|step| step.ranks.is_disjoint(&busy)) {
        if step.submit.is_empty() {
            actions.push(Action::Shadow(step));
        } else if let Some(until) = step.ranks.iter().filter_map(paused_until).max() {
            round.wake_at(until);
        } else if round.broker.accepts_jobs && step.ranks.is_disjoint(&world.refused_ranks) {
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

/// The shadow jobs of a rank.
#[derive(Default)]
struct Shadows<'a> {
    /// Those that are active.
    jobs: Vec<OfRank<'a>>,
    /// Until when none is submitted, because Flux has ended one.
    paused_until: Option<Moment>,
    /// Flux has ended one that was for other ranks too: which of them it could not have is not known.
    shared_job_ended: bool,
    /// A pin waits for cores of the rank.
    pin_waits: bool,
}

/// A shadow job of a rank.
#[derive(Clone, Copy)]
struct OfRank<'a> {
    job: &'a Job,
    /// It is for other ranks too.
    is_shared: bool,
    /// How many of its rank's cores it holds or waits for.
    cores: u32,
    /// It waits for its cores, and does so in this life of the broker.
    is_pending: bool,
    /// It has waited for the cores of all its ranks for too long.
    is_late: bool,
}

fn by_rank<'a>(round: &Round<'a>) -> BTreeMap<Rank, Shadows<'a>> {
    let mut all: BTreeMap<Rank, Shadows> = BTreeMap::new();
    let waiting_gangs = round.jobs.of_gangs().filter(|(job, _)| job.state == JobState::Pending);
    for rank in waiting_gangs.filter_map(|(_, gang_job)| gang_job.record.pinned) {
        all.entry(rank).or_default().pin_waits = true;
    }
    for (job, shadow) in round.jobs.shadows() {
        let is_shared = shadow.nodes.len() > 1;
        let mut held: BTreeMap<Rank, usize> = BTreeMap::new();
        job.held().iter().for_each(|slot| *held.entry(slot.rank).or_default() += slot.cores.len());
        for (rank, _) in shadow.nodes.iter().filter(|(rank, node)| is_member(round, **rank, node)) {
            let of_rank = all.entry(*rank).or_default();
            if has_foreign_urgency(round.now, job) {
                continue;
            }
            if job.is_active() {
                let is_pending = job.state == JobState::Pending && !is_old(round, job, shadow);
                // What a forged record says of a job on another rank counts for nothing.
                let held = held.get(rank).map_or(0, |cores| u32::try_from(*cores).unwrap_or(u32::MAX));
                let cores = if job.state == JobState::Pending { shadow.cores } else { held };
                let is_late = late_at(round, job, shadow).is_some_and(|late| late <= round.now);
                of_rank.jobs.push(OfRank { job, is_shared, cores, is_pending, is_late });
            } else if let Some(pause) = pause(round, job, shadow) {
                match is_shared {
                    true => of_rank.shared_job_ended |= round.now < pause,
                    false => of_rank.paused_until = of_rank.paused_until.max(Some(pause)),
                }
            }
        }
    }
    all
}

/// Until when no other job is submitted in the place of one that Flux has ended; None if it is to be at once.
fn pause(round: &Round, job: &Job, shadow: &Shadow) -> Option<Moment> {
    let (cause, at) = job.ended_by.as_ref()?;
    let pause = match cause {
        Cause::Denied(_) => PAUSE,
        // A scheduler that is reloaded, or starts with the broker, ends what holds cores that are not declared any more. That is
        // no refusal: a reload takes less than a second.
        Cause::Other(_) if shadow.life == round.broker.life => SECOND,
        Cause::Other(_) | Cause::Canceled | Cause::Ours => return None,
    };
    Some(at.saturating_add(pause))
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

    /// If the rank shares a job with others and has to leave it, the rank gets a job for itself. One that can't give its cores now would keep
    /// the others from giving theirs; and the planner may be about to take a rank that is drained out of the instance: the scheduler would end
    /// the job of all. `free`, `may_share`: see [`Self::changes`].
    fn leaves(&self, free: u32, may_share: bool, is_drained: bool) -> Option<ShadowChange> {
        let shared = self.jobs.iter().filter(|job| job.is_shared);
        let waits_in_vain = |job: &OfRank| job.cores > free || !may_share || job.is_late;
        let mut leaves = shared.filter(|job| if job.is_pending { waits_in_vain(job) } else { is_drained });
        let OfRank { job, cores, .. } = leaves.next()?;
        Some(ShadowChange::Set { job: job.id, cores: *cores, may_share: false, why: ALONE })
    }

    /// What comes free on the rank goes to the job that is submitted next, `but` for one job: no other job of the highest urgency waits there.
    fn is_next(&self, but: Option<JobId>) -> bool {
        !self.pin_waits && self.waiting().all(|job| Some(job.job.id) == but)
    }

    /// What makes them hold `wanted` cores. `free`: how many cores of the rank no job holds.
    /// `may_merge`: nobody else would get their cores meanwhile. `may_share`: a job that is submitted now gets cores of this
    /// rank that are free at once, so it may be for other ranks, too.
    fn changes(&self, wanted: u32, free: u32, may_merge: bool, may_share: bool) -> Vec<ShadowChange> {
        match wanted.checked_sub(self.cores()) {
            Some(0) if self.pending() > 0 => self.split(free),
            Some(0) if may_merge => self.merge().into_iter().collect(),
            Some(0) => Vec::new(),
            Some(more) => self.grow(more, free.saturating_sub(self.pending()), may_share),
            None => self.shrink(self.cores() - wanted, may_share),
        }
    }

    /// Asks for `more` cores: for what is free by one job, and for the rest in parts.
    fn grow(&self, more: u32, free: u32, may_share: bool) -> Vec<ShadowChange> {
        let at_once = more.min(free);
        let of_free = (at_once > 0).then_some(ShadowChange::Ask { cores: at_once, may_share });
        let places = MOST_WAITING.saturating_sub(self.waiting().count());
        let rest = match more - at_once {
            0 => Vec::new(),
            rest if places == 0 => vec![self.ask_for_more(rest, false)],
            rest => {
                parts(rest, places).into_iter().map(|cores| ShadowChange::Ask { cores, may_share: false }).collect()
            }
        };
        of_free.into_iter().chain(rest).collect()
    }

    /// Asks for `more` cores by one job, in the place of another one if many wait.
    fn ask_for_more(&self, more: u32, may_share: bool) -> ShadowChange {
        let largest = self.waiting().max_by_key(|job| job.cores);
        match largest.filter(|_| self.waiting().count() >= MOST_WAITING) {
            Some(OfRank { job, cores, .. }) => {
                ShadowChange::Set { job: job.id, cores: cores.saturating_add(more), may_share: false, why: MORE }
            }
            None => ShadowChange::Ask { cores: more, may_share },
        }
    }

    /// Replaces many jobs by one, because a scheduler that is reloaded takes back each job by itself. Only while nobody waits: the cores
    /// come free one after another, and a smaller job could be planned for them.
    fn merge(&self) -> Option<ShadowChange> {
        let own: Vec<_> = self.jobs.iter().filter(|job| !job.is_shared).collect();
        let cores = sum(own.iter().copied());
        (own.len() > MOST_RUNNING)
            .then(|| ShadowChange::Merge { jobs: own.iter().map(|job| job.job.id).collect(), cores })
    }

    /// If all jobs that wait are larger than what is free, because others were faster: takes what is free.
    fn split(&self, free: u32) -> Vec<ShadowChange> {
        match self.waiting().min_by_key(|job| job.cores) {
            Some(OfRank { job, cores, .. }) if (1..*cores).contains(&free) => vec![
                ShadowChange::Ask { cores: free, may_share: false },
                ShadowChange::Set { job: job.id, cores: cores - free, may_share: false, why: IN_PARTS },
            ],
            _ => Vec::new(),
        }
    }

    /// Gives up `excess` cores: those first that are waited for.
    fn shrink(&self, mut excess: u32, may_share: bool) -> Vec<ShadowChange> {
        let mut changes = Vec::new();
        for is_pending in [true, false] {
            let mut jobs: Vec<OfRank<'a>> =
                self.jobs.iter().filter(|job| job.is_pending == is_pending).copied().collect();
            // Those of other ranks too come last: they cost one more job.
            jobs.sort_by_key(|job| (job.is_shared, Reverse(job.cores), Reverse(job.job.id)));
            let mut larger = None;
            for OfRank { job, cores, .. } in jobs {
                if cores <= excess {
                    excess -= cores;
                    changes.push(ShadowChange::Set { job: job.id, cores: 0, may_share, why: FEWER });
                } else {
                    larger = Some((job.id, cores));
                }
            }
            if let Some((job, cores)) = larger.filter(|_| excess > 0) {
                changes.push(ShadowChange::Set { job, cores: cores - excess, may_share, why: FEWER });
                excess = 0;
            }
        }
        changes
    }
}

/// What is to become of the shadow jobs of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ShadowChange {
    /// One more job, for so many cores. `may_share`: also for other ranks.
    Ask { cores: u32, may_share: bool },
    /// This job is to hold so many cores of the rank, or none. `may_share`: if it is another job then, also for other ranks.
    Set { job: JobId, cores: u32, may_share: bool, why: &'static str },
    /// One job is to hold the cores of all of these, which are for no other rank.
    Merge { jobs: Vec<JobId>, cores: u32 },
}

/// What is to become of the shadow jobs of all ranks.
#[derive(Default)]
struct ShadowChanges(Vec<(Rank, ShadowChange)>);

impl ShadowChanges {
    fn add(&mut self, rank: Rank, changes: impl IntoIterator<Item = ShadowChange>) {
        self.0.extend(changes.into_iter().map(|change| (rank, change)));
    }

    /// The steps to all of it. A job that is set to something else on one of its ranks is exchanged for others on all of them.
    fn steps(self, round: &Round, all: &BTreeMap<Rank, Shadows>) -> Vec<ShadowStep> {
        let (mut asked, mut steps) = (Vec::new(), Vec::new());
        let mut set: BTreeMap<JobId, Exchange> = BTreeMap::new();
        let node = |rank| round.world.targets.get(&rank).map(|target| target.node.clone()).unwrap_or_default();
        for (rank, change) in self.0 {
            match change {
                ShadowChange::Ask { cores, may_share } => {
                    asked.push(Holding { rank, node: node(rank), cores, may_share });
                }
                ShadowChange::Merge { jobs, cores } => {
                    let one = Holding { rank, node: node(rank), cores, may_share: false };
                    steps.push(step(requests(round, vec![one]), jobs, MERGED));
                }
                ShadowChange::Set { job, cores, may_share, why } => {
                    let exchange = set.entry(job).or_insert_with(|| Exchange { why, holdings: BTreeMap::new() });
                    exchange.holdings.insert(rank, (cores, may_share));
                }
            }
        }
        steps.extend(requests(round, asked).into_iter().map(|request| step(vec![request], Vec::new(), MORE)));
        for (job, shadow) in round.jobs.shadows() {
            let Some(Exchange { why, holdings: changed }) = set.get(&job.id) else { continue };
            let holdings = shadow.nodes.iter().map(|(rank, node)| {
                let as_before = || {
                    // Else a job that waits there would get what comes free, and this one would keep the cores of its other ranks from
                    // being held.
                    let is_free_for = |shadows| gives_at_once(round, *rank, shadows) && shadows.is_next(Some(job.id));
                    (shadow.cores, all.get(rank).is_some_and(is_free_for))
                };
                let (cores, may_share) = changed.get(rank).copied().unwrap_or_else(as_before);
                Holding { rank: *rank, node: node.clone(), cores, may_share }
            });
            let mut exchange = step(requests(round, holdings.collect()), vec![job.id], why);
            exchange.ranks.extend(shadow.nodes.keys());
            steps.push(exchange);
        }
        steps
    }
}

/// A shadow job that others take the place of.
struct Exchange {
    why: &'static str,
    /// On the ranks that change: how many cores, and whether the job for them may be for other ranks, too.
    holdings: BTreeMap<Rank, (u32, bool)>,
}

/// What jobs that are submitted are to hold of a rank.
struct Holding {
    rank: Rank,
    node: String,
    cores: u32,
    /// By a job that may be for other ranks, too.
    may_share: bool,
}

fn step(submit: Vec<ShadowRequest>, cancel: Vec<JobId>, why: &'static str) -> ShadowStep {
    let ranks = submit.iter().flat_map(|request| request.nodes.keys().copied()).collect();
    ShadowStep { submit, cancel, why, ranks }
}

/// The jobs that hold it all, as few as possible, in the order in which they are to be submitted.
fn requests(round: &Round, holdings: Vec<Holding>) -> Vec<ShadowRequest> {
    let (mut alone, mut alike): (Vec<_>, BTreeMap<u32, Vec<_>>) = (Vec::new(), BTreeMap::new());
    for Holding { rank, node, cores, may_share } in holdings.into_iter().filter(|holding| holding.cores > 0) {
        match may_share {
            true => alike.entry(cores).or_default().push((rank, node)),
            false => alone.push((cores, vec![(rank, node)])),
        }
    }
    let together =
        alike.iter().flat_map(|(cores, ranks)| ranks.chunks(MOST_TOGETHER).map(|some| (*cores, some.to_vec())));
    let (life, duration) = (&round.broker.life, round.world.settings.default_duration);
    let request = |(cores, nodes): (u32, Vec<_>)| ShadowRequest {
        nodes: nodes.into_iter().collect(),
        life: life.clone(),
        cores,
        duration,
    };
    // What is free first: else a job that is to wait could get it, and this one would wait.
    together.chain(alone).map(request).collect()
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
