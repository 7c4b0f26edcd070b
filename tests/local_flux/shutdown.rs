//! What an administrator stops by hand.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    path::PathBuf,
};

use api::{ANNOTATION_RESTART, FluxNode, Roster};
use kube::api::{Patch, PatchParams};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::harness::Cluster;

/// Waits until the lead's agent says that the instance was shut down. What it, or the agent before, has said already does not count.
fn until_lead_says_so(cluster: &Cluster, lead: &str) {
    let nothing = Patch::Merge(json!({"status": {"message": null}}));
    let nodes = cluster.api::<FluxNode>();
    cluster.wait(nodes.patch_status(lead, &PatchParams::default(), &nothing)).unwrap();
    cluster.until("the lead's word", || {
        let node = cluster.wait(cluster.api::<FluxNode>().get(lead)).unwrap();
        let status = node.status?;
        (status.adopted.is_none() && status.message?.contains("flux shutdown")).then_some(())
    });
}

/// Waits until the planner says so, with what to do, and has planned since the spec changed to `retain`.
fn until_planner_says_so(cluster: &Cluster, retain: &str) {
    let generation = cluster.patch(json!({"spec": {"ranks": {"retain": retain}}})).metadata.generation.unwrap();
    cluster.until("the planner's word", || {
        let status = cluster.instance().status?;
        let degraded = status.holding("Degraded")?;
        let tells =
            |words: &str| ["flux shutdown", "kubectl", ANNOTATION_RESTART].iter().all(|word| words.contains(word));
        (status.observed_generation >= generation && degraded.reason == "ShutDown" && tells(status.message.as_ref()?))
            .then_some(())
    });
}

fn lead_is_down(cluster: &Cluster, lead: &str) -> bool {
    !cluster.brokers().contains_key(lead)
}

fn below_the_prefix(cluster: &Cluster, node: &str, path: &str) -> PathBuf {
    cluster.root(node).join("opt/flux-distribute").join(path)
}

/// Fills the log below the prefix of `node` with lines that are not about a shutdown, then empties it, as a trim does.
fn forget_log(cluster: &Cluster, node: &str) {
    let mut log = OpenOptions::new().append(true).open(below_the_prefix(cluster, node, "log/broker.log")).unwrap();
    log.write_all("<6>cron.info[0]: nothing to do\n".repeat(10_000).as_bytes()).unwrap();
    log.set_len(0).unwrap();
}

#[test]
fn a_shut_down_instance_stays_down_until_an_administrator_restarts_it() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let lead = cluster.holder(0);
    let pending = cluster.exec(&lead, &["flux", "submit", "-N3", "--urgency=hold", "true"]);
    cluster.exec(&lead, &["flux", "shutdown"]);
    until_lead_says_so(&cluster, &lead);
    until_planner_says_so(&cluster, "11m");
    assert!(lead_is_down(&cluster, &lead));

    forget_log(&cluster, &lead);
    let before = cluster.node(&lead).restarts;
    cluster.must(&["agent", &lead, "kill"]);
    cluster.until("another agent", || (cluster.node(&lead).restarts > before).then_some(()));
    until_lead_says_so(&cluster, &lead);
    until_planner_says_so(&cluster, "12m");
    assert!(lead_is_down(&cluster, &lead), "another agent started it");

    cluster.must(&["node", &lead, "power-off"]);
    cluster.must(&["node", &lead, "power-on"]);
    cluster.until("the agent after the reboot", || cluster.node(&lead).agent_pid);
    until_lead_says_so(&cluster, &lead);
    until_planner_says_so(&cluster, "13m");
    assert!(lead_is_down(&cluster, &lead), "a reboot started it");
    // What would begin a new epoch of an idle instance waits as well.
    cluster.patch(json!({"spec": {"broker": {"port": 8060}}}));
    until_planner_says_so(&cluster, "14m");
    assert!(lead_is_down(&cluster, &lead), "a change of the spec started it");

    // Local mode names a command that needs no kubectl.
    let shown = cluster.must(&["status"]);
    assert!(shown.contains("run `flux-distribute local restart`") && !shown.contains("kubectl"), "{shown}");
    cluster.must(&["restart"]);
    cluster.until("epoch 2", || {
        let status = cluster.instance().status?;
        (status.epoch == 2 && status.online == 3 && status.holding("Degraded").is_none()).then_some(())
    });
    cluster.exec(&lead, &["flux", "job", "urgency", &pending, "default"]);
    cluster.exec(&lead, &["flux", "job", "wait-event", "-t", "60", &pending, "clean"]);
    // The epoch after a shutdown is an ordinary one: a crash of its lead is none.
    kill(Pid::from_raw(cluster.brokers()[&lead].pid), Signal::SIGKILL).unwrap();
    cluster.until("the lead again", || cluster.brokers().contains_key(&lead).then_some(()));
    cluster.all_online(3);
}

