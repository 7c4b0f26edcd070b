//! Why a step was not carried out.

use std::path::PathBuf;

use broker::{reload::ReloadError, rfc3::RpcError};
use cluster::ApiError;
use hostapi::{Answer, HostError, Refusal};
use model::broker_toml::RenderError;
use packages::FetchError;

/// Why a step was not carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The host stage refused the order, or could not run.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The packages could not be fetched.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// A call to the API server failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// A directory of the host could not be opened.
    #[error("can't open {path} on the host")]
    Directory {
        /// Its path.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Another process has the brokers' port. Any user of the host can bring that about.
    #[error(transparent)]
    PortTaken(Refusal),
    /// Something else must happen first, and nothing is wrong with this node; the text says what.
    #[error("{0}")]
    NotYet(String),
    /// The published certificate is another one than the epoch was started with.
    #[error(
        "Secret flux-curve holds another certificate than this epoch was started with: put the old one back, or delete the \
         Secret, then a node that has the old one publishes it again"
    )]
    Certificate,
    /// What the planner published can't be rendered for this host.
    #[error("can't render what the broker reads")]
    Render(#[from] RenderError),
    /// Something to be stored as JSON could not be serialized.
    #[error("can't serialize {what}")]
    Serialize {
        /// What.
        what: &'static str,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A task of the agent ended by a panic.
    #[error("a task of the agent failed")]
    Task(#[source] tokio::task::JoinError),
    /// The broker refused a request over its socket, or did not answer.
    #[error("the broker did not carry out the request")]
    Broker(#[from] RpcError),
    /// The live change was not completed.
    #[error("the lead could not load what the roster declares")]
    Reload(#[from] ReloadError),
    /// `flux` failed.
    #[error("flux {command}: {output}")]
    Flux {
        /// Its arguments.
        command: String,
        /// The last line that it printed.
        output: String,
    },
}

impl StepError {
    /// True if another attempt may succeed without a change by an administrator.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Host(HostError::Refused(refusal)) => refusal.transient,
            Self::Fetch(error) => error.is_transient(),
            Self::Certificate | Self::Render(_) | Self::Serialize { .. } | Self::Task(_) => false,
            _ => true,
        }
    }

    /// Nothing is wrong with this node: something else must happen first, or the API server has no answer for now.
    pub fn is_waiting(&self) -> bool {
        match self {
            Self::NotYet(_) => true,
            Self::Api(error) => !error.is_lasting(),
            _ => false,
        }
    }
}

/// The host stage answered another order than the one it got.
pub fn unexpected(answer: &Answer) -> StepError {
    HostError::unexpected(answer).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_others_must_do_first_counts_as_waiting() {
        let what = || "get Secret flux-curve".to_owned();
        let refused = |code| {
            let status = kube::core::Status::failure("refused", "Refused").with_code(code);
            StepError::Api(ApiError::Api { what: what(), source: Box::new(kube::Error::Api(Box::new(status))) })
        };
        let content = ApiError::Content { object: "Secret flux-curve".to_owned(), reason: "malformed".to_owned() };
        for (error, waiting) in [
            (StepError::NotYet("waiting for Secret flux-curve".to_owned()), true),
            (StepError::Api(ApiError::Timeout(what())), true),
            (refused(403), true),
            (refused(422), false),
            (StepError::Api(content), false),
            (StepError::Certificate, false),
            (StepError::Host(HostError::Refused(Refusal::transient("port 8050 is taken"))), false),
        ] {
            assert_eq!(error.is_waiting(), waiting, "{error}");
        }
    }
}
