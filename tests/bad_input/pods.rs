//! An agent's token in the wrong hands, where `deploy/pods.yaml` is applied and namespace `default` has opted in.

use k8s_openapi::{
    api::{
        batch::v1::Job,
        core::v1::{Node, Pod, ServiceAccount},
        rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{
    cluster::{Case, until_true},
    rights::{agent, agent_on, make_of, refused},
};
use api::NAMESPACE;
use cluster::patch_params;
use pods::record::{ANNOTATION_JOB, LONGEST_RECORD};

const PODS_YAML: &str = include_str!("../../deploy/pods.yaml");

/// Lets namespace `default` opt in, and makes what its pods need.
async fn opt_in(admin: &Client) {
    make_of(PODS_YAML, Api::<ClusterRole>::all(admin.clone())).await;
    make_of(PODS_YAML, Api::<ClusterRoleBinding>::all(admin.clone())).await;
    make_of(PODS_YAML, Api::<Role>::namespaced(admin.clone(), NAMESPACE)).await;
    make_of(PODS_YAML, Api::<RoleBinding>::namespaced(admin.clone(), NAMESPACE)).await;
    let binding = json!({
        "metadata": {"name": "flux-bridge"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "flux-bridge"},
        "subjects": [{"kind": "ServiceAccount", "name": "install-flux", "namespace": NAMESPACE}],
    });
    let bindings = Api::<RoleBinding>::namespaced(admin.clone(), "default");
    bindings.create(&PostParams::default(), &serde_json::from_value(binding).unwrap()).await.unwrap();
    for namespace in ["default", NAMESPACE] {
        let metadata = ObjectMeta { name: Some("default".to_owned()), ..ObjectMeta::default() };
        let accounts = Api::<ServiceAccount>::namespaced(admin.clone(), namespace);
        let _ =
            accounts.create(&PostParams::default(), &ServiceAccount { metadata, ..ServiceAccount::default() }).await;
    }
}

async fn create_pod(admin: &Client, namespace: &str, name: &str, scheduler: &str) {
    let pod = json!({
        "metadata": {"name": name, "labels": {"app": "theirs"}},
        "spec": {
            "schedulerName": scheduler,
            "automountServiceAccountToken": false,
            "containers": [{"name": "c", "image": "none"}],
        },
    });
    let pods = Api::<Pod>::namespaced(admin.clone(), namespace);
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
}

/// A patch of Job `theirs` after which its parallelism has no manager.
async fn without_a_field_of_another(jobs: &Api<Job>) -> Value {
    let gitops = PatchParams::apply("gitops").force();
    let applied = json!({"apiVersion": "batch/v1", "kind": "Job", "spec": {"parallelism": 1, "suspend": false}});
    let job = jobs.patch("theirs", &gitops, &Patch::Apply(&applied)).await.unwrap();
    let mut managers = serde_json::to_value(job).unwrap()["metadata"]["managedFields"].take();
    let by_gitops = managers.as_array_mut().unwrap().iter_mut().find(|entry| entry["manager"] == "gitops").unwrap();
    by_gitops["fieldsV1"]["f:spec"].as_object_mut().unwrap().remove("f:parallelism").unwrap();
    json!({"metadata": {"managedFields": managers}})
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_changes_no_more_of_pods_and_jobs_than_the_bridge_does() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let admin = case.client.clone();
    let token = agent(&case).await;
    opt_in(&admin).await;
    for (namespace, name, scheduler) in [
        ("default", "waits", "flux"),
        ("default", "another", "default-scheduler"),
        ("default", "agent-pod", "default-scheduler"),
        (NAMESPACE, "elsewhere", "flux"),
    ] {
        create_pod(&admin, namespace, name, scheduler).await;
    }
    let container = json!({"name": "c", "image": "none"});
    let template = json!({"spec": {"restartPolicy": "Never", "containers": [container]}});
    let spec = json!({
        "template": template,
        "completions": 2,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": 1,
        "maxFailedIndexes": 1,
    });
    let job = json!({"metadata": {"name": "theirs", "labels": {"team": "a"}}, "spec": spec});
    let all_jobs = Api::<Job>::namespaced(admin.clone(), "default");
    all_jobs.create(&PostParams::default(), &serde_json::from_value(job).unwrap()).await.unwrap();

    let jobs = Api::<Job>::namespaced(token.clone(), "default");
    let patch = async |value: &Value| jobs.patch("theirs", &patch_params(), &Patch::Merge(value)).await;
    let mut tries = 0;
    until_true("the policies to hold", async || {
        // A label that an earlier try has set already is no change.
        tries += 1;
        let label = json!({"metadata": {"labels": {"team": format!("try{tries}")}}});
        // Not under the agent's name: the API server would record the label as written by it.
        jobs.patch("theirs", &PatchParams::default(), &Patch::Merge(label)).await.is_err()
    })
    .await;
    let owner = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "u-1"});
    for wrong in [
        json!({"metadata": {"finalizers": ["example.org/mine"]}}),
        json!({"metadata": {"ownerReferences": [owner]}}),
        json!({"metadata": {"labels": {"team": "c"}}}),
        json!({"metadata": {"generateName": "x-"}}),
        json!({"metadata": {"annotations": {"example.org/mine": "1"}}}),
        json!({"metadata": {"annotations": {"distribute.flux-framework.org/suspended": "x".repeat(257)}}}),
        json!({"metadata": {"managedFields": [{
            "manager": "helm", "operation": "Apply", "apiVersion": "batch/v1", "fieldsType": "FieldsV1",
            "fieldsV1": {"f:metadata": {"f:labels": {"f:team": {}}}},
        }]}}),
        json!({"spec": {"parallelism": 9}}),
        json!({"spec": {"backoffLimit": 0}}),
        json!({"spec": {"ttlSecondsAfterFinished": 0}}),
        json!({"spec": {"maxFailedIndexes": 2}}),
        json!({"spec": {"maxFailedIndexes": null}}),
        json!({"spec": {"podReplacementPolicy": "Failed"}}),
        json!({"spec": {"manualSelector": true}}),
        json!({"spec": {"suspend": true, "activeDeadlineSeconds": 1}}),
    ] {
        assert_eq!(refused(patch(&wrong).await, &wrong.to_string()).0, 403, "{wrong}");
    }
    let suspended = json!({"metadata": {"annotations": {"distribute.flux-framework.org/suspended": "Canceled"}}, "spec": {"suspend": true}});
    assert_eq!(refused(patch(&without_a_field_of_another(&all_jobs).await).await, "a field less").0, 403);
    assert_eq!(patch(&suspended).await.unwrap().spec.unwrap().suspend, Some(true));
    assert_eq!(patch(&json!({"spec": {"suspend": null}})).await.unwrap().spec.unwrap().suspend, Some(false));

    only_one_condition_is_written(&case, &token).await;

    let bind = async |namespace: &str, name: &str, metadata: Value| {
        let mut binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": {"kind": "Node", "name": "node1"}});
        binding["metadata"]["name"] = name.into();
        let pods = Api::<Pod>::namespaced(token.clone(), namespace);
        pods.create_subresource::<Value, Value>("binding", name, &PostParams::default(), &binding).await
    };
    for (namespace, name, metadata) in [
        ("default", "waits", json!({"labels": {"app": "hijacked"}})),
        ("default", "waits", json!({"labels": {"topology.kubernetes.io/zone": "no label\n"}})),
        ("default", "waits", json!({"labels": {"topology.kubernetes.io/zone": "a\n"}})),
        ("default", "waits", json!({"labels": {"topology.kubernetes.io/region": "x".repeat(64)}})),
        ("default", "waits", json!({"annotations": {"example.org/mine": "1"}})),
        ("default", "waits", json!({"annotations": {ANNOTATION_JOB: "x".repeat(LONGEST_RECORD + 1)}})),
        (NAMESPACE, "elsewhere", json!({})),
    ] {
        assert_eq!(refused(bind(namespace, name, metadata).await, name).0, 403, "{namespace}/{name}");
    }
    // It does not add its zone to that of a target of no kind.
    let no_kind = json!({
        "apiVersion": "v1", "kind": "Binding", "target": {"name": "node1"},
        "metadata": {"name": "waits", "labels": {"topology.kubernetes.io/zone": "forged"}},
    });
    let pods = Api::<Pod>::namespaced(token.clone(), "default");
    let bound = pods.create_subresource::<Value, Value>("binding", "waits", &PostParams::default(), &no_kind).await;
    assert_eq!(refused(bound, "no kind").0, 403);
    for name in ["x".repeat(254), "No Name".to_owned()] {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "target": {"kind": "Node", "name": name}, "metadata": {"name": "waits"},
        });
        let bound = pods.create_subresource::<Value, Value>("binding", "waits", &PostParams::default(), &binding).await;
        assert_eq!(refused(bound, "no name of a node").0, 403);
    }
    // Since Kubernetes 1.35, the API server adds a node's zone to a binding before policies look at it.
    let zone = json!({"metadata": {"labels": {"topology.kubernetes.io/zone": "z1"}}});
    let nodes = Api::<Node>::all(admin.clone());
    nodes.patch("node1", &PatchParams::default(), &Patch::Merge(zone)).await.unwrap();
    bind("default", "waits", json!({"annotations": {ANNOTATION_JOB: "x".repeat(LONGEST_RECORD)}})).await.unwrap();
    let bound = Api::<Pod>::namespaced(admin, "default").get("waits").await.unwrap();
    assert_eq!(bound.spec.unwrap().node_name.as_deref(), Some("node1"));
    assert_eq!(bound.metadata.labels.unwrap()["app"], "theirs");
    evictions_keep_the_grace_period(&token, bound.metadata.uid.unwrap()).await;
}

