//! Detects that this process was suspended: by SIGSTOP, a frozen cgroup, a suspended machine. What such an agent remembers of
//! the API server may be long over, and nothing in its memory shows that.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::sleep;

use host::facts::uptime;

/// Longer than an overloaded machine makes a ready task wait, and shorter than the planner takes to give a rank to another node.
const SUSPENDED: Duration = Duration::from_secs(10);
const BEAT_EVERY: Duration = Duration::from_secs(1);

/// The rule, without a clock of its own.
#[derive(Debug, Default)]
struct Pulse {
    last: Duration,
    was_suspended: bool,
}

impl Pulse {
    fn beat(&mut self, now: Duration) {
        self.was_suspended |= now.saturating_sub(self.last) > SUSPENDED;
        self.last = now;
    }
}

/// Tracks suspensions of this process since the API server confirmed what the agent remembers.
#[derive(Clone)]
pub struct StallDetector(Arc<Mutex<Pulse>>);

impl StallDetector {
    /// Starts a task that watches the clock until the detector is dropped.
    pub fn begin() -> Self {
        let pulse = Arc::new(Mutex::new(Pulse { last: uptime(), was_suspended: false }));
        let beating = Arc::downgrade(&pulse);
        tokio::spawn(async move {
            while let Some(pulse) = beating.upgrade() {
                Self(pulse).was_suspended();
                sleep(BEAT_EVERY).await;
            }
        });
        Self(pulse)
    }

    /// True if this process was suspended since [`refreshed`](Self::refreshed) was called last.
    pub fn was_suspended(&self) -> bool {
        let mut pulse = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The beating task may not have run since the process woke up.
        pulse.beat(uptime());
        pulse.was_suspended
    }

    /// The API server has confirmed what the agent remembers.
    pub fn refreshed(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).was_suspended = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_was_suspended_knows_it_until_it_has_heard_the_api_again() {
        for (beats, expected) in [(&[1, 2, 3][..], false), (&[1, 10, 20], false), (&[1, 12, 13, 14], true)] {
            let mut pulse = Pulse::default();
            beats.iter().for_each(|at| pulse.beat(Duration::from_secs(*at)));
            assert_eq!(pulse.was_suspended, expected, "{beats:?}");
        }
        let memory = StallDetector(Arc::new(Mutex::new(Pulse { last: uptime(), was_suspended: true })));
        assert!(memory.was_suspended());
        memory.refreshed();
        assert!(!memory.was_suspended());
    }
}
