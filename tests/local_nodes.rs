//! Local mode's nodes, with a stand-in for the agent. Needs root; makes namespaces, cgroups and links, and takes them down.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

#[path = "support/needs.rs"]
mod needs;
#[path = "support/traces.rs"]
mod traces;

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread::sleep,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use needs::{NODES, Need, skips_without};

const PATIENCE: Duration = Duration::from_mins(1);

/// Two clusters that come up at the same time might choose the same network.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

struct Cluster {
    directory: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Cluster {
    /// None if the test can't run.
    fn new() -> Option<Self> {
        if skips_without(NODES) {
            return None;
        }
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Self { directory: tempfile::tempdir().unwrap(), _turn: turn })
    }

    fn up(nodes: u32) -> Option<Self> {
        let cluster = Self::new()?;
        cluster.must(&["up", "--no-wait", "--api", "embedded", "--nodes", &nodes.to_string()]);
        Some(cluster)
    }

    fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
        command.arg("local").args(words).stdin(Stdio::null());
        command.env("FLUX_DISTRIBUTE_LOCAL_DIR", self.state()).env("FLUX_DISTRIBUTE_LOCAL_AGENT", agent());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    fn must(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "local {words:?}: {} {said}", output.status);
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn exec(&self, node: &str, words: &[&str]) -> String {
        self.must(&[&["exec", node, "--"], words].concat())
    }

    fn status(&self, node: &str) -> serde_json::Value {
        let nodes: Vec<serde_json::Value> = serde_json::from_str(&self.must(&["status", "--output", "json"])).unwrap();
        nodes.into_iter().find(|found| found["name"] == node).unwrap_or_else(|| panic!("{node} is not there"))
    }

    /// The pids, inside the node, of the agent that runs now and of what it left in its pod.
    fn agent(&self, node: &str, not: Option<&str>) -> (String, String) {
        let file = self.state().join("nodes").join(node).join("root/root/agent");
        let found = until(&format!("an agent on {node}"), || {
            fs::read_to_string(&file).ok().filter(|found| !not.is_some_and(|not| found.starts_with(&format!("{not} "))))
        });
        let (agent, stayed) = found.split_once(' ').unwrap();
        (agent.to_owned(), stayed.to_owned())
    }

    fn alive(&self, node: &str, pid: &str) -> bool {
        // A zombie has no executable.
        self.run(&["exec", node, "--", "readlink", &format!("/proc/{pid}/exe")]).status.success()
    }

    fn node_uid(&self, node: &str) -> String {
        self.node(node).metadata.uid.unwrap()
    }

    /// The Node object.
    fn node(&self, node: &str) -> Node {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let kubeconfig = Kubeconfig::from_yaml(&self.must(&["kubeconfig"])).unwrap();
        let found = async {
            let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
            let client = Client::try_from(config.unwrap()).unwrap();
            Api::<Node>::all(client).get(node).await.unwrap()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(found)
    }

    /// What is left of this cluster anywhere on the machine.
    fn traces(&self, bridge: &str) -> Vec<String> {
        traces::traces(&self.state(), bridge)
    }

    /// Dead processes stay visible until the machine's PID 1 has reaped them.
    fn leaves_nothing(&self, bridge: &str) {
        let end = Instant::now() + PATIENCE;
        loop {
            let traces = self.traces(bridge);
            if traces.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "still there: {traces:#?}");
            sleep(Duration::from_millis(20));
        }
    }

