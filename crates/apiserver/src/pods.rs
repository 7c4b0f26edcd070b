//! What only pods have: they are bound to a Node, and their processes end before the object is removed.

use serde_json::{Value, json};

use super::{
    admit::{check_name, is_terminating, meta, put, timestamp},
    error::ApiError,
    resources::Resource,
};

/// `pod`, bound as `binding` says: to its Node, with its annotations, and with condition PodScheduled.
///
/// # Errors
/// [`ApiError::BadRequest`] or [`ApiError::Invalid`] for a binding of another pod, or to something else than a Node.
/// [`ApiError::Conflict`] if the pod has another uid or resourceVersion than the binding, is bound already, is being
/// deleted, or has scheduling gates.
pub fn bound(resource: &Resource, pod: &Value, binding: &Value) -> Result<Value, ApiError> {
    let name = meta(pod, "name");
    check_name("binding", binding, name)?;
    let target = &binding["target"];
    let node = target["name"].as_str().unwrap_or_default();
    if node.is_empty() || !["", "Node"].contains(&target["kind"].as_str().unwrap_or_default()) {
        return Err(ApiError::invalid(resource, name, "target: must name a Node"));
    }
    for field in ["uid", "resourceVersion"] {
        let wanted = meta(binding, field);
        if !["", meta(pod, field)].contains(&wanted) {
            let why = format!("precondition failed: {field} is {}, not {wanted}", meta(pod, field));
            return Err(conflict(resource, name, why));
        }
    }
    if is_terminating(pod) {
        return Err(conflict(resource, name, "it is being deleted, and can't be assigned to a node".to_owned()));
    }
    if let Some(other) = pod["spec"]["nodeName"].as_str().filter(|other| !other.is_empty()) {
        return Err(conflict(resource, name, format!("it is already assigned to node {other:?}")));
    }
    if pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty()) {
        return Err(conflict(resource, name, "it has scheduling gates".to_owned()));
    }
    let mut bound = pod.clone();
    put(&mut bound, &["spec", "nodeName"], node.into());
    for (key, value) in binding["metadata"]["annotations"].as_object().into_iter().flatten() {
        put(&mut bound, &["metadata", "annotations", key], value.clone());
    }
    let scheduled = json!({ "type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(0) });
    let others = pod["status"]["conditions"].as_array().into_iter().flatten();
    let others = others.filter(|condition| condition["type"] != "PodScheduled").cloned();
    put(&mut bound, &["status", "conditions"], others.chain([scheduled]).collect());
    Ok(bound)
}

fn conflict(resource: &Resource, name: &str, why: String) -> ApiError {
    ApiError::Conflict { resource: resource.name(), name: name.to_owned(), why }
}

/// The seconds that whatever `object` runs may take to end, if it is deleted with `asked`. 0 if nothing runs.
pub fn grace(resource: &Resource, object: &Value, asked: Option<i64>) -> i64 {
    let is_bound = object["spec"]["nodeName"].as_str().is_some_and(|node| !node.is_empty());
    let has_ended = matches!(object["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    if !resource.runs || !is_bound || has_ended {
        return 0;
    }
    let own = || object["spec"]["terminationGracePeriodSeconds"].as_i64();
    asked.or_else(own).unwrap_or_default().max(0)
}
