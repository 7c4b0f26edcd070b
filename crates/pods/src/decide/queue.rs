//! Jobs that wait for resources, and their places among each other.

use std::cmp::Reverse;

use crate::{
    gangs::Gang,
    jobs::Job,
    jobspec::JobRequest,
    pod::PodView,
    record::JobRecord,
    time::{Millis, Moment, SECOND},
};

/// How long a job stays as it was submitted, though it may run on other ranks by now.
const RESUBMIT_AFTER: Millis = 5 * SECOND;
/// How much later a gang must have come than one that was submitted after it. Creation times are whole seconds, and pods are seen
/// a moment after they were created.
const LATER_BY: Millis = 2 * SECOND;

/// A gang's place among those of its urgency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueuePlace {
    /// The highest first: priorities that differ may have one urgency.
    priority: Reverse<i32>,
    /// [`JobRecord::queued`]: not the age of the gang, because one that could not be submitted for hours must not go before those that
    /// have waited meanwhile.
    queued: Moment,
    /// When its last pod was created. Decides if `queued` is equal, as it is for all gangs after Flux has lost its queue.
    created: Moment,
}

impl QueuePlace {
    /// The place of a job of `gang` with this record.
    pub fn of(gang: &Gang, record: &JobRecord) -> Self {
        Self { priority: Reverse(priority(gang.waiting())), queued: record.queued, created: gang.since() }
    }

    /// True if a job in this place must be behind one in the `other`.
    pub fn is_behind(self, other: Self) -> bool {
        if self.priority != other.priority {
            return self.priority > other.priority;
        }
        let is_later = |this: Moment, that: Moment| this > that.saturating_add(LATER_BY);
        is_later(self.queued, other.queued) || (self.queued == other.queued && is_later(self.created, other.created))
    }
}

/// The lowest of the pods' priorities (PriorityClass): a gang runs as a whole or not at all.
pub(super) fn priority<'a>(pods: impl IntoIterator<Item = &'a PodView>) -> i32 {
    pods.into_iter().map(|pod| pod.priority).min().unwrap_or(0)
}

/// A job that waits for resources, and what its gang would ask for today.
pub(super) struct WaitingJob<'a> {
    pub job: &'a Job,
    pub request: JobRequest,
    /// See [`QueuePlace`].
    pub place: QueuePlace,
}

/// When `job` may be replaced, though its gang may run on other ranks, or on none, before that.
pub(super) fn may_change_at(job: &Job) -> Moment {
    job.submitted.saturating_add(RESUBMIT_AFTER)
}
