//! The cluster's time: what the API server's clock said when this process asked it first, and what has passed since.
//!
//! What one agent writes down (since when a member drains, when `recover` was asked for) another one reads, perhaps hours
//! later and on a machine whose clock is wrong: a drain would be over at once, and its jobs lost. So it is told by the one
//! clock that all of them can ask; and a clock that is set, the API server's or the machine's, moves nothing that is under
//! way. Neither does a planner that begins while the API server's clock is wrong ([`go_on_from`]). What only one process measures needs no clock but [`std::time::Instant`].

use std::{
    sync::{Mutex, PoisonError},
    time::Instant,
};

use hyper::{HeaderMap, header};
use k8s_openapi::jiff::{SignedDuration, Timestamp, fmt::rfc2822};

/// For tests: how many seconds this machine's clock is to be ahead.
pub(crate) const OFF_VARIABLE: &str = "FLUX_DISTRIBUTE_CLOCK_OFF";

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

/// An answer of the API server has come.
pub fn heard(headers: &HeaderMap) {
    let mut began = BEGAN.lock().unwrap_or_else(PoisonError::into_inner);
    if began.is_none() {
        *began = date(headers).map(|at| Begin { at, since: Instant::now() });
    }
}

/// A time limit is under way whose begin the planner before has written down, and by its clock it was `last` just now. An API
/// server whose clock is ahead of that may be wrong, and would end the limit early: then this process goes on from `last`. The
/// limit lasts longer by the time in which there was no planner.
pub fn go_on_from(last: Timestamp) {
    let mut began = BEGAN.lock().unwrap_or_else(PoisonError::into_inner);
    let now = began.map_or_else(machine_s, Begin::now);
    *began = Some(Begin { at: now.min(last), since: Instant::now() });
}

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
