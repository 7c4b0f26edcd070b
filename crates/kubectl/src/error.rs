//! How a command fails.

use std::{error::Error, io, path::PathBuf};

use api::{INSTANCE, NAMESPACE};
use base::words::visible_lines;
use cluster::ApiError;

/// Why a command could not do what it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum KubectlError {
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
        "there is no FluxInstance {INSTANCE} in namespace {NAMESPACE}: check `kubectl config current-context`, or apply \
         deploy/daemonset-installer.yaml"
    )]
    NoInstance,
    /// What the command was given can't be used.
    #[error("{0}")]
    Input(String),
    /// A question was answered by no.
    #[error("nothing was changed")]
    Declined,
    /// The answer to a question can't be read.
    #[error("can't read the answer")]
    Answer(#[source] io::Error),
    /// No pod of an agent is on the node of that name.
    #[error(
        "no agent runs on node {0}: `kubectl flux status -o wide` lists the nodes, `kubectl flux doctor` says what is wrong"
    )]
    NoAgent(String),
    /// A signal ends this process, because a person has had enough or the machine goes down.
    #[error("interrupted: {goes_on}")]
    Interrupted {
        /// The signal's number.
        signal: i32,
        /// What the interrupted command leaves: what goes on in the cluster, or that nothing was changed.
        goes_on: &'static str,
    },
    /// The cluster is in a state in which the command can't work.
    #[error("{0}")]
    State(String),
    /// kubectl can't be run.
    #[error("can't run kubectl: put it into your PATH")]
    Kubectl(#[source] io::Error),
    /// A file can't be made or written.
    #[error("can't write {}: name another file by --out", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// What was found can't be turned into JSON or YAML.
    #[error("can't turn what was found into {0}")]
    Format(&'static str, #[source] io::Error),
    /// This process can't have threads.
    #[error("can't start")]
    Runtime(#[source] io::Error),
    /// stdout can't be written.
    #[error("can't write the output")]
    Write(#[source] io::Error),
}

impl From<ApiError> for KubectlError {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl KubectlError {
    /// 2 if only other arguments or another kubeconfig can help; 128 + signal, as in a shell, if it was interrupted; else 1.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Kubeconfig(_) | Self::Client(_) | Self::Input(_) => 2,
            Self::Interrupted { signal, .. } => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            _ => 1,
        }
    }

    /// What happened, why, and the remedy, for a person: it may quote what a server has sent.
    pub(crate) fn text(&self) -> String {
        visible_lines(&chain(self))
    }

    /// As [`is_denied`].
    pub(crate) fn is_denied(&self) -> bool {
        matches!(self, Self::Api(error) if is_denied(error))
    }

    /// True if the API server has no such object, or no such kind of objects.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::NoInstance) || matches!(self, Self::Api(error) if error.code() == Some(404))
    }

    /// True if the reader of the output has gone away, as `head` does: no failure.
    pub(crate) fn is_closed_output(&self) -> bool {
        matches!(self, Self::Write(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

/// True if the API server doesn't know the caller or gives the caller no right, or if the caller's login command has failed: to ask again and
/// again would lock an account, or open one window of a browser after the other.
pub(crate) fn is_denied(error: &ApiError) -> bool {
    let mut causes = std::iter::successors(Some(error as &(dyn Error + 'static)), |cause| (*cause).source());
    matches!(error.code(), Some(401 | 403)) || causes.any(is_of_login)
}

/// An error and its causes as one sentence. Whoever answers in the place of an API server may send a whole page: its first line suffices.
/// The client's words for a login command that has failed are left out: they hold its environment and what it printed.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let causes = || std::iter::successors(Some(error), |cause: &&(dyn Error + 'static)| (*cause).source());
    if causes().any(is_of_login) {
        let ours = match error.downcast_ref::<KubectlError>() {
            Some(KubectlError::Client(_)) | None => String::new(),
            Some(own) => format!("{own}: "),
        };
        return format!("{ours}{LOGIN}");
    }
    let foreign = |cause: &(dyn Error + 'static)| {
        cause.is::<kube::Error>() || cause.is::<Box<kube::Error>>() || cause.is::<kube::config::KubeconfigError>()
    };
    let sentence = base::error_chain(error);
    if causes().any(foreign) { sentence.lines().next().unwrap_or_default().to_owned() } else { sentence }
}

const LOGIN: &str = "the login of the kubeconfig's user failed: log in again, and see whether `kubectl version` works";

/// True if the client could not log in.
fn is_of_login(cause: &(dyn Error + 'static)) -> bool {
    let client =
        cause.downcast_ref::<kube::Error>().or_else(|| Some(cause.downcast_ref::<Box<kube::Error>>()?.as_ref()));
    match client {
        Some(kube::Error::Auth(_)) => true,
        // A token that has expired is renewed within a call.
        Some(kube::Error::Service(inner)) => {
            inner.is::<kube::client::AuthError>() || inner.source().is_some_and(is_of_login)
        }
        Some(_) => false,
        None => cause.is::<kube::client::AuthError>() || cause.is::<Box<kube::client::AuthError>>(),
    }
}

/// What to do about a call that failed.
pub(crate) fn remedy(error: &ApiError) -> String {
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
        (None, ApiError::Api { source, .. }) if is_of_login(source.as_ref()) => {
            "the API server was not asked".to_owned()
        }
        (None, ApiError::Api { source, .. }) if matches!(source.as_ref(), kube::Error::SerdeError(_)) => {
            "this program can't read what is there: use the program of the version that is installed".to_owned()
        }
        (None, ApiError::Api { .. } | ApiError::Timeout(_)) => {
            "the API server does not answer: check the kubeconfig, and whether `kubectl version` works".to_owned()
        }
        (None, _) => "an object can't be read".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::process::ExitStatusExt,
        process::{ExitStatus, Output},
    };

    use kube::client::AuthError;

    use super::*;

    fn login() -> AuthError {
        let out = Output { status: ExitStatus::from_raw(256), stdout: b"eyJ0b2tlbg".to_vec(), stderr: Vec::new() };
        AuthError::AuthExecRun { cmd: "env SECRET=hunter2 login".to_owned(), out: Box::new(out) }
    }

    #[test]
    fn a_failed_login_says_nothing_of_the_command_and_its_environment() {
        let api = |source| ApiError::Api { what: "list FluxNodes".to_owned(), source: Box::new(source) };
        let renewed = || kube::Error::Service(Box::new(login()));
        let errors: [Box<dyn Error>; 6] = [
            Box::new(KubectlError::Client(kube::Error::Auth(login()))),
            Box::new(KubectlError::Client(renewed())),
            Box::new(KubectlError::Api(api(kube::Error::Auth(login())))),
            Box::new(KubectlError::Api(api(renewed()))),
            Box::new(api(kube::Error::Auth(login()))),
            Box::new(api(renewed())),
        ];
        for error in &errors {
            let said = chain(error.as_ref());
            assert!(said.contains("log in again") && !said.contains("SECRET") && !said.contains("env "), "{said}");
            assert!(!said.contains("hunter2") && !said.contains("101, 121"), "{said}");
        }
    }
}
