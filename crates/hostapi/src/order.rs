//! The orders of the agent to the host stage, in their wire format. [`super::answer`] has the answers.
//!
//! The stage gets one order as a line of JSON on stdin. It writes JSON lines to stdout: any number of
//! [`Reply::Progress`], a [`Reply::Alive`] every second, and at the end exactly one [`Reply::Done`] or
//! [`Reply::Failed`].

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::PathBuf,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{Answer, EpochId, FileVersion, Progress, Refusal};
use api::{Takeover, Uninstall};

/// One piece of work in the host's namespaces. Each can be killed at any instruction and given again.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Observe the host; changes nothing. → [`Answer::Observed`]
    Observe,
    /// As [`Self::Observe`], but leaves the roster's copy out if the file still is the one that is known. → [`Answer::Observed`]
    ObserveAgain {
        /// [`HostView::roster_version`](super::HostView::roster_version) of the last answer that had the copy.
        known: FileVersion,
    },
    /// Check whether this host can run a broker, and where; changes nothing. → [`Answer::Preflight`]
    Preflight(PreflightOrder),
    /// Create the prefix and its `state.json`: from then on we must clean this host. → [`Answer::Done`]
    Claim(ClaimOrder),
    /// Create `envs/<digest>` from the archives in `pkgs/`. → [`Answer::Linked`]
    Link(LinkOrder),
    /// Remove environments and archives that are no longer needed. → [`Answer::Collected`]
    Collect(CollectOrder),
    /// Hash environments again and compare them with their records. → [`Answer::Verified`]
    Verify(VerifyOrder),
    /// Repair damaged files of an environment from `pkgs/`, while processes may use it. → [`Answer::Mended`]
    Mend(LinkOrder),
    /// Write the files that a broker reads at start. → [`Answer::Done`]
    Configure(ConfigureOrder),
    /// Start the broker outside the pod's cgroup. → [`Answer::Observed`]
    Start(LaunchOrder),
    /// Stop the broker and wait for its end. → [`Answer::Observed`]
    Stop(StopOrder),
    /// Run `<prefix>/envs/<digest>/bin/flux` as the broker's user, and wait for its end. → [`Answer::Ran`]
    Flux(FluxOrder),
    /// Lead only: dump the running instance's queue, and keep the dump. → [`Answer::Dumped`]
    Dump(DumpOrder),
    /// Prepare this host to lead: a statedir from a dump, and the request for the planner. → [`Answer::Done`]
    Takeover(TakeoverOrder),
    /// Undo everything that `state.json` lists. → [`Answer::Done`]
    Remove(RemoveOrder),
}

impl Order {
    /// How long a stage may work on this order without progress. A stage that hangs, on a dead disk, must not block the
    /// agent for ever: its broker would have no supervisor.
    pub fn patience(&self) -> Duration {
        let seconds = match self {
            // The agent supervises a running broker and waits for a collection; one that is cut short continues the
            // next time.
            Self::Observe
            | Self::ObserveAgain { .. }
            | Self::Preflight(_)
            | Self::Claim(_)
            | Self::Configure(_)
            | Self::Collect(_) => 60,
            Self::Start(_) => 120,
            Self::Stop(order) => order.grace_secs.saturating_add(60),
            Self::Flux(order) => order.timeout_secs.saturating_add(60),
            // These may read, write or unlink gigabytes without reporting progress.
            Self::Link(_) | Self::Verify(_) | Self::Mend(_) | Self::Remove(_) | Self::Takeover(_) => 1800,
            // It watches its own time.
            Self::Dump(_) => LONGEST_DUMP.as_secs() + 600,
        };
        Duration::from_secs(seconds)
    }
}

/// A dump that takes longer hangs.
pub const LONGEST_DUMP: Duration = Duration::from_hours(1);

/// See [`Order::Preflight`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PreflightOrder {
    /// The only prefix to try; None: each of `PREFIX_CANDIDATES` in order.
    pub prefix: Option<PathBuf>,
    /// Where the broker will listen. It must be free, unless our own broker listens there.
    pub endpoint: SocketAddr,
    /// Bytes that the packages need on disk, above what the kubelet's eviction threshold keeps free.
    pub need_bytes: u64,
}

/// See [`Order::Claim`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ClaimOrder {
    /// The prefix that preflight chose.
    pub prefix: PathBuf,
    /// uid of the FluxInstance that claims the host.
    pub instance_uid: String,
    /// The FluxInstance's spec.uninstall.
    pub uninstall: Uninstall,
}

/// See [`Order::Link`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LinkOrder {
    /// The prefix that preflight chose.
    pub prefix: PathBuf,
    /// Digest of the package set, which names the environment.
    pub digest: String,
    /// The package set.
    pub set: api::PackageSet,
    /// Conda platform of this host, such as `linux-64`.
    pub platform: String,
    /// True if archives of a lock may still arrive, until the stage's stdin ends: see [`super::Host::run_while`].
    #[serde(default)]
    pub follow: bool,
}

/// See [`Order::Collect`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct CollectOrder {
    /// The prefix that preflight chose.
    pub prefix: PathBuf,
    /// Number of environments to keep; more stay only if they are wanted or in use.
    pub keep: u32,
    /// Digests of environments that always stay: the running epoch's and the published package set's.
    pub wanted: BTreeSet<String>,
    /// Archives in `pkgs/` that stay, besides those of the environments that stay.
    pub archives: BTreeSet<String>,
    /// The lead's broker is up here, so it has restored its queue: all but the newest of the dumps that Flux itself
    /// wrote can go.
    #[serde(default)]
    pub is_queue_up: bool,
}

