//! Runs kubectl on the same cluster: it has the terminals, and the ways to log in.

use std::{
    os::unix::process::CommandExt,
    process::{Command, Stdio},
};

use crate::{arguments::Connection, error::KubectlError};
use api::NAMESPACE;

/// What kubectl reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stdin {
    /// What this program would.
    Ours,
    /// Nothing: what somebody types ahead is for the shell that comes next.
    Nothing,
}

/// Becomes kubectl on the same cluster, so that a signal for this process ends kubectl too, and kubectl's exit code is this process's.
/// Returns only if kubectl can't be run.
pub(crate) fn become_kubectl(connection: &Connection, arguments: &[String], stdin: Stdin) -> KubectlError {
    let mut command = command(connection, &["--namespace".to_owned(), NAMESPACE.to_owned()]);
    command.args(arguments);
    if stdin == Stdin::Nothing {
        command.stdin(Stdio::null());
    }
    KubectlError::Kubectl(command.exec())
}

/// Checks that there is a kubectl.
///
/// # Errors
/// It can't be run.
pub(crate) fn is_there() -> Result<(), KubectlError> {
    let mut command = Command::new("kubectl");
    command.args(["version", "--client"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().map(drop).map_err(KubectlError::Kubectl)
}

/// kubectl on the same cluster. Without a namespace: kubectl refuses objects of a file that name another one.
pub(crate) fn command(connection: &Connection, arguments: &[String]) -> Command {
    let mut command = Command::new("kubectl");
    if let Some(file) = &connection.kubeconfig {
        command.arg("--kubeconfig").arg(file);
    }
    if let Some(context) = &connection.context {
        command.args(["--context", context]);
    }
    command.args(arguments);
    command
}
