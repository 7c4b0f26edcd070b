//! Reads FluxInstances from files and validates them, because no API server has checked them yet.

use std::sync::LazyLock;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::CustomResourceExt;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    places::{self, FieldLines},
    schema::{self, Findings, nearest},
};
use crate::validate;
use api::{
    CONFIGMAP_DEFAULT, CONFIGMAP_DEFAULT_KEY, Finding, FluxInstance, FluxInstanceSpec, GROUP, INSTANCE, NAMESPACE,
    VERSION,
};

const KIND: &str = "FluxInstance";

/// The documents of a file.
#[derive(Debug, Default, PartialEq)]
pub struct Documents {
    /// The documents that hold the spec of a FluxInstance.
    pub specs: Vec<SpecDocument>,
    /// Kind and name of the other documents, such as `Namespace flux-distribute`. They are not checked.
    pub others: Vec<String>,
}

/// A FluxInstance, a bare spec, or ConfigMap flux-default, from which the planner creates the first FluxInstance.
#[derive(Debug, Default, PartialEq)]
pub struct SpecDocument {
    /// The spec, even if it has findings. None if it can't be parsed.
    pub spec: Option<FluxInstanceSpec>,
    /// Everything that is wrong, sorted by line. If this is empty, the spec can be served.
    pub findings: Vec<Finding>,
}

/// Reads a file (YAML or JSON) that may hold several documents or a List: whole FluxInstances, or one bare spec, with or
/// without the key `spec` above it. An empty file holds none.
///
/// # Errors
/// If the file is not YAML, so that no document can be read.
pub fn read(text: &str) -> Result<Documents, Finding> {
    let not_yaml = |error: serde_norway::Error| Finding {
        line: error.location().map(|at| at.line()),
        ..Finding::new("", format!("is not YAML: {error}"))
    };
    let parsed = serde_norway::Deserializer::from_str(text).map(Value::deserialize).collect::<Result<Vec<_>, _>>();
    let mut values = parsed.map_err(not_yaml)?;
    let mut places = places::documents(text);
    places.resize(values.len(), FieldLines::default());
    let mut numbered: Vec<_> = values.drain(..).zip(places).collect();
    if numbered.len() > 1 {
        // Empty documents, between two `---` or after the last one.
        numbered.retain(|(value, _)| !value.is_null());
    }
    // `kubectl get fxi -o yaml` prints a List. The lines in it are not known.
    if let [(list, _)] = numbered.as_mut_slice()
        && list["kind"] == "List"
        && let Value::Array(items) = list["items"].take()
    {
        numbered = items.into_iter().map(|item| (item, FieldLines::default())).collect();
    }
    if matches!(numbered.as_slice(), [] | [(Value::Null, _)]) {
        return Ok(Documents::default());
    }
    let is_only = numbered.len() == 1;
    let mut documents = Documents::default();
    for (value, places) in numbered {
        match role(&value, is_only) {
            Role::Instance => documents.specs.push(instance(value, &places)),
            Role::Spec => documents.specs.push(spec_alone(json!({ "spec": value }), &places, "spec.")),
            Role::SpecWithKey => documents.specs.push(spec_alone(value, &places, "")),
            Role::Default => documents.specs.push(default_spec(&value, &places)),
            Role::Other(name) => documents.others.push(name),
        }
    }
    Ok(documents)
}

/// Reads the only FluxInstance, or bare spec, of a file.
///
/// # Errors
/// Everything that is wrong with it, or that the file holds none or more than one.
pub fn read_instance(text: &str) -> Result<FluxInstanceSpec, Vec<Finding>> {
    let Documents { mut specs, others } = read(text).map_err(|finding| vec![finding])?;
    match (specs.pop(), specs.is_empty()) {
        (Some(SpecDocument { spec: Some(spec), findings }), true) if findings.is_empty() => Ok(spec),
        (Some(SpecDocument { findings, .. }), true) => Err(findings),
        (Some(_), false) => Err(vec![Finding::new("", "holds more than one FluxInstance")]),
        (None, _) => Err(vec![nothing_of_ours(&others)]),
    }
}

