//! Why a broker could not be started, stopped or forgotten.

use std::io;

use super::found::UnknownBroker;
use broker::unit::UnknownUser;
use host::{cgroup, files::FileError};
use hostapi::Refusal;

/// Why a broker could not be started, stopped or forgotten.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Another stage holds the broker's lock.
    #[error("another start or stop of the broker is under way")]
    UnderWay,
    /// Another part of the host stage refused, for example because the user `run_as` does not exist.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// systemd can't start a service as such a user.
    #[error(transparent)]
    UnknownUser(#[from] UnknownUser),
    /// The order's argv is empty.
    #[error("the order names no command")]
    NoCommand,
    /// A file or directory operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The launcher could not be started.
    #[error("can't run the launcher of the broker")]
    Spawn {
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The launcher reported an error.
    #[error("{sentence}")]
    Launcher {
        /// Its report, one sentence.
        sentence: String,
    },
    /// A step towards the broker failed.
    #[error("can't {what}")]
    Step {
        /// Verb and object, such as `start a session`.
        what: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The launcher could not leave the pod's cgroups.
    #[error(transparent)]
    Cgroup(#[from] cgroup::CgroupError),
    /// systemctl failed.
    #[error("{command}: {output}")]
    Systemctl {
        /// The command line.
        command: String,
        /// Its stdout and stderr.
        output: String,
    },
    /// systemctl did not end in time.
    #[error("{command} took longer than {seconds} s")]
    Slow {
        /// The command line.
        command: String,
        /// The time limit.
        seconds: u64,
    },
    /// The broker started and ended at once.
    #[error("the broker ended right after its start: {why}")]
    Gone {
        /// The reason, from its log.
        why: String,
    },
    /// A broker runs that may be a lead and have jobs.
    #[error("{0}")]
    Unrecorded(UnknownBroker),
    /// The kernel refused a signal.
    #[error("can't signal process {pid}")]
    Signal {
        /// The process.
        pid: i32,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The process survived SIGKILL, for example in an uninterruptible wait for a file system.
    #[error("process {pid} of the broker does not end, even after SIGKILL")]
    Unkillable {
        /// The process.
        pid: i32,
    },
    /// `forget` was called before `stop`.
    #[error("the broker still runs as process {pid}; stop it first")]
    StillRuns {
        /// The process.
        pid: i32,
    },
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
