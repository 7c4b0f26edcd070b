//! JSON that may be too large for an object of Kubernetes, which holds 1 MiB to 1.5 MiB: the roster of some three thousand
//! members is. Besides, each agent reads it at its start. What is large is kept gzip'd, a tenth of its size; people and scripts read the rest
//! as it is.

use std::{
    borrow::Cow,
    io::{self, Read, Write},
};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use k8s_openapi::ByteString;
use serde_json::Value;

/// Bytes from which on a text is packed: the roster of some hundred members.
pub const LARGE: usize = 32 << 10;
/// Most bytes that are unpacked, more than any document of ours has. A longer one is cut off, and then does not parse.
const MOST: u64 = 32 << 20;

/// As gzip.
///
/// # Errors
/// If it can't be compressed.
pub fn pack(text: &str) -> io::Result<ByteString> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(text.as_bytes())?;
    gzip.finish().map(ByteString)
}

/// What [`pack`] has packed.
///
/// # Errors
/// If it is no gzip of UTF-8 text.
pub fn unpack(packed: &ByteString) -> io::Result<String> {
    let mut text = String::new();
    GzDecoder::new(packed.0.as_slice()).take(MOST).read_to_string(&mut text)?;
    Ok(text)
}

/// For a field of text: a JSON object as it is, or as gzip in base64 if it is large.
pub fn to_field(object: String) -> String {
    if object.len() <= LARGE {
        return object;
    }
    let packed = pack(&object).map(serde_json::to_value);
    match packed {
        Ok(Ok(Value::String(base64))) => base64,
        _ => object,
    }
}

/// The JSON object that [`to_field`] has made a field of. None: it can't be unpacked.
pub fn from_field(field: &str) -> Option<Cow<'_, str>> {
    if field.starts_with('{') {
        return Some(field.into());
    }
    let packed = serde_json::from_value(Value::String(field.to_owned())).ok()?;
    unpack(&packed).ok().map(Cow::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_unpacked_than_any_document_of_ours_has() {
        let longer = " ".repeat(usize::try_from(MOST).unwrap() + 1);
        assert_eq!(unpack(&pack(&longer).unwrap()).unwrap().len() as u64, MOST);
    }

    #[test]
    fn an_object_comes_back_from_its_field_whether_it_is_large_or_not() {
        for length in [2, LARGE * 3] {
            let object = format!("{{{}}}", " ".repeat(length));
            let field = to_field(object.clone());
            assert!(field.len() <= LARGE && from_field(&field).unwrap() == object);
        }
        assert_eq!(from_field("H4sI not base64"), None);
        assert_eq!(from_field("AAAA"), None);
    }
}
