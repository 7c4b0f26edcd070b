//! The agent: the DaemonSet pod's process on each node. Observe, decide ([`decide`]), act ([`act`]), report.
//!
//! It knows no planner: whoever runs an agent says what plans while it does ([`Plan`]). It touches its host only through orders
//! ([`hostapi::Host`]) and the files below the host's root that it reads.

pub mod act;
mod applied;
mod climb;
mod copied;
pub mod decide;
mod drain;
mod dump;
mod enter;
#[cfg(test)]
mod fixture;
mod frozen;
mod gate;
mod health;
mod hint;
mod inspect;
mod install;
mod live;
mod log;
#[cfg(test)]
#[path = "../../../tests/support/needs.rs"]
mod needs;
mod observe;
mod port;
mod progress;
mod published;
mod queues;
mod report;
mod round;
mod run;
mod rung;
mod serve;
mod start;
mod summary;
mod takeover;
mod teardown;
mod tell;
mod tidy;
mod tries;
mod uninstall;
mod verify;
mod watch;

use std::{
    io::{self, Write},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use hyper::Response;
use kube::{Client, Config, client::ClientBuilder};

use api::{DAEMONSET, HEALTH_PORT};
use cluster::clock;

pub use dump::{DumpArguments, dump};
pub use enter::{EnterError, StatusArguments, connect, shell, status};
pub use health::{ProbeArguments, ProbeError, probe};
pub use run::{Plan, run};
pub use rung::{Rung, rung};
pub use takeover::{RecoverArguments, ResetArguments, TakeoverError, recover, reset};
pub use uninstall::{UninstallArguments, UninstallError, uninstall};
pub use verify::{VerifyArguments, verify};

/// What an agent has to be told; the DaemonSet tells it by the downward API.
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
    /// Where metrics are served: on loopback, for processes of this node only
    #[arg(long, env = "HEALTH_ADDRESS", default_value_t = SocketAddr::from(([127, 0, 0, 1], HEALTH_PORT)))]
    pub health_address: SocketAddr,
    /// Where probes are answered.
    #[command(flatten)]
    pub probe: ProbeArguments,
    /// Where kubelet looks for a container's last words (terminationMessagePath)
    #[arg(long, env = "TERMINATION_LOG", default_value = "/dev/termination-log", hide = true)]
    pub termination_log: PathBuf,
    /// The Node's InternalIP, where packages are served to other nodes; without it none are
    #[arg(long, env = "HOST_IP")]
    pub host_ip: Option<IpAddr>,
}

/// What the rung install has to be told.
#[derive(clap::Args, Debug, Clone)]
pub struct InstallArguments {
    /// The agent's own.
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
    /// There is no way to the API server.
    #[error("can't find the API server: run this in a pod, or set KUBECONFIG")]
    Config(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The client could not be made.
    #[error("can't make a client for the API server")]
    Client(#[source] Box<kube::Error>),
    /// The host.
    #[error(transparent)]
    Host(#[from] hostapi::HostError),
    /// A rung failed.
    #[error(transparent)]
    Step(#[from] act::StepError),
    /// The API.
    #[error(transparent)]
    Api(#[from] cluster::ApiError),
    /// What is asked for does not hold.
    #[error("{0}")]
    NotSo(String),
    /// Signals can't be waited for.
    #[error("can't wait for signals")]
    Signals(#[source] std::io::Error),
}

/// Silence of the API server after which a connection is given up: longer than any watch, which ends by itself after 290 s.
const LONGEST_ANSWER: Duration = Duration::from_secs(300);

/// A client for the API server, in a pod or by kubeconfig. The proxy variables are for packages: in a cluster the API server
/// is never behind them.
async fn client() -> Result<Client, AgentError> {
    let mut config = Config::infer().await.map_err(|error| AgentError::Config(Box::new(error)))?;
    config.proxy_url = None;
    // A kubeconfig may rely on the system's roots, and the image has no system.
    config.root_cert.get_or_insert_with(|| {
        webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter().map(|certificate| certificate.to_vec()).collect()
    });
    // A watch has its own time; what opens it, lists or asks has none, and an API server that loses its power before it answers
    // would be waited for for ever.
    (config.read_timeout, config.reset_reader_on_write) = (Some(LONGEST_ANSWER), true);
    let listen = tower::util::MapResponseLayer::new(|answer: Response<_>| {
        clock::heard(answer.headers());
        answer
    });
    let client = ClientBuilder::try_from(config).map_err(|error| AgentError::Client(Box::new(error)))?;
    Ok(client.with_layer(&listen).build())
}

/// For whoever runs a command. One who has closed stdout doesn't want to read it: what was begun goes on.
fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}
