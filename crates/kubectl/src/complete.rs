//! What may follow what somebody has typed: kubectl asks `kubectl_complete-flux` (kubectl's documentation, "Plugin command completion").

use std::{sync::mpsc::channel, time::Duration};

use clap::{Command, CommandFactory};
use kube::ResourceExt;

use crate::{
    arguments::{Arguments, Connection},
    observed::Cluster,
};
use base::words::visible;

/// Somebody waits with a finger on a key.
const PATIENCE: Duration = Duration::from_secs(2);
/// Cobra's directive that no file names follow.
const NO_FILES: &str = ":4\n";

/// What may stand in the place of the last of `words`, a line each, as kubectl reads it.
pub fn complete(words: &[String]) -> String {
    let command = Arguments::command();
    let Some((last, before)) = words.split_last() else { return NO_FILES.to_owned() };
    let mut candidates = match expected(&command, before, last) {
        Expected::Words(words) => words,
        Expected::Node => nodes(connection(before)),
        Expected::Nothing => Vec::new(),
    };
    candidates.retain(|candidate| candidate.starts_with(last.as_str()));
    candidates.iter().map(|candidate| visible(candidate) + "\n").collect::<String>() + NO_FILES
}

#[derive(Debug, PartialEq, Eq)]
enum Expected {
    Words(Vec<String>),
    Node,
    Nothing,
}

/// What `last` may be, after the words `before`. Pure.
fn expected(command: &Command, before: &[String], last: &str) -> Expected {
    let mut command = command;
    for word in before {
        if word == "--" {
            return Expected::Nothing;
        }
        command = command.find_subcommand(word).unwrap_or(command);
    }
    let takes_value = |argument: &&clap::Arg| {
        let named = before.last().is_some_and(|word| {
            word.strip_prefix("--").is_some_and(|long| argument.get_long() == Some(long))
                || word
                    .strip_prefix('-')
                    .is_some_and(|short| argument.get_short().map(String::from) == Some(short.into()))
        });
        named && argument.get_action().takes_values()
    };
    let option = command.get_arguments().find(takes_value);
    let wanted = option.or_else(|| command.get_positionals().next().filter(|_| !last.starts_with('-')));
    match wanted {
        Some(argument) if matches!(argument.get_id().as_str(), "node" | "nodes") => Expected::Node,
        Some(argument) if option.is_some() => {
            Expected::Words(argument.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect())
        }
        _ if last.starts_with('-') => {
            let long = command.get_arguments().filter_map(clap::Arg::get_long);
            Expected::Words(long.map(|name| format!("--{name}")).collect())
        }
        Some(_) => Expected::Nothing,
        None => Expected::Words(command.get_subcommands().map(|below| below.get_name().to_owned()).collect()),
    }
}

/// The cluster that the words name. Pure.
fn connection(words: &[String]) -> Connection {
    let value = |name: &str| {
        let at = |(index, word): (usize, &String)| match word.strip_prefix(name)? {
            "" => words.get(index + 1).cloned(),
            rest => rest.strip_prefix('=').map(str::to_owned),
        };
        words.iter().enumerate().find_map(at)
    };
    Connection { kubeconfig: value("--kubeconfig").map(Into::into), context: value("--context") }
}

/// The names of the nodes; none if the cluster doesn't answer at once. They come from a thread of their own, which ends with this
/// process: the kubeconfig may have a login command that nothing in this process could stop.
fn nodes(connection: Connection) -> Vec<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        let names = runtime.block_on(async {
            let nodes = Cluster::connect(&connection).await.ok()?.nodes().await.ok()?;
            Some(nodes.iter().map(ResourceExt::name_any).collect::<Vec<_>>())
        });
        let _ = sender.send(names.unwrap_or_default());
    });
    receiver.recv_timeout(PATIENCE).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_come_from_the_cluster_that_is_named() {
        let of = |words: &[&str]| {
            let found = connection(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
            (found.kubeconfig.map(|file| file.display().to_string()), found.context)
        };
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(of(&["connect"]), (None, None));
        assert_eq!(of(&["--context", "a", "--kubeconfig=/k", "logs"]), (text("/k"), text("a")));
        assert_eq!(of(&["logs", "--context"]), (None, None));
    }

    #[test]
    fn each_place_has_its_own_words() {
        let words = |words: &[&str]| Expected::Words(words.iter().map(|word| (*word).to_owned()).collect());
        let command = Arguments::command();
        let at = |before: &[&str], last: &str| {
            let before: Vec<_> = before.iter().map(|word| (*word).to_owned()).collect();
            expected(&command, &before, last)
        };
        for (before, last) in
            [(&["connect"][..], ""), (&["logs"], "n"), (&["drain"], ""), (&["run", "--node"], ""), (&["undrain"], "n")]
        {
            assert_eq!(at(before, last), Expected::Node, "{before:?}");
        }
        assert_eq!(at(&["status", "-o"], ""), words(&["text", "wide", "json", "yaml"]));
        assert_eq!(at(&["tree", "--output"], "d"), words(&["text", "dot", "svg"]));
        assert_eq!(at(&["run", "--"], ""), Expected::Nothing);
        assert_eq!(at(&["scale"], ""), Expected::Nothing);
        let Expected::Words(commands) = at(&[], "") else { panic!("commands") };
        assert!(["status", "doctor", "connect", "uninstall"].iter().all(|name| commands.contains(&(*name).to_owned())));
        let Expected::Words(options) = at(&["status"], "--") else { panic!("options") };
        assert!(options.contains(&"--watch".to_owned()), "{options:?}");
    }
}
