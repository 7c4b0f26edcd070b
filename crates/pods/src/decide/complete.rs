//! A gang that runs in part is completed: siblings stay, and what waits gets the cores of what has ended.

use std::{cmp::Reverse, collections::BTreeSet};

use api::Rank;
use broker::job_id::JobId;

use super::{
    hold::Holdings,
    memory::Memory,
    queue::WaitingJob,
    request::{is_large_enough, request},
    round::Round,
    start::{Progress, ask, avoided, bind, take_room},
    words::Words,
};
use crate::{
    allocation::Slot,
    check::{Shortfall, check_pod},
    gangs::Gang,
    jobs::JobState,
    jobspec::{FIRST_URGENCY, JobRequest},
    pod::PodView,
    time::{Millis, Moment, SECOND},
};

/// How long a pod waits for the node of its slot to be Ready again before it goes elsewhere.
const NODE_MAY_RETURN: Millis = 60 * SECOND;

/// Binds the pods of `gang` that wait to its free slots, and asks for a slot elsewhere if those are of no use.
pub(super) fn complete<'a>(
    round: &mut Round<'a>,
    memory: &mut Memory,
    gang: &Gang<'a>,
    holdings: &Holdings<'a>,
    queue: &mut Vec<WaitingJob<'a>>,
) -> Progress {
    let mut progress = Progress::default();
    let mut taken: BTreeSet<(JobId, &Slot)> = BTreeSet::new();
    let jobs = holdings.jobs.iter().filter(|held| round.has_unseen(&held.gang_job.record));
    let unseen: BTreeSet<JobId> = jobs.map(|held| held.job.id).collect();
    for pod in gang.waiting() {
        match free_slot(round, memory, holdings, pod, (&taken, &unseen)) {
            Choice::Slot(job, slot) => {
                taken.insert((holdings.jobs[job].job.id, slot));
                progress.needed.insert(holdings.jobs[job].job.id);
                if take_room(round, &[(pod, slot.rank)]) {
                    bind(round, gang, &holdings.jobs[job], pod, slot);
                }
            }
            Choice::Soon(until, job) => {
                progress.needed.insert(job);
                round.wake_at(until);
            }
            Choice::Elsewhere(failing) => {
                let more = elsewhere(round, memory, gang, holdings, pod, &failing, queue);
                progress.needed.extend(more.needed);
                progress.words = more.words.or(progress.words);
            }
        }
    }
    progress
}

enum Choice<'a> {
    /// A slot of the job with this index.
    Slot(usize, &'a Slot),
    /// A slot of the job may be of use until then: its node may be Ready again, or its last pod certainly have ended.
    Soon(Moment, JobId),
    /// There is no slot, or only on these ranks, where it doesn't fit.
    Elsewhere(BTreeSet<Rank>),
}

/// The free slot for `pod`: the one that was meant for it, or for the pod in whose place it is, or else any. Not one of the
/// jobs `unseen`, a pod of which may run though it does not exist, and not one of a job that makes way.
fn free_slot<'a>(
    round: &Round,
    memory: &Memory,
    holdings: &Holdings<'a>,
    pod: &PodView,
    (taken, unseen): (&BTreeSet<(JobId, &Slot)>, &BTreeSet<JobId>),
) -> Choice<'a> {
    let mut free = Vec::new();
    let mut held_back = None;
    for (index, held) in holdings.jobs.iter().enumerate() {
        let record = &held.gang_job.record;
        if memory.preempt.made_way.contains(&held.job.id) {
            continue;
        }
        if (record.pinned.is_some() && !record.lists(&pod.uid)) || !is_large_enough((held.job, held.gang_job), pod) {
            continue;
        }
        for (place, (slot, user)) in held.slots.iter().enumerate() {
            let meant_for = record.members.get(place);
            let is_same = meant_for.is_some_and(|member| member.uid == pod.uid);
            let is_successor = meant_for.is_some_and(|member| member.index.is_some() && member.index == pod.index);
            if user.is_some() || taken.contains(&(held.job.id, slot)) {
                continue;
            }
            if unseen.contains(&held.job.id) {
                held_back = Some(held.job.id);
            } else {
                free.push((Reverse((is_same, is_successor, record.lists(&pod.uid))), index, *slot));
            }
        }
    }
    free.sort();
    let mut failing = BTreeSet::new();
    let mut soon = None;
    for (_, index, slot) in free {
        let shortfall = match round.world.targets.get(&slot.rank) {
            None => Some(Shortfall::Gone),
            Some(target) => check_pod(target, round.usage.all(&target.node), pod),
        };
        match shortfall {
            None => return Choice::Slot(index, slot),
            Some(shortfall) if shortfall.is_passing() => soon = soon.or(Some(holdings.jobs[index].job.id)),
            Some(_) => {}
        }
        failing.insert(slot.rank);
    }
    if let Some(job) = held_back {
        return Choice::Soon(round.now, job);
    }
    let until = pod.created.saturating_add(NODE_MAY_RETURN);
    match soon {
        Some(job) if round.now < until => Choice::Soon(until, job),
        _ => Choice::Elsewhere(failing),
    }
}

/// Asks for one slot, on none of the ranks where `pod` does not fit.
fn elsewhere<'a>(
    round: &mut Round<'a>,
    memory: &mut Memory,
    gang: &Gang<'a>,
    holdings: &Holdings<'a>,
    pod: &'a PodView,
    failing: &BTreeSet<Rank>,
    queue: &mut Vec<WaitingJob<'a>>,
) -> Progress {
    let mut avoided = avoided(round, memory, gang, &[pod], false);
    avoided.extend(failing);
    if !avoided.is_empty() {
        memory.avoided.insert(gang.id.clone(), avoided.clone());
    }
    if gang.spreads() {
        let siblings = gang.holding(round.now).filter_map(|pod| round.ranks.get(pod.node.as_deref()?));
        avoided.extend(siblings);
    }
    let is_meant =
        |held: &&super::hold::Held| held.job.state == JobState::Pending && held.gang_job.record.lists(&pod.uid);
    let pending = holdings.jobs.iter().rev().find(is_meant);
    if let Some(held) = pending.filter(|held| held.gang_job.record.pinned.is_some()) {
        // It has been given cores there before, and gets them when the rank is back. It waits since the pin was submitted: the gang may have
        // come into the queue hours ago.
        return Progress { needed: [held.job.id].into(), words: Words::queued(round, held.job, held.job.submitted) };
    }
    let threads = holdings.jobs.first().map(|held| held.gang_job.record.threads);
    let request = request(round, gang, &[pod], &avoided, (threads, false));
    ask(round, gang, request.map(|request| JobRequest { urgency: FIRST_URGENCY, ..request }), pending, queue)
}
