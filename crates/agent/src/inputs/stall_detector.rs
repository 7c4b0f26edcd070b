//! Detects that this process was suspended: by SIGSTOP, a frozen cgroup, a suspended machine. What such an agent remembers of
//! the API server may be long over, and nothing in its memory shows that.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::sleep;

use host::facts::uptime;

/// Longer than an overloaded machine makes a ready task wait, and shorter than the planner takes to give a rank to another node.
const SUSPENDED: Duration = Duration::from_secs(10);
/// Well below [`SUSPENDED`], so that a gap shows a suspension and not a look that was late. No more often: each look wakes a processor.
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// Notes a gap between two looks at the clock. The time is passed in, so that the rule can be tested.
#[derive(Debug, Default)]
struct Looks {
    last: Duration,
    /// When the process woke up from a suspension that the API server has not been asked after.
    woke_up: Option<Duration>,
}

impl Looks {
    fn look(&mut self, now: Duration) {
        if now.saturating_sub(self.last) > SUSPENDED {
            self.woke_up = Some(now);
        }
        self.last = now;
    }
}

/// Tracks suspensions of this process since the API server confirmed what the agent remembers.
#[derive(Clone)]
pub struct StallDetector(Arc<Mutex<Looks>>);

impl StallDetector {
    /// Starts a task that watches the clock until the detector is dropped.
    pub fn begin() -> Self {
        let looks = Arc::new(Mutex::new(Looks { last: uptime(), woke_up: None }));
        let looking = Arc::downgrade(&looks);
        tokio::spawn(async move {
            while let Some(looks) = looking.upgrade() {
                Self(looks).woke_up();
                sleep(LOOK_EVERY).await;
            }
        });
        Self(looks)
    }

    /// The uptime at which this process woke up from its last suspension; None once the API server has
    /// [confirmed](Self::confirmed) what the agent remembers.
    pub fn woke_up(&self) -> Option<Duration> {
        self.look().woke_up
    }

    /// The API server has confirmed what the agent remembers, in answer to a question that was asked when [`Self::woke_up`] was `then`.
    /// A later suspension still counts.
    pub fn confirmed(&self, then: Duration) {
        let mut looks = self.look();
        if looks.woke_up == Some(then) {
            looks.woke_up = None;
        }
    }

    /// Looks first: the task may not have done so since the process woke up.
    fn look(&self) -> MutexGuard<'_, Looks> {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        looks.look(uptime());
        looks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_was_suspended_knows_it_until_it_has_heard_the_api_again() {
        for (times, expected) in [(&[1, 2, 3][..], false), (&[1, 10, 20], false), (&[1, 12, 13, 14], true)] {
            let mut looks = Looks::default();
            times.iter().for_each(|at| looks.look(Duration::from_secs(*at)));
            assert_eq!(looks.woke_up.is_some(), expected, "{times:?}");
        }
        let first = Duration::from_secs(1);
        let detector = StallDetector(Arc::new(Mutex::new(Looks { last: uptime(), woke_up: Some(first) })));
        assert_eq!(detector.woke_up(), Some(first));
        detector.confirmed(first);
        assert_eq!(detector.woke_up(), None);
        // Suspended again, before the answer is taken in.
        detector.0.lock().unwrap().woke_up = Some(first * 2);
        detector.confirmed(first);
        assert_eq!(detector.woke_up(), Some(first * 2));
    }
}
