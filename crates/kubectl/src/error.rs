//! How a command fails.

use std::io;

use api::{INSTANCE, NAMESPACE};
use cluster::ApiError;

use crate::screen::visible_lines;

/// Why a command could not do what it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KubectlError {
    /// The kubeconfig can't be read or used.
    #[error(
        "no cluster to speak to: name a kubeconfig by --kubeconfig or KUBECONFIG, and one of its contexts by --context"
    )]
    Kubeconfig(#[source] kube::config::KubeconfigError),
    /// A client can't be made from the kubeconfig.
    #[error("the kubeconfig can't be used")]
    Client(#[source] kube::Error),
    /// The API server refuses a call, or does not answer.
    #[error("{}", remedy(.0))]
    Api(#[source] ApiError),
    /// The cluster has no FluxInstance of that name.
    #[error(
        "there is no FluxInstance {INSTANCE} in namespace {NAMESPACE}: apply deploy/daemonset-installer.yaml, or check \
         `kubectl config current-context`"
    )]
    NoInstance,
    /// What the command was given can't be used.
    #[error("{0}")]
    Input(String),
    /// The cluster is in a state in which the command can't work.
    #[error("{0}")]
    State(String),
    /// kubectl can't be run.
    #[error("can't run kubectl: put it into your PATH")]
    Kubectl(#[source] io::Error),
    /// The output can't be written.
    #[error("can't write the output")]
    Write(#[from] io::Error),
}

impl From<ApiError> for KubectlError {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl KubectlError {
    /// 2 if only other arguments or another kubeconfig can help, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Kubeconfig(_) | Self::Client(_) | Self::Input(_) => 2,
            _ => 1,
        }
    }

    /// What happened, why, and the remedy, for a person: it may quote what a server has sent.
    pub fn text(&self) -> String {
        visible_lines(&base::error_chain(self))
    }

    /// True if the reader of the output has gone away, as `head` does: no failure.
    pub fn is_closed_output(&self) -> bool {
        matches!(self, Self::Write(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

/// What to do about a call that failed.
fn remedy(error: &ApiError) -> String {
    match (error.code(), error) {
        (Some(401), _) => {
            "the API server doesn't know you: log in again, or name another context by --context".to_owned()
        }
        (Some(403), _) => {
            format!("you may not do this: somebody who may has to give you the right, in namespace {NAMESPACE}")
        }
        (Some(404), _) => {
            "the cluster has no such objects: flux-distribute is not installed there, or another version is".to_owned()
        }
        (Some(_), _) => "the API server refuses".to_owned(),
        (None, ApiError::Api { source, .. }) if matches!(source.as_ref(), kube::Error::SerdeError(_)) => {
            "this program can't read what is there: use the program of the version that is installed".to_owned()
        }
        (None, ApiError::Api { .. } | ApiError::Timeout(_)) => {
            "the API server does not answer: check the kubeconfig, and whether `kubectl version` works".to_owned()
        }
        (None, _) => "an object can't be read".to_owned(),
    }
}
