//! Which nodes a pod's own rules permit: nodeSelector, required node affinity, tolerations, and where its volumes are.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, Taint, Toleration};

use model::matching::{holds, keeps_pods_off, tolerates};

/// Labels by name.
pub type Labels = BTreeMap<String, String>;

/// The rules of one pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeRules {
    /// spec.nodeSelector
    pub selector: Labels,
    /// spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution
    pub affinity: Option<NodeSelector>,
    /// spec.tolerations
    pub tolerations: Vec<Toleration>,
}

impl NodeRules {
    /// The rules in a pod's spec.
    pub fn of(spec: &PodSpec) -> Self {
        let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        Self {
            selector: spec.node_selector.clone().unwrap_or_default(),
            affinity: affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.clone()),
            tolerations: spec.tolerations.clone().unwrap_or_default(),
        }
    }

    /// Number of keys, requirements, values and tolerations in `spec`: what it costs to compare them with a node.
    pub fn count(spec: &PodSpec) -> usize {
        let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let affinity = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
        let terms = affinity.map(|affinity| affinity.node_selector_terms.as_slice()).unwrap_or_default();
        let requirements = |term: &NodeSelectorTerm| {
            let all = term.match_expressions.iter().flatten().chain(term.match_fields.iter().flatten());
            1 + all.map(|wanted| 1 + wanted.values.as_ref().map_or(0, Vec::len)).sum::<usize>()
        };
        spec.node_selector.as_ref().map_or(0, BTreeMap::len)
            + terms.iter().map(requirements).sum::<usize>()
            + spec.tolerations.as_ref().map_or(0, Vec::len)
    }

    /// True if nodeSelector and node affinity permit a node with these labels.
    pub fn select(&self, node: &str, labels: &Labels) -> bool {
        self.selector.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.affinity.as_ref().is_none_or(|affinity| selects(affinity, node, labels))
    }

    /// The first of `taints` that keeps the pod off.
    pub fn untolerated<'a>(&self, taints: impl IntoIterator<Item = &'a Taint>) -> Option<&'a Taint> {
        let is_tolerated = |taint: &Taint| self.tolerations.iter().any(|toleration| tolerates(toleration, taint));
        taints.into_iter().find(|taint| keeps_pods_off(taint) && !is_tolerated(taint))
    }
}

/// True if `selector` selects a node, as Kubernetes decides it: one of its terms, all of whose requirements hold. A term
/// without requirements selects nothing.
pub fn selects(selector: &NodeSelector, node: &str, labels: &Labels) -> bool {
    let is_met = |term: &NodeSelectorTerm| {
        let (expressions, fields) = (term.match_expressions.iter().flatten(), term.match_fields.iter().flatten());
        let is_empty = expressions.clone().next().is_none() && fields.clone().next().is_none();
        // The only field that Kubernetes knows.
        let field = |key: &str| (key == "metadata.name").then_some(node);
        !is_empty
            && expressions.into_iter().all(|wanted| meets(wanted, labels.get(&wanted.key).map(String::as_str)))
            && fields.into_iter().all(|wanted| meets(wanted, field(&wanted.key)))
    };
    selector.node_selector_terms.iter().any(is_met)
}

fn meets(wanted: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = wanted.values.as_deref().unwrap_or_default();
    let compared = |larger: bool| {
        let [limit] = values else { return false };
        let number = |text: &str| text.parse::<i64>().ok();
        let both = value.and_then(number).zip(number(limit));
        both.is_some_and(|(value, limit)| if larger { value > limit } else { value < limit })
    };
    match wanted.operator.as_str() {
        "Gt" => compared(true),
        "Lt" => compared(false),
        operator => holds(operator, values, value),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rules(spec: Value) -> NodeRules {
        let mut pod = json!({"containers": []});
        pod.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        NodeRules::of(&serde_json::from_value(pod).unwrap())
    }

    fn affinity(terms: Value) -> Value {
        let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        json!({"affinity": {"nodeAffinity": required}})
    }

    #[test]
    fn selector_and_affinity_select_as_kube_scheduler_does() {
        let labels: Labels = [("pool", "hpc"), ("disks", "4"), ("zone", "a")].map(|(k, v)| (k.into(), v.into())).into();
        let term = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        for (spec, expected) in [
            (json!({}), true),
            (json!({"nodeSelector": {"pool": "hpc"}}), true),
            (json!({"nodeSelector": {"pool": "hpc", "zone": "b"}}), false),
            (affinity(json!([term("pool", "In", &["web", "hpc"])])), true),
            (affinity(json!([term("pool", "In", &["web"])])), false),
            (affinity(json!([term("pool", "NotIn", &["web"])])), true),
            (affinity(json!([term("none", "NotIn", &["web"])])), true),
            (affinity(json!([term("pool", "Exists", &[])])), true),
            (affinity(json!([term("pool", "DoesNotExist", &[])])), false),
            (affinity(json!([term("disks", "Gt", &["3"])])), true),
            (affinity(json!([term("disks", "Gt", &["4"])])), false),
            (affinity(json!([term("disks", "Lt", &["5"])])), true),
            (affinity(json!([term("pool", "Lt", &["5"])])), false),
            (affinity(json!([term("disks", "Gt", &["1", "2"])])), false),
            (affinity(json!([term("pool", "Near", &["hpc"])])), false),
            (affinity(json!([term("pool", "In", &["web"]), term("zone", "In", &["a"])])), true),
            (affinity(json!([])), false),
            (affinity(json!([{}])), false),
            (
                affinity(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node1"]}]}])),
                true,
            ),
            (
                affinity(
                    json!([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node1"]}]}]),
                ),
                false,
            ),
            (
                affinity(
                    json!([{"matchExpressions": [{"key": "pool", "operator": "Exists"}, {"key": "gpu", "operator":
                    "Exists"}]}]),
                ),
                false,
            ),
        ] {
            assert_eq!(rules(spec.clone()).select("node1", &labels), expected, "{spec}");
        }
    }

    #[test]
    fn only_untolerated_taints_that_keep_pods_off_count() {
        let taint = |key: &str, effect: &str| Taint {
            key: key.into(),
            value: Some("v".into()),
            effect: effect.into(),
            time_added: None,
        };
        let taints = [taint("soft", "PreferNoSchedule"), taint("a", "NoSchedule"), taint("b", "NoExecute")];
        for (tolerations, expected) in [
            (json!([]), Some("a")),
            (json!([{"key": "a", "operator": "Exists"}]), Some("b")),
            (json!([{"key": "a", "value": "v"}, {"key": "b", "operator": "Equal", "value": "v"}]), None),
            (json!([{"key": "a", "value": "other"}]), Some("a")),
            (json!([{"operator": "Exists"}]), None),
            (json!([{"operator": "Exists", "effect": "NoSchedule"}]), Some("b")),
            (json!([{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}]), Some("a")),
        ] {
            let rules = rules(json!({"tolerations": tolerations}));
            let found = rules.untolerated(&taints).map(|taint| taint.key.as_str());
            assert_eq!(found, expected, "{tolerations}");
        }
    }
}
