//! What the agent may ask of its host, and what the host answers: the wire format of the host stage.
//!
//! An order goes to the stage as one JSON document on stdin; the stage answers with JSON lines on stdout, any number of
//! [`Reply::Progress`] and then exactly one [`Reply::Done`] or [`Reply::Failed`].

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use crate::api::{Resources, Uninstall};

/// One piece of work in the host's namespaces. Every one can be killed at any instruction and given again.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Look only. → [`Answer::Observed`]
    Observe,
    /// Look whether this host can carry a broker, and where. Changes nothing. → [`Answer::Preflight`]
    Preflight(PreflightOrder),
    /// Make the prefix and `state.json` in it: from here on this host is ours to clean. → [`Answer::Done`]
    Claim(ClaimOrder),
    /// Make `envs/<digest>` from what `pkgs/` holds. → [`Answer::Linked`]
    Link(LinkOrder),
    /// Take away environments and archives that nobody needs any more. → [`Answer::Collected`]
    Collect(CollectOrder),
    /// Hash environments again and hold them against their records. → [`Answer::Verified`]
    Verify(VerifyOrder),
    /// Write the files a broker reads at start. → [`Answer::Done`]
    Configure(ConfigureOrder),
    /// Start the broker, out of the pod's reach. → [`Answer::Observed`]
    Start(LaunchOrder),
    /// Stop the broker and wait until it is gone. → [`Answer::Observed`]
    Stop(StopOrder),
    /// Run `<prefix>/envs/<digest>/bin/flux` to its end, as the broker's user. → [`Answer::Ran`]
    Flux(FluxOrder),
    /// Take off everything that `state.json` says we did. → [`Answer::Done`]
    Remove(RemoveOrder),
}

/// See [`Order::Preflight`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PreflightOrder {
    /// The only prefix to try; None: `PREFIX_CANDIDATES` in order.
    pub prefix: Option<PathBuf>,
    /// The TBON's port; it must be free unless our own broker holds it.
    pub port: u16,
    /// Bytes the packages need on disk, on top of what kubelet's eviction threshold keeps free.
    pub need_bytes: u64,
}

/// See [`Order::Claim`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ClaimOrder {
    /// From preflight.
    pub prefix: PathBuf,
    /// uid of the FluxInstance the host is claimed for.
    pub instance_uid: String,
    /// Its spec.uninstall.
    pub uninstall: Uninstall,
}

/// See [`Order::Link`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LinkOrder {
    /// From preflight.
    pub prefix: PathBuf,
    /// Names the environment.
    pub digest: String,
    /// What is in it.
    pub set: crate::api::PackageSet,
    /// Conda platform of this host.
    pub platform: String,
}

/// See [`Order::Collect`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct CollectOrder {
    /// From preflight.
    pub prefix: PathBuf,
    /// So many environments stay, and more only where more are wanted or used.
    pub keep: u32,
    /// Environments that stay in any case: the running epoch's, the published package set's.
    pub wanted: BTreeSet<String>,
    /// Archives in `pkgs/` that stay besides those of the environments that stay.
    pub archives: BTreeSet<String>,
}

/// See [`Order::Verify`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct VerifyOrder {
    /// Where everything is.
    pub prefix: PathBuf,
    /// Which environment; None: all that are ready.
    pub digest: Option<String>,
}

/// One file under the prefix.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq)]
pub struct HostFile {
    /// Path below the prefix, such as `etc/broker.toml`.
    pub path: PathBuf,
    /// Content. May be a secret: never logged (see this type's `Debug`).
    pub content: String,
    /// Permission bits.
    pub mode: u32,
    /// Owned by the broker's user instead of root.
    pub broker_owned: bool,
}

impl std::fmt::Debug for HostFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostFile({:?}, {} bytes, {:o})", self.path, self.content.len(), self.mode)
    }
}

/// See [`Order::Configure`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ConfigureOrder {
    /// From preflight.
    pub prefix: PathBuf,
    /// The environment that `current` and, for a tree bundle, the compiled-in prefix shall point to.
    pub digest: String,
    /// Each written aside and renamed.
    pub files: Vec<HostFile>,
    /// Owner of broker-owned files and of the statedir: a name of the host's /etc/passwd or a number.
    pub run_as: String,
    /// Lead only: the instance whose statedir must be here.
    pub statedir: Option<StateDir>,
    /// Raised if they are lower, never lowered, and put back at removal: sysctl name → least value.
    pub sysctls: BTreeMap<String, u64>,
    /// True while our own broker runs: links that a running broker uses are left alone.
    pub live: bool,
}

