//! Random delays, so that many clients that wait for the same thing don't retry in lockstep.

use std::time::Duration;

/// A random number from 0 to 1; 0.5 if the system has no random numbers.
pub fn chance() -> f64 {
    getrandom::u32().map_or(0.5, |random| f64::from(random) / f64::from(u32::MAX))
}

/// `time` plus a random part of up to half of it.
pub fn jittered(time: Duration) -> Duration {
    spread(time, chance())
}

/// `time` plus `chance` (0 to 1) times half of it: the part of [`jittered`] without randomness.
pub fn spread(time: Duration, chance: f64) -> Duration {
    time.mul_f64(1.0 + 0.5 * chance)
}
