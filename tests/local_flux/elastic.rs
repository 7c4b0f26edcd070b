//! Nodes that come and go under jobs, and jobs that wait for nodes.

use std::{collections::BTreeMap, fs};

use api::{INSTANCE, IdSet};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, api::DeleteParams};
use serde_json::{Value, json};

use crate::{harness::Cluster, scheduler::Scheduler};

/// All run at the same time.
const JOBS: usize = 20;

/// Ranks in this state: `draining` get no new jobs and have some, `drained` have none.
fn ranks(cluster: &Cluster, state: &str) -> Option<String> {
    cluster.ask("node1", &["flux", "resource", "status", "-s", state, "--skip-empty", "-no", "{ranks}"])
}

#[test]
fn none_of_20_jobs_is_lost_while_four_nodes_join_and_four_are_removed() {
    come_and_go(Scheduler::Fluxion);
}

#[test]
fn no_job_is_lost_while_nodes_join_and_leave_under_sched_simple() {
    come_and_go(Scheduler::Simple);
}

/// Drains ranks 2 and 3, which have jobs: `cordoned` as by `kubectl drain`, `deleted` as by an autoscaler whose finalizer holds
/// its Node until it is idle.
fn drain(cluster: &Cluster, cordoned: &str, deleted: &str) {
    cluster.patch_node(cordoned, json!({"spec": {"unschedulable": true}}));
    cluster.patch_node(deleted, json!({"metadata": {"finalizers": ["example.org/autoscaler"]}}));
    cluster.wait(Api::<Node>::all(cluster.client()).delete(deleted, &DeleteParams::default())).unwrap();
    cluster.until("the drain", || (ranks(cluster, "draining")? == "2-3").then_some(()));
}

fn come_and_go(scheduler: Scheduler) {
    // A node can't have more cores than the machine: with five of them these are four nodes.
    let cores = std::thread::available_parallelism().unwrap().get().min(5);
    let nodes = u32::try_from(JOBS.div_ceil(cores)).unwrap();
    let cores = cores.to_string();
    let Some(cluster) = scheduler.up(nodes, &["--cores", &cores]) else { return };
    let jobs = cluster.job(&[&format!("--cc=1-{JOBS}"), "-N1", "-n1"]);
    let running = || cluster.exec("node1", &["flux", "jobs", "-f", "running", "-no", "{id}"]).lines().count();
    assert_eq!(running(), JOBS);
    let before = cluster.brokers();

    cluster.must(&["add-node", "--count", "4", "--cores", &cores]);
    cluster.all_online(nodes + 4);
    let with_others = cluster.brokers();
    assert!(before.iter().all(|(node, broker)| with_others[node] == *broker), "{before:?} {with_others:?}");

    let [cordoned, deleted] = [2, 3].map(|rank| cluster.holder(rank));
    drain(&cluster, &cordoned, &deleted);
    // And the two that have joined last go by a smaller size.
    let idle = [2, 3].map(|rank| cluster.holder(nodes + rank));
    cluster.patch(json!({"spec": {"size": nodes + 2}}));
    for node in &idle {
        cluster.until("the end of one without jobs", || cluster.node(node).rank.is_none().then_some(()));
        cluster.must(&["remove-node", node]);
    }
    // New jobs go to those that stay, and those that are to go have theirs.
    let said = cluster.exec("node1", &["flux", "run", "-N2", "-n2", "hostname"]);
    assert!(said.lines().all(|node| node != cordoned && node != deleted), "{said}");
    cluster.until("their drain", || (ranks(&cluster, "draining")? == "2-3").then_some(()));
    assert_eq!(running(), JOBS);
    let still: BTreeMap<_, _> = with_others.into_iter().filter(|(node, _)| !idle.contains(node)).collect();
    assert_eq!(cluster.brokers(), still);

    for node in [&cordoned, &deleted] {
        jobs.finish_on(node);
    }
    cluster.until("the end of their jobs", || ranks(&cluster, "draining")?.is_empty().then_some(()));
    assert!(running() < JOBS);
    cluster.patch_node(&deleted, json!({"metadata": {"finalizers": null}}));
    for node in [&cordoned, &deleted] {
        cluster.must(&["remove-node", node]);
    }
    cluster.until("their end", || (cluster.instance().status?.online == nodes).then_some(()));
    cluster.all_online(nodes);
    jobs.finish();
    let stayed: BTreeMap<_, _> = still.into_iter().filter(|(node, _)| *node != cordoned && *node != deleted).collect();
    assert_eq!(cluster.brokers(), stayed);
}

#[test]
fn a_job_that_needs_one_node_more_waits_for_it_and_gets_all_of_its_cores() {
    one_more(Scheduler::Fluxion);
}

#[test]
fn a_job_that_needs_one_node_more_waits_for_it_under_sched_simple() {
    one_more(Scheduler::Simple);
}

/// The cores of each rank that the job has.
fn cores(cluster: &Cluster, job: &str) -> BTreeMap<u32, usize> {
    let all: Value = serde_json::from_str(&cluster.exec("node1", &["flux", "job", "info", job, "R"])).unwrap();
    let set = |value: &Value| value.as_str().unwrap().parse::<IdSet>().unwrap().0;
    let entries = all["execution"]["R_lite"].as_array().unwrap().iter();
    let each = entries.flat_map(|entry| {
        let cores = set(&entry["children"]["core"]).len();
        set(&entry["rank"]).into_iter().map(move |rank| (rank, cores))
    });
    each.collect()
}

