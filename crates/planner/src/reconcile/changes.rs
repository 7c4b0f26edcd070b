//! When a round begins, and what arrives during it.

use std::{mem, pin::pin, time::Duration};

use futures::{Stream, StreamExt};
use tokio::time::{Instant, timeout, timeout_at};

/// Rounds begin at least this far apart. The first join of a burst makes a revision by itself, and those of each 100 ms after it make one together. The
/// lead's agent gathers again: after a live change it applies the newest roster, however many revisions that is ahead.
const APART: Duration = Duration::from_millis(100);
/// The planner gathers changes at least this long. After a round its stores usually have by then what that round wrote, so the next one does not write
/// that again.
const GATHER: Duration = Duration::from_millis(20);
/// Plan at least this often even without changes, because some decisions depend only on time (retain, patience).
const TICK: Duration = Duration::from_secs(2);

/// The changes of the watched objects. Polling their stream is also what fills the stores.
pub(super) struct Changes<S> {
    stream: S,
    /// When the last round began.
    begun: Option<Instant>,
    /// A change came during it.
    is_pending: bool,
}

impl<S: Stream<Item = ()> + Unpin> Changes<S> {
    /// `stream` yields once for each change, after the stores have it.
    pub(super) fn of(stream: S) -> Self {
        Self { stream, begun: None, is_pending: false }
    }

    /// Waits for a change, but no longer than [`TICK`], and then gathers further ones. If `is_urgent`, which is asked after the wait, it takes only those
    /// that have already come.
    pub(super) async fn gather(&mut self, is_urgent: impl FnOnce() -> bool) {
        if !mem::take(&mut self.is_pending) {
            let _ = timeout(TICK, self.stream.next()).await;
        }
        let now = Instant::now();
        let until = if is_urgent() { now } else { next_round(self.begun, now) };
        while let Ok(Some(())) = timeout_at(until, self.stream.next()).await {}
    }

    /// Runs a round and takes up changes during it. A round may write thousands of FluxNodes: if the stores did not see them until its end, the next
    /// round would write them again. If `is_outdated` is true after a change, drops the round and returns None.
    pub(super) async fn during<T>(
        &mut self,
        round: impl Future<Output = T>,
        is_outdated: impl Fn() -> bool,
    ) -> Option<T> {
        let mut round = pin!(round);
        self.begun = Some(Instant::now());
        loop {
            tokio::select! {
                biased;
                done = &mut round => return Some(done),
                Some(()) = self.stream.next() => {
                    self.is_pending = true;
                    if is_outdated() {
                        return None;
                    }
                }
            }
        }
    }
}

/// When the next round begins, if a change is known `now`. `begun`: when the last round began.
fn next_round(begun: Option<Instant>, now: Instant) -> Instant {
    begun.map_or(now, |begun| begun + APART).max(now + GATHER)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use futures::stream;
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_round_takes_up_changes_and_notes_that_one_came() {
        let second = Duration::from_secs(1);
        for count in [0, 1, 3] {
            let taken = AtomicU32::new(0);
            let changes = stream::iter(0..count).then(async |_| {
                sleep(second).await;
                taken.fetch_add(1, Ordering::Relaxed);
            });
            let changes = pin!(changes.chain(stream::pending()));
            let mut changes = Changes::of(changes);
            // A round that ends only if all of them have been taken up.
            let round = async {
                while taken.load(Ordering::Relaxed) < count {
                    sleep(second).await;
                }
                "done"
            };
            let done = changes.during(round, || false).await;
            assert_eq!((done, changes.is_pending), (Some("done"), count > 0), "{count}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_ends_a_round_that_hangs_if_it_is_outdated_then() {
        let taken = AtomicU32::new(0);
        let changes = stream::iter(0..10).map(|_| {
            taken.fetch_add(1, Ordering::Relaxed);
        });
        let mut changes = Changes::of(changes.chain(stream::pending()));
        let is_outdated = || taken.load(Ordering::Relaxed) == 3;
        assert_eq!(changes.during(std::future::pending::<()>(), is_outdated).await, None);
        assert!(changes.is_pending, "the next round begins at once");
        assert_eq!(taken.load(Ordering::Relaxed), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_that_came_during_a_round_begins_the_next_one_without_a_further_change() {
        for (is_urgent, after) in [(false, APART), (true, Duration::ZERO)] {
            let mut changes = Changes::of(stream::iter([()]).chain(stream::pending()));
            let begun = Instant::now();
            // Pending once, so that the change is taken up.
            changes.during(tokio::task::yield_now(), || false).await;
            changes.gather(|| is_urgent).await;
            assert_eq!(begun.elapsed(), after, "{is_urgent}");
        }
    }

    #[test]
    fn a_single_change_waits_20_ms_and_a_burst_until_rounds_are_100_ms_apart() {
        let begin = Instant::now();
        let now = begin + Duration::from_secs(10);
        assert_eq!(next_round(None, now), now + GATHER);
        for (ago, rest) in [(0, APART), (50, APART / 2), (90, GATHER), (5000, GATHER)] {
            let begun = now - Duration::from_millis(ago);
            assert_eq!(next_round(Some(begun), now), now + rest, "{ago}");
        }
    }

    #[tokio::test]
    async fn a_round_ends_without_changes_and_after_the_last_one() {
        assert_eq!(Changes::of(stream::pending()).during(async { 7 }, || true).await, Some(7));
        Changes::of(stream::empty()).during(tokio::task::yield_now(), || true).await;
    }
}
