//! A gang that has waited for long gets the cores of gangs of lower priority: `spec.pods.preemptAfter`.
//!
//! These go as a whole: few of them, the lowest priority first, and the youngest of one priority. One gang is helped at a time, because what is
//! freed for it shows only later.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

use api::Rank;
use broker::job_id::JobId;

use super::{
    cancels::is_whole_job,
    hold::{Held, Holdings},
    memory::PreemptMemory,
    queue::priority,
    round::Round,
    shadows,
};
use crate::{
    action::{Action, KubeJobRef, PodRef, Victim},
    facts::{KubeJob, SuspendReason},
    gangs::Gang,
    jobs::{GangJob, HeldCores, Job, JobClass, JobState},
    jobspec::Shape,
    pod::PodView,
    target::Target,
    time::{Millis, Moment, SECOND},
    world::Queues,
};

/// After others were to make way for a gang, how long until more are, and twice as long each time, up to about an hour.
const NEXT_AFTER: Millis = 15 * SECOND;
/// A pod that is being deleted is waited for if it has no longer than this to end, or than `preemptAfter`, and this long beyond its end.
const ENDS_SOON: Millis = 60 * SECOND;
/// The cores of gangs that have made way are waited for this long, whatever their grace is.
const MADE_WAY_ENDS: Millis = 3600 * SECOND;
/// At most so many gangs that are due are looked at in one decision.
const LOOKED_AT: usize = 16;

/// Cores of each rank.
type Cores = BTreeMap<Rank, u32>;

/// A gang that may go.
struct Candidate<'a> {
    gang: &'a Gang<'a>,
    holdings: &'a Holdings<'a>,
    priority: i32,
    job: Option<&'a KubeJob>,
    frees: Cores,
}

/// Forgets jobs that have ended, jobs of gangs that stay because the API server refused, and gangs that wait no longer.
pub(super) fn forget(round: &Round, memory: &mut PreemptMemory) {
    // Each decision comes here, and as a rule nothing has made way.
    if memory.helped.is_empty() && memory.made_way.is_empty() {
        return;
    }
    memory.helped.retain(|id, _| round.gangs.iter().any(|(gang, _)| gang.id == *id && !gang.is_started()));
    let stays = |held: &Held| held.slots.iter().any(|(_, pod)| pod.is_some_and(PodView::stays));
    // The pods of a suspended Job are about to be deleted.
    let is_suspended = |gang: &Gang| gang.job.is_some_and(|job| job.is_suspended);
    let running = round.gangs.iter().filter(|(gang, _)| !is_suspended(gang));
    let held = running.flat_map(|(_, holdings)| &holdings.jobs);
    let staying: BTreeMap<JobId, &Held> = match is_under_way(round) {
        true => BTreeMap::new(),
        false => held.filter(|held| stays(held)).map(|held| (held.job.id, held)).collect(),
    };
    let is_protected = |pod: &PodView| round.world.protected.contains(&pod.uid);
    let has_protected = |held: &&Held| held.slots.iter().any(|(_, pod)| pod.is_some_and(is_protected));
    if memory.made_way.iter().filter_map(|id| staying.get(id)).any(has_protected) {
        // These are no candidates any more, so the next attempt is another one. One that failed for another reason would be the same.
        let last = memory.helped.values_mut().max_by_key(|helped| helped.at);
        last.into_iter().for_each(|helped| helped.times = 1);
    }
    memory.made_way.retain(|id| !staying.contains_key(id) && round.jobs.get(*id).is_some_and(Job::is_active));
}

