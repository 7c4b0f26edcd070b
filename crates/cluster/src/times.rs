//! Makes times readable that other clients of the API server may write and ours can't read. Kubernetes takes any time that RFC 3339 can
//! express, in any object that a user may write: as the time of a condition, or in a Lease. The API server returns it in UTC, so its year
//! may be -1 or 10000. If a client writes protobuf, the year may be any.
//! [`Timestamp::MAX`](k8s_openapi::jiff::Timestamp::MAX) is some hours before the end of 9999.

use std::mem;

/// More than the 12 digits of the longest year that 64 bits of seconds can express.
const MOST_DIGITS: usize = 20;
/// What comes after the year; `0` stands for any digit.
const AFTER_YEAR: &[u8; 7] = b"-00-00T";
/// The years that are read instead. Both are leap years: the day may be 29 February.
const EARLY: &[u8] = b"0004";
const LATE: &[u8] = b"9996";

/// Replaces the year of each time in an answer that our client can't read.
#[derive(Default)]
pub(super) struct Times {
    /// The end of what has arrived, if it may be the beginning of such a time.
    kept: Vec<u8>,
}

impl Times {
    /// What becomes of `data`; what may be the beginning of such a time comes later.
    pub(super) fn pass(&mut self, data: &[u8]) -> Vec<u8> {
        let mut arrived = mem::take(&mut self.kept);
        arrived.extend_from_slice(data);
        let (mut passed, mut rest) = (Vec::with_capacity(arrived.len()), arrived.as_slice());
        while let Some(quote) = rest.iter().position(|byte| *byte == b'"') {
            let (before, text) = rest.split_at(quote + 1);
            passed.extend_from_slice(before);
            rest = text;
            match year(text) {
                Year::Readable => {}
                Year::Replaced { length, by } => {
                    passed.extend_from_slice(by);
                    rest = &text[length..];
                }
                Year::Unknown => {
                    passed.pop();
                    self.kept = [b"\"", text].concat();
                    return passed;
                }
            }
        }
        passed.extend_from_slice(rest);
        passed
    }

    /// What was kept, at the end of the answer.
    pub(super) fn end(&mut self) -> Vec<u8> {
        mem::take(&mut self.kept)
    }
}

/// How a text begins.
enum Year {
    /// With no year, or with one that our client reads.
    Readable,
    /// With a year of that many bytes.
    Replaced { length: usize, by: &'static [u8] },
    /// Too little of it has arrived.
    Unknown,
}

fn year(text: &[u8]) -> Year {
    let is_negative = text.first() == Some(&b'-');
    let digits = &text[usize::from(is_negative)..];
    let digits = &digits[..digits.iter().take_while(|byte| byte.is_ascii_digit()).count()];
    let length = digits.len() + usize::from(is_negative);
    let after = &text[length..];
    let matches = |(is, expected): (&u8, &u8)| is == expected || (*expected == b'0' && is.is_ascii_digit());
    let is_short = digits.len() < 4 && !after.is_empty();
    if is_short || digits.len() > MOST_DIGITS || !after.iter().zip(AFTER_YEAR).all(matches) {
        return Year::Readable;
    }
    if after.len() < AFTER_YEAR.len() {
        return Year::Unknown;
    }
    let is_last_day = digits == b"9999" && matches!(&after[1..6], b"12-30" | b"12-31");
    if is_negative {
        Year::Replaced { length, by: EARLY }
    } else if digits.len() > 4 || is_last_day {
        Year::Replaced { length, by: LATE }
    } else {
        Year::Readable
    }
}
