//! What another version has written, by a real API server: it hides nothing else, and is not written over.

use api::{CONDITION_FLUX_NODES_UNUSABLE, FluxInstance, FluxNode, INSTANCE, NAMESPACE, NodePhase, Want};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, ObjectList, Patch, PatchParams, PostParams},
    core::DeserializeGuard,
};
use serde_json::{Value, json};

use super::cluster::{Case, no_nodes, until_true};

/// As a newer build may write it.
fn of_a_newer_build(name: &str) -> Value {
    json!({
        "apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxNode", "metadata": {"name": name},
        "spec": {"nodeName": name, "want": "Hibernate", "until": {"epoch": 7}},
        "status": {"phase": "Hibernating", "message": "asleep", "temperature": 21, "facts": null},
    })
}

#[test]
fn a_newer_builds_values_and_fields_are_kept_as_they_are() {
    let mut retyped = of_a_newer_build("node3");
    retyped["status"]["offline"] = "none".into();
    let known = json!({"metadata": {"name": "node1"}, "spec": {"nodeName": "node1"}, "status": {"phase": "Online"}});
    let items = [known, of_a_newer_build("node2"), retyped];
    let list = json!({"metadata": {}, "items": items});
    let list: ObjectList<DeserializeGuard<FluxNode>> = serde_json::from_value(list).unwrap();
    let read = list.items;
    assert_eq!(read[0].0.as_ref().unwrap().status.as_ref().unwrap().phase, NodePhase::Online);
    let newer = read[1].0.as_ref().unwrap();
    let status = newer.status.as_ref().unwrap();
    assert_eq!(
        (&newer.spec.want, &status.phase),
        (&Want::Other("Hibernate".into()), &NodePhase::Other("Hibernating".into()))
    );
    assert_eq!(
        (json!(newer.spec)["want"].as_str(), json!(status)["phase"].as_str()),
        (Some("Hibernate"), Some("Hibernating"))
    );
    assert_eq!(read[2].0.as_ref().unwrap_err().metadata.name.as_deref(), Some("node3"));
}

const DEFINITION: &str = "fluxnodes.distribute.flux-framework.org";

#[tokio::test(flavor = "multi_thread")]
async fn an_older_planner_lists_all_flux_nodes_beside_one_of_a_newer_build() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    // The definitions are the newer build's, too.
    let definitions = Api::<CustomResourceDefinition>::all(case.client.clone());
    let schema = |part: &str| format!("/spec/versions/0/schema/openAPIV3Schema/properties/{part}");
    let before = json!(definitions.get(DEFINITION).await.unwrap());
    // A rule of the CRD is about nodeName.
    let properties = json!({"nodeName": {"type": "string"}});
    let open = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties": properties});
    let patch = ["spec", "status"].map(|part| json!({"op": "replace", "path": schema(part), "value": open}));
    let set = async |patch: Value| {
        let patch = Patch::Json::<()>(serde_json::from_value(patch).unwrap());
        definitions.patch(DEFINITION, &PatchParams::default(), &patch).await.unwrap();
    };
    set(json!(patch)).await;
    case.create(no_nodes()).await;
    let is_told = |node: &FluxNode| node.spec.instance_uid.is_some();
    case.until("node1", "told", is_told).await;

    let nodes =
        Api::<DynamicObject>::namespaced_with(case.client.clone(), NAMESPACE, &ApiResource::erase::<FluxNode>(&()));
    for name in ["newer", "retyped"] {
        let mut node = of_a_newer_build(name);
        if name == "retyped" {
            node["status"]["offline"] = "none".into();
        }
        nodes.create(&PostParams::default(), &serde_json::from_value(node.clone()).unwrap()).await.unwrap();
        let status = Patch::Merge(json!({"status": node["status"]}));
        until_true("the changed definition to hold", async || {
            let patched = nodes.patch_status(name, &PatchParams::default(), &status).await.unwrap();
            patched.data["status"]["temperature"] == 21
        })
        .await;
    }
    // A planner that begins has to list them all. It sees what happens to all others: it writes the spec of a FluxNode that is new.
    case.restart_agent("node1").await;
    let old = case.api::<FluxNode>().get("node1").await.unwrap().uid();
    case.api::<FluxNode>().delete("node1", &DeleteParams::default()).await.unwrap();
    case.until("node1", "told again", |node: &FluxNode| node.uid() != old && is_told(node)).await;
    case.until(INSTANCE, "a condition for the FluxNode that it can't read", |flux: &FluxInstance| {
        let unusable = flux.status.as_ref().and_then(|status| status.holding(CONDITION_FLUX_NODES_UNUSABLE));
        unusable.is_some_and(|found| {
            found.reason == "FluxNodeNotRead" && found.message.contains("can't read FluxNode retyped, ")
        })
    })
    .await;
    for name in ["newer", "retyped"] {
        let kept = nodes.get(name).await.unwrap().data;
        assert_eq!((&kept["status"]["phase"], &kept["status"]["temperature"]), (&json!("Hibernating"), &json!(21)));
        nodes.delete(name, &DeleteParams::default()).await.unwrap();
    }
    case.delete_instance().await;
    let before = &before["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    set(json!(["spec", "status"].map(|part| json!({"op": "replace", "path": schema(part), "value": before[part]}))))
        .await;
}
