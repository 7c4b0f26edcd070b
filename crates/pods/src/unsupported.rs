//! What a pod may ask of a scheduler and the bridge can't honour. Such a pod is not bound, and its condition names the field.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{PodAffinityTerm, PodSpec},
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};

use crate::{
    node_rules::{Labels, NodeRules},
    record::{ANNOTATION_JOB, LONGEST_RECORD},
    requests::UnreadableRequest,
};
use model::matching;

/// Most bytes of a pod's annotations, keys included: the 256 KiB that an object may have (`TotalAnnotationSizeLimitB` in
/// k8s.io/apimachinery), less the record of a job.
const MOST_ANNOTATION_BYTES: usize = (256 << 10) - LONGEST_RECORD - ANNOTATION_JOB.len();

/// Most [`entries`] of a pod.
const MOST_ENTRIES: usize = 500;

const HOSTNAME: &str = "kubernetes.io/hostname";

/// A field that can't be honoured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// Dynamic resource allocation.
    #[error("spec.resourceClaims is not supported by scheduler flux")]
    ResourceClaims,
    /// Any required pod affinity.
    #[error(
        "spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution is not supported by scheduler flux"
    )]
    PodAffinity,
    /// Required anti-affinity, except that of a gang's pods to each other.
    #[error(
        "spec.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution is supported by scheduler flux only \
         between the pods of one gang: topologyKey kubernetes.io/hostname, and a label that has the gang's name or the \
         Job's uid as its value"
    )]
    PodAntiAffinity,
    /// A spreading that must hold.
    #[error("spec.topologySpreadConstraints with whenUnsatisfiable: DoNotSchedule is not supported by scheduler flux")]
    TopologySpread,
    /// More [`entries`] than a decision has time for.
    #[error(
        "its nodeSelector, node affinity, tolerations, volumes, host ports and requests have more than {MOST_ENTRIES} \
         entries together, which scheduler flux does not support"
    )]
    Entries,
    /// A volume that is made where its pod goes.
    #[error(
        "the volume claim {0} waits for its first consumer, which scheduler flux does not support: use a storage class with \
         volumeBindingMode Immediate"
    )]
    WaitForFirstConsumer(String),
    /// The API server does not check the size when a binding adds the record of the job. A pod with more than 256 KiB of annotations is
    /// never written again, not even by kubelet.
    #[error(
        "its annotations have more than {} bytes, which leaves no room for the record of its job: shorten them",
        MOST_ANNOTATION_BYTES
    )]
    Annotations,
    /// See [`UnreadableRequest`].
    #[error("can't read the request for {}", .0.resource)]
    Request(#[from] UnreadableRequest),
}

/// Checks that the annotations leave room for the record of a job.
///
/// # Errors
/// [`Unsupported::Annotations`].
pub(crate) fn check_annotations(annotations: Option<&Labels>) -> Result<(), Unsupported> {
    let bytes: usize = annotations.into_iter().flatten().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MOST_ANNOTATION_BYTES { Err(Unsupported::Annotations) } else { Ok(()) }
}

