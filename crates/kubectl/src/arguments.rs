//! What a person types.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use model::drawing::Drawing;

const EXAMPLES: &str = "\
Examples:
  kubectl flux status                  one screen: the instance, and its nodes
  kubectl flux doctor                  what is wrong, and what to do
  kubectl flux run -- flux run -N4 hostname
  kubectl flux connect node3           a shell in the instance, on node3
  kubectl flux drain node3 bad disk    no new jobs there; running ones may end

To install it, put this program into your PATH as kubectl-flux.";

/// Shows and steers the Flux instance on the nodes of a Kubernetes cluster.
#[derive(Parser, Debug)]
#[command(
    name = "kubectl-flux",
    bin_name = "kubectl flux",
    version,
    about,
    after_help = EXAMPLES,
    max_term_width = 100
)]
pub struct Arguments {
    /// Which cluster.
    #[command(flatten)]
    pub(crate) connection: Connection,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// How to reach the cluster: as kubectl does.
#[derive(Args, Debug, Clone, Default)]
pub(crate) struct Connection {
    /// The kubeconfig file; by default what KUBECONFIG names, else ~/.kube/config
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The context in the kubeconfig; by default its current one
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Show the instance, and each node with its rank, phase, resources, and what is wrong
    #[command(
        after_help = "Examples:\n  kubectl flux status\n  kubectl flux status --watch\n  kubectl flux status -o json | jq .instance"
    )]
    Status(StatusOptions),
    /// Show the tree in which the brokers connect, with the state of each
    #[command(after_help = "Examples:\n  kubectl flux tree\n  kubectl flux tree -o svg > tree.svg")]
    Tree(TreeOptions),
    /// Check everything, and name the remedy for what is wrong; exit code 1 if something is, or can't be checked
    #[command(after_help = "Example:\n  kubectl flux doctor")]
    Doctor(DoctorOptions),
    /// Pack objects, Events and logs into one archive for whoever helps you; secrets are masked
    #[command(after_help = "Example:\n  kubectl flux support-bundle --out bundle.tar.gz")]
    SupportBundle(SupportOptions),
    /// Open a shell in the Flux instance, on the lead or on NODE
    #[command(after_help = "Examples:\n  kubectl flux connect\n  kubectl flux connect node3")]
    Connect {
        /// The node; by default the lead
        node: Option<String>,
    },
    /// Run a command in the Flux instance, on the lead or on another node
    #[command(
        after_help = "Examples:\n  kubectl flux run -- flux run -N4 hostname\n  kubectl flux run --node node3 -- flux uptime"
    )]
    Run {
        /// The node; by default the lead
        #[arg(long)]
        node: Option<String>,
        /// The command and its arguments, such as `flux run -N4 hostname`
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// List jobs, as flux-jobs(1) does with the same arguments
    #[command(after_help = "Examples:\n  kubectl flux jobs\n  kubectl flux jobs -a --count=20")]
    Jobs {
        /// Arguments of flux jobs, such as `-a`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Print what the agent and the broker of a node write
    #[command(after_help = "Examples:\n  kubectl flux logs node3 --follow\n  kubectl flux logs --tail 50")]
    Logs(LogsOptions),
    /// Give nodes no new jobs; running ones may end
    #[command(after_help = "Example:\n  kubectl flux drain 'node[1-4]' new memory")]
    Drain {
        /// The nodes, as a hostlist: `node[1-4]`
        nodes: String,
        /// Why, for others to see
        #[arg(required = true)]
        reason: Vec<String>,
    },
    /// Give nodes jobs again
    #[command(after_help = "Example:\n  kubectl flux undrain 'node[1-4]'")]
    Undrain {
        /// The nodes, as a hostlist: `node[1-4]`
        nodes: String,
    },
    /// Start no more jobs until `resume`; running ones go on
    #[command(after_help = "Example:\n  kubectl flux pause")]
    Pause,
    /// Start jobs again
    #[command(after_help = "Example:\n  kubectl flux resume")]
    Resume,
    /// Set spec.size: how many nodes may take part
    #[command(after_help = "Examples:\n  kubectl flux scale 8\n  kubectl flux scale 8 --wait")]
    Scale {
        /// How many; a node that leaves is drained first
        size: u32,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Show what the next coordinated restart brings, and what it waits for
    #[command(after_help = "Examples:\n  kubectl flux upgrade\n  kubectl flux upgrade --now --wait")]
    Upgrade {
        /// Restart now, even if jobs run: these are lost
        #[arg(long)]
        now: bool,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Remove Flux from all hosts, and everything of flux-distribute from the cluster
    #[command(after_help = "Example:\n  kubectl flux uninstall")]
    Uninstall(UninstallOptions),
}

#[derive(Args, Debug, Clone)]
pub(crate) struct StatusOptions {
    /// Output format
    #[arg(long, short, value_enum, default_value_t = StatusFormat::Text)]
    pub output: StatusFormat,
    /// Show it again whenever it changes, until Ctrl-C
    #[arg(long, short)]
    pub watch: bool,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StatusFormat {
    /// One screen: nodes that are alike share a line
    Text,
    /// A line for each node, with more columns
    Wide,
    /// JSON
    Json,
    /// YAML
    Yaml,
}

#[derive(Args, Debug, Clone)]
pub(crate) struct TreeOptions {
    /// Output format
    #[arg(long, short, value_enum, default_value_t = TreeFormat::Text)]
    pub output: TreeFormat,
}

/// How to draw a tree.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum TreeFormat {
    /// Indented lines
    Text,
    /// For Graphviz's dot
    Dot,
    /// A drawing, for a browser
    Svg,
}

impl TreeFormat {
    /// The text to print.
    pub fn draw(self, drawing: &Drawing) -> String {
        match self {
            Self::Text => drawing.text(),
            Self::Dot => drawing.dot(),
            Self::Svg => drawing.svg(),
        }
    }
}

#[derive(Args, Debug, Clone)]
pub(crate) struct DoctorOptions {
    /// Output format
    #[arg(long, short, value_enum, default_value_t = DoctorFormat::Text)]
    pub output: DoctorFormat,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DoctorFormat {
    /// For people
    Text,
    /// JSON
    Json,
}

#[derive(Args, Debug, Clone)]
pub(crate) struct LogsOptions {
    /// The node; by default the lead
    pub node: Option<String>,
    /// Go on until Ctrl-C
    #[arg(long, short)]
    pub follow: bool,
    /// The last so many lines; by default all
    #[arg(long, value_name = "LINES")]
    pub tail: Option<u32>,
    /// The log of the container that ran before the last restart
    #[arg(long, short)]
    pub previous: bool,
}

#[derive(Args, Debug, Clone)]
pub(crate) struct SupportOptions {
    /// The archive to write; by default flux-support-TIME.tar.gz in this directory
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// The logs of all agents, instead of at most 30: the lead's, those of nodes with trouble, and others
    #[arg(long)]
    pub all_logs: bool,
}

/// Whether to wait for what was begun.
#[derive(Args, Debug, Clone)]
pub(crate) struct Waiting {
    /// Wait until all members are online, and show what is waited for
    #[arg(long)]
    pub wait: bool,
    /// How long to wait, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, requires = "wait")]
    pub timeout: u64,
}

#[derive(Args, Debug, Clone)]
pub(crate) struct UninstallOptions {
    /// Do not ask
    #[arg(long, short)]
    pub yes: bool,
    /// How long to wait for the hosts, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn each_command_has_examples_and_they_are_commands() {
        let all = Arguments::command();
        for command in all.get_subcommands() {
            let name = command.get_name();
            let help = command.get_after_help().unwrap().to_string();
            let lines = help.lines().skip(1).map(|line| line.trim().split(['|', '>']).next().unwrap());
            for line in lines {
                assert!(line.starts_with(&format!("kubectl flux {name}")), "{name}: {line}");
                let words = line.replace('\'', "");
                let parsed = Arguments::try_parse_from(words.split_whitespace().skip(1));
                assert!(parsed.is_ok(), "{line}: {parsed:?}");
            }
        }
    }

    #[test]
    fn no_help_is_wider_than_a_hundred_columns() {
        let mut all = Arguments::command();
        all.build();
        for command in std::iter::once(&mut all.clone()).chain(all.get_subcommands_mut()) {
            let help = command.render_long_help().to_string();
            let wide: Vec<_> = help.lines().filter(|line| line.chars().count() > 100).collect();
            assert!(wide.is_empty(), "{wide:?}");
        }
    }

    #[test]
    fn each_command_has_a_man_page() {
        let directory = std::env::temp_dir().join(format!("man-of-kubectl-flux-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        clap_mangen::generate_to(Arguments::command(), &directory).unwrap();
        for command in Arguments::command().get_subcommands() {
            let page = fs::read_to_string(directory.join(format!("kubectl-flux-{}.1", command.get_name()))).unwrap();
            assert!(page.contains("Example"), "{}", command.get_name());
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}