/// Reads the text of ConfigMap flux-default, as [`read_instance`] does; a text without content means the defaults.
///
/// # Errors
/// As for [`read_instance`].
pub fn read_default(text: &str) -> Result<FluxInstanceSpec, Vec<Finding>> {
    match read(text) {
        Ok(documents) if documents == Documents::default() => Ok(FluxInstanceSpec::default()),
        _ => read_instance(text),
    }
}

/// The finding for a file that holds no FluxInstance.
pub fn nothing_of_ours(others: &[String]) -> Finding {
    if others.is_empty() {
        return Finding::new("", "holds no FluxInstance: it is empty");
    }
    Finding::new("", format!("holds no FluxInstance, only {}", others.join(", ")))
}

/// How [`read`] treats a document.
enum Role {
    Instance,
    Spec,
    /// A bare spec below the key `spec`, as `bundle inspect` prints it.
    SpecWithKey,
    Default,
    Other(String),
}

fn role(value: &Value, is_only: bool) -> Role {
    let text = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let (version, kind, name) = (text("/apiVersion"), text("/kind"), text("/metadata/name"));
    let is_object = ["apiVersion", "kind", "metadata", "spec"].iter().any(|field| value.get(field).is_some());
    let group = version.split('/').next().unwrap_or_default();
    match kind {
        // A spec has no field with one of these names, so a document without them can only be a bare spec.
        "" if !is_object && is_only => Role::Spec,
        "" if is_only && value.as_object().is_some_and(|object| object.keys().eq(["spec"])) => Role::SpecWithKey,
        "" if is_object && (group == GROUP || version.is_empty()) => Role::Instance,
        "ConfigMap" if name == CONFIGMAP_DEFAULT => Role::Default,
        "FluxNode" => Role::Other(format!("FluxNode {name}")),
        _ if group == GROUP || nearest(kind, [KIND]).is_some() => Role::Instance,
        "" => Role::Other("a document without a kind".to_owned()),
        kind => Role::Other(format!("{kind} {name}").trim_end().to_owned()),
    }
}

fn instance(mut object: Value, places: &FieldLines) -> SpecDocument {
    let mut findings = Vec::new();
    let known = ["apiVersion", "kind", "metadata", "spec", "status"];
    unknown_fields(&object, "", &known, &mut findings);
    must_be(&object, "apiVersion", &format!("{GROUP}/{VERSION}"), &mut findings);
    must_be(&object, "kind", KIND, &mut findings);
    metadata(&object["metadata"], &mut findings);
    // The API server writes the status, so users don't have to fix it.
    if let Value::Object(fields) = &mut object {
        fields.retain(|field, _| known.contains(&field.as_str()) && field != "status");
    }
    let spec = check_spec(&mut object, &mut findings);
    finish(spec, findings, places, "")
}

/// Checks `{spec: …}`; `prefix` is what the file's own paths lack.
fn spec_alone(mut object: Value, places: &FieldLines, prefix: &str) -> SpecDocument {
    if object["spec"].is_null() {
        object["spec"] = json!({});
    }
    let mut findings = Vec::new();
    let spec = check_spec(&mut object, &mut findings);
    finish(spec, findings, places, prefix)
}

/// Checks the spec in ConfigMap flux-default. Its lines are known if the text is a YAML block (`|`).
fn default_spec(map: &Value, places: &FieldLines) -> SpecDocument {
    let text = map["data"][CONFIGMAP_DEFAULT_KEY].as_str().unwrap_or_default();
    let field = format!("data.{CONFIGMAP_DEFAULT_KEY}");
    let before = places.line_before_text(&field);
    let in_map = |finding: Finding| Finding {
        line: before.map_or(places.line(&field), |before| finding.line.map(|line| before + line)),
        ..finding
    };
    let documents = match read(text) {
        Ok(documents) => documents,
        Err(finding) => return SpecDocument { spec: None, findings: vec![in_map(finding)] },
    };
    match documents.specs.into_iter().next() {
        Some(SpecDocument { spec, findings }) => {
            SpecDocument { spec, findings: findings.into_iter().map(in_map).collect() }
        }
        // A text that is empty or holds only comments.
        None if documents.others.is_empty() => {
            SpecDocument { spec: Some(FluxInstanceSpec::default()), findings: Vec::new() }
        }
        None => SpecDocument { spec: None, findings: vec![in_map(nothing_of_ours(&documents.others))] },
    }
}

