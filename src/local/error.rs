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
    /// What the process ends with: 2 for bad input, else 1.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Usage(_) => ExitCode::from(2),
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
