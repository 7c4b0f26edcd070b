//! The API server of local mode, driven through the kube client that production uses: objects.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod apiserver_support;

use std::{collections::BTreeMap, time::Duration};

use api::NAMESPACE;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Node},
};
use kube::{
    Api,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use apiserver_support::*;

#[tokio::test]
async fn an_object_can_be_created_read_listed_replaced_and_deleted() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    let made = maps.create(&PostParams::default(), &config_map("a", "1")).await.unwrap();
    assert!(made.metadata.uid.is_some() && made.metadata.creation_timestamp.is_some());
    assert_eq!(code(maps.create(&PostParams::default(), &made).await), refused(400, "BadRequest"));
    assert_eq!(code(maps.create(&PostParams::default(), &config_map("a", "1")).await), refused(409, "AlreadyExists"));

    let mut wanted = maps.get("a").await.unwrap();
    wanted.data = Some(BTreeMap::from([("text".into(), "2".into())]));
    let replaced = maps.replace("a", &PostParams::default(), &wanted).await.unwrap();
    assert_eq!(replaced.metadata.uid, made.metadata.uid);
    assert_ne!(replaced.metadata.resource_version, made.metadata.resource_version);
    assert_eq!(maps.list(&ListParams::default()).await.unwrap().items.len(), 1);

    assert!(maps.delete("a", &DeleteParams::default()).await.unwrap().is_right());
    assert_eq!(code(maps.get("a").await), refused(404, "NotFound"));
    assert_eq!(code(maps.delete("a", &DeleteParams::default()).await), refused(404, "NotFound"));
}

#[tokio::test]
async fn a_replace_with_a_stale_version_is_a_conflict() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    let mut stale = maps.create(&PostParams::default(), &config_map("a", "1")).await.unwrap();
    let patch = Patch::Merge(json!({ "data": { "text": "2" } }));
    maps.patch("a", &PatchParams::default(), &patch).await.unwrap();
    stale.data = None;
    assert_eq!(code(maps.replace("a", &PostParams::default(), &stale).await), refused(409, "Conflict"));
    assert_eq!(maps.get("a").await.unwrap().data.unwrap()["text"], "2");

    let version = stale.metadata.resource_version.clone().unwrap();
    let patch = Patch::Merge(json!({ "metadata": { "resourceVersion": version } }));
    assert_eq!(code(maps.patch("a", &PatchParams::default(), &patch).await), refused(409, "Conflict"));
    for only_if in [
        Preconditions { uid: Some("another".into()), resource_version: None },
        Preconditions { uid: stale.metadata.uid.clone(), resource_version: stale.metadata.resource_version.clone() },
    ] {
        let params = DeleteParams::default().preconditions(only_if);
        assert_eq!(code(maps.delete("a", &params).await), refused(409, "Conflict"));
    }
    let there = maps.get("a").await.unwrap().metadata;
    let as_read = Preconditions { uid: there.uid, resource_version: there.resource_version };
    maps.delete("a", &DeleteParams::default().preconditions(as_read)).await.unwrap();

    let leases: Api<Lease> = server.api();
    let metadata = ObjectMeta { name: Some("l".into()), ..ObjectMeta::default() };
    let mut lease = leases.create(&PostParams::default(), &Lease { metadata, spec: None }).await.unwrap();
    lease.metadata.resource_version = None;
    assert_eq!(code(leases.replace("l", &PostParams::default(), &lease).await), refused(422, "Invalid"));
}

#[tokio::test]
async fn one_of_many_writers_with_the_same_version_wins() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    let made = maps.create(&PostParams::default(), &config_map("a", "0")).await.unwrap();
    let writers = (0..16).map(|writer| {
        let (maps, mut wanted) = (maps.clone(), made.clone());
        wanted.data = Some(BTreeMap::from([("text".into(), format!("writer {writer}"))]));
        async move { maps.replace("a", &PostParams::default(), &wanted).await.is_ok() }
    });
    let won = futures::future::join_all(writers).await;
    assert_eq!(won.into_iter().filter(|won| *won).count(), 1);
}

