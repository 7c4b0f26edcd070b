//! A cluster of simulated nodes that is taken down at the end, and what is asked of it.

use std::{
    collections::BTreeMap,
    fs,
    future::Future,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Condvar, Mutex, OnceLock, PoisonError, mpsc},
    thread::sleep,
    time::{Duration, Instant},
};

use crate::{
    needs::{self, FLUX_NODES, NODES, Need, flux_prefix, skips_without},
    traces,
};
use api::{CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, FluxInstance, FluxNode, INSTANCE, METRICS_PORT, NAMESPACE, Roster};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Node},
};
use kube::{
    Api, Client, Config,
    api::{ListParams, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use reqwest::RequestBuilder;
use serde::Deserialize;
use serde_json::Value;

/// For whatever takes seconds on an idle machine.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// For nodes that install packages: ten of them have taken more than [`PATIENCE`] on a busy machine.
const PATIENCE_WITH_NODES: Duration = Duration::from_mins(4);

/// One node as `local status` shows it.
#[derive(Deserialize, Debug, Clone)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    pub name: String,
    pub agent_pid: Option<i32>,
    pub restarts: u32,
    pub phase: Option<String>,
    pub rank: Option<u32>,
}

impl NodeStatus {
    pub fn is_online(&self) -> bool {
        self.phase.as_deref() == Some("Online")
    }
}

/// A broker that runs: its rank, and its pid on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broker {
    pub rank: u32,
    pub pid: i32,
}

/// The cluster.
pub struct Cluster {
    directory: tempfile::TempDir,
    bridge: String,
    runtime: tokio::runtime::Runtime,
    client: Client,
    jobs: Mutex<u32>,
    _place: Place,
    _limit: Limit,
}

impl Cluster {
    /// All nodes are online. None if the test can't run.
    pub fn up(nodes: u32, options: &[&str]) -> Option<Self> {
        let bundle = bundle()?;
        Some(Self::start(nodes, &[&["--bundle", bundle.to_str().unwrap()], options].concat()))
    }

    /// From another package source.
    pub fn start(nodes: u32, options: &[&str]) -> Self {
        let cluster = Self::begin(nodes, options);
        cluster.all_online(nodes);
        cluster
    }

