//! The agent's pod, as kubelet and containerd would make it from the DaemonSet: privileged, hostPID, hostNetwork, an
//! image built `FROM scratch`, and a cgroup below the node's `kubepods`. Its parent is a [`shim`].

use std::{
    fs::{self, File},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
};

use nix::sched::{CloneFlags, unshare};

use super::{
    cgroup,
    layout::{Cluster, Layout, node_number},
    mounts, root,
    shim::{self, enter_node},
};
use crate::error::{Context, LocalError};
use ::cluster::clock::OFF_VARIABLE;
use base::redact::LOG_VARIABLE;

/// Where the pod's root is mounted in the pod's mount namespace, hiding the node's own /tmp.
const POD_ROOT: &str = "/tmp";

/// Real pods have it in /dev, which here is the machine's own.
const TERMINATION_LOG: &str = "/termination-log";

/// The pod to start.
pub(crate) struct Pod {
    pub(crate) node: String,
    /// The Node object's name.
    pub(crate) node_name: String,
    /// The PID of the node's PID 1.
    pub(crate) init: i32,
    pub(crate) uid: String,
    pub(crate) name: String,
}

/// Reports the agent's PID on stdout. Returns the agent's exit code when it has exited.
pub(crate) async fn run(layout: &Layout, pod: Pod) -> Result<ExitCode, LocalError> {
    let cluster = layout.load()?;
    let log = File::options()
        .create(true)
        .append(true)
        .open(layout.agent_log(&pod.node))
        .context(|| format!("can't open {}", layout.agent_log(&pod.node).display()))?;
    cgroup::enter(&cluster.pod_cgroup(&pod.node, &pod.uid))?;
    shim::run("agent", move || start(&cluster, &pod, log)).await
}

fn start(cluster: &Cluster, pod: &Pod, log: File) -> Result<Child, LocalError> {
    enter_node(pod.init)?;
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC)
        .context(|| "can't make the pod's namespaces".to_owned())?;
    mounts::make_private()?;
    let root = Path::new(POD_ROOT);
    mounts::kernel("tmpfs", root, Some("mode=755"))?;
    let image = Path::new(root::IMAGE);
    let agent = if cluster.foreign_agent { "agent" } else { "flux-distribute" };
    mounts::bind_read_only(&image.join(agent), &root.join("flux-distribute"))?;
    mounts::bind_read_only(&image.join("kubeconfig"), &root.join("kubeconfig"))?;
    mounts::make_directory(&root.join("etc"))?;
    let _ = fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf"));
    mounts::make_directory(&root.join("tmp"))?;
    for directory in ["proc", "sys", "dev"] {
        mounts::bind(&Path::new("/").join(directory), &root.join(directory))?;
    }
    let failed = || "can't make the pod's files".to_owned();
    File::create(root.join(TERMINATION_LOG.trim_start_matches('/'))).context(failed)?;
    mounts::enter_root(root)?;

    let mut command = Command::new("/flux-distribute");
    command.arg("agent").env_clear().current_dir("/").stdin(Stdio::null());
    command.stdout(log.try_clone().context(|| "can't open the agent's log".to_owned())?).stderr(log);
    command.envs(environment(cluster, pod));
    command.spawn().context(|| format!("can't start the agent of {}", pod.node))
}

fn environment(cluster: &Cluster, pod: &Pod) -> Vec<(&'static str, String)> {
    let number = node_number(&pod.node);
    let address = number.map(|number| ("HOST_IP", cluster.address(number).to_string()));
    // One third of the nodes each are behind, right, and ahead.
    let clock = number.map(|number| (OFF_VARIABLE, ((i64::from(number) % 3 - 1) * cluster.clocks_off).to_string()));
    let mut environment = vec![
        ("NODE_NAME", pod.node_name.clone()),
        ("POD_NAME", pod.name.clone()),
        ("KUBECONFIG", "/kubeconfig".to_owned()),
        ("TERMINATION_LOG", TERMINATION_LOG.to_owned()),
        // Peers and the API server must be reached without the proxy.
        ("NO_PROXY", format!("{}/{}", cluster.network, Cluster::PREFIX)),
        ("no_proxy", format!("{}/{}", cluster.network, Cluster::PREFIX)),
    ];
    environment.extend(address);
    environment.extend(clock);
    // ALL_PROXY serves https; the Kubernetes client would use HTTPS_PROXY and fail.
    for name in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
        environment.push((name, cluster.proxy()));
    }
    environment.extend(std::env::var(LOG_VARIABLE).ok().map(|level| (LOG_VARIABLE, level)));
    environment
}
