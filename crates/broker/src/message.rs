//! Messages on a broker's local socket (RFC 3), in the format that flux-core really writes. Pure.
//!
//! A frame is `12 00 ee ff`, the length of the rest as a big-endian u32 that does not count these eight bytes (the text
//! of RFC 3 counts them; src/common/librouter/sendfd.c does not), and parts. A part is its length, either as one byte
//! below 255 or as 255 and a big-endian u32, and its bytes. The parts are: the route and an empty part that ends it,
//! the topic, the payload, and a header of 20 bytes.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Bytes before a frame's parts.
pub const PREAMBLE: usize = 8;
/// Most bytes in a frame. No status is larger; a larger frame is not read.
pub const MAX_FRAME: usize = 64 << 20;
/// Most bytes in a topic. A receiver keeps those of some events.
const LONGEST_TOPIC: usize = 256;
/// `nodeid` of a request for any broker with the service, beginning with this one.
pub const ANY: u32 = u32::MAX;
/// `nodeid` of a request: the lead.
pub const LEAD: u32 = 0;
/// `matchtag` of a request without response (RFC 6).
pub const NO_RESPONSE: u32 = 0;
/// errnum that ends a stream without error.
pub const ENODATA: u32 = 61;
/// Operation not permitted.
pub const EPERM: u32 = 1;
/// errnum of a service that does not find what the request names.
pub const ENOENT: u32 = 2;
/// Invalid argument.
pub const EINVAL: u32 = 22;
/// errnum of a request to a service that is not loaded.
pub const ENOSYS: u32 = 38;

const MAGIC: [u8; 4] = 0xffee_0012_u32.to_le_bytes();
const HEADER: usize = 20;
const HEADER_MAGIC: u8 = 0x8e;
const VERSION: u8 = 1;
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;
const FLAG_TOPIC: u8 = 0x01;
const FLAG_PAYLOAD: u8 = 0x02;
const FLAG_NO_RESPONSE: u8 = 0x04;
const FLAG_ROUTE: u8 = 0x08;
const FLAG_STREAMING: u8 = 0x40;
/// The broker replaces it with the user id of the socket's peer.
const USER_UNKNOWN: u32 = u32::MAX;

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request<'a> {
    /// Service and method.
    pub topic: &'a str,
    /// [`ANY`], [`LEAD`], or a rank.
    pub nodeid: u32,
    /// Copied to the response. [`NO_RESPONSE`] requests none.
    pub matchtag: u32,
    /// True for any number of responses, ended by an error.
    pub streaming: bool,
    /// JSON; `Null` for no payload.
    pub payload: &'a Value,
}

/// A message from the broker.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// True for a response, false for an event or a control message.
    pub is_response: bool,
    /// The request's matchtag.
    pub matchtag: u32,
    /// 0 for success.
    pub errnum: u32,
    /// Service and method.
    pub topic: String,
    /// JSON, or text if there is an error; without the final NUL.
    pub payload: Option<Vec<u8>>,
}

/// The bytes are no valid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The peer is not Flux, or a frame boundary was missed.
    #[error("a frame does not begin with RFC 3's magic number")]
    Magic,
    /// See [`MAX_FRAME`].
    #[error("a frame of {0} bytes is larger than the limit")]
    TooLarge(usize),
    /// See [`would_take_too_much`].
    #[error("an answer would take more than {MOST_PARSED} bytes when it is parsed")]
    TooMuchMemory,
    /// See [`MOST_PARTS`].
    #[error("a frame has more than {MOST_PARTS} parts")]
    TooManyParts,
    /// A part reaches beyond the frame, or is missing.
    #[error("a frame is cut short")]
    Truncated,
    /// The header is not one of RFC 3 version 1.
    #[error("a message's header is not that of RFC 3 version 1")]
    Header,
    /// The topic is not text, or longer than [`LONGEST_TOPIC`].
    #[error("a message's topic is too long or not UTF-8")]
    Topic,
}

