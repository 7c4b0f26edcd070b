//! `local up`: decides everything, writes it down, starts the daemon, and waits until all nodes are online.

use std::{
    fs::File,
    io::{ErrorKind, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::ByteString;
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher},
};
use nix::sched::{CloneFlags, setns};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    time::{Instant, timeout_at},
};

use super::{
    api::{ASSETS_VARIABLE, certificate_file},
    control::{Client as Control, NodeView, Request, listen},
    down,
    kind::Kind,
    layout::{AGENT_VARIABLE, Cluster, Layout, copy_executable, make_private_directory, write_private},
    network::Network,
    objects, spec,
};
use crate::{
    api::{self, FluxInstance, FluxInstanceSpec, FluxInstanceStatus, InstancePhase},
    broker::command::SPARES_EXPLAINED,
    host::{Root, facts},
    local::error::{Context, LocalError},
};

/// A kube-apiserver with its etcd takes some ten seconds to start.
const DAEMON_LIMIT: Duration = Duration::from_secs(120);

/// 1: the rules for forwarded packets are applied to bridged ones too, and Docker's drop by default.
const FILTERED_BRIDGES: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";

/// tcpmux: nobody listens there.
const UNUSED_PORT: u16 = 1;
/// A bridge takes microseconds; what is dropped is never answered.
const REACH_LIMIT: Duration = Duration::from_secs(2);

/// Which API server to start.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiKind {
    /// The embedded one.
    Embedded,
    /// etcd and kube-apiserver from the directory that KUBEBUILDER_ASSETS names.
    Real,
}

/// What to start.
#[derive(clap::Args, Clone, Debug)]
pub struct Up {
    /// How many nodes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    nodes: u32,
    /// Install a bundle: a file of this machine, or a URL
    #[arg(long, value_name = "FILE|URL", conflicts_with_all = ["channel", "spec"])]
    pub(super) bundle: Option<String>,
    /// The bundle's sha256 [default: that of what is there now]
    #[arg(long, requires = "bundle", value_name = "HEX")]
    pub(super) sha256: Option<String>,
    /// A conda channel to install from: a directory of this machine, or a URL; may be repeated
    #[arg(long, value_name = "DIR|URL")]
    pub(super) channel: Vec<String>,
    /// A conda package to install, as a match spec; may be repeated
    #[arg(long)]
    pub(super) spec: Vec<String>,
    /// Shape of the overlay network, such as kary:2
    #[arg(long)]
    pub(super) topology: Option<String>,
    /// A FluxInstance, or its spec alone, in YAML to start from; the other options go on top of it
    #[arg(long, value_name = "FILE")]
    pub(super) instance: Option<PathBuf>,
    /// How long to wait until all nodes are online, such as 90s or 10m; a bare number counts seconds
    #[arg(long, default_value = "10m", value_parser = api::duration)]
    timeout: Duration,
    /// Which API server [default: real where KUBEBUILDER_ASSETS is set, else embedded]
    #[arg(long, value_enum, value_name = "WHICH")]
    api: Option<ApiKind>,
    /// Do not wait until the nodes are online
    #[arg(long)]
    no_wait: bool,
    /// In what the nodes differ from the machine
    #[command(flatten)]
    kind: Kind,
    /// So many seconds the agents' clocks are off: of a third of them ahead, of a third behind
    #[arg(long, hide = true, default_value_t = 0)]
    clocks_off: i64,
}

/// Starts a cluster.
pub(crate) async fn run(layout: &Layout, up: Up) -> Result<(), LocalError> {
    if !nix::unistd::geteuid().is_root() {
        return Err(LocalError::Usage("`local up` makes namespaces, cgroups and links: run it as root".to_owned()));
    }
    refuse_second(layout).await?;
    let spec = spec::from_options(&up).await?;
    let wrong = api::validate(&spec);
    if !wrong.is_empty() {
        return Err(LocalError::Usage(api::in_one_line(&wrong)));
    }
    let text = serde_norway::to_string(&spec).context(|| "can't write the spec as YAML".to_owned())?;
    let end = Instant::now() + up.timeout;

    let network = Network::connect()?;
    let mut cluster = decide(&up, &spec, &network).await?;
    make_private_directory(layout.directory())?;
    while !settle(layout, &cluster, &network).await? {
        cluster = decide(&up, &spec, &network).await?;
    }
    if let Err(error) = start(layout, &cluster, &text, &up).await {
        // Unless a `down` has been faster, and maybe another `up` after it.
        if layout.load().is_ok_and(|found| found.token == cluster.token) {
            down::run(layout).await?;
        }
        return Err(error);
    }
    if !up.no_wait {
        wait(&objects::client(layout, &cluster)?, up.nodes, end).await?;
    }
    say(&format!("run a job:    flux-distribute local exec node1 -- flux run -N{} hostname", up.nodes))?;
    say("look at it:   flux-distribute local status")?;
    say(&format!("               {SPARES_EXPLAINED}"))?;
    say("take it down: flux-distribute local down")
}

