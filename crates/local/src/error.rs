use std::{collections::BTreeSet, path::PathBuf, process::ExitCode};

use api::STAND_IN;

/// Why a `local` command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// The command line or the machine doesn't allow what was asked. Says what is wrong, and the remedy.
    #[error("{0}")]
    Usage(String),
    /// There is no local cluster.
    #[error("no local cluster is up; start one with `flux-distribute local up`")]
    NotUp,
    /// The cluster has no FluxInstance.
    #[error(
        "there is no FluxInstance; create one with `flux-distribute local apply FILE`, or with kubectl and the kubeconfig of `flux-distribute local \
         kubeconfig`"
    )]
    NoInstance,
    /// A cluster is running, or an earlier one left files.
    #[error("a local cluster is {state} in {directory}; take it down first with `flux-distribute local down`")]
    AlreadyUp {
        /// `up` or `left over`.
        state: &'static str,
        /// The cluster's state directory.
        directory: String,
    },
    /// The directory of local clusters has something else in it.
    #[error(
        "{} is not empty and has no local cluster in it: remove what is there if an older version left it, or name another directory in \
         FLUX_DISTRIBUTE_LOCAL_DIR",
        .0.display()
    )]
    NotOurs(PathBuf),
    /// A signal ended the command before it finished; everything that it had made is removed.
    #[error("interrupted; everything it had made is removed")]
    Interrupted {
        /// The signal's number, of SIGINT, SIGTERM or SIGHUP.
        signal: i32,
    },
    /// Another command took the cluster down while this one started it.
    #[error("`flux-distribute local down` took the cluster down while it was starting")]
    TakenDown,
    /// Not all nodes came online in time; the cluster keeps running.
    #[error("{0}")]
    Late(String),
    /// The cluster can't become what was asked for, and is taken down again.
    #[error("{0}; the cluster is taken down again")]
    GivenUp(String),
    /// The cluster has no node of this name.
    #[error("there is no node {0}; see `flux-distribute local status`")]
    NoNode(String),
    /// The node is off.
    #[error("{0} is powered off; `flux-distribute local node {0} power-on` boots it")]
    PoweredOff(String),
    /// The node's agent has ended, and was not started again yet.
    #[error("no agent runs on {0} at the moment; try again")]
    NoAgent(String),
    /// The agent or broker of a node has not been started yet.
    #[error("the {who} on {node} has not written a log yet")]
    NoLog {
        /// `agent` or `broker`.
        who: &'static str,
        /// The node.
        node: String,
    },
    /// A command needs Flux, and the node has the stand-in.
    #[error(
        "{STAND_IN}: this node runs flux-distribute's stand-in for a broker, so `flux {0}` can't run; to install Flux, call `local up` \
         with --bundle or --channel"
    )]
    NeedsFlux(String),
    /// Another command changes the cluster in this directory.
    #[error("another `local` command is still running in {}", .0.display())]
    Busy(PathBuf),
    /// The nodes' processes can't be kept apart from the machine's.
    #[error("no cgroup file system is mounted on this machine")]
    NoCgroups,
    /// Only the container's image says what it runs.
    #[error("container {0} has no command, and local mode runs no images")]
    NoCommand(String),
    /// The kernel does not end these processes.
    #[error("processes {pids:?} in the cgroup {group} do not die")]
    Undying {
        /// The processes.
        pids: BTreeSet<i32>,
        /// Their cgroup.
        group: String,
    },
    /// This many networks are in use on the machine, by other clusters or something else.
    #[error("all {0} networks from 10.231.0.0/16 on are in use on this machine")]
    NoNetwork(u8),
    /// Something has removed a network link of the cluster.
    #[error("the link {0} is gone")]
    LinkGone(String),
    /// A process of the cluster ended, or said why it can't do its work.
    #[error("{who} does not start: {why}")]
    NotStarted {
        /// The process.
        who: String,
        /// Its last words.
        why: String,
    },
    /// A process of the cluster said nothing.
    #[error("{who} does not start within {seconds} s")]
    Slow {
        /// The process.
        who: String,
        /// The time limit.
        seconds: u64,
    },
    /// The process that boots a node ended before the node had its network.
    #[error("the boot of {0} was aborted")]
    Aborted(String),
    /// A bug. The text says what the thread does, such as `boots node1`.
    #[error("the thread that {0} panicked")]
    Panicked(String),
    /// A bug: the part of the daemon that runs this node has ended.
    #[error("the kubelet of {node} has ended; see {}", log.display())]
    KubeletEnded {
        /// The node.
        node: String,
        /// The daemon's log.
        log: PathBuf,
    },
    /// The daemon refused a request, for this reason.
    #[error("{0}")]
    Daemon(String),
    /// The API server refused a request.
    #[error("{what}: {why}")]
    Refused {
        /// `can't <do something> <object>`.
        what: String,
        /// The server's words.
        why: String,
    },
    /// An operation failed.
    #[error("{what}")]
    Failed {
        /// `can't <do something> <object>`.
        what: String,
        /// The error of the system or a library.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl LocalError {
    /// The exit code: 2 for unusable input, 128 plus the signal's number after a signal, 1 otherwise.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(_) | Self::NoNode(_) => ExitCode::from(2),
            // Shells use the same numbers.
            Self::Interrupted { signal } => ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX)),
            _ => ExitCode::FAILURE,
        }
    }
}

/// Adds to an error what failed.
pub(crate) trait Context<T> {
    /// Wraps the error; `what` returns `can't <do something> <object>`.
    fn context(self, what: impl FnOnce() -> String) -> Result<T, LocalError>;
}

impl<T, E: Into<Box<dyn std::error::Error + Send + Sync>>> Context<T> for Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, LocalError> {
        self.map_err(|source| LocalError::Failed { what: what(), source: source.into() })
    }
}
