//! RFC 3 messages as a broker's socket gives them.
#![no_main]

use broker::message::{Message, PREAMBLE, frame_length};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some((preamble, rest)) = bytes.split_first_chunk::<PREAMBLE>() {
        let _ = frame_length(*preamble);
        let _ = Message::decode(rest);
    }
    let _ = Message::decode(bytes);
});
