//! Failures in a row, and when to try again. Pure: callers pass time and chance.

use std::time::{Duration, Instant};

use crate::{inputs::assignment::Assignment, step::Step};
use api::RosterEntry;
use base::chance::spread;

/// The longest pause after a failure.
const MAX_PAUSE: Duration = Duration::from_mins(1);
/// The longest pause if nothing is wrong here and something else must happen first.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// A broker that lived longer than this does not count as one that fails at its start.
const STABLE_AFTER: Duration = Duration::from_secs(30);

/// After this many refusals in a row, the cause is not a host that has just booted.
const REFUSALS: u32 = 3;
/// After this many failed installations in a row, which take two minutes or more, the cause does not pass by itself.
const INSTALLATIONS: u32 = 8;

/// Why a step was not carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// The reason, for people, in one sentence.
    pub words: String,
    /// Nothing is wrong with this node: something else must happen first.
    pub waiting: bool,
    /// Trying again does not help until somebody changes something.
    pub lasting: bool,
    /// Any user of the host can bring it about, so it is no reason to give an epoch up.
    pub by_others: bool,
}

/// A step under a generation of the FluxInstance's spec. A different attempt begins at once, whatever failed before it: it may be
/// the cure.
#[derive(Debug, Clone)]
struct Attempt {
    step: Step,
    generation: i64,
}

impl Attempt {
    fn is(&self, step: &Step, generation: i64) -> bool {
        // A roster in which only other nodes have changed makes no difference for this one.
        let entry = |own: &Assignment| RosterEntry { revision: 0, ..own.entry.clone() };
        let own = |a: &Assignment, b: &Assignment| {
            (a.rank, a.epoch, &a.node_uid) == (b.rank, b.epoch, &b.node_uid) && entry(a) == entry(b)
        };
        self.generation == generation
            && match (&self.step, step) {
                (Step::Start(a), Step::Start(b)) | (Step::Reload(a), Step::Reload(b)) => own(a, b),
                (a, b) => a == b,
            }
    }
}

/// Failures in a row of one step.
#[derive(Debug, Default)]
pub struct Attempts {
    last: Option<(Attempt, Trouble, Instant)>,
    failures: u32,
}

impl Attempts {
    /// Records that the step failed. Returns the pause before the next attempt, which `chance` (0 to 1) makes up to half longer,
    /// because many nodes fail for one reason.
    pub fn failed(&mut self, step: &Step, generation: i64, trouble: Trouble, now: Instant, chance: f64) -> Duration {
        self.failures = if self.is_about(step, generation) { self.failures.saturating_add(1) } else { 1 };
        let longest = if trouble.waiting { MAX_WAIT } else { MAX_PAUSE };
        let pause = spread(pause(self.failures).min(longest), chance);
        self.last = Some((Attempt { step: step.clone(), generation }, trouble, now + pause));
        pause
    }

    /// Records that a step succeeded, or that there was none to carry out.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Why this step failed last; None if another step failed since, or none.
    pub fn trouble(&self, step: &Step, generation: i64) -> Option<&Trouble> {
        self.last.as_ref().filter(|_| self.is_about(step, generation)).map(|(_, trouble, _)| trouble)
    }

    /// Replaces the reason while the step is being tried again.
    pub fn reword(&mut self, step: &Step, generation: i64, words: &str) {
        let is_about = self.is_about(step, generation);
        if let Some((_, trouble, _)) = self.last.as_mut().filter(|_| is_about) {
            words.clone_into(&mut trouble.words);
        }
    }

    /// Why the steps before the start of a broker keep failing here.
    pub fn step_keeps_failing(&self, step: &Step, generation: i64) -> Option<&str> {
        let many = match step {
            Step::Preflight | Step::Start(_) => REFUSALS,
            Step::Install { .. } => INSTALLATIONS,
            _ => return None,
        };
        let trouble = self.trouble(step, generation)?;
        (!trouble.waiting && !trouble.by_others && self.failures >= many).then_some(trouble.words.as_str())
    }

    /// The rest of the pause before this step.
    pub fn rest(&self, step: &Step, generation: i64, now: Instant) -> Option<Duration> {
        let (_, _, again) = self.last.as_ref().filter(|_| self.is_about(step, generation))?;
        again.checked_duration_since(now).filter(|rest| !rest.is_zero())
    }

    /// The last failure was that of an installation.
    pub fn is_about_an_installation(&self) -> bool {
        matches!(&self.last, Some((Attempt { step: Step::Install { .. }, .. }, ..)))
    }

    fn is_about(&self, step: &Step, generation: i64) -> bool {
        self.last.as_ref().is_some_and(|(attempt, _, _)| attempt.is(step, generation))
    }
}

