//! Orders gangs of one urgency: the highest priority first, then the gang that came into the queue first. To move behind another
//! one, a job is submitted again. A job whose urgency an administrator has changed (`flux job urgency`) stays where it is.

use std::{cmp::Reverse, collections::BTreeMap};

use super::{
    queue::{QueuePlace, WaitingJob, may_change_at, priority},
    round::Round,
};
use crate::{
    action::Action,
    gangs::Gang,
    jobspec::{FIRST_URGENCY, JobRequest, urgency},
    record::GangId,
};

/// Submits again the jobs of gangs that came later than one behind them.
pub(super) fn keep_order(round: &mut Round, mut queue: Vec<WaitingJob>) {
    let again = round.actions.iter().chain(&round.world.under_way).filter_map(submitted_again);
    // Such an action is dropped for now: [`super::may_begin`].
    let again: Vec<_> = again.filter(|request| !round.world.refused.contains_key(&request.record.gang)).collect();
    // For each urgency, the first place of the jobs that have been looked at: from the last in the queue to the first. What is being submitted
    // again will be last.
    let mut first = BTreeMap::new();
    if !again.is_empty() {
        let gangs: BTreeMap<&GangId, &Gang> = round.gangs.iter().map(|(gang, _)| (&gang.id, gang)).collect();
        let place = |request: &JobRequest| {
            let gang = gangs.get(&request.record.gang)?;
            // Where an administrator has put it, it stays, and so do the others.
            let is_own = [FIRST_URGENCY, urgency(priority(gang.waiting()))].contains(&request.urgency);
            is_own.then(|| QueuePlace::of(gang, &request.record))
        };
        first = first_places(again.into_iter().filter_map(|request| Some((request.urgency, place(request)?))));
        // A job that is only submitted would overtake one that has to be cancelled before. The next round has it again.
        let overtakes = |request: &JobRequest| {
            let first = first.get(&request.urgency).filter(|_| request.record.pinned.is_none());
            first.is_some_and(|first| place(request).is_some_and(|place| place.is_behind(*first)))
        };
        round.actions.retain(|action| !matches!(action, Action::Submit(request) if overtakes(request)));
    }
    queue.retain(|queued| queued.job.urgency == queued.request.urgency);
    queue.sort_by_key(|queued| Reverse(queued.job.id));
    let mut again = Vec::new();
    for queued in queue {
        let first_after_it = first.entry(queued.job.urgency).or_insert(queued.place);
        if queued.place.is_behind(*first_after_it) {
            again.push(queued);
        } else {
            *first_after_it = queued.place.min(*first_after_it);
        }
    }
    again.sort_by_key(|queued| (queued.place, queued.job.id));
    for WaitingJob { job, request, .. } in again {
        let may_change = may_change_at(job);
        match round.now >= may_change {
            true => round.resubmit(job, request),
            false => round.wake_at(may_change),
        }
    }
}

fn submitted_again(action: &Action) -> Option<&JobRequest> {
    match action {
        Action::Resubmit { request, .. } => Some(request),
        _ => None,
    }
}

/// The first place of each urgency.
fn first_places(places: impl Iterator<Item = (u8, QueuePlace)>) -> BTreeMap<u8, QueuePlace> {
    let mut first = BTreeMap::new();
    for (urgency, place) in places {
        first.entry(urgency).and_modify(|first: &mut QueuePlace| *first = place.min(*first)).or_insert(place);
    }
    first
}
