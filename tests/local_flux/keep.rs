//! Package sets that come and go beside an instance that runs.

use std::{collections::BTreeSet, process::Stdio};

use serde_json::{Value, json};

use crate::harness::{Cluster, channel};

const ENVIRONMENTS: &str = "/opt/flux-distribute/envs";

fn set_packages(cluster: &Cluster, packages: Value) {
    cluster.patch(json!({"spec": {"packages": packages}}));
}

fn environments(cluster: &Cluster, node: &str) -> BTreeSet<String> {
    cluster.exec(node, &["ls", "-A", ENVIRONMENTS]).lines().map(str::to_owned).collect()
}

fn all_have(cluster: &Cluster, what: &str, wanted: impl Fn(&str) -> BTreeSet<String>) {
    cluster.until(what, || {
        let nodes = cluster.nodes();
        assert!(nodes.iter().all(super::harness::NodeStatus::is_online), "{nodes:?}");
        nodes.iter().all(|node| environments(cluster, &node.name) == wanted(&node.name)).then_some(())
    });
}

#[test]
fn switching_between_two_locks_keeps_both_on_every_node_and_restarts_nothing() {
    let Some(channel) = channel() else { return };
    let cluster = Cluster::start(4, &["--channel", &channel]);
    let (before, job) = (cluster.brokers(), cluster.job(&["-N4", "-n4"]));
    let first = environments(&cluster, "node1");
    assert_eq!(first.len(), 1);

    set_packages(&cluster, json!({"specs": ["flux-core", "mpich"]}));
    let begin = std::time::Instant::now();
    let both = cluster.until("a second environment", || {
        Some(environments(&cluster, "node1"))
            .filter(|found| found.len() == 2 && found.iter().all(|d| !d.starts_with('.')))
    });
    all_have(&cluster, "both environments on every node", |_| both.clone());
    eprintln!(
        "measured: {:.1} s until a second lock is on four nodes beside their brokers",
        begin.elapsed().as_secs_f64()
    );
    assert_eq!(cluster.brokers(), before);

    // Back again, and something runs from the second one.
    set_packages(&cluster, json!({"specs": null}));
    let second = both.difference(&first).next().unwrap();
    let flux = format!("{ENVIRONMENTS}/{second}/bin/flux");
    let script = "touch /root/begun; until test -e /root/end; do sleep 0.2; done; exec true";
    let mut words = cluster.command(&["exec", "node2", "--", &flux, "start", "sh", "-c", script]);
    let old = words.stdout(Stdio::null()).spawn().unwrap();
    cluster.until("a process of the second environment", || {
        cluster.root("node2").join("root/begun").exists().then_some(())
    });
    set_packages(&cluster, json!({"keep": 1}));
    let kept = |node: &str| if node == "node2" { both.clone() } else { first.clone() };
    all_have(&cluster, "the second environment only where something runs from it", kept);

    std::fs::write(cluster.root("node2").join("root/end"), "").unwrap();
    let ended = old.wait_with_output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(cluster.brokers(), before);
    job.finish();
    for node in cluster.nodes() {
        let said = cluster.exec("node1", &["flux", "run", "--requires", &format!("host:{}", node.name), "hostname"]);
        assert_eq!(said, node.name);
    }
}
