//! `deploy/daemonset-installer.yaml` and most of the Helm chart are made of `deploy/parts` and the CRDs, and `docs/reference.md` of the
//! CRDs alone.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

#[path = "support/chart.rs"]
mod chart;

use std::{fmt::Write, fs, path::Path};

use api::{FluxInstance, FluxNode, crds};
use kube::CustomResourceExt;
use model::effect::{Effect, effect};
use serde_json::{Value, json};

/// A file of `deploy/`.
fn source(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(name)).unwrap()
}

/// The one file to apply: the namespace first, then the kinds, then what uses both.
fn installer() -> String {
    let part = |name: &str| source(&format!("parts/{name}"));
    [
        "# Made by `make manifests` from deploy/parts and the CRDs; don't edit this file.\n".to_owned(),
        part("1-namespace.yaml"),
        crds().unwrap(),
        part("3-rbac.yaml"),
        part("3-flow-control.yaml"),
        part("4-admission.yaml"),
        part("5-default.yaml"),
        part("6-daemonset.yaml"),
        control_planes(),
    ]
    .concat()
}

/// The DaemonSet for control planes.
fn control_planes() -> String {
    merged(&source("parts/6-daemonset.yaml"), &source("parts/7-control-planes.yaml"))
}

/// The object that a merge patch (RFC 7396) makes of another one, under the patch's own comment.
fn merged(object: &str, patch: &str) -> String {
    let comment: String = patch.split_inclusive('\n').take_while(|line| line.starts_with('#')).collect();
    let mut merged: Value = serde_norway::from_str(object).unwrap();
    json_patch::merge(&mut merged, &serde_norway::from_str(patch).unwrap());
    format!("{comment}---\n{}", serde_norway::to_string(&merged).unwrap())
}

/// Compares `content` with the committed file. With UPDATE_MANIFESTS set the file is written, as `make manifests` does.
fn assert_is_current(file: &str, content: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    if std::env::var_os("UPDATE_MANIFESTS").is_some() {
        fs::write(&path, content).unwrap();
    }
    assert!(fs::read_to_string(&path).unwrap() == content, "{file} is stale: run `make manifests`");
}

#[test]
fn the_installer_is_built_from_its_parts() {
    assert_is_current("deploy/daemonset-installer.yaml", &installer());
}

#[test]
fn the_chart_is_built_from_the_same_parts() {
    for (name, content) in chart::files(source, &control_planes()) {
        assert_is_current(&format!("deploy/chart/{name}"), &content);
    }
}

const INTRODUCTION: &str = "\
<!-- Made by `make manifests` from the types; edit their doc comments, not this file. -->

# Reference: the fields of FluxInstance and FluxNode

