//! How fast gangs of pods go through Flux: a real API server and a real Flux, with nodes and kubelets that are played. The bridge runs in
//! a process of its own, as it does in the lead's agent.
//!
//!     FLUX_PREFIX=… KUBEBUILDER_ASSETS=… cargo bench --bench pods -- GANGS MEMBERS NODES OTHERS
//!
//! OTHERS: pods of another scheduler, which the bridge lists and leaves alone.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "../tests/support/bare_cluster.rs"]
mod bare_cluster;
#[path = "../tests/support/needs.rs"]
mod needs;
#[allow(dead_code)]
#[path = "../tests/support/real_bridge.rs"]
mod real_bridge;
#[allow(dead_code)]
#[path = "../tests/support/real_broker.rs"]
mod real_broker;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use bare_cluster::{BareCluster, NAMESPACE, client, kubelets, make_account, make_node, pod};
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt,
    api::PostParams,
    runtime::{WatchStreamExt, watcher},
};
use real_bridge::{BridgeProcess, CORES, run_bridge, start_lead, until_allocated};
use real_broker::configure;
use serde_json::json;
use tokio::time::sleep;

#[tokio::main]
async fn main() {
    let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench").collect::<Vec<_>>();
    let arguments = arguments.iter().map(String::as_str).collect::<Vec<_>>();
    match arguments[..] {
        ["bridge", kubeconfig, socket] => run_bridge(kubeconfig, Path::new(socket)).await,
        [gangs, members, nodes, others] => {
            let number = |text: &str| text.parse::<usize>().unwrap();
            measure(number(gangs), number(members), nodes.parse().unwrap(), number(others)).await;
        }
        _ => panic!("usage: cargo bench --bench pods -- GANGS MEMBERS NODES OTHERS"),
    }
}

async fn make(client: &Client, pods: Vec<Pod>) {
    let api: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let create = |pod: Pod| {
        let api = api.clone();
        async move { drop(api.create(&PostParams::default(), &pod).await.unwrap()) }
    };
    stream::iter(pods).for_each_concurrent(16, create).await;
}

/// Waits until `count` pods are bound. Returns for each how long after it was first seen; zero if it was bound by then.
async fn until_bound(client: &Client, count: usize) -> Vec<Duration> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let mut events = watcher(pods, watcher::Config::default()).default_backoff().applied_objects().boxed();
    let mut seen: BTreeMap<String, Instant> = BTreeMap::new();
    let mut took: BTreeMap<String, Duration> = BTreeMap::new();
    while took.len() < count {
        let Some(Ok(pod)) = events.next().await else { continue };
        let (name, now) = (pod.name_any(), Instant::now());
        let first = *seen.entry(name.clone()).or_insert(now);
        if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) {
            took.entry(name).or_insert(now - first);
        }
    }
    took.into_values().collect()
}

async fn until_one_more_is_bound(client: &Client, name: &str) -> Duration {
    let begin = Instant::now();
    make(client, vec![pod(name, 1, &json!({}))]).await;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let is_bound = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.spec.as_ref().unwrap().node_name.is_some());
    kube::runtime::wait::await_condition(pods, name, is_bound).await.unwrap();
    begin.elapsed()
}

/// What the bridge costs while nothing happens.
async fn idle(bridge: &BridgeProcess) {
    const IDLE: Duration = Duration::from_secs(20);
    // What has just happened is still shown.
    sleep(Duration::from_secs(5)).await;
    let used = bridge.used();
    sleep(IDLE).await;
    println!("idle for {IDLE:?}: {:.2} s of processor time", (bridge.used() - used) as f64 / 100.0);
}

async fn measure(gangs: usize, members: usize, nodes: u32, others: usize) {
    let flux: PathBuf = needs::flux_prefix().join("bin/flux");
    let cluster = BareCluster::up(&[]);
    let base = tempfile::tempdir().unwrap();
    let kubeconfig = base.path().join("kubeconfig");
    fs::write(&kubeconfig, cluster.kubeconfig()).unwrap();
    let client = client(&cluster.kubeconfig()).await;
    make_account(&client).await;
    let names: Vec<_> = (0..nodes).map(|rank| format!("machine{rank}")).collect();
    stream::iter(&names).for_each_concurrent(16, async |name| drop(make_node(&client, name, CORES).await)).await;
    configure(&flux, base.path(), nodes, &format!("0-{}", CORES - 1));
    let mut broker = start_lead(&flux, base.path());
    until_allocated(&broker, 0).await;
    let kubelets = tokio::spawn(kubelets(client.clone()));
    let mut bridge = BridgeProcess::start(&kubeconfig, &broker.socket());
    until_one_more_is_bound(&client, "first").await;
    println!("{nodes} nodes of {CORES} cores, {gangs} gangs of {members} pods");

    let all = gangs * members;
    let pods = (0..all).map(|number| {
        let gang = format!("g{}", number / members);
        let annotations = json!({"distribute.flux-framework.org/gang": gang,
                                 "distribute.flux-framework.org/gang-size": members.to_string()});
        pod(&format!("{gang}-{}", number % members), 1, &annotations)
    });
    let begin = Instant::now();
    let bound = async {
        let took = until_bound(&client, all + 1).await;
        (took, begin.elapsed())
    };
    let made = async {
        make(&client, pods.collect()).await;
        println!("made after {:.1} s", begin.elapsed().as_secs_f64());
    };
    let ((mut took, elapsed), ()) = futures::join!(bound, made);
    took.sort_unstable();
    let percentile = |percent: usize| took[(took.len() - 1) * percent / 100].as_secs_f64();
    let rate = all as f64 / elapsed.as_secs_f64();
    println!(
        "bound after {:.1} s: {rate:.0} pods/s; from seen to bound: median {:.1} s, p99 {:.1} s",
        elapsed.as_secs_f64(),
        percentile(50),
        percentile(99)
    );
    println!("the bridge has had {} MiB", bridge.memory());

    idle(&bridge).await;

    let begin = Instant::now();
    drop(broker);
    broker = start_lead(&flux, base.path());
    until_allocated(&broker, all + 1).await;
    let held = begin.elapsed();
    until_one_more_is_bound(&client, "after-the-broker").await;
    println!(
        "broker killed: all cores held again after {:.1} s, the queue open after {:.1} s",
        held.as_secs_f64(),
        begin.elapsed().as_secs_f64()
    );

    let theirs = (0..others).map(|number| {
        let mut pod = pod(&format!("other{number}"), 1, &json!({}));
        pod.spec.as_mut().unwrap().scheduler_name = Some("another".into());
        pod
    });
    make(&client, theirs.collect()).await;
    drop(bridge);
    bridge = BridgeProcess::start(&kubeconfig, &broker.socket());
    let took = until_one_more_is_bound(&client, "after-the-bridge").await;
    println!("bridge killed beside {} pods: the next pod bound after {:.1} s", all + others, took.as_secs_f64());
    println!("the bridge has had {} MiB", bridge.memory());
    idle(&bridge).await;
    kubelets.abort();
}
