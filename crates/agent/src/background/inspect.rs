//! Checks now and then whether the environments still are what was installed, and mends them: disks and people damage files, and a
//! library that differs on one node fails the jobs of all.
//!
//! A look runs at idle priority. Looks and mendings run in one task beside the agent's rounds, one at a time, so the broker is
//! supervised meanwhile. An installation or a removal stops a mending, which begins again afterwards: all write below one
//! prefix, and people wait for the other two.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;
use tokio::task::JoinHandle;
use tracing::{debug, info, warn};

use crate::{
    error::{StepError, unexpected},
    execute::install::mend,
    inputs::{node_inputs::NodeInputs, sources::Sources},
    node_ops::NodeOps,
};
use base::{
    chance::{chance, jittered},
    error_chain,
};
use hostapi::{Answer, Difference, Mended, Order, Slice, Verified, VerifyOrder, What};

/// From the agent's start, or the installation, to the first look, which reads all files: what is urgent is done by then.
const FIRST: Duration = Duration::from_secs(20);
/// The agents of all nodes begin at once, and may share one disk: their first looks are spread over this time.
const FIRST_SPREAD: Duration = Duration::from_secs(40);
/// Between two looks at one package set.
const EVERY: Duration = Duration::from_hours(1);
/// Each look after the first hashes one of this many parts, so that every file is hashed once a day.
const PARTS: u32 = 24;
/// From a mending that failed to the next try.
const AGAIN: Duration = Duration::from_mins(10);
/// Until a mending is due again for which preflight or the packages were not known yet.
const LATER: Duration = Duration::from_secs(10);
/// A message names at most this many differences.
const NAMED: usize = 3;

/// What the agent remembers of its looks; all of it can be lost.
#[derive(Default)]
pub struct Inspecting {
    task: Option<Task>,
    /// The installed package sets, by digest.
    sets: BTreeMap<String, Inspected>,
}

struct Task {
    digest: String,
    work: Work,
    outcome: JoinHandle<Result<Answer, StepError>>,
}

/// Work on one package set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Hash these files; None means all.
    Look(Option<Slice>),
    Mend,
}

/// One package set that is installed here.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Inspected {
    /// Number of looks so far.
    looks: u32,
    next_look: Instant,
    /// When to mend it; None if no damage is known.
    mend_at: Option<Instant>,
    /// Its damage, also for a day after it was mended, in words for people.
    words: Option<String>,
    /// Parts that were found undamaged since the last damage.
    whole_parts: u32,
}

/// Which files look number `count`, counted from 0, hashes: the first one all (None), each other one part.
fn part(count: u32) -> Option<Slice> {
    count.checked_sub(1).map(|number| Slice { number: number % PARTS, of: PARTS })
}

/// True if mending can repair it. No package contains an extra file.
fn is_damage(difference: &Difference) -> bool {
    difference.what != What::Extra
}

/// `differences` in a few words.
fn named(differences: &[Difference]) -> String {
    let mut names = differences.iter().take(NAMED).map(ToString::to_string).collect::<Vec<_>>();
    if let Some(more) = differences.len().checked_sub(NAMED).filter(|more| *more > 0) {
        names.push(format!("{more} more"));
    }
    names.join(", ")
}

/// The next work: mending comes before looking, and the longest overdue first.
fn next(sets: &BTreeMap<String, Inspected>, now: Instant) -> Option<(&str, Work)> {
    let due = sets.iter().flat_map(|(digest, set)| {
        let mend = set.mend_at.map(|at| (0, at, digest, Work::Mend));
        mend.into_iter().chain([(1, set.next_look, digest, Work::Look(part(set.looks)))])
    });
    let first = due.filter(|(_, at, ..)| *at <= now).min_by_key(|(order, at, ..)| (*order, *at));
    first.map(|(.., digest, work)| (digest.as_str(), work))
}

