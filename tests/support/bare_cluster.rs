//! A real API server without nodes, and Nodes and kubelets that are played.

use std::{
    fs::Permissions,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

use bridge::{Bridge, Told};
use futures::{StreamExt, future::BoxFuture};
use k8s_openapi::{
    api::core::v1::{Node, Pod, ServiceAccount},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{WatchStreamExt, watcher},
};
use model::fixture::roster;
use pods::world::Settings;
use serde_json::json;
use tokio::sync::watch;

pub const NAMESPACE: &str = "default";

/// A real API server; ended when dropped.
pub struct BareCluster(tempfile::TempDir);

impl BareCluster {
    /// With these further arguments for kube-apiserver.
    pub fn up(arguments: &[&str]) -> Self {
        let cluster = Self(tempfile::tempdir().unwrap());
        let assets = assets(cluster.0.path(), arguments);
        let file = cluster.0.path().join("instance.yaml");
        let spec = json!({"nodes": {"selector": {"matchLabels": {"no": "node"}}}});
        let instance = json!({"apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance",
                              "metadata": {"name": "flux"}, "spec": spec});
        std::fs::write(&file, instance.to_string()).unwrap();
        let mut up = cluster.command(&["up", "--no-wait", "--api", "real", "--nodes", "1", "--instance"]);
        done(up.arg(file).env("KUBEBUILDER_ASSETS", assets));
        cluster
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
        command.arg("local").args(words).stdin(Stdio::null());
        command.env("FLUX_DISTRIBUTE_LOCAL_DIR", self.0.path().join("state"));
        command
    }

    /// What [`client`] takes.
    pub fn kubeconfig(&self) -> String {
        done(&mut self.command(&["kubeconfig"]))
    }
}

impl Drop for BareCluster {
    fn drop(&mut self) {
        done(&mut self.command(&["down"]));
    }
}

/// Runs `command`, which must succeed, and returns what it prints.
fn done(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Where kube-apiserver is, or in `directory` a script of that name that starts it with further arguments.
fn assets(directory: &Path, arguments: &[&str]) -> PathBuf {
    let assets = PathBuf::from(std::env::var_os("KUBEBUILDER_ASSETS").unwrap());
    if arguments.is_empty() {
        return assets;
    }
    let (program, script) = (assets.join("kube-apiserver"), directory.join("kube-apiserver"));
    let text = format!("#!/bin/sh\nexec '{}' {} \"$@\"\n", program.display(), arguments.join(" "));
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    symlink(assets.join("etcd"), directory.join("etcd")).unwrap();
    directory.to_owned()
}

pub async fn client(kubeconfig: &str) -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig).unwrap();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    config.proxy_url = None;
    Client::try_from(config).unwrap()
}

/// The account that pods run as, which nobody else makes here.
pub async fn make_account(client: &Client) {
    let account = ServiceAccount { metadata: named("default"), ..ServiceAccount::default() };
    let _ = Api::namespaced(client.clone(), NAMESPACE).create(&PostParams::default(), &account).await;
}

/// Makes a Ready Node of so many cores. Returns its uid.
pub async fn make_node(client: &Client, name: &str, cores: u32) -> String {
    let nodes: Api<Node> = Api::all(client.clone());
    let made = nodes.create(&PostParams::default(), &Node { metadata: named(name), ..Node::default() }).await.unwrap();
    let amount = json!({"cpu": cores.to_string(), "memory": "8Gi", "pods": "110", "ephemeral-storage": "10Gi"});
    let ready = json!([{"type": "Ready", "status": "True", "reason": "Test", "message": ""}]);
    let status = json!({"status": {"capacity": amount, "allocatable": amount, "conditions": ready}});
    nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    // The API server gives a new Node the taint of one that is not ready; nobody takes it off here.
    let untainted = json!({"spec": {"taints": null}});
    nodes.patch(name, &PatchParams::default(), &Patch::Merge(untainted)).await.unwrap();
    made.uid().unwrap()
}

/// Takes up pods that are bound, and removes those that are deleted: for all nodes at once.
pub async fn kubelets(client: Client) {
    let pods: Api<Pod> = Api::namespaced(client, NAMESPACE);
    let events = watcher(pods.clone(), watcher::Config::default()).default_backoff().applied_objects();
    let take_up = |event: Result<Pod, watcher::Error>| {
        let pods = pods.clone();
        async move {
            let Ok(pod) = event else { return };
            let is_bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
            let name = pod.name_any();
            if is_bound && pod.metadata.deletion_timestamp.is_some() {
                let _ = pods.delete(&name, &DeleteParams::default().grace_period(0)).await;
            } else if is_bound && pod.status.as_ref().is_none_or(|status| status.start_time.is_none()) {
                let now = k8s_openapi::jiff::Timestamp::now();
                let status = json!({"status": {"phase": "Running", "startTime": now}});
                let _ = pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await;
            }
        }
    };
    events.for_each_concurrent(8, take_up).await;
}

/// A bridge for the broker at `socket`; rank N is the Node machineN of so many cores, with the N-th of `uids`. The sender has to outlive
/// the bridge.
pub fn bridge_to(
    client: Client,
    socket: PathBuf,
    uids: &[String],
    cores: u32,
    settings: Settings,
) -> (watch::Sender<Told>, Bridge) {
    let names: Vec<_> = (0..uids.len()).map(|rank| format!("machine{rank}")).collect();
    let members: Vec<_> = names.iter().map(|name| (name.as_str(), cores)).collect();
    let mut roster = roster(u32::try_from(uids.len()).unwrap(), &members);
    for (entry, uid) in roster.ranks.values_mut().zip(uids) {
        entry.member.as_mut().unwrap().uid.clone_from(uid);
    }
    let available = roster.ranks.keys().copied().collect();
    let (roster, nodes) = (Arc::new(roster), api::Nodes::default());
    let (sender, told) =
        watch::channel(Told { roster, is_closing: false, settings, nodes, available, drained: api::IdSet::default() });
    let connect = move || -> BoxFuture<'static, _> {
        let socket = socket.clone();
        Box::pin(async move { broker::rfc3::Client::connect(&socket).await })
    };
    let report = watch::channel(bridge::Reported::default()).0;
    let bridge = Bridge {
        client,
        connect: Box::new(connect),
        told,
        may_start_queues: Box::new(|| true),
        identity: "pod-of-the-lead".into(),
        report,
    };
    (sender, bridge)
}

/// A pod for Flux that asks for so many cores.
pub fn pod(name: &str, cores: u32, annotations: &serde_json::Value) -> Pod {
    let pod = json!({
        "metadata": {"name": name, "annotations": annotations},
        "spec": {
            "schedulerName": "flux",
            "automountServiceAccountToken": false,
            "containers": [{"name": "c", "image": "none", "resources": {"requests": {"cpu": cores.to_string()}}}],
        },
    });
    serde_json::from_value(pod).unwrap()
}

fn named(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }
}
