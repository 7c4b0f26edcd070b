//! Secret flux-curve: malformed, or not there yet.

use api::{FluxNode, INSTANCE, InstancePhase, NodePhase, SECRET_CURVE};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use super::{
    bundle::{packages, sha256, sleeper},
    channel::Server,
    cluster::{Case, no_nodes},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_certificate_is_reported_and_recreated_once_it_is_deleted() {
    let Some(case) = Case::on(1).await else { return };
    let malformed =
        "metadata\n    name = \"flux\"\ncurve\n    public-key = \"leaked?\"\n    secret-key = \"leaked?\"\n";
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET_CURVE}, "stringData": {"curve.cert": malformed},
        "data": {"curve.cert": k8s_openapi::ByteString(malformed.as_bytes().to_vec())},
    });
    let secret: Secret = serde_json::from_value(secret).unwrap();
    case.api::<Secret>().create(&PostParams::default(), &secret).await.unwrap();
    let served = tempfile::tempdir().unwrap();
    let server = Server::start(served.path()).await;
    let bytes = sleeper("/opt/flux-of-a-test");
    std::fs::write(served.path().join("a.tar.gz"), &bytes).unwrap();
    case.create(packages(&server, "a.tar.gz", &sha256(&bytes))).await;
    let instance = case.instance_says("Secret flux-curve: curve.cert is malformed").await;
    let status = instance.status.unwrap();
    assert_eq!(status.phase, InstancePhase::Failed);
    assert!(status.message.as_deref().unwrap().contains("delete it, and the planner makes a new one"));
    case.warned("FluxInstance/flux", "Secret flux-curve: curve.cert is malformed").await;
    assert!(!format!("{status:?} {:?}", case.notes().await).contains("leaked"));
    assert!(!case.is_ready("node1"));
    case.nothing_half_made_is_live("node1");

    case.api::<Secret>().delete(SECRET_CURVE, &DeleteParams::default()).await.unwrap();
    case.is("node1", NodePhase::Starting).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_administrators_own_certificate_is_not_deleted_with_the_instance() {
    let Some(case) = Case::on(1).await else { return };
    let own: Secret = serde_json::from_value(json!({"metadata": {"name": SECRET_CURVE}})).unwrap();
    case.api::<Secret>().create(&PostParams::default(), &own).await.unwrap();
    case.create(no_nodes()).await;
    case.until(INSTANCE, "looked at", |flux: &api::FluxInstance| flux.status.is_some()).await;
    case.until("node1", "there", |_: &FluxNode| true).await;
    case.delete_instance().await;
    // The planner has forgotten the instance when it has taken the next one up.
    case.create(no_nodes()).await;
    case.until(INSTANCE, "looked at", |flux: &api::FluxInstance| flux.status.is_some()).await;
    assert!(case.api::<Secret>().get_opt(SECRET_CURVE).await.unwrap().is_some());
}
