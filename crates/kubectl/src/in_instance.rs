//! What needs Flux: kubectl runs this program again, in the pod of the agent on a node, and that enters the host.

use std::{io::IsTerminal, process::ExitCode};

use kube::ResourceExt;

use crate::{
    agent_pod::{OnNode, agent_pod},
    error::KubectlError,
    kubectl::{Stdin, become_kubectl},
    observed::{Cluster, Observed},
    screen::complain,
};
use api::{AGENT_CONTAINER, IdSet, Rank, Roster};
use model::hostlist;

/// This program in its image.
const PROGRAM: &str = "/flux-distribute";

/// A command of Flux that is run on the lead.
#[derive(Debug)]
pub(crate) enum FluxCommand {
    /// flux-jobs(1), with these arguments.
    Jobs(Vec<String>),
    /// Stops all queues.
    Pause,
    /// Starts all queues.
    Resume,
    /// Drains these ranks. Flux knows a node that has joined since the start by another name.
    Drain(IdSet, String),
    /// Undrains these ranks.
    Undrain(IdSet),
}

impl FluxCommand {
    /// What runs.
    fn words(self) -> Vec<String> {
        let (command, arguments): (&[&str], _) = match self {
            Self::Jobs(arguments) => (&["jobs"], arguments),
            Self::Pause => (&["queue", "stop", "--all", "--message=kubectl flux pause"], Vec::new()),
            Self::Resume => (&["queue", "start", "--all"], Vec::new()),
            // Without `--`, a reason that begins with a dash would be an option.
            Self::Drain(ranks, reason) => (&["resource", "drain", "--"], vec![ranks.to_string(), reason]),
            Self::Undrain(ranks) => (&["resource", "undrain"], vec![ranks.to_string()]),
        };
        ["flux"].iter().chain(command).map(|word| (*word).to_owned()).chain(arguments).collect()
    }
}

/// Opens a shell in the instance, on `node` or on the lead; returns kubectl's exit code.
///
/// # Errors
/// No agent runs there, or kubectl can't be run.
pub(crate) async fn connect(cluster: &Cluster, node: Option<&str>) -> Result<ExitCode, KubectlError> {
    let on = agent_pod(cluster, node).await?;
    if node.is_none() {
        complain(&format!("on {}, the lead\n", on.node));
    }
    in_instance(cluster, &on, Vec::new(), Streams { stdin: Stdin::Ours, is_terminal: std::io::stdin().is_terminal() })
}

/// Runs a command in the instance, on `node` or on the lead; returns its exit code. Without a terminal on both sides, its output stays
/// as it is, for a pipe.
///
/// # Errors
/// No agent runs there, or kubectl can't be run.
pub(crate) async fn run(cluster: &Cluster, node: Option<&str>, command: &[String]) -> Result<ExitCode, KubectlError> {
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let on = agent_pod(cluster, node).await?;
    in_instance(cluster, &on, command.to_vec(), Streams { stdin: Stdin::Ours, is_terminal })
}

/// Runs a command of Flux on the lead; returns its exit code.
///
/// # Errors
/// No agent runs there, or kubectl can't be run.
pub(crate) async fn flux(cluster: &Cluster, command: FluxCommand) -> Result<ExitCode, KubectlError> {
    let on = agent_pod(cluster, None).await?;
    in_instance(cluster, &on, command.words(), Streams { stdin: Stdin::Nothing, is_terminal: false })
}

/// Drains the nodes that a hostlist names; returns the exit code of flux-resource(1).
///
/// # Errors
/// One of the nodes has no rank of its own, the reason begins with the name of a node, no agent runs on the lead, or kubectl can't be
/// run.
pub(crate) async fn drain(cluster: &Cluster, nodes: &str, reason: &[String]) -> Result<ExitCode, KubectlError> {
    let ranks = ranks_of(cluster, nodes, reason.first()).await?;
    flux(cluster, FluxCommand::Drain(ranks, reason.join(" "))).await
}

/// Undrains the nodes that a hostlist names; returns the exit code of flux-resource(1).
///
/// # Errors
/// As [`drain`].
pub(crate) async fn undrain(cluster: &Cluster, nodes: &str) -> Result<ExitCode, KubectlError> {
    let ranks = ranks_of(cluster, nodes, None).await?;
    flux(cluster, FluxCommand::Undrain(ranks)).await
}

/// The ranks of the nodes, after these have been printed with their ranks to stderr.
///
/// # Errors
/// As [`ranks`], or the API server fails.
async fn ranks_of(cluster: &Cluster, nodes: &str, first_word: Option<&String>) -> Result<IdSet, KubectlError> {
    let (observed, roster) = futures::try_join!(cluster.observe(), cluster.roster())?;
    let is_node = |name: &String| observed.nodes.iter().any(|node| node.name_any() == *name);
    let names_nodes = |word: &&String| hostlist::parse(word).is_ok_and(|names| names.iter().any(is_node));
    if let Some(word) = first_word.filter(names_nodes) {
        return Err(KubectlError::Input(format!(
            "{word} is a node, and would be the reason: write several nodes as a hostlist, such as {nodes},{word}"
        )));
    }
    let found = ranks(&observed, roster.as_ref(), nodes)?;
    let lines = found.iter().map(|(name, rank)| {
        let lead = if *rank == 0 { ", the lead" } else { "" };
        format!("{name} (rank {rank}{lead})")
    });
    complain(&(lines.collect::<Vec<_>>().join(", ") + "\n"));
    Ok(found.into_iter().map(|(_, rank)| rank).collect())
}

