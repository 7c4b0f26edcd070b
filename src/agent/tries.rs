//! Failures in a row, and when to try again. Pure: time and chance are told.

use std::time::{Duration, Instant};

use super::decide::{Assignment, Step};
use crate::{api::RosterEntry, chance::spread};

/// The longest pause between two tries.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The same where nothing is wrong here: others have to do something first, and will.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// A broker that lived longer than this is not one that dies at once.
const GROWN_UP: Duration = Duration::from_secs(30);

/// So many refusals in a row are no passing weakness of a host that has just come up.
const REFUSALS: u32 = 3;
/// So many installations that fail in a row, two minutes at the least, are not of a moment.
const INSTALLATIONS: u32 = 8;

/// Why a step was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// One sentence.
    pub words: String,
    /// Nothing is wrong with this node.
    pub waiting: bool,
    /// Time alone does not heal it.
    pub lasting: bool,
    /// Any user of the host can bring it about: it is no reason to give an epoch up.
    pub by_others: bool,
}

/// What is tried: a step under a generation of the FluxInstance's spec. Another one is tried at once, whatever has failed
/// before it: it may be the cure.
#[derive(Debug, Clone)]
struct Attempt {
    step: Step,
    generation: i64,
}

impl Attempt {
    fn is(&self, step: &Step, generation: i64) -> bool {
        // A roster in which only others have changed is no news for this node, nor is another attempt at the same.
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
pub struct Tries {
    last: Option<(Attempt, Trouble, Instant)>,
    failures: u32,
}

impl Tries {
    /// The step failed. By `chance`, from 0 to 1, it rests for up to half more: many nodes fail for one reason. Returns how
    /// long.
    pub fn failed(&mut self, step: &Step, generation: i64, trouble: Trouble, now: Instant, chance: f64) -> Duration {
        self.failures = if self.is_about(step, generation) { self.failures.saturating_add(1) } else { 1 };
        let longest = if trouble.waiting { MAX_WAIT } else { MAX_PAUSE };
        let pause = spread(pause(self.failures).min(longest), chance);
        self.last = Some((Attempt { step: step.clone(), generation }, trouble, now + pause));
        pause
    }

    /// It worked, or nothing is to be done.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Why this very step failed last.
    pub fn trouble(&self, step: &Step, generation: i64) -> Option<&Trouble> {
        self.last.as_ref().filter(|_| self.is_about(step, generation)).map(|(_, trouble, _)| trouble)
    }

    /// The step that has failed is being tried again, and this is in its way by now.
    pub fn reword(&mut self, step: &Step, generation: i64, words: &str) {
        let is_about = self.is_about(step, generation);
        if let Some((_, trouble, _)) = self.last.as_mut().filter(|_| is_about) {
            words.clone_into(&mut trouble.words);
        }
    }

    /// Why no broker gets so far here as to be started, again and again.
    pub fn keeps_refusing(&self, step: &Step, generation: i64) -> Option<&str> {
        let many = match step {
            Step::Preflight | Step::Start(_) => REFUSALS,
            Step::Install { .. } => INSTALLATIONS,
            _ => return None,
        };
        let trouble = self.trouble(step, generation)?;
        (!trouble.waiting && !trouble.by_others && self.failures >= many).then_some(trouble.words.as_str())
    }

    /// How long this step still has to wait.
    pub fn rest(&self, step: &Step, generation: i64, now: Instant) -> Option<Duration> {
        let (_, _, again) = self.last.as_ref().filter(|_| self.is_about(step, generation))?;
        again.checked_duration_since(now).filter(|rest| !rest.is_zero())
    }

    fn is_about(&self, step: &Step, generation: i64) -> bool {
        self.last.as_ref().is_some_and(|(attempt, _, _)| attempt.is(step, generation))
    }
}

/// Starts in a row of a broker that does not live.
#[derive(Debug, Default)]
pub struct Starts {
    last: Option<(Attempt, Instant)>,
    chance: f64,
    /// So many in a row, each of which lived for a short time only.
    count: u32,
    /// So many in a row have ended without ever being online.
    stillborn: u32,
    /// The last one was online.
    was_online: bool,
    last_words: Option<String>,
}

impl Starts {
    /// The broker was started. By `chance`, from 0 to 1, the next start waits for up to half more: those below a broker that
    /// dies die with it.
    pub fn started(&mut self, step: &Step, generation: i64, now: Instant, chance: f64) {
        let again = self.last.as_ref().is_some_and(|(attempt, _)| attempt.is(step, generation));
        self.count = if again && !self.is_grown_up(now) { self.count.saturating_add(1) } else { 1 };
        self.stillborn = if again && !self.was_online { self.stillborn.saturating_add(1) } else { 0 };
        (self.was_online, self.chance) = (false, chance);
        if !again {
            self.last_words = None;
        }
        self.last = Some((Attempt { step: step.clone(), generation }, now));
    }

    /// What was seen of it since: that it lives, that it is online, or its last words.
    pub fn seen(&mut self, alive: bool, online: bool, died: Option<&str>, now: Instant) {
        self.was_online |= online;
        if alive && self.is_grown_up(now) {
            self.count = 0;
            self.stillborn = 0;
            self.last_words = None;
        }
        if let Some(words) = died {
            self.last_words = Some(words.to_owned());
        }
    }

    /// The last one was online.
    pub fn was_online(&self) -> bool {
        self.was_online
    }

    /// It was stopped with intent.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// The last words of a broker of `epoch` that was started again and again and never came up: kept while the next one is
    /// tried, so that the message stands still. Those of an epoch before are none: this one may be what mends it.
    pub fn keeps_dying(&self, epoch: u64) -> Option<&str> {
        let of_epoch = matches!(&self.last, Some((Attempt { step: Step::Start(own), .. }, _)) if own.epoch == epoch);
        self.last_words.as_deref().filter(|_| of_epoch && self.stillborn > 0 && !self.was_online)
    }

    /// How long ago it was started.
    pub fn age(&self, now: Instant) -> Option<Duration> {
        self.last.as_ref().map(|(_, started)| now.saturating_duration_since(*started))
    }

    /// How long the next start has to wait: the first restart is free.
    pub fn rest(&self, step: &Step, generation: i64, now: Instant) -> Option<Duration> {
        let (_, started) = self.last.as_ref().filter(|(attempt, _)| attempt.is(step, generation) && self.count > 1)?;
        (*started + spread(pause(self.count - 1), self.chance))
            .checked_duration_since(now)
            .filter(|rest| !rest.is_zero())
    }

    fn is_grown_up(&self, now: Instant) -> bool {
        self.age(now).is_none_or(|age| age > GROWN_UP)
    }
}

/// 1 s, 2 s, 4 s, … 60 s.
fn pause(failures: u32) -> Duration {
    Duration::from_secs(1 << failures.saturating_sub(1).min(6)).min(MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::roster::tests::roster;

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
    fn the_pauses_double_up_to_a_minute_and_a_wait_up_to_ten_seconds() {
        let now = Instant::now();
        for (waiting, expected) in [(false, [1, 2, 4, 8, 16, 32, 60, 60]), (true, [1, 2, 4, 8, 10, 10, 10, 10])] {
            let mut tries = Tries::default();
            let rests = expected.map(|_| {
                tries.failed(&install("a"), 1, trouble(waiting), now, 0.0);
                tries.rest(&install("a"), 1, now).map_or(0, |rest| rest.as_secs())
            });
            assert_eq!(rests, expected);
        }
        let mut tries = Tries::default();
        tries.failed(&install("a"), 1, trouble(false), now, 1.0);
        assert_eq!(tries.rest(&install("a"), 1, now), Some(Duration::from_millis(1500)), "half more, by chance");
    }

    #[test]
    fn a_start_that_is_refused_again_and_again_is_told_as_one() {
        let now = Instant::now();
        for (step, waiting, many, told) in [
            (start(1, "node1"), false, 3, true),
            (Step::Preflight, false, 3, true),
            (start(1, "node1"), true, 3, false),
            (install("a"), false, 8, true),
            (install("a"), true, 8, false),
            (Step::Prepare { digest: "a".to_owned() }, false, 100, false),
        ] {
            let mut tries = Tries::default();
            for _ in 1..many {
                tries.failed(&step, 1, trouble(waiting), now, 0.0);
                assert_eq!(tries.keeps_refusing(&step, 1), None, "{step:?}: it may be over in a moment");
            }
            tries.failed(&step, 1, trouble(waiting), now, 0.0);
            assert_eq!(tries.keeps_refusing(&step, 1).is_some(), told, "{step:?}");
            assert_eq!(tries.keeps_refusing(&step, 2), None, "another spec may be the cure");
        }
    }

    #[test]
    fn a_port_that_a_user_keeps_is_never_what_an_epoch_is_given_up_for() {
        let (mut tries, now) = (Tries::default(), Instant::now());
        for _ in 0..100 {
            tries.failed(&Step::Preflight, 1, Trouble { by_others: true, ..trouble(false) }, now, 0.0);
        }
        assert_eq!(tries.keeps_refusing(&Step::Preflight, 1), None);
    }

    #[test]
    fn a_pause_ends() {
        let (mut tries, now) = (Tries::default(), Instant::now());
        tries.failed(&install("a"), 1, trouble(false), now, 0.0);
        assert_eq!(tries.rest(&install("a"), 1, now + Duration::from_secs(1)), None);
        assert_eq!(tries.trouble(&install("a"), 1), Some(&trouble(false)));
    }

    #[test]
    fn another_step_or_another_spec_is_tried_at_once_and_without_the_old_words() {
        let (mut tries, now) = (Tries::default(), Instant::now());
        tries.failed(&install("a"), 1, trouble(false), now, 0.0);
        for (step, generation) in [(install("b"), 1), (install("a"), 2), (Step::Preflight, 1)] {
            assert_eq!(tries.rest(&step, generation, now), None);
            assert_eq!(tries.trouble(&step, generation), None);
        }
        tries.failed(&install("b"), 2, trouble(false), now, 0.0);
        assert_eq!(tries.rest(&install("b"), 2, now), Some(Duration::from_secs(1)));
    }

    #[test]
    fn a_broker_that_dies_at_once_is_started_again_ever_more_slowly() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        let rests = [0, 1, 2, 4].map(|_| {
            starts.started(&start(1, "node1"), 1, now, 0.0);
            starts.seen(false, false, Some("broker.err[0]: no"), now);
            // Others have joined meanwhile.
            starts.rest(&start(2, "node1"), 1, now).map_or(0, |rest| rest.as_secs())
        });
        assert_eq!(rests, [0, 1, 2, 4]);
        starts.seen(true, false, None, now);
        assert_eq!(starts.keeps_dying(1), Some("broker.err[0]: no"));
        assert_eq!(starts.keeps_dying(2), None, "the next epoch has not been tried yet, and may be the cure");
        for (step, generation) in [(start(1, "node2"), 1), (start(1, "node1"), 2)] {
            assert_eq!(starts.rest(&step, generation, now), None);
        }
        starts.started(&start(1, "node1"), 2, now, 0.0);
        assert_eq!(starts.keeps_dying(1), None);
    }

    #[test]
    fn a_broker_that_was_online_is_none_that_never_comes_up() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        starts.started(&start(1, "node1"), 1, now, 0.0);
        starts.seen(true, true, None, now);
        starts.seen(false, false, Some("killed"), now);
        starts.started(&start(1, "node1"), 1, now, 0.0);
        assert_eq!(starts.keeps_dying(1), None);
        starts.seen(false, false, Some("broker.err[0]: no"), now);
        starts.started(&start(1, "node1"), 1, now, 0.0);
        assert_eq!(starts.keeps_dying(1), Some("broker.err[0]: no"));
    }

    #[test]
    fn a_broker_that_has_lived_is_started_again_at_once() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        for _ in 0..3 {
            starts.started(&start(1, "node1"), 1, now, 0.0);
            starts.seen(false, false, Some("broker.err[0]: no"), now);
        }
        let later = now + Duration::from_secs(31);
        starts.seen(true, false, None, later);
        assert_eq!(starts.keeps_dying(1), None);
        starts.started(&start(1, "node1"), 1, later, 0.0);
        assert_eq!(starts.rest(&start(1, "node1"), 1, later), None);
    }
}