/// The lead's statedir (`<prefix>/state`, flux-broker-attributes(7) `statedir`), which holds the queue.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct StateDir {
    /// Written into it when it is made.
    pub instance_id: String,
    /// The instance was online once, so a statedir without its id is refused: its queue would be empty.
    pub established: bool,
}

/// How to start a broker.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LaunchOrder {
    /// From preflight.
    pub prefix: PathBuf,
    /// Full command line; the first word is an absolute path on the host.
    pub argv: Vec<String>,
    /// The whole environment of the process.
    pub env: BTreeMap<String, String>,
    /// Owner of the process.
    pub run_as: String,
    /// systemd's CPUWeight (cgroup v2 `cpu.weight`), 1..10000.
    pub cpu_weight: u32,
    /// What to remember of it, so that a later agent finds it again.
    pub record: LaunchRecord,
}

/// What is remembered of a started broker in `/run/flux-distribute/broker.json`.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LaunchRecord {
    /// Rank it was started for.
    pub rank: u32,
    /// Its `hostname` attribute.
    pub broker_name: String,
    /// uid of the Node.
    pub node_uid: String,
    /// uid of the FluxInstance.
    pub instance_uid: String,
    /// The Flux instance.
    pub instance_id: String,
    /// Epoch.
    pub epoch: u64,
    /// Environment.
    pub digest: String,
    /// sha256 over argv, env, owner and limits: tells whether a start now would differ.
    pub launch: String,
}

/// See [`Order::Stop`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct StopOrder {
    /// Seconds between SIGTERM and SIGKILL.
    pub grace_secs: u64,
}

/// See [`Order::Flux`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct FluxOrder {
    /// From preflight.
    pub prefix: PathBuf,
    /// Environment to take `bin/flux` from.
    pub digest: String,
    /// Arguments.
    pub args: Vec<String>,
    /// The broker's user.
    pub run_as: String,
    /// Killed after so many seconds.
    pub timeout_secs: u64,
}

/// See [`Order::Remove`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct RemoveOrder {
    /// Leave `state/` where it is.
    pub keep_state: bool,
}

/// One line from the stage.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// How far it is.
    Progress(Progress),
    /// The end: it worked.
    Done(Box<Answer>),
    /// The end: it did not.
    Failed(Refusal),
}

/// How far a long order is.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The phase: what is being done, such as `linking packages`.
    pub what: String,
    /// So much of the phase …
    pub done: u64,
    /// … of so much; 0 where unknown.
    pub total: u64,
    /// Packages, where the phase goes by them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packages: Option<Tally>,
    /// Bytes, where the phase moves them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Tally>,
}

/// How much of how much.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// So much …
    pub done: u64,
    /// … of so much; 0 where unknown.
    pub total: u64,
}

impl Progress {
    /// A phase of which nobody knows how long it takes.
    pub fn begun(what: &str) -> Self {
        Self { what: what.to_owned(), ..Self::default() }
    }

    /// A phase that goes by packages.
    pub fn packages(what: &str, done: u64, total: u64) -> Self {
        Self { what: what.to_owned(), done, total, packages: Some(Tally { done, total }), bytes: None }
    }

    /// A phase that goes by bytes.
    pub fn bytes(what: &str, done: u64, total: u64) -> Self {
        Self { what: what.to_owned(), done, total, packages: None, bytes: Some(Tally { done, total }) }
    }

    /// The packages beside the bytes.
    pub fn with_packages(self, done: u64, total: u64) -> Self {
        Self { packages: Some(Tally { done, total }), ..self }
    }
}

/// Why an order was not carried out.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// One sentence: what failed on which object, and the remedy where the user has one.
    pub message: String,
    /// Trying again later can help without anybody changing anything.
    pub transient: bool,
}

impl Refusal {
    /// Nothing changes by trying again.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), transient: false }
    }

    /// Trying again later can help.
    pub fn transient(message: impl Into<String>) -> Self {
        Self { message: message.into(), transient: true }
    }

    /// `what` failed on `path`. Transient, except where the error says that this place will never do.
    pub fn io(what: &str, path: &std::path::Path, error: &std::io::Error) -> Self {
        use std::io::ErrorKind;
        let transient = !matches!(
            error.kind(),
            ErrorKind::PermissionDenied
                | ErrorKind::ReadOnlyFilesystem
                | ErrorKind::NotADirectory
                | ErrorKind::IsADirectory
                | ErrorKind::InvalidInput
        );
        Self { message: format!("can't {what} {}: {error}", path.display()), transient }
    }
}

