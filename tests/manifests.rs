//! What is applied to a cluster, and the examples: that they say what the program needs, and no more.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

use std::{
    fs,
    path::{Path, PathBuf},
};

use api::{
    ANNOTATION_CONSUMED, ANNOTATION_PROTECTS, CONDITION_POD_READY, CONFIGMAP_BROKER, CONFIGMAP_DEFAULT,
    CONFIGMAP_DEFAULT_KEY, CONFIGMAP_PACKAGES, CONFIGMAP_ROSTER, DAEMONSET, FluxInstance, FluxInstanceSpec, INSTANCE,
    LEASE_PLANNER, NAMESPACE, SECRET_CURVE, by_line,
};
use k8s_openapi::{
    api::{
        apps::v1::DaemonSet,
        core::v1::{
            ConfigMap, Container, Namespace, NodeSelectorRequirement, Pod, PodSpec, PodTemplateSpec, ResourceQuota,
            Toleration,
        },
        rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding},
    },
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use model::{
    eligibility::PROTECTING,
    labels::OUR_LABELS,
    read::{read, read_instance},
};
use pods::{placeholder, pod::PodView};
use serde::{Deserialize, de::DeserializeOwned};
use serde_norway::Value;

const CONTROL_PLANES: &str = "install-flux-control-planes";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()
}

fn documents() -> Vec<Value> {
    let text = fs::read_to_string(root().join("deploy/daemonset-installer.yaml")).unwrap();
    serde_norway::Deserializer::from_str(&text).map(|document| Value::deserialize(document).unwrap()).collect()
}

/// All objects of one kind.
fn all<K: DeserializeOwned>(kind: &str) -> Vec<K> {
    let of_kind = |document: &Value| document.get("kind").and_then(Value::as_str) == Some(kind);
    documents().into_iter().filter(of_kind).map(|document| serde_norway::from_value(document).unwrap()).collect()
}

/// The only object of one kind.
fn one<K: DeserializeOwned>(kind: &str) -> K {
    let mut found = all(kind);
    assert_eq!(found.len(), 1, "{kind}");
    found.remove(0)
}

/// The DaemonSet for workers.
fn daemon_set() -> DaemonSet {
    let [workers, _] = <[DaemonSet; 2]>::try_from(all("DaemonSet")).unwrap();
    workers
}

fn pod() -> PodSpec {
    daemon_set().spec.unwrap().template.spec.unwrap()
}

/// The names of the DaemonSets that put an agent onto a node with `labels`, taints aside.
fn on_node(labels: &[(&str, &str)]) -> Vec<String> {
    let holds = |term: &NodeSelectorRequirement| {
        let value = labels.iter().find(|(key, _)| *key == term.key).map(|(_, value)| (*value).to_owned());
        match term.operator.as_str() {
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            "NotIn" => !value.is_some_and(|value| term.values.as_ref().unwrap().contains(&value)),
            other => panic!("{other}"),
        }
    };
    let is_for = |set: &DaemonSet| {
        let affinity = pod_of(set).affinity.unwrap().node_affinity.unwrap();
        let terms = affinity.required_during_scheduling_ignored_during_execution.unwrap().node_selector_terms;
        terms.iter().any(|term| term.match_expressions.as_ref().unwrap().iter().all(holds))
    };
    all::<DaemonSet>("DaemonSet").into_iter().filter(is_for).map(|set| set.metadata.name.unwrap()).collect()
}

fn pod_of(set: &DaemonSet) -> PodSpec {
    set.spec.clone().unwrap().template.spec.unwrap()
}

fn agent() -> Container {
    let mut containers = pod().containers;
    assert_eq!(containers.len(), 1);
    containers.remove(0)
}

