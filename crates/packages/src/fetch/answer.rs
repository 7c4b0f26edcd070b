//! Interprets an HTTP server's response to a request for an archive.

use std::time::Duration;

use jiff::Timestamp;
use reqwest::{
    StatusCode,
    header::{self, HeaderMap},
};

/// What a response means for the download.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ArchiveResponse {
    /// The body is the file from byte `from` on. `length`: the file's length, if the server or the lock says.
    Body { from: u64, length: Option<u64> },
    /// The file has no bytes after those already downloaded.
    NothingMore,
    /// The server sent another range than requested.
    OtherPart,
    /// The file has another size than the lock says.
    Size(Mismatch),
    /// The response has no usable body.
    Refused,
}

/// How the file differs from the archive that the lock names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Mismatch {
    #[error("it has more bytes than the archive")]
    Longer,
    #[error("it has fewer bytes than the archive")]
    Shorter,
    #[error("its content has sha256 {0}")]
    Sha256(String),
}

/// Interprets the response to a request for everything from byte `have` on, of a file of `size` bytes.
pub(crate) fn read_response(status: StatusCode, headers: &HeaderMap, have: u64, size: Option<u64>) -> ArchiveResponse {
    let (from, length) = match status {
        StatusCode::OK => (0, number(headers, header::CONTENT_LENGTH)),
        StatusCode::PARTIAL_CONTENT => match content_range(headers) {
            Some((from, length)) if from == have => (from, length),
            _ => return ArchiveResponse::OtherPart,
        },
        StatusCode::RANGE_NOT_SATISFIABLE if have > 0 => return ArchiveResponse::NothingMore,
        _ => return ArchiveResponse::Refused,
    };
    match size.zip(length) {
        Some((size, length)) if length > size => ArchiveResponse::Size(Mismatch::Longer),
        Some((size, length)) if length < size => ArchiveResponse::Size(Mismatch::Shorter),
        _ => ArchiveResponse::Body { from, length: size.or(length) },
    }
}

/// The first byte and the length in a `Content-Range`: 5 and 10 for `bytes 5-9/10`.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let (range, length) =
        headers.get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?.trim().split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, length.parse().ok()))
}

fn number(headers: &HeaderMap, name: header::HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// The pause that the server asks for with `Retry-After`, in seconds or as a date.
pub(crate) fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    if let Some(seconds) = number(headers, header::RETRY_AFTER) {
        return Some(Duration::from_secs(seconds));
    }
    let date = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    let then = jiff::fmt::rfc2822::parse(date).ok()?.timestamp();
    Some(Duration::try_from(then.duration_since(now)).unwrap_or_default())
}

/// True for statuses that may go away by themselves.
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
    fn a_body_is_used_only_if_it_continues_the_partial_file() {
        use header::{CONTENT_LENGTH, CONTENT_RANGE};
        let body = |from, length| ArchiveResponse::Body { from, length };
        for (status, headers, have, size, expected) in [
            (200, headers(&[]), 0, None, body(0, None)),
            (200, headers(&[(CONTENT_LENGTH, "10")]), 4, None, body(0, Some(10))),
            (200, headers(&[(CONTENT_LENGTH, "10")]), 0, Some(9), ArchiveResponse::Size(Mismatch::Longer)),
            (200, headers(&[(CONTENT_LENGTH, "8")]), 0, Some(9), ArchiveResponse::Size(Mismatch::Shorter)),
            (206, headers(&[(CONTENT_RANGE, "bytes 4-9/10")]), 4, Some(10), body(4, Some(10))),
            (206, headers(&[(CONTENT_RANGE, "bytes 4-9/*")]), 4, Some(10), body(4, Some(10))),
            (206, headers(&[(CONTENT_RANGE, "bytes 4-6/7")]), 4, Some(10), ArchiveResponse::Size(Mismatch::Shorter)),
            (206, headers(&[(CONTENT_RANGE, "bytes 5-9/10")]), 4, Some(10), ArchiveResponse::OtherPart),
            (206, headers(&[(CONTENT_RANGE, "bytes 40-99/100")]), 4, Some(10), ArchiveResponse::OtherPart),
            (206, headers(&[]), 4, Some(10), ArchiveResponse::OtherPart),
            (416, headers(&[]), 4, None, ArchiveResponse::NothingMore),
            (416, headers(&[]), 0, None, ArchiveResponse::Refused),
            (204, headers(&[]), 0, None, ArchiveResponse::Refused),
            (304, headers(&[]), 0, Some(10), ArchiveResponse::Refused),
        ] {
            assert_eq!(read_response(StatusCode::from_u16(status).unwrap(), &headers, have, size), expected);
        }
    }

    #[test]
    fn retry_after_is_read_as_seconds_or_as_a_date() {
        let now: Timestamp = "2026-11-20T10:00:00Z".parse().unwrap();
        for (value, seconds) in [
            ("7", Some(7)),
            ("Fri, 20 Nov 2026 10:00:09 GMT", Some(9)),
            ("Fri, 20 Nov 2026 09:00:00 GMT", Some(0)),
            ("soon", None),
            ("-1", None),
        ] {
            let pause = retry_after(&headers(&[(header::RETRY_AFTER, value)]), now);
            assert_eq!(pause, seconds.map(Duration::from_secs), "{value}");
        }
    }
}
