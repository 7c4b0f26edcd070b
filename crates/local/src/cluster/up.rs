//! `local up`: chooses all settings, records them, starts the daemon, and waits until all nodes are online.

use std::{
    fs::File,
    io::ErrorKind,
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::OnceLock,
    time::Duration,
};

use futures::{FutureExt, future::select_all};
use k8s_openapi::ByteString;
use nix::sched::{CloneFlags, setns};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    signal::unix::{SignalKind, signal},
    time::Instant,
};

use super::{
    api::{ASSETS_VARIABLE, certificate_file},
    check::{self, Choice, Flux, Source},
    control::{Client as Control, NodeView, Request, read_report},
    down,
    io::{print_line, read_line},
    layout::{
        AGENT_VARIABLE, Cluster, DIRECTORY_VARIABLE, Layout, copy_executable, make_private_directory, write_private,
    },
    network::Network,
    options::{ApiKind, Up},
    proxy, root, spec, wait,
};
use crate::{
    error::{Context, LocalError},
    stand_in,
};
use api::{BundleSource, FluxInstanceSpec, Packages, STAND_IN};
use broker::command::SPARES_EXPLAINED;
use host::{Root, facts};

/// Limit for the daemon's start; kube-apiserver with etcd takes about ten seconds.
const DAEMON_LIMIT: Duration = Duration::from_mins(2);

/// If this is 1, iptables' forwarding rules also apply to bridges, and Docker's rules drop by default.
const FILTERED_BRIDGES: &str = "/proc/sys/net/bridge/bridge-nf-call-iptables";

/// tcpmux, a port on which no process listens.
const UNUSED_PORT: u16 = 1;
/// Timeout for a connection over the bridge, which takes microseconds unless packets are dropped.
const REACH_LIMIT: Duration = Duration::from_secs(2);

/// Starts a cluster. On any failure but a time-out, it is taken down again.
///
/// # Errors
/// Bad input, before anything is made; [`LocalError::Interrupted`] by SIGINT, SIGTERM or SIGHUP; [`LocalError::TakenDown`] by
/// another command; [`LocalError::GivenUp`]; [`LocalError::Late`], which leaves the cluster up.
pub(crate) async fn run(layout: &Layout, up: Up) -> Result<(), LocalError> {
    refuse_second(layout).await?;
    let failed = || "can't handle signals".to_owned();
    // SIGHUP: the user's terminal is gone.
    let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let signals = kinds.map(|kind| signal(kind).map(|signal| (kind, signal)));
    let mut signals = signals.into_iter().collect::<Result<Vec<_>, _>>().context(failed)?;
    let ending = signals.iter_mut().map(|(kind, signal)| Box::pin(signal.recv().map(|_| *kind)));
    let begun = OnceLock::new();
    let ended = tokio::select! {
        ended = bring_up(layout, &up, &begun) => ended,
        (kind, ..) = select_all(ending) => Err(LocalError::Interrupted { signal: kind.as_raw_value() }),
    };
    match (ended, begun.get()) {
        (Ok(()), _) => Ok(()),
        (Err(error @ LocalError::Late(_)), _) => Err(error),
        (Err(error), None) => {
            // At most the directory exists.
            let _ = std::fs::remove_dir(layout.directory());
            Err(error)
        }
        (Err(error), Some(token)) if layout.is_current(token) => {
            down::run(layout).await?;
            Err(error)
        }
        (Err(error @ LocalError::Interrupted { .. }), _) => Err(error),
        (Err(_), Some(_)) => Err(LocalError::TakenDown),
    }
}

