//! `local apply` and `local delete`: create, change and delete the objects of a YAML file, on machines without kubectl.

use std::{fmt::Display, path::Path};

use kube::{
    Api, Client,
    api::{
        DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams, Request, ValidationDirective,
    },
    discovery::{Scope, pinned_kind},
};
use serde::Deserialize;

use super::{io::print_line, layout::Layout, objects};
use crate::error::{Context, LocalError};

/// Creates all objects in `file`, in its order. Of those that exist, changes the fields that the file names, and no others.
///
/// # Errors
/// [`LocalError::Usage`], and nothing is written, if the file can't be read, or names a kind that local mode lacks;
/// [`LocalError::Refused`] if the API server refuses an object. Those before it are created or changed then.
pub(crate) async fn apply(layout: &Layout, file: &Path) -> Result<(), LocalError> {
    let client = objects::client(layout, &layout.load()?)?;
    let strictly = PatchParams { field_validation: Some(ValidationDirective::Strict), ..PatchParams::default() };
    for Target { object, api, kind, name } in targets(&client, file).await? {
        let before = match &object.metadata.name {
            Some(name) => api.get_opt(name).await.context(|| format!("can't look for {kind} {name}"))?,
            None => None,
        };
        let applied = match &before {
            Some(_) => api.patch(&name, &strictly, &Patch::Merge(&object)).await,
            None => create(&client, &api, &object).await,
        };
        let now = applied.map_err(|error| failed(error, format!("can't apply {kind} {name}")))?;
        let verb = match before.map(without_status) {
            None => "created",
            Some(before) if before == without_status(now.clone()) => "unchanged",
            Some(_) => "changed",
        };
        let note = if kind == "Job" && verb == "created" { "; local mode makes no pods of it" } else { "" };
        print_line(&format!("{kind} {} {verb}{note}", now.metadata.name.unwrap_or(name)))?;
    }
    Ok(())
}

/// The object without its status, which others may have written since it was read, and without the fields that such a write changes.
fn without_status(mut object: DynamicObject) -> DynamicObject {
    object.metadata.resource_version = None;
    object.metadata.managed_fields = None;
    if let Some(fields) = object.data.as_object_mut() {
        fields.remove("status");
    }
    object
}

/// Creates `object`, unless it has fields that the API server does not know: [`PostParams`] has no word for that.
async fn create(
    client: &Client,
    api: &Api<DynamicObject>,
    object: &DynamicObject,
) -> Result<DynamicObject, kube::Error> {
    let body = serde_json::to_vec(object).map_err(kube::Error::SerdeError)?;
    let mut request =
        Request::new(api.resource_url()).create(&PostParams::default(), body).map_err(kube::Error::BuildRequest)?;
    let strictly = format!("{}?fieldValidation=Strict", request.uri().path());
    *request.uri_mut() = strictly.parse().map_err(|error| kube::Error::Service(Box::new(error)))?;
    client.request(request).await
}

/// Deletes all objects in `file`, in its order. Those that do not exist are named, and are no error.
///
/// # Errors
/// As [`apply`]; [`LocalError::Usage`] too if an object has no name.
pub(crate) async fn delete(layout: &Layout, file: &Path) -> Result<(), LocalError> {
    let client = objects::client(layout, &layout.load()?)?;
    let targets = targets(&client, file).await?;
    if targets.iter().any(|target| target.object.metadata.name.is_none()) {
        return Err(wrong(file, &"an object has no name"));
    }
    for Target { api, kind, name, .. } in targets {
        let said = match api.delete(&name, &DeleteParams::default()).await {
            Ok(_) => "deleted",
            Err(kube::Error::Api(status)) if status.code == 404 => "does not exist",
            Err(error) => return Err(failed(error, format!("can't delete {kind} {name}"))),
        };
        print_line(&format!("{kind} {name} {said}"))?;
    }
    Ok(())
}

