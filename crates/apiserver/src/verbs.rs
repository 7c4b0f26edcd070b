//! The verbs: what each does with the store, and the response.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    admit::{self, Mode, Part, check_name, meta},
    error::ApiError,
    objects::Deleted,
    patch::Patch,
    pods,
    request::{Form, Query, Subresource, Target},
    resources::Resource,
    selector::Filter,
    store::{Preconditions, Store},
    table::{metadata_only, table},
};

/// GET of an object.
pub fn get(store: &Store, target: &Target, form: Form) -> Result<Value, ApiError> {
    let (namespace, name) = target.object()?;
    let object = store.get(target.resource.stored(), namespace, name)?;
    if target.subresource == Subresource::Scale {
        let scale = scale_of(target.resource, &object)?;
        if scale["spec"]["replicas"].is_null() {
            return Err(ApiError::Internal("the spec replicas field does not exist: nothing has set it yet".into()));
        }
        return Ok(scale);
    }
    let object = target.resource.to_served(&object);
    Ok(match form {
        Form::Object => object.into_owned(),
        Form::Metadata => metadata_only(&object),
        Form::Table(include) => {
            let metadata = json!({ "resourceVersion": object["metadata"]["resourceVersion"] });
            table(target.resource, [&*object], metadata, include, Timestamp::now())
        }
    })
}

/// GET of a collection.
pub fn list(store: &Store, target: &Target, query: &Query, form: Form) -> Result<Value, ApiError> {
    let resource = target.resource;
    let filter = Filter::parse(resource, &query.labels, &query.fields)?;
    let (objects, revision) = store.list(resource.stored(), target.namespace.as_deref());
    let objects = objects.iter().map(|object| resource.to_served(object)).filter(|object| filter.matches(object));
    let metadata = json!({ "resourceVersion": revision.to_string() });
    Ok(match form {
        Form::Object => {
            let items: Vec<Value> = objects.map(std::borrow::Cow::into_owned).collect();
            list_of(&format!("{}List", resource.kind), &resource.api_version(), metadata, items)
        }
        Form::Metadata => {
            let items = objects.map(|object| metadata_only(&object)).collect();
            list_of("PartialObjectMetadataList", "meta.k8s.io/v1", metadata, items)
        }
        Form::Table(include) => {
            let objects: Vec<_> = objects.collect();
            table(resource, objects.iter().map(AsRef::as_ref), metadata, include, Timestamp::now())
        }
    })
}

fn list_of(kind: &str, api_version: &str, metadata: Value, items: Vec<Value>) -> Value {
    json!({ "kind": kind, "apiVersion": api_version, "metadata": metadata, "items": items })
}

/// POST to a collection.
pub fn create(store: &Store, target: &Target, mode: Mode, body: &[u8]) -> Result<Value, ApiError> {
    let resource = target.resource;
    if target.name.is_some() || (resource.namespaced && target.namespace.is_none()) {
        return Err(ApiError::MethodNotAllowed);
    }
    let mut object = resource.to_stored(with_type(resource, decode(body)?));
    if let Some(answer) = resource.answer {
        let status = answer(&object);
        admit::put(&mut object, &["status"], status);
        return Ok(object);
    }
    let namespace = target.namespace.as_deref().unwrap_or_default();
    let object = store.create(resource.stored(), namespace, object, mode)?;
    Ok(resource.to_served(&object).into_owned())
}

/// POST to `binding`: binds a pod to a Node.
pub fn bind(store: &Store, target: &Target, mode: Mode, body: &[u8]) -> Result<Value, ApiError> {
    let (resource, binding) = (target.resource, decode(body)?);
    store.update(resource, target.object()?, Part::Binding, mode, |pod| pods::bound(resource, pod, &binding))?;
    Ok(success(json!({})))
}

/// POST to `eviction`: deletes a pod, as its delete options say. There are no PodDisruptionBudgets.
pub fn evict(store: &Store, target: &Target, mode: Mode, body: &[u8]) -> Result<Value, ApiError> {
    let (_, name) = target.object()?;
    let eviction: Value = decode(body)?;
    check_name("eviction", &eviction, name)?;
    let (only_if, mode) = delete_options(mode, &eviction["deleteOptions"]);
    store.delete(target.resource, target.object()?, &only_if, mode)?;
    Ok(success(json!({})))
}

fn success(details: Value) -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details })
}

/// PUT of an object or subresource.
pub fn replace(store: &Store, target: &Target, mode: Mode, body: &[u8]) -> Result<Value, ApiError> {
    let wanted = decode(body)?;
    change(store, target, mode, |_| Ok(wanted))
}

/// PATCH of an object or subresource.
pub fn patch(store: &Store, target: &Target, mode: Mode, patch: &Patch) -> Result<Value, ApiError> {
    let (_, name) = target.object()?;
    change(store, target, mode, |old| {
        patch.apply(old).map_err(|why| ApiError::invalid(target.resource, name, why.to_string()))
    })
}

