//! Numbers in our objects. The API server does not know Rust's unsigned formats, and takes larger numbers than their types can hold. One
//! of them would make the whole object unreadable.

use schemars::Schema;
use serde_json::Value;

/// Has the API server refuse larger numbers in a schema than their types can hold, at any depth.
pub(crate) fn within_types(schema: &mut Schema) {
    if let Some(schema) = schema.as_object_mut() {
        schema.values_mut().for_each(in_value);
    }
}

fn in_value(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let most = match fields.get("format").and_then(Value::as_str) {
                Some("uint8") => Some(u64::from(u8::MAX)),
                Some("uint16") => Some(u64::from(u16::MAX)),
                Some("uint32") => Some(u64::from(u32::MAX)),
                _ => None,
            };
            if let Some(most) = most {
                fields.entry("maximum").or_insert(most.into());
            }
            fields.values_mut().for_each(in_value);
        }
        Value::Array(items) => items.iter_mut().for_each(in_value),
        _ => {}
    }
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
                let is_ours =
                    ["uint8", "uint16", "uint32"].iter().any(|format| fields.get("format") == Some(&json!(format)));
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
