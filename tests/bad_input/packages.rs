//! Channels and locks: unreachable, without an answer, wrong; and a disk that is too small for the answer.

use api::{FluxInstance, INSTANCE, InstancePhase, NodePhase, PackageSet, Packages};
use packages::{HttpClient, resolve};
use serde_json::{Value, json};

use super::{
    channel::{Channel, Content, Server},
    cluster::Case,
};

/// Waits until some package set is installed.
async fn installed(case: &Case) {
    let has = |node: &api::FluxNode| {
        node.status.as_ref().is_some_and(|status| status.digest.is_some() && status.phase != NodePhase::Failed)
    };
    case.until("node1", "installed", has).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_channel_is_queried_again_until_it_answers() {
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
async fn unsatisfiable_specs_are_named_with_their_channel_and_changed_ones_solved_at_once() {
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

    // The last solution stays in force while a new question has none, and the status says so.
    let before = case.api::<FluxInstance>().get(INSTANCE).await.unwrap().status.unwrap().digest;
    case.patch(packages("no-such-thing")).await;
    let instance = case.instance_says("no-such-thing").await;
    assert_eq!(instance.status.unwrap().digest, before);
    case.warned("FluxInstance/flux", "no-such-thing").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_and_instance_report_an_unreachable_source_and_the_next_attempt() {
    let Some(case) = Case::on(1).await else { return };
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}/flux.tar.gz");
    case.create(json!({"packages": {"bundle": {"url": url, "sha256": "1".repeat(64)}}})).await;
    // Already in the first round of tries, which takes half a minute.
    let message = case.node_says("node1", NodePhase::Installing, &url).await;
    // The proxy between the nodes and this machine answers 502 for a port at which nothing listens.
    for words in ["502", "trying again in "] {
        assert!(message.contains(words), "{message}");
    }
    let instance = case.instance_says(&url).await;
    assert!(instance.status.unwrap().message.unwrap().contains("trying again in "));
}

/// What `flux-distribute lock` would write.
async fn lock_of(channel: &str) -> String {
    let packages =
        Packages { channels: vec![channel.to_owned()], specs: vec!["flux-core".to_owned()], ..Packages::default() };
    let http = HttpClient::new().unwrap();
    let set = resolve(&packages, &["linux-64".to_owned()], &http, None, |path| std::fs::File::open(path), |_| ()).await;
    let PackageSet::Lock { lock, .. } = set.unwrap() else { panic!("not a lock") };
    lock
}

fn with_lock(lock: &str) -> Value {
    json!({"packages": {"lock": lock}})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_can_not_be_installed_is_refused_before_any_request() {
    let Some(case) = Case::on(1).await else { return };
    let channel = Channel::with_flux();
    let lock = lock_of(&channel.file_url()).await;
    let digest = lock.split("sha256: ").nth(1).unwrap().split_whitespace().next().unwrap();
    let list = "@EXPLICIT\nhttps://channel/linux-64/flux-core-0.88.0-h_0.conda";
    for (lock, words) in [
        (lock.replace(digest, &digest[1..]), "the lock's package flux-core has the sha256"),
        (lock[..lock.rfind("  sha256").unwrap()].to_owned(), "the lock's package libflux has no sha256"),
        (lock.replace("linux-64", "linux-65"), "linux-65"),
        (list.to_owned(), "conda list --explicit --sha256"),
        ("flux-core".to_owned(), "the lock can't be read"),
    ] {
        let refused = case.try_create(with_lock(&lock)).await;
        let Err(kube::Error::Api(status)) = refused else { panic!("not refused: {words}") };
        assert!(
            status.message.contains("spec.packages.lock: ") && status.message.contains(words),
            "{}",
            status.message
        );
        super::cluster::assert_sentence(&status.message);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_with_a_wrong_sha256_is_reported_by_package_until_it_is_corrected() {
    let Some(case) = Case::on(1).await else { return };
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let lock = lock_of(server.url()).await;
    let digest = lock.split("sha256: ").nth(1).unwrap().split_whitespace().next().unwrap();
    case.create(with_lock(&lock.replace(digest, &"0".repeat(64)))).await;
    let message = case.node_says("node1", NodePhase::Failed, "flux-core-1.0-0.conda").await;
    assert!(message.contains("sha256") && message.contains(digest), "{message}");
    assert!(!case.is_ready("node1"));
    case.nothing_half_made_is_live("node1");

    case.patch(with_lock(&lock)).await;
    installed(&case).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_build_is_installed_on_request_and_not_because_an_agent_restarts() {
    let Some(case) = Case::on(1).await else { return };
    let mut channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    case.create(json!({"packages": {"channels": [server.url()], "specs": ["flux-core"]}})).await;
    installed(&case).await;
    let digest = async || case.api::<FluxInstance>().get(INSTANCE).await.unwrap().status.unwrap().digest;
    let has_digest = |instance: &FluxInstance| instance.status.as_ref().is_some_and(|status| status.digest.is_some());
    case.until(INSTANCE, "with a digest", has_digest).await;
    let before = digest().await;

    channel.add_release(("flux-core", "1.0", 1), ".conda", &["libflux"], &[Content::plain("share/flux", b"newer")]);
    case.cluster.must(&["agent", "node1", "restart"]);
    installed(&case).await;
    case.patch(json!({"packages": {"keep": 3, "mirror": null}})).await;
    // Something that the planner answers after the patch.
    case.patch(json!({"packages": {"specs": ["no-such-thing"]}})).await;
    case.instance_says("no-such-thing").await;
    assert_eq!(digest().await, before);
    case.patch(json!({"packages": {"specs": ["flux-core"]}})).await;
    let content = |instance: &FluxInstance| {
        let message = instance.status.as_ref().and_then(|status| status.message.clone());
        !message.unwrap_or_default().contains("no-such-thing")
    };
    case.until(INSTANCE, "content again", content).await;
    assert_eq!(digest().await, before);

    case.patch(json!({"packages": {"refresh": "today"}})).await;
    let changed = |instance: &FluxInstance| {
        instance.status.as_ref().is_some_and(|status| status.digest.is_some() && status.digest != before)
    };
    case.until(INSTANCE, "with the newer build", changed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_too_small_for_the_packages_is_reported_before_anything_is_written() {
    let Some(case) = Case::on(1).await else { return };
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    case.exec("node1", &["mkdir", "-p", "/srv/small"]);
    case.exec("node1", &["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "small", "/srv/small"]);
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
