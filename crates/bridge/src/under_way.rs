//! The actions that were begun and whose result does not show yet.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use api::Rank;
use base::error_chain;
use broker::job_id::JobId;
use cluster::ApiError;
use pods::{
    action::{Action, PlaceholderStep, PodRef, ShadowStep},
    facts::Facts,
    jobs::Jobs,
    record::GangId,
    world::{PAUSE, Pods},
};

/// After an answer, how long its result may take to show. Then the action is forgotten, and decided again if it is still right.
const SHOWS_WITHIN: Duration = Duration::from_secs(10);
/// How long an action is left alone whose answer was lost, or that was refused and is for no gang: neither a server that does not answer
/// nor one that says no must be asked all the time.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// How long a node is left alone whose placeholder pod was refused: somebody has to mend that.
const PLACEHOLDER_AGAIN_AFTER: Duration = Duration::from_secs(30);
/// How long the status tells of a refusal. [`PLACEHOLDER_AGAIN_AFTER`] is shorter: the next refusal renews the message before it ends.
const TOLD_FOR: Duration = Duration::from_mins(1);
/// At most so many bindings at a time.
const BINDINGS: usize = 8;
/// At most so many other actions at a time.
const OTHERS: usize = 64;

/// How an action was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It was done. A submission has a job.
    Done(Option<JobId>),
    /// It was certainly not done.
    Failed,
    /// As [`Outcome::Failed`], and it would be refused again, with this message.
    Refused(String),
    /// Nothing makes way, or not all, because the API server does not let these pods go, by uid. They make way for none for this long.
    Protected(BTreeSet<String>, Duration),
    /// As [`Outcome::Failed`]: Flux gives these ranks no jobs now, so none that is for others too is to be for one of them.
    Apart(Vec<Rank>),
    /// As [`Outcome::Failed`], and it must not be tried again for this long.
    Busy(Duration),
    /// It may have been done.
    Lost,
}

/// What an error of the API server says about the action that it answers.
impl From<&ApiError> for Outcome {
    fn from(error: &ApiError) -> Self {
        match (error.busy_for(), error.code()) {
            (Some(pause), _) => Outcome::Busy(pause),
            // A conflict says nothing: the binding before it may have been ours.
            (None, None | Some(409 | 500..)) => Outcome::Lost,
            (None, Some(404)) => Outcome::Failed,
            (None, Some(_)) => Outcome::Refused(error_chain(error)),
        }
    }
}

struct Begun {
    number: u64,
    action: Action,
    progress: Progress,
}

/// How far an action is.
enum Progress {
    /// It has not been answered.
    Asked,
    /// It was done. Its result shows before this moment, or the action is forgotten. A submission has a job.
    Done(Option<JobId>, Instant),
    /// It must not begin again before this moment.
    Paused(Instant),
}

/// See the module.
#[derive(Default)]
pub(crate) struct UnderWay {
    last: u64,
    begun: Vec<Begun>,
    refused: BTreeMap<GangId, (String, Instant)>,
    refused_ranks: BTreeMap<Rank, Instant>,
    refused_together: BTreeMap<Rank, Instant>,
    /// Until when.
    protected: BTreeMap<String, Instant>,
    /// The last placeholder pod that was refused.
    refused_placeholder: Option<(String, Instant)>,
}

impl UnderWay {
    /// True if `action` may begin beside the others.
    pub(crate) fn has_room_for(&self, action: &Action) -> bool {
        let is_binding = |action: &Action| matches!(action, Action::Bind(_));
        let same = self.begun.iter().filter(|begun| is_binding(&begun.action) == is_binding(action));
        same.filter(|begun| matches!(begun.progress, Progress::Asked)).count()
            < if is_binding(action) { BINDINGS } else { OTHERS }
    }

    /// Notes that an action begins. Returns its number.
    pub(crate) fn begin(&mut self, action: Action) -> u64 {
        self.last += 1;
        self.begun.push(Begun { number: self.last, action, progress: Progress::Asked });
        self.last
    }

