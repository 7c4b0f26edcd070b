//! Why a broker was not started or stopped.

use std::{
    io,
    path::{Path, PathBuf},
};

use super::found::UnknownBroker;
use broker::unit::UnknownUser;
use host::cgroup;
use hostapi::Refusal;

/// Why a broker was not started or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Another stage works on the broker.
    #[error("another start or stop of the broker is under way")]
    UnderWay,
    /// The host's own words, such as for a `run_as` that names nobody.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// systemd starts nothing as such a user.
    #[error(transparent)]
    UnknownUser(#[from] UnknownUser),
    /// The order's argv is empty.
    #[error("the order names no command")]
    NoCommand,
    /// A file or directory.
    #[error("can't {what} {}", path.display())]
    File {
        /// Verb.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// The launcher could not be run.
    #[error("can't run the launcher of the broker")]
    Spawn {
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// What the launcher said.
    #[error("{sentence}")]
    Launcher {
        /// Its words.
        sentence: String,
    },
    /// A step on the way to the broker.
    #[error("can't {what}")]
    Step {
        /// Verb and object.
        what: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// It could not leave the pod's cgroups.
    #[error(transparent)]
    Cgroup(#[from] cgroup::CgroupError),
    /// systemctl said no.
    #[error("{command}: {output}")]
    Systemctl {
        /// Command line.
        command: String,
        /// What it said.
        output: String,
    },
    /// systemctl did not answer in time.
    #[error("{command} took longer than {seconds} s")]
    Slow {
        /// Command line.
        command: String,
        /// It had so many.
        seconds: u64,
    },
    /// It was started and ended at once.
    #[error("the broker ended right after its start: {why}")]
    Gone {
        /// From its log.
        why: String,
    },
    /// A broker runs that may lead and have jobs.
    #[error("{0}")]
    Unrecorded(UnknownBroker),
    /// The kernel refused a signal.
    #[error("can't signal process {pid}")]
    Signal {
        /// Which.
        pid: i32,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// SIGKILL did not help, such as in an uninterruptible wait for a file system.
    #[error("process {pid} of the broker does not end, even by SIGKILL")]
    Unkillable {
        /// Which.
        pid: i32,
    },
    /// Forget is for after the stop.
    #[error("the broker still runs as process {pid}; stop it first")]
    StillRuns {
        /// Which.
        pid: i32,
    },
}

pub(super) fn file(what: &'static str, path: &Path, source: io::Error) -> LaunchError {
    LaunchError::File { what, path: path.to_owned(), source }
}

impl From<LaunchError> for Refusal {
    fn from(error: LaunchError) -> Self {
        let transient = match error {
            LaunchError::Refused(refusal) => return refusal,
            LaunchError::UnknownUser(_) | LaunchError::NoCommand => false,
            _ => true,
        };
        Self { message: base::error_chain(&error), transient }
    }
}
