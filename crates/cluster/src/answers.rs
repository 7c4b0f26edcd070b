//! Answers of the API server, without what other users of it may write so that our program can't read it. One object that can't be read
//! would make a whole list unreadable, and with it all that we know of others.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use hyper::{
    Response,
    body::{Body, Bytes, Frame},
};

use super::{managers::Managers, times::Times};

/// Makes an answer readable.
pub(crate) fn readable<B>(answer: Response<B>) -> Response<Readable<B>> {
    answer.map(|body| Readable { body, filters: Some(Filters::default()) })
}

/// The body of an answer.
pub(crate) struct Readable<B> {
    body: B,
    /// None after the end of the body.
    filters: Option<Filters>,
}

#[derive(Default)]
struct Filters {
    managers: Managers,
    times: Times,
}

impl<B: Body<Data = Bytes> + Unpin> Body for Readable<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        loop {
            let frame = ready!(Pin::new(&mut self.body).poll_frame(context)).transpose()?;
            let Some(filters) = &mut self.filters else { return Poll::Ready(frame.map(Ok)) };
            let passed = match frame.map(Frame::into_data) {
                Some(Ok(data)) => filters.times.pass(&filters.managers.pass(&data)),
                // Trailers, which come after all data.
                Some(Err(trailers)) => return Poll::Ready(Some(Ok(trailers))),
                None => {
                    let mut end = filters.times.pass(&filters.managers.end());
                    end.extend(filters.times.end());
                    self.filters = None;
                    end
                }
            };
            if !passed.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(passed.into()))));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, convert::Infallible};

    use k8s_openapi::jiff::Timestamp;

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

    fn all_are_read(texts: &[(&str, &str)]) {
        for (text, expected) in texts {
            for length in 0..=text.len() {
                assert_eq!(read(text, length), *expected, "in pieces after {length} bytes");
            }
        }
    }

    #[test]
    fn a_time_that_our_client_can_not_represent_is_read_as_another_however_it_arrives() {
        let unread = [
            ("9999-12-30T22:00:01Z", "9996-12-30T22:00:01Z"),
            ("9999-12-31T23:59:59.000000Z", "9996-12-31T23:59:59.000000Z"),
            ("10000-01-01T13:59:59.000000Z", "9996-01-01T13:59:59.000000Z"),
            ("292277026596-02-29T15:30:07Z", "9996-02-29T15:30:07Z"),
            ("-0001-12-31T10:00:00Z", "0004-12-31T10:00:00Z"),
            ("-292277022399-02-29T00:00:00Z", "0004-02-29T00:00:00Z"),
        ];
        for (written, read_as) in unread {
            assert!(written.parse::<Timestamp>().is_err(), "{written}: then it need not be replaced");
            assert!(read_as.parse::<Timestamp>().is_ok(), "{read_as}");
            let object = |time: &str| format!(r#"{{"a":["{time}","x"],"b":"{time}"}}"#);
            all_are_read(&[(&object(written), &object(read_as))]);
        }
        for kept in [
            r#"{"time":"0000-01-01T00:00:00Z"}"#,
            r#"{"time":"9999-12-29T00:00:00Z"}"#,
            // Names of objects, quantities, and the end of an answer.
            r#"{"name":"9999-12-31t"} ""#,
            r#"{"name":"-","a":"12345","b":"-1","c":"10000-01-0","d":"","e":"-10000-01-01"}"#,
            r#"{"a":"123456789012345678901234-01-01T"}"#,
            r#""9999-12-3"#,
            r#""-"#,
        ] {
            all_are_read(&[(kept, kept)]);
        }
    }

    #[test]
    fn who_manages_which_fields_is_not_read_however_it_arrives() {
        all_are_read(&[
            (r#"{"managedFields":[{"f:a":{"f:]}":[[]]}},"]\\\"]"],"name":"a"}"#, r#"{"managedFields":[],"name":"a"}"#),
            (r#"[{"managedFields":[]},{"managedFields":[1]}]"#, r#"[{"managedFields":[]},{"managedFields":[]}]"#),
            // In the text of somebody's annotation.
            (r#"{"a":"{\"managedFields\":[1]}"}"#, r#"{"a":"{\"managedFields\":[1]}"}"#),
            (r#"{"managedFields":null,"managed"#, r#"{"managedFields":null,"managed"#),
            ("{}\n{\"managedFields\":[{}]}\n", "{}\n{\"managedFields\":[]}\n"),
        ]);
    }

    #[test]
    fn managers_of_any_depth_hide_no_object() {
        let deep = format!("{}{}", r#"{"f:a":"#.repeat(500), "{}".to_owned() + &"}".repeat(500));
        let text = format!(r#"{{"items":[{{"managedFields":[{deep}],"name":"a"}},{{"name":"b"}}]}}"#);
        let read: serde_json::Value = serde_json::from_str(&read(&text, 100)).unwrap();
        assert_eq!(read["items"].as_array().unwrap().len(), 2);
        assert!(serde_json::from_str::<serde_json::Value>(&text).is_err(), "then this is not needed any more");
    }
}
