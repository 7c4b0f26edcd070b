//! The options of `local up`.

use std::{path::PathBuf, time::Duration};

use super::{check::Flux, kind::Kind};

/// The kind of API server.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiKind {
    /// Embedded in the daemon.
    Embedded,
    /// etcd and kube-apiserver from the directory named by KUBEBUILDER_ASSETS.
    Real,
}

/// The options of `local up`.
#[derive(clap::Args, Clone, Debug)]
pub struct Up {
    /// The number of nodes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) nodes: u32,
    /// Install a bundle: a file on this machine, or a URL
    #[arg(long, value_name = "FILE|URL", conflicts_with_all = ["channel", "spec"])]
    pub(super) bundle: Option<String>,
    /// The bundle's sha256 [default: that of the current file]
    #[arg(long, requires = "bundle", value_name = "HEX")]
    pub(super) sha256: Option<String>,
    /// A conda channel to install from: a directory on this machine, or a URL (repeatable)
    #[arg(long, value_name = "DIR|URL")]
    pub(super) channel: Vec<String>,
    /// A conda package to install, as a match spec (repeatable)
    #[arg(long)]
    pub(super) spec: Vec<String>,
    /// Shape of the overlay network, such as kary:2
    #[arg(long)]
    pub(super) topology: Option<String>,
    /// Let Flux schedule pods too: those with `schedulerName: flux`, in all namespaces (spec.pods.enabled)
    #[arg(long)]
    pub(super) pods: bool,
    /// A YAML file with a FluxInstance or only its spec; the other options override it
    #[arg(long, value_name = "FILE")]
    pub(super) instance: Option<PathBuf>,
    /// What to do if Flux is not available
    #[arg(long, value_enum, value_name = "WHICH", default_value = "auto")]
    pub(super) flux: Flux,
    /// How long to wait until all nodes are online, such as 90s or 10m; a plain number means seconds
    #[arg(long, default_value = "10m", value_parser = api::duration)]
    pub(super) timeout: Duration,
    /// The API server to start [default: real if KUBEBUILDER_ASSETS is set, else embedded]
    #[arg(long, value_enum, value_name = "WHICH")]
    pub(super) api: Option<ApiKind>,
    /// Do not wait until the nodes are online
    #[arg(long)]
    pub(super) no_wait: bool,
    /// How the nodes differ from this machine
    #[command(flatten)]
    pub(super) kind: Kind,
    /// By how many seconds the agents' clocks are wrong: a third of them is ahead, a third behind
    #[arg(long, hide = true, default_value_t = 0)]
    pub(super) clocks_off: i64,
}