/// An agent's token writes only condition PodScheduled of a pod, and only if Flux schedules that pod.
async fn only_one_condition_is_written(case: &Case, token: &Client) {
    let statuses = async |namespace: &str, name: &str, client: &Client, value: Value| {
        let pods = Api::<Pod>::namespaced(client.clone(), namespace);
        pods.patch_status(name, &patch_params(), &Patch::Merge(value)).await
    };
    let condition =
        |kind: &str| json!({"status": {"conditions": [{"type": kind, "status": "False", "reason": "Queued"}]}});
    let told = condition("PodScheduled");
    for (namespace, name, value) in [
        ("default", "another", told.clone()),
        ("default", "waits", json!({"metadata": {"labels": {"app": "hijacked"}}})),
        ("default", "waits", json!({"metadata": {"annotations": {"a": "b"}}})),
        // Nothing else of a pod with more than 253 characters could be written any more.
        ("default", "waits", json!({"metadata": {"generateName": "x".repeat(300)}})),
        ("default", "waits", json!({"metadata": {"finalizers": ["example.org/mine"]}})),
        (NAMESPACE, "elsewhere", told.clone()),
        // A pod that has ended is evicted at once.
        ("default", "waits", json!({"status": {"phase": "Failed"}})),
        ("default", "waits", json!({"status": {"podIP": "10.0.0.1"}})),
        ("default", "waits", condition("Ready")),
        ("default", "waits", condition("distribute.flux-framework.org/ready")),
    ] {
        assert_eq!(refused(statuses(namespace, name, token, value).await, name).0, 403, "{namespace}/{name}");
    }
    let scheduled = |message: &str, status: &str| json!({"type": "PodScheduled", "status": status, "reason": "Queued", "message": message});
    let short = scheduled("waits", "False");
    for (what, conditions) in [
        ("two of a type", json!([short, short])),
        ("a long message", json!([scheduled(&"x".repeat(4097), "False")])),
        ("a long status", json!([scheduled("waits", &"x".repeat(1000))])),
    ] {
        let value = json!({"status": {"conditions": conditions}});
        assert_eq!(refused(statuses("default", "waits", token, value).await, what).0, 403, "{what}");
    }
    statuses("default", "waits", token, json!({"status": {"conditions": [scheduled(&"x".repeat(4096), "False")]}}))
        .await
        .unwrap();
    let applied = json!({"apiVersion": "v1", "kind": "Pod", "status": {"conditions": [short]}});
    let pods = Api::<Pod>::namespaced(token.clone(), "default");
    let applied = pods.patch_status("waits", &PatchParams::apply("m1").force(), &Patch::Apply(&applied)).await;
    assert_eq!(refused(applied, "one that applies").0, 403);
    statuses("default", "waits", token, told.clone()).await.unwrap();
    // A pod of the agent's own name, in a namespace that has opted in, is another pod.
    let of_pod = agent_on(case, "agent-pod").await;
    assert_eq!(refused(statuses("default", "agent-pod", &of_pod, told).await, "agent-pod").0, 403);
}

/// Of pod `waits`, which has this uid.
async fn evictions_keep_the_grace_period(token: &Client, uid: String) {
    let evict = async |options: Value| {
        let eviction = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": "waits"},
            "deleteOptions": options,
        });
        let pods = Api::<Pod>::namespaced(token.clone(), "default");
        pods.create_subresource::<Value, Value>("eviction", "waits", &PostParams::default(), &eviction).await
    };
    for options in [json!({"gracePeriodSeconds": 0}), json!({"propagationPolicy": "Foreground"})] {
        assert_eq!(refused(evict(options.clone()).await, "waits").0, 403, "{options}");
    }
    evict(json!({ "preconditions": { "uid": uid }, "dryRun": ["All"] })).await.unwrap();
    evict(json!({ "preconditions": { "uid": uid } })).await.unwrap();
}
