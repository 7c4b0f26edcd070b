//! Whether this process has stood still: SIGSTOP, a frozen cgroup, a suspended machine. What such an agent remembers may be
//! long over, and nothing that it holds tells so.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nix::sys::sysinfo::sysinfo;
use tokio::time::sleep;

/// Longer than an overloaded machine makes a ready task wait, and shorter than anything takes a rank away.
const STOOD_STILL: Duration = Duration::from_secs(10);
const BEAT_EVERY: Duration = Duration::from_secs(1);

/// Pure: the time is told.
#[derive(Debug, Default)]
struct Pulse {
    last: Duration,
    stood_still: bool,
}

impl Pulse {
    fn beat(&mut self, now: Duration) {
        self.stood_still |= now.saturating_sub(self.last) > STOOD_STILL;
        self.last = now;
    }
}

/// What is remembered of the API's words.
#[derive(Clone)]
pub struct Memory(Arc<Mutex<Pulse>>);

impl Memory {
    /// From now on, until it is dropped.
    pub fn begin() -> Self {
        let pulse = Arc::new(Mutex::new(Pulse { last: uptime(), stood_still: false }));
        let beating = Arc::downgrade(&pulse);
        tokio::spawn(async move {
            while let Some(pulse) = beating.upgrade() {
                Self(pulse).stood_still();
                sleep(BEAT_EVERY).await;
            }
        });
        Self(pulse)
    }

    /// This process has stood still since it was [`refreshed`](Self::refreshed) last, the time since the last beat included.
    pub fn stood_still(&self) -> bool {
        let mut pulse = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Here too: the task that beats may not have run yet.
        pulse.beat(uptime());
        pulse.stood_still
    }

    /// The API server has said again what is remembered.
    pub fn refreshed(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).stood_still = false;
    }
}

/// Goes on while the machine is suspended, as [`std::time::Instant`] does not (sysinfo(2)).
fn uptime() -> Duration {
    sysinfo().map(|system| system.uptime()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_stood_still_knows_it_until_it_has_heard_the_api_again() {
        for (beats, expected) in [(&[1, 2, 3][..], false), (&[1, 10, 20], false), (&[1, 12, 13, 14], true)] {
            let mut pulse = Pulse::default();
            beats.iter().for_each(|at| pulse.beat(Duration::from_secs(*at)));
            assert_eq!(pulse.stood_still, expected, "{beats:?}");
        }
        let memory = Memory(Arc::new(Mutex::new(Pulse { last: uptime(), stood_still: true })));
        assert!(memory.stood_still());
        memory.refreshed();
        assert!(!memory.stood_still());
    }
}