/// Makes gangs go for the first gang that has waited for long enough and that this helps.
pub(super) fn preempt(round: &mut Round, memory: &mut PreemptMemory) {
    let Some(after) = round.world.settings.preempt_after else { return };
    let is_open = matches!(round.broker.queues, Queues::AllStarted | Queues::Started);
    if !is_open || !round.broker.accepts_jobs || is_under_way(round) {
        return;
    }
    // Taken out while the round is changed.
    let gangs = std::mem::take(&mut round.gangs);
    let mut due = BTreeMap::new();
    for (gang, holdings) in &gangs {
        let Some(held) = waits_as_a_whole(gang, holdings) else { continue };
        let at = due_at(round, memory, gang, after);
        match round.now >= at {
            true => drop(due.insert(held.job.id, gang)),
            false => round.wake_at(at),
        }
    }
    let in_future = |span: Millis| round.now.saturating_add(span);
    let helped_at = memory.helped.values().map(|helped| helped.at).max();
    let coming = Coming {
        soon: round.now.saturating_sub(ENDS_SOON)..=in_future(after.max(ENDS_SOON)),
        made_way: &memory.made_way,
        made_way_ends: in_future(MADE_WAY_ENDS.max(after)),
        awaits_deletion: helped_at.is_some_and(|at| round.now < at.saturating_add(ENDS_SOON)),
    };
    if let Some((gang, victims)) = first_helped(round, &gangs, &due, &coming) {
        let helped = memory.helped.entry(gang.id.clone()).or_default();
        (helped.times, helped.at) = (helped.times.saturating_add(1), round.now);
        let jobs = victims.iter().flat_map(|victim| &victim.holdings.jobs);
        memory.made_way.extend(jobs.map(|held| held.job.id));
        let victims = victims.into_iter().map(Victim::from).collect();
        round.actions.push(Action::Preempt { gang: gang.id.clone(), victims });
    }
    round.gangs = gangs;
}

fn is_under_way(round: &Round) -> bool {
    round.world.under_way.iter().any(|action| matches!(action, Action::Preempt { .. }))
}

/// When others may go for `gang`.
fn due_at(round: &Round, memory: &PreemptMemory, gang: &Gang, after: Millis) -> Moment {
    let helped = memory.helped.get(&gang.id);
    let again = helped.map_or(0, |helped| helped.at.saturating_add(NEXT_AFTER << (helped.times - 1).min(8)));
    round.queued_since(gang).saturating_add(after).max(again)
}

/// The job of a gang of which nothing runs, and that waits for cores that others may leave to it.
fn waits_as_a_whole<'a, 'b>(gang: &Gang<'a>, holdings: &'b Holdings<'a>) -> Option<&'b Held<'a>> {
    let held = holdings.jobs.iter().find(|held| held.job.is_waiting() && held.is_whole(gang.size))?;
    let may_preempt = !gang.waiting().any(|pod| pod.never_preempts);
    (may_preempt && gang.problem.is_none() && !gang.is_started()).then_some(held)
}

/// The first gang in Flux's queue that is `due` and that victims help, with these.
fn first_helped<'a>(
    round: &Round,
    gangs: &'a [(Gang<'a>, Holdings<'a>)],
    due: &BTreeMap<JobId, &'a Gang<'a>>,
    coming: &Coming,
) -> Option<(&'a Gang<'a>, Vec<Candidate<'a>>)> {
    if due.is_empty() {
        return None;
    }
    let mut free = free_soon(round, gangs, coming);
    let mut queue: Vec<&Job> = round.jobs.iter().filter(|job| job.is_waiting()).collect();
    queue.sort_by_key(|job| (Reverse(job.urgency), job.id));
    let mut looked_at = 0;
    for job in queue {
        let shape = match &job.class {
            // It may get any of the cores.
            JobClass::Host => return None,
            JobClass::Gang(gang_job) if gang_job.record.pinned.is_none() => &gang_job.shape,
            // What these wait for is not free.
            JobClass::Gang(_) | JobClass::Shadow(_) => continue,
        };
        if let Some(gang) = due.get(&job.id) {
            let victims = victims(round, gangs, priority(gang.waiting()), shape, &free);
            if !victims.is_empty() {
                return Some((gang, victims));
            }
            looked_at += 1;
        }
        take(&mut free, shape);
        if free.is_empty() || looked_at == LOOKED_AT {
            break;
        }
    }
    None
}