/// Starts in a row of a broker that does not stay up.
#[derive(Debug, Default)]
pub struct Starts {
    last: Option<(Attempt, Instant)>,
    chance: f64,
    /// Starts in a row after which the broker lived only for a short time.
    count: u32,
    /// Starts in a row after which the broker ended without ever being online.
    failed: u32,
    /// The broker of the last start was online.
    was_online: bool,
    last_line: Option<String>,
}

impl Starts {
    /// Records a start. `chance` (0 to 1) makes the pause before the next start up to half longer, because all brokers below one
    /// that ends, end with it.
    pub fn started(&mut self, step: &Step, generation: i64, now: Instant, chance: f64) {
        let again = self.last.as_ref().is_some_and(|(attempt, _)| attempt.is(step, generation));
        self.count = if again && !self.is_stable(now) { self.count.saturating_add(1) } else { 1 };
        self.failed = if again && !self.was_online { self.failed.saturating_add(1) } else { 0 };
        (self.was_online, self.chance) = (false, chance);
        if !again {
            self.last_line = None;
        }
        self.last = Some((Attempt { step: step.clone(), generation }, now));
    }

    /// Records what a round observed of the broker: it lives, it is online, or its last log line.
    pub fn seen(&mut self, alive: bool, online: bool, died: Option<&str>, now: Instant) {
        self.was_online |= online;
        if alive && self.is_stable(now) {
            self.count = 0;
            self.failed = 0;
            self.last_line = None;
        }
        if let Some(words) = died {
            self.last_line = Some(words.to_owned());
        }
    }

    /// The broker of the last start was online.
    pub fn was_online(&self) -> bool {
        self.was_online
    }

    /// Forgets all starts: the agent stopped the broker on purpose.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// The last log line of a broker of `epoch` that was started again and again and never came up. It is kept while the next start
    /// is tried, so that the message does not flicker. An earlier epoch does not count: this one may be the cure.
    pub fn start_keeps_failing(&self, epoch: u64) -> Option<&str> {
        let of_epoch = matches!(&self.last, Some((Attempt { step: Step::Start(own), .. }, _)) if own.epoch == epoch);
        self.last_line.as_deref().filter(|_| of_epoch && self.failed > 0 && !self.was_online)
    }

    /// When the broker was started last.
    pub fn started_at(&self) -> Option<Instant> {
        self.last.as_ref().map(|(_, started)| *started)
    }

    /// The rest of the pause before the next start. The first restart has none.
    pub fn rest(&self, step: &Step, generation: i64, now: Instant) -> Option<Duration> {
        let (_, started) = self.last.as_ref().filter(|(attempt, _)| attempt.is(step, generation) && self.count > 1)?;
        (*started + spread(pause(self.count - 1), self.chance))
            .checked_duration_since(now)
            .filter(|rest| !rest.is_zero())
    }

    fn is_stable(&self, now: Instant) -> bool {
        self.started_at().is_none_or(|started| now.saturating_duration_since(started) > STABLE_AFTER)
    }
}