/// Where what a command reads comes from, and whether its streams are a terminal.
struct Streams {
    stdin: Stdin,
    is_terminal: bool,
}

/// Runs `command` in a pod of an agent; a shell if it is empty.
///
/// # Errors
/// kubectl can't be run.
fn in_instance(
    cluster: &Cluster,
    on: &OnNode,
    command: Vec<String>,
    streams: Streams,
) -> Result<ExitCode, KubectlError> {
    let mut arguments: Vec<String> = vec!["exec".to_owned()];
    arguments.extend((streams.stdin == Stdin::Ours).then(|| "--stdin".to_owned()));
    arguments.extend(streams.is_terminal.then(|| "--tty".to_owned()));
    arguments.extend([on.pod.clone(), format!("--container={AGENT_CONTAINER}"), "--".to_owned()]);
    arguments.extend([PROGRAM.to_owned(), "connect".to_owned()]);
    if !command.is_empty() {
        // Whatever follows is the command's, an option too.
        arguments.push("--".to_owned());
        arguments.extend(command);
    }
    Err(become_kubectl(&cluster.connection, &arguments, streams.stdin))
}

/// The nodes that a hostlist names, each with its rank. Pure.
///
/// # Errors
/// It names none, is no hostlist, or names a node that has no rank, or not for itself.
fn ranks(observed: &Observed, roster: Option<&Roster>, nodes: &str) -> Result<Vec<(String, Rank)>, KubectlError> {
    let own = |name: &String, rank: Rank| {
        let others = observed.nodes.iter().filter(|node| node.spec.rank == Some(rank)).map(ResourceExt::name_any);
        let entry = roster.and_then(|roster| roster.ranks.get(&rank)).and_then(|entry| entry.member.as_ref());
        match others.chain(entry.map(|member| member.node.clone())).find(|other| other != name) {
            None => Ok((name.clone(), rank)),
            Some(other) => {
                let message =
                    format!("both {name} and {other} have rank {rank}, so one of them would be hit by mistake");
                Err(KubectlError::State(message))
            }
        }
    };
    let rank_of = |name: &String| -> Result<(String, Rank), KubectlError> {
        let node = observed.nodes.iter().find(|node| node.name_any() == *name);
        let unknown =
            || KubectlError::Input(format!("there is no FluxNode {name}: `kubectl flux status -o wide` lists them"));
        let no_rank = || KubectlError::Input(format!("node {name} has no rank, so it gets no jobs anyway"));
        own(name, node.ok_or_else(unknown)?.spec.rank.ok_or_else(no_rank)?)
    };
    let wrong = |error| KubectlError::Input(format!("hostlist {nodes:?}: {error}"));
    hostlist::parse(nodes).map_err(wrong)?.iter().map(rank_of).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::{change, observed};

    #[test]
    fn each_command_is_one_of_flux() {
        let ranks = || [1, 2].into_iter().collect::<IdSet>();
        for (command, expected) in [
            (FluxCommand::Jobs(vec!["-a".to_owned()]), &["flux", "jobs", "-a"][..]),
            (FluxCommand::Pause, &["flux", "queue", "stop", "--all", "--message=kubectl flux pause"]),
            (FluxCommand::Resume, &["flux", "queue", "start", "--all"]),
            (FluxCommand::Drain(ranks(), "-f".to_owned()), &["flux", "resource", "drain", "--", "1-2", "-f"]),
            (FluxCommand::Undrain(ranks()), &["flux", "resource", "undrain", "1-2"]),
        ] {
            assert_eq!(command.words(), expected);
        }
    }

    #[test]
    fn a_hostlist_names_ranks_or_what_is_wrong_with_it() {
        let mut observed = observed(4, &Value::Null, &Value::Null);
        change(&mut observed, 3, &json!({"rank": null}), &Value::Null);
        let found = ranks(&observed, None, "n[2-3]").unwrap();
        assert_eq!(found, [("n2".to_owned(), 1), ("n3".to_owned(), 2)]);
        for (nodes, expected) in [
            ("n4", "node n4 has no rank"),
            ("n[3,9]", "there is no FluxNode n9"),
            ("", "hostlist \"\": names no host"),
            ("n[2-1]", "hostlist \"n[2-1]\": \"n[2-1]\" is neither"),
        ] {
            let error = ranks(&observed, None, nodes).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        change(&mut observed, 2, &json!({"rank": 1}), &Value::Null);
        let error = ranks(&observed, None, "n2").unwrap_err().to_string();
        assert!(error.starts_with("both n2 and n3 have rank 1"), "{error}");
    }
}
