//! What a person types.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

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
    Status(StatusOptions),
    /// Show the tree in which the brokers connect, with the state of each
    Tree(TreeOptions),
    /// Check everything, and name the remedy for what is wrong; exit code 1 if something is, or can't be checked
    Doctor(DoctorOptions),
    /// Pack objects, Events and logs into one archive for whoever helps you; secrets are masked
    SupportBundle(SupportOptions),
    /// Open a shell in the Flux instance, on the lead or on NODE
    Connect {
        /// The node; by default the lead
        node: Option<String>,
    },
    /// Run a command in the Flux instance, on the lead or on another node
    Run {
        /// The node; by default the lead
        #[arg(long)]
        node: Option<String>,
        /// The command and its arguments, such as `flux run -N4 hostname`
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// List jobs, as flux-jobs(1) does with the same arguments
    Jobs {
        /// Arguments of flux jobs, such as `-a`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Print what the agent and the broker of a node write
    Logs(LogsOptions),
    /// Give nodes no new jobs; running ones may end
    Drain {
        /// The nodes, as a hostlist: `node[1-4]`
        nodes: String,
        /// Why, for others to see
        #[arg(required = true)]
        reason: Vec<String>,
    },
    /// Give nodes jobs again
    Undrain {
        /// The nodes, as a hostlist: `node[1-4]`
        nodes: String,
    },
    /// Start no more jobs until `resume`; running ones go on
    Pause,
    /// Start jobs again
    Resume,
    /// Set spec.size: how many nodes may take part
    Scale {
        /// How many; a node that leaves is drained first
        size: u32,
    },
    /// Show what the next coordinated restart brings, and what it waits for
    Upgrade {
        /// Restart now, even if jobs run: these are lost
        #[arg(long)]
        now: bool,
    },
    /// Remove Flux from all hosts, and everything of flux-distribute from the cluster
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

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TreeFormat {
    /// Indented lines
    Text,
    /// For Graphviz's dot
    Dot,
    /// A drawing, for a browser
    Svg,
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

#[derive(Args, Debug, Clone)]
pub(crate) struct UninstallOptions {
    /// Do not ask
    #[arg(long, short)]
    pub yes: bool,
    /// How long to wait for the hosts, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: u64,
}