/// What an order brought.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is done.
    Done,
    /// See [`Order::Observe`].
    Observed(Box<HostView>),
    /// See [`Order::Preflight`].
    Preflight(Preflight),
    /// See [`Order::Link`].
    Linked(Linked),
    /// See [`Order::Collect`].
    Collected(Collected),
    /// See [`Order::Verify`].
    Verified(Vec<crate::packages::Verified>),
    /// See [`Order::Flux`].
    Ran(Ran),
}

/// What a host looks like to us.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct HostView {
    /// `state.json`, where this host is claimed.
    pub state: Option<HostState>,
    /// Environments that are ready, by digest.
    pub environments: Vec<String>,
    /// The broker that runs here, verified by boot id, pid and start time.
    pub broker: Option<RunningBroker>,
    /// A broker of ours was started in this boot and is not running: the last lines of its log that tell why.
    pub died: Option<String>,
    /// `<prefix>/etc/roster.json`: the roster this host was configured by last.
    pub roster: Option<String>,
    /// `<prefix>/etc/applied.json`: what the lead's broker has taken in, and which broker that was.
    pub applied: Option<String>,
    /// /proc/sys/kernel/random/boot_id.
    pub boot_id: String,
    /// Job shells of Flux that run here: each node of a running job has one.
    pub job_shells: usize,
}

impl HostView {
    /// The environment `digest` is ready.
    pub fn has_environment(&self, digest: &str) -> bool {
        self.environments.iter().any(|ready| ready == digest)
    }
}

/// What we did to a host: the undo list, `<prefix>/state.json`.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HostState {
    /// Format of this file.
    pub format: u32,
    /// uid of the FluxInstance that claimed the host.
    #[serde(rename = "instanceUID")]
    pub instance_uid: String,
    /// Where everything is.
    pub prefix: PathBuf,
    /// What to undo, oldest first; written before the thing itself is done.
    pub undo: Vec<Undo>,
    /// What the FluxInstance says of its own end: remembered, because it is gone when this is asked for.
    #[serde(default)]
    pub uninstall: Uninstall,
}

/// One thing we did to a host outside the prefix.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Undo {
    /// A sysctl that we raised: put back if it still has our value.
    Sysctl {
        /// Such as `fs.inotify.max_user_instances`.
        name: String,
        /// Value found.
        old: u64,
        /// Value set.
        new: u64,
    },
    /// A symlink that we made: removed if it still points where we let it point.
    Symlink {
        /// Where it is.
        path: PathBuf,
        /// Directory above the link that we had to make for it, topmost.
        made_parent: Option<PathBuf>,
    },
    /// A file that we wrote.
    File {
        /// Where it is.
        path: PathBuf,
    },
    /// A directory that we made on the way to something else: removed if it is empty.
    Directory {
        /// Where it is.
        path: PathBuf,
    },
}

/// A broker that runs.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct RunningBroker {
    /// Process id in the host's PID namespace.
    pub pid: i32,
    /// Field 22 of `/proc/<pid>/stat`, clock ticks after boot.
    pub start_time: u64,
    /// systemd is its supervisor.
    pub systemd: bool,
    /// What it was started with.
    pub record: LaunchRecord,
}

/// A host that can carry a broker.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Preflight {
    /// Where everything goes.
    pub prefix: PathBuf,
    /// Cores as hwloc counts them, and GPUs.
    pub resources: Resources,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Conda platform.
    pub platform: String,
    /// glibc's version.
    pub glibc: String,
    /// This boot.
    pub boot_id: String,
    /// systemd will supervise.
    pub systemd: bool,
    /// What is not as good as it could be but no reason to refuse.
    pub warnings: Vec<String>,
}

/// An environment that is ready.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Linked {
    /// Tree bundles: the prefix that is compiled into it.
    pub compiled_prefix: Option<PathBuf>,
    /// Bytes on disk.
    pub bytes: u64,
}

/// What was taken away.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Digests of environments.
    pub environments: Vec<String>,
    /// Archives.
    pub archives: u64,
    /// Bytes of all that.
    pub bytes: u64,
    /// What stays only because somebody uses it, and who, in words: worth another look later.
    pub used: Vec<String>,
}

/// What `flux` said.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    /// Exit code; 128 + signal where it was killed.
    pub code: i32,
    /// First 64 KiB of stdout.
    pub stdout: String,
    /// First 64 KiB of stderr.
    pub stderr: String,
}
