//! What the agent may ask of its host: the wire format of the host stage. What the host answers is in [`Answer`].
//!
//! An order goes to the stage as one line of JSON on stdin; the stage answers with JSON lines on stdout, any number of
//! [`Reply::Progress`] and then exactly one [`Reply::Done`] or [`Reply::Failed`], and [`Reply::Alive`] all along.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::PathBuf,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{Answer, EpochId, Progress, Refusal};
use api::{Takeover, Uninstall};

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
    /// Put back what is damaged in an environment, from what `pkgs/` holds, beside those that use it. → [`Answer::Mended`]
    Mend(LinkOrder),
    /// Write the files a broker reads at start. → [`Answer::Done`]
    Configure(ConfigureOrder),
    /// Start the broker, out of the pod's reach. → [`Answer::Observed`]
    Start(LaunchOrder),
    /// Stop the broker and wait until it is gone. → [`Answer::Observed`]
    Stop(StopOrder),
    /// Run `<prefix>/envs/<digest>/bin/flux` to its end, as the broker's user. → [`Answer::Ran`]
    Flux(FluxOrder),
    /// Lead: have a dump of the running instance made and kept. → [`Answer::Dumped`]
    Dump(DumpOrder),
    /// Prepare this host to lead: a statedir out of a dump, and the word for the planner. → [`Answer::Done`]
    Takeover(TakeoverOrder),
    /// Take off everything that `state.json` says we did. → [`Answer::Done`]
    Remove(RemoveOrder),
}

impl Order {
    /// How long a stage may be at work on it without progress. One that hangs, on a dead disk, must not hang the agent for
    /// ever: its broker would have no supervisor.
    pub fn patience(&self) -> Duration {
        let seconds = match self {
            // One that collects is waited for by an agent whose broker runs, and what is cut short goes on the next time.
            Self::Observe | Self::Preflight(_) | Self::Claim(_) | Self::Configure(_) | Self::Collect(_) => 60,
            Self::Start(_) => 120,
            Self::Stop(order) => order.grace_secs.saturating_add(60),
            Self::Flux(order) => order.timeout_secs.saturating_add(60),
            // Gigabytes may be read, written or unlinked without a word.
            Self::Link(_) | Self::Verify(_) | Self::Mend(_) | Self::Remove(_) | Self::Takeover(_) => 1800,
            // It watches its own time.
            Self::Dump(_) => LONGEST_DUMP.as_secs() + 600,
        };
        Duration::from_secs(seconds)
    }
}

/// A dump that takes longer hangs.
pub const LONGEST_DUMP: Duration = Duration::from_secs(3600);

/// See [`Order::Preflight`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PreflightOrder {
    /// The only prefix to try; None: `PREFIX_CANDIDATES` in order.
    pub prefix: Option<PathBuf>,
    /// Where the broker will listen: free, unless our own broker holds it.
    pub endpoint: SocketAddr,
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
    pub set: api::PackageSet,
    /// Conda platform of this host.
    pub platform: String,
    /// Archives of a lock may still come: until the stage's stdin ends, see [`super::Host::run_while`].
    #[serde(default)]
    pub follow: bool,
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
    /// The lead's broker is up here, so it has restored what it was to restore: of the dumps that Flux itself has written
    /// the newest stay.
    #[serde(default)]
    pub is_queue_up: bool,
}

/// See [`Order::Verify`].
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyOrder {
    /// Where everything is.
    pub prefix: PathBuf,
    /// Which environment; None: all that are ready.
    pub digest: Option<String>,
    /// Which files are hashed; None: all of them. Whatever else there is to look at is looked at in any case.
    #[serde(default)]
    pub slice: Option<Slice>,
    /// Only with what processor and disk have left over.
    #[serde(default)]
    pub idle: bool,
}

/// Some of an environment's files: one of `of` equal parts.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Which part, from 0.
    pub number: u32,
    /// How many parts there are, at least 1.
    pub of: u32,
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
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
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

impl LaunchRecord {
    /// The epoch that it was started in.
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

/// See [`Order::Dump`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct DumpOrder {
    /// From preflight.
    pub prefix: PathBuf,
    /// Environment to take `bin/flux` from.
    pub digest: String,
    /// The instance that runs: the dump says whose it is.
    pub instance_id: String,
    /// The broker's user.
    pub run_as: String,
}

/// See [`Order::Takeover`].
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TakeoverOrder {
    /// From preflight.
    pub prefix: PathBuf,
    /// The broker's user, whose the statedir is.
    pub run_as: String,
    /// The dump, a path on the host; with it the statedir is made, without it the planner's roster begins an empty one.
    pub dump: Option<PathBuf>,
    /// The dump need not say of which instance it is.
    pub unnamed: bool,
    /// The word.
    pub takeover: Takeover,
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
    /// It is not stopped: said all along.
    Alive,
    /// How far it is.
    Progress(Progress),
    /// The end: it worked.
    Done(Box<Answer>),
    /// The end: it did not.
    Failed(Refusal),
}
