//! The cluster's time: the API server's clock, as its first answer to this process showed it, plus the time elapsed
//! since then.
//!
//! One agent writes a time (when a member began to drain, when `recover` was requested) and another reads it, perhaps
//! hours later and on a machine whose clock is wrong. With the machines' clocks, a drain could look finished at once
//! and its jobs would be lost. The API server's clock is the one that all agents can read. A running process does not
//! notice if somebody sets that clock or a machine's.
//!
//! A process that starts later does. A new planner therefore moves the time limits that it takes over from the previous
//! one (`roster::move_limits` in crate `model`); its own clock stays the API server's. Code that measures time within one
//! process uses [`std::time::Instant`].

use std::{
    sync::{Mutex, PoisonError},
    time::Instant,
};

use hyper::{HeaderMap, header};
#[cfg(feature = "test-switches")]
use k8s_openapi::jiff::SignedDuration;
use k8s_openapi::jiff::{Timestamp, fmt::rfc2822};

/// For tests: by how many seconds this machine's clock is to be ahead.
#[cfg(feature = "test-switches")]
pub const OFF_VARIABLE: &str = "FLUX_DISTRIBUTE_CLOCK_OFF";

/// One for the whole process, because a process talks to one API server.
static START: Mutex<Option<Start>> = Mutex::new(None);

/// A time, and the instant at which it was read.
#[derive(Clone, Copy)]
struct Start {
    at: Timestamp,
    since: Instant,
}

impl Start {
    fn now(self) -> Timestamp {
        self.at.checked_add(self.since.elapsed()).unwrap_or(self.at)
    }
}

/// The cluster's time; this machine's time until the API server has answered once.
pub fn now() -> Timestamp {
    let start = *START.lock().unwrap_or_else(PoisonError::into_inner);
    start.map_or_else(machine_time, Start::now)
}

/// Sets the clock from the header `Date` of an answer of the API server, if this is the first answer with one.
pub fn heard(headers: &HeaderMap) {
    let mut start = START.lock().unwrap_or_else(PoisonError::into_inner);
    if start.is_none() {
        *start = date(headers).map(|at| Start { at, since: Instant::now() });
    }
}

#[cfg(not(feature = "test-switches"))]
fn machine_time() -> Timestamp {
    Timestamp::now()
}

#[cfg(feature = "test-switches")]
fn machine_time() -> Timestamp {
    let off = std::env::var(OFF_VARIABLE).ok().and_then(|off| off.parse().ok()).unwrap_or_default();
    let now = Timestamp::now();
    now.checked_add(SignedDuration::from_secs(off)).unwrap_or(now)
}

/// The time in the header `Date` (RFC 9110, 6.6.1), in whole seconds.
fn date(headers: &HeaderMap) -> Option<Timestamp> {
    Some(rfc2822::parse(headers.get(header::DATE)?.to_str().ok()?).ok()?.timestamp())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_date_of_an_answer_is_parsed() {
        for (text, expected) in [
            (Some("Sun, 01 Mar 2026 12:00:00 GMT"), Some("2026-03-01T12:00:00Z")),
            (Some("yesterday"), None),
            (None, None),
        ] {
            let headers = text.map(|text| (header::DATE, text.parse().unwrap())).into_iter().collect();
            assert_eq!(date(&headers), expected.map(|expected| expected.parse().unwrap()), "{text:?}");
        }
    }
}
