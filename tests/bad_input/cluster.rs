//! A local cluster that several tests use one after the other; each begins without an instance.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use api::{
    ANNOTATION_CONSUMED, CONFIGMAP_DEFAULT, FluxInstance, FluxNode, INSTANCE, NAMESPACE, NodePhase, SECRET_CURVE,
};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        core::v1::{ConfigMap, Node, Secret},
        events::v1::Event,
    },
};
use kube::{
    Api, Client, Config, Resource, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{
        WatchStreamExt,
        wait::await_condition,
        watcher::{self, watcher},
    },
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::needs::{NODES, Need, skips_without};

/// How long a test waits for what usually takes seconds. A channel is asked for several files, and for each up to five times.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// Waits for what the API server acts by a moment after it was made, as a policy or a quota, and sends no event for.
pub async fn until_true(what: &str, mut look: impl AsyncFnMut() -> bool) {
    let looking = async {
        while !look().await {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, looking).await.is_ok(), "in vain: {what}");
}

/// A spec that selects no node, and whose packages nothing fetches.
pub fn no_nodes() -> Value {
    let bundle = json!({"url": "http://127.0.0.1:1/flux.tar.gz", "sha256": "0".repeat(64)});
    json!({"nodes": {"selector": {"matchLabels": {"nobody": "here"}}}, "packages": {"bundle": bundle}})
}

fn instance(spec: &Value) -> Value {
    json!({
        "apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance",
        "metadata": {"name": INSTANCE}, "spec": spec,
    })
}

static CLUSTERS: Mutex<BTreeMap<(u32, &str), Weak<Cluster>>> = Mutex::new(BTreeMap::new());

pub struct Cluster {
    directory: tempfile::TempDir,
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Cluster {
    fn shared(nodes: u32, api: &'static str) -> Arc<Self> {
        let mut clusters = CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cluster) = clusters.get(&(nodes, api)).and_then(Weak::upgrade) {
            return cluster;
        }
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("instance.yaml");
        fs::write(&file, instance(&no_nodes()).to_string()).unwrap();
        let cluster = Arc::new(Self { directory, turn: Arc::default() });
        let (count, file) = (nodes.to_string(), file.display().to_string());
        cluster.must(&["up", "--no-wait", "--api", api, "--nodes", &count, "--instance", &file]);
        clusters.insert((nodes, api), Arc::downgrade(&cluster));
        cluster
    }

    fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
        command.arg("local").args(words).stdin(Stdio::null());
        command.env("FLUX_DISTRIBUTE_LOCAL_DIR", self.state());
        command
    }

    pub fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    pub fn must(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "local {words:?}: {} {said}", output.status);
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(self.state().join("daemon.log")).unwrap_or_default();
            eprintln!("daemon.log: {log}");
        }
        let down = self.run(&["down"]);
        eprintln!("{}{}", String::from_utf8_lossy(&down.stdout), String::from_utf8_lossy(&down.stderr));
    }
}

/// One test's turn on a cluster.
pub struct Case {
    pub cluster: Arc<Cluster>,
    pub client: Client,
    _turn: tokio::sync::OwnedMutexGuard<()>,
}

impl Case {
    /// None if the test can't run.
    pub async fn on(nodes: u32) -> Option<Self> {
        Self::with_api(nodes, "embedded").await
    }

    pub async fn with_api(nodes: u32, api: &'static str) -> Option<Self> {
        let api_server = (api == "real").then_some(Need::ApiServer);
        if skips_without(NODES.into_iter().chain(api_server)) {
            return None;
        }
        let cluster = Cluster::shared(nodes, api);
        let turn = cluster.turn.clone().lock_owned().await;
        let _ = rustls::crypto::ring::default_provider().install_default();
        let kubeconfig = Kubeconfig::from_yaml(&cluster.must(&["kubeconfig"])).unwrap();
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
        config.proxy_url = None;
        let case = Self { cluster, client: Client::try_from(config).unwrap(), _turn: turn };
        case.clear().await;
        Some(case)
    }

