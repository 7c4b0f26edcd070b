//! FluxInstances as people write them into files: one validation for what no API server has checked yet.

use std::sync::LazyLock;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::CustomResourceExt;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    places::{self, Places},
    schema::{self, Findings, nearest},
};
use crate::validate;
use api::{
    CONFIGMAP_DEFAULT, CONFIGMAP_DEFAULT_KEY, Finding, FluxInstance, FluxInstanceSpec, GROUP, INSTANCE, NAMESPACE,
    VERSION,
};

const KIND: &str = "FluxInstance";

/// What is in a file.
#[derive(Debug, Default, PartialEq)]
pub struct Documents {
    /// Those that hold the spec of a FluxInstance.
    pub specs: Vec<SpecDocument>,
    /// Those of other kinds, such as `Namespace flux-distribute`: not looked at.
    pub others: Vec<String>,
}

/// A FluxInstance, its spec alone, or ConfigMap flux-default, which the first FluxInstance is made from.
#[derive(Debug, Default, PartialEq)]
pub struct SpecDocument {
    /// The spec, as far as it can be read; what can't be served is in it, too.
    pub spec: Option<FluxInstanceSpec>,
    /// Everything that is wrong, by line. None: the spec can be served.
    pub findings: Vec<Finding>,
}

/// Reads a file (YAML or JSON) that may hold several documents: whole FluxInstances, or one spec alone.
///
/// # Errors
/// It is not YAML: nothing in it can be read.
pub fn read(text: &str) -> Result<Documents, Finding> {
    let not_yaml = |error: serde_norway::Error| Finding {
        line: error.location().map(|at| at.line()),
        ..Finding::new("", format!("is not YAML: {error}"))
    };
    let parsed = serde_norway::Deserializer::from_str(text).map(Value::deserialize).collect::<Result<Vec<_>, _>>();
    let mut values = parsed.map_err(not_yaml)?;
    let mut places = places::documents(text);
    places.resize(values.len(), Places::default());
    let mut numbered: Vec<_> = values.drain(..).zip(places).collect();
    if numbered.len() > 1 {
        // Between two `---`, or after the last one.
        numbered.retain(|(value, _)| !value.is_null());
    }
    if numbered.is_empty() {
        numbered.push((Value::Null, Places::default()));
    }
    let is_only = numbered.len() == 1;
    let mut documents = Documents::default();
    for (value, places) in numbered {
        match role(&value, is_only) {
            Role::Instance => documents.specs.push(instance(value, &places)),
            Role::Spec => documents.specs.push(spec_alone(value, &places)),
            Role::Default => documents.specs.push(default_spec(&value, &places)),
            Role::Other(name) => documents.others.push(name),
        }
    }
    Ok(documents)
}

/// Reads a file that holds one FluxInstance, or its spec alone, and is to be used.
///
/// # Errors
/// Everything that is wrong with it.
pub fn read_instance(text: &str) -> Result<FluxInstanceSpec, Vec<Finding>> {
    let Documents { mut specs, others } = read(text).map_err(|finding| vec![finding])?;
    match (specs.pop(), specs.is_empty()) {
        (Some(SpecDocument { spec: Some(spec), findings }), true) if findings.is_empty() => Ok(spec),
        (Some(SpecDocument { findings, .. }), true) => Err(findings),
        (Some(_), false) => Err(vec![Finding::new("", "holds more than one FluxInstance")]),
        (None, _) => Err(vec![nothing_of_ours(&others)]),
    }
}

/// What is wrong with a file of which nothing is looked at.
pub fn nothing_of_ours(others: &[String]) -> Finding {
    Finding::new("", format!("holds no FluxInstance, but {}", others.join(", ")))
}

/// What a document is to us.
enum Role {
    Instance,
    Spec,
    Default,
    Other(String),
}