/// Checks the fields of `spec`, and returns whether the pod's anti-affinity keeps the pods of its gang on different nodes. `names`: what the pod's gang may be called, such as its Job's name and uid.
///
/// # Errors
/// [`Unsupported`].
pub fn check_fields(spec: &PodSpec, labels: &Labels, namespace: &str, names: &[&str]) -> Result<bool, Unsupported> {
    if entries(spec) > MOST_ENTRIES {
        return Err(Unsupported::Entries);
    }
    if spec.resource_claims.iter().flatten().next().is_some() {
        return Err(Unsupported::ResourceClaims);
    }
    let must_spread = |constraint: &&k8s_openapi::api::core::v1::TopologySpreadConstraint| {
        constraint.when_unsatisfiable == "DoNotSchedule"
    };
    if spec.topology_spread_constraints.iter().flatten().any(|constraint| must_spread(&constraint)) {
        return Err(Unsupported::TopologySpread);
    }
    let affinity = spec.affinity.as_ref();
    let together = affinity.and_then(|affinity| affinity.pod_affinity.as_ref());
    let together = together.and_then(|rule| rule.required_during_scheduling_ignored_during_execution.as_ref());
    if together.is_some_and(|terms| !terms.is_empty()) {
        return Err(Unsupported::PodAffinity);
    }
    let apart = affinity.and_then(|affinity| affinity.pod_anti_affinity.as_ref());
    let apart = apart.and_then(|rule| rule.required_during_scheduling_ignored_during_execution.as_deref());
    let terms = apart.unwrap_or_default();
    let is_own_gang = |term: &PodAffinityTerm| {
        let own_namespace = term.namespaces.iter().flatten().all(|name| name == namespace);
        let is_simple = term.namespace_selector.is_none()
            && term.match_label_keys.iter().flatten().next().is_none()
            && term.mismatch_label_keys.iter().flatten().next().is_none();
        let selector = term.label_selector.as_ref();
        let is_gang = selector.is_some_and(|s| matching::selects(s, labels) && names_one_of(s, names));
        term.topology_key == HOSTNAME && own_namespace && is_simple && is_gang
    };
    match terms.iter().all(is_own_gang) {
        true => Ok(!terms.is_empty()),
        false => Err(Unsupported::PodAntiAffinity),
    }
}

/// Number of things that each decision compares with each node: the rules of [`NodeRules::count`], host ports, volumes and requests.
fn entries(spec: &PodSpec) -> usize {
    let containers = || spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let ports = containers().flat_map(|container| container.ports.iter().flatten());
    let host_ports = ports.filter(|port| port.host_port.is_some()).count();
    let resources = containers().map(|container| &container.resources).chain([&spec.resources]).flatten();
    let requests: usize = resources.filter_map(|of| of.requests.as_ref()).map(BTreeMap::len).sum();
    NodeRules::count(spec) + host_ports + spec.volumes.as_ref().map_or(0, Vec::len) + requests
}

