//! Channels: unreachable, without an answer, and a disk that is too small for the answer.

use flux_distribute::api::{FluxInstance, INSTANCE, InstancePhase, NodePhase};
use serde_json::json;

use super::{
    channel::{Channel, Server},
    cluster::Case,
};

/// Waits until some package set is installed.
async fn installed(case: &Case) {
    let has = |node: &flux_distribute::api::FluxNode| {
        node.status.as_ref().is_some_and(|status| status.digest.is_some() && status.phase != NodePhase::Failed)
    };
    case.until("node1", "installed", has).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_that_can_not_be_reached_is_asked_again_until_it_answers() {
    let Some(case) = Case::on(1).await else { return };
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    case.create(json!({"packages": {"channels": [url], "specs": ["flux-core"]}})).await;
    let instance = case.instance_says(&format!("channel {url}")).await;
    assert_eq!(instance.status.unwrap().phase, InstancePhase::Failed);
    case.warned("FluxInstance/flux", &format!("channel {url}")).await;
    assert!(!case.is_ready("node1"));
    case.nothing_half_made_is_live("node1");

    let channel = Channel::with_flux();
    let _server = Server::start_at(channel.path(), port).await;
    installed(&case).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spec_without_an_answer_is_named_with_its_channel_and_a_changed_one_is_asked_at_once() {
    let Some(case) = Case::on(1).await else { return };
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let packages = |spec: &str| json!({"packages": {"channels": [server.url()], "specs": [spec]}});
    case.create(packages("flux-core >=99")).await;
    let instance = case.instance_says("flux-core >=99").await;
    let message = instance.status.unwrap().message.unwrap();
    assert!(message.contains(server.url().trim_end_matches('/')) && message.contains("linux-64"), "{message}");
    super::cluster::assert_sentence(&message);
    case.warned("FluxInstance/flux", "flux-core >=99").await;
    assert!(!case.is_ready("node1"));
    case.nothing_half_made_is_live("node1");

    case.patch(packages("flux-core")).await;
    installed(&case).await;

    // What has an answer stays in force while a new question has none, and that is told.
    let before = case.api::<FluxInstance>().get(INSTANCE).await.unwrap().status.unwrap().digest;
    case.patch(packages("no-such-thing")).await;
    let instance = case.instance_says("no-such-thing").await;
    assert_eq!(instance.status.unwrap().digest, before);
    case.warned("FluxInstance/flux", "no-such-thing").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_is_too_small_for_the_packages_is_told_before_anything_is_written() {
    let Some(case) = Case::on(1).await else { return };
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    case.exec("node1", &["mkdir", "-p", "/srv/small"]);
    case.exec("node1", &["mount", "-t", "tmpfs", "-o", "size=1m", "small", "/srv/small"]);
    let packages = json!({"channels": [server.url()], "specs": ["flux-core"]});
    case.create(json!({"prefix": "/srv/small/flux", "packages": packages})).await;
    let message = case.node_says("node1", NodePhase::Failed, "/srv/small/flux has too little room").await;
    assert!(message.contains("make room, or set spec.prefix"), "{message}");
    case.warned("FluxNode/node1", "too little room").await;
    assert!(!case.is_ready("node1"));
    case.exec("node1", &["test", "!", "-e", "/srv/small/flux/pkgs"]);

    case.exec("node1", &["mount", "-o", "remount,size=64m", "/srv/small"]);
    installed(&case).await;
    case.delete_instance().await;
    case.exec("node1", &["umount", "/srv/small"]);
    case.exec("node1", &["rmdir", "/srv/small"]);
}