fn role(value: &Value, is_only: bool) -> Role {
    let word = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let (version, kind, name) = (word("/apiVersion"), word("/kind"), word("/metadata/name"));
    let is_object = ["apiVersion", "kind", "metadata", "spec"].iter().any(|field| value.get(field).is_some());
    let group = version.split('/').next().unwrap_or_default();
    match kind {
        // No field of a spec has one of these names.
        "" if !is_object && is_only => Role::Spec,
        "" if is_object && (group == GROUP || version.is_empty()) => Role::Instance,
        "ConfigMap" if name == CONFIGMAP_DEFAULT => Role::Default,
        "FluxNode" => Role::Other(format!("FluxNode {name}")),
        _ if group == GROUP || nearest(kind, [KIND]).is_some() => Role::Instance,
        "" => Role::Other("a document without a kind".to_owned()),
        kind => Role::Other(format!("{kind} {name}").trim_end().to_owned()),
    }
}

fn instance(mut object: Value, places: &Places) -> SpecDocument {
    let mut findings = Vec::new();
    let known = ["apiVersion", "kind", "metadata", "spec", "status"];
    unknown_fields(&object, "", &known, &mut findings);
    must_be(&object, "apiVersion", &format!("{GROUP}/{VERSION}"), &mut findings);
    must_be(&object, "kind", KIND, &mut findings);
    metadata(&object["metadata"], &mut findings);
    // What the API server writes is not ours to check.
    if let Value::Object(fields) = &mut object {
        fields.retain(|field, _| known.contains(&field.as_str()) && field != "status");
    }
    let spec = check_spec(&mut object, &mut findings);
    finish(spec, findings, places, "")
}

fn spec_alone(value: Value, places: &Places) -> SpecDocument {
    // A file of comments only.
    let value = if value.is_null() { json!({}) } else { value };
    let mut findings = Vec::new();
    let spec = check_spec(&mut json!({ "spec": value }), &mut findings);
    finish(spec, findings, places, "spec.")
}

/// The text in ConfigMap flux-default, whose lines are known if it is written as a block (`|`).
fn default_spec(map: &Value, places: &Places) -> SpecDocument {
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
        None => SpecDocument { spec: None, findings: vec![in_map(nothing_of_ours(&documents.others))] },
    }
}

fn finish(spec: Option<FluxInstanceSpec>, findings: Vec<Finding>, places: &Places, prefix: &str) -> SpecDocument {
    let on_line = |finding: Finding| Finding {
        line: places.line(finding.field.strip_prefix(prefix).unwrap_or_default()),
        ..finding
    };
    let repeated = places.repeated.iter().map(|(path, line)| Finding {
        line: Some(*line),
        ..Finding::new(format!("{prefix}{path}"), "stands here a second time")
    });
    let mut findings: Vec<_> = findings.into_iter().map(on_line).chain(repeated).collect();
    findings.sort_by_key(|finding| finding.line);
    SpecDocument { spec, findings }
}

/// `{"openAPIV3Schema": …}` of the CRD.
static SCHEMA: LazyLock<Value> =
    LazyLock::new(|| json!(FluxInstance::crd())["spec"]["versions"][0]["schema"]["openAPIV3Schema"].take());

/// The spec of `object`, and what is wrong with it: by the schema first, then by [`validate`].
fn check_spec(object: &mut Value, findings: &mut Vec<Finding>) -> Option<FluxInstanceSpec> {
    let Findings { errors, unknown } = schema::check(&SCHEMA, object, rules);
    // A selector with a misspelt field is not said to be empty as well.
    let is_cause = |error: &Finding| unknown.iter().any(|unknown| error.covers(unknown));
    findings.extend(errors.into_iter().filter(|error| !is_cause(error)));
    findings.extend(unknown);
    FluxInstanceSpec::deserialize(&object["spec"]).ok()
}

/// What no schema can say of a FluxInstance.
///
/// # Errors
/// Why its spec can't be read.
pub fn rules(object: &Value) -> Result<Vec<Finding>, String> {
    FluxInstanceSpec::deserialize(&object["spec"]).map(|spec| validate(&spec)).map_err(|error| error.to_string())
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
