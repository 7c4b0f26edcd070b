//! The cluster's time: what the API server's clock said when this process asked it first, and what has passed since.
//!
//! What one agent writes down (since when a member drains, when `recover` was asked for) another one reads, perhaps hours
//! later and on a machine whose clock is wrong: a drain would be over at once, and its jobs lost. So it is told by the one
//! clock that all of them can ask; and a clock that is set, the API server's or the machine's, moves nothing that is under
//! way. What only one process measures needs no clock but [`std::time::Instant`].

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use hyper::{HeaderMap, header};
use k8s_openapi::jiff::{SignedDuration, Timestamp, fmt::rfc2822};

/// For tests: how many seconds this machine's clock is to be ahead.
pub(crate) const OFF_VARIABLE: &str = "FLUX_DISTRIBUTE_CLOCK_OFF";

/// One process asks one API server.
static BEGAN: OnceLock<(Timestamp, Instant)> = OnceLock::new();

/// The time in the cluster; this machine's until the API server has answered once.
pub fn now() -> Timestamp {
    BEGAN.get().map_or_else(machine_s, |(at, since)| after(*at, since.elapsed()))
}

/// An answer of the API server has come.
pub fn heard(headers: &HeaderMap) {
    if BEGAN.get().is_none()
        && let Some(at) = date(headers)
    {
        // Who was first is as good.
        let _ = BEGAN.set((at, Instant::now()));
    }
}

fn machine_s() -> Timestamp {
    let off = std::env::var(OFF_VARIABLE).ok().and_then(|off| off.parse().ok()).unwrap_or_default();
    let now = Timestamp::now();
    now.checked_add(SignedDuration::from_secs(off)).unwrap_or(now)
}

fn after(at: Timestamp, passed: Duration) -> Timestamp {
    at.checked_add(passed).unwrap_or(at)
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