/// `begun` gets the cluster's token before its record is written.
async fn bring_up(layout: &Layout, up: &Up, begun: &OnceLock<String>) -> Result<(), LocalError> {
    let end = Instant::now() + up.timeout;
    let mut spec = spec::from_options(up).await?;
    let wrong = model::validate(&spec);
    if !wrong.is_empty() {
        return Err(LocalError::Usage(api::in_one_line(&wrong)));
    }
    let stand_in = choose_packages(up, &mut spec).await?;
    // Pods would wait for ever: the stand-in has no queue.
    spec.pods.enabled &= stand_in.is_none();
    let text = serde_norway::to_string(&spec).context(|| "can't write the spec as YAML".to_owned())?;

    let network = Network::connect()?;
    let mut cluster = choose_settings(up, &spec, &network).await?;
    make_private_directory(layout.directory())?;
    // Set once: the token stays the same if another network is chosen.
    let _ = begun.set(cluster.token.clone());
    while !claim(layout, &cluster, &network).await? {
        cluster = Cluster { token: cluster.token, ..choose_settings(up, &spec, &network).await? };
    }
    start(layout, &cluster, &text, up, stand_in.as_ref().map(StandIn::bundle)).await?;
    if !up.no_wait {
        wait::run(layout, &cluster, up.nodes, end).await?;
    }
    let program = invocation(layout);
    match stand_in {
        None => {
            let when = if up.no_wait { "once `local status` shows its nodes Online, " } else { "" };
            let job = format!("{program} local exec node1 -- flux run -N{} hostname", up.nodes);
            print_line(&format!("{when}run a job:    {job}"))?;
        }
        Some(stand_in) => {
            let why = stand_in.why;
            print_line(&format!(
                "{STAND_IN}: the nodes run no jobs ({why}), and pods with schedulerName: flux stay Pending"
            ))?;
        }
    }
    print_line(&format!("look at it:   {program} local status"))?;
    print_line(&format!("               {SPARES_EXPLAINED}"))?;
    print_line(&format!("take it down: {program} local down"))
}

/// How the user called this program, with the directory if that is not the default one, so that printed commands can be copied.
fn invocation(layout: &Layout) -> String {
    let program = std::env::args().next().unwrap_or_else(|| "flux-distribute".to_owned());
    match layout.is_default() {
        true => program,
        false => format!("{DIRECTORY_VARIABLE}={} {program}", layout.directory().display()),
    }
}

/// A bundle with the stand-in for Flux, and the reason for installing it.
struct StandIn {
    directory: tempfile::TempDir,
    why: String,
}

impl StandIn {
    fn make(why: String) -> Result<Self, LocalError> {
        let directory = tempfile::tempdir().context(|| "can't make a temporary directory".to_owned())?;
        stand_in::make(directory.path())?;
        Ok(Self { directory, why })
    }

    fn bundle(&self) -> PathBuf {
        self.directory.path().join(stand_in::NAME)
    }
}

/// Checks whether the packages in `spec` are available, and replaces them by the stand-in if that is the right choice.
async fn choose_packages(up: &Up, spec: &mut FluxInstanceSpec) -> Result<Option<StandIn>, LocalError> {
    if std::env::var_os(AGENT_VARIABLE).is_some() {
        // The test's agent installs nothing.
        return Ok(None);
    }
    if up.flux == Flux::None && (up.bundle.is_some() || !up.channel.is_empty() || !up.spec.is_empty()) {
        let words = "--flux none installs no Flux: leave out --bundle, --channel and --spec";
        return Err(LocalError::Usage(words.to_owned()));
    }
    let is_named = spec.packages != Packages::default();
    // Without waiting, a source that the user names may become available later.
    let ask_servers = !(up.no_wait && is_named);
    let source =
        if up.flux == Flux::None { Source::Good } else { check::check_source(&spec.packages, ask_servers).await? };
    match check::choose(up.flux, source, is_named, !up.no_wait) {
        Choice::Packages => Ok(None),
        Choice::Refuse(why) => Err(LocalError::Usage(why)),
        Choice::StandIn(why) => {
            print_line(&format!("{STAND_IN}: {why}"))?;
            let made = tokio::task::spawn_blocking(|| StandIn::make(why)).await;
            let made = made.context(|| "the task that packs the stand-in panicked".to_owned())??;
            let url = format!("file://{}/{}", root::IMAGE, stand_in::NAME);
            let sha256 = spec::sha256_of(&made.bundle())?;
            spec.packages = Packages { bundle: Some(BundleSource { url, sha256 }), ..Packages::default() };
            Ok(Some(made))
        }
    }
}

/// Refuses a directory with a cluster, and one with anything else: `down` removes it with all that is in it.
async fn refuse_second(layout: &Layout) -> Result<(), LocalError> {
    if !layout.cluster().exists() {
        return if layout.is_unused()? { Ok(()) } else { Err(LocalError::NotOurs(layout.directory().to_owned())) };
    }
    let state = if Control::connect(layout).await.is_ok() { "up" } else { "left over" };
    Err(LocalError::AlreadyUp { state, directory: layout.directory().display().to_string() })
}

