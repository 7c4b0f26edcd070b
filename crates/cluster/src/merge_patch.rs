//! JSON merge patches for the API server.

use serde_json::{Map, Value};

/// Returns the JSON merge patch (RFC 7396) that turns `old` into `new`. A key that `new` lacks becomes null.
pub fn merge_patch(old: &Value, new: &Value) -> Value {
    let (Value::Object(old), Value::Object(new)) = (old, new) else { return new.clone() };
    let mut patch = Map::new();
    for (key, value) in new {
        match old.get(key) {
            Some(before) if before == value => {}
            Some(before) => drop(patch.insert(key.clone(), merge_patch(before, value))),
            None => drop(patch.insert(key.clone(), value.clone())),
        }
    }
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    Value::Object(patch)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_merge_patch_turns_the_old_object_into_the_new_one() {
        for (old, new) in [
            (json!({}), json!({"a": 1})),
            (json!({"a": 1, "b": {"c": 2, "d": 3}}), json!({"b": {"c": 4}})),
            (json!({"a": {"gpus": 2, "cores": 1}}), json!({"a": {"cores": 1}})),
            (json!({"a": [1, 2]}), json!({"a": [2]})),
        ] {
            let mut made = old.clone();
            json_patch::merge(&mut made, &merge_patch(&old, &new));
            assert_eq!(made, new);
        }
    }
}
