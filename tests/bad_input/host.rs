//! A host that is not as it must be.

use api::{FluxNode, NodePhase};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{
    bundle::{packages, sha256, sleeper},
    channel::Server,
    cluster::Case,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_port_is_reported_with_its_process_until_it_is_free() {
    let Some(case) = Case::on(1).await else { return };
    let served = tempfile::tempdir().unwrap();
    let server = Server::start(served.path()).await;
    let bytes = sleeper("/opt/flux-of-a-test");
    std::fs::write(served.path().join("a.tar.gz"), &bytes).unwrap();
    let script = "import socket; s = socket.create_server(('', 8050)); print('listens', flush=True); s.accept()";
    let mut holder = case.cluster.command(&["exec", "node1", "--", "python3", "-c", script]);
    let mut holder = holder.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let stdout = std::io::BufReader::new(holder.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut { stdout }, &mut line).unwrap();
    assert_eq!(line.trim(), "listens");

    case.create(packages(&server, "a.tar.gz", &sha256(&bytes))).await;
    let message = case.node_says("node1", NodePhase::Failed, "port 8050 of this host is taken by python3").await;
    assert!(message.contains("free it, or set spec.broker.port"), "{message}");
    case.warned("FluxNode/node1", "port 8050 of this host is taken").await;
    case.instance_says("port 8050 of this host is taken").await;
    assert!(!case.is_ready("node1"));
    case.nothing_half_made_is_live("node1");

    kill(Pid::from_raw(holder.id().cast_signed()), Signal::SIGTERM).unwrap();
    holder.wait().unwrap();
    case.is("node1", NodePhase::Starting).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_state_json_is_reported_until_it_is_fixed() {
    let Some(case) = Case::on(1).await else { return };
    let served = tempfile::tempdir().unwrap();
    let server = Server::start(served.path()).await;
    let bytes = sleeper("/opt/flux-of-a-test");
    std::fs::write(served.path().join("a.tar.gz"), &bytes).unwrap();
    case.create(packages(&server, "a.tar.gz", &sha256(&bytes))).await;
    let started = |node: &FluxNode| node.status.as_ref().is_some_and(|status| status.adopted.is_some());
    case.until("node1", "started", started).await;

    let path = case.on_node("node1", "/opt/flux-distribute/state.json");
    let whole = std::fs::read(&path).unwrap();
    for damaged in ["", "{"] {
        std::fs::write(&path, damaged).unwrap();
        let message = case.node_says("node1", NodePhase::Failed, "/opt/flux-distribute/state.json").await;
        assert!(message.contains("correct it by hand"), "{message}");
        case.becomes_ready("node1", false).await;
        let flapped = case.changes_of("node1", std::time::Duration::from_secs(3), |node: &FluxNode| {
            !super::cluster::says(node, &NodePhase::Failed, "state.json")
        });
        assert_eq!(flapped.await, 0);
        std::fs::write(&path, &whole).unwrap();
        case.is("node1", NodePhase::Starting).await;
    }
    case.warned("FluxNode/node1", "state.json").await;
}
