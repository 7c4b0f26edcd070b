//! The cluster's time: what the API server's clock showed when this process first had an answer from it, plus the time that has
//! passed since.
//!
//! One agent writes down a time (since when a member drains, when `recover` was asked for), and another one reads it, perhaps
//! hours later and on a machine whose clock is wrong. By the machines' clocks a drain could be over at once, and its jobs lost.
//! The API server's clock is the one that all agents can ask. If somebody sets that clock, or a machine's, a process that runs
//! does not notice.
//!
//! A process that begins later does. A planner therefore moves the time limits that it takes over from the planner before
//! (`model::roster::move_limits`); its own clock stays the API server's. What only one process measures needs no clock
//! but [`std::time::Instant`].

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

/// One process asks one API server.
static BEGAN: Mutex<Option<Begin>> = Mutex::new(None);

/// A time that was known at an instant.
#[derive(Clone, Copy)]
struct Begin {
    at: Timestamp,
    since: Instant,
}

impl Begin {
    fn now(self) -> Timestamp {
        self.at.checked_add(self.since.elapsed()).unwrap_or(self.at)
    }
}

/// The time in the cluster; this machine's until the API server has answered once.
pub fn now() -> Timestamp {
    let began = *BEGAN.lock().unwrap_or_else(PoisonError::into_inner);
    began.map_or_else(machine_s, Begin::now)
}

/// Takes the time from an answer of the API server, if it is the first one.
pub fn heard(headers: &HeaderMap) {
    let mut began = BEGAN.lock().unwrap_or_else(PoisonError::into_inner);
    if began.is_none() {
        *began = date(headers).map(|at| Begin { at, since: Instant::now() });
    }
}

#[cfg(not(feature = "test-switches"))]
fn machine_s() -> Timestamp {
    Timestamp::now()
}

#[cfg(feature = "test-switches")]
fn machine_s() -> Timestamp {
    let off = std::env::var(OFF_VARIABLE).ok().and_then(|off| off.parse().ok()).unwrap_or_default();
    let now = Timestamp::now();
    now.checked_add(SignedDuration::from_secs(off)).unwrap_or(now)
}

/// `Date` as RFC 9110, 6.6.1 has it: whole seconds.
fn date(headers: &HeaderMap) -> Option<Timestamp> {
    Some(rfc2822::parse(headers.get(header::DATE)?.to_str().ok()?).ok()?.timestamp())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_date_of_an_answer_is_read() {
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
