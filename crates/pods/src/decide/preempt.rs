//! A gang that has waited for long gets the cores of gangs of lower priority: `spec.pods.preemptAfter`.
//!
//! These go as a whole: few of them, the lowest priority first, and the youngest of one priority. One gang is helped at a time, because what is
//! freed for it shows only later.

use std::{cmp::Reverse, collections::BTreeMap};

use api::Rank;

use super::{
    cancels::is_whole_job,
    hold::{Held, Holdings},
    memory::Memory,
    queue::priority,
    round::Round,
    words::tell_preempted,
};
use crate::{
    action::{Action, KubeJobRef, PodRef},
    gangs::Gang,
    jobs::JobState,
    jobspec::Shape,
    pod::PodView,
    time::{Millis, SECOND},
};

/// After gangs were made to go, no others are for this long: pods take time to end.
const PAUSE: Millis = 60 * SECOND;
/// At most so many gangs that wait are looked at: the first in the queue.
const LOOKED_AT: usize = 16;

/// A gang that may go, with the cores of each rank that it frees.
struct Victim<'a> {
    gang: &'a Gang<'a>,
    priority: i32,
    frees: BTreeMap<Rank, u32>,
}

/// Makes gangs go for the first gang that has waited for long enough and that this helps.
pub(super) fn preempt(round: &mut Round, memory: &mut Memory) {
    let Some(after) = round.world.settings.preempt_after else { return };
    if let Some(again) = memory.preempted_at.map(|at| at.saturating_add(PAUSE)).filter(|again| round.now < *again) {
        round.wake_at(again);
        return;
    }
    // Taken out while the round is changed.
    let gangs = std::mem::take(&mut round.gangs);
    let mut waiting: Vec<_> =
        gangs.iter().filter_map(|(gang, holdings)| Some((gang, waits_as_a_whole(gang, holdings)?))).collect();
    waiting.sort_by_key(|(gang, _)| (Reverse(priority(gang.waiting())), round.queued_since(gang)));
    for (gang, held) in waiting.into_iter().take(LOOKED_AT) {
        let due = round.queued_since(gang).saturating_add(after);
        if round.now < due {
            round.wake_at(due);
            continue;
        }
        let victims = victims(round, &gangs, priority(gang.waiting()), &held.gang_job.shape);
        if victims.is_empty() {
            continue;
        }
        for victim in victims {
            go(round, memory, victim, gang);
        }
        memory.preempted_at = Some(round.now);
        break;
    }
    round.gangs = gangs;
}

/// The job of a gang of which nothing runs, and that waits for cores.
fn waits_as_a_whole<'a, 'b>(gang: &Gang<'a>, holdings: &'b Holdings<'a>) -> Option<&'b Held<'a>> {
    let is_waiting = |held: &&Held| held.job.state == JobState::Pending && held.is_whole(gang.size);
    let held = holdings.jobs.iter().find(is_waiting)?;
    (gang.problem.is_none() && !gang.is_started()).then_some(held)
}

/// The gangs that must go so that a job of this shape fits; none if it fits without, or not even then.
fn victims<'a>(
    round: &Round,
    gangs: &'a [(Gang<'a>, Holdings<'a>)],
    priority: i32,
    shape: &Shape,
) -> Vec<&'a Gang<'a>> {
    let usable = round.world.targets.values().filter(|target| shape.constraint.permits(target.rank) && target.is_ready);
    let mut free: BTreeMap<Rank, u32> = usable.map(|target| (target.rank, round.may_be_free(target))).collect();
    let fits = |free: &BTreeMap<Rank, u32>| {
        let on_each = free.values().map(|free| free / shape.cores.max(1));
        on_each.map(|slots| if shape.spreads { slots.min(1) } else { slots }).fold(0, u32::saturating_add)
            >= shape.slots
    };
    if fits(&free) {
        return Vec::new();
    }
    let mut all: Vec<Victim> =
        gangs.iter().filter_map(|(gang, holdings)| victim(round, gang, holdings, priority)).collect();
    all.sort_by_key(|victim| (victim.priority, Reverse(victim.gang.since())));
    let mut chosen: Vec<Victim> = Vec::new();
    for victim in all {
        if fits(&free) {
            break;
        }
        if victim.frees.keys().any(|rank| free.contains_key(rank)) {
            change(&mut free, &victim.frees, u32::saturating_add);
            chosen.push(victim);
        }
    }
    if !fits(&free) {
        return Vec::new();
    }
    // Those that cost most first: some of the cheap ones may have been of no use.
    let mut needed = Vec::new();
    for victim in chosen.into_iter().rev() {
        change(&mut free, &victim.frees, u32::saturating_sub);
        if !fits(&free) {
            change(&mut free, &victim.frees, u32::saturating_add);
            needed.push(victim.gang);
        }
    }
    needed
}

fn change(free: &mut BTreeMap<Rank, u32>, by: &BTreeMap<Rank, u32>, how: fn(u32, u32) -> u32) {
    for (rank, cores) in by {
        if let Some(free) = free.get_mut(rank) {
            *free = how(*free, *cores);
        }
    }
}

/// `gang`, if all of it runs, it has a lower priority than that, and the bridge may write there.
fn victim<'a>(round: &Round, gang: &'a Gang<'a>, holdings: &Holdings<'a>, than: i32) -> Option<Victim<'a>> {
    let pods: Vec<&PodView> =
        gang.members.iter().copied().filter(|pod| pod.node.is_some() && !pod.is_terminal()).collect();
    let priority = pods.iter().map(|pod| pod.priority).max()?;
    let is_settled = gang.waiting().next().is_none() && pods.iter().all(|pod| pod.stays()) && !round.is_busy(&gang.id);
    let may_write = round.world.namespaces.contains(&gang.id.namespace) && !round.world.refused.contains_key(&gang.id);
    if priority >= than || !is_settled || !may_write {
        return None;
    }
    let mut frees: BTreeMap<Rank, u32> = BTreeMap::new();
    for slot in holdings.jobs.iter().flat_map(|held| held.job.held()) {
        let cores = frees.entry(slot.rank).or_default();
        *cores = cores.saturating_add(u32::try_from(slot.cores.len()).unwrap_or(u32::MAX));
    }
    Some(Victim { gang, priority, frees })
}

fn go(round: &mut Round, memory: &mut Memory, victim: &Gang, for_gang: &Gang) {
    let running = || victim.members.iter().copied().filter(|pod| pod.node.is_some() && pod.stays());
    running().for_each(|pod| tell_preempted(round, memory, pod, for_gang));
    round.actions.push(Action::Preempt {
        gang: victim.id.clone(),
        pods: running().map(PodRef::from).collect(),
        // Its controller would make evicted pods again at once, and count them as failures.
        job: victim.job.filter(|job| is_whole_job(victim, job)).map(KubeJobRef::from),
    });
}
