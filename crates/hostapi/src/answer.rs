//! What the host answers to an [`Order`](super::Order), and why it doesn't.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::LaunchRecord;
use crate::Machine;
use api::{Dump, Resources, Takeover, Uninstall};

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
    /// See [`Order::Observe`](super::Order::Observe).
    Observed(Box<HostView>),
    /// See [`Order::Preflight`](super::Order::Preflight).
    Preflight(Preflight),
    /// See [`Order::Link`](super::Order::Link).
    Linked(Linked),
    /// See [`Order::Collect`](super::Order::Collect).
    Collected(Collected),
    /// See [`Order::Verify`](super::Order::Verify).
    Verified(Vec<crate::Verified>),
    /// See [`Order::Mend`](super::Order::Mend).
    Mended(crate::Mended),
    /// See [`Order::Flux`](super::Order::Flux).
    Ran(Ran),
    /// See [`Order::Dump`](super::Order::Dump).
    Dumped(Dumped),
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
    /// The lead's broker runs and its statedir was removed: only the broker has the queue now.
    pub statedir_lost: bool,
    /// The broker's rundir was removed while it runs, and its socket with it: nobody can ask it anything.
    pub rundir_lost: bool,
    /// A broker of ours was started in this boot and is not running: the last lines of its log that tell why.
    pub died: Option<String>,
    /// The instance ID that the broker which has died was started with.
    pub died_instance_id: Option<String>,
    /// No broker runs here, and the last one led and was shut down by flux-shutdown(1), in this boot or before: its epoch.
    pub shut_down: Option<EpochId>,
    /// A broker runs here that nothing tells the instance of, in words: it may lead, and have jobs.
    pub unknown: Option<String>,
    /// `<prefix>/etc/roster.json`: the roster this host was configured by last.
    pub roster: Option<String>,
    /// `<prefix>/etc/applied.json`: what the lead's broker has taken in, and which broker that was.
    pub applied: Option<String>,
    /// Dumps that are kept here, oldest first.
    pub dumps: Vec<Dump>,
    /// An administrator's word that this node shall lead.
    pub takeover: Option<Takeover>,
    /// /proc/sys/kernel/random/boot_id.
    pub boot_id: String,
    /// Cores and GPUs by now: a driver may come after the agent, and go.
    pub resources: Resources,
    /// Job shells of Flux that run in the broker's unit or cgroup: each node of a running job has one.
    pub job_shells: usize,
}

impl HostView {
    /// The environment `digest` is ready.
    pub fn has_environment(&self, digest: &str) -> bool {
        self.environments.iter().any(|ready| ready == digest)
    }
}

/// An epoch of one Flux instance.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EpochId {
    /// The Flux instance.
    #[serde(rename = "instanceID")]
    pub instance_id: String,
    /// Its epoch.
    pub epoch: u64,
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
    /// Whose host it is: nodes may share the directory. None: a version before this one has claimed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
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
    /// What people should know though nothing is wrong with it; empty where it was ready before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// What was taken away.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Digests of environments.
    pub environments: Vec<String>,
    /// Archives.
    pub archives: u64,
    /// Dumps that Flux itself has written.
    #[serde(default)]
    pub dumps: u64,
    /// Bytes of all that.
    pub bytes: u64,
    /// What stays only because somebody uses it, and who, in words: worth another look later.
    pub used: Vec<String>,
}

/// A dump that was made.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Dumped {
    /// Where it is on the host.
    pub path: PathBuf,
    /// What it is.
    pub dump: Dump,
    /// What flux-dump(1) could not read and has left out, in its words.
    pub warnings: String,
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
