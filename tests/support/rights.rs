//! The rights that the manifest's roles grant, one by one.

use std::{collections::BTreeSet, fs, path::Path};

use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule, Role};
use serde::Deserialize;
use serde_norway::Value;

/// A single right.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Right {
    pub group: String,
    /// The resource with its subresource, or a path of none.
    pub resource: String,
    /// Empty: any.
    pub name: String,
    pub verb: String,
}

/// The rights of all roles in a manifest, such as `deploy/daemonset-installer.yaml`.
pub fn granted(manifest: &str) -> BTreeSet<Right> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(manifest);
    let text = fs::read_to_string(path).unwrap();
    let documents = serde_norway::Deserializer::from_str(&text).map(|document| Value::deserialize(document).unwrap());
    let rules = documents.filter_map(|document| match document.get("kind").and_then(Value::as_str) {
        Some("ClusterRole") => serde_norway::from_value::<ClusterRole>(document).unwrap().rules,
        Some("Role") => serde_norway::from_value::<Role>(document).unwrap().rules,
        _ => None,
    });
    let found: BTreeSet<_> = rules.flatten().flat_map(rights).collect();
    assert!(!found.is_empty(), "{manifest} has no roles");
    found
}

fn rights(rule: PolicyRule) -> Vec<Right> {
    let names = rule.resource_names.filter(|names| !names.is_empty()).unwrap_or_else(|| vec![String::new()]);
    let mut rights = Vec::new();
    for verb in rule.verbs {
        let right = |group: &str, resource: &str, name: &str| Right {
            group: group.to_owned(),
            resource: resource.to_owned(),
            name: name.to_owned(),
            verb: verb.clone(),
        };
        rights.extend(rule.non_resource_urls.iter().flatten().map(|path| right("", path, "")));
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                rights.extend(names.iter().map(|name| right(group, resource, name)));
            }
        }
    }
    rights
}
