//! The API server of local mode, driven through the kube client that production uses: what differs between kinds.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod apiserver_support;

use api::{FluxInstance, FluxInstanceSpec, FluxNode, FluxNodeSpec, INSTANCE, NAMESPACE};
use k8s_openapi::{
    api::core::v1::{ConfigMap, Namespace},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
    runtime::wait::{await_condition, conditions},
};
use serde_json::{Value, json};
use tokio::time::timeout;

use apiserver_support::*;

#[tokio::test]
async fn spec_and_status_are_separate_and_only_the_spec_raises_the_generation() {
    let server = start().await;
    let instances: Api<FluxInstance> = server.api();
    let mut wanted = FluxInstance::new(INSTANCE, FluxInstanceSpec { max_size: Some(8), ..FluxInstanceSpec::default() });
    wanted.status = Some(api::FluxInstanceStatus { online: 7, ..Default::default() });
    let made = instances.create(&PostParams::default(), &wanted).await.unwrap();
    assert_eq!((made.metadata.generation, made.status), (Some(1), None));

    let status = Patch::Merge(json!({ "spec": { "maxSize": 9 }, "status": { "online": 3 } }));
    let told = instances.patch_status(INSTANCE, &PatchParams::default(), &status).await.unwrap();
    assert_eq!((told.metadata.generation, told.spec.max_size), (Some(1), Some(8)));
    assert_eq!(told.status.as_ref().map(|status| status.online), Some(3));

    let changed = instances.patch(INSTANCE, &PatchParams::default(), &status).await.unwrap();
    assert_eq!((changed.metadata.generation, changed.spec.max_size), (Some(2), Some(9)));
    assert_eq!(changed.status.map(|status| status.online), Some(3));

    let label = Patch::Merge(json!({ "metadata": { "labels": { "a": "b" } } }));
    let labelled = instances.patch(INSTANCE, &PatchParams::default(), &label).await.unwrap();
    assert_eq!(labelled.metadata.generation, Some(2));
}

#[tokio::test]
async fn a_spec_that_breaks_the_schema_is_refused_with_the_field_that_does() {
    let server = start().await;
    let instances: Api<FluxInstance> = server.api();
    let path = format!("/apis/distribute.flux-framework.org/v1alpha1/namespaces/{NAMESPACE}/fluxinstances");
    let kind = json!({ "apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance" });
    for (spec, field) in [
        (json!({ "size": 0 }), "spec.size"),
        (json!({ "maxSize": 20_000 }), "spec.maxSize"),
        (json!({ "broker": { "port": "8050" } }), "spec.broker.port"),
        (json!({ "uninstall": { "runningJobs": "Kill" } }), "spec.uninstall.runningJobs"),
    ] {
        let mut object = kind.clone();
        object["metadata"] = json!({ "name": "flux" });
        object["spec"] = spec;
        let json_body = [("content-type", "application/json")];
        let status = server.raw("POST", &path, &json_body, object).await.unwrap_err();
        assert_eq!((status.code, status.reason.as_str()), (422, "Invalid"));
        assert!(status.message.contains(field), "{}", status.message);
    }
    let mut object = kind;
    object["metadata"] = json!({ "name": "flux" });
    object["spec"] = json!({ "sise": 3 });
    let strict = format!("{path}?fieldValidation=Strict");
    let json_body = [("content-type", "application/json")];
    let status = server.raw("POST", &strict, &json_body, object.clone()).await.unwrap_err();
    assert!(status.code == 400 && status.message.contains("spec.sise"), "{}", status.message);
    let pruned = server.raw("POST", &path, &json_body, object).await.unwrap();
    assert_eq!(pruned["spec"].get("sise"), None);
    assert_eq!(instances.list(&ListParams::default()).await.unwrap().items.len(), 1);
}

