//! Numbers in our objects. The API server does not know Rust's unsigned formats, and takes larger numbers than their types can hold. One
//! of them would make the whole object unreadable.

use schemars::Schema;
use serde::{Deserialize, Deserializer, de::Error};
use serde_json::Value;

/// The largest integer that every program reads exactly from JSON (RFC 8259, section 6). Our counts stay far below.
pub(crate) const LARGEST: u64 = 1 << 53;

/// The largest count to go on from where a captured agent may have written it: whoever forges a number that has hardly a next one
/// would have a roster made that nobody can read.
pub const MOST_BELIEVED: u64 = LARGEST / 2;

/// Reads a number that is no larger than `MOST`.
pub(crate) fn at_most<'de, const MOST: u64, T: TryFrom<u64>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    let number = u64::deserialize(deserializer)?;
    let within = T::try_from(number).ok().filter(|_| number <= MOST);
    within.ok_or_else(|| D::Error::custom(format!("{number} is more than {MOST}")))
}

/// Has the API server refuse larger numbers in a schema than its type can hold.
pub(crate) fn within_type(schema: &mut Schema) {
    let most = match schema.get("format").and_then(Value::as_str) {
        Some("uint8") => u64::from(u8::MAX),
        Some("uint16") => u64::from(u16::MAX),
        Some("uint32") => u64::from(u32::MAX),
        Some("uint64" | "int64") => LARGEST,
        _ => return,
    };
    schema.ensure_object().entry("maximum").or_insert(most.into());
}

#[cfg(test)]
mod tests {
    use kube::CustomResourceExt;
    use serde_json::json;

    use super::*;
    use crate::{FluxInstance, FluxNode};

    fn unlimited(value: &Value) -> usize {
        match value {
            Value::Object(fields) => {
                let formats = ["uint8", "uint16", "uint32", "uint64", "int64"];
                let is_ours = formats.iter().any(|format| fields.get("format") == Some(&json!(format)));
                let own = usize::from(is_ours && !fields.contains_key("maximum"));
                own + fields.values().map(unlimited).sum::<usize>()
            }
            Value::Array(items) => items.iter().map(unlimited).sum(),
            _ => 0,
        }
    }

    #[test]
    fn no_number_that_an_agents_token_may_write_is_larger_than_its_type() {
        let version = |crd: Value| crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"].clone();
        let (node, instance) = (version(json!(FluxNode::crd())), version(json!(FluxInstance::crd())));
        assert!(node["status"]["properties"].is_object() && instance["status"]["properties"].is_object());
        assert_eq!(unlimited(&node), 0);
        assert_eq!(unlimited(&instance["status"]), 0);
    }
}
