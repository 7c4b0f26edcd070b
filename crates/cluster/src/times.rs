//! Makes times readable that other clients of the API server may write and ours can't read. Kubernetes takes any time up to
//! the end of the year 9999 (RFC 3339), in any object that a user may write: as the time of a condition, or in a Lease.
//! [`Timestamp::MAX`](k8s_openapi::jiff::Timestamp::MAX) is some hours earlier.

use std::mem;

/// Where such a time begins, a string in JSON. `?` stands for 0 or 1.
const TOO_LATE: &[u8; 12] = b"\"9999-12-3?T";
/// The last digit of the year.
const LAST_DIGIT: usize = 4;

/// Makes the year of each such time in an answer 9998.
#[derive(Default)]
pub(super) struct Times {
    /// The end of what has arrived, if it may be the beginning of such a time.
    kept: Vec<u8>,
}

impl Times {
    /// What becomes of `data`; what may be the beginning of such a time comes later.
    pub(super) fn pass(&mut self, data: &[u8]) -> Vec<u8> {
        let mut bytes = mem::take(&mut self.kept);
        bytes.extend_from_slice(data);
        make_readable(&mut bytes);
        self.kept = bytes.split_off(bytes.len() - length_of_beginning(&bytes));
        bytes
    }

    /// What was kept, at the end of the answer.
    pub(super) fn end(&mut self) -> Vec<u8> {
        mem::take(&mut self.kept)
    }
}

fn make_readable(bytes: &mut [u8]) {
    let mut at = 0;
    while let Some(found) = bytes.get(at..).and_then(|rest| rest.windows(TOO_LATE.len()).position(begins)) {
        bytes[at + found + LAST_DIGIT] = b'8';
        at += found + TOO_LATE.len();
    }
}

/// Length of the longest end of `bytes` that [`TOO_LATE`] begins with, in bytes.
fn length_of_beginning(bytes: &[u8]) -> usize {
    let longest = bytes.len().min(TOO_LATE.len() - 1);
    (0..=longest).rev().find(|length| begins(&bytes[bytes.len() - length..])).unwrap_or_default()
}

/// True if [`TOO_LATE`] begins with `bytes`.
fn begins(bytes: &[u8]) -> bool {
    bytes.iter().zip(TOO_LATE).all(|(is, expected)| is == expected || *expected == b'?' && b"01".contains(is))
}
