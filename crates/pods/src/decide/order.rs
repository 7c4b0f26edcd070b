//! Among gangs of one urgency the older one is first, though a job that was submitted again is behind the others.

use super::{
    round::Round,
    start::{Queued, may_change_at},
};
use crate::time::{Millis, SECOND};

/// How much younger a gang must be than one that was submitted after it. Creation times are whole seconds, and pods are seen
/// a moment after they were created.
const YOUNGER_BY: Millis = 2 * SECOND;

/// Submits again the jobs of gangs that are younger than one behind them.
pub(super) fn keep_order(round: &mut Round, mut queue: Vec<Queued>) {
    queue.sort_by_key(|queued| (queued.job.urgency, std::cmp::Reverse(queued.job.id)));
    let mut oldest: Option<(u8, Millis)> = None;
    let mut again = Vec::new();
    for queued in queue {
        let urgency = queued.job.urgency;
        let behind = oldest.filter(|(of, _)| *of == urgency).map(|(_, since)| since);
        if behind.is_some_and(|behind| queued.since > behind.saturating_add(YOUNGER_BY)) {
            again.push(queued);
        } else {
            oldest = Some((urgency, behind.unwrap_or(Millis::MAX).min(queued.since)));
        }
    }
    again.sort_by_key(|queued| (queued.since, queued.job.id));
    for Queued { job, request, .. } in again {
        let may_change = may_change_at(job);
        match round.now >= may_change {
            true => round.resubmit(job, request),
            false => round.wake_at(may_change),
        }
    }
}
