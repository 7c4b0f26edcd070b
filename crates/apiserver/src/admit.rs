//! The rules between a request and the store: pure functions that set the server's own fields, keep what the request
//! must not change, and refuse what is not allowed.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use serde_json::{Map, Value, json};

use super::{error::ApiError, resources::Resource};
use api::{in_one_line, is_subdomain};
use model::schema;

/// Fields of `metadata` that only the server may write.
const SERVER_FIELDS: [&str; 5] =
    ["uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation"];

/// The part of an object that a request writes; the rest stays unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Everything, except the status if that is a subresource.
    Whole,
    /// The status.
    Status,
    /// A Namespace's `spec.finalizers`.
    Finalize,
    /// Everything and the status too: what a binding changes.
    Binding,
}

/// How to execute a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mode {
    /// Do everything but store the result.
    pub dry_run: bool,
    /// Refuse fields that the schema does not know, instead of pruning them.
    pub strict: bool,
    /// For a delete: the seconds that whatever runs may take to end. None: what the object says.
    pub grace: Option<i64>,
}

/// A time in the format of `metadata.creationTimestamp`, `seconds` from now.
pub fn timestamp(seconds: i64) -> String {
    let time = Timestamp::now().saturating_add(SignedDuration::from_secs(seconds)).unwrap_or_default();
    Timestamp::from_second(time.as_second()).unwrap_or_default().to_string()
}

/// A string field of `metadata`; empty if it is missing.
pub fn meta<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

/// True if the object is being deleted but still held by a finalizer, by its contents, or by what runs.
pub fn is_terminating(object: &Value) -> bool {
    !object["metadata"]["deletionTimestamp"].is_null()
}