#[tokio::test]
async fn patches_change_what_they_name_and_a_null_deletes() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    maps.create(&PostParams::default(), &config_map("a", "1")).await.unwrap();
    let patch = Patch::Merge(json!({ "data": { "text": null, "more": "2" } }));
    let patched = maps.patch("a", &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(patched.data, Some(BTreeMap::from([("more".into(), "2".into())])));

    let path = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/a");
    let json_patch = [("content-type", "application/json-patch+json")];
    let test = |uid: &str| json!([{"op": "test", "path": "/metadata/uid", "value": uid}, {"op": "add", "path": "/data/x", "value": "y"}]);
    let patched = server.raw("PATCH", &path, &json_patch, test(&patched.metadata.uid.unwrap())).await.unwrap();
    assert_eq!(patched["data"], json!({ "more": "2", "x": "y" }));
    assert_eq!(server.raw("PATCH", &path, &json_patch, test("another")).await.unwrap_err().code, 422);

    let unchanged =
        maps.patch("a", &PatchParams::default(), &Patch::Merge(json!({ "data": { "x": "y" } }))).await.unwrap();
    assert_eq!(patched["metadata"]["resourceVersion"], unchanged.metadata.resource_version.unwrap());

    let apply = Patch::Apply(json!({ "apiVersion": "v1", "kind": "ConfigMap" }));
    assert_eq!(code(maps.patch("a", &PatchParams::apply("me"), &apply).await), refused(415, "UnsupportedMediaType"));
}

#[tokio::test]
async fn a_dry_run_changes_nothing() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    assert_eq!(maps.create(&dry, &config_map("a", "1")).await.unwrap().data, config_map("a", "1").data);
    assert_eq!(code(maps.get("a").await), refused(404, "NotFound"));
    let made = maps.create(&PostParams::default(), &config_map("a", "1")).await.unwrap();
    let params = PatchParams { dry_run: true, ..PatchParams::default() };
    let patched = maps.patch("a", &params, &Patch::Merge(json!({ "data": { "text": "2" } }))).await.unwrap();
    assert_eq!(patched.data.unwrap()["text"], "2");
    maps.delete("a", &DeleteParams { dry_run: true, ..DeleteParams::default() }).await.unwrap();
    assert_eq!(maps.get("a").await.unwrap().metadata.resource_version, made.metadata.resource_version);
}

#[tokio::test]
async fn without_the_token_the_server_answers_only_health_requests() {
    let server = start().await;
    let stranger: Api<Node> = Api::all(client(server.address, &server.authority, "guess"));
    assert_eq!(code(stranger.list(&ListParams::default()).await), refused(401, "Unauthorized"));
    assert_eq!(stranger.into_client().apiserver_version().await.unwrap().major, "1");
}

#[tokio::test]
async fn a_client_that_begins_no_handshake_does_not_delay_others() {
    let server = start().await;
    let silent = TcpStream::connect(server.address).await.unwrap();
    let mut plain = TcpStream::connect(server.address).await.unwrap();
    plain.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    // Shorter than the server's patience with the silent one.
    let listed = timeout(Duration::from_secs(5), server.api::<ConfigMap>().list(&ListParams::default())).await;
    assert!(listed.unwrap().unwrap().items.is_empty());
    let mut answer = Vec::new();
    let _ = timeout(LONG, plain.read_to_end(&mut answer)).await.unwrap();
    assert!(!answer.starts_with(b"HTTP"), "plain HTTP is answered");
    drop(silent);
}

#[tokio::test]
async fn objects_of_the_wrong_shape_are_refused_without_a_panic() {
    let server = start().await;
    let json_body = [("content-type", "application/json")];
    for (path, object) in [
        ("/api/v1/namespaces", json!({ "metadata": { "name": "a", "labels": "x" }, "spec": "y" })),
        ("/api/v1/namespaces", json!({ "metadata": "a" })),
        ("/api/v1/namespaces", json!([1])),
        ("/api/v1/namespaces", json!({ "metadata": { "name": "No Name" } })),
        ("/api/v1/namespaces", json!({ "metadata": { "name": "a" }, "kind": "Node" })),
        ("/api/v1/nodes", json!({ "metadata": { "name": "a" }, "spec": "y" })),
        ("/api/v1/namespaces/default/secrets", json!({ "metadata": { "name": "a" }, "data": { "x": 1 }})),
        (
            "/apis/distribute.flux-framework.org/v1alpha1/namespaces/default/fluxinstances",
            json!({ "metadata": { "name": "a" }, "spec": [] }),
        ),
        ("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", json!({ "metadata": { "name": "a" }, "spec": [] })),
    ] {
        let answer = server.raw("POST", path, &json_body, object.clone()).await;
        let refused = answer.as_ref().err().map(|status| status.code);
        // What a Namespace has in place of a spec is the server's, so that one is put right.
        let fine = matches!(refused, Some(400 | 422)) || (refused.is_none() && object["spec"] == "y");
        assert!(fine, "{path} {object}: {answer:?}");
    }
}
