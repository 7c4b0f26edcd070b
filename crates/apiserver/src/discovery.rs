//! API discovery: the groups, versions and kinds that the server offers.

use serde_json::{Value, json};

use super::{
    openapi,
    resources::{self, Resource},
};

/// The minor version of the Kubernetes API that the server implements.
const MINOR: &str = "33";

/// The response to a GET about the server itself rather than objects; `None` for any other path.
pub fn answer(path: &str, serves: impl Fn(&Resource) -> bool) -> Option<Value> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    match parts[..] {
        ["version"] => Some(version(MINOR)),
        ["api"] => Some(json!({
            "kind": "APIVersions", "versions": ["v1"],
            "serverAddressByClientCIDRs": [{ "clientCIDR": "0.0.0.0/0", "serverAddress": "" }],
        })),
        ["apis"] => {
            let groups: Vec<Value> = groups(&serves).into_iter().map(group).collect();
            Some(json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups }))
        }
        ["apis", name] => groups(&serves).into_iter().find(|resource| resource.group == name).map(|resource| {
            let mut group = group(resource);
            group["kind"] = "APIGroup".into();
            group["apiVersion"] = "v1".into();
            group
        }),
        ["api", version] => resource_list("", version, &serves),
        ["apis", group, version] => resource_list(group, version, &serves),
        ["openapi", "v3", ref path @ ..] => openapi::answer(path, serves),
        _ => None,
    }
}

/// The response to a GET of `/version` for Kubernetes 1.`minor`.
pub fn version(minor: &str) -> Value {
    json!({
        "major": "1", "minor": minor, "gitVersion": format!("v1.{minor}.0-flux-distribute"), "gitCommit": "",
        "gitTreeState": "", "buildDate": "", "goVersion": "", "compiler": "", "platform": "linux/amd64",
    })
}

/// One resource of each group.
fn groups(serves: &impl Fn(&Resource) -> bool) -> Vec<&'static Resource> {
    let mut groups: Vec<&Resource> = Vec::new();
    for resource in resources::all().iter().filter(|resource| !resource.group.is_empty() && serves(resource)) {
        if groups.iter().all(|known| known.group != resource.group) {
            groups.push(resource);
        }
    }
    groups
}

fn group(resource: &Resource) -> Value {
    let version = json!({ "groupVersion": resource.api_version(), "version": resource.version });
    json!({ "name": resource.group, "versions": [version], "preferredVersion": version })
}

fn resource_list(group: &str, version: &str, serves: &impl Fn(&Resource) -> bool) -> Option<Value> {
    let served = |resource: &&Resource| resource.group == group && resource.version == version && serves(resource);
    let served: Vec<&Resource> = resources::all().iter().filter(served).collect();
    let group_version = served.first()?.api_version();
    let resources: Vec<Value> = served.into_iter().flat_map(entries).collect();
    Some(json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources,
    }))
}

fn entries(resource: &Resource) -> Vec<Value> {
    let (plural, namespaced, kind) = (resource.plural, resource.namespaced, resource.kind);
    let mut entries = vec![json!({
        "name": plural, "singularName": kind.to_lowercase(), "namespaced": namespaced, "kind": kind,
        "verbs": match resource.answer {
            Some(_) => &["create"][..],
            None => &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
        },
        "shortNames": resource.short, "categories": resource.categories,
    })];
    let verbs = ["get", "patch", "update"];
    if resource.status {
        entries.push(json!({
            "name": format!("{plural}/status"), "singularName": "", "namespaced": namespaced, "kind": kind, "verbs": verbs,
        }));
    }
    if resource.runs {
        entries.push(json!({
            "name": format!("{plural}/binding"), "singularName": "", "namespaced": namespaced, "kind": "Binding",
            "verbs": ["create"],
        }));
        entries.push(json!({
            "name": format!("{plural}/eviction"), "singularName": "", "namespaced": namespaced,
            "group": "policy", "version": "v1", "kind": "Eviction", "verbs": ["create"],
        }));
    }
    if resource.scale().is_some() {
        entries.push(json!({
            "name": format!("{plural}/scale"), "singularName": "", "namespaced": namespaced,
            "group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": verbs,
        }));
    }
    entries
}
