use serde_json::{Value, json};

use super::{
    pod::{FORCED_HOLD, Phase, PodView},
    unsupported::Unsupported,
};

fn view(more: Value) -> PodView {
    let mut pod = json!({"metadata": {"name": "train-0", "namespace": "default", "uid": "u0", "labels": {"job-name": "train"},
        "creationTimestamp": "2026-01-01T00:00:01Z"}, "spec": {"schedulerName": "flux", "containers": []}, "status": {}});
    for (part, fields) in more.as_object().unwrap() {
        pod[part].as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    }
    PodView::of(&serde_json::from_value(pod).unwrap())
}

#[test]
fn a_waiting_pod_is_parsed_with_its_plan() {
    let owners = json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "j", "controller": true}]);
    let gang =
        json!({"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"job-name": "train"}}});
    let apart = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [gang]}});
    let told = json!([{"type": "PodScheduled", "status": "False", "reason": "Queued", "message": "place 3"}]);
    let pod = view(json!({
        "metadata": {"ownerReferences": owners, "annotations": {"batch.kubernetes.io/job-completion-index": "4"}},
        "spec": {"affinity": apart, "priority": 7, "preemptionPolicy": "Never", "activeDeadlineSeconds": 60, "schedulingGates": [{"name": "g"}],
            "volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "b", "ephemeral": {}},
                {"name": "c", "emptyDir": {}}]},
        "status": {"conditions": told},
    }));
    assert_eq!(
        (pod.created, pod.index, pod.waits(), pod.is_ready_to_bind()),
        (1_767_225_601_000, Some(4), true, false)
    );
    assert!(pod.never_preempts);
    assert_eq!(pod.owner.as_ref().map(|owner| owner.uid.as_str()), Some("j"));
    let plan = pod.plan.unwrap();
    assert_eq!((plan.spreads, pod.priority, plan.seconds, plan.is_gated), (Ok(true), 7, Some(60), true));
    assert_eq!(plan.claims.iter().collect::<Vec<_>>(), ["data", "train-0-b"]);
    assert_eq!(plan.told, Some(("Queued".into(), "place 3".into())));
}

/// Whoever may create a pod chooses them, and the API server checks neither.
#[test]
fn an_owner_is_a_job_only_if_its_name_and_uid_can_be_those_of_one() {
    for (version, name, uid, is_job) in [
        ("batch/v1", "train", "0b9f2c1e-5a54-4c1c-8b36-2f7d4b8f5a11", true),
        ("batch/v9", "train", "u", false),
        ("batch/v1", "x\u{1b}[2J", "u", false),
        ("batch/v1", "train", "u\n", false),
        ("batch/v1", &"x".repeat(64), "u", false),
        ("batch/v1", "train", "", false),
    ] {
        let owner = json!([{"apiVersion": version, "kind": "Job", "name": name, "uid": uid, "controller": true}]);
        let pod = view(json!({"metadata": {"ownerReferences": owner}}));
        assert_eq!(pod.owner.is_some_and(|owner| owner.is_job), is_job, "{version} {name:?} {uid:?}");
    }
}

