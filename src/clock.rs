//! The cluster's time: the API server's clock, as its answers tell it.
//!
//! What one agent writes down (since when a member drains, when `recover` was asked for) another one reads, perhaps hours
//! later and on a machine whose clock is wrong: a drain would be over at once, and its jobs lost. All of them ask one API
//! server, so its clock is theirs. What only one process measures needs no clock but [`std::time::Instant`].

use std::sync::atomic::{AtomicI64, Ordering};

use hyper::{HeaderMap, header};
use k8s_openapi::jiff::{SignedDuration, Timestamp, fmt::rfc2822};

/// So many seconds the API server is ahead of this machine. One process asks one API server.
static AHEAD: AtomicI64 = AtomicI64::new(0);

/// The time by the API server's clock; by this machine's until it has answered once.
pub fn now() -> Timestamp {
    let here = Timestamp::now();
    here.checked_add(SignedDuration::from_secs(AHEAD.load(Ordering::Relaxed))).unwrap_or(here)
}

/// An answer of the API server has come.
pub fn heard(headers: &HeaderMap) {
    if let Some(ahead) = ahead(headers, Timestamp::now()) {
        AHEAD.store(ahead, Ordering::Relaxed);
    }
}

/// How many seconds `Date` (RFC 9110, 6.6.1: whole ones) is after `here`. Less than a few is the way of the answer.
fn ahead(headers: &HeaderMap, here: Timestamp) -> Option<i64> {
    const NOTHING: i64 = 10;
    let there = rfc2822::parse(headers.get(header::DATE)?.to_str().ok()?).ok()?.timestamp();
    let seconds = there.duration_since(here).as_secs();
    Some(if seconds.abs() < NOTHING { 0 } else { seconds })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_seen_and_the_way_of_an_answer_is_not() {
        let here: Timestamp = "2026-03-01T12:00:00.9Z".parse().unwrap();
        for (date, expected) in [
            (Some("Sun, 01 Mar 2026 12:00:00 GMT"), Some(0)),
            (Some("Sun, 01 Mar 2026 11:59:55 GMT"), Some(0)),
            (Some("Sun, 01 Mar 2026 13:00:01 GMT"), Some(3600)),
            (Some("Sun, 01 Mar 2026 11:00:00 GMT"), Some(-3600)),
            (Some("yesterday"), None),
            (None, None),
        ] {
            let headers = date.map(|date| (header::DATE, date.parse().unwrap())).into_iter().collect();
            assert_eq!(ahead(&headers, here), expected, "{date:?}");
        }
    }
}
