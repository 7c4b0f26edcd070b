//! Numbers in our objects. The API server does not know Rust's unsigned formats, and takes larger numbers than their types can hold. One
//! of them would make the whole object unreadable.

use std::fmt::Display;

use schemars::Schema;
use serde::{Deserialize, Deserializer, de::Error};
use serde_json::Value;

/// The largest integer that every program reads exactly from JSON (RFC 8259, section 6). Our counts stay far below.
pub(crate) const LARGEST: u64 = 1 << 53;

/// True if the planner may continue counting from this epoch or revision. An agent's token can write any number into a report; from one close to
/// [`LARGEST`], the planner would soon come to a roster that no program reads.
pub fn is_believable(number: u64) -> bool {
    number <= LARGEST / 2
}

/// Reads an epoch or revision that is no larger than [`LARGEST`].
pub(crate) fn epoch_or_revision<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    at_most("an epoch or revision", LARGEST, deserializer)
}

/// Reads a number that is no larger than `most`.
pub(crate) fn at_most<'de, T, D>(what: &str, most: T, deserializer: D) -> Result<T, D::Error>
where
    T: Deserialize<'de> + PartialOrd + Display,
    D: Deserializer<'de>,
{
    let number = T::deserialize(deserializer)?;
    if number > most { Err(D::Error::custom(format!("{what} is {number}, more than {most}"))) } else { Ok(number) }
}

/// Has the API server refuse larger numbers in a schema than its type can hold, and negative ones where 32 bits are signed: a pid.
pub(crate) fn within_type(schema: &mut Schema) {
    let most = match schema.get("format").and_then(Value::as_str) {
        Some("uint8") => u64::from(u8::MAX),
        Some("uint16") => u64::from(u16::MAX),
        Some("uint32") => u64::from(u32::MAX),
        Some("int32") => u64::from(i32::MAX.unsigned_abs()),
        Some("uint64" | "int64") => LARGEST,
        _ => return,
    };
    if schema.get("format").and_then(Value::as_str) == Some("int32") {
        schema.ensure_object().entry("minimum").or_insert(0.into());
    }
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
                let formats = ["uint8", "uint16", "uint32", "uint64", "int32", "int64"];
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
