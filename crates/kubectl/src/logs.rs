//! `kubectl flux logs`: the log of the agent and the broker on a node.

use std::process::ExitCode;

use crate::{
    agent_pod::agent_pod,
    arguments::LogsOptions,
    error::KubectlError,
    kubectl::{Stdin, become_kubectl},
    observed::Cluster,
};
use api::AGENT_CONTAINER;

/// Prints the log by `kubectl logs`, and returns kubectl's exit code.
///
/// # Errors
/// There is no such pod, or kubectl can't be run.
pub(crate) async fn run(cluster: &Cluster, options: &LogsOptions) -> Result<ExitCode, KubectlError> {
    let LogsOptions { node, follow, tail, previous } = options;
    let pod = agent_pod(cluster, node.as_deref()).await?.pod;
    let mut arguments = vec!["logs".to_owned(), pod, format!("--container={AGENT_CONTAINER}")];
    arguments.extend(follow.then(|| "--follow".to_owned()));
    arguments.extend(previous.then(|| "--previous".to_owned()));
    arguments.extend(tail.map(|lines| format!("--tail={lines}")));
    Err(become_kubectl(&cluster.connection, &arguments, Stdin::Nothing))
}
