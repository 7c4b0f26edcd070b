use std::process::ExitCode;

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
    /// A cluster is running, or an earlier one left files.
    #[error("a local cluster is {state} in {directory}; take it down first with `flux-distribute local down`")]
    AlreadyUp {
        /// `up` or `left over`.
        state: &'static str,
        /// The cluster's state directory.
        directory: String,
    },
    /// A signal ended the command before it finished; everything that it had made is removed.
    #[error("interrupted; everything it had made is removed")]
    Interrupted {
        /// The signal's number, of SIGINT or SIGTERM.
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
    /// The daemon or another helper process refused a request or failed.
    #[error("{0}")]
    Refused(String),
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
            Self::Usage(_) => ExitCode::from(2),
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
