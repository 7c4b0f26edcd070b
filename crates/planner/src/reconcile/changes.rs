//! When a round begins, and what arrives during it.

use std::{pin::pin, time::Duration};

use futures::{Stream, StreamExt};
use tokio::time::{Instant, timeout, timeout_at};

/// The planner gathers changes for this long after the first one, which may have come during a round: a burst of joins becomes one revision.
/// Later joins are gathered by the lead: after a live change it applies the newest roster, however many revisions that is ahead.
const GATHER: Duration = Duration::from_millis(100);
/// It gathers at least this long after a round: by then its stores usually have what that round wrote, so the next one does not write that again.
const LEAST_GATHER: Duration = Duration::from_millis(20);
/// Plan at least this often even without changes, because some decisions depend only on time (retain, patience).
const TICK: Duration = Duration::from_secs(2);

/// The changes of the watched objects. Polling their stream is also what fills the stores.
pub(super) struct Changes<S> {
    stream: S,
    /// When the first one came during the last round, if any did.
    first: Option<Instant>,
}

impl<S: Stream<Item = ()> + Unpin> Changes<S> {
    /// `stream` yields once for each change, after the stores have it.
    pub(super) fn of(stream: S) -> Self {
        Self { stream, first: None }
    }

    /// Waits for a change, but no longer than [`TICK`], and then gathers further ones. If `is_urgent`, which is asked after the wait, it takes only those
    /// that have already come.
    pub(super) async fn gather(&mut self, is_urgent: impl FnOnce() -> bool) {
        let first = self.first.take();
        if first.is_none() {
            let _ = timeout(TICK, self.stream.next()).await;
        }
        let now = Instant::now();
        let until = if is_urgent() { now } else { gather_until(first, now) };
        while let Ok(Some(())) = timeout_at(until, self.stream.next()).await {}
    }

    /// Runs a round and takes up changes during it. A round may write thousands of FluxNodes: if the stores did not see them until its end, the next
    /// round would write them again.
    pub(super) async fn during<T>(&mut self, round: impl Future<Output = T>) -> T {
        let mut round = pin!(round);
        loop {
            tokio::select! {
                biased;
                done = &mut round => return done,
                Some(()) = self.stream.next() => self.first = self.first.or_else(|| Some(Instant::now())),
            }
        }
    }
}

/// Until when to gather changes. `first_change`: when the first one came during the last round, if any did.
fn gather_until(first_change: Option<Instant>, now: Instant) -> Instant {
    first_change.map_or(now + GATHER, |first| (first + GATHER).max(now + LEAST_GATHER))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use futures::stream;
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_round_takes_up_changes_and_tells_when_the_first_one_came() {
        let second = Duration::from_secs(1);
        for count in [0, 1, 3] {
            let (begin, taken) = (Instant::now(), AtomicU32::new(0));
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
            let first = (count > 0).then_some(begin + second);
            assert_eq!((changes.during(round).await, changes.first), ("done", first), "{count}");
        }
    }

    #[test]
    fn a_change_during_a_round_waits_no_longer_than_another_one() {
        let begin = Instant::now();
        let now = begin + Duration::from_secs(10);
        assert_eq!(gather_until(None, now), now + GATHER);
        for (waited, rest) in [(0, GATHER), (50, GATHER / 2), (90, LEAST_GATHER), (5000, LEAST_GATHER)] {
            let first = now - Duration::from_millis(waited);
            assert_eq!(gather_until(Some(first), now), now + rest, "{waited}");
        }
    }

    #[tokio::test]
    async fn a_round_ends_without_changes_and_after_the_last_one() {
        assert_eq!(Changes::of(stream::pending()).during(async { 7 }).await, 7);
        Changes::of(stream::empty()).during(tokio::task::yield_now()).await;
    }
}