impl Inspected {
    fn new(now: Instant, chance: f64) -> Self {
        Self {
            looks: 0,
            next_look: now + FIRST + FIRST_SPREAD.mul_f64(chance),
            mend_at: None,
            words: None,
            whole_parts: 0,
        }
    }

    /// Takes in the `outcome` of `work` on package set `digest`.
    fn learn(&mut self, digest: &str, work: Work, outcome: Result<Answer, StepError>, now: Instant) {
        let error = match (work, outcome) {
            (Work::Look(slice), Ok(Answer::Verified(mut looked))) if looked.len() == 1 => {
                return self.learn_look(digest, slice, looked.remove(0), now);
            }
            (Work::Mend, Ok(Answer::Mended(mended))) => return self.learn_mending(digest, mended, now),
            (_, Ok(other)) => unexpected(&other),
            (_, Err(error)) => error,
        };
        let why = error_chain(&error);
        match work {
            Work::Mend => self.mending_failed(digest, &why, now),
            Work::Look(_) => warn!(
                "package set {digest:.12} could not be checked: {why}; the agent tries again at its next look, and \
                 `flux-distribute verify` does it at once"
            ),
        }
    }

    fn learn_look(&mut self, digest: &str, slice: Option<Slice>, verified: Verified, now: Instant) {
        self.looks = self.looks.saturating_add(1);
        let (damage, extra): (Vec<_>, Vec<_>) = verified.differences.into_iter().partition(is_damage);
        if !extra.is_empty() {
            // Root's own files. Those of other users are damage.
            info!("package set {digest:.12} has files that no package brought: {}", named(&extra));
        }
        if damage.is_empty() {
            debug!(digest, files = verified.files, "the packages are as they were installed");
            self.whole_parts = if slice.is_none() { PARTS } else { self.whole_parts.saturating_add(1) };
            if self.whole_parts >= PARTS {
                (self.words, self.mend_at) = (None, None);
            }
            return;
        }
        let words = format!("package set {digest:.12} is damaged: {}; the agent mends it", named(&damage));
        warn!("{words}");
        (self.words, self.mend_at, self.whole_parts) = (Some(words), Some(now), 0);
    }

    fn learn_mending(&mut self, digest: &str, mended: Mended, now: Instant) {
        let left: Vec<_> = mended.left.into_iter().filter(is_damage).collect();
        if !left.is_empty() {
            return self.mending_failed(digest, &named(&left), now);
        }
        self.mend_at = None;
        if mended.mended.is_empty() {
            info!("package set {digest:.12} was mended by somebody else: nothing differs any more");
            self.words = None;
            return;
        }
        // Kept for a day: the damage may explain a job that failed.
        let words = format!(
            "package set {digest:.12} was damaged and mended at {:.0}: {}; a process that was running then keeps what it had \
             open until it ends",
            Timestamp::now(),
            named(&mended.mended)
        );
        info!("{words}");
        self.words = Some(words);
    }

    fn mending_failed(&mut self, digest: &str, why: &str, now: Instant) {
        let pause = jittered(AGAIN);
        let words = format!(
            "package set {digest:.12} is damaged and could not be mended: {why}; the agent tries again in {} s. If that fails \
             too, check this node's disk and its way to the package source; `flux-distribute verify` lists all that differs",
            pause.as_secs()
        );
        warn!("{words}");
        (self.words, self.mend_at) = (Some(words), Some(now + pause));
    }
}

impl Inspecting {
    /// All damage, in words for people.
    pub fn damage(&self) -> Option<String> {
        let words: Vec<_> = self.sets.values().filter_map(|set| set.words.as_deref()).collect();
        (!words.is_empty()).then(|| words.join("; "))
    }

    /// True while a look or a mending goes on, and until its outcome is taken in.
    pub fn is_at_work(&self) -> bool {
        self.task.is_some()
    }

    /// From now on, looks at the package sets `installed`.
    fn keep(&mut self, installed: &[String], now: Instant, chance: f64) {
        self.sets.retain(|digest, _| installed.contains(digest));
        for digest in installed {
            self.sets.entry(digest.clone()).or_insert_with(|| Inspected::new(now, chance));
        }
    }