    fn bridge(&self) -> String {
        traces::bridge(&self.state())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let output = self.run(&["down"]);
        if !output.status.success() {
            eprintln!("down: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

/// The stand-in, built once.
fn agent() -> &'static Path {
    static AGENT: OnceLock<PathBuf> = OnceLock::new();
    AGENT.get_or_init(|| {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("local-agent-{}", std::process::id()));
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let mut rustc = Command::new(rustc);
        rustc.args(["--edition=2024", "-C", "target-feature=+crt-static", "-o"]).arg(&program);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/local_nodes/agent.rs");
        assert!(rustc.arg(source).status().unwrap().success());
        program
    })
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_advice_of_up_fits_the_nodes_of_the_cluster() {
    let Some(cluster) = Cluster::new() else { return };
    let said = cluster.must(&["up", "--no-wait", "--api", "embedded", "--nodes", "1"]);
    assert!(said.contains("flux run -N1 hostname"), "{said}");
    assert!(!said.contains("filters traffic on bridges"), "nothing goes over the bridge yet: {said}");
}

#[test]
fn nodes_are_isolated_from_each_other_and_from_the_machine() {
    let Some(cluster) = Cluster::up(2) else { return };
    for namespace in ["mnt", "pid", "uts", "ipc", "net", "cgroup"] {
        let path = format!("/proc/self/ns/{namespace}");
        let machine = fs::read_link(&path).unwrap().display().to_string();
        let (one, two) = (cluster.exec("node1", &["readlink", &path]), cluster.exec("node2", &["readlink", &path]));
        assert!(one != machine && two != machine && one != two, "{namespace}: {machine} {one} {two}");
    }
    assert_eq!(cluster.exec("node2", &["hostname"]), "node2");
    assert_eq!(cluster.exec("node2", &["cat", "/etc/hostname"]), "node2");
    // The node's cgroup is the root of what it sees.
    assert!(cluster.exec("node1", &["cat", "/proc/1/cgroup"]).lines().all(|line| line.ends_with(":/init")));
    assert!(!cluster.run(&["exec", "node1", "--", "touch", "/usr/touched"]).status.success());
    cluster.exec("node1", &["touch", "/opt/touched", "/var/lib/touched", "/etc/touched", "/tmp/touched"]);
    assert!(!cluster.run(&["exec", "node2", "--", "test", "-e", "/opt/touched"]).status.success());
    assert!(!Path::new("/opt/touched").exists());
}

#[test]
fn nodes_reach_each_other_by_name() {
    let Some(cluster) = Cluster::up(2) else { return };
    cluster.agent("node2", None);
    assert_eq!(cluster.exec("node1", &["bash", "-c", "cat </dev/tcp/node2/8051"]), "node2");
    let added = cluster.must(&["add-node"]);
    assert!(added.starts_with("node3 "), "{added}");
    cluster.agent("node3", None);
    assert_eq!(cluster.exec("node1", &["bash", "-c", "cat </dev/tcp/node3/8051"]), "node3");
}

#[test]
fn an_agent_gets_what_a_pod_of_the_daemon_set_gets() {
    let Some(cluster) = Cluster::up(1) else { return };
    let (pid, _) = cluster.agent("node1", None);
    let environment = fs::read_to_string(cluster.state().join("nodes/node1/root/root/environment")).unwrap();
    for line in ["NODE_NAME=node1", "KUBECONFIG=/kubeconfig", "kubeconfig=600"] {
        assert!(environment.lines().any(|found| found == line), "{line} is missing in {environment}");
    }
    let differs = |namespace: &str| {
        let own = cluster.exec("node1", &["readlink", &format!("/proc/{pid}/ns/{namespace}")]);
        own != cluster.exec("node1", &["readlink", &format!("/proc/1/ns/{namespace}")])
    };
    assert_eq!(["mnt", "ipc", "pid", "net", "uts", "cgroup"].map(differs), [true, true, false, false, false, false]);
    let cgroup = cluster.exec("node1", &["cat", &format!("/proc/{pid}/cgroup")]);
    assert!(cgroup.lines().all(|line| line.contains(":/kubepods/pod")), "{cgroup}");
}

#[test]
fn a_killed_agent_is_restarted_and_only_processes_outside_its_pod_survive() {
    let Some(cluster) = Cluster::up(1) else { return };
    let (first, stayed) = cluster.agent("node1", None);
    let left = fs::read_to_string(cluster.state().join("nodes/node1/root/root/left")).unwrap();
    assert!(cluster.alive("node1", &stayed) && cluster.alive("node1", &left));

    cluster.must(&["agent", "node1", "kill"]);
    let (second, stayed_again) = cluster.agent("node1", Some(&first));
    assert!(!cluster.alive("node1", &first) && !cluster.alive("node1", &stayed));
    assert!(cluster.alive("node1", &left));

    cluster.must(&["agent", "node1", "restart"]);
    cluster.agent("node1", Some(&second));
    assert!(!cluster.alive("node1", &second) && !cluster.alive("node1", &stayed_again));
    assert!(cluster.alive("node1", &left));
    assert_eq!(cluster.status("node1")["restarts"], 2);
}

#[test]
fn a_node_that_was_off_comes_back_as_the_same_node_in_a_new_boot() {
    let Some(cluster) = Cluster::up(1) else { return };
    let boot = |cluster: &Cluster| cluster.exec("node1", &["cat", "/proc/sys/kernel/random/boot_id"]);
    let reported = |cluster: &Cluster| cluster.node("node1").status.unwrap().node_info.unwrap().boot_id;
    let (uid, first) = (cluster.node_uid("node1"), boot(&cluster));
    assert_eq!(reported(&cluster), first);
    assert_ne!(first, fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim());
    cluster.exec("node1", &["touch", "/opt/kept", "/run/lost"]);

    cluster.must(&["node", "node1", "power-off"]);
    assert_eq!(cluster.status("node1")["initPid"], serde_json::Value::Null);
    assert_eq!(reported(&cluster), first, "a Node that is off names its last boot");
    assert!(!cluster.run(&["exec", "node1", "--", "true"]).status.success());
    cluster.must(&["node", "node1", "power-on"]);
    assert_eq!(cluster.node_uid("node1"), uid);
    assert_ne!(boot(&cluster), first);
    assert_eq!(reported(&cluster), boot(&cluster));
    cluster.exec("node1", &["test", "-e", "/opt/kept"]);
    assert!(!cluster.run(&["exec", "node1", "--", "test", "-e", "/run/lost"]).status.success());
}

#[test]
fn a_node_added_under_a_removed_nodes_name_is_another_node() {
    let Some(cluster) = Cluster::up(2) else { return };
    let uid = cluster.node_uid("node1");
    cluster.must(&["remove-node", "node1"]);
    assert!(!cluster.state().join("nodes/node1").exists());
    assert_eq!(cluster.run(&["exec", "node1", "--", "true"]).status.code(), Some(2));
    assert!(cluster.must(&["add-node"]).starts_with("node1 "));
    assert_ne!(cluster.node_uid("node1"), uid);
}

#[test]
fn only_the_nodes_reach_the_machines_loopback_through_the_proxy() {
    let Some(cluster) = Cluster::up(1) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let length = stream.read(&mut request).unwrap();
            let first = String::from_utf8_lossy(&request[..length]).lines().next().unwrap_or_default().to_owned();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", first.len());
            stream.write_all(format!("{head}{first}").as_bytes()).unwrap();
        }
    });
    cluster.agent("node1", None);
    let environment = fs::read_to_string(cluster.state().join("nodes/node1/root/root/environment")).unwrap();
    let proxy = environment.lines().find_map(|line| line.strip_prefix("HTTP_PROXY=http://")).unwrap();
    let (host, proxy_port) = proxy.split_once(':').unwrap();

