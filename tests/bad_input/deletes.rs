//! What is deleted is what was read, by a real API server that refuses every delete without a uid and a resourceVersion.

use api::{CONFIGMAP_BROKER, FluxNode, FluxNodeSpec, GROUP, SECRET_CURVE};
use k8s_openapi::api::{
    admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
    core::v1::{ConfigMap, Secret},
};
use kube::{
    Api,
    api::{DeleteParams, ObjectMeta, PostParams},
};
use serde_json::json;

use super::cluster::{Case, no_nodes, until_true};

const POLICY: &str = "as-it-was-read";

#[tokio::test(flavor = "multi_thread")]
async fn agents_and_planner_delete_only_what_they_have_read() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let names = |field: &str| format!("has(request.options.preconditions.{field})");
    let rule = json!({
        "apiGroups": ["", GROUP], "apiVersions": ["*"], "operations": ["DELETE"],
        "resources": ["configmaps", "secrets", "fluxnodes"],
    });
    let expression = format!("has(request.options.preconditions) && {} && {}", names("uid"), names("resourceVersion"));
    let policy = json!({
        "metadata": {"name": POLICY},
        "spec": {"matchConstraints": {"resourceRules": [rule]}, "validations": [{"expression": expression}]},
    });
    let binding = json!({
        "metadata": {"name": POLICY}, "spec": {"policyName": POLICY, "validationActions": ["Deny"]},
    });
    let policies = Api::<ValidatingAdmissionPolicy>::all(case.client.clone());
    let bindings = Api::<ValidatingAdmissionPolicyBinding>::all(case.client.clone());
    policies.create(&PostParams::default(), &serde_json::from_value(policy).unwrap()).await.unwrap();
    bindings.create(&PostParams::default(), &serde_json::from_value(binding).unwrap()).await.unwrap();
    let maps = case.api::<ConfigMap>();
    let named = |name: &str| ConfigMap {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        ..ConfigMap::default()
    };
    until_true("the policy to hold", async || {
        let _ = maps.create(&PostParams::default(), &named("probe")).await;
        maps.delete("probe", &DeleteParams::default()).await.is_err()
    })
    .await;

    // A FluxNode whose Node is gone is deleted by the planner.
    let mut spec = no_nodes();
    spec["ranks"] = json!({"retain": "1s"});
    let gone = FluxNode::new("gone", FluxNodeSpec { node_name: "gone".to_owned(), ..FluxNodeSpec::default() });
    case.api::<FluxNode>().create(&PostParams::default(), &gone).await.unwrap();
    case.create(spec).await;
    case.goes::<FluxNode>("gone").await;
    // One whose host is clean by its agent; and then the planner takes off what it has made.
    case.until(SECRET_CURVE, "made", |_: &Secret| true).await;
    maps.create(&PostParams::default(), &named(CONFIGMAP_BROKER)).await.unwrap();
    case.delete_instance().await;
    case.goes::<ConfigMap>(CONFIGMAP_BROKER).await;
    case.goes::<Secret>(SECRET_CURVE).await;
    bindings.delete(POLICY, &DeleteParams::default()).await.unwrap();
    policies.delete(POLICY, &DeleteParams::default()).await.unwrap();
    until_true("the policy to hold no longer", async || maps.delete("probe", &DeleteParams::default()).await.is_ok())
        .await;
}