/// An object of a file, and where the API server has it.
struct Target {
    object: DynamicObject,
    api: Api<DynamicObject>,
    kind: String,
    /// Its name, or how the name begins that the API server gives it.
    name: String,
}

/// All objects in `file`.
async fn targets(client: &Client, file: &Path) -> Result<Vec<Target>, LocalError> {
    let mut targets = Vec::new();
    for object in read(file)? {
        targets.push(target(client, file, object).await?);
    }
    Ok(targets)
}

async fn target(client: &Client, file: &Path, object: DynamicObject) -> Result<Target, LocalError> {
    let types = object.types.clone().ok_or_else(|| wrong(file, &"an object has no kind"))?;
    let kind = GroupVersionKind::try_from(&types).map_err(|error| wrong(file, &error))?;
    let (resource, capabilities) = pinned_kind(client, &kind).await.map_err(|error| match error {
        // kube names neither of them: the server has no such group, or no such kind in it.
        kube::Error::Discovery(_) | kube::Error::Api(_) => {
            LocalError::Usage(format!("{}: local mode has no {} {}", file.display(), types.api_version, types.kind))
        }
        error => LocalError::Failed { what: format!("can't look for kind {}", types.kind), source: error.into() },
    })?;
    let api = match (capabilities.scope, &object.metadata.namespace) {
        (Scope::Cluster, _) => Api::all_with(client.clone(), &resource),
        (Scope::Namespaced, Some(namespace)) => Api::namespaced_with(client.clone(), namespace, &resource),
        (Scope::Namespaced, None) => Api::default_namespaced_with(client.clone(), &resource),
    };
    let name = object.metadata.name.clone().or(object.metadata.generate_name.clone()).unwrap_or_default();
    Ok(Target { object, api, kind: types.kind, name })
}

/// Parses the objects in `file`.
fn read(file: &Path) -> Result<Vec<DynamicObject>, LocalError> {
    let text = std::fs::read_to_string(file).map_err(|error| wrong(file, &error))?;
    let mut objects = Vec::new();
    for document in serde_norway::Deserializer::from_str(&text) {
        match Option::<serde_norway::Value>::deserialize(document).map_err(|error| wrong(file, &error))? {
            None => {}
            Some(object) if object.is_mapping() => {
                objects.push(serde_norway::from_value(object).map_err(|error| wrong(file, &error))?);
            }
            Some(_) => return Err(wrong(file, &"it holds something that is not a Kubernetes object")),
        }
    }
    Ok(objects)
}

fn wrong(file: &Path, error: &dyn Display) -> LocalError {
    LocalError::Usage(format!("can't read {}: {error}", file.display()))
}

fn failed(error: kube::Error, what: String) -> LocalError {
    match error {
        kube::Error::Api(status) => LocalError::Refused { what, why: status.message.clone() },
        error => LocalError::Failed { what, source: error.into() },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_others_write_into_the_status_meanwhile_is_no_change() {
        let object = |version: &str, label: &str, phase: &str, image: &str| -> DynamicObject {
            let fields: Value = json!([{"manager": "kubelet", "subresource": "status", "time": version}]);
            serde_json::from_value(json!({
                "metadata": {"name": "p", "resourceVersion": version, "labels": {"of": label}, "managedFields": fields},
                "spec": {"image": image}, "status": {"phase": phase},
            }))
            .unwrap()
        };
        let before = without_status(object("1970-01-01T00:00:01Z", "a", "Pending", "x"));
        for (what, now, is_unchanged) in [
            ("nothing", object("1970-01-01T00:00:01Z", "a", "Pending", "x"), true),
            ("status", object("1970-01-01T00:00:02Z", "a", "Running", "x"), true),
            ("label", object("1970-01-01T00:00:02Z", "b", "Pending", "x"), false),
            ("spec", object("1970-01-01T00:00:02Z", "a", "Pending", "y"), false),
        ] {
            assert_eq!(before == without_status(now), is_unchanged, "{what}");
        }
    }
}