    fn begin(
        &mut self,
        digest: &str,
        work: Work,
        task: impl Future<Output = Result<Answer, StepError>> + Send + 'static,
        now: Instant,
    ) {
        let Some(set) = self.sets.get_mut(digest) else { return };
        match work {
            Work::Look(_) => set.next_look = now + jittered(EVERY),
            Work::Mend => set.mend_at = None,
        }
        self.task = Some(Task { digest: digest.to_owned(), work, outcome: tokio::spawn(task) });
    }

    fn mend_later(&mut self, digest: &str, now: Instant) {
        if let Some(set) = self.sets.get_mut(digest) {
            set.mend_at = Some(now + LATER);
        }
    }

    /// Takes in the outcome of the task, if it has ended.
    async fn take_in_ended(&mut self) {
        if let Some(ended) = self.task.take_if(|task| task.outcome.is_finished()) {
            self.take_in(ended).await;
        }
    }

    /// Stops a mending and waits until it holds nothing any more. It begins again when there is time for it.
    pub async fn stop_mending(&mut self) {
        if let Some(mending) = self.task.take_if(|task| task.work == Work::Mend) {
            mending.outcome.abort();
            self.take_in(mending).await;
        }
    }

    async fn take_in(&mut self, Task { digest, work, outcome }: Task) {
        let ended = outcome.await;
        let (Some(set), now) = (self.sets.get_mut(&digest), Instant::now()) else { return };
        match ended {
            Ok(outcome) => set.learn(&digest, work, outcome, now),
            Err(error) if error.is_cancelled() => set.mend_at = Some(now),
            Err(error) => set.learn(&digest, work, Err(StepError::Task(error)), now),
        }
    }
}