#[test]
fn the_roles_are_bound_to_the_account_that_the_pods_run_as() {
    let account = pod().service_account_name;
    let cluster = one::<ClusterRoleBinding>("ClusterRoleBinding");
    let role = one::<RoleBinding>("RoleBinding");
    let [ours, for_prometheus] = <[ClusterRole; 2]>::try_from(all("ClusterRole")).unwrap();
    assert_eq!(Some(cluster.role_ref.name), ours.metadata.name);
    // An administrator binds the other one.
    assert_eq!(for_prometheus.metadata.name.as_deref(), Some("flux-distribute-metrics"));
    assert_eq!(Some(role.role_ref.name), one::<Role>("Role").metadata.name);
    assert_eq!(role.metadata.namespace.as_deref(), Some(NAMESPACE));
    for subject in [cluster.subjects.unwrap(), role.subjects.unwrap()].concat() {
        assert_eq!((Some(subject.name), subject.namespace.as_deref()), (account.clone(), Some(NAMESPACE)));
    }
    // The policies are about the same account, and the objects that it may make are those that it makes.
    let policies = all::<Value>("ValidatingAdmissionPolicy")
        .iter()
        .map(|p| serde_norway::to_string(p).unwrap())
        .collect::<Vec<_>>();
    let user = format!("system:serviceaccount:{NAMESPACE}:{}", account.unwrap());
    assert!(policies.len() == 10 && policies.iter().all(|policy| policy.contains(&user)));
    let own = [SECRET_CURVE, CONFIGMAP_BROKER, CONFIGMAP_PACKAGES, CONFIGMAP_ROSTER, LEASE_PLANNER, INSTANCE];
    for name in own.into_iter().chain([ANNOTATION_PROTECTS]).chain(PROTECTING) {
        assert!(policies.iter().any(|policy| policy.contains(&format!("'{name}'"))), "{name}");
    }
    // Each annotation and label that an agent writes onto what has other owners is permitted by the policy of its kind, and by the one about managers.
    for name in [ANNOTATION_PROTECTS, ANNOTATION_CONSUMED].into_iter().chain(PROTECTING).chain(OUR_LABELS) {
        assert_eq!(policies.iter().filter(|policy| policy.contains(name)).count(), 2, "{name}");
    }
}

#[test]
fn the_pod_reaches_its_host() {
    let pod = pod();
    assert_eq!((pod.host_pid, pod.host_network), (Some(true), Some(true)));
    assert_eq!(pod.dns_policy.as_deref(), Some("ClusterFirstWithHostNet"));
    let security = agent().security_context.unwrap();
    assert_eq!((security.privileged, security.read_only_root_filesystem), (Some(true), Some(true)));
}

#[test]
fn the_namespace_takes_privileged_pods() {
    let namespace: Namespace = one("Namespace");
    assert_eq!(namespace.metadata.name.as_deref(), Some(NAMESPACE));
    for mode in ["enforce", "audit", "warn"] {
        let label = format!("pod-security.kubernetes.io/{mode}");
        assert_eq!(namespace.metadata.labels.as_ref().unwrap()[&label], "privileged");
    }
}

/// One that isn't there yet would keep the pods, and so the planner that makes it, from ever starting; and a hostPath would
/// have to match a field of the spec.
#[test]
fn no_secret_config_map_or_host_path_is_mounted() {
    for volume in pod().volumes.unwrap_or_default() {
        let other = k8s_openapi::api::core::v1::Volume { empty_dir: None, name: String::new(), ..volume.clone() };
        assert!(volume.empty_dir.is_some() && other == Default::default(), "{} is more than an emptyDir", volume.name);
    }
    let agent = agent();
    assert_eq!(agent.env_from.unwrap_or_default(), []);
    for variable in agent.env.unwrap_or_default() {
        let source = variable.value_from.unwrap();
        assert!(source.field_ref.is_some() && source.secret_key_ref.is_none() && source.config_map_key_ref.is_none());
    }
}