/// True if the object can't be removed yet: it has finalizers, or a kubelet ends what it runs.
pub fn is_held(object: &Value) -> bool {
    let has_finalizers = object["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty());
    has_finalizers || object["metadata"]["deletionGracePeriodSeconds"].as_i64().is_some_and(|grace| grace > 0)
}

/// A new object as it is stored.
///
/// # Errors
/// [`ApiError::BadRequest`] or [`ApiError::Invalid`].
pub fn create(resource: &Resource, namespace: &str, mut object: Value, strict: bool) -> Result<Value, ApiError> {
    let name = match (meta(&object, "name"), meta(&object, "generateName")) {
        ("", "") => {
            return Err(ApiError::invalid(resource, "", "metadata.name: name or generateName is required"));
        }
        ("", prefix) => format!("{prefix}{}", random_suffix()),
        (name, _) => name.to_owned(),
    };
    if !is_subdomain(&name) {
        let why = "metadata.name: must consist of lower case letters, digits, '-' and '.', begin and end with a letter or \
                   digit, and have at most 253 characters";
        return Err(ApiError::invalid(resource, &name, why));
    }
    if !meta(&object, "resourceVersion").is_empty() {
        return Err(ApiError::BadRequest("resourceVersion should not be set on objects to be created".into()));
    }
    check_identity(resource, namespace, &name, &object)?;
    let metadata = metadata_mut(&mut object)?;
    metadata.retain(|field, _| !SERVER_FIELDS.contains(&field.as_str()) && field != "resourceVersion");
    metadata.insert("name".into(), name.clone().into());
    if resource.namespaced {
        metadata.insert("namespace".into(), namespace.into());
    }
    metadata.insert("uid".into(), uuid::Uuid::new_v4().to_string().into());
    metadata.insert("creationTimestamp".into(), timestamp(0).into());
    if resource.generation {
        metadata.insert("generation".into(), 1.into());
    }
    // A kubelet registers its Node together with its status; for all other kinds the status is written later.
    if resource.status && resource.kind != "Node" {
        set(&mut object, "status", None);
    }
    match resource.kind {
        "Namespace" => {
            put(&mut object, &["metadata", "labels", "kubernetes.io/metadata.name"], name.clone().into());
            put(&mut object, &["spec", "finalizers"], json!(["kubernetes"]));
            put(&mut object, &["status", "phase"], "Active".into());
        }
        "CustomResourceDefinition" => {
            let status = established(&object["spec"]);
            put(&mut object, &["status"], status);
        }
        // `kubectl describe` expects this default to be set by the server.
        "PriorityClass" if object["preemptionPolicy"].is_null() => {
            put(&mut object, &["preemptionPolicy"], "PreemptLowerPriority".into());
        }
        "Pod" if object["spec"].is_object() => {
            // Of a real server's defaults those that other programs rely on.
            for (field, default) in [
                ("schedulerName", json!("default-scheduler")),
                ("restartPolicy", json!("Always")),
                ("terminationGracePeriodSeconds", json!(30)),
            ] {
                if object["spec"][field].is_null() {
                    put(&mut object, &["spec", field], default);
                }
            }
            put(&mut object, &["status", "phase"], "Pending".into());
        }
        _ => {}
    }
    conform(resource, &name, &mut object, Part::Whole, strict)?;
    Ok(object)
}

/// The object as it is stored after `part` of `old` is replaced by `wanted`. Equal to `old` if nothing changes.
///
/// # Errors
/// [`ApiError::Conflict`] if `wanted` is based on another version, [`ApiError::BadRequest`], [`ApiError::Invalid`].
pub fn update(
    resource: &Resource,
    part: Part,
    old: &Value,
    mut wanted: Value,
    strict: bool,
) -> Result<Value, ApiError> {
    let name = meta(old, "name");
    check_identity(resource, meta(old, "namespace"), name, &wanted)?;
    if !["", meta(old, "uid")].contains(&meta(&wanted, "uid")) {
        let why = format!("precondition failed: uid in the object is {}", meta(old, "uid"));
        return Err(ApiError::Conflict { resource: resource.name(), name: name.into(), why });
    }
    match meta(&wanted, "resourceVersion") {
        "" if resource.guarded => {
            let why = "metadata.resourceVersion: must be specified for an update";
            return Err(ApiError::invalid(resource, name, why));
        }
        "" => {}
        version if version == meta(old, "resourceVersion") => {}
        _ => return Err(ApiError::stale(resource, name)),
    }
    let mut new = match part {
        Part::Whole | Part::Binding => {
            let metadata = metadata_mut(&mut wanted)?;
            for field in SERVER_FIELDS.into_iter().chain(["name", "namespace", "resourceVersion"]) {
                match old["metadata"].get(field) {
                    Some(value) => drop(metadata.insert(field.into(), value.clone())),
                    None => drop(metadata.remove(field)),
                }
            }
            if resource.status && part == Part::Whole {
                set(&mut wanted, "status", old.get("status").cloned());
            }
            if resource.kind == "Namespace" {
                put(&mut wanted, &["spec", "finalizers"], old["spec"]["finalizers"].clone());
            }
            wanted
        }
        Part::Status => {
            let mut new = old.clone();
            set(&mut new, "status", wanted.get("status").cloned());
            new
        }
        Part::Finalize => {
            let mut new = old.clone();
            put(&mut new, &["spec", "finalizers"], wanted["spec"]["finalizers"].clone());
            new
        }
    };
    conform(resource, name, &mut new, part, strict)?;
    if resource.generation && !same_content(old, &new) {
        bump_generation(&mut new);
    }
    Ok(new)
}

/// `object`, marked as being deleted. What it runs may take `grace` seconds to end.
pub fn terminating(resource: &Resource, object: &Value, grace: i64) -> Value {
    let mut object = object.clone();
    let first = !is_terminating(&object);
    put(&mut object, &["metadata", "deletionTimestamp"], timestamp(grace).into());
    put(&mut object, &["metadata", "deletionGracePeriodSeconds"], grace.into());
    if resource.generation && first {
        bump_generation(&mut object);
    }
    if resource.kind == "Namespace" {
        put(&mut object, &["status", "phase"], "Terminating".into());
    }
    object
}

fn bump_generation(object: &mut Value) {
    let generation = object["metadata"]["generation"].as_i64().unwrap_or_default();
    put(object, &["metadata", "generation"], (generation + 1).into());
}

/// True if the objects are equal apart from metadata and status.
fn same_content(old: &Value, new: &Value) -> bool {
    let content = |object: &Value| {
        let mut object = object.clone();
        set(&mut object, "metadata", None);
        set(&mut object, "status", None);
        object
    };
    content(old) == content(new)
}

/// Checks that `sent`, a `what`, names the object that the path names, if it names one.
///
/// # Errors
/// [`ApiError::BadRequest`].
pub fn check_name(what: &str, sent: &Value, name: &str) -> Result<(), ApiError> {
    let named = meta(sent, "name");
    if ["", name].contains(&named) {
        return Ok(());
    }
    Err(ApiError::BadRequest(format!("the name of the {what} ({named}) does not match the name on the URL ({name})")))
}

fn check_identity(resource: &Resource, namespace: &str, name: &str, object: &Value) -> Result<(), ApiError> {
    let (version, kind) = (resource.api_version(), resource.kind);
    let bad = |why: String| Err(ApiError::BadRequest(why));
    if object["apiVersion"] != *version || object["kind"] != *kind {
        let (sent_version, sent_kind) = (&object["apiVersion"], &object["kind"]);
        return bad(format!(
            "the object is {sent_kind} of {sent_version}, but this path is for {kind:?} of {version:?}"
        ));
    }
    check_name("object", object, name)?;
    let sent = meta(object, "namespace");
    if !["", namespace].contains(&sent) {
        return bad(format!(
            "the namespace of the object ({sent}) does not match the namespace of the request ({namespace:?})"
        ));
    }
    Ok(())
}

fn conform(resource: &Resource, name: &str, object: &mut Value, part: Part, strict: bool) -> Result<(), ApiError> {
    metadata_mut(object)?.remove("managedFields");
    if resource.kind == "Secret" {
        encode_string_data(object);
    }
    let Some(custom) = &resource.custom else {
        return (resource.check)(object).map_err(|why| ApiError::BadRequest(format!("{}: {why}", resource.kind)));
    };
    let rules = |object: &Value| match part {
        Part::Whole => (custom.rules)(object),
        // An accepted spec must never prevent its status from being written, even if newer rules would refuse it.
        Part::Status | Part::Finalize | Part::Binding => Ok(Vec::new()),
    };
    let findings = schema::check(&custom.schema, object, rules);
    if strict && !findings.unknown.is_empty() {
        let unknown: Vec<_> = findings.unknown.iter().map(|found| format!("unknown field {:?}", found.field)).collect();
        return Err(ApiError::BadRequest(format!("strict decoding error: {}", unknown.join(", "))));
    }
    match findings.errors.as_slice() {
        [] => Ok(()),
        errors => Err(ApiError::invalid(resource, name, in_one_line(errors))),
    }
}

/// Moves a Secret's `stringData` into its `data`.
fn encode_string_data(object: &mut Value) {
    let Some(Value::Object(texts)) = object.as_object_mut().and_then(|fields| fields.remove("stringData")) else {
        return;
    };
    for (key, text) in texts {
        let bytes = ByteString(text.as_str().unwrap_or_default().as_bytes().to_vec());
        put(object, &["data", &key], json!(bytes));
    }
}

/// The status of a CustomResourceDefinition, which is established at once.
fn established(spec: &Value) -> Value {
    let condition = |type_: &str, reason: &str, message: &str| {
        json!({
            "type": type_, "status": "True", "reason": reason, "message": message, "lastTransitionTime": timestamp(0),
        })
    };
    json!({
        "acceptedNames": spec["names"],
        "storedVersions": [spec["versions"][0]["name"]],
        "conditions": [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ],
    })
}

fn metadata_mut(object: &mut Value) -> Result<&mut Map<String, Value>, ApiError> {
    let fields = object.as_object_mut().ok_or_else(|| ApiError::BadRequest("the body is not an object".into()))?;
    let metadata = fields.entry("metadata").or_insert_with(|| json!({}));
    metadata.as_object_mut().ok_or_else(|| ApiError::BadRequest("metadata is not an object".into()))
}

/// Sets `value` at `path`. Anything on the way that is not an object is replaced by one; indexing would panic.
pub fn put(object: &mut Value, path: &[&str], value: Value) {
    let Some((field, below)) = path.split_first() else {
        *object = value;
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    if let Value::Object(fields) = object {
        put(fields.entry(*field).or_insert(Value::Null), below, value);
    }
}

fn set(object: &mut Value, field: &str, value: Option<Value>) {
    if let Value::Object(fields) = object {
        match value {
            Some(value) => drop(fields.insert(field.into(), value)),
            None => drop(fields.remove(field)),
        }
    }
}

/// Five random characters without vowels, as Kubernetes appends them to `generateName`.
fn random_suffix() -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let random = uuid::Uuid::new_v4();
    random.as_bytes()[..5].iter().map(|byte| char::from(LETTERS[usize::from(*byte) % LETTERS.len()])).collect()
}