    /// Notes an answer. Returns the action if it may have been done and nothing tells.
    pub(crate) fn note_outcome(&mut self, number: u64, answer: Outcome, now: Instant) -> Option<Action> {
        let at = self.begun.iter().position(|begun| begun.number == number)?;
        let begun = &mut self.begun[at];
        match answer {
            Outcome::Done(job) => begun.progress = Progress::Done(job, now + SHOWS_WITHIN),
            Outcome::Busy(pause) => begun.progress = Progress::Paused(now + pause),
            Outcome::Failed => drop(self.begun.remove(at)),
            Outcome::Apart(ranks) => {
                self.begun.remove(at);
                self.refused_together.extend(ranks.into_iter().map(|rank| (rank, now)));
            }
            Outcome::Protected(pods, pause) => {
                self.begun.remove(at);
                self.protected.extend(pods.into_iter().map(|uid| (uid, now + pause)));
            }
            Outcome::Refused(words) => match (begun.action.paused_by_refusal().cloned(), &begun.action) {
                (Some(gang), _) => {
                    self.begun.remove(at);
                    self.refused.insert(gang, (words, now));
                }
                (None, Action::Shadow(step)) => {
                    let ranks = if step.asks_for_many() { &mut self.refused_together } else { &mut self.refused_ranks };
                    ranks.extend(step.ranks.iter().map(|rank| (*rank, now)));
                    self.begun.remove(at);
                }
                (None, Action::Placeholder(_)) => {
                    begun.progress = Progress::Paused(now + PLACEHOLDER_AGAIN_AFTER);
                    // The first words stay: those of each node would change the status all the time.
                    let words = self.refused_placeholder().map_or(words, str::to_owned);
                    self.refused_placeholder = Some((words, now));
                }
                (None, _) => begun.progress = Progress::Paused(now + AGAIN_AFTER),
            },
            Outcome::Lost => {
                begun.progress = Progress::Paused(now + AGAIN_AFTER);
                return Some(begun.action.clone());
            }
        }
        None
    }

    /// What was refused less than [`PAUSE`] ago, by gang, with the words of who refused it.
    pub(crate) fn refused(&mut self) -> BTreeMap<GangId, String> {
        self.refused.retain(|_, (_, at)| at.elapsed() < Duration::from_millis(PAUSE.unsigned_abs()));
        self.refused.iter().map(|(gang, (words, _))| (gang.clone(), words.clone())).collect()
    }

    /// The ranks for which a shadow job was refused less than [`PAUSE`] ago.
    pub(crate) fn refused_ranks(&mut self) -> BTreeSet<Rank> {
        keep_recent(&mut self.refused_ranks)
    }

    /// The ranks of shadow jobs for several ranks that were refused less than [`PAUSE`] ago, or that Flux gave no jobs then.
    pub(crate) fn refused_together(&mut self) -> BTreeSet<Rank> {
        keep_recent(&mut self.refused_together)
    }

    /// The pods that make way for none now, by uid.
    pub(crate) fn protected(&mut self, now: Instant) -> BTreeSet<String> {
        self.protected.retain(|_, until| now < *until);
        self.protected.keys().cloned().collect()
    }

    /// Why a placeholder pod was refused in the last minute.
    pub(crate) fn refused_placeholder(&self) -> Option<&str> {
        let (words, at) = self.refused_placeholder.as_ref()?;
        (at.elapsed() < TOLD_FOR).then_some(words)
    }

    /// When the next of them changes by itself: it may be tried again, or is forgotten.
    pub(crate) fn due(&self) -> Option<Instant> {
        let begun = self.begun.iter().filter_map(|begun| match begun.progress {
            Progress::Asked => None,
            Progress::Done(_, until) | Progress::Paused(until) => Some(until),
        });
        let refused = self.refused.values().map(|(_, at)| at);
        let refused = refused.chain(self.refused_ranks.values()).chain(self.refused_together.values());
        let refused = refused.map(|at| *at + Duration::from_millis(PAUSE.unsigned_abs()));
        begun.chain(refused).chain(self.protected.values().copied()).min()
    }

    /// Forgets the actions whose result shows, and those that may be tried again.
    pub(crate) fn settle(&mut self, jobs: &Jobs, pods: &Pods, facts: &Facts, now: Instant) {
        self.begun.retain(|begun| match begun.progress {
            Progress::Asked => true,
            Progress::Done(job, until) => now < until && !shows(&begun.action, job, jobs, pods, facts),
            Progress::Paused(until) => now < until,
        });
    }

    /// The actions.
    pub(crate) fn actions(&self) -> Vec<Action> {
        self.begun.iter().map(|begun| begun.action.clone()).collect()
    }
}