#[test]
fn the_epoch_after_a_shutdown_begins_even_if_its_lead_fails_to_start_once() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let lead = cluster.holder(0);
    cluster.exec(&lead, &["flux", "shutdown"]);
    until_lead_says_so(&cluster, &lead);
    // The files of epoch 2 are written, and its broker says nothing.
    let digest = cluster.roster().unwrap().settings.digest;
    let flux = below_the_prefix(&cluster, &lead, &format!("envs/{digest}/bin/flux"));
    let away = flux.with_extension("away");
    fs::rename(&flux, &away).unwrap();
    cluster.patch(json!({"metadata": {"annotations": {ANNOTATION_RESTART: "go on"}}}));
    let copy = below_the_prefix(&cluster, &lead, "etc/roster.json");
    cluster.until("the files of epoch 2", || {
        let roster = Roster::parse(&fs::read_to_string(&copy).ok()?).ok()?;
        (roster.epoch == 2).then_some(())
    });
    until_told(&cluster, &lead, "bin/flux");
    fs::rename(&away, &flux).unwrap();
    cluster.all_online(2);
    assert_eq!(cluster.instance().status.unwrap().epoch, 2);
}

#[test]
fn a_lead_that_a_signal_ended_is_started_again() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let (lead, before) = (cluster.holder(0), cluster.brokers());
    kill(Pid::from_raw(before[&cluster.holder(0)].pid), Signal::SIGTERM).unwrap();
    cluster.until("another broker", || cluster.brokers().get(&lead).filter(|now| **now != before[&lead]).map(drop));
    cluster.all_online(2);
    assert_eq!(cluster.instance().status.unwrap().epoch, 1);
}

#[test]
fn a_follower_that_was_disconnected_joins_again() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let (lead, follower) = (cluster.holder(0), cluster.holder(2));
    let before = cluster.brokers();
    // Flux itself shuts down whole instances only.
    assert_eq!(cluster.ask(&follower, &["flux", "shutdown"]), None);
    cluster.exec(&lead, &["flux", "overlay", "disconnect", "2"]);
    cluster.until("another broker", || {
        cluster.brokers().get(&follower).filter(|now| **now != before[&follower]).map(drop)
    });
    cluster.all_online(3);
    let now = cluster.brokers();
    assert_eq!(now[&lead], before[&lead]);
    assert_eq!(cluster.exec(&lead, &["flux", "run", "-N3", "hostname"]).lines().count(), 3);
}

/// Waits until the FluxNode's message holds `words`.
fn until_told(cluster: &Cluster, node: &str, words: &str) {
    cluster.until(&format!("{node} to say {words:?}"), || {
        let node = cluster.wait(cluster.api::<FluxNode>().get(node)).unwrap();
        node.status?.message?.contains(words).then_some(())
    });
}

#[test]
fn a_follower_that_hangs_is_restarted_unless_it_runs_a_job() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let (idle, busy) = (cluster.holder(1), cluster.holder(2));
    let before = cluster.brokers();
    let job = cluster.job(&["-N1", "--requires=rank:2"]);
    for node in [&idle, &busy] {
        kill(Pid::from_raw(before[node].pid), Signal::SIGSTOP).unwrap();
    }
    until_told(&cluster, &idle, "has not answered for more than a minute");
    cluster.until("another broker", || cluster.brokers().get(&idle).filter(|now| **now != before[&idle]).map(drop));
    cluster.until("it online", || cluster.node(&idle).is_online().then_some(()));
    until_told(&cluster, &busy, "has not answered for more than a minute");
    assert_eq!(cluster.brokers()[&busy], before[&busy]);
    kill(Pid::from_raw(before[&busy].pid), Signal::SIGCONT).unwrap();
    cluster.all_online(3);
    job.finish();
    assert_eq!(cluster.brokers()[&busy], before[&busy]);
}
