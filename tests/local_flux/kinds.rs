//! Nodes of different kinds: cores, GPUs, labels, architectures, and nodes that have less than before.

use std::{collections::BTreeMap, fs};

use api::IdSet;
use model::hostlist;
use serde_json::{Value, json};

use crate::harness::Cluster;

/// What `flux resource` says; nothing for the moment in which the lead takes in a change.
fn resource(cluster: &Cluster, words: &[&str]) -> Option<String> {
    cluster.ask("node1", &[&["flux", "resource"], words].concat())
}

/// What Flux would give of each node to a job: cores, GPUs, and its properties. `flux resource list` has one row for nodes that
/// differ in cores only.
fn shown(cluster: &Cluster) -> BTreeMap<String, (u32, u32, String)> {
    let Some(text) = resource(cluster, &["R", "-s", "free"]) else { return BTreeMap::new() };
    let r: Value = serde_json::from_str(&text).unwrap();
    let set = |value: &Value| value.as_str().unwrap_or_default().parse::<IdSet>().unwrap();
    let mut ranks = BTreeMap::new();
    for entry in r["execution"]["R_lite"].as_array().unwrap() {
        let count = |kind: &str| u32::try_from(set(&entry["children"][kind]).len()).unwrap();
        ranks.extend(set(&entry["rank"]).0.into_iter().map(|rank| (rank, (count("core"), count("gpu")))));
    }
    let properties = |rank: u32| {
        let all = r["execution"]["properties"].as_object().into_iter().flatten();
        let mut own: Vec<_> =
            all.filter(|(_, ranks)| set(ranks).contains(rank)).map(|(name, _)| name.as_str()).collect();
        own.sort_unstable();
        own.join(" ")
    };
    let names = r["execution"]["nodelist"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|names| hostlist::decode(names.as_str().unwrap()));
    names.zip(&ranks).map(|(name, (rank, (cores, gpus)))| (name, (*cores, *gpus, properties(*rank)))).collect()
}

fn until_shown(cluster: &Cluster, node: &str, cores: u32, gpus: u32, properties: &str) {
    let expected = (cores, gpus, properties.to_owned());
    cluster.until(&format!("{node} as {expected:?}"), || {
        let now = shown(cluster);
        (now.get(node) == Some(&expected)).then_some(())
    });
}

fn resources(cluster: &Cluster, resources: Value) {
    cluster.patch(json!({ "spec": { "resources": resources } }));
}

/// State and reason of the nodes that get no jobs, as Flux says it.
fn refused(cluster: &Cluster) -> Option<String> {
    let words = ["status", "-s", "exclude,draining,drained", "-no", "{state} {nodelist} {reason}"];
    let rows = resource(cluster, &words)?;
    // `flux resource status` has a row for each state, even without ranks.
    Some(rows.lines().map(str::trim).filter(|row| row.contains(' ')).collect::<Vec<_>>().join("\n"))
}

fn until_refused(cluster: &Cluster, expected: &str) {
    cluster.until(&format!("{expected:?}"), || (refused(cluster)? == expected).then_some(()));
}

#[test]
fn each_of_four_kinds_of_nodes_declares_its_own_resources() {
    let directory = tempfile::tempdir().unwrap();
    let instance = directory.path().join("instance.yaml");
    let spec = json!({"apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance",
        "metadata": {"name": "flux"}, "spec": {"resources": {"properties": ["example.org/zone"]}}});
    fs::write(&instance, spec.to_string()).unwrap();
    let Some(cluster) = Cluster::up(1, &["--instance", instance.to_str().unwrap()]) else { return };
    let (machine, ..) = shown(&cluster)["node1"];
    cluster.must(&["add-node", "--cores", "1"]);
    cluster.must(&["add-node", "--cores", "2", "--gpus", "2", "--label", "example.org/zone=a"]);
    cluster.must(&["add-node", "--cores", "1", "--gpus", "1", "--label", "example.org/zone=b"]);
    cluster.all_online(4);
    for (node, cores, gpus, properties) in [
        ("node1", machine, 0, ""),
        ("node2", 1, 0, ""),
        ("node3", 2, 2, "example.org/zone=a"),
        ("node4", 1, 1, "example.org/zone=b"),
    ] {
        until_shown(&cluster, node, cores, gpus, properties);
    }
    let run = |shape: &str| cluster.exec("node1", &["flux", "run", "-n1", shape, "hostname"]);
    assert_eq!(run("-g2"), "node3");
    assert_eq!(run("--requires=example.org/zone=b"), "node4");

    // What a label says changes beside a running job, and so does an architecture that is another one's.
    let brokers = cluster.brokers();
    let job = cluster.job(&["-n1", "--requires=example.org/zone=b"]);
    cluster.must(&["add-node", "--cores", "1", "--arch", "arm64"]);
    cluster.patch_node("node2", json!({"metadata": {"labels": {"example.org/zone": "c"}}}));
    cluster.all_online(5);
    until_shown(&cluster, "node5", 1, 0, "arm64");
    until_shown(&cluster, "node2", 1, 0, "amd64 example.org/zone=c");
    assert_eq!(run("--requires=arm64"), "node5");
    let now = cluster.brokers();
    assert!(brokers.iter().all(|(node, broker)| now[node] == *broker), "{brokers:?} {now:?}");
    job.finish();
}

