//! Among gangs of one urgency, the one that came into the queue first is first, though a job that was submitted again is behind the
//! others.

use super::{
    round::Round,
    start::{Queued, may_change_at},
};
use crate::{
    gangs::Gang,
    record::JobRecord,
    time::{Millis, SECOND},
};

/// How much later a gang must have come than one that was submitted after it. Creation times are whole seconds, and pods are seen
/// a moment after they were created.
const LATER_BY: Millis = 2 * SECOND;

/// A gang's place among those of its urgency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueuePlace {
    /// [`JobRecord::queued`]: not the age of the gang, because one that could not be submitted for hours must not go before those that
    /// have waited meanwhile.
    queued: Millis,
    /// When its last pod was created. Decides if `queued` is equal, as it is for all gangs after Flux has lost its queue.
    created: Millis,
}

impl QueuePlace {
    /// The place of a job of `gang` with this record.
    pub fn of(gang: &Gang, record: &JobRecord) -> Self {
        Self { queued: record.queued, created: gang.since() }
    }

    fn is_behind(self, other: Self) -> bool {
        let is_later = |this: Millis, that: Millis| this > that.saturating_add(LATER_BY);
        is_later(self.queued, other.queued) || (self.queued == other.queued && is_later(self.created, other.created))
    }
}

/// Submits again the jobs of gangs that came later than one behind them.
pub(super) fn keep_order(round: &mut Round, mut queue: Vec<Queued>) {
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
    for Queued { job, request, .. } in again {
        let may_change = may_change_at(job);
        match round.now >= may_change {
            true => round.resubmit(job, request),
            false => round.wake_at(may_change),
        }
    }
}