/// The gangs that must go so that a job of this shape fits into what is `free` for it; none if it fits without, or not even then.
fn victims<'a>(
    round: &Round,
    gangs: &'a [(Gang<'a>, Holdings<'a>)],
    priority: i32,
    shape: &Shape,
    free: &Cores,
) -> Vec<Candidate<'a>> {
    let permitted = free.iter().filter(|(rank, _)| shape.constraint.permits(**rank));
    let mut free: Cores = permitted.map(|(rank, cores)| (*rank, *cores)).collect();
    let fits =
        |free: &Cores| free.values().map(|cores| slots_in(*cores, shape)).fold(0, u32::saturating_add) >= shape.slots;
    if fits(&free) {
        return Vec::new();
    }
    let mut all: Vec<_> =
        gangs.iter().filter_map(|(gang, holdings)| candidate(round, gang, holdings, priority)).collect();
    all.sort_by_key(|candidate| (candidate.priority, Reverse(candidate.gang.since())));
    let mut chosen: Vec<Candidate> = Vec::new();
    for candidate in all {
        if fits(&free) {
            break;
        }
        if candidate.frees.keys().any(|rank| free.contains_key(rank)) {
            change(&mut free, &candidate.frees, u32::saturating_add);
            chosen.push(candidate);
        }
    }
    if !fits(&free) {
        return Vec::new();
    }
    // Those that cost most first: some of the cheap ones may have been of no use.
    let mut needed = Vec::new();
    for candidate in chosen.into_iter().rev() {
        change(&mut free, &candidate.frees, u32::saturating_sub);
        if !fits(&free) {
            change(&mut free, &candidate.frees, u32::saturating_add);
            needed.push(candidate);
        }
    }
    needed
}

/// How many slots of `shape` have room in so many cores of one rank.
fn slots_in(cores: u32, shape: &Shape) -> u32 {
    let slots = cores / shape.cores.max(1);
    shape.per_node.map_or(slots, |each| if slots < each { 0 } else { each })
}

/// Takes from `free` what a job of this shape is about to get. If it does not fit, it takes every rank where it may run: what comes free there
/// goes to it.
fn take(free: &mut Cores, shape: &Shape) {
    let mut left = shape.slots;
    for (_, cores) in free.iter_mut().filter(|(rank, _)| shape.constraint.permits(**rank)) {
        let slots = slots_in(*cores, shape).min(left);
        *cores = cores.saturating_sub(slots.saturating_mul(shape.cores));
        left -= slots;
    }
    if left > 0 {
        free.retain(|rank, _| !shape.constraint.permits(*rank));
    }
}

/// The cores of each rank that are free or will be soon, less those that pins and shadow jobs wait for.
fn free_soon<'a>(round: &Round, gangs: &'a [(Gang<'a>, Holdings<'a>)], coming: &Coming) -> Cores {
    let is_usable =
        |target: &&Target| round.world.available.contains(target.rank) && target.is_ready && !target.is_cordoned();
    let mut free: Cores = round
        .world
        .targets
        .values()
        .filter(is_usable)
        .map(|target| {
            let HeldCores { hosts, gangs, shadows } = round.held_cores(target.rank);
            let taken = hosts.saturating_add(gangs).saturating_add(shadows.max(shadows::wanted_now(round, target)));
            (target.rank, target.cores.saturating_sub(taken))
        })
        .collect();
    let is_pin =
        |(job, gang_job): &(&Job, &GangJob)| job.state == JobState::Pending && gang_job.record.pinned.is_some();
    for (_, GangJob { record, shape }) in round.jobs.of_gangs().filter(is_pin) {
        let waits = record.pinned.map(|rank| (rank, shape.slots.saturating_mul(shape.cores)));
        change(&mut free, &waits.into_iter().collect(), u32::saturating_sub);
    }
    let held = gangs.iter().flat_map(|(gang, holdings)| holdings.jobs.iter().map(move |held| (gang, held)));
    let ends_soon = held.filter(|(gang, held)| coming.includes(gang, held)).map(|(_, held)| held.job);
    let ended = round.actions.iter().chain(&round.world.under_way).filter_map(|action| match action {
        Action::Finish { job, .. } => Some(*job),
        _ => None,
    });
    let ended: BTreeSet<JobId> = ended.collect();
    let of_gangs = round.jobs.of_gangs().map(|(job, _)| job);
    let ending = of_gangs.filter(|job| job.state == JobState::Ending || ended.contains(&job.id));
    for job in ends_soon.chain(ending) {
        change(&mut free, &held_by([job]), u32::saturating_add);
    }
    free
}