/// Any user of a node could take a port before the agent, and keep it from ever being found alive.
#[test]
fn the_probes_ask_at_a_socket_of_the_pods_own() {
    let agent = agent();
    let is_tmp = |mount: &k8s_openapi::api::core::v1::VolumeMount| mount.mount_path == "/tmp";
    assert!(agent.volume_mounts.unwrap().iter().any(is_tmp), "the socket is there");
    for probe in [agent.startup_probe, agent.liveness_probe] {
        let probe = probe.unwrap();
        assert_eq!(probe.exec.unwrap().command.unwrap(), ["/flux-distribute", "probe"]);
        assert!(probe.timeout_seconds >= Some(5), "longer than the command itself waits");
    }
}

/// kubelet makes a Warning Event of each readiness probe that is answered "not yet".
#[test]
fn a_pods_readiness_comes_from_a_gate_so_no_probe_fails_during_an_installation() {
    let gates: Vec<_> = pod().readiness_gates.unwrap().into_iter().map(|gate| gate.condition_type).collect();
    assert_eq!(gates, [CONDITION_POD_READY]);
    assert_eq!(agent().readiness_probe, None);
    assert!(agent().startup_probe.unwrap().initial_delay_seconds >= Some(2), "the socket is there by then");
}

/// A pod's end is no end of a broker, a teardown gets its time, and a full node does not evict what keeps it.
#[test]
fn the_pod_can_be_replaced_and_is_not_evicted() {
    let strategy = daemon_set().spec.unwrap().update_strategy.unwrap();
    assert_eq!(strategy.type_.as_deref(), Some("RollingUpdate"));
    let pod = pod();
    assert_eq!(pod.priority_class_name.as_deref(), Some("system-node-critical"));
    assert_eq!(pod.termination_grace_period_seconds, Some(120));
    let resources = agent().resources.unwrap();
    assert!(resources.requests.is_some_and(|requests| requests.contains_key("cpu") && requests.contains_key("memory")));
    assert_eq!(resources.limits, None);
}

#[test]
fn the_image_is_of_this_version() {
    let agent = agent();
    let version = concat!(":", env!("CARGO_PKG_VERSION"));
    assert!(agent.image.unwrap().ends_with(version));
    let requests = agent.resources.unwrap().requests.unwrap();
    assert_eq!(requests["cpu"].0, format!("{}m", model::resources::AGENT_CPU));
    assert_eq!(agent.image_pull_policy.as_deref(), Some("IfNotPresent"));
    assert_eq!((agent.command, agent.args), (None, Some(vec!["agent".to_owned()])));
}

#[test]
fn objects_have_the_names_that_the_program_looks_for() {
    let daemon_set = daemon_set();
    assert_eq!(daemon_set.metadata.name.as_deref(), Some(DAEMONSET));
    assert_eq!(daemon_set.metadata.namespace.as_deref(), Some(NAMESPACE));
    let default: ConfigMap = one("ConfigMap");
    assert_eq!(default.metadata.name.as_deref(), Some(CONFIGMAP_DEFAULT));
    assert_eq!(default.metadata.namespace.as_deref(), Some(NAMESPACE));
    let spec: FluxInstanceSpec = serde_norway::from_str(&default.data.unwrap()[CONFIGMAP_DEFAULT_KEY]).unwrap();
    assert_eq!(spec, FluxInstanceSpec::default());
}

/// Every teardown that we tried with them hung: no process is left that could remove them.
#[test]
fn nothing_has_a_finalizer() {
    for document in documents() {
        assert_eq!(document["metadata"].get("finalizers"), None);
    }
}

