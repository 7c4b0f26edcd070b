//! Checks an object against its CustomResourceDefinition's openAPIV3Schema: fills in defaults, prunes what the schema does
//! not know, and finds what is wrong. Of the schema it reads what kube-derive writes, but for patterns and CEL rules:
//! [`validate`](super::validate()) checks what they say, in better words.

use serde_json::{Map, Value};

use api::Finding;

/// Two names that are more alike than this may be one name and its misspelling (Jaro similarity; clap takes 0.7, and would
/// propose `state` for `lead`).
const ALIKE: f64 = 0.8;

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// What is wrong.
    pub errors: Vec<Finding>,
    /// Fields that the schema does not know. They were pruned.
    pub unknown: Vec<Finding>,
}

/// Defaults, prunes and checks `object` in place. apiVersion, kind and metadata are not the schema's.
pub fn apply(schema: &Value, object: &mut Value) -> Findings {
    let mut walk = Walk { root: schema, findings: Findings::default() };
    let Value::Object(fields) = object else { return walk.findings };
    let mut kept = Map::new();
    for name in ["apiVersion", "kind", "metadata"] {
        kept.extend(fields.remove_entry(name));
    }
    walk.value(schema, object, "");
    if let Value::Object(fields) = object {
        fields.extend(kept);
    }
    walk.findings
}

/// [`apply`], and then `rules`, which reads the object into its type (the error is why it can't) and finds what no schema
/// can say. Fields that break the schema are hidden from `rules`, so that one wrong field doesn't hide what is wrong with
/// the others.
pub fn check(
    schema: &Value,
    object: &mut Value,
    rules: impl Fn(&Value) -> serde_json::Result<Vec<Finding>>,
) -> Findings {
    let mut findings = apply(schema, object);
    let mut sound = object.clone();
    for finding in &findings.errors {
        hide(&mut sound, &finding.field);
    }
    let broken = match rules(&sound) {
        Ok(broken) => broken,
        Err(reason) if findings.errors.is_empty() => vec![Finding::new("", reason.to_string())],
        // The schema's findings say it already.
        Err(_) => Vec::new(),
    };
    let is_new = |broken: &Finding| !findings.errors.iter().any(|known| broken.covers(known));
    let broken: Vec<_> = broken.into_iter().filter(is_new).collect();
    findings.errors.extend(broken);
    findings
}

/// Takes the field at `path` out of `object`: the whole list if it is an item, and the object that lacks it if it is missing.
fn hide(object: &mut Value, path: &str) {
    let path = path.split('[').next().unwrap_or_default();
    let (above, name) = path.rsplit_once('.').unwrap_or(("", path));
    let parent = above.split('.').filter(|part| !part.is_empty()).try_fold(&mut *object, |at, part| at.get_mut(part));
    let Some(Value::Object(fields)) = parent else { return };
    if fields.remove(name).is_none() && !above.is_empty() {
        hide(object, above);
    }
}

/// The one of `known` that `name` is most likely a misspelling of.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |text: &str| text.to_ascii_lowercase().replace(['_', '-'], "");
    let name = plain(name);
    let alike = known.into_iter().map(|known| (strsim::jaro(&name, &plain(known)), known));
    let nearest = alike.filter(|(alike, _)| *alike > ALIKE).max_by(|a, b| a.0.total_cmp(&b.0));
    nearest.map(|(_, known)| known)
}

struct Walk<'a> {
    root: &'a Value,
    findings: Findings,
}