fn finish(spec: Option<FluxInstanceSpec>, findings: Vec<Finding>, places: &FieldLines, prefix: &str) -> SpecDocument {
    let on_line = |finding: Finding| Finding {
        line: places.line(finding.field.strip_prefix(prefix).unwrap_or_default()),
        ..finding
    };
    let repeated = places.repeated.iter().map(|(path, line)| Finding {
        line: Some(*line),
        ..Finding::new(format!("{prefix}{path}"), "is given a second time")
    });
    let mut findings: Vec<_> = findings.into_iter().map(on_line).chain(repeated).collect();
    findings.sort_by_key(|finding| finding.line);
    SpecDocument { spec, findings }
}

/// The CRD's `openAPIV3Schema`.
static SCHEMA: LazyLock<Value> =
    LazyLock::new(|| json!(FluxInstance::crd())["spec"]["versions"][0]["schema"]["openAPIV3Schema"].take());

/// Returns the spec of `object` and adds what is wrong with it: what the schema refuses, then what [`validate`] finds.
fn check_spec(object: &mut Value, findings: &mut Vec<Finding>) -> Option<FluxInstanceSpec> {
    let Findings { errors, unknown } = schema::check(&SCHEMA, object, rules);
    // A misspelt field is the cause of what its parent lacks: don't also report that selector as empty.
    let is_cause = |error: &Finding| unknown.iter().any(|unknown| error.covers(unknown));
    findings.extend(errors.into_iter().filter(|error| !is_cause(error)));
    findings.extend(unknown);
    FluxInstanceSpec::deserialize(&object["spec"]).ok()
}

/// The findings about a FluxInstance that no schema can express.
///
/// # Errors
/// If the spec can't be parsed.
pub fn rules(object: &Value) -> serde_json::Result<Vec<Finding>> {
    FluxInstanceSpec::deserialize(&object["spec"]).map(|spec| validate(&spec))
}

fn must_be(object: &Value, field: &str, expected: &str, findings: &mut Vec<Finding>) {
    let problem = match &object[field] {
        Value::String(given) if given == expected => return,
        Value::Null => "is missing".to_owned(),
        given => format!("{given} is not served"),
    };
    findings.push(Finding::new(field, problem).with_remedy(format!("write {expected}")));
}

fn metadata(metadata: &Value, findings: &mut Vec<Finding>) {
    must_be_served(&metadata["name"], "metadata.name", INSTANCE, findings);
    if !metadata["namespace"].is_null() {
        must_be_served(&metadata["namespace"], "metadata.namespace", NAMESPACE, findings);
    }
    let schema = schemars::schema_for!(ObjectMeta);
    let properties = schema.get("properties").and_then(Value::as_object);
    let known: Vec<_> = properties.into_iter().flat_map(Map::keys).map(String::as_str).collect();
    unknown_fields(metadata, "metadata.", &known, findings);
}

fn must_be_served(given: &Value, field: &str, served: &str, findings: &mut Vec<Finding>) {
    let problem = match given {
        Value::String(given) if given == served => return,
        Value::Null => "is missing".to_owned(),
        given => format!("{given} is not served: only FluxInstance {INSTANCE} in namespace {NAMESPACE} is"),
    };
    findings.push(Finding::new(field, problem).with_remedy(format!("write {served}")));
}

fn unknown_fields(object: &Value, prefix: &str, known: &[&str], findings: &mut Vec<Finding>) {
    let fields = object.as_object().into_iter().flat_map(Map::keys);
    for field in fields.filter(|field| !known.contains(&field.as_str())) {
        let finding = Finding::new(format!("{prefix}{field}"), "there is no such field");
        findings.push(match nearest(field, known.iter().copied()) {
            Some(meant) => finding.with_remedy(format!("did you mean {meant}?")),
            None => finding,
        });
    }
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
