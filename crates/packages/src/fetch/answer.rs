//! What an HTTP server's answer to a wish for an archive is good for.

use std::time::Duration;

use jiff::Timestamp;
use reqwest::{
    StatusCode,
    header::{self, HeaderMap},
};

/// What the body is, or what is the matter.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The file from byte `from` on, and its length as far as the server knows it.
    Body { from: u64, length: Option<u64> },
    /// Nothing is behind what is there.
    NothingMore,
    /// A part that nobody asked for.
    OtherPart,
    /// Not a file of this size.
    Size(Wrong),
    /// No body that is of use.
    Refused,
}

/// Why what was sent is not what is wanted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Wrong {
    #[error("it has more bytes than the archive")]
    Longer,
    #[error("it has fewer bytes than the archive")]
    Shorter,
    #[error("what it sent has sha256 {0}")]
    Sha256(String),
}

/// Reads the answer to a wish for everything from byte `have` on, of a file of `size` bytes.
pub(crate) fn answer(status: StatusCode, headers: &HeaderMap, have: u64, size: Option<u64>) -> Answer {
    let (from, length) = match status {
        StatusCode::OK => (0, number(headers, header::CONTENT_LENGTH)),
        StatusCode::PARTIAL_CONTENT => match content_range(headers) {
            Some((from, length)) if from == have => (from, length),
            _ => return Answer::OtherPart,
        },
        StatusCode::RANGE_NOT_SATISFIABLE if have > 0 => return Answer::NothingMore,
        _ => return Answer::Refused,
    };
    match size.zip(length) {
        Some((size, length)) if length > size => Answer::Size(Wrong::Longer),
        Some((size, length)) if length < size => Answer::Size(Wrong::Shorter),
        _ => Answer::Body { from, length: size.or(length) },
    }
}

/// `bytes 5-9/10` as 5 and 10.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let (range, length) =
        headers.get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?.trim().split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, length.parse().ok()))
}

fn number(headers: &HeaderMap, name: header::HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// How long the server wishes to be left alone: `Retry-After`, in seconds or as a date.
pub(crate) fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    if let Some(seconds) = number(headers, header::RETRY_AFTER) {
        return Some(Duration::from_secs(seconds));
    }
    let date = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    let then = jiff::fmt::rfc2822::parse(date).ok()?.timestamp();
    Some(Duration::try_from(then.duration_since(now)).unwrap_or_default())
}

/// Something that may be gone in a while.
pub(crate) fn may_pass(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn headers(pairs: &[(header::HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn a_body_is_used_only_where_it_continues_what_is_there() {
        use header::{CONTENT_LENGTH, CONTENT_RANGE};
        let body = |from, length| Answer::Body { from, length };
        for (status, headers, have, size, expected) in [
            (200, headers(&[]), 0, None, body(0, None)),
            (200, headers(&[(CONTENT_LENGTH, "10")]), 4, None, body(0, Some(10))),
            (200, headers(&[(CONTENT_LENGTH, "10")]), 0, Some(9), Answer::Size(Wrong::Longer)),
            (200, headers(&[(CONTENT_LENGTH, "8")]), 0, Some(9), Answer::Size(Wrong::Shorter)),
            (206, headers(&[(CONTENT_RANGE, "bytes 4-9/10")]), 4, Some(10), body(4, Some(10))),
            (206, headers(&[(CONTENT_RANGE, "bytes 4-9/*")]), 4, Some(10), body(4, Some(10))),
            (206, headers(&[(CONTENT_RANGE, "bytes 4-6/7")]), 4, Some(10), Answer::Size(Wrong::Shorter)),
            (206, headers(&[(CONTENT_RANGE, "bytes 5-9/10")]), 4, Some(10), Answer::OtherPart),
            (206, headers(&[(CONTENT_RANGE, "bytes 40-99/100")]), 4, Some(10), Answer::OtherPart),
            (206, headers(&[]), 4, Some(10), Answer::OtherPart),
            (416, headers(&[]), 4, None, Answer::NothingMore),
            (416, headers(&[]), 0, None, Answer::Refused),
            (204, headers(&[]), 0, None, Answer::Refused),
            (304, headers(&[]), 0, Some(10), Answer::Refused),
        ] {
            assert_eq!(answer(StatusCode::from_u16(status).unwrap(), &headers, have, size), expected);
        }
    }

    #[test]
    fn a_server_may_wish_for_rest_in_seconds_or_by_date() {
        let now: Timestamp = "2026-11-20T10:00:00Z".parse().unwrap();
        for (value, seconds) in [
            ("7", Some(7)),
            ("Fri, 20 Nov 2026 10:00:09 GMT", Some(9)),
            ("Fri, 20 Nov 2026 09:00:00 GMT", Some(0)),
            ("soon", None),
            ("-1", None),
        ] {
            let wish = retry_after(&headers(&[(header::RETRY_AFTER, value)]), now);
            assert_eq!(wish, seconds.map(Duration::from_secs), "{value}");
        }
    }
}
