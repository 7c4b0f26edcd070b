//! The API server of local mode, driven through the kube client that production uses: pods, which are bound and end.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod apiserver_support;

use api::NAMESPACE;
use k8s_openapi::api::{
    authorization::v1::SelfSubjectAccessReview,
    batch::v1::Job,
    core::v1::{PersistentVolumeClaim, Pod},
};
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    core::Status,
    runtime::wait::await_condition,
};
use serde_json::{Value, json};
use tokio::time::timeout;

use apiserver_support::*;

async fn make(server: &Server, name: &str, spec: Value) -> Pod {
    let mut pod = json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c"}]}});
    pod["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    server.api::<Pod>().create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
}

async fn post(server: &Server, pod: &str, subresource: &str, body: Value) -> Result<Value, Status> {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}/{subresource}");
    server.raw("POST", &path, &[("content-type", "application/json")], body).await
}

async fn bind(server: &Server, pod: &str, metadata: Value, node: &str) -> Result<Value, Status> {
    post(server, pod, "binding", json!({"metadata": metadata, "target": {"kind": "Node", "name": node}})).await
}

fn condition(pod: &Pod, type_: &str) -> Option<(String, Option<String>)> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|condition| condition.type_ == type_)?;
    Some((found.status.clone(), found.message.clone()))
}

#[tokio::test]
async fn a_new_pod_is_pending_and_gets_the_defaults_that_schedulers_rely_on() {
    let server = start().await;
    let pod = make(&server, "a", json!({"restartPolicy": "Never"})).await;
    assert!(pod.metadata.uid.is_some() && pod.metadata.creation_timestamp.is_some());
    assert_eq!(pod.status.unwrap().phase.as_deref(), Some("Pending"));
    let spec = pod.spec.unwrap();
    assert_eq!(spec.scheduler_name.as_deref(), Some("default-scheduler"));
    assert_eq!((spec.restart_policy.as_deref(), spec.termination_grace_period_seconds), (Some("Never"), Some(30)));
    let other = make(&server, "b", json!({"schedulerName": "flux"})).await;
    assert_eq!(other.spec.unwrap().scheduler_name.as_deref(), Some("flux"));
}

#[tokio::test]
async fn a_binding_sets_node_annotations_and_condition_in_one_change() {
    let server = start().await;
    let pods: Api<Pod> = server.api();
    let pod = make(&server, "a", json!({})).await;
    let waits =
        json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False", "message": "2 of 3 exist"}]}});
    pods.patch_status("a", &PatchParams::default(), &Patch::Strategic(waits)).await.unwrap();
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let waiting = pods.patch_status("a", &PatchParams::default(), &Patch::Strategic(ready)).await.unwrap();
    assert_eq!(condition(&waiting, "PodScheduled"), Some(("False".into(), Some("2 of 3 exist".into()))));

    let is_bound = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.spec.as_ref().unwrap().node_name.is_some());
    let seen = await_condition(pods.clone(), "a", is_bound);
    let metadata = json!({"name": "a", "uid": pod.metadata.uid, "annotations": {"job": "f1"}});
    let (seen, answer) = tokio::join!(timeout(LONG, seen), bind(&server, "a", metadata, "node1"));
    assert_eq!(answer.unwrap()["status"], "Success");
    let seen = seen.unwrap().unwrap().unwrap();
    assert_eq!(seen.spec.as_ref().unwrap().node_name.as_deref(), Some("node1"));
    assert_eq!(seen.metadata.annotations.as_ref().unwrap()["job"], "f1");
    assert_eq!(condition(&seen, "PodScheduled"), Some(("True".into(), None)));
    assert_eq!(condition(&seen, "Ready"), Some(("False".into(), None)));
    let there = pods.list(&ListParams::default().fields("spec.nodeName=node1")).await.unwrap();
    assert_eq!(there.items.len(), 1);
}