fn change(
    store: &Store,
    target: &Target,
    mode: Mode,
    change: impl FnOnce(Value) -> Result<Value, ApiError>,
) -> Result<Value, ApiError> {
    let resource = target.resource;
    let update = |part, change: &mut dyn FnMut(&Value) -> Result<Value, ApiError>| {
        store.update(resource.stored(), target.object()?, part, mode, |old| change(old))
    };
    let mut change = Some(change);
    let mut once = |old| change.take().map_or(Err(ApiError::MethodNotAllowed), |change| change(old));
    let part = match target.subresource {
        Subresource::Scale => {
            let object = update(Part::Whole, &mut |old| scaled(resource, old, &once(scale_of(resource, old)?)?))?;
            return scale_of(resource, &object);
        }
        Subresource::Object => Part::Whole,
        Subresource::Status => Part::Status,
        Subresource::Finalize => Part::Finalize,
        Subresource::Binding | Subresource::Eviction => return Err(ApiError::MethodNotAllowed),
    };
    let object = update(part, &mut |old| {
        let wanted = once(resource.to_served(old).into_owned())?;
        Ok(resource.to_stored(with_type(resource, wanted)))
    })?;
    Ok(resource.to_served(&object).into_owned())
}

/// DELETE of an object.
pub fn delete(store: &Store, target: &Target, mode: Mode, body: &[u8]) -> Result<Value, ApiError> {
    if target.subresource != Subresource::Object {
        return Err(ApiError::MethodNotAllowed);
    }
    let (only_if, mode) = delete_options(mode, &decode_options(body)?);
    let resource = target.resource;
    let (_, name) = target.object()?;
    Ok(match store.delete(resource.stored(), target.object()?, &only_if, mode)? {
        Deleted::Going(object) => resource.to_served(&object).into_owned(),
        Deleted::Gone(object) => success(json!({
            "name": name, "group": resource.group, "kind": resource.plural, "uid": object["metadata"]["uid"],
        })),
    })
}

/// DELETE of a collection. Returns the objects it contained.
pub fn delete_collection(store: &Store, target: &Target, query: &Query, body: &[u8]) -> Result<Value, ApiError> {
    let resource = target.resource;
    if resource.namespaced && target.namespace.is_none() {
        return Err(ApiError::MethodNotAllowed);
    }
    let (only_if, mode) = delete_options(query.mode, &decode_options(body)?);
    let filter = Filter::parse(resource, &query.labels, &query.fields)?;
    let (objects, revision) = store.list(resource.stored(), target.namespace.as_deref());
    let selected = |object: &Arc<Value>| filter.matches(&resource.to_served(object));
    let mut items = Vec::new();
    for object in objects.into_iter().filter(selected) {
        match store.delete(resource.stored(), (meta(&object, "namespace"), meta(&object, "name")), &only_if, mode) {
            // If it was deleted concurrently, the goal is reached too.
            Ok(_) | Err(ApiError::NotFound { .. }) => items.push(resource.to_served(&object).into_owned()),
            Err(error) => return Err(error),
        }
    }
    let metadata = json!({ "resourceVersion": revision.to_string() });
    Ok(list_of(&format!("{}List", resource.kind), &resource.api_version(), metadata, items))
}

/// The DeleteOptions in a body, which may be empty.
fn decode_options(body: &[u8]) -> Result<Value, ApiError> {
    if body.is_empty() { Ok(Value::Null) } else { decode(body) }
}

/// What DeleteOptions say, beside the query.
fn delete_options(mut mode: Mode, options: &Value) -> (Preconditions, Mode) {
    let text = |field: &str| options["preconditions"][field].as_str().map(str::to_owned);
    mode.dry_run |= options["dryRun"].as_array().is_some_and(|stages| stages.iter().any(|stage| stage == "All"));
    mode.grace = options["gracePeriodSeconds"].as_i64().or(mode.grace);
    (Preconditions { uid: text("uid"), resource_version: text("resourceVersion") }, mode)
}

fn decode(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body).map_err(|error| ApiError::BadRequest(format!("the body is not JSON: {error}")))
}

/// Fills in kind and version, which typed clients may omit because the path implies them.
fn with_type(resource: &Resource, mut object: Value) -> Value {
    if let Value::Object(fields) = &mut object {
        fields.entry("apiVersion").or_insert_with(|| resource.api_version().into());
        fields.entry("kind").or_insert_with(|| resource.kind.into());
    }
    object
}

fn scale_of(resource: &Resource, object: &Value) -> Result<Value, ApiError> {
    let scale = resource.scale().ok_or(ApiError::NoSuchPath)?;
    let at = |path: &str| object.pointer(&path.replace('.', "/")).cloned();
    let metadata = &object["metadata"];
    let mut answer = json!({
        "kind": "Scale", "apiVersion": "autoscaling/v1",
        "metadata": {
            "name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"], "creationTimestamp": metadata["creationTimestamp"],
        },
        "spec": {},
        "status": { "replicas": at(&scale.status_replicas_path).unwrap_or_else(|| 0.into()) },
    });
    if let Some(replicas) = at(&scale.spec_replicas_path).filter(|replicas| !replicas.is_null()) {
        admit::put(&mut answer, &["spec", "replicas"], replicas);
    }
    Ok(answer)
}

/// `object` with the number of replicas of the Scale `wanted`.
fn scaled(resource: &Resource, object: &Value, wanted: &Value) -> Result<Value, ApiError> {
    let scale = resource.scale().ok_or(ApiError::NoSuchPath)?;
    // A missing number means 0, as in every Scale.
    let replicas = wanted["spec"].get("replicas").cloned().unwrap_or_else(|| 0.into());
    let mut object = object.clone();
    let path: Vec<&str> = scale.spec_replicas_path.split('.').filter(|part| !part.is_empty()).collect();
    admit::put(&mut object, &path, replicas);
    for field in ["uid", "resourceVersion"] {
        if !meta(wanted, field).is_empty() {
            admit::put(&mut object, &["metadata", field], meta(wanted, field).into());
        }
    }
    Ok(object)
}
