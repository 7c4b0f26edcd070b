//! Under which names Flux knows the nodes.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::{harness::Cluster, scheduler::Scheduler};

/// The nodes that are up, folded, as `flux resource list` shows them; drained ones are down there.
fn up(cluster: &Cluster) -> Option<String> {
    cluster.ask("node1", &["flux", "resource", "status", "-s", "online", "--skip-empty", "-no", "{nodelist}"])
}

/// The drained nodes, with the reasons.
fn drained(cluster: &Cluster) -> Option<Vec<String>> {
    let said = cluster.ask("node1", &["flux", "resource", "drain", "-no", "{nodelist} {reason}"])?;
    let mut lines: Vec<_> = said.lines().map(str::to_owned).collect();
    lines.sort();
    Some(lines)
}

fn until_up(cluster: &Cluster, names: &str) {
    cluster.until(&format!("{names} in `flux resource`"), || (up(cluster)? == names).then_some(()));
}

fn until_drained(cluster: &Cluster, lines: &[&str]) {
    cluster.until(&format!("{lines:?} to be what is drained"), || (drained(cluster)? == lines).then_some(()));
}

#[test]
fn nodes_that_join_and_return_keep_their_names_and_drains_under_fluxion() {
    come_and_go(Scheduler::Fluxion);
}

#[test]
fn nodes_that_join_and_return_keep_their_names_and_drains_under_sched_simple() {
    come_and_go(Scheduler::Simple);
}

fn come_and_go(scheduler: Scheduler) {
    let Some(cluster) = scheduler.up(2, &["--cores", "2"]) else { return };
    let job = cluster.job(&["-N2", "-n2"]);
    let drain = |node: &str, why: &str| cluster.exec("node1", &["flux", "resource", "drain", node, why]);
    drain("node2", "before");

    cluster.must(&["add-node", "--count", "4", "--cores", "2"]);
    cluster.all_online(6);
    until_up(&cluster, "node[1-6]");
    let fourth = cluster.holder(3);
    drain(&fourth, "between");
    let beside = cluster.job(&["-N1", "-n1", "--requires=rank:4"]);
    assert!(
        cluster.exec("node1", &["flux", "jobs", "-no", "{nodelist}"]).lines().any(|nodes| nodes == cluster.holder(4))
    );

    // One leaves and returns.
    let last = cluster.holder(5);
    cluster.patch(json!({"spec": {"size": 5}}));
    cluster.until("its leave", || cluster.node(&last).rank.is_none().then_some(()));
    cluster.patch(json!({"spec": {"size": 6}}));
    cluster.all_online(6);
    until_up(&cluster, "node[1-6]");
    drain(&last, "after");
    let lines = ["node2 before".to_owned(), format!("{fourth} between"), format!("{last} after")];
    let mut lines = lines.each_ref().map(String::as_str);
    lines.sort_unstable();
    until_drained(&cluster, &lines);

    // A broker that joined is killed; the job is on another one.
    let victim = cluster.holder(2);
    let joined = cluster.brokers()[&victim];
    kill(Pid::from_raw(joined.pid), Signal::SIGKILL).unwrap();
    cluster.until("another broker", || (cluster.brokers().get(&victim)?.pid != joined.pid).then_some(()));
    cluster.all_online(6);
    until_up(&cluster, "node[1-6]");
    job.finish();
    beside.finish();

    // The lead restarts.
    let lead = cluster.brokers()["node1"];
    kill(Pid::from_raw(lead.pid), Signal::SIGTERM).unwrap();
    cluster.until("another lead's broker", || (cluster.brokers().get("node1")?.pid != lead.pid).then_some(()));
    cluster.all_online(6);
    until_up(&cluster, "node[1-6]");
    until_drained(&cluster, &lines);
    let mut ran: Vec<_> =
        cluster.exec("node1", &["flux", "run", "-N3", "-n3", "hostname"]).lines().map(str::to_owned).collect();
    ran.sort();
    let mut free = ["node1", "node2", "node3", "node4", "node5", "node6"].map(str::to_owned).to_vec();
    free.retain(|node| !lines.iter().any(|line| line.starts_with(node.as_str())));
    assert_eq!(ran, free);

    // And so does the instance.
    let patch = json!({"metadata": {"annotations": {"distribute.flux-framework.org/restart": "now"}}});
    cluster.patch(patch);
    cluster.until("the next epoch", || (cluster.instance().status?.epoch == 2).then_some(()));
    cluster.all_online(6);
    until_up(&cluster, "node[1-6]");
    until_drained(&cluster, &lines);
    let environment = cluster.exec("node1", &["flux", "run", "-n1", "env"]);
    assert!(!environment.contains("MODPROBE"), "{environment}");
}
