//! What the bridge says about pods.

use super::{memory::Memory, round::Round};
use crate::{
    action::{Action, PodRef, Reason, Tell},
    gangs::{Gang, Problem},
    jobs::{Job, JobState},
    place::NoPlace,
    pod::PodView,
    time::{Millis, Moment, SECOND},
};

/// How long a gang waits in the queue before the bridge says so about its pods.
const TELL_AFTER: Millis = 5 * SECOND;
/// Longest message, in characters: the policy `flux-distribute-own-pod` permits a condition 4096. The words of an API server, of a webhook or of
/// Flux may be longer.
const LONGEST_MESSAGE: usize = 4096;
/// How long a gang waits before its pods are Unschedulable, so that an autoscaler adds nodes for them.
pub const AUTOSCALE_AFTER: Millis = 30 * SECOND;
/// Shortest time between two messages with the same reason.
const TELL_EVERY: Millis = 60 * SECOND;
/// Most messages of one decision, fewer than the bridge may write at once: one that is decided and not begun would count as told.
const MOST_MESSAGES: usize = 32;
/// How soon the next ones follow.
const MORE_MESSAGES_AFTER: Millis = 100;
/// The bridge tells a gang its place in the queue only up to this one.
const PLACES: usize = 20;
/// How long kubelet may take to take up a pod.
pub(super) const TAKE_UP_WITHIN: Millis = 60 * SECOND;

/// A reason and a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Words {
    reason: Reason,
    message: String,
}

impl Words {
    /// What keeps a gang from being submitted.
    pub fn problem(problem: &Problem) -> Self {
        let reason = match problem {
            Problem::Incomplete { .. }
            | Problem::JobsMissing { .. }
            | Problem::NotFound { .. }
            | Problem::Forbidden(_)
            | Problem::NoVolume(_) => Reason::Incomplete,
            Problem::TooLarge { .. } | Problem::NoSize { .. } | Problem::BadName(_) | Problem::Unsupported(_) => {
                Reason::Refused
            }
            Problem::NotOptedIn(_) => Reason::NotOptedIn,
        };
        Self { reason, message: problem.to_string() }
    }

    /// No node could ever take it.
    pub fn no_place(no_place: &NoPlace) -> Self {
        Self { reason: Reason::Unschedulable, message: no_place.to_string() }
    }

    /// Flux has ended its job: as a rule, because no resources of the instance could satisfy it.
    pub fn ended_by_flux(words: &str) -> Self {
        Self { reason: Reason::Unschedulable, message: format!("Flux has ended its job: {words}") }
    }

    /// Flux or the API server has refused what the bridge wanted for it.
    pub fn refused(words: &str) -> Self {
        Self { reason: Reason::Refused, message: format!("{words}; tried again in a while") }
    }

    /// The gang of `job` has waited in the queue since the moment `queued`; None for the first moments. Sees to it that there is a round
    /// when the words change.
    pub fn queued(round: &mut Round, job: &Job, queued: Moment) -> Option<Self> {
        let (tell_at, autoscale_at) = (queued.saturating_add(TELL_AFTER), queued.saturating_add(AUTOSCALE_AFTER));
        round.wake_at(tell_at);
        round.wake_at(autoscale_at);
        let reason = if round.now < autoscale_at { Reason::Queued } else { Reason::Unschedulable };
        let message = format!("waits in Flux's queue as job {}", job.id);
        (round.now >= tell_at).then_some(Self { reason, message })
    }

    /// Adds the place in the queue, if it is known.
    pub fn with_place(mut self, place: Option<usize>) -> Self {
        if let Some(place) = place {
            self.message = format!("{}, at place {place}", self.message);
        }
        self
    }
}

/// The first [`PLACES`] pending jobs, in the order in which Flux considers them.
pub(super) fn places(round: &Round) -> Vec<broker::job_id::JobId> {
    let mut pending: Vec<_> = round.jobs.iter().filter(|job| job.state == JobState::Pending).collect();
    pending.sort_by_key(|job| (std::cmp::Reverse(job.urgency), job.id));
    pending.into_iter().take(PLACES).map(|job| job.id).collect()
}

/// Tells `words` to the pods of `gang` that wait, unless the bridge has said so before.
pub(super) fn tell_waiting(round: &mut Round, memory: &mut Memory, gang: &Gang, words: &Words) {
    for pod in gang.waiting() {
        tell(round, memory, pod, words);
    }
}

/// Tells about pods that are bound: those that hold more than they ask for, and those that kubelet doesn't start.
pub(super) fn tell_bound(
    round: &mut Round,
    memory: &mut Memory,
    gang: &Gang,
    cores_of: impl Fn(&PodView) -> Option<(u32, u32)>,
) {
    let now = round.now;
    for pod in gang.holding(now) {
        if let Some((asked, held)) = cores_of(pod).filter(|(asked, held)| asked < held) {
            let held_words = base::words::many(held, "core");
            let message = format!(
                "asks for {} and holds {held_words}, as the largest pod of gang {} does",
                base::words::many(asked, "core"),
                gang.id
            );
            tell(round, memory, pod, &Words { reason: Reason::Padded, message });
        }
        if is_not_taken_up(pod, now) {
            let message = format!("kubelet of node {} has not taken it up", pod.node.as_deref().unwrap_or_default());
            tell(round, memory, pod, &Words { reason: Reason::NotStarted, message });
        } else if let Some(bound) = pod.bound.filter(|_| !pod.is_taken_up) {
            round.wake_at(bound.saturating_add(TAKE_UP_WITHIN));
        }
    }
}

/// True if kubelet has had [`TAKE_UP_WITHIN`] for `pod` and has not taken it up.
pub(super) fn is_not_taken_up(pod: &PodView, now: Moment) -> bool {
    let bound = pod.bound.filter(|_| pod.stays() && !pod.is_taken_up);
    bound.is_some_and(|bound| now >= bound.saturating_add(TAKE_UP_WITHIN))
}

/// Tells `words` to `pod`, but not
/// - if the pod shows them already, or the bridge has said the same before,
/// - within [`TELL_EVERY`] after another message with the same reason,
/// - if this decision has [`MOST_MESSAGES`] already. The next one tells them.
fn tell(round: &mut Round, memory: &mut Memory, pod: &PodView, words: &Words) {
    let Words { reason, message } = words;
    let is_condition = reason.is_condition();
    let message: String = message.chars().take(LONGEST_MESSAGE).collect();
    let shown = pod.plan.as_ref().and_then(|plan| plan.told.as_ref());
    let has_reason = shown.is_some_and(|(shown, _)| shown == reason.word());
    let has_message = shown.is_some_and(|(_, shown)| *shown == message);
    if is_condition && has_reason && has_message {
        return;
    }
    let told = memory.told.entry(pod.uid.clone()).or_default();
    if let Some((before, at)) = told.get(reason) {
        let again = at.saturating_add(TELL_EVERY);
        let is_same = *before == message && (!is_condition || has_reason);
        if is_same || round.now < again {
            if !is_same {
                round.wake_at(again);
            }
            return;
        }
    }
    if round.messages >= MOST_MESSAGES {
        round.wake_at(round.now + MORE_MESSAGES_AFTER);
        return;
    }
    round.messages += 1;
    // This condition replaces the one before. If that becomes true again, the bridge must tell it again.
    if is_condition {
        told.clear();
    }
    told.insert(*reason, (message.clone(), round.now));
    let reason = *reason;
    round.actions.push(Action::Tell(Box::new(Tell { pod: PodRef::from(pod), reason, message })));
}
