//! FluxInstances as people write them into files.

use kube::CustomResourceExt;
use serde_json::Value;

use super::{FluxInstance, FluxInstanceSpec, validate};

/// Reads a file (YAML or JSON) that no API server has checked: a whole FluxInstance, or its spec alone.
///
/// # Errors
/// It is neither, has a field that there isn't (a misspelt one would silently leave its default), or can't be served.
pub fn read_instance(text: &str) -> Result<FluxInstanceSpec, String> {
    let parsed = if text.trim().is_empty() { Ok(Value::Null) } else { serde_norway::from_str(text) };
    let mut value: Value = parsed.map_err(|error| no_spec(&error))?;
    // No field of a spec has this name.
    let Some(kind) = value.get("kind") else { return checked(value) };
    if kind != "FluxInstance" {
        return Err(format!("is not a FluxInstance but of kind {kind}"));
    }
    let known = ["apiVersion", "kind", "metadata", "spec", "status"];
    let mut fields = value.as_object().into_iter().flat_map(serde_json::Map::keys);
    if let Some(field) = fields.find(|field| !known.contains(&field.as_str())) {
        return Err(format!("can't be served: {field}: there is no such field"));
    }
    checked(value["spec"].take())
}

fn no_spec(error: &impl std::fmt::Display) -> String {
    format!("is not a FluxInstance's spec: {error}")
}

fn checked(value: Value) -> Result<FluxInstanceSpec, String> {
    let refused = |error: &dyn std::fmt::Display| format!("can't be served: {error}");
    // A file of comments only.
    let value = if value.is_null() { Value::Object(serde_json::Map::new()) } else { value };
    let definition = serde_json::to_value(FluxInstance::crd()).map_err(|error| no_spec(&error))?;
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    if let Some(field) = unknown_field(&value, schema) {
        return Err(refused(&format!("spec.{field}: there is no such field")));
    }
    let spec: FluxInstanceSpec = serde_json::from_value(value).map_err(|error| no_spec(&error))?;
    validate(&spec).map_err(|error| refused(&error))?;
    Ok(spec)
}

/// The path of the first field that `schema` doesn't have.
fn unknown_field(value: &Value, schema: &Value) -> Option<String> {
    match value {
        Value::Object(fields) => {
            // Without properties it is a map, such as matchLabels.
            let properties = schema["properties"].as_object()?;
            fields.iter().find_map(|(name, value)| match properties.get(name) {
                None => Some(name.clone()),
                Some(schema) => unknown_field(value, schema).map(|below| format!("{name}.{below}")),
            })
        }
        Value::Array(items) => items.iter().find_map(|item| unknown_field(item, &schema["items"])),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_field_is_refused_wherever_it_stands() {
        for (yaml, expected) in [
            ("package: {}", "spec.package: there is no such field"),
            ("packages: {bundel: {}}", "spec.packages.bundel: there is no such field"),
            ("nodes: {tolerations: [{keys: a}]}", "spec.nodes.tolerations.keys: there is no such field"),
            ("size: 0", "spec.size: is 0: delete the FluxInstance to take everything off"),
        ] {
            assert_eq!(read_instance(yaml).unwrap_err(), format!("can't be served: {expected}"));
        }
        for yaml in ["", "# comments only", "{}", "nodes: {selector: {matchLabels: {any/name: x}}}", "size: 3"] {
            assert!(read_instance(yaml).is_ok(), "{yaml}");
        }
    }

    #[test]
    fn a_file_holds_a_whole_instance_or_its_spec_alone() {
        let whole = |rest: &str| format!("apiVersion: v1\nkind: FluxInstance\nmetadata: {{name: flux}}\n{rest}\n");
        for (text, size) in [
            (whole("spec: {size: 3}"), Some(3)),
            ("size: 3".to_owned(), Some(3)),
            (whole("spec:"), None),
            (whole(""), None),
            (String::new(), None),
        ] {
            assert_eq!(read_instance(&text).unwrap().size, size, "{text}");
        }
        for (text, field) in [
            (whole("spec: {sizes: 3}"), "spec.sizes"),
            (whole("specs: {size: 3}"), "specs"),
            ("sizes: 3".to_owned(), "spec.sizes"),
            ("spec: {size: 3}".to_owned(), "spec.spec"),
        ] {
            let expected = format!("can't be served: {field}: there is no such field");
            assert_eq!(read_instance(&text).unwrap_err(), expected, "{text}");
        }
        let other = read_instance("kind: ConfigMap\ndata: {}").unwrap_err();
        assert!(other.contains("ConfigMap"), "{other}");
    }
}