#[test]
fn a_job_that_waits_for_a_gpu_outlives_a_driver_that_comes_late() {
    let Some(cluster) = Cluster::up(1, &[]) else { return };
    cluster.must(&["add-node", "--cores", "2", "--gpus", "2"]);
    cluster.all_online(2);
    until_shown(&cluster, "node2", 2, 2, "");
    cluster.must(&["node", "node2", "power-off"]);
    // Until Flux knows that the node is down, it may start the job there, and lose it.
    cluster.until("a node that is down", || {
        (cluster.ask("node1", &["flux", "resource", "list", "-s", "up", "-no", "{nnodes}"])? == "1").then_some(())
    });
    let pending = cluster.exec("node1", &["flux", "submit", "-n1", "-g2", "hostname"]);
    cluster.must(&["node", "node2", "power-on", "--cores", "2", "--gpus", "1"]);
    until_refused(&cluster, "drained node2 flux-distribute: it has 1 GPU for Flux, 2 are declared");
    // By then the planner knows that no job runs there, and would declare what there is.
    cluster.until("seconds of the drain", || {
        let since = cluster.roster()?.ranks[&1].lacks_since?;
        (k8s_openapi::jiff::Timestamp::now().as_second() - since > 10).then_some(())
    });
    cluster.must(&["node", "node2", "power-off"]);
    cluster.must(&["node", "node2", "power-on", "--cores", "2", "--gpus", "2"]);
    assert_eq!(cluster.exec("node1", &["flux", "job", "attach", &pending]), "node2");
    until_refused(&cluster, "");
    until_shown(&cluster, "node2", 2, 2, "");
}

#[test]
fn a_node_with_less_than_before_is_drained_corrected_and_undrained() {
    let Some(cluster) = Cluster::up(1, &[]) else { return };
    cluster.patch(json!({"spec": {"resources": {"retain": "1s"}}}));
    cluster.must(&["add-node", "--cores", "2", "--gpus", "2"]);
    cluster.all_online(2);
    until_shown(&cluster, "node2", 2, 2, "");

    cluster.must(&["node", "node2", "power-off"]);
    cluster.must(&["node", "node2", "power-on", "--cores", "1", "--gpus", "1"]);
    until_shown(&cluster, "node2", 1, 1, "");
    until_refused(&cluster, "");
    let log = cluster.exec("node1", &["flux", "kvs", "eventlog", "get", "resource.eventlog"]);
    let reason = "flux-distribute: it has 1 GPU for Flux, 2 are declared";
    assert!(log.contains(reason), "{log}");
    assert_eq!(cluster.exec("node1", &["flux", "run", "-n1", "-g1", "hostname"]), "node2");

    cluster.must(&["node", "node2", "power-off"]);
    cluster.must(&["node", "node2", "power-on", "--cores", "2", "--gpus", "3"]);
    until_shown(&cluster, "node2", 2, 3, "");
}

#[test]
fn the_lead_is_excluded_once_its_jobs_have_ended_and_can_be_included_again() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let brokers = cluster.brokers();
    let job = cluster.job(&["-n1", "--requires=rank:0"]);
    resources(&cluster, json!({"exclude": {"lead": true}}));
    let reason = "flux-distribute: spec.resources.exclude keeps it out of scheduling";
    until_refused(&cluster, &format!("draining node1 {reason}"));
    job.finish();
    until_refused(&cluster, "exclude node1");
    assert_eq!(cluster.exec("node1", &["flux", "run", "-n1", "hostname"]), "node2");

    let beside = cluster.job(&["-n1"]);
    resources(&cluster, Value::Null);
    until_refused(&cluster, "");
    assert_eq!(cluster.exec("node1", &["flux", "run", "-n1", "--requires=rank:0", "hostname"]), "node1");
    beside.finish();
    assert_eq!(cluster.brokers(), brokers);
}