/// Forgets the ranks that were refused [`PAUSE`] ago, and returns the others.
fn keep_recent(refused: &mut BTreeMap<Rank, Instant>) -> BTreeSet<Rank> {
    refused.retain(|_, at| at.elapsed() < Duration::from_millis(PAUSE.unsigned_abs()));
    refused.keys().copied().collect()
}

/// The pod is being deleted, or is gone.
fn is_going(pod: &PodRef, pods: &Pods) -> bool {
    pods.by_uid.get(&pod.uid).is_none_or(|pod| pod.is_deleting() || pod.gone.is_some())
}

fn shows(action: &Action, job: Option<JobId>, jobs: &Jobs, pods: &Pods, facts: &Facts) -> bool {
    let has_ended = |job: &JobId| jobs.get(*job).is_none_or(|job| !job.is_active());
    let is_there = || job.is_none_or(|job| jobs.get(job).is_some());
    match action {
        Action::Submit(_) => is_there(),
        Action::Resubmit { job: old, .. } => has_ended(old) && is_there(),
        Action::Cancel { job, .. } | Action::Finish { job, .. } => has_ended(job),
        // Of several jobs, the last one shows last.
        Action::Shadow(ShadowStep { cancel, .. }) => cancel.iter().all(has_ended) && is_there(),
        Action::Bind(binding) => pods.by_uid.get(&binding.pod.uid).is_none_or(|pod| pod.node.is_some()),
        Action::Tell(tell) => pods.by_uid.get(&tell.pod.uid).and_then(|pod| pod.plan.as_ref()).is_none_or(|plan| {
            let told = plan.told.as_ref().map(|(reason, message)| (reason.as_str(), message.as_str()));
            !tell.reason.is_condition() || told == Some((tell.reason.word(), tell.message.as_str()))
        }),
        Action::Evict { pods: evicted, .. } => evicted.iter().all(|pod| is_going(pod, pods)),
        Action::Preempt { victims, .. } => {
            victims.iter().flat_map(|victim| &victim.pods).all(|pod| is_going(pod, pods))
        }
        Action::SuspendJob { job, .. } => facts.jobs.get(&job.uid).is_none_or(|job| job.is_suspended),
        Action::ResumeJob(job) => facts.jobs.get(&job.uid).is_none_or(|job| !job.has_annotation_to_remove()),
        Action::Placeholder(PlaceholderStep::Make { node, .. }) => {
            pods.by_uid.values().any(|pod| pod.placeholder.is_some() && pod.name == *node)
        }
        Action::Placeholder(PlaceholderStep::Resize { pod, size }) => {
            let found = pods.by_uid.get(&pod.uid).and_then(|pod| pod.placeholder.as_ref());
            found.is_none_or(|placeholder| placeholder.asks == *size)
        }
        Action::Placeholder(PlaceholderStep::Remove { pod }) => is_going(pod, pods),
        Action::StopQueues(_) | Action::StartQueues => true,
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use pods::{
        action::KubeJobRef,
        facts::{KubeJob, SuspendReason},
        record::GangKind,
    };
    use serde_json::json;

    use super::*;

    #[test]
    fn a_failed_action_is_tried_again_at_once_any_other_after_a_pause() {
        for (answer, seconds) in [
            (Outcome::Failed, 0),
            (Outcome::Busy(Duration::from_secs(7)), 7),
            (Outcome::Lost, 1),
            (Outcome::Refused("no".to_owned()), 1),
            (Outcome::Done(None), 10),
        ] {
            let pause = Duration::from_secs(seconds);
            let job = KubeJobRef { namespace: "default".into(), name: "train".into(), uid: "u".into() };
            let suspended_for = Some(SuspendReason::Incomplete);
            let suspended = KubeJob { is_suspended: true, suspended_for, ..KubeJob::default() };
            let facts = Facts { jobs: [("u".to_owned(), suspended)].into(), ..Facts::default() };
            let begin = Instant::now();
            let is_left_alone = |after| {
                let mut under_way = UnderWay::default();
                let number = under_way.begin(Action::ResumeJob(job.clone()));
                under_way.note_outcome(number, answer.clone(), begin);
                assert_eq!(under_way.due(), (seconds > 0).then_some(begin + pause), "{answer:?}");
                under_way.settle(&Jobs::of(0), &Pods::default(), &facts, begin + after);
                assert!(under_way.refused().is_empty());
                !under_way.actions().is_empty()
            };
            let just_before = pause.saturating_sub(Duration::from_millis(1));
            assert_eq!((is_left_alone(just_before), is_left_alone(pause)), (seconds > 0, false), "{answer:?}");
        }
    }

    #[test]
    fn a_pod_that_is_protected_is_left_alone_for_a_while_and_the_gang_that_waits_is_not_refused() {
        let gang = |name: &str| GangId {
            kind: GangKind::Annotated,
            namespace: "default".into(),
            name: name.into(),
            uid: String::new(),
        };
        let mut under_way = UnderWay::default();
        let begin = Instant::now();
        let number = under_way.begin(Action::Preempt { gang: gang("waits"), victims: Vec::new() });
        under_way.note_outcome(number, Outcome::Protected(["web".to_owned()].into(), Duration::from_mins(10)), begin);
        assert!(under_way.actions().is_empty() && under_way.refused().is_empty());
        let end = begin + Duration::from_mins(10);
        assert_eq!(under_way.due(), Some(end));
        assert_eq!(under_way.protected(end - Duration::from_secs(1)), ["web".to_owned()].into());
        assert!(under_way.protected(end).is_empty());
    }

    #[test]
    fn a_job_that_is_resumed_keeps_no_annotation_of_ours() {
        let job = KubeJobRef { namespace: "default".into(), name: "train".into(), uid: "u".into() };
        for (suspended_for, expected) in [(Some(SuspendReason::Preempted), false), (None, true)] {
            let resumed = KubeJob { suspended_for, ..KubeJob::default() };
            let facts = Facts { jobs: [("u".to_owned(), resumed)].into(), ..Facts::default() };
            let action = Action::ResumeJob(job.clone());
            assert_eq!(shows(&action, None, &Jobs::of(0), &Pods::default(), &facts), expected);
        }
    }

    #[test]
    fn a_refused_placeholder_pod_is_left_alone_for_a_while_and_told() {
        let mut under_way = UnderWay::default();
        let size = pods::placeholder::LEAST;
        let (node, node_uid) = ("n1".to_owned(), "u".to_owned());
        let begin = Instant::now();
        let number = under_way.begin(Action::Placeholder(PlaceholderStep::Make { node, node_uid, size }));
        under_way.note_outcome(number, Outcome::Refused("no namespace".to_owned()), begin);
        assert_eq!(under_way.refused_placeholder(), Some("no namespace"));
        for (after, is_left_alone) in [(29, true), (30, false)] {
            let now = begin + Duration::from_secs(after);
            under_way.settle(&Jobs::of(0), &Pods::default(), &Facts::default(), now);
            assert_eq!(!under_way.actions().is_empty(), is_left_alone, "{after}");
        }
    }

    #[test]
    fn an_error_of_the_api_server_is_refused_failed_busy_or_lost() {
        let seconds = |seconds| Outcome::Busy(Duration::from_secs(seconds));
        for (code, details, expected) in [
            (403, json!({}), None),
            (422, json!({}), None),
            (404, json!({}), Some(Outcome::Failed)),
            (409, json!({}), Some(Outcome::Lost)),
            (500, json!({}), Some(Outcome::Lost)),
            (504, json!({}), Some(Outcome::Lost)),
            (429, json!({}), Some(seconds(1))),
            (429, json!({"retryAfterSeconds": 7}), Some(seconds(7))),
            (429, json!({"retryAfterSeconds": 86_400}), Some(seconds(60))),
            (429, json!({"causes": [{"reason": "DisruptionBudget"}]}), None),
        ] {
            let status: Status = serde_json::from_value(json!({"code": code, "details": details})).unwrap();
            let error = ApiError::Api { what: "bind".to_owned(), source: Box::new(kube::Error::Api(Box::new(status))) };
            let answer = Outcome::from(&error);
            match expected {
                Some(expected) => assert_eq!(answer, expected, "{code} {details}"),
                None => assert!(matches!(answer, Outcome::Refused(_)), "{code} {details}: {answer:?}"),
            }
        }
        assert_eq!(Outcome::from(&ApiError::Timeout("bind".to_owned())), Outcome::Lost);
    }
}
