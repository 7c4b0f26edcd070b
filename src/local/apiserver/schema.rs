//! Checks an object against its CustomResourceDefinition's openAPIV3Schema: fills in defaults, prunes what the schema does
//! not know, and tells what is wrong. Of the schema it reads what kube-derive writes.

use serde_json::{Map, Value};

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// What is wrong, each with its path.
    pub errors: Vec<String>,
    /// Paths of the fields that were pruned.
    pub unknown: Vec<String>,
}

/// Defaults, prunes and checks `object` in place. apiVersion, kind and metadata are not the schema's.
pub fn apply(schema: &Value, object: &mut Value) -> Findings {
    let mut findings = Findings::default();
    let Value::Object(fields) = object else { return findings };
    let mut kept = Map::new();
    for name in ["apiVersion", "kind", "metadata"] {
        kept.extend(fields.remove_entry(name));
    }
    walk(schema, object, "", &mut findings);
    if let Value::Object(fields) = object {
        fields.extend(kept);
    }
    findings
}

fn walk(schema: &Value, value: &mut Value, path: &str, findings: &mut Findings) {
    if value.is_null() && schema["nullable"] == true {
        return;
    }
    if schema["x-kubernetes-int-or-string"] == true {
        if !(value.is_i64() || value.is_string()) {
            findings.errors.push(format!("{path}: must be an integer or a string"));
        }
        return;
    }
    let Some(type_) = schema["type"].as_str() else { return };
    if !has_type(type_, value) {
        findings.errors.push(format!("{path}: must be of type {type_}, not {}", type_of(value)));
        return;
    }
    check_limits(schema, value, path, findings);
    match value {
        Value::Object(fields) => walk_fields(schema, fields, path, findings),
        Value::Array(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                walk(&schema["items"], item, &format!("{path}[{index}]"), findings);
            }
        }
        _ => {}
    }
}

fn walk_fields(schema: &Value, fields: &mut Map<String, Value>, path: &str, findings: &mut Findings) {
    let below = |name: &str| {
        if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
    };
    if let Some(values @ Value::Object(_)) = schema.get("additionalProperties") {
        for (name, value) in fields {
            walk(values, value, &below(name), findings);
        }
        return;
    }
    let known = schema["properties"].as_object();
    if schema["x-kubernetes-preserve-unknown-fields"] != true && schema["additionalProperties"] != true {
        fields.retain(|name, _| {
            let keep = known.is_some_and(|known| known.contains_key(name));
            if !keep {
                findings.unknown.push(below(name));
            }
            keep
        });
    }
    for (name, schema) in known.into_iter().flatten() {
        let missing = fields.get(name).is_none_or(|value| value.is_null() && schema["nullable"] != true);
        if let (true, Some(default)) = (missing, schema.get("default")) {
            fields.insert(name.clone(), default.clone());
        }
        if let Some(value) = fields.get_mut(name) {
            walk(schema, value, &below(name), findings);
        }
    }
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !fields.contains_key(name) {
            findings.errors.push(format!("{}: required value", below(name)));
        }
    }
}

fn check_limits(schema: &Value, value: &Value, path: &str, findings: &mut Findings) {
    if let Some(number) = value.as_f64() {
        if let Some(least) = schema["minimum"].as_f64().filter(|least| number < *least) {
            findings.errors.push(format!("{path}: {value} should be greater than or equal to {least}"));
        }
        if let Some(most) = schema["maximum"].as_f64().filter(|most| number > *most) {
            findings.errors.push(format!("{path}: {value} should be less than or equal to {most}"));
        }
    }
    if let Some(choices) = schema["enum"].as_array().filter(|choices| !choices.contains(value)) {
        let choices: Vec<String> = choices.iter().map(ToString::to_string).collect();
        findings.errors.push(format!("{path}: unsupported value {value}: supported values: {}", choices.join(", ")));
    }
}

fn has_type(type_: &str, value: &Value) -> bool {
    match type_ {
        "integer" => value.is_i64() || value.is_u64(),
        other => type_of(value) == other,
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{api::GROUP, local::apiserver::resources};

    fn check(mut object: Value) -> (Value, Findings) {
        let custom = resources::find(GROUP, "fluxinstances").and_then(|resource| resource.custom.as_ref());
        let findings = custom.map(|custom| apply(&custom.schema, &mut object)).unwrap_or_default();
        (object, findings)
    }

    #[test]
    fn defaults_are_filled_in_and_unknown_fields_pruned() {
        let (object, findings) = check(json!({
            "kind": "FluxInstance", "metadata": {"name": "flux"}, "spec": {"sise": 3, "broker": {"port": 1, "x": {}}},
        }));
        assert_eq!(object["spec"]["uninstall"]["runningJobs"], "Wait");
        assert_eq!(object["spec"]["broker"], json!({"port": 1}));
        assert_eq!(object["metadata"]["name"], "flux");
        assert_eq!(findings.unknown, ["spec.sise", "spec.broker.x"]);
        assert_eq!(findings.errors, [""; 0]);
    }

    #[test]
    fn what_breaks_the_schema_is_told_with_its_path() {
        for (spec, want) in [
            (json!({"maxSize": 0}), "spec.maxSize: 0 should be greater than or equal to 1"),
            (json!({"maxSize": 20_000}), "spec.maxSize: 20000 should be less than or equal to 16384"),
            (json!({"size": "3"}), "spec.size: must be of type integer, not string"),
            (json!({"size": 1.5}), "spec.size: must be of type integer, not number"),
            (
                json!({"uninstall": {"runningJobs": "Kill"}}),
                "spec.uninstall.runningJobs: unsupported value \"Kill\": supported values: \"Wait\", \"Cancel\"",
            ),
            (json!({"packages": {"specs": ["a", 1]}}), "spec.packages.specs[1]: must be of type string, not number"),
            (json!({"packages": {"bundle": {"url": "x"}}}), "spec.packages.bundle.sha256: required value"),
            (
                json!({"nodes": {"selector": {"matchLabels": {"a": 1}}}}),
                "spec.nodes.selector.matchLabels.a: must be of type string, not number",
            ),
        ] {
            assert_eq!(check(json!({ "spec": spec })).1.errors, [want]);
        }
        assert_eq!(check(json!({})).1.errors, ["spec: required value"]);
    }

    #[test]
    fn null_is_a_value_only_where_the_schema_says_so() {
        let (object, findings) = check(json!({"spec": {"size": null, "broker": null}}));
        assert_eq!(findings.errors, [""; 0]);
        assert_eq!(object["spec"]["size"], Value::Null);
        assert_eq!(object["spec"]["broker"], json!({}));
    }
}