pub(crate) fn say(line: &str) -> Result<(), LocalError> {
    writeln!(std::io::stdout(), "{line}").context(|| "can't write to stdout".to_owned())
}

async fn refuse_second(layout: &Layout) -> Result<(), LocalError> {
    if !layout.cluster().exists() {
        return Ok(());
    }
    let state = if Control::connect(layout).await.is_ok() { "up" } else { "left over" };
    Err(LocalError::AlreadyUp { state, directory: layout.directory().display().to_string() })
}

/// Writes down what was decided, and makes the bridge: it belongs to who is first. Nothing else is made, or killed, under a
/// name that another `local up` of this moment may have chosen too. False where that one was faster.
async fn settle(layout: &Layout, cluster: &Cluster, network: &Network) -> Result<bool, LocalError> {
    let record = serde_json::to_vec_pretty(cluster).context(|| "can't write the record".to_owned())?;
    write_private(&layout.cluster(), &record, false)
        .context(|| format!("can't write {}; is another `local up` at work?", layout.cluster().display()))?;
    let made = network.make_bridge(cluster).await;
    if !matches!(made, Ok(true)) {
        std::fs::remove_file(layout.cluster()).context(|| "can't take the record back".to_owned())?;
    }
    made
}

async fn decide(up: &Up, spec: &FluxInstanceSpec, network: &Network) -> Result<Cluster, LocalError> {
    let assets = std::env::var_os(ASSETS_VARIABLE).map(PathBuf::from);
    let assets = match (up.api, assets) {
        (Some(ApiKind::Embedded), _) | (None, None) => None,
        (Some(ApiKind::Real), None) => {
            let message = format!("--api real needs {ASSETS_VARIABLE}: a directory with etcd and kube-apiserver");
            return Err(LocalError::Usage(message));
        }
        (_, Some(directory)) => {
            let missing = ["etcd", "kube-apiserver"].iter().find(|name| !directory.join(name).is_file());
            if let Some(name) = missing {
                let message = format!("{ASSETS_VARIABLE} is {}, but there is no {name}", directory.display());
                return Err(LocalError::Usage(message));
            }
            Some(directory)
        }
    };
    let shown = spec::shown(spec)?;
    let (bridge, network) = network.choose().await?;
    let mut token = [0_u8; 32];
    getrandom::fill(&mut token).context(|| "can't make a token".to_owned())?;
    Ok(Cluster {
        bridge,
        network,
        api_port: free_port(6443)?,
        proxy_port: free_port(3128)?,
        token: hex::encode(token),
        assets,
        shown,
        prefix: spec.prefix.clone(),
        foreign_agent: std::env::var_os(AGENT_VARIABLE).is_some(),
        clocks_off: up.clocks_off,
        boot_id: facts::boot_id(&Root::host()),
        sysctls: down::sysctls(),
    })
}

/// `wanted`, or another where somebody of this machine listens there on all addresses.
fn free_port(wanted: u16) -> Result<u16, LocalError> {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, wanted))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .context(|| "can't find a free port".to_owned())
}

async fn start(layout: &Layout, cluster: &Cluster, spec: &str, up: &Up) -> Result<(), LocalError> {
    let own = std::env::current_exe().context(|| "can't find our own executable".to_owned())?;
    make_private_directory(&layout.image())?;
    copy_executable(&own, &layout.executable())?;
    if let Some(agent) = std::env::var_os(AGENT_VARIABLE) {
        copy_executable(Path::new(&agent), &layout.image().join("agent"))?;
    }
    start_daemon(layout, spec).await?;
    write_kubeconfig(layout, cluster)?;
    say(&format!("API server at {}; kubeconfig in {}", cluster.server(), layout.kubeconfig().display()))?;
    let add = Request::Add { count: up.nodes, kind: up.kind.clone() };
    let nodes = Control::connect(layout).await?.ask(add).await?;
    for node in &nodes {
        say(&format!("{} is up at {}", node.name, node.address))?;
    }
    if objects::read_line(FILTERED_BRIDGES) == "1"
        && let [first, .., last] = nodes.as_slice()
        && !reaches(last, first).await
    {
        let bridge = &cluster.bridge;
        say(&format!(
            "the nodes can't reach each other, because this machine filters what goes over bridges (Docker's rules drop it): \
             iptables -I FORWARD -i {bridge} -o {bridge} -j ACCEPT"
        ))?;
    }
    Ok(())
}

