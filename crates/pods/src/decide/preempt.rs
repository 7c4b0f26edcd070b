//! A gang that has waited for long gets the cores of gangs of lower priority: `spec.pods.preemptAfter`.
//!
//! These go as a whole: few of them, the lowest priority first, and the youngest of one priority. One gang is helped at a time, because what is
//! freed for it shows only later.

use std::{cmp::Reverse, collections::BTreeMap};

use api::Rank;

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
    facts::KubeJob,
    gangs::Gang,
    jobs::{GangJob, HeldCores, Job, JobClass, JobState},
    jobspec::Shape,
    pod::PodView,
    target::Target,
    time::{Millis, Moment, SECOND},
    world::Queues,
};

/// After gangs were made to go for one that waits, no others are for this long, and twice as long each time: pods take time to end, and others
/// may have been faster.
const PAUSE: Millis = 60 * SECOND;
/// Gangs of which the API server refused one are left alone for this long.
const SPARED_FOR: Millis = 600 * SECOND;
/// At most so many gangs that wait are looked at in one decision, of those that are due.
const LOOKED_AT: usize = 16;

/// A gang that may go, with the cores of each rank that it frees.
struct Candidate<'a> {
    gang: &'a Gang<'a>,
    priority: i32,
    job: Option<&'a KubeJob>,
    frees: BTreeMap<Rank, u32>,
}

/// Makes gangs go for the first gang that has waited for long enough and that this helps.
pub(super) fn preempt(round: &mut Round, memory: &mut PreemptMemory) {
    let Some(after) = round.world.settings.preempt_after else { return };
    let now = round.now;
    if let Some((gang, victims)) = &memory.last
        && round.world.refused.contains_key(gang)
    {
        memory.spared.extend(victims.iter().map(|victim| (victim.clone(), now.saturating_add(SPARED_FOR))));
        memory.last = None;
    }
    memory.spared.retain(|_, until| *until > now);
    let is_open = matches!(round.broker.queues, Queues::AllStarted | Queues::Started);
    if !is_open || !round.broker.accepts_jobs {
        return;
    }
    // Taken out while the round is changed.
    let gangs = std::mem::take(&mut round.gangs);
    memory.helped.retain(|id, _| gangs.iter().any(|(gang, _)| gang.id == *id && !gang.is_started()));
    let waits = gangs.iter().filter_map(|(gang, holdings)| Some((gang, waits_as_a_whole(gang, holdings)?)));
    let mut waiting: Vec<_> = waits.filter(|(_, held)| is_first(round, held.job)).collect();
    waiting.sort_by_key(|(gang, _)| (Reverse(priority(gang.waiting())), round.queued_since(gang)));
    let (due, later): (Vec<_>, Vec<_>) =
        waiting.into_iter().partition(|(gang, _)| now >= due_at(round, memory, gang, after));
    let wakes: Vec<_> = later.iter().map(|(gang, _)| due_at(round, memory, gang, after)).collect();
    wakes.into_iter().for_each(|at| round.wake_at(at));
    for (gang, held) in due.into_iter().take(LOOKED_AT) {
        let victims = victims(round, memory, &gangs, priority(gang.waiting()), &held.gang_job.shape);
        if victims.is_empty() {
            continue;
        }
        let helped = memory.helped.entry(gang.id.clone()).or_default();
        (helped.times, helped.at) = (helped.times.saturating_add(1), now);
        memory.last = Some((gang.id.clone(), victims.iter().map(|victim| victim.gang.id.clone()).collect()));
        round
            .actions
            .push(Action::Preempt { gang: gang.id.clone(), victims: victims.into_iter().map(Victim::from).collect() });
        break;
    }
    round.gangs = gangs;
}

/// When others may go for `gang`.
fn due_at(round: &Round, memory: &PreemptMemory, gang: &Gang, after: Millis) -> Moment {
    let helped = memory.helped.get(&gang.id);
    let again = helped.map_or(0, |helped| helped.at.saturating_add(PAUSE << (helped.times - 1).min(6)));
    round.queued_since(gang).saturating_add(after).max(again)
}

/// The job of a gang of which nothing runs, and that waits for cores.
fn waits_as_a_whole<'a, 'b>(gang: &Gang<'a>, holdings: &'b Holdings<'a>) -> Option<&'b Held<'a>> {
    let is_waiting =
        |held: &&Held| held.job.state == JobState::Pending && held.job.urgency > 0 && held.is_whole(gang.size);
    let held = holdings.jobs.iter().find(is_waiting)?;
    (gang.problem.is_none() && !gang.is_started()).then_some(held)
}