    /// The nodes have booted, and nothing is waited for.
    pub fn begin(nodes: u32, options: &[&str]) -> Self {
        let place = Place::take();
        let limit = Limit::begin();
        let directory = tempfile::tempdir().unwrap();
        let api: &[&str] = if options.contains(&"--api") { &[] } else { &["--api", "embedded"] };
        let nodes_text = nodes.to_string();
        let words = [&["up", "--no-wait", "--nodes", &nodes_text], api, options].concat();
        let output = local(directory.path(), &words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let kubeconfig = Kubeconfig::read_from(state(directory.path()).join("kubeconfig")).unwrap();
        let client = runtime.block_on(async {
            let options = KubeConfigOptions::default();
            let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
            // The machine's own may not lead to its bridges.
            config.proxy_url = None;
            Client::try_from(config).unwrap()
        });
        let bridge = traces::bridge(&state(directory.path()));
        Self { directory, bridge, runtime, client, jobs: Mutex::default(), _place: place, _limit: limit }
    }

    /// The state directory.
    pub fn state(&self) -> PathBuf {
        state(self.directory.path())
    }

    pub fn bridge(&self) -> &str {
        &self.bridge
    }

    /// A node's root as the machine sees it; without what is mounted in it.
    pub fn root(&self, node: &str) -> PathBuf {
        self.state().join("nodes").join(node).join("root")
    }

    pub fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    pub fn command(&self, words: &[&str]) -> Command {
        local(self.directory.path(), words)
    }

    /// What a `local` command says; it must succeed.
    pub fn must(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "local {words:?}: {} {said}", output.status);
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    #[allow(dead_code, reason = "each target takes what it needs")]
    /// Where `node` is reached, from this machine too.
    pub fn address(&self, node: &str) -> String {
        let addresses = self.wait(Api::<Node>::all(self.client()).get(node)).unwrap().status.unwrap().addresses;
        addresses.unwrap().into_iter().find(|address| address.type_ == "InternalIP").unwrap().address
    }

    #[allow(dead_code, reason = "each target takes what it needs")]
    /// What the agent of `node` answers to a Prometheus with that token, or without one: status and body.
    pub fn scrape(&self, node: &str, token: Option<&str>) -> (u16, String) {
        let client = reqwest::Client::builder().danger_accept_invalid_certs(true).no_proxy().build().unwrap();
        let ask = client.get(format!("https://{}:{METRICS_PORT}/metrics", self.address(node)));
        let ask = ask.header("accept", "application/openmetrics-text").timeout(PATIENCE);
        let ask = token.into_iter().fold(ask, RequestBuilder::bearer_auth);
        self.wait(async {
            let answer = ask.send().await.unwrap();
            (answer.status().as_u16(), answer.text().await.unwrap())
        })
    }

    /// What a command in a node says; it must succeed.
    pub fn exec(&self, node: &str, words: &[&str]) -> String {
        self.must(&[&["exec", node, "--"], words].concat())
    }

    /// What a command says; None where it fails, as `flux resource` does for the moment in which the lead takes in a change.
    pub fn ask(&self, node: &str, words: &[&str]) -> Option<String> {
        let output = self.run(&[&["exec", node, "--"], words].concat());
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }

    pub fn nodes(&self) -> Vec<NodeStatus> {
        serde_json::from_str(&self.must(&["status", "--output", "json"])).unwrap()
    }

    pub fn node(&self, name: &str) -> NodeStatus {
        self.nodes().into_iter().find(|node| node.name == name).unwrap_or_else(|| panic!("{name} is not there"))
    }

    pub fn ranks(&self) -> BTreeMap<String, Option<u32>> {
        self.nodes().into_iter().map(|node| (node.name, node.rank)).collect()
    }

    /// The name of the node that holds `rank`.
    pub fn holder(&self, rank: u32) -> String {
        let found = self.nodes().into_iter().find(|node| node.rank == Some(rank));
        found.unwrap_or_else(|| panic!("no node holds rank {rank}")).name
    }

    /// The brokers that run, by node: from the machine's processes, not from what anybody says of them.
    pub fn brokers(&self) -> BTreeMap<String, Broker> {
        let rank_of = |pid: i32| {
            let process = Path::new("/proc").join(pid.to_string());
            // A zombie is no broker.
            fs::read_link(process.join("exe")).ok()?;
            fs::read_to_string(process.join("comm")).ok()?.trim().strip_prefix("flux-broker-")?.parse().ok()
        };
        let processes = traces::processes(&self.bridge).into_iter();
        processes.filter_map(|(node, pid)| Some((node, Broker { rank: rank_of(pid)?, pid }))).collect()
    }

    /// Waits until `look` finds something.
    pub fn until<T>(&self, what: &str, look: impl FnMut() -> Option<T>) -> T {
        self.within(PATIENCE, what, look)
    }

    fn within<T>(&self, patience: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now() + patience;
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() <= end, "waited in vain for {what}:\n{}", self.must(&["status"]));
            sleep(Duration::from_millis(100));
        }
    }

    /// Waits until there are `count` nodes, all of them online, with an agent that lives.
    pub fn all_online(&self, count: u32) {
        self.within(PATIENCE_WITH_NODES, &format!("{count} nodes online"), || {
            let nodes = self.nodes();
            let all = nodes.iter().all(|node| node.is_online() && node.agent_pid.is_some());
            (all && nodes.len() == count as usize).then_some(())
        });
    }

    /// Each agent takes its FluxNode away when its host is clean.
    pub fn until_deleted(&self) {
        self.until("the FluxNodes' end", || {
            let left = self.wait(self.api::<FluxNode>().list(&ListParams::default())).unwrap();
            left.items.is_empty().then_some(())
        });
    }

    #[allow(dead_code, reason = "each target takes what it needs")]
    /// What the nodes have asked the embedded API server for.
    pub fn calls(&self) -> Vec<apiserver::Call> {
        let request = http::Request::get(apiserver::CALLS).body(Vec::new()).unwrap();
        self.wait(self.client.request(request)).unwrap()
    }

    /// Waits for an API call.
    pub fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    #[allow(dead_code, reason = "each target takes what it needs")]
    /// Has `future` run until the cluster is down.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(future);
    }

    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Objects of a kind in our namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client(), NAMESPACE)
    }

    pub fn instance(&self) -> FluxInstance {
        self.wait(self.api::<FluxInstance>().get(INSTANCE)).unwrap()
    }

    /// None if there is none, or it can't be read.
    pub fn roster(&self) -> Option<Roster> {
        let map = self.wait(self.api::<ConfigMap>().get_opt(CONFIGMAP_ROSTER)).unwrap()?;
        serde_json::from_str(&map.data?[CONFIGMAP_ROSTER_KEY]).ok()
    }

    /// The FluxInstance, changed by a merge patch.
    pub fn patch(&self, patch: Value) -> FluxInstance {
        let patch = Patch::Merge(patch);
        self.wait(self.api::<FluxInstance>().patch(INSTANCE, &PatchParams::default(), &patch)).unwrap()
    }

    /// Changes a Node of Kubernetes in the same way.
    pub fn patch_node(&self, node: &str, patch: Value) {
        let nodes = Api::<Node>::all(self.client());
        self.wait(nodes.patch(node, &PatchParams::default(), &Patch::Merge(patch))).unwrap();
    }

    /// The node whose agent is the planner.
    pub fn planner(&self) -> String {
        self.until("a planner", || {
            let lease = self.wait(self.api::<Lease>().get("flux-planner")).ok()?;
            let holder = format!("POD_NAME={}\0", lease.spec?.holder_identity?);
            let is_holder = |pid| fs::read_to_string(format!("/proc/{pid}/environ")).is_ok_and(|e| e.contains(&holder));
            self.nodes().into_iter().find(|node| node.agent_pid.is_some_and(is_holder)).map(|node| node.name)
        })
    }

    /// The end of each agent's log.
    pub fn last_words(&self) -> String {
        let mut words = String::new();
        for node in fs::read_dir(self.state().join("nodes")).into_iter().flatten().flatten() {
            let log = fs::read_to_string(node.path().join("agent.log")).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(30)..].join("\n");
            words.push_str(&format!("the last words of {}'s agent:\n{last}\n", node.file_name().display()));
        }
        words
    }

    /// What Flux knows of a job: its events, those of its execution, and what it or its shell has said.
    fn told_of(&self, id: &str) -> String {
        let each = ["main", "exec", "output"]
            .map(|path| self.ask("node1", &["flux", "job", "eventlog", "-p", path, id]).unwrap_or_default());
        each.join("\n")
    }

    /// Starts a job that runs until [`Job::finish`]; returns once it runs. `shape`: options of flux-submit(1).
    pub fn job(&self, shape: &[&str]) -> Job<'_> {
        let number = {
            let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
            *jobs += 1;
            *jobs
        };
        let signal = format!("root/finish-{number}");
        let script = format!("until test -e /{signal}; do sleep 0.3; done");
        let words = [&["flux", "submit"], shape, &["sh", "-c", &script]].concat();
        let ids: Vec<String> = self.exec("node1", &words).lines().map(str::to_owned).collect();
        for id in &ids {
            let waits = ["flux", "job", "wait-event", "-t", "60", "-W", "-p", "exec", id, "shell.start"];
            assert!(self.ask("node1", &waits).is_some(), "job {id} does not start:\n{}", self.told_of(id));
        }
        Job { cluster: self, ids, signal }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.last_words());
        }
        let down = self.command(&["down"]).output();
        if !down.as_ref().is_ok_and(|output| output.status.success()) {
            // What is in it tells `local down` what to take down.
            self.directory.disable_cleanup(true);
            eprintln!("{} is not down: {down:?}", self.state().display());
        }
    }
}