impl Inspecting {
    /// Begins the next look or mending, if one is due. It goes on beside the rounds.
    pub async fn inspect(&mut self, ops: &NodeOps, sources: &Sources, inputs: &NodeInputs) {
        let installed: Vec<_> =
            inputs.published.iter().filter(|set| inputs.host.has_environment(set)).cloned().collect();
        self.take_in_ended().await;
        let now = Instant::now();
        self.keep(&installed, now, chance());
        if self.task.is_some() {
            return;
        }
        let Some((digest, work)) = next(&self.sets, now) else { return };
        let (digest, ops) = (digest.to_owned(), ops.clone());
        match work {
            Work::Look(slice) => {
                let Some(state) = &inputs.host.state else { return };
                let prefix = state.prefix.clone();
                let order = VerifyOrder { prefix, digest: Some(digest.clone()), slice, idle: true };
                let task = async move { ops.order(Order::Verify(order)).await };
                self.begin(&digest, work, task, now);
            }
            Work::Mend => {
                let (Some(preflight), Ok(set)) = (inputs.preflight.clone(), sources.published.packages(&digest)) else {
                    // Until then, nothing of it keeps the agent from looking at other sets.
                    return self.mend_later(&digest, now);
                };
                let (packages, peers) = (inputs.spec.packages.clone(), inputs.peers_for(&digest));
                let task = async move { mend(&ops, &preflight, &set, &packages, peers).await };
                self.begin(&digest, work, task, now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_hours(1);

    fn difference(path: &str, what: What) -> Difference {
        Difference { path: path.into(), what }
    }

    fn looked(damaged: &[&str]) -> Result<Answer, StepError> {
        let differences = damaged.iter().map(|path| difference(path, What::Changed)).collect();
        Ok(Answer::Verified(vec![Verified { path: "/x".into(), digest: "x".into(), files: 1, bytes: 1, differences }]))
    }

    fn failed() -> Result<Answer, StepError> {
        Err(StepError::NotYet("no way".to_owned()))
    }

    fn mended(mended: &[&str], left: &[&str]) -> Result<Answer, StepError> {
        let all = |paths: &[&str]| paths.iter().map(|path| difference(path, What::Changed)).collect();
        Ok(Answer::Mended(Mended { mended: all(mended), left: all(left) }))
    }

    fn inspecting(digests: &[&str], now: Instant) -> Inspecting {
        let mut inspecting = Inspecting::default();
        inspecting.keep(&digests.iter().map(|digest| (*digest).to_owned()).collect::<Vec<_>>(), now, 0.0);
        inspecting
    }

    #[test]
    fn the_first_look_reads_all_and_a_day_s_looks_read_all_again() {
        assert_eq!(part(0), None);
        let parts = (1..=PARTS).map(|count| part(count).map(|slice| slice.number)).collect::<Vec<_>>();
        assert_eq!(parts, (0..PARTS).map(Some).collect::<Vec<_>>());
        assert_eq!(part(PARTS + 1), part(1));
    }

    #[test]
    fn nodes_that_begin_at_once_do_not_look_at_once() {
        let now = Instant::now();
        let first = |chance| Inspected::new(now, chance).next_look;
        assert_eq!(first(0.0), now + FIRST);
        assert!(first(0.5) > first(0.1) && first(1.0) <= now + FIRST + FIRST_SPREAD);
    }

    #[test]
    fn a_few_differences_are_named_and_the_others_counted() {
        let all = ["a", "b", "c", "d", "e"].map(|name| difference(name, What::Changed));
        assert_eq!(named(&all[..1]), "changed a");
        assert_eq!(named(&all[..3]), "changed a, changed b, changed c");
        assert_eq!(named(&all), "changed a, changed b, changed c, 2 more");
    }

    #[test]
    fn mending_comes_before_looking_and_each_damaged_set_gets_its_turn() {
        let now = Instant::now();
        let mut sets = inspecting(&["a", "b", "c"], now).sets;
        assert_eq!(next(&sets, now), None);
        assert_eq!(next(&sets, now + FIRST), Some(("a", Work::Look(None))));
        let later = now + HOUR;
        for digest in ["b", "c"] {
            sets.get_mut(digest).unwrap().learn(digest, Work::Look(None), looked(&["bin/flux"]), later);
        }
        assert_eq!(next(&sets, later), Some(("b", Work::Mend)));
        sets.get_mut("b").unwrap().learn("b", Work::Mend, mended(&["bin/flux"], &[]), later);
        assert_eq!(next(&sets, later), Some(("c", Work::Mend)));
        sets.get_mut("c").unwrap().learn("c", Work::Mend, failed(), later);
        assert_eq!(next(&sets, later), Some(("a", Work::Look(None))));
        assert_eq!(next(&sets, later + 2 * AGAIN), Some(("c", Work::Mend)));
    }

    #[test]
    fn a_mending_that_must_wait_keeps_no_other_set_from_being_looked_at() {
        let installed = Instant::now();
        let (mut both, now) = (inspecting(&["a", "b"], installed), installed + FIRST);
        both.sets.get_mut("a").unwrap().learn("a", Work::Look(None), looked(&["bin/flux"]), now);
        both.sets.get_mut("a").unwrap().next_look = now + HOUR;
        assert_eq!(next(&both.sets, now), Some(("a", Work::Mend)));
        both.mend_later("a", now);
        assert_eq!(next(&both.sets, now), Some(("b", Work::Look(None))));
        assert_eq!(next(&both.sets, now + LATER), Some(("a", Work::Mend)));
    }

    #[test]
    fn damage_is_reported_until_everything_was_found_whole() {
        let now = Instant::now();
        let hour = Work::Look(part(1));
        for (what, found, words, is_pending) in [
            ("nothing", vec![(Work::Look(None), looked(&[]))], None, false),
            ("damage", vec![(hour, looked(&["a"]))], Some("set x is damaged: changed a; the agent mends it"), true),
            ("one part is whole", vec![(hour, looked(&["a"])), (hour, looked(&[]))], Some("is damaged"), true),
            ("all is whole", vec![(hour, looked(&["a"])), (Work::Look(None), looked(&[]))], None, false),
            (
                "it is mended",
                vec![(hour, looked(&["a"])), (Work::Mend, mended(&["a"], &[])), (hour, looked(&[]))],
                Some("package set x was damaged and mended at "),
                false,
            ),
            ("somebody else was faster", vec![(hour, looked(&["a"])), (Work::Mend, mended(&[], &[]))], None, false),
            (
                "some is left",
                vec![(Work::Mend, mended(&["a"], &["b"]))],
                Some("could not be mended: changed b; the agent tries again in "),
                true,
            ),
            ("it failed", vec![(Work::Mend, failed())], Some("`flux-distribute verify` lists"), true),
            ("an answer to another order", vec![(Work::Mend, Ok(Answer::Done))], Some("could not be mended"), true),
            ("a look that failed tells nothing", vec![(hour, failed())], None, false),
        ] {
            let mut set = Inspected::new(now, 0.0);
            for (work, outcome) in found {
                set.learn("x", work, outcome, now);
            }
            assert_eq!(set.mend_at.is_some(), is_pending, "{what}");
            match (&set.words, words) {
                (None, None) => {}
                (Some(told), Some(words)) if told.contains(words) => {}
                (told, _) => panic!("{what}: {told:?}"),
            }
        }
    }

    #[test]
    fn a_day_of_undamaged_parts_clears_the_report_and_a_failed_look_does_not_count() {
        let now = Instant::now();
        let mut set = Inspected::new(now, 0.0);
        set.learn("x", Work::Look(None), failed(), now);
        assert_eq!(set.looks, 0, "the first look that works reads all");
        set.learn("x", Work::Mend, mended(&["a"], &[]), now);
        for _ in 1..PARTS {
            set.learn("x", Work::Look(part(1)), looked(&[]), now);
            assert!(set.words.is_some());
        }
        set.learn("x", Work::Look(part(1)), looked(&[]), now);
        assert_eq!(set.words, None);
    }

    #[test]
    fn the_damage_of_all_sets_is_reported() {
        let now = Instant::now();
        let mut both = inspecting(&["a", "b"], now);
        assert_eq!(both.damage(), None);
        for (digest, set) in &mut both.sets {
            set.learn(digest, Work::Look(None), looked(&["bin/flux"]), now);
        }
        let told = both.damage().unwrap();
        assert!(told.contains("package set a is damaged") && told.contains("; package set b is damaged"), "{told}");
        both.keep(&["b".to_owned()], now, 0.0);
        assert!(!both.damage().unwrap().contains("package set a"), "a removed set is not reported");
    }

    #[tokio::test]
    async fn a_mending_delays_no_round_and_an_installation_stops_it() {
        let now = Instant::now();
        let mut inspecting = inspecting(&["a"], now);
        inspecting.sets.get_mut("a").unwrap().learn("a", Work::Look(None), looked(&["bin/flux"]), now);
        let held = std::sync::Arc::new(());
        let lock = held.clone();
        let never_ends = async move {
            let answer = std::future::pending().await;
            drop(lock);
            answer
        };
        inspecting.begin("a", Work::Mend, never_ends, now);
        inspecting.take_in_ended().await;
        assert!(inspecting.task.is_some());
        assert_eq!(next(&inspecting.sets, now), None, "one task at a time, and it is not begun twice");

        inspecting.stop_mending().await;
        assert_eq!(std::sync::Arc::strong_count(&held), 1, "it holds nothing any more");
        inspecting.take_in_ended().await;
        assert!(inspecting.task.is_none());
        assert_eq!(next(&inspecting.sets, Instant::now()), Some(("a", Work::Mend)));

        inspecting.begin("a", Work::Look(None), std::future::pending(), now);
        inspecting.stop_mending().await;
        inspecting.take_in_ended().await;
        assert!(inspecting.task.is_some(), "a look reads only");
    }
}
