//! What needs Flux: kubectl runs this program again, in the pod of the agent on a node, and that enters the host.

use std::{
    io::IsTerminal,
    os::unix::process::ExitStatusExt,
    process::{Command, ExitCode, ExitStatus},
};

use kube::ResourceExt;

use crate::{
    arguments::{Connection, LogsOptions},
    error::KubectlError,
    observed::Cluster,
    screen::visible,
};
use api::{IdSet, NAMESPACE, Rank};
use model::{agents::AgentPod, hostlist};

/// This program in its image.
const PROGRAM: &str = "/flux-distribute";
/// The agent's container.
const CONTAINER: &str = "agent";

/// A shell in the instance.
pub(crate) async fn connect(cluster: &Cluster, node: Option<&str>) -> Result<ExitCode, KubectlError> {
    in_instance(cluster, node, Vec::new(), std::io::stdin().is_terminal()).await
}

/// A command in the instance. Without a terminal on both sides, its output stays as it is, for a pipe.
pub(crate) async fn run(cluster: &Cluster, node: Option<&str>, command: &[String]) -> Result<ExitCode, KubectlError> {
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    in_instance(cluster, node, command.to_vec(), is_terminal).await
}

/// flux-jobs(1).
pub(crate) async fn jobs(cluster: &Cluster, arguments: Vec<String>) -> Result<ExitCode, KubectlError> {
    flux(cluster, &["jobs"], arguments).await
}

/// Drains the nodes, by their ranks: Flux knows a node that has joined since the start by another name.
pub(crate) async fn drain(cluster: &Cluster, nodes: &str, reason: &str) -> Result<ExitCode, KubectlError> {
    let ranks = ranks(cluster, nodes).await?;
    // Else a reason that begins with a dash would be an option.
    flux(cluster, &["resource", "drain"], vec!["--".to_owned(), ranks.to_string(), reason.to_owned()]).await
}

/// Undrains the nodes.
pub(crate) async fn undrain(cluster: &Cluster, nodes: &str) -> Result<ExitCode, KubectlError> {
    let ranks = ranks(cluster, nodes).await?;
    flux(cluster, &["resource", "undrain"], vec![ranks.to_string()]).await
}

/// Stops all queues.
pub(crate) async fn pause(cluster: &Cluster) -> Result<ExitCode, KubectlError> {
    flux(cluster, &["queue", "stop", "--all"], vec!["--message=kubectl flux pause".to_owned()]).await
}

/// Starts all queues.
pub(crate) async fn resume(cluster: &Cluster) -> Result<ExitCode, KubectlError> {
    flux(cluster, &["queue", "start", "--all"], Vec::new()).await
}

async fn flux(cluster: &Cluster, command: &[&str], arguments: Vec<String>) -> Result<ExitCode, KubectlError> {
    let command = ["flux"].iter().chain(command).map(|word| (*word).to_owned()).chain(arguments);
    in_instance(cluster, None, command.collect(), false).await
}

/// Runs `command` on `node`, or on the lead; a shell if it is empty.
async fn in_instance(
    cluster: &Cluster,
    node: Option<&str>,
    command: Vec<String>,
    is_terminal: bool,
) -> Result<ExitCode, KubectlError> {
    let pod = agent_on(cluster, node).await?;
    let mut arguments: Vec<String> = vec!["exec".to_owned(), "--stdin".to_owned()];
    arguments.extend(is_terminal.then(|| "--tty".to_owned()));
    arguments.extend([pod, format!("--container={CONTAINER}"), "--".to_owned()]);
    arguments.extend([PROGRAM.to_owned(), "connect".to_owned()]);
    if !command.is_empty() {
        // Whatever follows is the command's, an option too.
        arguments.push("--".to_owned());
        arguments.extend(command);
    }
    kubectl(&cluster.connection, &arguments)
}

/// The log of the agent and the broker.
pub(crate) async fn logs(cluster: &Cluster, options: &LogsOptions) -> Result<ExitCode, KubectlError> {
    let LogsOptions { node, follow, tail, previous } = options;
    let pod = agent_on(cluster, node.as_deref()).await?;
    let mut arguments = vec!["logs".to_owned(), pod, format!("--container={CONTAINER}")];
    arguments.extend(follow.then(|| "--follow".to_owned()));
    arguments.extend(previous.then(|| "--previous".to_owned()));
    arguments.extend(tail.map(|lines| format!("--tail={lines}")));
    kubectl(&cluster.connection, &arguments)
}

/// The agent's pod on `node`, or on the lead's node.
async fn agent_on(cluster: &Cluster, node: Option<&str>) -> Result<String, KubectlError> {
    let node = match node {
        Some(node) => node.to_owned(),
        None => {
            let status = cluster.observe().await?.instance.status.unwrap_or_default();
            let none =
                || KubectlError::State("no node leads yet: `kubectl flux status` shows what they wait for".to_owned());
            status.lead.ok_or_else(none)?
        }
    };
    let pods = cluster.agents().await?;
    // An evicted pod's object stays beside the pod that replaced it.
    let on_node = || pods.iter().filter(|pod| pod.node == node);
    match on_node().find(|pod| pod.down.is_none()).or_else(|| on_node().next()) {
        Some(AgentPod { name, down: None, .. }) => Ok(name.clone()),
        Some(AgentPod { name, down: Some(why), .. }) => Err(KubectlError::State(visible(&format!(
            "the agent of node {node} does not run: {why}; `kubectl -n {NAMESPACE} describe pod {name}` shows more"
        )))),
        None => Err(KubectlError::Input(format!(
            "no agent runs on node {node}: `kubectl flux status -o wide` lists the nodes, `kubectl flux doctor` says what \
             is wrong"
        ))),
    }
}

/// The ranks of the nodes that a hostlist names.
async fn ranks(cluster: &Cluster, nodes: &str) -> Result<IdSet, KubectlError> {
    let observed = cluster.observe().await?;
    let rank_of = |name: &String| -> Result<Rank, KubectlError> {
        let node = observed.nodes.iter().find(|node| node.name_any() == *name);
        let unknown =
            || KubectlError::Input(format!("there is no FluxNode {name}: `kubectl flux status -o wide` lists them"));
        let no_rank = || KubectlError::Input(format!("node {name} has no rank, so it gets no jobs anyway"));
        node.ok_or_else(unknown)?.spec.rank.ok_or_else(no_rank)
    };
    match hostlist::decode(nodes).as_slice() {
        [] => Err(KubectlError::Input(format!("{nodes:?} names no node"))),
        names => names.iter().map(rank_of).collect(),
    }
}

/// Runs kubectl on the same cluster, with the same terminal, and returns its exit code.
fn kubectl(connection: &Connection, arguments: &[String]) -> Result<ExitCode, KubectlError> {
    let status = kubectl_command(connection, arguments).status().map_err(KubectlError::Kubectl)?;
    Ok(code_of(status))
}

/// kubectl on the same cluster, in our namespace.
pub(crate) fn kubectl_command(connection: &Connection, arguments: &[String]) -> Command {
    let mut command = Command::new("kubectl");
    command.args(["--namespace", NAMESPACE]);
    if let Some(file) = &connection.kubeconfig {
        command.arg("--kubeconfig").arg(file);
    }
    if let Some(context) = &connection.context {
        command.args(["--context", context]);
    }
    command.args(arguments);
    command
}

/// As a shell reports it: 128 and the signal for a process that one has ended.
pub(crate) fn code_of(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