/// True if `selector` selects only objects that have one of `names` as the value of some label. Each controller has a label key of its own
/// for them, so any key will do. A selector of other labels could select pods outside the gang, which would have to stay apart too.
fn names_one_of(selector: &LabelSelector, names: &[&str]) -> bool {
    let is_name = |value: &String| names.contains(&value.as_str());
    let one_value = selector.match_expressions.iter().flatten().filter(|wanted| wanted.operator == "In");
    let one_value = one_value.filter_map(|wanted| match wanted.values.as_deref() {
        Some([value]) => Some(value),
        _ => None,
    });
    selector.match_labels.iter().flatten().map(|(_, value)| value).chain(one_value).any(is_name)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn found(spec: Value) -> Result<bool, Unsupported> {
        let mut pod = json!({"containers": []});
        pod.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        let labels = [("job-name".into(), "train".into()), ("app".into(), "mpi".into())].into();
        check_fields(&serde_json::from_value(pod).unwrap(), &labels, "default", &["train", "uid-1"])
    }

    fn apart(term: Value) -> Value {
        json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}})
    }

    #[test]
    fn annotations_leave_room_for_the_record_of_a_job() {
        let with = |bytes: usize| Labels::from([("a".to_owned(), "x".repeat(bytes - 1))]);
        assert_eq!(check_annotations(None), Ok(()));
        assert_eq!(check_annotations(Some(&with(MOST_ANNOTATION_BYTES))), Ok(()));
        assert_eq!(check_annotations(Some(&with(MOST_ANNOTATION_BYTES + 1))), Err(Unsupported::Annotations));
        assert!(Unsupported::Annotations.to_string().contains("258015 bytes"), "{}", Unsupported::Annotations);
    }

    #[test]
    fn preferences_refuse_no_pod() {
        let soft = json!({"whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 1, "topologyKey": "zone"});
        let preferred = json!([{"weight": 1, "podAffinityTerm": {"topologyKey": HOSTNAME}}]);
        for spec in [
            json!({}),
            json!({"topologySpreadConstraints": [soft]}),
            json!({"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred},
                "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}),
        ] {
            assert_eq!(found(spec.clone()), Ok(false), "{spec}");
        }
    }

    #[test]
    fn what_cant_be_honoured_is_named() {
        let hard = json!({"whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1, "topologyKey": "zone"});
        let together = json!([{"topologyKey": HOSTNAME}]);
        for (spec, field) in [
            (json!({"resourceClaims": [{"name": "gpu"}]}), "spec.resourceClaims"),
            (json!({"topologySpreadConstraints": [hard]}), "spec.topologySpreadConstraints"),
            (
                json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": together}}}),
                "spec.affinity.podAffinity",
            ),
            (apart(json!({"topologyKey": HOSTNAME})), "spec.affinity.podAntiAffinity"),
        ] {
            let words = found(spec.clone()).unwrap_err().to_string();
            assert!(words.starts_with(field), "{spec}: {words}");
        }
    }

    #[test]
    fn only_anti_affinity_to_the_own_gang_by_hostname_is_spreading() {
        let selector = |labels: Value| json!({"matchLabels": labels});
        let listed = json!({"matchExpressions": [{"key": "job-name", "operator": "In", "values": ["train"]}]});
        let gang = selector(json!({"job-name": "train"}));
        for (term, expected) in [
            (json!({"topologyKey": HOSTNAME, "labelSelector": gang}), true),
            (json!({"topologyKey": HOSTNAME, "labelSelector": listed}), true),
            (json!({"topologyKey": HOSTNAME, "labelSelector": gang, "namespaces": ["default"]}), true),
            (json!({"topologyKey": HOSTNAME, "labelSelector": gang, "namespaces": ["other"]}), false),
            (json!({"topologyKey": HOSTNAME, "labelSelector": gang, "namespaceSelector": {}}), false),
            (json!({"topologyKey": "zone", "labelSelector": gang}), false),
            (json!({"topologyKey": HOSTNAME, "labelSelector": selector(json!({"app": "mpi"}))}), false),
            (json!({"topologyKey": HOSTNAME, "labelSelector": selector(json!({"job-name": "uid-1"}))}), false),
        ] {
            let expected = if expected { Ok(true) } else { Err(Unsupported::PodAntiAffinity) };
            assert_eq!(found(apart(term.clone())), expected, "{term}");
        }
    }
    #[test]
    fn a_pod_with_more_than_500_entries_is_refused() {
        let terms = |count: usize| {
            let absent = json!({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]});
            let terms = json!({"nodeSelectorTerms": vec![absent; count]});
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}})
        };
        let tolerations = |count: usize| json!({"tolerations": vec![json!({"operator": "Exists"}); count]});
        let values: Vec<_> = (0..501).map(|number| number.to_string()).collect();
        let one = json!({"matchExpressions": [{"key": "a", "operator": "In", "values": values}]});
        let one = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [one]}});
        let volume =
            |number: u32| json!({"name": format!("v{number}"), "persistentVolumeClaim": {"claimName": "data"}});
        let volumes = |count: u32| json!({"volumes": (0..count).map(volume).collect::<Vec<_>>()});
        let port = |number: u32| json!({"containerPort": number, "hostPort": number});
        let container = |count: u32| json!({"name": "c", "ports": (1..=count).map(port).collect::<Vec<_>>()});
        let ports = |count: u32| json!({"containers": [container(count)]});
        let requests = |count: u32| {
            let asked: serde_json::Map<_, _> = (0..count).map(|number| (format!("a/{number}"), json!("1"))).collect();
            json!({"containers": [{"name": "c", "resources": {"requests": asked}}]})
        };
        for spec in [terms(250), tolerations(500), volumes(500), ports(500), requests(500)] {
            assert!(found(spec).is_ok());
        }
        for spec in [
            terms(251),
            tolerations(501),
            volumes(501),
            ports(501),
            requests(501),
            json!({"affinity": {"nodeAffinity": one}}),
        ] {
            assert_eq!(found(spec), Err(Unsupported::Entries));
        }
    }
}