impl Walk<'_> {
    fn wrong(&mut self, path: &str, problem: String) {
        self.findings.errors.push(Finding::new(path, problem));
    }

    fn value(&mut self, schema: &Value, value: &mut Value, path: &str) {
        if value.is_null() && schema["nullable"] == true {
            return;
        }
        if schema["x-kubernetes-int-or-string"] == true {
            if !(value.is_i64() || value.is_string()) {
                self.wrong(path, "must be an integer or a string".to_owned());
            }
            return;
        }
        let Some(type_) = schema["type"].as_str() else { return };
        if !has_type(type_, value) {
            return self.wrong(path, format!("must be of type {type_}, not {}", type_of(value)));
        }
        self.limits(schema, value, path);
        match value {
            Value::Object(fields) => self.fields(schema, fields, path),
            Value::Array(items) => {
                for (index, item) in items.iter_mut().enumerate() {
                    self.value(&schema["items"], item, &format!("{path}[{index}]"));
                }
            }
            _ => {}
        }
    }

    fn fields(&mut self, schema: &Value, fields: &mut Map<String, Value>, path: &str) {
        if let Some(values @ Value::Object(_)) = schema.get("additionalProperties") {
            for (name, value) in fields {
                self.value(values, value, &below(path, name));
            }
            return;
        }
        let known = schema["properties"].as_object();
        if schema["x-kubernetes-preserve-unknown-fields"] != true && schema["additionalProperties"] != true {
            fields.retain(|name, _| {
                let keep = known.is_some_and(|known| known.contains_key(name));
                if !keep {
                    let unknown = self.unknown(known, path, name);
                    self.findings.unknown.push(unknown);
                }
                keep
            });
        }
        for (name, schema) in known.into_iter().flatten() {
            // As the API server does: a null that the schema doesn't allow is no value.
            if schema["nullable"] != true && fields.get(name).is_some_and(Value::is_null) {
                fields.remove(name);
            }
            if let (false, Some(default)) = (fields.contains_key(name), schema.get("default")) {
                fields.insert(name.clone(), default.clone());
            }
            if let Some(value) = fields.get_mut(name) {
                self.value(schema, value, &below(path, name));
            }
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !fields.contains_key(name) {
                self.wrong(&below(path, name), "is missing".to_owned());
            }
        }
    }

    fn unknown(&self, known: Option<&Map<String, Value>>, path: &str, name: &str) -> Finding {
        let finding = Finding::new(below(path, name), "there is no such field");
        let beside = known.and_then(|known| nearest(name, known.keys().map(String::as_str)));
        let meant = beside.map(str::to_owned).or_else(|| only_place_of(self.root, name));
        match meant {
            Some(meant) => finding.with_remedy(format!("did you mean {meant}?")),
            // A LabelSelector, in which people write the labels themselves.
            None if known.is_some_and(|known| known.contains_key("matchLabels")) => {
                finding.with_remedy(format!("write {name} below matchLabels"))
            }
            None => finding,
        }
    }

    fn limits(&mut self, schema: &Value, value: &Value, path: &str) {
        if let Some(number) = value.as_f64() {
            if let Some(least) = schema["minimum"].as_f64().filter(|least| number < *least) {
                self.wrong(path, format!("{value} is less than {least}"));
            }
            if let Some(most) = schema["maximum"].as_f64().filter(|most| number > *most) {
                self.wrong(path, format!("{value} is more than {most}"));
            }
        }
        if let Some(choices) = schema["enum"].as_array().filter(|choices| !choices.contains(value)) {
            let choices: Vec<String> = choices.iter().map(ToString::to_string).collect();
            self.wrong(path, format!("{value} is none of {}", choices.join(", ")));
        }
    }
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// The path of the field with this name, if `schema` has exactly one outside of the status.
fn only_place_of(schema: &Value, name: &str) -> Option<String> {
    fn collect(schema: &Value, path: &str, name: &str, found: &mut Vec<String>) {
        for (field, schema) in schema["properties"].as_object().into_iter().flatten() {
            let path = below(path, field);
            if path == "status" {
                continue;
            }
            collect(schema, &path, name, found);
            if field == name {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    collect(schema, "", name, &mut found);
    if found.len() == 1 { found.pop() } else { None }
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
    use kube::CustomResourceExt;
    use serde_json::json;

    use super::*;
    use api::FluxInstance;

    fn check(mut object: Value) -> (Value, Findings) {
        let definition = json!(FluxInstance::crd());
        let findings = apply(&definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"], &mut object);
        (object, findings)
    }

    fn told(findings: &[Finding]) -> Vec<String> {
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn defaults_are_filled_in_and_unknown_fields_pruned() {
        let (object, findings) = check(json!({
            "kind": "FluxInstance", "metadata": {"name": "flux"}, "spec": {"sise": 3, "broker": {"port": 1, "x": {}}},
        }));
        assert_eq!(object["spec"]["uninstall"]["runningJobs"], "Wait");
        assert_eq!(object["spec"]["broker"], json!({"port": 1}));
        assert_eq!(object["metadata"]["name"], "flux");
        let expected =
            ["spec.sise: there is no such field: did you mean size?", "spec.broker.x: there is no such field"];
        assert_eq!(told(&findings.unknown), expected);
        assert_eq!(findings.errors, []);
    }

    #[test]
    fn a_misspelt_or_misplaced_field_is_recognised() {
        for (spec, meant) in [
            (json!({"sise": 3}), Some("size")),
            (json!({"maxsize": 3}), Some("maxSize")),
            (json!({"max_size": 3}), Some("maxSize")),
            (json!({"package": {}}), Some("packages")),
            (json!({"packages": {"bundel": {}}}), Some("bundle")),
            (json!({"packages": {"spec": []}}), Some("specs")),
            (json!({"broker": {"cpuweight": 3}}), Some("cpuWeight")),
            (json!({"nodes": {"tolerations": [{"keys": "a"}]}}), Some("key")),
            (json!({"port": 3}), Some("spec.broker.port")),
            (json!({"keepState": true}), Some("spec.uninstall.keepState")),
            (json!({"replicas": 3}), None),
            (json!({"conditions": []}), None),
        ] {
            let unknown = check(json!({ "spec": spec })).1.unknown;
            let remedy = meant.map(|meant| format!("did you mean {meant}?"));
            assert_eq!(unknown.iter().map(|finding| finding.remedy.clone()).collect::<Vec<_>>(), [remedy], "{spec}");
        }
    }

    #[test]
    fn what_breaks_the_schema_is_named_by_its_path() {
        for (spec, want) in [
            (json!({"maxSize": 0}), "spec.maxSize: 0 is less than 1"),
            (json!({"maxSize": 20_000}), "spec.maxSize: 20000 is more than 16384"),
            (json!({"broker": {"cpuWeight": 0}}), "spec.broker.cpuWeight: 0 is less than 1"),
            (json!({"size": "3"}), "spec.size: must be of type integer, not string"),
            (json!({"size": 1.5}), "spec.size: must be of type integer, not number"),
            (json!({"size": 5_000_000_000_u64}), "spec.size: 5000000000 is more than 16384"),
            (
                json!({"uninstall": {"runningJobs": "Kill"}}),
                "spec.uninstall.runningJobs: \"Kill\" is none of \"Wait\", \"Cancel\"",
            ),
            (json!({"packages": {"specs": ["a", 1]}}), "spec.packages.specs[1]: must be of type string, not number"),
            (json!({"packages": {"bundle": {"url": "x"}}}), "spec.packages.bundle.sha256: is missing"),
            (
                json!({"nodes": {"selector": {"matchLabels": {"a": 1}}}}),
                "spec.nodes.selector.matchLabels.a: must be of type string, not number",
            ),
        ] {
            assert_eq!(told(&check(json!({ "spec": spec })).1.errors), [want]);
        }
        assert_eq!(told(&check(json!({})).1.errors), ["spec: is missing"]);
    }

    #[test]
    fn null_is_a_value_only_if_the_schema_says_so() {
        let (object, findings) =
            check(json!({"spec": {"size": null, "broker": null, "nodes": {"selector": {"matchLabels": null}}}}));
        assert_eq!(findings.errors, []);
        assert_eq!(object["spec"]["size"], Value::Null);
        assert_eq!(object["spec"]["broker"], json!({}));
        assert_eq!(object["spec"]["nodes"]["selector"], json!({}));
    }
}
