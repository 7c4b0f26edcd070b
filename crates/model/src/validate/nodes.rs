//! Checks `spec.nodes`. Kubernetes validates the selector and tolerations of a pod, but not those in a FluxInstance.

use k8s_openapi::{
    api::core::v1::Toleration,
    apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement},
};

use crate::{
    labels,
    validate::{is_label_key, is_label_value},
};
use api::{
    Finding, Nodes,
    rules::{EFFECTS, EMPTY_SELECTOR, SELECTOR_OPERATORS, TOLERATION_OPERATORS},
};

/// Whether a node takes part can't follow from what it is as a member.
pub(super) const WRITTEN_BY_US: &str = "is a label that follows from what the node is to Flux: use another one";

pub(super) fn validate(nodes: &Nodes, wrong: &mut Vec<Finding>) {
    if let Some(selector) = &nodes.selector {
        validate_selector(selector, wrong);
    }
    for (index, toleration) in nodes.tolerations.iter().enumerate() {
        validate_toleration(toleration, &format!("spec.nodes.tolerations[{index}]"), wrong);
    }
}

fn validate_selector(selector: &LabelSelector, wrong: &mut Vec<Finding>) {
    let field = "spec.nodes.selector";
    if selector.match_labels.is_none() && selector.match_expressions.is_none() {
        wrong.push(Finding::new(field, EMPTY_SELECTOR).servable());
    }
    for (key, value) in selector.match_labels.iter().flatten() {
        let field = format!("{field}.matchLabels.{key}");
        if !is_label_key(key) {
            wrong.push(Finding::new(field, format!("{key:?} is not a label key")));
        } else if labels::OUR_LABELS.contains(&key.as_str()) {
            wrong.push(Finding::new(field, WRITTEN_BY_US));
        } else if !is_label_value(value) {
            wrong.push(Finding::new(field, format!("{value:?} is not a label value")));
        }
    }
    for (index, requirement) in selector.match_expressions.iter().flatten().enumerate() {
        validate_requirement(requirement, &format!("{field}.matchExpressions[{index}]"), wrong);
    }
}

fn validate_requirement(requirement: &LabelSelectorRequirement, field: &str, wrong: &mut Vec<Finding>) {
    let LabelSelectorRequirement { key, operator, values } = requirement;
    if !is_label_key(key) {
        wrong.push(Finding::new(format!("{field}.key"), format!("{key:?} is not a label key")));
    } else if labels::OUR_LABELS.contains(&key.as_str()) {
        wrong.push(Finding::new(format!("{field}.key"), WRITTEN_BY_US));
    }
    let has_values = values.as_ref().is_some_and(|values| !values.is_empty());
    match operator.as_str() {
        "In" | "NotIn" if !has_values => {
            wrong.push(Finding::new(format!("{field}.values"), format!("is empty, but {operator} needs values")));
        }
        "Exists" | "DoesNotExist" if has_values => {
            wrong
                .push(Finding::new(format!("{field}.values"), format!("is not empty, but {operator} takes no values")));
        }
        operator => one_of(&SELECTOR_OPERATORS, operator, format!("{field}.operator"), wrong),
    }
    for (index, value) in values.iter().flatten().enumerate().filter(|(_, value)| !is_label_value(value)) {
        wrong.push(Finding::new(format!("{field}.values[{index}]"), format!("{value:?} is not a label value")));
    }
}

fn validate_toleration(toleration: &Toleration, field: &str, wrong: &mut Vec<Finding>) {
    let is_given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    if let Some(operator) = &toleration.operator {
        one_of(&TOLERATION_OPERATORS, operator, format!("{field}.operator"), wrong);
    }
    if let Some(effect) = &toleration.effect {
        one_of(&EFFECTS, effect, format!("{field}.effect"), wrong);
    }
    let tolerates_any_value = toleration.operator.as_deref() == Some("Exists");
    if tolerates_any_value && is_given(&toleration.value) {
        wrong.push(Finding::new(format!("{field}.value"), "is given, but Exists takes no value").servable());
    }
    match &toleration.key {
        Some(key) if !key.is_empty() && !is_label_key(key) => {
            wrong.push(Finding::new(format!("{field}.key"), format!("{key:?} is not a taint key")));
        }
        key if !is_given(key) && !tolerates_any_value => {
            let problem = "is missing: without a key the operator must be Exists, which tolerates every taint";
            wrong.push(Finding::new(format!("{field}.key"), problem));
        }
        _ => {}
    }
}

fn one_of(values: &[&str], given: &str, field: String, wrong: &mut Vec<Finding>) {
    if !values.contains(&given) {
        wrong.push(Finding::new(field, format!("{given:?} is none of {}", quoted(values))));
    }
}

fn quoted(values: &[&str]) -> String {
    values.iter().map(|value| format!("{value:?}")).collect::<Vec<_>>().join(", ")
}
