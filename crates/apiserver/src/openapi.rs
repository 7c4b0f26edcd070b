//! The part of OpenAPI v3 that makes clients leave validation to the server, and lets them explain our kinds.

use serde_json::{Map, Value, json};

use super::resources::{self, Resource};

/// The response to a GET below `/openapi/v3`.
pub fn answer(path: &[&str], serves: impl Fn(&Resource) -> bool) -> Option<Value> {
    let served = || resources::all().iter().filter(|resource| serves(resource));
    if path.is_empty() {
        let entry = |path: String| (path.clone(), json!({ "serverRelativeURL": format!("/openapi/v3/{path}") }));
        let paths: Map<String, Value> = served().map(group_path).map(entry).collect();
        return Some(json!({ "paths": paths }));
    }
    let path = path.join("/");
    let of_group = || served().filter(|resource| group_path(resource) == path);
    of_group().next()?;
    let schemas: Map<String, Value> = of_group().filter_map(schema).collect();
    Some(json!({
        "openapi": "3.0.0",
        "info": { "title": "flux-distribute", "version": env!("CARGO_PKG_VERSION") },
        "paths": of_group().map(operations).collect::<Map<_, _>>(),
        "components": { "schemas": schemas },
    }))
}

fn group_path(resource: &Resource) -> String {
    let root = if resource.group.is_empty() { "api" } else { "apis" };
    format!("{root}/{}", resource.api_version())
}

fn kind(resource: &Resource) -> Value {
    json!({ "group": resource.group, "version": resource.version, "kind": resource.kind })
}

/// kubectl validates objects itself unless the PATCH operation of their kind has the parameter `fieldValidation`.
fn operations(resource: &Resource) -> (String, Value) {
    let namespace = if resource.namespaced { "/namespaces/{namespace}" } else { "" };
    let path = format!("/{}{namespace}/{}/{{name}}", group_path(resource), resource.plural);
    let parameters = ["dryRun", "fieldValidation"]
        .map(|name| json!({ "name": name, "in": "query", "schema": { "type": "string" } }));
    let operation = |action: &str| {
        json!({
            "x-kubernetes-action": action, "x-kubernetes-group-version-kind": kind(resource),
            "parameters": parameters, "responses": {},
        })
    };
    (path, json!({ "get": operation("get"), "patch": operation("patch") }))
}

fn schema(resource: &Resource) -> Option<(String, Value)> {
    let mut schema = resource.custom.as_ref()?.schema.clone();
    let fields = schema.as_object_mut()?;
    fields.insert("x-kubernetes-group-version-kind".into(), json!([kind(resource)]));
    Some((format!("{}.{}.{}", resource.group, resource.version, resource.kind), schema))
}