/// See [`Order::Verify`].
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyOrder {
    /// The prefix.
    pub prefix: PathBuf,
    /// Digest of the environment; None: all that are ready.
    pub digest: Option<String>,
    /// Which files to hash; None: all. Everything else is checked in any case.
    #[serde(default)]
    pub slice: Option<Slice>,
    /// Use only idle processor and disk time.
    #[serde(default)]
    pub idle: bool,
}

/// One of `of` equal parts of an environment's files.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Which part, counted from 0.
    pub number: u32,
    /// Number of parts, at least 1.
    pub of: u32,
}

/// One file under the prefix.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq)]
pub struct HostFile {
    /// Path relative to the prefix, such as `etc/broker.toml`.
    pub path: PathBuf,
    /// Content. It may be a secret, so this type's `Debug` does not show it.
    pub content: String,
    /// Permission bits.
    pub mode: u32,
    /// True if the broker's user owns it, false for root.
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
    /// The prefix that preflight chose.
    pub prefix: PathBuf,
    /// The environment to which `current` and, for a tree bundle, the compiled-in prefix shall point.
    pub digest: String,
    /// Files to write, each under a temporary name that is then renamed.
    pub files: Vec<HostFile>,
    /// Owner of broker-owned files and of the statedir: a name in the host's /etc/passwd, or a uid.
    pub run_as: String,
    /// Lead only: the statedir that must be here.
    pub statedir: Option<StateDir>,
    /// Least values: sysctl name → value. A lower one is raised, a higher one kept; removal restores the old value.
    pub sysctls: BTreeMap<String, u64>,
    /// True while our own broker runs: links that it uses are then left alone.
    pub live: bool,
}

/// The lead's statedir (`<prefix>/state`; `statedir` in flux-broker-attributes(7)), which holds the queue.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct StateDir {
    /// The instance's ID, written into a new statedir.
    pub instance_id: String,
    /// True once the instance has been online: a statedir without its ID is then refused, because its queue would be
    /// empty.
    pub established: bool,
}

/// How to start a broker.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LaunchOrder {
    /// The prefix that preflight chose.
    pub prefix: PathBuf,
    /// The whole command line; the first word is an absolute path on the host.
    pub argv: Vec<String>,
    /// The whole environment of the process.
    pub env: BTreeMap<String, String>,
    /// User of the process: a name in the host's /etc/passwd, or a uid.
    pub run_as: String,
    /// systemd's CPUWeight (cgroup v2 `cpu.weight`), 1..10000.
    pub cpu_weight: u32,
    /// Data to store with the broker, so that a later agent recognizes it.
    pub record: LaunchRecord,
}

/// What `/run/flux-distribute/broker.json` records about a started broker.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchRecord {
    /// The rank that it was started for.
    pub rank: u32,
    /// Its `hostname` attribute.
    pub broker_name: String,
    /// uid of the node's Node object.
    pub node_uid: String,
    /// uid of the FluxInstance.
    pub instance_uid: String,
    /// ID of the Flux instance.
    pub instance_id: String,
    /// The epoch in which it was started.
    pub epoch: u64,
    /// Digest of its environment.
    pub digest: String,
    /// sha256 over argv, env, owner and limits: it differs if a start now would differ.
    pub launch: String,
}

impl LaunchRecord {
    /// The instance and epoch in which it was started.
    pub fn epoch_id(&self) -> EpochId {
        EpochId { instance_id: self.instance_id.clone(), epoch: self.epoch }
    }
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
    /// The prefix that preflight chose.
    pub prefix: PathBuf,
    /// Environment to take `bin/flux` from.
    pub digest: String,
    /// Arguments.
    pub args: Vec<String>,
    /// The broker's user.
    pub run_as: String,
    /// Seconds after which it is killed.
    pub timeout_secs: u64,
}

/// See [`Order::Dump`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct DumpOrder {
    /// The prefix that preflight chose.
    pub prefix: PathBuf,
    /// Environment to take `bin/flux` from.
    pub digest: String,
    /// ID of the running instance, which the dump names.
    pub instance_id: String,
    /// The broker's user.
    pub run_as: String,
}

/// See [`Order::Takeover`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TakeoverOrder {
    /// The prefix that preflight chose.
    pub prefix: PathBuf,
    /// The broker's user, who owns the statedir.
    pub run_as: String,
    /// The dump, a path on the host; the broker restores it when it starts. Without a dump the planner starts an empty
    /// queue.
    pub dump: Option<PathBuf>,
    /// Accept a dump that does not name its instance.
    pub unnamed: bool,
    /// The request for the planner.
    pub takeover: Takeover,
}

/// See [`Order::Remove`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct RemoveOrder {
    /// Keep `state/`, the lead's statedir.
    pub keep_state: bool,
}

/// One line from the stage.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The stage is alive; sent every second until the end.
    Alive,
    /// How far the work has come.
    Progress(Progress),
    /// Last line: the order was carried out.
    Done(Box<Answer>),
    /// Last line: it was not.
    Failed(Refusal),
}
