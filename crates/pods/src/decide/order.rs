//! Orders gangs of one urgency: the highest priority first, then the gang that came into the queue first. To move behind another
//! one, a job is submitted again. A job whose urgency an administrator has changed (`flux job urgency`) stays where it is.

use super::{
    queue::{QueuePlace, WaitingJob, may_change_at},
    round::Round,
};

/// Submits again the jobs of gangs that came later than one behind them.
pub(super) fn keep_order(round: &mut Round, mut queue: Vec<WaitingJob>) {
    queue.retain(|queued| queued.job.urgency == queued.request.urgency);
    queue.sort_by_key(|queued| (queued.job.urgency, std::cmp::Reverse(queued.job.id)));
    let mut first: Option<(u8, QueuePlace)> = None;
    let mut again = Vec::new();
    for queued in queue {
        let urgency = queued.job.urgency;
        let first_after_it = first.filter(|(of, _)| *of == urgency).map(|(_, place)| place);
        if first_after_it.is_some_and(|other| queued.place.is_behind(other)) {
            again.push(queued);
        } else {
            first = Some((urgency, first_after_it.map_or(queued.place, |other| other.min(queued.place))));
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
