//! Chance, for many who wait for the same and must not come back in lockstep.

use std::time::Duration;

/// From 0 to 1, for each caller another one; in the middle where there is no random number.
pub fn chance() -> f64 {
    getrandom::u32().map_or(0.5, |random| f64::from(random) / f64::from(u32::MAX))
}

/// At least `time`, and up to half more.
pub fn jittered(time: Duration) -> Duration {
    spread(time, chance())
}

/// The same by a `chance` that is told, from 0 to 1.
pub fn spread(time: Duration, chance: f64) -> Duration {
    time.mul_f64(1.0 + 0.5 * chance)
}