    /// No instance, and nothing of one.
    async fn clear(&self) {
        // The planner makes the first one; where a test has failed it may never be able to.
        let is_consumed =
            |map: Option<&ConfigMap>| map.is_some_and(|map| map.annotations().contains_key(ANNOTATION_CONSUMED));
        let made = await_condition(self.api(), CONFIGMAP_DEFAULT, is_consumed);
        let _ = tokio::time::timeout(Duration::from_secs(10), made).await;
        let consumed = json!({"metadata": {"annotations": {ANNOTATION_CONSUMED: "by a test"}}});
        let maps = self.api::<ConfigMap>();
        maps.patch(CONFIGMAP_DEFAULT, &PatchParams::default(), &Patch::Merge(consumed)).await.unwrap();
        self.delete_instance().await;
        let _ = self.api::<Secret>().delete(SECRET_CURVE, &DeleteParams::default()).await;
        let mine = DeleteParams::default();
        for event in self.api::<Event>().list(&Default::default()).await.unwrap() {
            let _ = self.api::<Event>().delete(&event.name_any(), &mine).await;
        }
    }

    pub async fn delete_instance(&self) {
        let _ = self.api::<FluxInstance>().delete(INSTANCE, &DeleteParams::default()).await;
        for node in self.api::<FluxNode>().list(&Default::default()).await.unwrap() {
            let name = node.name_any();
            let gone = await_condition(self.api::<FluxNode>(), &name, |node: Option<&FluxNode>| node.is_none());
            let gone = tokio::time::timeout(PATIENCE, gone).await;
            assert!(gone.is_ok_and(|gone| gone.is_ok()), "{name} is not clean: {node:?}");
        }
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub async fn try_create(&self, spec: Value) -> Result<FluxInstance, kube::Error> {
        self.api().create(&PostParams::default(), &serde_json::from_value(instance(&spec)).unwrap()).await
    }

    pub async fn create(&self, spec: Value) -> FluxInstance {
        self.try_create(spec).await.unwrap()
    }

    pub async fn try_patch(&self, spec: Value) -> Result<FluxInstance, kube::Error> {
        self.api().patch(INSTANCE, &PatchParams::default(), &Patch::Merge(json!({ "spec": spec }))).await
    }

    pub async fn patch(&self, spec: Value) {
        self.try_patch(spec).await.unwrap();
    }

    pub async fn patch_node(&self, node: &str, patch: Value) {
        let nodes = Api::<Node>::all(self.client.clone());
        nodes.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    /// Waits until the object is as it should be.
    pub async fn until<K>(&self, name: &str, what: &str, holds: impl Fn(&K) -> bool) -> K
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + 'static,
    {
        let condition = |object: Option<&K>| object.is_some_and(&holds);
        match tokio::time::timeout(PATIENCE, await_condition(self.api(), name, condition)).await {
            Ok(found) => found.unwrap().unwrap(),
            Err(_) => {
                let nodes = self.api::<FluxNode>().list(&Default::default()).await;
                let instance = self.api::<FluxInstance>().get_opt(INSTANCE).await;
                panic!("{name}: not {what}; {instance:#?}\n{nodes:#?}")
            }
        }
    }

    /// Waits until the object is gone.
    pub async fn goes<K>(&self, name: &str)
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + 'static,
    {
        let gone = await_condition(self.api(), name, |object: Option<&K>| object.is_none());
        assert!(tokio::time::timeout(PATIENCE, gone).await.is_ok_and(|gone| gone.is_ok()), "{name} is still there");
    }

    pub async fn instance_says(&self, words: &str) -> FluxInstance {
        let message = |instance: &FluxInstance| instance.status.as_ref().and_then(|status| status.message.clone());
        self.until(INSTANCE, words, move |instance| message(instance).is_some_and(|message| message.contains(words)))
            .await
    }

    /// Waits until the node is in `phase` with a message that contains `words`.
    pub async fn node_says(&self, node: &str, phase: NodePhase, words: &str) -> String {
        let what = format!("{phase:?}, saying {words}");
        let found = self.until(node, &what, |node: &FluxNode| says(node, &phase, words)).await;
        let message = found.status.unwrap().message.unwrap();
        assert_sentence(&message);
        message
    }

    /// The node has the packages of this digest.
    pub async fn has(&self, node: &str, digest: &str) {
        let has = |node: &FluxNode| {
            node.status.as_ref().is_some_and(|status| {
                status.digest.as_deref().is_some_and(|found| digest.starts_with(found))
                    && status.phase != NodePhase::Failed
            })
        };
        self.until(node, &format!("with packages {digest}"), has).await;
    }

    /// How many times within `time` the object was such.
    pub async fn changes_of<K>(&self, name: &str, time: Duration, such: impl Fn(&K) -> bool) -> usize
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + 'static,
    {
        use futures::StreamExt;
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let seen = watcher(self.api::<K>(), config).applied_objects();
        let such = seen.filter(|object| std::future::ready(object.as_ref().is_ok_and(&such)));
        such.take_until(tokio::time::sleep(time)).count().await
    }

    pub async fn is(&self, node: &str, phase: NodePhase) {
        let is = |node: &FluxNode| node.status.as_ref().is_some_and(|status| status.phase == phase);
        self.until(node, &format!("{phase:?}"), is).await;
    }

    /// A warning was published with these words.
    pub async fn warned(&self, about: &str, words: &str) {
        use futures::StreamExt;
        let mut events = watcher(self.api::<Event>(), watcher::Config::default()).applied_objects().boxed();
        let found = async {
            while let Some(event) = events.next().await {
                let Ok(event) = event else { continue };
                let regarding = event.regarding.unwrap_or_default();
                let warning = event.type_.as_deref() == Some("Warning");
                let is_about = format!("{}/{}", regarding.kind.unwrap_or_default(), regarding.name.unwrap_or_default());
                if warning && is_about == about && event.note.unwrap_or_default().contains(words) {
                    return;
                }
            }
        };
        assert!(
            tokio::time::timeout(PATIENCE, found).await.is_ok(),
            "no warning about {about} with {words}: {:#?}",
            self.notes().await
        );
    }

    pub async fn notes(&self) -> Vec<String> {
        let events = self.api::<Event>().list(&Default::default()).await.unwrap();
        let line = |event: Event| format!("{:?} {:?} {:?}", event.type_, event.reason, event.note);
        events.into_iter().map(line).collect()
    }

    pub fn exec(&self, node: &str, words: &[&str]) -> String {
        self.cluster.must(&[&["exec", node, "--"], words].concat())
    }

    /// What the agent answers to kubelet.
    pub fn is_ready(&self, node: &str) -> bool {
        let agent = self.agent(node).unwrap();
        let mut socket = UnixStream::connect(format!("/proc/{agent}/root/tmp/agent.sock")).unwrap();
        socket.write_all(b"GET /readyz HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        assert!(answer.contains(" 200 ") || answer.contains(" 503 "), "{answer}");
        answer.contains(" 200 ")
    }

    /// Probes, as kubelet does.
    pub async fn becomes_ready(&self, node: &str, ready: bool) {
        let mut probes = tokio::time::interval(Duration::from_millis(300));
        for _ in 0..100 {
            if self.is_ready(node) == ready {
                return;
            }
            probes.tick().await;
        }
        panic!("{node} is ready: {}", !ready);
    }

    /// The process of a node's agent.
    fn agent(&self, node: &str) -> Option<i64> {
        let nodes: Value = serde_json::from_str(&self.cluster.must(&["status", "--output", "json"])).unwrap();
        nodes.as_array().unwrap().iter().find(|one| one["name"] == node)?["agentPid"].as_i64()
    }

    /// Has kubelet start a node's agent anew.
    pub async fn restart_agent(&self, node: &str) {
        let before = self.agent(node).unwrap();
        kill(Pid::from_raw(before.try_into().unwrap()), Signal::SIGTERM).unwrap();
        until_true("another agent", async || self.agent(node).is_some_and(|now| now != before)).await;
    }

    /// A path of the node, seen from the machine.
    pub fn on_node(&self, node: &str, path: &str) -> PathBuf {
        self.cluster.state().join("nodes").join(node).join("root").join(path.trim_start_matches('/'))
    }

    /// Whatever has its final name is whole, and no environment is current.
    pub fn nothing_half_made_is_live(&self, node: &str) {
        let prefix = self.on_node(node, "/opt/flux-distribute");
        assert!(fs::symlink_metadata(prefix.join("current")).is_err(), "an environment is current");
        for environment in fs::read_dir(prefix.join("envs")).into_iter().flatten().flatten() {
            let name = environment.file_name().into_string().unwrap();
            let whole = environment.path().join(".flux-distribute.json").is_file();
            assert!(name.starts_with('.') || whole, "{name} is half-made");
        }
    }
}

pub fn says(node: &FluxNode, phase: &NodePhase, words: &str) -> bool {
    node.status.as_ref().is_some_and(|status| {
        status.phase == *phase && status.message.as_deref().is_some_and(|message| message.contains(words))
    })
}

pub fn assert_sentence(message: &str) {
    assert!(!message.contains('\n') && message.len() < 1000, "not one sentence: {message}");
}
