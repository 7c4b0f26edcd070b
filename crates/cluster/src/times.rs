//! Makes times readable that other clients of the API server may write and ours can't read. Kubernetes takes any time up to
//! the end of the year 9999 (RFC 3339), in any object that a user may write: as the time of a condition, in
//! `metadata.managedFields`, in a Lease. [`Timestamp::MAX`](k8s_openapi::jiff::Timestamp::MAX) is some hours earlier, so that one
//! such time would make a whole list unreadable, and with it all that we know of other objects.

use std::{
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use hyper::{
    Response,
    body::{Body, Bytes, Frame},
};

/// Where such a time begins, a string in JSON. `?` stands for 0 or 1.
const TOO_LATE: &[u8; 12] = b"\"9999-12-3?T";
/// The last digit of the year.
const LAST_DIGIT: usize = 4;

/// Makes the year of each such time in an answer 9998.
pub(crate) fn readable<B>(answer: Response<B>) -> Response<ReadableTimes<B>> {
    answer.map(|body| ReadableTimes { body, kept: Vec::new() })
}

/// The body of an answer.
pub(crate) struct ReadableTimes<B> {
    body: B,
    /// The end of what has arrived, if it may be the beginning of such a time.
    kept: Vec<u8>,
}

impl<B: Body<Data = Bytes> + Unpin> Body for ReadableTimes<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        loop {
            let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(context)).transpose()? else {
                let kept = mem::take(&mut self.kept);
                return Poll::Ready((!kept.is_empty()).then(|| Ok(Frame::data(kept.into()))));
            };
            let data = match frame.into_data() {
                Ok(data) => data,
                // Trailers, which come after all data.
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            };
            let mut bytes = mem::take(&mut self.kept);
            bytes.extend_from_slice(&data);
            make_readable(&mut bytes);
            self.kept = bytes.split_off(bytes.len() - length_of_beginning(&bytes));
            if !bytes.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(bytes.into()))));
            }
        }
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

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, convert::Infallible};

    use super::*;

    struct Chunks(VecDeque<Bytes>);

    impl Body for Chunks {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(self.0.pop_front().map(|chunk| Ok(Frame::data(chunk))))
        }
    }

    /// What comes of `text` if it arrives in two pieces, the first of `length` bytes.
    fn read(text: &str, length: usize) -> String {
        let (first, second) = text.as_bytes().split_at(length);
        let chunks = [first, second].map(Bytes::copy_from_slice).into_iter().filter(|chunk| !chunk.is_empty());
        let mut body = readable(Response::new(Chunks(chunks.collect()))).into_body();
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut whole = Vec::new();
        while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut body).poll_frame(&mut context) {
            whole.extend_from_slice(&frame.into_data().unwrap());
        }
        String::from_utf8(whole).unwrap()
    }

    #[test]
    fn a_time_at_the_end_of_9999_is_read_as_one_of_9998_however_it_arrives() {
        for (text, expected) in [
            (r#"{"time":"9999-12-31T23:59:59Z"}"#, r#"{"time":"9998-12-31T23:59:59Z"}"#),
            (
                r#"["9999-12-30T22:00:01Z","9999-12-31T00:00:00.000000Z"]"#,
                r#"["9998-12-30T22:00:01Z","9998-12-31T00:00:00.000000Z"]"#,
            ),
            // A name of an object.
            (r#"{"name":"9999-12-31t"} ""#, r#"{"name":"9999-12-31t"} ""#),
            (r#"{"time":"9999-12-29T00:00:00Z"}"#, r#"{"time":"9999-12-29T00:00:00Z"}"#),
            (r#""9999-12-3"#, r#""9999-12-3"#),
        ] {
            for length in 0..=text.len() {
                assert_eq!(read(text, length), expected, "in pieces after {length} bytes");
            }
        }
    }
}
