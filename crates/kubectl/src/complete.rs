//! What may follow what somebody has typed: kubectl asks `kubectl_complete-flux` (kubectl's documentation, "Plugin command completion").

use std::{sync::mpsc::channel, time::Duration};

use clap::{Arg, Command, CommandFactory, ValueHint};
use kube::ResourceExt;

use crate::{
    arguments::{Arguments, Connection},
    observed::{Cluster, kubeconfig},
};
use base::words::visible;

/// Somebody waits with a finger on a key.
const PATIENCE: Duration = Duration::from_secs(2);
/// Cobra's directive that no file names follow.
const NO_FILES: &str = ":4\n";
/// Cobra's directive that the shell is to offer names of files.
const FILES: &str = ":0\n";

/// What may stand in the place of the last of `words`, a line each, as kubectl reads it.
pub fn complete(words: &[String]) -> String {
    let mut command = Arguments::command();
    command.build();
    let Some((last, before)) = words.split_last() else { return NO_FILES.to_owned() };
    // Kubectl gives `--output=j` as one word, and wants one word back.
    let joined = last.split_once('=').filter(|(option, _)| option.starts_with('-'));
    let (begin, last) = joined.map_or((String::new(), last.as_str()), |(option, value)| (format!("{option}="), value));
    let before: Vec<String> = before.iter().cloned().chain(joined.map(|(option, _)| option.to_owned())).collect();
    let mut candidates = match expected(&command, &before, last) {
        Expected::Words(words) => words,
        Expected::Node => nodes(connection(&before)),
        Expected::Context => contexts(&connection(&before)),
        Expected::File => return FILES.to_owned(),
        Expected::Nothing => Vec::new(),
    };
    candidates.retain(|candidate| candidate.starts_with(last));
    candidates.iter().map(|candidate| format!("{begin}{}\n", visible(candidate))).collect::<String>() + NO_FILES
}

#[derive(Debug, PartialEq, Eq)]
enum Expected {
    Words(Vec<String>),
    Node,
    Context,
    File,
    Nothing,
}

/// What `last` may be, after the words `before`. Pure.
fn expected(command: &Command, before: &[String], last: &str) -> Expected {
    // The command so far, how many arguments without a name it has, and an option that waits for its value.
    let (mut command, mut given, mut waits) = (command, 0, None);
    for word in before {
        if word == "--" {
            return Expected::Nothing;
        }
        if waits.take().is_some() {
            continue;
        }
        waits = option(command, word);
        match command.find_subcommand(word) {
            Some(below) => (command, given) = (below, 0),
            None => given += usize::from(!word.starts_with('-')),
        }
    }
    let wanted = waits.or_else(|| command.get_positionals().nth(given).filter(|_| !last.starts_with('-')));
    match wanted {
        Some(argument) if matches!(argument.get_id().as_str(), "node" | "nodes") => Expected::Node,
        Some(argument) if argument.get_id() == "context" => Expected::Context,
        Some(argument) if argument.get_value_hint() == ValueHint::AnyPath => Expected::File,
        Some(argument) if waits.is_some() => {
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

/// The option that `word` names, if a value follows it in a word of its own.
fn option<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    let is_named = |argument: &&Arg| match word.strip_prefix("--") {
        Some(long) => argument.get_long() == Some(long),
        None => {
            word.strip_prefix('-').is_some_and(|short| argument.get_short().map(String::from).as_deref() == Some(short))
        }
    };
    command.get_arguments().find(is_named).filter(|argument| argument.get_action().takes_values())
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

/// The names of the kubeconfig's contexts; none if it can't be read.
fn contexts(connection: &Connection) -> Vec<String> {
    let kubeconfig = kubeconfig(connection).unwrap_or_default();
    kubeconfig.contexts.into_iter().map(|context| context.name).collect()
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
    fn an_option_and_its_value_may_be_one_word() {
        let of = |words: &[&str]| complete(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["status", "--output=y"]), "--output=yaml\n:4\n");
        assert_eq!(of(&["status", "-o=js"]), "-o=json\n:4\n");
        assert_eq!(of(&["status", "--kubeconfig=x"]), FILES);
        assert_eq!(of(&["status", "--cont"]), "--context\n:4\n");
    }

    #[test]
    fn each_place_has_its_own_words() {
        let words = |words: &[&str]| Expected::Words(words.iter().map(|word| (*word).to_owned()).collect());
        let mut command = Arguments::command();
        command.build();
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
        for (before, last, expected) in [
            (&["run", "--"][..], "", Expected::Nothing),
            (&["scale"], "", Expected::Nothing),
            (&["drain", "n1"], "", Expected::Nothing),
            (&["connect", "n1"], "", words(&[])),
            (&["connect", "--context", "a"], "", Expected::Node),
            (&["logs", "--follow"], "", Expected::Node),
            (&["status", "--context"], "", Expected::Context),
            (&["--kubeconfig"], "", Expected::File),
            (&["support-bundle", "--out"], "b", Expected::File),
        ] {
            assert_eq!(at(before, last), expected, "{before:?}");
        }
        let Expected::Words(commands) = at(&[], "") else { panic!("commands") };
        assert!(["status", "doctor", "connect", "uninstall"].iter().all(|name| commands.contains(&(*name).to_owned())));
        let Expected::Words(options) = at(&["status"], "--") else { panic!("options") };
        assert!(options.contains(&"--watch".to_owned()), "{options:?}");
    }
}
