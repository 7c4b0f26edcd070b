//! Labels and taints, as Kubernetes matches them.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Taint, Toleration},
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};

/// True if `selector` selects an object with these labels; an unknown operator selects nothing.
pub fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let set_based = selector.match_expressions.iter().flatten().all(|requirement| {
        let value = labels.get(&requirement.key).map(String::as_str);
        holds(&requirement.operator, requirement.values.as_deref().unwrap_or_default(), value)
    });
    equal && set_based
}

/// True if a requirement holds. `value`: the label's value, None if the object has no such label. An operator that only some selectors
/// have holds for nothing.
pub fn holds(operator: &str, values: &[String], value: Option<&str>) -> bool {
    let listed = value.is_some_and(|value| values.iter().any(|listed| listed == value));
    match operator {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        _ => false,
    }
}

/// True for a taint that keeps pods off the node, unless they tolerate it.
pub fn keeps_pods_off(taint: &Taint) -> bool {
    matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
}

/// True if `toleration` tolerates `taint`.
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or("");
    let key = toleration.key.as_deref().unwrap_or("");
    if !effect.is_empty() && effect != taint.effect {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or("Equal") {
        "Exists" => key.is_empty() || key == taint.key,
        "Equal" => {
            key == taint.key && toleration.value.as_deref().unwrap_or("") == taint.value.as_deref().unwrap_or("")
        }
        _ => false,
    }
}
