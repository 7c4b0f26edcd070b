//! What changes what Flux reads at start, and the coordinated restart that it takes.

use std::fs;

use api::{ANNOTATION_RESTART, FluxInstanceSpec, InstancePhase};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::harness::{Cluster, Unplugged};

/// Message of a condition that holds.
fn condition(cluster: &Cluster, name: &str) -> Option<String> {
    Some(cluster.instance().status?.holding(name)?.message.clone())
}

fn epoch(cluster: &Cluster, wanted: u64) {
    cluster.until(&format!("epoch {wanted}"), || (cluster.instance().status?.epoch == wanted).then_some(()));
    let online = u32::try_from(cluster.nodes().len()).unwrap();
    cluster.until("everybody in it", || (cluster.instance().status?.online == online).then_some(()));
}

#[test]
fn a_change_that_needs_a_restart_waits_for_running_jobs_and_keeps_pending_ones() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let (before, job) = (cluster.brokers(), cluster.job(&["-N3", "-n3"]));
    let pending = cluster.exec("node1", &["flux", "submit", "-N3", "--urgency=hold", "true"]);

    cluster.patch(json!({"spec": {"broker": {"port": 8060}}}));
    let waits = |said: &String| said.contains("broker.port 8050 -> 8060") && said.contains("jobs on ranks 0-2");
    cluster.until("the announcement", || condition(&cluster, "RestartPending").filter(waits));
    assert_eq!(cluster.brokers(), before);

    job.finish();
    epoch(&cluster, 2);
    let after = cluster.brokers();
    assert!(after.iter().all(|(node, now)| now.rank == before[node].rank && now.pid != before[node].pid), "{after:?}");
    assert_eq!(condition(&cluster, "RestartPending"), None);
    cluster.exec("node1", &["flux", "job", "urgency", &pending, "default"]);
    cluster.exec("node1", &["flux", "job", "wait-event", "-t", "60", &pending, "clean"]);
}

/// A process that hangs until this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn new(pid: i32) -> Self {
        kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
        Self(Pid::from_raw(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        assert!(kill(self.0, Signal::SIGCONT).is_ok() || std::thread::panicking());
    }
}

/// `leave` takes a follower out of its lead's hearing, until what it returns is dropped.
fn a_lead_that_ends_its_epoch_waits<T>(leave: impl FnOnce(&Cluster, &str) -> T) {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let before = cluster.brokers();
    let [lead, away] = [0, 1].map(|rank| cluster.holder(rank));
    let pending = cluster.exec(&lead, &["flux", "submit", "-N3", "--urgency=hold", "true"]);
    let absence = leave(&cluster, &away);
    cluster.patch(json!({"metadata": {"annotations": {ANNOTATION_RESTART: "now"}}}));
    // Flux says so after a minute, by which any other broker would have been killed.
    let log = cluster.root(&lead).join("opt/flux-distribute/log/broker.log");
    let words = format!("shutdown delayed: waiting for 1 peers: {away} ");
    cluster.until("the lead's log line", || fs::read_to_string(&log).unwrap().contains(&words).then_some(()));
    assert_eq!(cluster.instance().status.unwrap().phase, InstancePhase::Restarting);
    assert_eq!(cluster.brokers().get(&lead), Some(&before[&lead]));
    drop(absence);
    epoch(&cluster, 2);
    cluster.exec(&lead, &["flux", "job", "urgency", &pending, "default"]);
    cluster.exec(&lead, &["flux", "job", "wait-event", "-t", "60", &pending, "clean"]);
}

#[test]
fn a_lead_that_ends_its_epoch_waits_for_a_follower_that_hangs() {
    a_lead_that_ends_its_epoch_waits(|cluster, node| Stopped::new(cluster.brokers()[node].pid));
}

#[test]
fn a_lead_that_ends_its_epoch_waits_for_a_follower_that_is_cut_off() {
    a_lead_that_ends_its_epoch_waits(Unplugged::new);
}