/// What the agents may do to pods of others, each namespace grants for itself.
#[test]
fn no_right_to_change_pods_or_jobs_is_granted_for_the_whole_cluster() {
    let text = fs::read_to_string(root().join("deploy/pods.yaml")).unwrap();
    let documents: Vec<Value> =
        serde_norway::Deserializer::from_str(&text).map(|document| Value::deserialize(document).unwrap()).collect();
    let of_kind =
        |kind: &str| -> Vec<&Value> { documents.iter().filter(|document| document["kind"] == kind).collect() };
    let roles: Vec<ClusterRole> =
        of_kind("ClusterRole").into_iter().map(|role| serde_norway::from_value(role.clone()).unwrap()).collect();
    for binding in of_kind("ClusterRoleBinding") {
        let binding: ClusterRoleBinding = serde_norway::from_value(binding.clone()).unwrap();
        let role = roles.iter().find(|role| role.metadata.name.as_ref() == Some(&binding.role_ref.name)).unwrap();
        // An Event names who reports it.
        let is_of_events = |rule: &&PolicyRule| rule.resources == Some(vec!["events".to_owned()]);
        let others = role.rules.iter().flatten().filter(|rule| !is_of_events(rule));
        let mut verbs = others.flat_map(|rule| &rule.verbs);
        assert!(verbs.all(|verb| ["get", "list", "watch"].contains(&verb.as_str())), "{binding:?}");
        assert!(!role.rules.iter().flatten().any(|rule| rule.resources.iter().flatten().any(|kind| kind == "secrets")));
    }
    for binding in of_kind("RoleBinding") {
        assert!([NAMESPACE, placeholder::NAMESPACE].map(Value::from).contains(&binding["metadata"]["namespace"]));
    }
}

#[test]
fn every_example_is_valid() {
    let mut count = 0;
    for entry in fs::read_dir(root().join("example")).unwrap() {
        let path = entry.unwrap().path();
        if !path.file_name().unwrap().to_str().unwrap().starts_with("fluxinstance-") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let instance: FluxInstance = serde_norway::from_str(&text).unwrap();
        read_instance(&text).unwrap_or_else(|findings| panic!("{}", by_line(&path, &findings)));
        assert_eq!(instance.metadata.namespace.as_deref(), Some(NAMESPACE));
        count += 1;
    }
    assert_eq!(count, 5);
}

/// The pods of a document, as its controller would make one.
fn example_pod(mut document: Value) -> Option<Pod> {
    let name = document["metadata"]["name"].as_str().unwrap().to_owned();
    let kind = document["kind"].as_str().unwrap().to_owned();
    match kind.as_str() {
        "Pod" => Some(serde_norway::from_value(document).unwrap()),
        "Job" | "Deployment" => {
            let template = std::mem::take(&mut document["spec"]["template"]);
            let PodTemplateSpec { metadata, spec } = serde_norway::from_value(template).unwrap();
            let mut pod = Pod { metadata: metadata.unwrap_or_default(), spec, status: None };
            if kind == "Job" {
                let labels = pod.metadata.labels.get_or_insert_default();
                labels.insert("batch.kubernetes.io/job-name".to_owned(), name.clone());
                pod.metadata.owner_references = Some(vec![OwnerReference {
                    api_version: "batch/v1".to_owned(),
                    kind,
                    name,
                    uid: "0b9f2c1e-5a54-4c1c-8b36-2f7d4b8f5a11".to_owned(),
                    controller: Some(true),
                    ..OwnerReference::default()
                }]);
            }
            Some(pod)
        }
        _ => None,
    }
}

#[test]
fn every_example_of_pods_can_be_scheduled() {
    let files = fs::read_dir(root().join("example")).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("pods-")).collect();
    let mut count = 0;
    for path in &files {
        let text = fs::read_to_string(path).unwrap();
        for document in serde_norway::Deserializer::from_str(&text) {
            let Some(pod) = example_pod(Value::deserialize(document).unwrap()) else { continue };
            let view = PodView::of(&pod);
            assert!(view.is_bridged, "{}", path.display());
            let plan = view.plan.unwrap();
            plan.spreads.unwrap_or_else(|unsupported| panic!("{}: {unsupported}", path.display()));
            assert!(view.requests.cpu >= 1000, "{}: a pod has at least one core", path.display());
            count += 1;
        }
    }
    assert_eq!((files.len(), count), (6, 9));
}

