//! How soon Flux holds what pods of another scheduler use of many nodes, and what the lead's agent needs for that: a real API server and a real
//! Flux, with simulated nodes. The bridge runs in a process of its own, as it does in the lead's agent.
//!
//!     FLUX_PREFIX=… KUBEBUILDER_ASSETS=… cargo bench --bench account -- NODES PODS
//!
//! PODS: how many pods each node has. One of them is a DaemonSet's, which is rolled out in the end. Prints a line of JSON.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[allow(dead_code)]
#[path = "../tests/support/bare_cluster.rs"]
mod bare_cluster;
#[path = "../tests/support/needs.rs"]
mod needs;
#[path = "../tests/support/real_bridge.rs"]
mod real_bridge;
#[allow(dead_code)]
#[path = "../tests/support/real_broker.rs"]
mod real_broker;

use std::{fs, path::Path, path::PathBuf, time::Instant};

use bare_cluster::{BareCluster, NAMESPACE, client, make_account, make_node};
use futures::{StreamExt, stream};
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use real_bridge::{BridgeProcess, CORES, run_bridge, start_lead, until_allocated};
use real_broker::configure;
use serde_json::json;

/// Requests to the API server at a time.
const AT_ONCE: usize = 32;
/// What each pod requests, in thousandths of a CPU.
const EACH: u64 = 200;
/// What the DaemonSet's pod requests after the rollout: another core.
const AFTER_ROLLOUT: u64 = EACH + 1000;

#[tokio::main]
async fn main() {
    let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench").collect::<Vec<_>>();
    let arguments = arguments.iter().map(String::as_str).collect::<Vec<_>>();
    match arguments[..] {
        ["bridge", kubeconfig, socket] => run_bridge(kubeconfig, Path::new(socket)).await,
        [nodes, pods] => measure(nodes.parse().unwrap(), pods.parse().unwrap()).await,
        _ => panic!("usage: cargo bench --bench account -- NODES PODS"),
    }
}

/// Makes a pod of another scheduler that runs on `machineNODE`.
async fn run_pod(pods: &Api<Pod>, node: u32, name: &str, milli: u64) {
    let requests = json!({"requests": {"cpu": format!("{milli}m"), "memory": "16Mi"}});
    let pod = json!({
        "metadata": {"name": name, "labels": {"app": "web", "pod-template-hash": "5d8f7c6b9"}},
        "spec": {
            "nodeName": format!("machine{node}"),
            "automountServiceAccountToken": false,
            "containers": [{"name": "web", "image": "registry.example.org/team/web:1.2.3", "resources": requests}],
        },
    });
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    let status = Patch::Merge(json!({"status": {"phase": "Running", "startTime": Timestamp::now()}}));
    pods.patch_status(name, &PatchParams::default(), &status).await.unwrap();
}

/// How many cores pods use that request so many thousandths of a CPU of one node.
fn cores(milli: u64) -> usize {
    usize::try_from(milli.saturating_sub(pods::world::Settings::default().tolerance).div_ceil(1000)).unwrap()
}

async fn measure(nodes: u32, each: u32) {
    let flux: PathBuf = needs::flux_prefix().join("bin/flux");
    let cluster = BareCluster::up(&[]);
    let base = tempfile::tempdir().unwrap();
    let kubeconfig = base.path().join("kubeconfig");
    fs::write(&kubeconfig, cluster.kubeconfig()).unwrap();
    let client: Client = client(&cluster.kubeconfig()).await;
    make_account(&client).await;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let begin = Instant::now();
    stream::iter(0..nodes)
        .for_each_concurrent(AT_ONCE, async |node| drop(make_node(&client, &format!("machine{node}"), CORES).await))
        .await;
    let all = (0..nodes).flat_map(|node| (0..each).map(move |number| (node, number)));
    stream::iter(all)
        .for_each_concurrent(AT_ONCE, async |(node, number)| {
            run_pod(&pods, node, &format!("web-{node}-{number}"), EACH).await;
        })
        .await;
    eprintln!("{nodes} nodes with {each} pods each, made in {:.0} s", begin.elapsed().as_secs_f64());
    configure(&flux, base.path(), nodes, &format!("0-{}", CORES - 1));
    let broker = start_lead(&flux, base.path());
    until_allocated(&broker, 0).await;

    let begin = Instant::now();
    let bridge = BridgeProcess::start(&kubeconfig, &broker.socket());
    let size = usize::try_from(nodes).unwrap();
    let used = EACH * u64::from(each);
    until_allocated(&broker, cores(used) * size).await;
    let first = begin.elapsed();

    let begin = Instant::now();
    stream::iter(0..nodes)
        .for_each_concurrent(AT_ONCE, async |node| {
            let parameters = DeleteParams::default().grace_period(0);
            pods.delete(&format!("web-{node}-0"), &parameters).await.unwrap();
            run_pod(&pods, node, &format!("daemon-{node}"), AFTER_ROLLOUT).await;
        })
        .await;
    let rolled_out = Instant::now();
    until_allocated(&broker, cores(used - EACH + AFTER_ROLLOUT) * size).await;
    let result = json!({
        "first_secs": first.as_secs_f64(), "rollout_secs": (rolled_out - begin).as_secs_f64(),
        "followed_secs": rolled_out.elapsed().as_secs_f64(), "memory_mib": bridge.memory(),
        "cpu_secs": bridge.used() as f64 / 100.0,
    });
    println!("{result}");
}
