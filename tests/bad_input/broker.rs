//! A broker that does not live, or that the lead does not take.

use api::{FluxNode, NodePhase, SECRET_CURVE};
use k8s_openapi::api::core::v1::Secret;
use kube::api::DeleteParams;
use packages::CreateBundle;
use serde_json::json;

use super::{
    bundle::{bundle, packages, sha256, sleeper},
    channel::Server,
    cluster::Case,
    needs::{Need, flux_prefix, skips_without},
};

/// A server with the real Flux as `flux.tar.gz`, and its sha256. None if the test can't run.
async fn real(directory: &std::path::Path) -> Option<(Server, String)> {
    if skips_without([Need::Flux]) {
        return None;
    }
    let out = directory.join("flux.tar.gz");
    let create = CreateBundle { from_prefix: Some(flux_prefix()), out: out.clone(), ..CreateBundle::default() };
    create.run().unwrap();
    let digest = sha256(&std::fs::read(out).unwrap());
    Some((Server::start(directory).await, digest))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_message_about_a_broker_that_exits_at_once_quotes_its_log_and_is_stable() {
    let Some(case) = Case::on(1).await else { return };
    let served = tempfile::tempdir().unwrap();
    let server = Server::start(served.path()).await;
    let words = "broker.err[0]: the moon is in the wrong place";
    let dying = bundle(&format!("#!/bin/sh\necho '{words}' >&2\nexit 1\n"), "/opt/flux-of-a-test");
    let living = sleeper("/opt/flux-of-a-test");
    std::fs::write(served.path().join("dying.tar.gz"), &dying).unwrap();
    std::fs::write(served.path().join("living.tar.gz"), &living).unwrap();
    case.create(packages(&server, "dying.tar.gz", &sha256(&dying))).await;
    case.node_says("node1", NodePhase::Failed, words).await;
    case.warned("FluxNode/node1", words).await;
    case.instance_says(words).await;
    assert!(!case.is_ready("node1"));
    // Through the next starts: the message stands.
    let flapped = case.changes_of("node1", std::time::Duration::from_secs(6), |node: &FluxNode| {
        !super::cluster::says(node, &NodePhase::Failed, words)
    });
    assert_eq!(flapped.await, 0);

    case.patch(packages(&server, "living.tar.gz", &sha256(&living))).await;
    case.has("node1", &sha256(&living)).await;
    case.is("node1", NodePhase::Starting).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_config_tables_are_reported_in_flux_words_and_corrected_ones_are_used() {
    let served = tempfile::tempdir().unwrap();
    let (Some((server, digest)), Some(case)) = (real(served.path()).await, Case::on(1).await) else { return };
    let mut spec = packages(&server, "flux.tar.gz", &digest);
    spec["broker"] = json!({"config": "[job-manager]\ninactive-num-limit = \"x\"\n"});
    case.create(spec).await;
    let message = case.node_says("node1", NodePhase::Failed, "inactive").await;
    assert!(message.starts_with("the broker has ended; its log says: "), "{message}");
    case.warned("FluxNode/node1", "inactive").await;
    case.instance_says("inactive").await;
    assert!(!case.is_ready("node1"));

    case.patch(json!({"broker": {"config": "[job-manager]\ninactive-num-limit = 1000\n"}})).await;
    case.is("node1", NodePhase::Online).await;
    assert!(case.is_ready("node1"));
}

/// The real Flux in `out`, but that its bin/flux needs a library which is nowhere.
fn without_a_library(out: &std::path::Path) -> Option<String> {
    if skips_without([Need::Flux]) {
        return None;
    }
    let (prefix, directory) = (flux_prefix(), tempfile::tempdir().unwrap());
    let tree = directory.path().join("tree");
    let copied = std::process::Command::new("cp").arg("-a").args([&prefix, &tree]).status().unwrap();
    assert!(copied.success(), "{copied}");
    let flux = tree.join("bin/flux");
    let mut program = std::fs::read(&flux).unwrap();
    let places: Vec<_> =
        (0..program.len() - NEEDED.len()).filter(|at| program[*at..].starts_with(NEEDED.as_bytes())).collect();
    assert!(!places.is_empty(), "{} does not need {NEEDED}", flux.display());
    for at in places {
        program[at..at + LACKING.len()].copy_from_slice(LACKING.as_bytes());
    }
    std::fs::write(&flux, program).unwrap();
    let create = CreateBundle {
        from_prefix: Some(tree),
        out: out.to_owned(),
        compiled_prefix: Some(prefix),
        ..CreateBundle::default()
    };
    create.run().unwrap();
    Some(sha256(&std::fs::read(out).unwrap()))
}

/// A library that bin/flux needs, and one whose name is as long.
const NEEDED: &str = "libuuid.so.1";
const LACKING: &str = "libnone.so.1";

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_library_is_named_before_any_broker_starts_and_a_fixed_bundle_is_used() {
    let served = tempfile::tempdir().unwrap();
    let (Some((server, digest)), Some(case)) = (real(served.path()).await, Case::on(2).await) else { return };
    let Some(lacking) = without_a_library(&served.path().join("lacking.tar.gz")) else { return };
    case.create(packages(&server, "lacking.tar.gz", &lacking)).await;
    for node in ["node1", "node2"] {
        let message = case.node_says(node, NodePhase::Failed, LACKING).await;
        assert!(message.contains("install what is missing on the hosts, or use a bundle"), "{message}");
        let log = case.on_node(node, "/opt/flux-distribute/log/broker.log");
        assert!(!log.exists(), "a broker was started");
    }
    case.instance_says(LACKING).await;
    assert!(!case.is_ready("node1"));

    case.patch(packages(&server, "flux.tar.gz", &digest)).await;
    case.is("node1", NodePhase::Online).await;
    case.is("node2", NodePhase::Online).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_of_a_refused_follower_shows_the_leads_reason() {
    let served = tempfile::tempdir().unwrap();
    let (Some((server, digest)), Some(case)) = (real(served.path()).await, Case::on(2).await) else { return };
    case.create(packages(&server, "flux.tar.gz", &digest)).await;
    for node in ["node1", "node2"] {
        case.is(node, NodePhase::Online).await;
    }
    // A table of names that is not the lead's: what an edited file or another instance's broker comes with.
    let follower = {
        let nodes = case.api::<FluxNode>().list(&Default::default()).await.unwrap();
        let follower = nodes.into_iter().find(|node| node.spec.rank == Some(1)).unwrap();
        (follower.metadata.name.unwrap(), follower.status.unwrap().adopted.unwrap())
    };
    let (node, adopted) = follower;
    let flux = format!("/opt/flux-distribute/envs/{}/bin/flux", adopted.digest);
    let script = format!(
        "mv {flux} {flux}.kept && cat >{flux} <<'END'\n#!/bin/sh\nif [ \"$1\" = broker ]; then sed -i \
         's/\"node\\[1-2\\],/\"node[1,3-4,2],/' /opt/flux-distribute/etc/broker.toml; fi\nexec {flux}.kept \"$@\"\nEND\nchmod \
         755 {flux}; kill -9 {}",
        adopted.pid
    );
    case.exec(&node, &["sh", "-c", &script]);
    let message = case.node_says(&node, NodePhase::Failed, "the lead refuses this broker: ").await;
    case.warned(&format!("FluxNode/{node}"), "the lead refuses this broker: ").await;
    assert!(message.contains("mismatched config"), "{message}");
    case.instance_says("the lead refuses this broker: ").await;
    assert!(!case.is_ready(&node));

    // The file is made anew at each start.
    case.exec(&node, &["mv", &format!("{flux}.kept"), &flux]);
    case.is(&node, NodePhase::Online).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leads_host_restores_a_deleted_secret_even_while_its_broker_is_down() {
    let served = tempfile::tempdir().unwrap();
    let (Some((server, digest)), Some(case)) = (real(served.path()).await, Case::on(1).await) else { return };
    case.create(packages(&server, "flux.tar.gz", &digest)).await;
    case.is("node1", NodePhase::Online).await;
    let before = case.api::<Secret>().get(SECRET_CURVE).await.unwrap();
    let node = case.api::<FluxNode>().get("node1").await.unwrap();
    let pid = node.status.unwrap().adopted.unwrap().pid;
    case.api::<Secret>().delete(SECRET_CURVE, &DeleteParams::default()).await.unwrap();
    case.exec("node1", &["kill", "-9", &pid.to_string()]);
    let other = |node: &FluxNode| {
        let status = node.status.as_ref();
        let adopted = status.and_then(|status| status.adopted.as_ref());
        status.is_some_and(|status| status.phase == NodePhase::Online)
            && adopted.is_some_and(|adopted| adopted.pid != pid)
    };
    case.until("node1", "online again", other).await;
    let after = case.until(SECRET_CURVE, "back", |_: &Secret| true).await;
    assert!(before.data == after.data, "another certificate");
    let phases = case.notes().await;
    assert!(!phases.iter().any(|note| note.contains("Failed")), "waiting is no failure: {phases:?}");
}