#[test]
fn an_annotation_restarts_the_instance_even_if_jobs_run() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let before = cluster.brokers();
    let job = cluster.exec("node1", &["flux", "submit", "-N2", "-n2", "sleep", "inf"]);
    let pending = cluster.exec("node1", &["flux", "submit", "-N2", "--urgency=hold", "true"]);
    let word = json!({"metadata": {"annotations": {"distribute.flux-framework.org/restart": "now"}}});
    cluster.patch(word.clone());
    epoch(&cluster, 2);
    let after = cluster.brokers();
    assert!(after.iter().all(|(node, now)| now.pid != before[node].pid), "{after:?}");
    assert_eq!(cluster.exec("node1", &["flux", "run", "-N2", "hostname"]).lines().count(), 2);
    cluster.exec("node1", &["flux", "job", "wait-event", "-t", "60", &job, "exception"]);
    cluster.exec("node1", &["flux", "job", "urgency", &pending, "default"]);
    cluster.exec("node1", &["flux", "job", "wait-event", "-t", "60", &pending, "clean"]);
    // The same word is heard once: the planner has seen everything that came before this change.
    cluster.patch(word);
    cluster.patch(json!({"spec": {"ranks": {"retain": "11m"}}}));
    let generation = cluster.instance().metadata.generation;
    cluster.until("the planner", || {
        (cluster.instance().status.map(|status| status.observed_generation) == generation).then_some(())
    });
    assert_eq!(cluster.brokers(), after);
}

#[test]
fn the_instance_goes_back_from_settings_that_no_broker_starts_with() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    cluster.patch(json!({"spec": {"broker": {"config": "[ingest]
batch-count = \"many\"
"}}}));
    epoch(&cluster, 3);
    let said = cluster.until("why", || condition(&cluster, "RestartPending"));
    assert!(said.contains("went back to its previous settings"), "{said}");
    assert_eq!(cluster.exec("node1", &["flux", "run", "-N2", "hostname"]).lines().count(), 2);
}

#[test]
fn a_smaller_size_drains_and_stops_members_and_a_larger_one_restores_them() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let before = cluster.brokers();
    let last = cluster.holder(2);
    let job = cluster.job(&["-N1", "-n1", &format!("--requires=host:{last}")]);
    let scale = |size: u32| {
        cluster.patch(json!({"spec": FluxInstanceSpec { size: Some(size), ..cluster.instance().spec }}));
    };
    scale(2);
    cluster.until("the drain", || {
        let drained = cluster.ask("node1", &["flux", "resource", "drain", "-no", "{ranks} {reason}"])?;
        drained.contains("2 flux-distribute: size is 2").then_some(())
    });
    assert_eq!(cluster.brokers(), before, "a job runs there");
    job.finish();
    cluster.until("its end", || (cluster.brokers().len() == 2).then_some(()));
    let left = cluster.brokers();
    assert!(left.iter().all(|(node, broker)| before[node] == *broker), "{left:?}");
    cluster.until("its rank's end", || (cluster.node(&last).rank.is_none()).then_some(()));

    scale(3);
    cluster.until("its return", || (cluster.node(&last).rank == Some(2)).then_some(()));
    cluster.all_online(3);
    cluster.until("jobs there", || {
        let drained = cluster.ask("node1", &["flux", "resource", "drain", "-no", "{ranks}"])?;
        drained.is_empty().then_some(())
    });
    assert_eq!(cluster.exec("node1", &["flux", "run", "-N3", "hostname"]).lines().count(), 3);
}

#[test]
fn a_leaving_member_is_stopped_when_its_drain_timeout_has_passed() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    cluster.job(&["-N1", "-n1", &format!("--requires=host:{}", cluster.holder(1))]);
    cluster.patch(json!({"spec": {"size": 1, "drain": {"timeout": "5s"}}}));
    cluster.until("its end", || (cluster.brokers().len() == 1).then_some(()));
    assert_eq!(cluster.exec("node1", &["flux", "run", "-N1", "hostname"]), "node1");
}

#[test]
fn a_cordoned_node_gets_no_jobs_until_it_is_uncordoned() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let (before, job) = (cluster.brokers(), cluster.job(&["-N2", "-n2"]));
    let drained = || cluster.ask("node1", &["flux", "resource", "drain", "-no", "{ranks} {reason}"]);
    cluster.exec("node1", &["flux", "resource", "drain", "0", "the administrator's own"]);
    let cordon = |cordoned: bool| {
        cluster.patch_node(&cluster.holder(1), json!({"spec": {"unschedulable": cordoned}}));
    };
    cordon(true);
    cluster.until("the drain", || drained()?.contains("1 flux-distribute: the node is cordoned").then_some(()));
    job.finish();
    cordon(false);
    cluster.until("its end", || (drained()? == "0 the administrator's own").then_some(()));
    assert_eq!(cluster.brokers(), before);
}