/// Which cores of gangs are waited for, because they come free.
struct Coming<'a> {
    /// When a pod that is being deleted must end.
    soon: RangeInclusive<Moment>,
    /// What has made way before is waited for, however long its grace is: else one gang after the other would go for one.
    made_way: &'a BTreeSet<JobId>,
    /// When a pod of these must end: a user may set a grace of years.
    made_way_ends: Moment,
    /// Others have made way just now: their Jobs are suspended, and their controllers are about to delete the pods. Later, a Job's
    /// controller doesn't do that, such as one that `spec.managedBy` names.
    awaits_deletion: bool,
}

impl Coming<'_> {
    /// True if every pod that has cores of this job of `gang` is gone, is to end soon, or is about to be deleted because its Job made way.
    fn includes(&self, gang: &Gang, held: &Held) -> bool {
        let is_suspended = gang.job.is_some_and(|job| job.is_suspended);
        // The Job's annotation outlives this process.
        let for_another = gang.job.is_some_and(|job| job.suspended_for == Some(SuspendReason::Preempted));
        let made_way = self.made_way.contains(&held.job.id);
        let last = if made_way || for_another { self.made_way_ends } else { *self.soon.end() };
        let ends = |pod: &PodView| match pod.to_end_by {
            _ if pod.gone.is_some() || pod.is_terminal() => true,
            Some(end) => (*self.soon.start()..=last).contains(&end),
            None => is_suspended && made_way && self.awaits_deletion,
        };
        let mut pods = held.slots.iter().filter_map(|(_, pod)| *pod);
        held.is_used() && pods.all(ends)
    }
}

/// The cores that these jobs hold.
fn held_by<'a>(jobs: impl IntoIterator<Item = &'a Job>) -> Cores {
    let mut held = Cores::new();
    for slot in jobs.into_iter().flat_map(Job::held) {
        let cores = held.entry(slot.rank).or_default();
        *cores = cores.saturating_add(u32::try_from(slot.cores.len()).unwrap_or(u32::MAX));
    }
    held
}

fn change(free: &mut Cores, by: &Cores, how: fn(u32, u32) -> u32) {
    for (rank, cores) in by {
        if let Some(free) = free.get_mut(rank) {
            *free = how(*free, *cores);
        }
    }
}

/// `gang`, if it runs with a priority below that and all of it can go. The bridge must be permitted to write there. Pods of a
/// Job go only with the whole Job: its controller would make evicted pods again at once and count them as failures.
fn candidate<'a>(round: &Round, gang: &'a Gang<'a>, holdings: &'a Holdings<'a>, below: i32) -> Option<Candidate<'a>> {
    let pods = || gang.members.iter().copied().filter(|pod| pod.node.is_some() && !pod.is_terminal());
    let priority = pods().map(|pod| pod.priority).max().filter(|priority| *priority < below)?;
    let is_on_ready = |pod: &PodView| {
        let rank = pod.node.as_deref().and_then(|node| round.ranks.get(node));
        rank.and_then(|rank| round.world.targets.get(rank)).is_some_and(|target| target.is_ready)
    };
    let is_settled = pods().all(|pod| pod.stays() && is_on_ready(pod)) && !round.is_busy(&gang.id);
    let is_protected = pods().any(|pod| round.world.protected.contains(&pod.uid));
    let is_refused = round.world.refused.contains_key(&gang.id) || is_protected;
    let may_write = round.world.namespaces.contains(&gang.id.namespace) && !is_refused;
    let job = gang.job.filter(|job| is_whole_job(gang, job) && !job.is_suspended);
    let is_of_a_job = pods().any(|pod| pod.owner.as_ref().is_some_and(|owner| owner.is_job));
    let can_go = job.is_some() || !is_of_a_job;
    let frees = held_by(holdings.jobs.iter().map(|held| held.job));
    (is_settled && may_write && can_go).then_some(Candidate { gang, holdings, priority, job, frees })
}

impl From<Candidate<'_>> for Victim {
    fn from(Candidate { gang, job, .. }: Candidate) -> Self {
        let running = gang.members.iter().copied().filter(|pod| pod.node.is_some() && pod.stays());
        Self { gang: gang.id.clone(), pods: running.map(PodRef::from).collect(), job: job.map(KubeJobRef::from) }
    }
}
