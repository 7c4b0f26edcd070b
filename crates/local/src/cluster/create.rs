//! `local create`: creates the objects of a YAML file, as `kubectl create` does on machines that have it.

use std::path::Path;

use kube::{
    Api,
    api::{DynamicObject, GroupVersionKind, PostParams},
    discovery::{Scope, pinned_kind},
};
use serde::Deserialize;

use super::{io::print_line, layout::Layout, objects};
use crate::error::{Context, LocalError};

/// Creates all objects in `file`, in its order.
///
/// # Errors
/// [`LocalError::Usage`] if the file can't be read; the API server refuses one. Those before it exist then.
pub(crate) async fn run(layout: &Layout, file: &Path) -> Result<(), LocalError> {
    let client = objects::client(layout, &layout.load()?)?;
    let wrong = |error: &dyn std::fmt::Display| LocalError::Usage(format!("can't read {}: {error}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| wrong(&error))?;
    let mut objects: Vec<DynamicObject> = Vec::new();
    for document in serde_norway::Deserializer::from_str(&text) {
        match Option::<serde_norway::Value>::deserialize(document).map_err(|error| wrong(&error))? {
            None => {}
            Some(object) if object.is_mapping() => {
                objects.push(serde_norway::from_value(object).map_err(|error| wrong(&error))?);
            }
            Some(_) => return Err(wrong(&"it holds something that is not a Kubernetes object")),
        }
    }
    for object in objects {
        let types = object.types.clone().ok_or_else(|| wrong(&"an object has no kind"))?;
        let kind = GroupVersionKind::try_from(&types).map_err(|error| wrong(&error))?;
        let name = object.metadata.name.clone().or(object.metadata.generate_name.clone()).unwrap_or_default();
        let failed = || format!("can't create {} {name}", types.kind);
        let (resource, capabilities) = pinned_kind(&client, &kind).await.map_err(|error| match error {
            // kube names neither of them: the server has no such group, or no such kind in it.
            kube::Error::Discovery(_) | kube::Error::Api(_) => {
                LocalError::Usage(format!("{}: local mode has no {} {}", failed(), types.api_version, types.kind))
            }
            error => LocalError::Failed { what: failed(), source: error.into() },
        })?;
        let api = match (capabilities.scope, &object.metadata.namespace) {
            (Scope::Cluster, _) => Api::all_with(client.clone(), &resource),
            (Scope::Namespaced, Some(namespace)) => Api::namespaced_with(client.clone(), namespace, &resource),
            (Scope::Namespaced, None) => Api::default_namespaced_with(client.clone(), &resource),
        };
        let made: DynamicObject = match api.create(&PostParams::default(), &object).await {
            Err(kube::Error::Api(status)) => {
                return Err(LocalError::Refused { what: failed(), why: status.message.clone() });
            }
            made => made.context(failed)?,
        };
        let note = if types.kind == "Job" { "; local mode makes no pods of it" } else { "" };
        print_line(&format!("{} {} created{note}", types.kind, made.metadata.name.unwrap_or_default()))?;
    }
    Ok(())
}