/// 1 s, 2 s, 4 s, … 60 s.
fn pause(failures: u32) -> Duration {
    Duration::from_secs(1 << failures.saturating_sub(1).min(6)).min(MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::fixture::roster;

    fn install(digest: &str) -> Step {
        Step::Install { digest: digest.to_owned() }
    }

    fn start(revision: u64, broker_name: &str) -> Step {
        let roster = roster(4, &[("node1", 2)]);
        let mut entry = roster.ranks[&0].clone();
        entry.broker_name = broker_name.to_owned();
        Step::Start(Assignment { rank: 0, entry, node_uid: "uid".to_owned(), epoch: 1, revision })
    }

    fn trouble(waiting: bool) -> Trouble {
        Trouble { words: "it is broken".to_owned(), waiting, lasting: false, by_others: false }
    }

    #[test]
    fn pauses_double_up_to_a_minute_and_waits_up_to_ten_seconds() {
        let now = Instant::now();
        for (waiting, expected) in [(false, [1, 2, 4, 8, 16, 32, 60, 60]), (true, [1, 2, 4, 8, 10, 10, 10, 10])] {
            let mut attempts = Attempts::default();
            let rests = expected.map(|_| {
                attempts.failed(&install("a"), 1, trouble(waiting), now, 0.0);
                attempts.rest(&install("a"), 1, now).map_or(0, |rest| rest.as_secs())
            });
            assert_eq!(rests, expected);
        }
        let mut attempts = Attempts::default();
        attempts.failed(&install("a"), 1, trouble(false), now, 1.0);
        assert_eq!(attempts.rest(&install("a"), 1, now), Some(Duration::from_millis(1500)), "half more, by chance");
    }

    #[test]
    fn a_start_that_keeps_being_refused_is_reported() {
        let now = Instant::now();
        for (step, waiting, many, told) in [
            (start(1, "node1"), false, 3, true),
            (Step::Preflight, false, 3, true),
            (start(1, "node1"), true, 3, false),
            (install("a"), false, 8, true),
            (install("a"), true, 8, false),
            (Step::Prepare { digest: "a".to_owned() }, false, 100, false),
        ] {
            let mut attempts = Attempts::default();
            for _ in 1..many {
                attempts.failed(&step, 1, trouble(waiting), now, 0.0);
                assert_eq!(attempts.step_keeps_failing(&step, 1), None, "{step:?}: it may be over in a moment");
            }
            attempts.failed(&step, 1, trouble(waiting), now, 0.0);
            assert_eq!(attempts.step_keeps_failing(&step, 1).is_some(), told, "{step:?}");
            assert_eq!(attempts.step_keeps_failing(&step, 2), None, "another spec may be the cure");
        }
    }

    #[test]
    fn a_port_that_a_user_keeps_never_ends_an_epoch() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        for _ in 0..100 {
            attempts.failed(&Step::Preflight, 1, Trouble { by_others: true, ..trouble(false) }, now, 0.0);
        }
        assert_eq!(attempts.step_keeps_failing(&Step::Preflight, 1), None);
    }

    #[test]
    fn a_pause_ends() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        attempts.failed(&install("a"), 1, trouble(false), now, 0.0);
        assert_eq!(attempts.rest(&install("a"), 1, now + Duration::from_secs(1)), None);
        assert_eq!(attempts.trouble(&install("a"), 1), Some(&trouble(false)));
    }

    #[test]
    fn another_step_or_spec_begins_at_once_and_without_the_old_reason() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        attempts.failed(&install("a"), 1, trouble(false), now, 0.0);
        for (step, generation) in [(install("b"), 1), (install("a"), 2), (Step::Preflight, 1)] {
            assert_eq!(attempts.rest(&step, generation, now), None);
            assert_eq!(attempts.trouble(&step, generation), None);
        }
        attempts.failed(&install("b"), 2, trouble(false), now, 0.0);
        assert_eq!(attempts.rest(&install("b"), 2, now), Some(Duration::from_secs(1)));
    }

    #[test]
    fn a_broker_that_ends_at_once_is_started_with_growing_pauses() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        let rests = [0, 1, 2, 4].map(|_| {
            starts.started(&start(1, "node1"), 1, now, 0.0);
            starts.seen(false, false, Some("broker.err[0]: no"), now);
            // Others have joined meanwhile.
            starts.rest(&start(2, "node1"), 1, now).map_or(0, |rest| rest.as_secs())
        });
        assert_eq!(rests, [0, 1, 2, 4]);
        starts.seen(true, false, None, now);
        assert_eq!(starts.start_keeps_failing(1), Some("broker.err[0]: no"));
        assert_eq!(starts.start_keeps_failing(2), None, "the next epoch has not been tried yet and may help");
        for (step, generation) in [(start(1, "node2"), 1), (start(1, "node1"), 2)] {
            assert_eq!(starts.rest(&step, generation, now), None);
        }
        starts.started(&start(1, "node1"), 2, now, 0.0);
        assert_eq!(starts.start_keeps_failing(1), None);
    }

    #[test]
    fn a_broker_that_was_online_does_not_count_as_failing_to_start() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        starts.started(&start(1, "node1"), 1, now, 0.0);
        starts.seen(true, true, None, now);
        starts.seen(false, false, Some("killed"), now);
        starts.started(&start(1, "node1"), 1, now, 0.0);
        assert_eq!(starts.start_keeps_failing(1), None);
        starts.seen(false, false, Some("broker.err[0]: no"), now);
        starts.started(&start(1, "node1"), 1, now, 0.0);
        assert_eq!(starts.start_keeps_failing(1), Some("broker.err[0]: no"));
    }

    #[test]
    fn a_broker_that_lived_for_long_is_started_again_at_once() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        for _ in 0..3 {
            starts.started(&start(1, "node1"), 1, now, 0.0);
            starts.seen(false, false, Some("broker.err[0]: no"), now);
        }
        let later = now + Duration::from_secs(31);
        starts.seen(true, false, None, later);
        assert_eq!(starts.start_keeps_failing(1), None);
        starts.started(&start(1, "node1"), 1, later, 0.0);
        assert_eq!(starts.rest(&start(1, "node1"), 1, later), None);
    }
}