/// `validate` takes the one file to apply as it is, and looks at what people edit in it.
#[test]
fn the_installers_first_spec_is_found_and_valid() {
    let documents = read(&fs::read_to_string(root().join("deploy/daemonset-installer.yaml")).unwrap()).unwrap();
    assert_eq!(documents.specs.len(), 1, "ConfigMap flux-default");
    assert_eq!(documents.specs[0].findings, []);
    assert!(documents.others.contains(&"DaemonSet install-flux".to_owned()), "{:?}", documents.others);
}

/// The planner decides which nodes take part, and a user who breaks into a member must find no agent on a control plane.
#[test]
fn workers_keep_their_agent_under_any_taint_and_tainted_control_planes_get_none() {
    let every = Toleration { operator: Some("Exists".to_owned()), ..Toleration::default() };
    assert_eq!(pod().tolerations.unwrap(), [every]);
    // The last two are those of kubeadm before 1.20, and of Rancher's RKE1.
    let roles =
        ["control-plane", "etcd", "master", "controlplane"].map(|role| format!("node-role.kubernetes.io/{role}"));
    for some in 0..1 << roles.len() {
        let labels = (0..roles.len()).filter(|at| some >> at & 1 == 1).map(|at| (roles[at].as_str(), "true"));
        let labels = labels.collect::<Vec<_>>();
        assert_eq!(on_node(&labels), [if some == 0 { DAEMONSET } else { CONTROL_PLANES }], "{labels:?}");
    }
    for (labels, sets) in [
        (&[("type", "compute")][..], &[DAEMONSET][..]),
        (&[("node-role.kubernetes.io/worker", "true")], &[DAEMONSET]),
        // They have no host.
        (&[("eks.amazonaws.com/compute-type", "fargate")], &[]),
        (&[("type", "virtual-kubelet")], &[]),
    ] {
        assert_eq!(on_node(labels), sets, "{labels:?}");
    }
    let control_planes = all::<DaemonSet>("DaemonSet").remove(1);
    for toleration in pod_of(&control_planes).tolerations.unwrap() {
        let key = toleration.key.unwrap();
        let is_condition = key.starts_with("node.kubernetes.io/");
        assert!(is_condition || key == "distribute.flux-framework.org/dedicated", "{key}");
    }
    // All else is the same: the planner and `kubectl exec ds/install-flux` find its pods among the others.
    let same = |pod: PodSpec| PodSpec { affinity: None, tolerations: None, ..pod };
    assert_eq!(same(pod_of(&control_planes)), same(pod()));
    for set in [daemon_set(), control_planes] {
        let spec = set.spec.unwrap();
        let labels = spec.template.metadata.unwrap().labels.unwrap();
        assert_eq!(labels["app"], DAEMONSET);
        for (key, value) in spec.selector.match_labels.unwrap() {
            assert_eq!(labels.get(&key), Some(&value));
        }
        // An agent asks for its own one at the end of its pod.
        let label = "distribute.flux-framework.org/daemonset";
        assert_eq!(labels[label], set.metadata.name.unwrap());
        let environment = spec.template.spec.unwrap().containers.remove(0).env.unwrap();
        let name = environment.into_iter().find(|variable| variable.name == "DAEMONSET").unwrap();
        assert_eq!(name.value_from.unwrap().field_ref.unwrap().field_path, format!("metadata.labels['{label}']"));
    }
}

/// GKE admits such pods outside of kube-system only beside a quota for them.
#[test]
fn the_namespace_has_a_quota_for_the_priority_of_the_pods() {
    let quota = one::<ResourceQuota>("ResourceQuota");
    assert_eq!(quota.metadata.namespace.as_deref(), Some(NAMESPACE));
    let spec = quota.spec.unwrap();
    let scope = spec.scope_selector.unwrap().match_expressions.unwrap().remove(0);
    assert_eq!((scope.scope_name.as_str(), scope.operator.as_str()), ("PriorityClass", "In"));
    assert_eq!(scope.values.unwrap(), [pod().priority_class_name.unwrap()]);
    assert!(spec.hard.unwrap().contains_key("pods"));
}
