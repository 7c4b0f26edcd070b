//! The patch formats: JSON patch, merge patch, and the subset of strategic merge patch that kubectl uses.

use json_patch::PatchError;
use serde_json::{Map, Value, json};

use super::error::ApiError;

const TYPES: &str = "application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json";

/// A parsed patch.
#[derive(Debug)]
pub enum Patch {
    /// RFC 6902.
    Json(json_patch::Patch),
    /// RFC 7386.
    Merge(Value),
    /// Kubernetes' own format: a merge patch with directives for lists. The merge key of a list comes from the patch's
    /// `$setElementOrder`, which kubectl always sends, so no table of the API's types is needed; a list without it is
    /// replaced. Conditions are the exception, which programs patch one by one: each is merged into the one of its type.
    Strategic(Value),
}

impl Patch {
    /// Parses the body of a PATCH request.
    ///
    /// # Errors
    /// [`ApiError::UnsupportedMediaType`] (also for server-side apply), [`ApiError::BadRequest`].
    pub fn parse(content_type: &str, body: &[u8]) -> Result<Self, ApiError> {
        let bad = |error: serde_json::Error| ApiError::BadRequest(format!("the patch can't be read: {error}"));
        match content_type.split(';').next().unwrap_or_default().trim() {
            "application/json-patch+json" => serde_json::from_slice(body).map(Self::Json).map_err(bad),
            "application/merge-patch+json" => serde_json::from_slice(body).map(Self::Merge).map_err(bad),
            "application/strategic-merge-patch+json" => serde_json::from_slice(body).map(Self::Strategic).map_err(bad),
            _ => Err(ApiError::UnsupportedMediaType(TYPES)),
        }
    }

    /// Applies the patch to `object`.
    ///
    /// # Errors
    /// If an operation of a JSON patch, such as a test, fails; the others always apply.
    pub fn apply(&self, mut object: Value) -> Result<Value, PatchError> {
        match self {
            Self::Json(patch) => json_patch::patch(&mut object, patch)?,
            Self::Merge(patch) => json_patch::merge(&mut object, patch),
            Self::Strategic(patch) => strategic(&mut object, patch),
        }
        Ok(object)
    }
}