Both kinds are in API group `distribute.flux-framework.org/v1alpha1` and namespace `flux-distribute`. Their CRDs carry the same
descriptions. [architecture.md](architecture.md#glossary) defines the words that are used here.

- [FluxInstance: spec](#fluxinstance-spec), written by an administrator
- [FluxInstance: status](#fluxinstance-status), written by the planner
- [FluxNode: spec](#fluxnode-spec), written by the planner
- [FluxNode: status](#fluxnode-status), written by the node's agent
";

const FLUX_INSTANCE_SPEC: &str = "\
Only the FluxInstance named `flux` is served. Every field is optional, but a bundle needs both of its fields. The last column says when a
change of a running instance takes effect: *at once*, beside running jobs; at the *next epoch*, which is a coordinated restart
([operations.md](operations.md#coordinated-restarts)); or *never*, because only the first start reads the field.

A duration is a number with `ms`, `s`, `m`, `h` or `d`, or a number of seconds in quotes (RFC 23).
";

/// One row of a table.
struct Row {
    path: String,
    type_: String,
    default: String,
    meaning: String,
}

/// The fields below `schema`, whose path is `above`. An object that is always there has no row of its own.
fn rows(schema: &Value, above: &str, rows_found: &mut Vec<Row>) {
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
        let known_kind = match path.as_str() {
            "nodes.selector" => Some("LabelSelector"),
            "nodes.tolerations" => Some("list of Toleration"),
            "conditions" => Some("list of Condition"),
            _ => None,
        };
        let is_group = known_kind.is_none() && field["properties"].is_object();
        if !is_group || field["default"].is_null() {
            let is_required = schema["required"].as_array().is_some_and(|required| required.contains(&json!(name)));
            let (meaning, said) = split_default(field["description"].as_str().unwrap_or_default());
            let default = match (said, &field["default"]) {
                (Some(default), _) => default,
                (None, Value::Null) if is_required => "required".to_owned(),
                (None, Value::Null | Value::Object(_)) => String::new(),
                (None, default) => format!("`{default}`"),
            };
            rows_found.push(Row {
                type_: known_kind.map_or_else(|| type_of(field), str::to_owned),
                path: path.clone(),
                default,
                meaning,
            });
        }
        if is_group {
            rows(field, &path, rows_found);
        }
    }
}

/// A description without the sentence `Default: …` at its end, and what that sentence says.
fn split_default(description: &str) -> (String, Option<String>) {
    let description = description.split_whitespace().collect::<Vec<_>>().join(" ");
    match description.rsplit_once("Default: ") {
        Some((meaning, default)) => (meaning.trim_end().to_owned(), Some(default.trim_end_matches('.').to_owned())),
        None => (description, None),
    }
}

fn type_of(field: &Value) -> String {
    if let Some(choices) = field["enum"].as_array() {
        let choices: Vec<_> = choices.iter().filter_map(Value::as_str).map(|choice| format!("`{choice}`")).collect();
        return choices.join(", ");
    }
    // The numbers of a schema are floating-point. The limits of the type itself tell users nothing.
    let limit = |name: &str| field[name].as_f64().filter(|limit| (1.0..f64::from(u32::MAX)).contains(limit));
    match (field["type"].as_str().unwrap_or("any"), field["format"].as_str()) {
        ("array", _) => format!("list of {}", type_of(&field["items"])),
        ("object", _) if field["additionalProperties"].is_object() => {
            format!("map of {}", type_of(&field["additionalProperties"]))
        }
        ("string", Some("date-time")) => "time".to_owned(),
        ("string", _) if field["pattern"].as_str().is_some_and(|pattern| pattern.ends_with("(ms|s|m|h|d)?$")) => {
            "duration".to_owned()
        }
        ("integer", _) => match (limit("minimum"), limit("maximum")) {
            (None, None) => "integer".to_owned(),
            (Some(least), None) => format!("integer, from {least}"),
            (None, Some(most)) => format!("integer, up to {most}"),
            (Some(least), Some(most)) => format!("integer, {least} to {most}"),
        },
        (type_, _) => type_.to_owned(),
    }
}

/// When a change of the spec's field takes effect, in the terms of the introduction.
fn change(path: &str) -> &'static str {
    match effect(path) {
        Effect::Live | Effect::LiveMembers => "at once",
        Effect::NextEpoch => "next epoch",
        Effect::FirstStart => "never",
    }
}

/// The tables of both kinds.
fn reference() -> String {
    let mut text = INTRODUCTION.to_owned();
    for (kind, crd) in [("FluxInstance", json!(FluxInstance::crd())), ("FluxNode", json!(FluxNode::crd()))] {
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
        for part in ["spec", "status"] {
            let mut fields = Vec::new();
            rows(&schema[part], "", &mut fields);
            let is_for_people = (kind, part) == ("FluxInstance", "spec");
            writeln!(text, "\n## {kind}: {part}\n").unwrap();
            if is_for_people {
                writeln!(text, "{FLUX_INSTANCE_SPEC}\n| field | type | default | meaning | a change takes effect |\n|---|---|---|---|---|")
                    .unwrap();
            } else {
                writeln!(text, "| field | type | meaning |\n|---|---|---|").unwrap();
            }
            for Row { path, type_, default, meaning } in fields {
                if is_for_people {
                    writeln!(text, "| `{path}` | {type_} | {default} | {meaning} | {} |", change(&path)).unwrap();
                } else {
                    writeln!(text, "| `{path}` | {type_} | {meaning} |").unwrap();
                }
            }
        }
    }
    text
}

#[test]
fn the_reference_is_generated_from_the_types() {
    assert_is_current("docs/reference.md", &reference());
}
