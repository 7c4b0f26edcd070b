//! The host's answer to an [`Order`](super::Order), or its reason for a refusal.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{FileVersion, LaunchRecord, RosterCopy};
use crate::Machine;
use api::{Dump, Resources, Takeover, Uninstall};

/// Why an order was not carried out, or failed.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// One sentence: what failed on which object, and the remedy if the user has one.
    pub message: String,
    /// True if a later retry can succeed without a change by an administrator.
    pub transient: bool,
}

impl Refusal {
    /// A permanent refusal: a retry fails again.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), transient: false }
    }

    /// A transient refusal: a later retry can succeed.
    pub fn transient(message: impl Into<String>) -> Self {
        Self { message: message.into(), transient: true }
    }

    /// `what` failed on `path`. Transient, unless the kind of error shows that this path will never work.
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

/// The result of an order.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The order was carried out; there is nothing to report.
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

/// What the stage observed on a host.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct HostView {
    /// `state.json`, if this host is claimed.
    pub state: Option<HostState>,
    /// Digests of the environments that are ready.
    pub environments: Vec<String>,
    /// The broker that runs here, verified by boot id, pid and start time.
    pub broker: Option<RunningBroker>,
    /// True if the lead's broker runs but its statedir was removed: only the broker has the queue now.
    pub statedir_lost: bool,
    /// True if a running broker's socket was removed with its directory: no process can connect to it.
    pub socket_lost: bool,
    /// If a broker of ours was started in this boot and no longer runs: the last lines of its log.
    pub died: Option<String>,
    /// The instance ID with which that broker was started.
    pub died_instance_id: Option<String>,
    /// If no broker runs, and the last one was a lead that flux-shutdown(1) stopped, in this boot or before: its epoch.
    pub shut_down: Option<EpochId>,
    /// Description of a running broker whose instance is unknown: it may be a lead, and have jobs.
    pub unknown: Option<String>,
    /// `<prefix>/etc/roster.json`: the roster that this host was last configured with.
    pub roster: Option<RosterCopy>,
    /// The file that `roster` was read from.
    pub roster_version: Option<FileVersion>,
    /// `<prefix>/etc/applied.json`: what the lead's broker has loaded, and which broker that was.
    pub applied: Option<String>,
    /// The dumps kept here, oldest first.
    pub dumps: Vec<Dump>,
    /// An administrator's request that this node become the lead.
    pub takeover: Option<Takeover>,
    /// Content of /proc/sys/kernel/random/boot_id.
    pub boot_id: String,
    /// Cores and GPUs at this moment: a driver may be loaded after the agent starts, or be unloaded.
    pub resources: Resources,
    /// kubelet's CPU manager has policy `static` at this moment.
    pub static_cpus: bool,
    /// Number of Flux job shells in the broker's unit or cgroup: each node of a running job has one.
    pub job_shells: usize,
}

impl HostView {
    /// True if the environment `digest` is ready.
    pub fn has_environment(&self, digest: &str) -> bool {
        self.environments.iter().any(|ready| ready == digest)
    }
}

/// An epoch of one Flux instance.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EpochId {
    /// The Flux instance's ID.
    #[serde(rename = "instanceID")]
    pub instance_id: String,
    /// The number of the epoch.
    pub epoch: u64,
}

/// The claim and undo list of a host, `<prefix>/state.json`.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HostState {
    /// Format of this file.
    pub format: u32,
    /// uid of the FluxInstance that claimed the host.
    #[serde(rename = "instanceUID")]
    pub instance_uid: String,
    /// The prefix, an absolute path on the host.
    pub prefix: PathBuf,
    /// What to undo, oldest first. Each entry is written before the change itself.
    pub undo: Vec<Undo>,
    /// The FluxInstance's spec.uninstall, kept here because the FluxInstance is gone when it is needed.
    #[serde(default)]
    pub uninstall: Uninstall,
    /// The machine that was claimed, because nodes may share the directory. None if an older version claimed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
}

/// One change to a host outside the prefix.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Undo {
    /// A sysctl that we raised; restored if it still has our value.
    Sysctl {
        /// Name, such as `fs.inotify.max_user_instances`.
        name: String,
        /// Value before the change.
        old: u64,
        /// Value that we set.
        new: u64,
    },
    /// A symlink that we made; removed if it still links into one of our environments.
    Symlink {
        /// Path of the link.
        path: PathBuf,
        /// The topmost directory above the link that we had to make for it.
        made_parent: Option<PathBuf>,
    },
    /// A file that we wrote; removed.
    File {
        /// Path of the file.
        path: PathBuf,
    },
    /// A directory above the prefix that we made; removed if it is empty.
    Directory {
        /// Path of the directory.
        path: PathBuf,
    },
}

/// A broker that runs.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct RunningBroker {
    /// Process id in the host's PID namespace.
    pub pid: i32,
    /// Clock ticks from boot to its start: field 22 of `/proc/<pid>/stat`.
    pub start_time: u64,
    /// True if systemd supervises it.
    pub systemd: bool,
    /// The record written when it was started.
    pub record: LaunchRecord,
}

/// The result of preflight for a host that can run a broker.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Preflight {
    /// The prefix to use.
    pub prefix: PathBuf,
    /// Cores as hwloc counts them, and GPUs.
    pub resources: Resources,
    /// kubelet's CPU manager has policy `static`.
    pub static_cpus: bool,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Conda platform, such as `linux-64`.
    pub platform: String,
    /// Version of the host's glibc.
    pub glibc: String,
    /// Content of /proc/sys/kernel/random/boot_id.
    pub boot_id: String,
    /// True if systemd will supervise the broker.
    pub systemd: bool,
    /// Shortcomings that are no reason to refuse, one sentence each.
    pub warnings: Vec<String>,
}

/// A linked environment, ready for use.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Linked {
    /// For a tree bundle: the prefix compiled into its files.
    pub compiled_prefix: Option<PathBuf>,
    /// Bytes on disk.
    pub bytes: u64,
    /// Warnings that do not make the environment unusable; empty if it was ready before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// What a collection removed.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Digests of the removed environments.
    pub environments: Vec<String>,
    /// Number of removed archives.
    pub archives: u64,
    /// Number of removed dumps that Flux itself had written.
    #[serde(default)]
    pub dumps: u64,
    /// Bytes freed in all.
    pub bytes: u64,
    /// What was kept only because it is in use, and by what; a later collection may remove it.
    pub used: Vec<String>,
}

/// A new dump.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Dumped {
    /// Path on the host.
    pub path: PathBuf,
    /// Its name, time and size.
    pub dump: Dump,
    /// What flux-dump(1) printed about entries that it could not read and left out.
    pub warnings: String,
}

/// The result of a `flux` command.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    /// Exit code; 128 + signal if a signal killed it.
    pub code: i32,
    /// First 64 KiB of stdout.
    pub stdout: String,
    /// First 64 KiB of stderr.
    pub stderr: String,
}