    let ask = |request: &str| {
        let script = format!("exec 3<>/dev/tcp/{host}/{proxy_port}; printf '{request}' >&3; cat <&3");
        cluster.exec("node1", &["bash", "-c", &script])
    };
    let plain =
        ask(&format!("GET http://127.0.0.1:{port}/a?b HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n"));
    assert!(plain.ends_with("GET /a?b HTTP/1.1"), "{plain}");
    let tunnel = ask(&format!("CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\nGET /c HTTP/1.1\\r\\n\\r\\n"));
    assert!(tunnel.ends_with("GET /c HTTP/1.1"), "{tunnel}");
    let missing = ask("GET http://127.0.0.1:1/ HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n");
    assert!(missing.starts_with("HTTP/1.1 502 "), "{missing}");

    // From the machine itself: closed without a word, at once or at the first write.
    let mut stream = std::net::TcpStream::connect(proxy).unwrap();
    let _ = stream.write_all(format!("GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.is_empty());
}

#[test]
fn the_nodes_see_the_users_files_at_the_same_path() {
    let Some(cluster) = Cluster::new() else { return };
    let shown = cluster.directory.path().join("a bundle.tar.gz");
    fs::write(&shown, "content").unwrap();
    let shown = shown.to_str().unwrap();
    cluster.must(&["up", "--no-wait", "--api", "embedded", "--nodes", "1", "--bundle", shown]);
    assert_eq!(cluster.exec("node1", &["cat", shown]), "content");
    assert!(!cluster.run(&["exec", "node1", "--", "touch", shown]).status.success());
}

#[test]
fn a_real_api_server_serves_the_same_nodes() {
    if skips_without([Need::ApiServer]) {
        return;
    }
    let Some(cluster) = Cluster::new() else { return };
    cluster.must(&["up", "--no-wait", "--api", "real", "--nodes", "1"]);
    let bridge = cluster.bridge();
    assert!(cluster.must(&["kubeconfig"]).contains("server: https://"));
    cluster.agent("node1", None);
    // Asks for the FluxNodes, so their definition is there.
    assert_eq!(cluster.status("node1")["phase"], serde_json::Value::Null);
    cluster.must(&["remove-node", "node1"]);
    cluster.must(&["down"]);
    cluster.leaves_nothing(&bridge);
}

#[test]
fn exec_ends_with_the_exit_code_of_the_command() {
    let Some(cluster) = Cluster::up(1) else { return };
    assert_eq!(cluster.run(&["exec", "node1", "--", "sh", "-c", "exit 7"]).status.code(), Some(7));
    assert_eq!(cluster.run(&["exec", "node1", "--", "sh", "-c", "kill -9 $$"]).status.code(), Some(137));
    assert_eq!(cluster.exec("node1", &["pwd"]), "/root");
    let path = cluster.exec("node1", &["sh", "-c", "echo $PATH $FLUX_URI"]);
    assert!(path.starts_with("/opt/flux-distribute/current/bin:"), "{path}");
    assert!(path.ends_with(" local:///run/flux-distribute/broker/local"), "{path}");
}

#[test]
fn bad_input_ends_with_2_and_changes_nothing() {
    let Some(cluster) = Cluster::new() else { return };
    for words in [
        ["up", "--bundle", "/does/not/exist"],
        ["up", "--nodes", "0"],
        ["up", "--timeout", "soon"],
        ["up", "--instance", "/dev/null/x"],
        ["up", "--channel", "file:///does/not/exist"],
    ] {
        assert_eq!(cluster.run(&words).status.code(), Some(2), "{words:?}");
        assert!(!cluster.state().exists(), "{words:?}");
    }
    assert_eq!(cluster.run(&["status"]).status.code(), Some(1));
}

#[test]
fn a_second_up_says_how_to_continue() {
    let Some(cluster) = Cluster::up(1) else { return };
    let second = cluster.run(&["up", "--nodes", "1"]);
    assert_eq!(second.status.code(), Some(1));
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(said.contains("is up in") && said.contains("local down"), "{said}");
    assert_eq!(cluster.exec("node1", &["hostname"]), "node1");
}

#[test]
fn down_leaves_nothing_even_when_the_daemon_was_killed() {
    let Some(cluster) = Cluster::up(2) else { return };
    cluster.agent("node1", None);
    cluster.agent("node2", None);
    let bridge = cluster.bridge();
    let group = cluster.status("node1")["agentPid"].as_i64().unwrap();
    assert!(fs::exists(format!("/proc/{group}")).unwrap());
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let cgroup = fs::read_to_string(process.path().join("cgroup")).unwrap_or_default();
        if cgroup.contains(&format!("flux-distribute-local/{bridge}/daemon")) {
            let pid = process.file_name().into_string().unwrap().parse().unwrap();
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
        }
    }
    until("the daemon's end", || (!cluster.run(&["status"]).status.success()).then_some(()));
    let said = String::from_utf8_lossy(&cluster.run(&["up"]).stderr).into_owned();
    assert!(said.contains("left over"), "{said}");

    cluster.must(&["down"]);
    cluster.leaves_nothing(&bridge);
    assert_eq!(cluster.must(&["down"]), "there is no local cluster");
}

#[test]
fn a_directory_with_other_files_is_left_alone() {
    let Some(cluster) = Cluster::new() else { return };
    for mine in ["a.txt", "nodes/mine", ".hidden", ".flux-distribute-backup/mine"] {
        let file = cluster.state().join(mine);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "mine").unwrap();
        for words in [&["up", "--no-wait", "--api", "embedded"][..], &["down"]] {
            let refused = cluster.run(words);
            let said = String::from_utf8_lossy(&refused.stderr);
            assert!(
                !refused.status.success() && said.contains("is not empty and has no local cluster in it"),
                "{said}"
            );
            assert_eq!(fs::read_to_string(&file).unwrap(), "mine", "{words:?}");
        }
        fs::remove_dir_all(cluster.state()).unwrap();
    }
}

#[test]
fn down_leaves_nothing_wherever_up_was_killed() {
    for milliseconds in [2, 10, 30, 60, 90, 120, 160, 200, 300] {
        let Some(cluster) = Cluster::new() else { return };
        let mut up = cluster.command(&["up", "--no-wait", "--api", "embedded", "--nodes", "2"]);
        let mut up = up.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        sleep(Duration::from_millis(milliseconds));
        let bridge = cluster.state().join("cluster.json").exists().then(|| cluster.bridge());
        up.kill().unwrap();
        up.wait().unwrap();
        let bridge = bridge.or_else(|| cluster.state().join("cluster.json").exists().then(|| cluster.bridge()));
        cluster.must(&["down"]);
        if let Some(bridge) = bridge {
            cluster.leaves_nothing(&bridge);
        }
        assert!(!cluster.state().exists(), "killed after {milliseconds} ms");
    }
}
