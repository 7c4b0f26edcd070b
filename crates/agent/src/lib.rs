//! The agent: the DaemonSet pod's process on each node. Each round observes ([`inputs`]), decides ([`decide`]), reports ([`status`])
//! and carries out one step ([`execute`]).
//!
//! It knows no planner: the program that runs an agent passes the planner in ([`Plan`]). It touches its host only through orders
//! ([`hostapi::Host`]) and the files below the host's root that it reads.

mod agent;
mod background;
mod commands;
mod decide;
mod drains;
mod error;
mod execute;
#[cfg(test)]
mod fixture;
mod inputs;
mod memory;
#[cfg(test)]
#[path = "../../../tests/support/needs.rs"]
mod needs;
mod node_ops;
mod other_process;
mod queue_dump;
mod reporter;
mod run;
mod status;
mod step;

use std::{
    io::{self, Write},
    net::IpAddr,
    path::PathBuf,
    time::Duration,
};

use kube::{Client, Config};

use api::DAEMONSET;
use metrics::Metrics;

pub use background::health::{ProbeArguments, ProbeError, probe};
pub use cluster::lease_rules::Place;
pub use commands::{
    dump::{DumpArguments, dump},
    enter::{EnterError, StatusArguments, connect, shell, status},
    ladder::{ManualStep, manual_step},
    takeover::{RecoverArguments, ResetArguments, TakeoverError, recover, reset},
    uninstall::{UninstallArguments, UninstallError, uninstall},
    verify::{VerifyArguments, verify},
};
#[cfg(feature = "test-support")]
pub use run::simulate;
pub use run::{Plan, run};

/// Arguments of an agent; the DaemonSet passes them by the downward API.
#[derive(clap::Args, Debug, Clone)]
pub struct AgentArguments {
    /// Name of the Node this runs on
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,
    /// Name of this pod: the agent's name in the Lease and in Events
    #[arg(long, env = "POD_NAME", default_value = "agent")]
    pub pod_name: String,
    /// Name of the DaemonSet that this pod belongs to; its deletion is one sign that the host is to be cleaned
    #[arg(long, env = "DAEMONSET", default_value = DAEMONSET)]
    pub daemonset: String,
    /// Where probes are answered.
    #[command(flatten)]
    pub probe: ProbeArguments,
    /// The file from which kubelet takes a container's last message (terminationMessagePath)
    #[arg(long, env = "TERMINATION_LOG", default_value = "/dev/termination-log", hide = true)]
    pub termination_log: PathBuf,
    /// The Node's InternalIP, where packages are served to other nodes and metrics to Prometheus; without it none are
    #[arg(long, env = "HOST_IP")]
    pub host_ip: Option<IpAddr>,
}

/// Arguments of the command `install`.
#[derive(clap::Args, Debug, Clone)]
pub struct InstallArguments {
    /// Those of an agent.
    #[command(flatten)]
    pub agent: AgentArguments,
    /// How to show how far it is: text is a bar on a terminal, and lines elsewhere. json: one object a line on stdout, each
    /// with `event`: `progress` and `phase-ended` (phase, packages and bytes with done and total, bytesPerSecond,
    /// secondsLeft, seconds), then `done` (digest, environment)
    #[arg(long, short, value_enum, default_value_t = packages::OutputFormat::Text)]
    pub output: packages::OutputFormat,
}

/// Why the agent ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// No configuration leads to an API server.
    #[error("can't find the API server: run this in a pod, or set KUBECONFIG")]
    Config(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The client could not be created.
    #[error("can't create a client for the API server")]
    Client(#[source] Box<kube::Error>),
    /// The host stage failed.
    #[error(transparent)]
    Host(#[from] hostapi::HostError),
    /// A step failed.
    #[error(transparent)]
    Step(#[from] error::StepError),
    /// An API call failed.
    #[error(transparent)]
    Api(#[from] cluster::ApiError),
    /// Something that the command needs is not so; the text says what, for people.
    #[error("{0}")]
    Precondition(String),
    /// Signal handlers can't be installed.
    #[error("can't wait for signals")]
    Signals(#[source] std::io::Error),
}

/// The client gives up a connection after this much silence. Longer than any watch, which ends by itself after 290 s.
const LONGEST_ANSWER: Duration = Duration::from_mins(5);

/// A client for the API server, in a pod or by kubeconfig. It ignores the proxy variables, which are for packages: in a cluster the
/// API server is never behind a proxy.
async fn client() -> Result<Client, AgentError> {
    counted_client(&Metrics::default()).await
}

/// As [`client`], and counts its requests in `metrics`.
async fn counted_client(metrics: &Metrics) -> Result<Client, AgentError> {
    let mut config = Config::infer().await.map_err(|error| AgentError::Config(Box::new(error)))?;
    config.proxy_url = None;
    // A kubeconfig may rely on the system's roots, and the image has no system.
    config.root_cert.get_or_insert_with(|| {
        webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter().map(|certificate| certificate.to_vec()).collect()
    });
    // A watch has a time limit of its own. Other calls have none, and would wait for ever for an API server that loses its power
    // before it answers.
    (config.read_timeout, config.reset_reader_on_write) = (Some(LONGEST_ANSWER), true);
    cluster::counted_client(config, metrics).map_err(|error| AgentError::Client(Box::new(error)))
}

/// Prints a line of a command. A closed stdout does not end what the command began.
fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}