#[tokio::test]
async fn scale_reads_and_writes_the_size() {
    let server = start().await;
    let instances: Api<FluxInstance> = server.api();
    let instance = FluxInstance::new(INSTANCE, FluxInstanceSpec::default());
    instances.create(&PostParams::default(), &instance).await.unwrap();
    let four = Patch::Merge(json!({ "spec": { "replicas": 4 } }));
    let scale = instances.patch_scale(INSTANCE, &PatchParams::default(), &four).await.unwrap();
    assert_eq!(scale.spec.unwrap().replicas, Some(4));
    let status = Patch::Merge(json!({ "status": { "size": 3 } }));
    instances.patch_status(INSTANCE, &PatchParams::default(), &status).await.unwrap();
    let mut scale = instances.get_scale(INSTANCE).await.unwrap();
    assert_eq!(scale.status.as_ref().map(|status| status.replicas), Some(3));

    scale.spec.as_mut().unwrap().replicas = Some(5);
    instances.replace_scale(INSTANCE, &PostParams::default(), &scale).await.unwrap();
    assert_eq!(instances.get(INSTANCE).await.unwrap().spec.size, Some(5));
    assert_eq!(code(instances.replace_scale(INSTANCE, &PostParams::default(), &scale).await), refused(409, "Conflict"));
    let largest = Patch::Merge(json!({ "spec": { "maxSize": 6 } }));
    instances.patch(INSTANCE, &PatchParams::default(), &largest).await.unwrap();
    for (replicas, words) in [(0, "delete the FluxInstance"), (7, "is more than maxSize: raise maxSize too")] {
        let patch = Patch::Merge(json!({ "spec": { "replicas": replicas } }));
        match instances.patch_scale(INSTANCE, &PatchParams::default(), &patch).await {
            Err(kube::Error::Api(status)) if status.code == 422 => {
                assert!(status.message.contains(words), "{status:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(instances.get(INSTANCE).await.unwrap().spec.size, Some(5));
}

#[tokio::test]
async fn a_finalizer_keeps_an_object_until_the_finalizer_is_removed() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    let mut held = config_map("a", "1");
    held.metadata.finalizers = Some(vec!["example.org/hold".into()]);
    let made = maps.create(&PostParams::default(), &held).await.unwrap();
    assert!(maps.delete("a", &DeleteParams::default()).await.unwrap().is_left());
    assert!(maps.get("a").await.unwrap().metadata.deletion_timestamp.is_some());
    let uid = made.metadata.uid.unwrap();
    let gone = await_condition(maps.clone(), "a", conditions::is_deleted(&uid));
    let release = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    let release = async { maps.patch("a", &PatchParams::default(), &release).await.unwrap() };
    let (gone, _) = tokio::join!(timeout(LONG, gone), release);
    gone.unwrap().unwrap();
    assert_eq!(code(maps.get("a").await), refused(404, "NotFound"));
}

#[tokio::test]
async fn a_namespace_is_terminating_until_its_content_is_gone() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    let namespaces: Api<Namespace> = Api::all(server.client.clone());
    let mut held = config_map("held", "1");
    held.metadata.finalizers = Some(vec!["example.org/hold".into()]);
    for map in [config_map("free", "1"), held] {
        maps.create(&PostParams::default(), &map).await.unwrap();
    }
    let before = server.store.snapshot().unwrap();
    let before = serde_json::from_slice::<Value>(&before).unwrap()["revision"].as_u64().unwrap();
    namespaces.delete(NAMESPACE, &DeleteParams::default()).await.unwrap();

    let namespace = namespaces.get(NAMESPACE).await.unwrap();
    assert_eq!(namespace.status.and_then(|status| status.phase).as_deref(), Some("Terminating"));
    let late = maps.create(&PostParams::default(), &config_map("late", "1")).await;
    assert_eq!(code(late), refused(403, "Forbidden"));
    let release = Patch::Merge(json!({ "metadata": { "finalizers": [] } }));
    maps.patch("held", &PatchParams::default(), &release).await.unwrap();
    assert_eq!(code(namespaces.get(NAMESPACE).await), refused(404, "NotFound"));

    let history: Vec<String> = server
        .store
        .events_after(before, 100)
        .unwrap()
        .iter()
        .map(|event| format!("{:?} {}", event.change, event.object["metadata"]["name"].as_str().unwrap()))
        .collect();
    let ns = NAMESPACE;
    let want = [
        format!("Modified {ns}"),
        "Deleted free".into(),
        "Modified held".into(),
        "Deleted held".into(),
        format!("Deleted {ns}"),
    ];
    assert_eq!(history, want);
}

#[tokio::test]
async fn a_namespace_keeps_its_content_while_a_finalizer_simulates_its_pods() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    maps.create(&PostParams::default(), &config_map("a", "1")).await.unwrap();
    let path = format!("/api/v1/namespaces/{NAMESPACE}");
    let json_body = [("content-type", "application/json")];
    let mut namespace = server.raw("GET", &path, &[], Value::Null).await.unwrap();
    namespace["spec"]["finalizers"] = json!(["kubernetes", "example.org/pods"]);
    server.raw("PUT", &format!("{path}/finalize"), &json_body, namespace).await.unwrap();
    let mut namespace = server.raw("DELETE", &path, &[], Value::Null).await.unwrap();
    assert!(maps.get("a").await.is_ok());
    namespace["spec"]["finalizers"] = json!(["kubernetes"]);
    server.raw("PUT", &format!("{path}/finalize"), &json_body, namespace).await.unwrap();
    assert_eq!(server.raw("GET", &path, &[], Value::Null).await.unwrap_err().code, 404);
}

#[tokio::test]
async fn our_objects_are_deleted_and_served_again_with_their_crd() {
    let server = start().await;
    let nodes: Api<FluxNode> = server.api();
    let definitions: Api<CustomResourceDefinition> = Api::all(server.client.clone());
    let spec = FluxNodeSpec { node_name: "n1".into(), ..FluxNodeSpec::default() };
    let another = nodes.create(&PostParams::default(), &FluxNode::new("n2", spec.clone())).await;
    assert!(another.unwrap_err().to_string().contains("spec.nodeName: is not the name of this FluxNode"));
    nodes.create(&PostParams::default(), &FluxNode::new("n1", spec)).await.unwrap();
    let name = "fluxnodes.distribute.flux-framework.org";
    let mut definition = definitions.get(name).await.unwrap();
    definitions.delete(name, &DeleteParams::default()).await.unwrap();
    // Without a Status: an unknown path is no evidence about any object.
    let Err(kube::Error::Api(status)) = nodes.get("n1").await else { panic!("the kind is still served") };
    assert_eq!((status.code, status.reason.as_str() == "NotFound"), (404, false));

    definition.metadata = ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() };
    definitions.create(&PostParams::default(), &definition).await.unwrap();
    timeout(LONG, await_condition(definitions, name, conditions::is_crd_established())).await.unwrap().unwrap();
    assert_eq!(nodes.list(&ListParams::default()).await.unwrap().items.len(), 0);
}

#[tokio::test]
async fn both_event_apis_serve_the_same_events() {
    let server = start().await;
    let json_body = [("content-type", "application/json")];
    let path = |group: &str| format!("/{group}/namespaces/{NAMESPACE}/events");
    let event = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": { "generateName": "flux." },
        "eventTime": "2026-01-01T00:00:00.000000Z", "note": "rank 3 has joined", "reason": "Joined", "action": "Join",
        "type": "Normal", "reportingController": "planner", "reportingInstance": "n1",
        "regarding": { "kind": "FluxInstance", "name": "flux", "namespace": NAMESPACE },
    });
    let made = server.raw("POST", &path("apis/events.k8s.io/v1"), &json_body, event).await.unwrap();
    assert_eq!(made["note"], "rank 3 has joined");
    let query = "?fieldSelector=involvedObject.name%3Dflux";
    let list = server.raw("GET", &(path("api/v1") + query), &[], Value::Null).await.unwrap();
    assert_eq!(list["items"][0]["message"], "rank 3 has joined");
    assert_eq!(list["items"][0]["apiVersion"], "v1");
}