impl Request<'_> {
    /// The request as a whole frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut flags = FLAG_TOPIC | FLAG_ROUTE;
        let mut parts = Vec::new();
        // An empty route; the broker adds its hops.
        push_part(&mut parts, &[]);
        push_part(&mut parts, self.topic.as_bytes());
        if !self.payload.is_null() {
            flags |= FLAG_PAYLOAD;
            let mut json = self.payload.to_string().into_bytes();
            json.push(0);
            push_part(&mut parts, &json);
        }
        if self.streaming {
            flags |= FLAG_STREAMING;
        }
        if self.matchtag == NO_RESPONSE {
            flags |= FLAG_NO_RESPONSE;
        }
        let mut header = vec![HEADER_MAGIC, VERSION, REQUEST, flags];
        for word in [USER_UNKNOWN, 0, self.nodeid, self.matchtag] {
            header.extend(word.to_be_bytes());
        }
        push_part(&mut parts, &header);
        frame(&parts)
    }
}

/// Puts the preamble before `parts`.
pub fn frame(parts: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(PREAMBLE + parts.len());
    out.extend(MAGIC);
    // Requests are far below 4 GiB. The broker refuses the largest length, so a longer request can't be misread.
    out.extend(u32::try_from(parts.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend(parts);
    out
}

/// Appends `part` with its length to `out`.
pub fn push_part(out: &mut Vec<u8>, part: &[u8]) {
    match u8::try_from(part.len()) {
        Ok(length) if length < u8::MAX => out.push(length),
        _ => {
            out.push(u8::MAX);
            out.extend(u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes());
        }
    }
    out.extend(part);
}

/// Length in bytes of the parts that follow this preamble.
///
/// # Errors
/// [`DecodeError::Magic`], [`DecodeError::TooLarge`].
pub fn frame_length(preamble: [u8; PREAMBLE]) -> Result<usize, DecodeError> {
    let [a, b, c, d, length @ ..] = preamble;
    if [a, b, c, d] != MAGIC {
        return Err(DecodeError::Magic);
    }
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if length > MAX_FRAME { Err(DecodeError::TooLarge(length)) } else { Ok(length) }
}

/// Most parts of a frame. A message has four, and one for each hop of its route.
const MOST_PARTS: usize = 64;

/// Splits the bytes after the preamble into parts.
///
/// # Errors
/// [`DecodeError::Truncated`], [`DecodeError::TooManyParts`].
pub fn parts(mut bytes: &[u8]) -> Result<Vec<&[u8]>, DecodeError> {
    let mut parts = Vec::new();
    while let Some((first, rest)) = bytes.split_first() {
        let (length, rest) = match *first {
            u8::MAX => {
                let (length, rest) = rest.split_first_chunk::<4>().ok_or(DecodeError::Truncated)?;
                (usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX), rest)
            }
            length => (usize::from(length), rest),
        };
        let (part, rest) = rest.split_at_checked(length).ok_or(DecodeError::Truncated)?;
        if parts.len() == MOST_PARTS {
            return Err(DecodeError::TooManyParts);
        }
        parts.push(part);
        bytes = rest;
    }
    Ok(parts)
}

/// Most memory that a parsed answer may take, in bytes: R with Fluxion's graph of 300,000 vertices takes that much.
const MOST_PARSED: usize = 1 << 30;

/// True if `json` may take more memory than [`MOST_PARSED`] when it is parsed: `0,` and `{}` take many times their size then.
pub fn would_take_too_much(json: &[u8]) -> bool {
    // Vectors grow to twice their size, and begin with room for four values. A table begins with room for four entries, and its index.
    let value = size_of::<Value>();
    let entry = value + size_of::<String>() + size_of::<usize>();
    let estimates = json.iter().map(|byte| match byte {
        b',' => 2 * value,
        b':' => 2 * (entry - value) + 16,
        b'[' => 4 * value,
        b'{' => 4 * entry + 64,
        _ => 1,
    });
    estimates.sum::<usize>() > MOST_PARSED
}

/// Parses JSON that an answer holds in another form, such as escaped or in base64, which hides its values from the look at the answer. None
/// if it is no such JSON, or [`would_take_too_much`].
pub fn parse_inner<T: DeserializeOwned>(json: &[u8]) -> Option<T> {
    (!would_take_too_much(json)).then(|| serde_json::from_slice(json).ok())?
}

impl Message {
    /// Bytes of memory that it takes.
    pub fn size(&self) -> usize {
        size_of::<Self>() + self.topic.len() + self.payload.as_ref().map_or(0, Vec::len)
    }

    /// Decodes the bytes after the preamble.
    ///
    /// # Errors
    /// [`DecodeError`] if they are no valid message.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let parts = parts(bytes)?;
        let (header, parts) = parts.split_last().ok_or(DecodeError::Truncated)?;
        let header: &[u8; HEADER] = (*header).try_into().map_err(|_| DecodeError::Header)?;
        let [HEADER_MAGIC, VERSION, kind, flags, words @ ..] = header else {
            return Err(DecodeError::Header);
        };
        let word = |index: usize| {
            let bytes = words.get(index * 4..index * 4 + 4).and_then(|bytes| bytes.try_into().ok());
            bytes.map(u32::from_be_bytes).ok_or(DecodeError::Header)
        };
        let mut parts = parts.iter();
        if flags & FLAG_ROUTE != 0 {
            parts.by_ref().find(|part| part.is_empty()).ok_or(DecodeError::Truncated)?;
        }
        let topic = match flags & FLAG_TOPIC {
            0 => &[],
            _ => *parts.next().ok_or(DecodeError::Truncated)?,
        };
        let topic =
            str::from_utf8(topic).ok().filter(|topic| topic.len() <= LONGEST_TOPIC).ok_or(DecodeError::Topic)?;
        let payload = match flags & FLAG_PAYLOAD {
            0 => None,
            _ => {
                let payload = *parts.next().ok_or(DecodeError::Truncated)?;
                Some(payload.strip_suffix(&[0]).unwrap_or(payload).to_vec())
            }
        };
        let topic = topic.to_owned();
        Ok(Self { is_response: *kind == RESPONSE, matchtag: word(3)?, errnum: word(2)?, topic, payload })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn unhex(text: &str) -> Vec<u8> {
        hex::decode(text.replace(' ', "")).unwrap()
    }

    /// The answer of flux-core 0.88 to `attr.get {"name":"rank"}`.
    fn recorded() -> Vec<u8> {
        let mut bytes = b"\x00\x08attr.get\x18{\"value\":\"0\",\"flags\":1}\x00\x14".to_vec();
        bytes.extend(unhex("8e01020b 00000000 00000005 00000000 00000001"));
        bytes
    }

    #[test]
    fn a_recorded_answer_is_decoded() {
        assert_eq!(recorded().len(), 0x38);
        assert_eq!(frame_length([0x12, 0, 0xee, 0xff, 0, 0, 0, 0x38]), Ok(0x38));
        let expected = Message {
            is_response: true,
            matchtag: 1,
            errnum: 0,
            topic: "attr.get".to_owned(),
            payload: Some(br#"{"value":"0","flags":1}"#.to_vec()),
        };
        assert_eq!(Message::decode(&recorded()), Ok(expected));
    }

    #[test]
    fn a_recorded_refusal_is_decoded() {
        let mut bytes = b"\x00\x08attr.get\x14".to_vec();
        bytes.extend(unhex("8e010209 00000000 00000005 00000002 00000007"));
        let message = Message::decode(&bytes).unwrap();
        assert_eq!((message.errnum, message.matchtag, message.payload), (2, 7, None));
    }

    #[test]
    fn a_request_is_encoded_as_flux_expects_it() {
        let payload = json!({"name": "rank"});
        let request = Request { topic: "attr.get", nodeid: ANY, matchtag: 3, streaming: false, payload: &payload };
        let mut expected = unhex("1200eeff 00000030 00 08");
        expected.extend(b"attr.get\x10{\"name\":\"rank\"}\x00\x14");
        expected.extend(unhex("8e01010b ffffffff 00000000 ffffffff 00000003"));
        assert_eq!(request.encode(), expected);
        let without = Request { streaming: true, nodeid: LEAD, payload: &Value::Null, ..request }.encode();
        assert_eq!(without[without.len() - HEADER..], unhex("8e010149 ffffffff 00000000 00000000 00000003"));
    }

    #[test]
    fn long_parts_have_long_lengths() {
        for length in [0, 1, 254, 255, 256, 70_000] {
            let mut out = Vec::new();
            push_part(&mut out, &vec![b'x'; length]);
            push_part(&mut out, b"next");
            assert_eq!(out.len(), length + if length < 255 { 1 } else { 5 } + 5);
            assert_eq!(parts(&out).unwrap()[0].len(), length);
            assert_eq!(parts(&out).unwrap()[1], b"next");
        }
    }

    #[test]
    fn a_truncated_message_is_refused() {
        let whole = recorded();
        for length in 0..whole.len() {
            assert!(Message::decode(&whole[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn garbage_is_refused() {
        let header = "14 8e01020b 00000000 00000005 00000000 00000001";
        for (bytes, error) in [
            ("", DecodeError::Truncated),
            ("ff ffffffff 00", DecodeError::Truncated),
            ("ff 0000", DecodeError::Truncated),
            ("05 0000", DecodeError::Truncated),
            ("00 00 00", DecodeError::Header),
            (&header.replace("8e01", "8e02"), DecodeError::Header),
            (&header.replace("8e01", "ae01"), DecodeError::Header),
            // A route that never ends; no topic; no payload.
            (&format!("01 61 {header}"), DecodeError::Truncated),
            (&format!("00 {header}"), DecodeError::Truncated),
            (&format!("00 01 61 {header}"), DecodeError::Truncated),
            (&format!("00 01 ff 01 61 {header}"), DecodeError::Topic),
        ] {
            assert_eq!(Message::decode(&unhex(bytes)), Err(error), "{bytes}");
        }
        assert_eq!(frame_length(*b"HTTP/1.1"), Err(DecodeError::Magic));
        assert_eq!(frame_length([0xff, 0xee, 0, 0x12, 0, 0, 0, 1]), Err(DecodeError::Magic));
        let huge = [0x12, 0, 0xee, 0xff, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(frame_length(huge), Err(DecodeError::TooLarge(0xffff_ffff)));
    }

    #[test]
    fn an_answer_that_would_take_more_than_1_gib_is_not_parsed() {
        let ranks = |count: u32| json!({"ranks": (0..count).collect::<Vec<_>>()}).to_string();
        assert!(!would_take_too_much(ranks(16384).as_bytes()));
        let vertex = json!({"id": "1", "metadata": {"type": "core", "id": 0, "rank": 0, "paths": {"containment": "/c0/n0/core0"}}});
        assert!(!would_take_too_much(json!({"nodes": vec![vertex; 200_000]}).to_string().as_bytes()));
        assert!(would_take_too_much(format!("[{}0]", "0,".repeat(17_000_000)).as_bytes()));
        assert!(would_take_too_much(format!("[{}0]", r#"{"":0},"#.repeat(3_000_000)).as_bytes()));
        let nested = format!("{}{},", "[".repeat(100), "]".repeat(100));
        assert!(would_take_too_much(format!("[{}0]", nested.repeat(100_000)).as_bytes()));
    }

    #[test]
    fn json_within_an_answer_has_the_same_bound() {
        assert_eq!(parse_inner(b"[1]"), Some(json!([1])));
        assert_eq!(parse_inner::<Value>(b"["), None);
        assert_eq!(parse_inner::<Value>(format!("[{}0]", "0,".repeat(17_000_000)).as_bytes()), None);
    }

    #[test]
    fn a_frame_with_more_parts_than_any_message_is_refused() {
        assert_eq!(parts(&vec![0; 1 << 20]), Err(DecodeError::TooManyParts));
        assert!(Message::decode(&vec![0; 1 << 20]).is_err());
    }

    #[test]
    fn no_bytes_make_the_reader_panic() {
        // Changes each byte of a valid message to a few values.
        let good = recorded();
        for at in 0..good.len() {
            for value in [0, 1, 0x7f, 0xfe, 0xff] {
                let mut changed = good.clone();
                changed[at] = value;
                let _ = Message::decode(&changed);
            }
        }
    }
}