/// One or more jobs of one submit.
pub struct Job<'a> {
    cluster: &'a Cluster,
    ids: Vec<String>,
    signal: String,
}

impl Job<'_> {
    /// Lets those end that run on `node`.
    pub fn finish_on(&self, node: &str) {
        fs::write(self.cluster.root(node).join(&self.signal), "").unwrap();
    }

    /// Lets them end.
    pub fn let_end(&self) {
        for node in self.cluster.nodes() {
            self.finish_on(&node.name);
        }
    }

    /// Lets them end; each must have been started once and end well, without any exception on its way.
    pub fn finish(self) {
        self.let_end();
        for id in &self.ids {
            self.cluster.exec("node1", &["flux", "job", "wait-event", "-t", "60", id, "clean"]);
            let events = self.cluster.exec("node1", &["flux", "job", "eventlog", id]);
            assert!(ran_well(&events), "{events}");
        }
    }
}

/// By its eventlog (RFC 21), a job was started once and ended well, without any exception on its way.
pub fn ran_well(events: &str) -> bool {
    let starts = events.lines().filter(|line| line.ends_with(" start")).count();
    let finish = events.lines().find(|line| line.contains(" finish ")).unwrap_or_default();
    !events.contains("exception") && starts == 1 && finish.ends_with("status=0")
}