/// No other job would get the cores before `job`, but shadow jobs and pins, which are counted.
fn is_first(round: &Round, job: &Job) -> bool {
    let is_before = |other: &Job| (Reverse(other.urgency), other.id) < (Reverse(job.urgency), job.id);
    let counts = |other: &Job| match &other.class {
        JobClass::Host => true,
        JobClass::Gang(gang_job) => gang_job.record.pinned.is_none(),
        JobClass::Shadow(_) => false,
    };
    !round
        .jobs
        .iter()
        .any(|other| other.state == JobState::Pending && other.urgency > 0 && counts(other) && is_before(other))
}

/// The gangs that must go so that a job of this shape fits; none if it fits without, or not even then.
fn victims<'a>(
    round: &Round,
    memory: &PreemptMemory,
    gangs: &'a [(Gang<'a>, Holdings<'a>)],
    priority: i32,
    shape: &Shape,
) -> Vec<Candidate<'a>> {
    let mut free = free(round, gangs, shape);
    let fits = |free: &BTreeMap<Rank, u32>| {
        let on_each = free.values().map(|free| free / shape.cores.max(1));
        on_each.map(|slots| if shape.spreads { slots.min(1) } else { slots }).fold(0, u32::saturating_add)
            >= shape.slots
    };
    if fits(&free) {
        return Vec::new();
    }
    let candidates = gangs.iter().filter(|(gang, _)| !memory.spared.contains_key(&gang.id));
    let mut all: Vec<_> =
        candidates.filter_map(|(gang, holdings)| candidate(round, gang, holdings, priority)).collect();
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

/// The cores of each rank where a job of this shape may run that nobody has or waits for before it, those that gangs will free that end already
/// among them.
fn free<'a>(round: &Round, gangs: &'a [(Gang<'a>, Holdings<'a>)], shape: &Shape) -> BTreeMap<Rank, u32> {
    let is_usable =
        |target: &&Target| shape.constraint.permits(target.rank) && target.is_ready && !target.is_cordoned();
    let usable = round.world.targets.values().filter(is_usable);
    let mut free: BTreeMap<Rank, u32> = usable
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
    for (gang, holdings) in gangs.iter().filter(|(gang, _)| !gang.members.iter().any(|pod| pod.stays())) {
        debug_assert!(!gang.members.is_empty());
        change(&mut free, &held(holdings), u32::saturating_add);
    }
    free
}

fn held(holdings: &Holdings) -> BTreeMap<Rank, u32> {
    let mut held: BTreeMap<Rank, u32> = BTreeMap::new();
    for slot in holdings.jobs.iter().flat_map(|held| held.job.held()) {
        let cores = held.entry(slot.rank).or_default();
        *cores = cores.saturating_add(u32::try_from(slot.cores.len()).unwrap_or(u32::MAX));
    }
    held
}

fn change(free: &mut BTreeMap<Rank, u32>, by: &BTreeMap<Rank, u32>, how: fn(u32, u32) -> u32) {
    for (rank, cores) in by {
        if let Some(free) = free.get_mut(rank) {
            *free = how(*free, *cores);
        }
    }
}

/// `gang`, if it runs with a lower priority than that and all of it can go: the bridge may write there, and no Job owns its pods but one that is
/// all of it, whose controller would otherwise make evicted pods again at once and count them as failures.
fn candidate<'a>(round: &Round, gang: &'a Gang<'a>, holdings: &Holdings<'a>, than: i32) -> Option<Candidate<'a>> {
    let pods = || gang.members.iter().copied().filter(|pod| pod.node.is_some() && !pod.is_terminal());
    let priority = pods().map(|pod| pod.priority).max().filter(|priority| *priority < than)?;
    let is_on_ready = |pod: &PodView| {
        let rank = pod.node.as_deref().and_then(|node| round.ranks.get(node));
        rank.and_then(|rank| round.world.targets.get(rank)).is_some_and(|target| target.is_ready)
    };
    let is_settled = pods().all(|pod| pod.stays() && is_on_ready(pod)) && !round.is_busy(&gang.id);
    let may_write = round.world.namespaces.contains(&gang.id.namespace) && !round.world.refused.contains_key(&gang.id);
    let owned = || pods().filter_map(|pod| pod.owner.as_ref()).filter(|owner| owner.is_job);
    let is_all = |job: &&KubeJob| {
        let has_all = pods().all(|pod| pod.owner.as_ref().is_some_and(|owner| owner.uid == job.uid));
        has_all && is_whole_job(gang, job) && !job.is_suspended && job.job_set.is_none()
    };
    let job = gang.job.filter(is_all);
    let can_go = job.is_some() || owned().next().is_none();
    (is_settled && may_write && can_go).then(|| Candidate { gang, priority, job, frees: held(holdings) })
}

impl From<Candidate<'_>> for Victim {
    fn from(Candidate { gang, job, .. }: Candidate) -> Self {
        let running = gang.members.iter().copied().filter(|pod| pod.node.is_some() && pod.stays());
        Self { gang: gang.id.clone(), pods: running.map(PodRef::from).collect(), job: job.map(KubeJobRef::from) }
    }
}