/// Records the settings and makes the bridge, which only one cluster can. Until then nothing is made or killed under
/// names that a concurrent `local up` may have chosen too. Returns false if that one was first.
async fn claim(layout: &Layout, cluster: &Cluster, network: &Network) -> Result<bool, LocalError> {
    let record = serde_json::to_vec_pretty(cluster).context(|| "can't write the record".to_owned())?;
    write_private(&layout.cluster(), &record, false)
        .context(|| format!("can't write {}; is another `local up` running?", layout.cluster().display()))?;
    let made = network.make_bridge(cluster).await;
    if !matches!(made, Ok(true)) {
        std::fs::remove_file(layout.cluster()).context(|| "can't remove the record".to_owned())?;
    }
    made
}

async fn choose_settings(up: &Up, spec: &FluxInstanceSpec, network: &Network) -> Result<Cluster, LocalError> {
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

/// `wanted`, or another port if a process on this machine already uses it.
fn free_port(wanted: u16) -> Result<u16, LocalError> {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, wanted))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .context(|| "can't find a free port".to_owned())
}

/// Starts the daemon and the nodes. `bundle` is copied to where the nodes see it.
async fn start(
    layout: &Layout,
    cluster: &Cluster,
    spec: &str,
    up: &Up,
    bundle: Option<PathBuf>,
) -> Result<(), LocalError> {
    let own = std::env::current_exe().context(|| "can't find our own executable".to_owned())?;
    // Create no parents: a concurrent `down` may have removed the directory.
    // Readable for all, since on a node the stand-in's broker may run as any user; secret files in it are root's.
    let image = std::fs::DirBuilder::new().mode(0o755).create(layout.image());
    image.context(|| format!("can't make {}", layout.image().display()))?;
    if let Some(bundle) = bundle {
        let to = layout.image().join(stand_in::NAME);
        std::fs::copy(bundle, &to).context(|| format!("can't write {}", to.display()))?;
    }
    copy_executable(&own, &layout.executable())?;
    if let Some(agent) = std::env::var_os(AGENT_VARIABLE) {
        copy_executable(Path::new(&agent), &layout.image().join("agent"))?;
    }
    start_daemon(layout, spec).await?;
    write_kubeconfig(layout, cluster)?;
    print_line(&format!("API server at {}; kubeconfig in {}", cluster.server(), layout.kubeconfig().display()))?;
    let add = Request::Add { count: up.nodes, kind: up.kind.clone() };
    let nodes = Control::connect(layout).await?.ask(add).await?;
    for node in &nodes {
        print_line(&format!("{} is up at {}", node.name, node.address))?;
    }
    if read_line(FILTERED_BRIDGES) == "1"
        && let [first, .., last] = nodes.as_slice()
        && !reaches(last, first).await
    {
        let bridge = &cluster.bridge;
        print_line(&format!(
            "the nodes can't reach each other, because this machine filters traffic on bridges (Docker's rules drop it); to allow it: \
             iptables -I FORWARD -i {bridge} -o {bridge} -j ACCEPT"
        ))?;
    }
    Ok(())
}

/// Checks whether packets from one node arrive at the other: a refused connection proves it, as no process listens on
/// the port. If that can't be tried, the answer is true.
async fn reaches(from: &NodeView, to: &NodeView) -> bool {
    let (Some(init), Ok(address)) = (from.init_pid, to.address.parse::<Ipv4Addr>()) else { return true };
    let attempt = move || -> std::io::Result<bool> {
        let namespace = File::open(format!("/proc/{init}/ns/net"))?;
        // Affects only this thread, which ends afterwards.
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
    let mut daemon = layout.helper(&["daemon"], log);
    daemon.envs(proxy::VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
    let mut child = daemon.stdin(Stdio::piped()).spawn().context(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(spec.as_bytes()).await.context(failed)?;
    }
    let stdout = child.stdout.take().ok_or("it has no stdout").context(failed)?;
    let mut lines = BufReader::new(stdout).lines();
    read_report(&mut lines, DAEMON_LIMIT, "the local cluster's daemon").await.map(drop)
}

/// Writes the kubeconfig into the state directory for users, and into the image for the agents.
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
