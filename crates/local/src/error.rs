use std::process::ExitCode;

/// Why a `local` command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// The command line cannot be served as it is.
    #[error("{0}")]
    Usage(String),
    /// There is no local cluster.
    #[error("no local cluster is up; start one with `flux-distribute local up`")]
    NotUp,
    /// There is one already, or what an earlier one left.
    #[error("a local cluster is {state} in {directory}; take it down first with `flux-distribute local down`")]
    AlreadyUp {
        /// `up`, or `left over`.
        state: &'static str,
        /// The state directory.
        directory: String,
    },
    /// The user has ended the command before it was done; what it had begun is taken off again.
    #[error("interrupted; nothing is left of it")]
    Interrupted {
        /// The number of SIGINT or SIGTERM.
        signal: i32,
    },
    /// Another command took the cluster down while this one brought it up.
    #[error("`flux-distribute local down` has taken the cluster down while it came up")]
    TakenDown,
    /// Not all nodes are online in time; the cluster still runs.
    #[error("{0}")]
    Late(String),
    /// The cluster never came to be what was wanted, and is taken down again.
    #[error("{0}; the cluster is taken down again")]
    GivenUp(String),
    /// The daemon refused or could not do what it was asked.
    #[error("{0}")]
    Refused(String),
    /// Something on the way failed.
    #[error("{what}")]
    Failed {
        /// What failed on which object.
        what: String,
        /// Cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl LocalError {
    /// What the process ends with: 2 for bad input, 128 and the signal's number after a signal, else 1.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(_) => ExitCode::from(2),
            // As a shell counts it.
            Self::Interrupted { signal } => ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX)),
            _ => ExitCode::FAILURE,
        }
    }
}

/// Says what was being done when something failed.
pub(crate) trait Context<T> {
    /// Wraps the cause; `what` is `can't <do something> <object>`.
    fn context(self, what: impl FnOnce() -> String) -> Result<T, LocalError>;
}

impl<T, E: Into<Box<dyn std::error::Error + Send + Sync>>> Context<T> for Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, LocalError> {
        self.map_err(|source| LocalError::Failed { what: what(), source: source.into() })
    }
}