fn one_more(scheduler: Scheduler) {
    // A spare is said to have more than the node has that will take it.
    let instance = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    let spec = json!({"apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance",
        "metadata": {"name": INSTANCE}, "spec": {"spares": {"shape": {"cores": 3}}}});
    fs::write(instance.path(), spec.to_string()).unwrap();
    let options = ["--instance", instance.path().to_str().unwrap(), "--cores", "2"];
    let Some(cluster) = scheduler.up(4, &options) else { return };
    let before = cluster.brokers();
    let submit = |shape: &[&str]| cluster.exec("node1", &[&["flux", "submit"], shape, &["hostname"]].concat());
    let two_each = submit(&["-N5", "-n5", "-c2"]);
    cluster.until("a node that is missed", || (cluster.instance().status?.pending_nodes? == 1).then_some(()));
    let whole = submit(&["-N5", "-n5", "--exclusive"]);
    let states = cluster.exec("node1", &["flux", "jobs", "-no", "{state}", &two_each, &whole]);
    assert_eq!(states, "SCHED\nSCHED");

    cluster.must(&["add-node", "--cores", "2"]);
    for job in [two_each, whole] {
        cluster.exec("node1", &["flux", "job", "wait-event", "-t", "120", &job, "clean"]);
        let said = cluster.exec("node1", &["flux", "job", "attach", &job]);
        let mut ran: Vec<_> = said.lines().collect();
        ran.sort_unstable();
        assert_eq!(ran, ["node1", "node2", "node3", "node4", "node5"]);
        assert_eq!(cores(&cluster, &job), (0..5).map(|rank| (rank, 2)).collect());
    }
    assert_eq!(cluster.node("node5").rank, Some(4));
    let mut now = cluster.brokers();
    assert!(now.remove("node5").is_some());
    assert_eq!(now, before);
}

#[test]
fn no_core_is_lost_to_jobs_that_end_while_nodes_join_under_fluxion() {
    join_beside_short_jobs(Scheduler::Fluxion);
}

#[test]
fn no_core_is_lost_to_jobs_that_end_while_nodes_join_under_sched_simple() {
    join_beside_short_jobs(Scheduler::Simple);
}

/// A node joins, leaves and joins again so often.
const JOINS: usize = 3;

fn join_beside_short_jobs(scheduler: Scheduler) {
    // No spare rank is left: its cores would hide that others are lost.
    let instance = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    let spec = json!({"apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance",
        "metadata": {"name": INSTANCE}, "spec": {"maxSize": 3, "size": 2}});
    fs::write(instance.path(), spec.to_string()).unwrap();
    let options = ["--instance", instance.path().to_str().unwrap(), "--cores", "2"];
    let Some(cluster) = scheduler.up(2, &options) else { return };
    cluster.must(&["add-node", "--cores", "2"]);
    let until_members = |size: u32| {
        cluster.patch(json!({"spec": {"size": size}}));
        let wanted = (0..size).collect::<Vec<_>>();
        cluster.until(&format!("{size} members"), || {
            let mut online: Vec<_> =
                cluster.nodes().iter().filter(|node| node.is_online()).filter_map(|node| node.rank).collect();
            online.sort_unstable();
            (online == wanted).then_some(())
        });
    };
    for _ in 0..JOINS {
        cluster.exec("node1", &["flux", "submit", "--cc=1-40", "-n1", "sleep", "0.2"]);
        until_members(3);
        cluster.exec("node1", &["flux", "submit", "--cc=1-40", "-n1", "sleep", "0.1"]);
        until_members(2);
    }
    until_members(3);
    cluster.exec("node1", &["flux", "queue", "idle"]);
    let jobs = cluster.exec("node1", &["flux", "submit", "--cc=1-6", "-n1", "sleep", "600"]);
    for job in jobs.lines() {
        cluster.exec("node1", &["flux", "job", "wait-event", "-t", "30", job, "start"]);
    }
    cluster.exec("node1", &["flux", "cancel", "--all"]);
}

#[test]
fn a_job_waiting_for_free_cores_is_reported_and_reload_starts_it() {
    // With Fluxion's default format, the cores of one of two jobs are lost that it takes back on a node.
    let instance = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    let config = "[sched-fluxion-resource]\nmatch-format = \"rv1_nosched\"\n";
    let spec = json!({"apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance",
        "metadata": {"name": INSTANCE}, "spec": {"maxSize": 1, "broker": {"config": config}}});
    fs::write(instance.path(), spec.to_string()).unwrap();
    let options = ["--instance", instance.path().to_str().unwrap(), "--cores", "2"];
    let Some(cluster) = Scheduler::Fluxion.up(1, &options) else { return };
    let submit = || cluster.exec("node1", &["flux", "submit", "--cc=1-2", "-n1", "sleep", "600"]);
    let until = |job: &str, event: &str| cluster.exec("node1", &["flux", "job", "wait-event", "-t", "60", job, event]);
    let reload = || cluster.must(&["exec", "node1", "--agent", "--", "reload"]);
    submit().lines().for_each(|job| drop(until(job, "start")));
    reload();
    cluster.exec("node1", &["flux", "cancel", "--all"]);
    cluster.exec("node1", &["flux", "queue", "idle"]);

    let jobs = submit();
    let waits = jobs.lines().last().unwrap();
    let status = cluster.until("the word on it", || {
        let status = cluster.instance().status?;
        status.holding("Degraded").is_some_and(|degraded| degraded.reason == "CoresLost").then_some(status)
    });
    let line = status.message.unwrap();
    assert!(line.contains("has lost cores") && line.contains("flux-distribute reload"), "{line}");
    assert_eq!(cluster.exec("node1", &["flux", "jobs", "-no", "{state}", waits]), "SCHED");

    cluster.exec("node1", &["flux", "cancel", jobs.lines().next().unwrap()]);
    reload();
    until(waits, "start");
    cluster.until("its end", || cluster.instance().status?.holding("Degraded").is_none().then_some(()));
}