fn strategic(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() || patch.get("$patch").is_some_and(|directive| directive == "replace") {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else { return };
    if let Some(Value::Array(kept)) = patch.get("$retainKeys") {
        target.retain(|key, _| kept.iter().any(|name| name == key));
    }
    for (key, value) in patch {
        if let Some(key) = key.strip_prefix("$deleteFromPrimitiveList/") {
            let (Some(Value::Array(items)), Value::Array(gone)) = (target.get_mut(key), value) else {
                continue;
            };
            items.retain(|item| !gone.contains(item));
        } else if key.starts_with('$') {
        } else if value.is_null() {
            target.remove(key);
        } else if let (Value::Array(items), Some(Value::Array(order))) =
            (value, patch.get(&format!("$setElementOrder/{key}")))
        {
            let old = target.remove(key);
            target.insert(key.clone(), merge_list(old, items, order));
        } else if let ("conditions", Value::Array(items)) = (key.as_str(), value) {
            let old = target.remove(key);
            target.insert(key.clone(), merge_list(old, items, &[json!({ "type": null })]));
        } else if value["$patch"] == "delete" {
            target.remove(key);
        } else {
            strategic(target.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// Merges `patch` into the list `old` and sorts the result by `order`; items that `order` doesn't name come last.
fn merge_list(old: Option<Value>, patch: &[Value], order: &[Value]) -> Value {
    let mut items = match old {
        Some(Value::Array(items)) => items,
        _ => Vec::new(),
    };
    // For lists of objects, `order` contains `{mergeKey: value}`; for lists of plain values, the values.
    let merge_key = order.iter().find_map(|item| item.as_object()?.keys().next());
    let same = |a: &Value, b: &Value| merge_key.map_or(a == b, |key| a.get(key) == b.get(key));
    for change in patch {
        let found = items.iter().position(|item| same(item, change));
        match (found, change.get("$patch").and_then(Value::as_str)) {
            (Some(index), Some("delete")) => drop(items.remove(index)),
            (None, Some("delete")) => {}
            (Some(index), _) => strategic(&mut items[index], change),
            (None, _) => {
                let mut item = Value::Null;
                strategic(&mut item, change);
                items.push(item);
            }
        }
    }
    items.sort_by_key(|item| order.iter().position(|place| same(item, place)).unwrap_or(usize::MAX));
    Value::Array(items)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(kind: &str, object: Value, patch: Value) -> Result<Value, String> {
        let body = patch.to_string();
        let patch = Patch::parse(&format!("application/{kind}+json"), body.as_bytes()).map_err(|e| e.to_string())?;
        patch.apply(object).map_err(|e| e.to_string())
    }

    #[test]
    fn a_null_in_a_merge_patch_deletes() {
        for kind in ["merge-patch", "strategic-merge-patch"] {
            let patched = apply(kind, json!({"a": {"b": 1, "c": [1, 2]}}), json!({"a": {"b": null, "c": [3]}}));
            assert_eq!(patched, Ok(json!({"a": {"c": [3]}})), "{kind}");
        }
    }

    #[test]
    fn a_failed_test_in_a_json_patch_is_reported() {
        let object = json!({"metadata": {"uid": "a"}});
        let patch = |uid: &str| json!([{"op": "test", "path": "/metadata/uid", "value": uid}, {"op": "add", "path": "/x", "value": 1}]);
        assert_eq!(apply("json-patch", object.clone(), patch("a")), Ok(json!({"metadata": {"uid": "a"}, "x": 1})));
        assert!(apply("json-patch", object, patch("b")).is_err_and(|why| why.contains("/metadata/uid")));
    }

    #[test]
    fn lists_with_an_element_order_are_merged_by_its_key() {
        let object = json!({"containers": [{"name": "a", "image": "1"}, {"name": "b", "image": "1"}]});
        let patch = json!({
            "$setElementOrder/containers": [{"name": "c"}, {"name": "a"}],
            "containers": [{"name": "a", "image": "2"}, {"name": "b", "$patch": "delete"}, {"name": "c", "image": "3"}],
        });
        let want = json!({"containers": [{"name": "c", "image": "3"}, {"name": "a", "image": "2"}]});
        assert_eq!(apply("strategic-merge-patch", object, patch), Ok(want));
    }

    #[test]
    fn a_condition_is_merged_into_the_one_of_its_type() {
        let condition = |kind: &str, status: &str| json!({"type": kind, "status": status});
        let object = json!({"conditions": [condition("A", "True"), condition("B", "True")]});
        let patch = json!({"conditions": [condition("B", "False"), condition("C", "True")]});
        let want = json!({"conditions": [condition("A", "True"), condition("B", "False"), condition("C", "True")]});
        assert_eq!(apply("strategic-merge-patch", object, patch), Ok(want));
    }

    #[test]
    fn directives_of_a_strategic_merge_patch_never_land_in_the_object() {
        let object =
            json!({"metadata": {"finalizers": ["a", "b"]}, "strategy": {"type": "x", "old": 1}, "gone": {"a": 1}});
        let patch = json!({
            "metadata": {"$deleteFromPrimitiveList/finalizers": ["a"], "$setElementOrder/finalizers": ["b"]},
            "strategy": {"$retainKeys": ["type"], "type": "y"},
            "gone": {"$patch": "delete"},
            "new": {"$patch": "replace", "x": {"y": 1}},
        });
        let want = json!({"metadata": {"finalizers": ["b"]}, "strategy": {"type": "y"}, "new": {"x": {"y": 1}}});
        assert_eq!(apply("strategic-merge-patch", object, patch), Ok(want));
    }

    #[test]
    fn server_side_apply_is_refused() {
        let refused = Patch::parse("application/apply-patch+yaml", b"{}");
        assert!(refused.is_err_and(|error| error.code() == 415));
    }
}