#[test]
fn a_bound_pod_is_parsed_with_its_record() {
    let scheduled = json!([{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:02Z"}]);
    let record = r#"{"id":"f1","rank":3,"cores":"0-1"}"#;
    let pod = view(json!({
        "metadata": {"annotations": {"distribute.flux-framework.org/job": record}, "deletionTimestamp": "2026-01-01T00:00:09Z"},
        "spec": {"nodeName": "node3"},
        "status": {"phase": "Running", "conditions": scheduled, "startTime": "2026-01-01T00:00:03Z"},
    }));
    assert_eq!((pod.node.as_deref(), pod.bound, pod.plan.is_none()), (Some("node3"), Some(1_767_225_602_000), true));
    assert_eq!((pod.phase, pod.is_taken_up, pod.is_deleting()), (Phase::Running, true, true));
    let record = pod.record.unwrap();
    assert_eq!((record.rank, record.cores.to_string()), (3, "0-1".to_owned()));
}

#[test]
fn cores_are_held_as_long_as_a_container_may_run() {
    let bound = |phase: Phase| PodView { node: Some("node1".into()), phase, ..PodView::default() };
    let gone = |phase: Phase| PodView { gone: Some(1000), ..bound(phase) };
    for (what, pod, now, expected) in [
        ("not bound", PodView::default(), 0, false),
        ("bound", bound(Phase::Pending), 0, true),
        ("running", bound(Phase::Running), 0, true),
        ("terminating", PodView { to_end_by: Some(0), ..bound(Phase::Running) }, 0, true),
        ("succeeded", bound(Phase::Succeeded), 0, false),
        ("failed", bound(Phase::Failed), 0, false),
        ("deleted by force", gone(Phase::Running), 1000 + FORCED_HOLD - 1, true),
        ("deleted by force a while ago", gone(Phase::Running), 1000 + FORCED_HOLD, false),
        ("ended, then gone", gone(Phase::Succeeded), 1000, false),
    ] {
        assert_eq!(pod.holds(now), expected, "{what}");
    }
}

#[test]
fn a_refusal_is_a_failure_before_any_container_ran() {
    let container = |state: Value| json!([{"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state}]);
    let bound = json!({"nodeName": "node1"});
    for (status, expected) in [
        (json!({"phase": "Failed", "reason": "OutOfcpu"}), true),
        (json!({"phase": "Failed", "containerStatuses": container(json!({"waiting": {}}))}), true),
        (json!({"phase": "Failed", "containerStatuses": container(json!({"terminated": {"exitCode": 1}}))}), false),
        (json!({"phase": "Pending"}), false),
    ] {
        let pod = view(json!({"spec": bound, "status": status}));
        assert_eq!(pod.is_refused, expected, "{status}");
    }
}

#[test]
fn the_gang_hints_of_every_kind_are_kept() {
    let hints = |labels: Value| view(json!({"metadata": {"labels": labels}})).hints;
    let pair = |name: &str, size: &str| Some((name.to_owned(), size.to_owned()));
    for (labels, expected) in [
        (
            json!({"fluence.flux-framework.org/pod-group": "g", "fluence.flux-framework.org/group-size": "3"}),
            pair("g", "3"),
        ),
        (json!({"fluence.pod-group": "g", "fluence.group-size": "3"}), pair("g", "3")),
        (json!({"scheduling.x-k8s.io/pod-group": "g", "fluence.group-size": "3"}), pair("g", "3")),
        (json!({"fluence.pod-group": "g"}), None),
    ] {
        assert_eq!(hints(labels.clone()).fluence, expected, "{labels}");
    }
    assert_eq!(hints(json!({"scheduling.x-k8s.io/pod-group": "g"})).coscheduling.as_deref(), Some("g"));
    let native = json!({"spec": {"schedulingGroup": {"podGroupName": "g"}}});
    assert_eq!(view(native).hints.pod_group.as_deref(), Some("g"));
    let annotations = json!({"distribute.flux-framework.org/gang": "g"});
    assert_eq!(view(json!({"metadata": {"annotations": annotations}})).hints.annotated, pair("g", ""));
    let labels = json!({"leaderworkerset.sigs.k8s.io/name": "lws", "leaderworkerset.sigs.k8s.io/group-index": "3"});
    let annotations = json!({"leaderworkerset.sigs.k8s.io/size": "4"});
    let group = view(json!({"metadata": {"labels": labels, "annotations": annotations}})).hints.leader_worker_set;
    assert_eq!(group, pair("lws-3", "4"));
}

#[test]
fn a_pod_whose_request_cant_be_read_is_not_scheduled() {
    let container = json!([{"name": "c", "resources": {"requests": {"cpu": "many"}}}]);
    let pod = view(json!({"spec": {"containers": container}}));
    assert!(matches!(pod.plan.unwrap().spreads, Err(Unsupported::Request(_))));
}