#[tokio::test]
async fn a_binding_is_a_conflict_unless_the_pod_is_the_one_that_waits() {
    let server = start().await;
    let pod = make(&server, "a", json!({})).await;
    let refused = |answer: Result<Value, Status>| answer.map_err(|status| (status.code, status.reason)).unwrap_err();
    let conflict = (409, "Conflict".to_owned());
    assert_eq!(refused(bind(&server, "a", json!({"uid": "another"}), "node1").await), conflict);
    assert_eq!(refused(bind(&server, "a", json!({"resourceVersion": "1"}), "node1").await), conflict);
    assert_eq!(refused(bind(&server, "none", json!({}), "node1").await), (404, "NotFound".to_owned()));
    assert_eq!(refused(bind(&server, "a", json!({"name": "b"}), "node1").await).0, 400);
    assert_eq!(refused(bind(&server, "a", json!({}), "").await).0, 422);
    let version = pod.metadata.resource_version.unwrap();
    bind(&server, "a", json!({"uid": pod.metadata.uid, "resourceVersion": version}), "node1").await.unwrap();
    // Also to the same node: the first answer may have been lost.
    assert_eq!(refused(bind(&server, "a", json!({"uid": pod.metadata.uid}), "node1").await), conflict);

    make(&server, "gated", json!({"schedulingGates": [{"name": "later"}]})).await;
    assert_eq!(refused(bind(&server, "gated", json!({}), "node1").await), conflict);
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/a/binding");
    assert_eq!(server.raw("GET", &path, &[], Value::Null).await.unwrap_err().code, 405);
}

#[tokio::test]
async fn an_unbound_pod_goes_at_once_and_a_bound_one_when_its_kubelet_says_so() {
    let server = start().await;
    let pods: Api<Pod> = server.api();
    let as_it_says = DeleteParams::default();
    make(&server, "unbound", json!({})).await;
    assert!(pods.delete("unbound", &as_it_says).await.unwrap().is_right());
    make(&server, "bound", json!({"terminationGracePeriodSeconds": 7})).await;
    bind(&server, "bound", json!({}), "node1").await.unwrap();
    assert!(pods.delete("bound", &as_it_says).await.unwrap().is_left());
    let grace = async || {
        let metadata = pods.get("bound").await.unwrap().metadata;
        assert!(metadata.deletion_timestamp.is_some());
        metadata.deletion_grace_period_seconds
    };
    assert_eq!(grace().await, Some(7));
    for (asked, expected) in [(60, 7), (3, 3)] {
        pods.delete("bound", &DeleteParams::default().grace_period(asked)).await.unwrap();
        assert_eq!(grace().await, Some(expected), "{asked}");
    }
    let status = json!({"status": {"message": "it ends"}});
    pods.patch_status("bound", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    pods.delete("bound", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert_eq!(code(pods.get("bound").await), refused(404, "NotFound"));

    make(&server, "ended", json!({})).await;
    bind(&server, "ended", json!({}), "node1").await.unwrap();
    let status = json!({"status": {"phase": "Succeeded"}});
    pods.patch_status("ended", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    assert!(pods.delete("ended", &as_it_says).await.unwrap().is_right());
}

#[tokio::test]
async fn an_eviction_deletes_only_the_pod_that_it_means() {
    let server = start().await;
    let pods: Api<Pod> = server.api();
    let pod = make(&server, "a", json!({})).await;
    let with = |uid: &str| json!({"metadata": {"name": "a"}, "deleteOptions": {"preconditions": {"uid": uid}}});
    assert_eq!(post(&server, "a", "eviction", with("another")).await.unwrap_err().code, 409);
    assert!(pods.get("a").await.unwrap().metadata.deletion_timestamp.is_none());
    bind(&server, "a", json!({}), "node1").await.unwrap();
    let answer = post(&server, "a", "eviction", with(&pod.metadata.uid.unwrap())).await.unwrap();
    assert_eq!(answer["status"], "Success");
    assert!(pods.get("a").await.unwrap().metadata.deletion_timestamp.is_some());
    assert_eq!(post(&server, "none", "eviction", json!({})).await.unwrap_err().code, 404);
}

#[tokio::test]
async fn what_the_bridge_reads_beside_pods_is_served_or_does_not_exist() {
    let server = start().await;
    let jobs: Api<Job> = server.api();
    let job = json!({"metadata": {"name": "j"}, "spec": {"template": {"spec": {"containers": [{"name": "c"}]}}}});
    jobs.create(&PostParams::default(), &serde_json::from_value(job).unwrap()).await.unwrap();
    let suspend = json!({"spec": {"suspend": true}});
    jobs.patch("j", &PatchParams::default(), &Patch::Merge(suspend)).await.unwrap();
    let listed = Api::<Job>::all(server.client.clone()).list(&ListParams::default()).await.unwrap();
    assert_eq!(listed.items[0].spec.as_ref().unwrap().suspend, Some(true));
    let claims: Api<PersistentVolumeClaim> = server.api();
    assert_eq!(claims.get_opt("a").await.unwrap(), None);

    let reviews: Api<SelfSubjectAccessReview> = Api::all(server.client.clone());
    let review = reviews.create(&PostParams::default(), &SelfSubjectAccessReview::default()).await.unwrap();
    assert!(review.status.unwrap().allowed);
    assert_eq!(reviews.list(&ListParams::default()).await.unwrap().items, []);
}