#[allow(dead_code, reason = "each target takes what it needs")]
/// A node's cable, until it is plugged in again.
pub struct Unplugged {
    link: String,
}

impl Unplugged {
    pub fn new(cluster: &Cluster, node: &str) -> Self {
        let link = format!("{}n{}", cluster.bridge(), node.strip_prefix("node").unwrap());
        assert!(set_link(&link, "down"));
        Self { link }
    }
}

impl Drop for Unplugged {
    fn drop(&mut self) {
        assert!(set_link(&self.link, "up") || std::thread::panicking());
    }
}

fn set_link(link: &str, state: &str) -> bool {
    Command::new("ip").args(["link", "set", link, state]).status().is_ok_and(|status| status.success())
}

struct Place;

static FREE: (Mutex<u32>, Condvar) = (Mutex::new(crate::CLUSTERS_AT_ONCE), Condvar::new());

impl Place {
    fn take() -> Self {
        let free = FREE.0.lock().unwrap_or_else(PoisonError::into_inner);
        *FREE.1.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner) -= 1;
        Self
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *FREE.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        FREE.1.notify_one();
    }
}

/// Ends this test program with the test's name and the machine's processes if it is not dropped within `crate::LONGEST`: a test
/// that hangs must not keep the others' results from whoever waits for them.
struct Limit(#[allow(dead_code, reason = "its end is what counts")] mpsc::Sender<()>);

impl Limit {
    fn begin() -> Self {
        let (alive, dropped) = mpsc::channel();
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        std::thread::spawn(move || {
            if dropped.recv_timeout(crate::LONGEST) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("test {test} is not over after {} s; what runs on this machine:", crate::LONGEST.as_secs());
                let _ = Command::new("ps").args(["-e", "-o", "pid,ppid,stat,etime,wchan:20,args"]).status();
                eprintln!("test {test} ... FAILED");
                std::process::exit(1);
            }
        });
        Self(alive)
    }
}

fn state(directory: &Path) -> PathBuf {
    directory.join("state")
}

fn local(directory: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
    command.arg("local").args(words).stdin(Stdio::null());
    command.env("FLUX_DISTRIBUTE_LOCAL_DIR", state(directory)).env_remove("FLUX_DISTRIBUTE_LOCAL_AGENT");
    command
}

/// The bundle of the Flux of this machine, made once. None if the test can't run.
pub fn bundle() -> Option<&'static Path> {
    static BUNDLE: OnceLock<PathBuf> = OnceLock::new();
    if skips_without(FLUX_NODES) {
        return None;
    }
    Some(BUNDLE.get_or_init(|| pack(&flux_prefix(), &flux_prefix(), "flux.tar.gz")))
}

/// The channel for clusters that install packages. None if the test can't run.
pub fn channel() -> Option<String> {
    if skips_without(NODES.into_iter().chain([Need::Channel])) { None } else { needs::channel() }
}

/// A bundle of the Flux in `tree`, which was built for `prefix`. Tests have no common end at which it could be removed:
/// under one name it is replaced by the next run.
pub fn pack(tree: &Path, prefix: &Path, name: &str) -> PathBuf {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut create = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
    create.args(["bundle", "create", "--from-prefix"]).arg(tree).arg("--compiled-prefix").arg(prefix);
    create.arg("--out").arg(&file).stdout(Stdio::null());
    assert!(create.status().unwrap().success(), "no bundle can be made of {}", tree.display());
    file
}