/// What one node sends arrives at the other: nobody listens there, which is an answer. What can't be tried is taken to work.
async fn reaches(from: &NodeView, to: &NodeView) -> bool {
    let (Some(init), Ok(address)) = (from.init_pid, to.address.parse::<Ipv4Addr>()) else { return true };
    let attempt = move || -> std::io::Result<bool> {
        let namespace = File::open(format!("/proc/{init}/ns/net"))?;
        // Of this thread alone, which ends with it.
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        let refused = |error: &std::io::Error| error.kind() == ErrorKind::ConnectionRefused;
        let tried = TcpStream::connect_timeout(&(address, UNUSED_PORT).into(), REACH_LIMIT);
        Ok(tried.as_ref().err().is_none_or(refused))
    };
    let tried = tokio::task::spawn_blocking(move || std::thread::spawn(attempt).join());
    tried.await.is_ok_and(|joined| joined.is_ok_and(|reached| reached.unwrap_or(true)))
}

async fn start_daemon(layout: &Layout, spec: &str) -> Result<(), LocalError> {
    let failed = || "can't start the local cluster's daemon".to_owned();
    let log = File::options().create(true).append(true).open(layout.daemon_log()).context(failed)?;
    let mut child = layout.helper(&["daemon"], log).stdin(Stdio::piped()).spawn().context(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(spec.as_bytes()).await.context(failed)?;
    }
    let stdout = child.stdout.take().ok_or_else(|| LocalError::Refused(failed()))?;
    let mut lines = BufReader::new(stdout).lines();
    listen(&mut lines, DAEMON_LIMIT, "the local cluster's daemon").await.map(drop)
}

/// For people in the state directory, for the agents in what their pods are made of.
fn write_kubeconfig(layout: &Layout, cluster: &Cluster) -> Result<(), LocalError> {
    let failed = || "can't write the kubeconfig".to_owned();
    let trusted = ByteString(std::fs::read(certificate_file(layout)).context(failed)?);
    let server = json!({ "server": cluster.server(), "certificate-authority-data": trusted });
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "local", "cluster": server }],
        "users": [{ "name": "local", "user": { "token": cluster.token } }],
        "contexts": [{ "name": "local", "context": { "cluster": "local", "user": "local", "namespace": api::NAMESPACE } }],
        "current-context": "local",
    });
    let text = serde_norway::to_string(&kubeconfig).context(failed)?;
    for path in [layout.kubeconfig(), layout.image().join("kubeconfig")] {
        write_private(&path, text.as_bytes(), true).context(failed)?;
    }
    Ok(())
}

/// Tells what changes until all nodes are online.
async fn wait(client: &Client, nodes: u32, end: Instant) -> Result<(), LocalError> {
    let instances: Api<FluxInstance> = Api::default_namespaced(client.clone());
    let mut changes = watcher::watch_object(instances, api::INSTANCE).default_backoff().boxed();
    let mut told = String::new();
    loop {
        let change = match timeout_at(end, changes.next()).await {
            // The watch heals itself.
            Ok(Some(Err(_)) | None) => continue,
            Ok(Some(Ok(change))) => change,
            Err(_) => {
                return Err(LocalError::Refused(format!(
                    "not all of {} online in time ({told}); see `flux-distribute local status`, then take it \
                     down with `flux-distribute local down`",
                    match nodes {
                        1 => "1 node is".to_owned(),
                        more => format!("{more} nodes are"),
                    }
                )));
            }
        };
        let status = change.and_then(|instance| instance.status).unwrap_or_default();
        let line = describe(&status);
        if line != told {
            say(&line)?;
            told = line;
        }
        if status.online >= nodes {
            return Ok(());
        }
        if status.phase == InstancePhase::Failed {
            return Err(LocalError::Refused(
                status.message.unwrap_or_else(|| "the instance can't be served".to_owned()),
            ));
        }
    }
}

/// The instance's line says how many are online unless there is something worse to say.
fn describe(status: &FluxInstanceStatus) -> String {
    let message = status.message.as_deref().unwrap_or("nothing is known of it yet");
    format!("{:?}: {message}", status.phase)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_many_are_online_is_said_once() {
        let message = Some("0 of 4 nodes online; node1 (rank 0, not started): fetching".to_owned());
        let status = FluxInstanceStatus { message, phase: InstancePhase::Starting, ..FluxInstanceStatus::default() };
        let line = describe(&status);
        assert_eq!(line.matches("online").count(), 1, "{line}");
        assert_eq!(describe(&FluxInstanceStatus::default()), "Pending: nothing is known of it yet");
    }
}
