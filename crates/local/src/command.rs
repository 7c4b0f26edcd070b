use std::process::ExitCode;

use super::{
    cluster::{
        control::{Client, Request, tell_failure},
        daemon, down, exec, init,
        kind::Kind,
        layout::Layout,
        logs, node, pod, status,
        up::{self, Up, say},
    },
    error::{Context, LocalError},
    stand_in,
};
use apiserver::Fault;
use packages::OutputFormat;

/// N simulated nodes on this machine, with an API server of their own.
#[derive(clap::Subcommand, Clone, Debug)]
pub enum LocalCommand {
    /// Start nodes and make one Flux instance of them
    Up(Box<Up>),
    /// Run a command in a node and end with its exit code
    Exec {
        /// Such as node1
        node: String,
        /// A command of flux-distribute in the agent's pod, such as `status` or `dump`: what a message says to run in a node's
        /// pod, `kubectl exec` there included
        #[arg(long)]
        agent: bool,
        /// The command
        #[arg(last = true, required = true, value_name = "CMD")]
        command: Vec<String>,
    },
    /// Print the log of a node's agent, or of its broker
    Logs {
        /// Such as node1
        node: String,
        /// The broker's
        #[arg(long)]
        broker: bool,
    },
    /// Show the instance and its nodes
    Status {
        /// Form
        #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
        output: OutputFormat,
    },
    /// Add nodes
    AddNode {
        /// How many
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        count: u32,
        /// In what they differ from the machine
        #[command(flatten)]
        kind: Kind,
    },
    /// Take a node out, as a machine that fails for good
    RemoveNode {
        /// Such as node2
        node: String,
    },
    /// Restart the agent of a node, or kill it
    Agent {
        /// Such as node2
        node: String,
        /// What to do
        action: AgentAction,
    },
    /// Print the kubeconfig
    Kubeconfig,
    /// Stop everything and remove all that was made
    Down,
    /// Cut the power of a node, or switch it on again
    #[command(hide = true)]
    Node {
        /// Such as node2
        node: String,
        /// What to do
        action: NodeAction,
        /// It boots as another kind
        #[command(flatten)]
        kind: Kind,
    },
    /// Give the embedded API server a fault, or none
    #[command(hide = true)]
    Api {
        /// Which
        fault: Fault,
    },
    /// The process behind a local cluster
    #[command(hide = true)]
    Daemon,
    /// The parent of a node
    #[command(hide = true)]
    MakeNode {
        /// Which
        node: String,
    },
    /// PID 1 of a node
    #[command(hide = true)]
    NodeInit {
        /// Which
        node: String,
    },
    /// What a node runs in place of `flux` where no Flux can be had
    #[command(hide = true, disable_help_flag = true)]
    StandIn {
        /// As for `flux`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// The parent of an agent
    #[command(hide = true)]
    MakePod {
        /// Where
        node: String,
        /// The node's PID 1
        init: i32,
        /// The pod's uid
        uid: String,
        /// The pod's name
        name: String,
    },
}

/// What to do with an agent.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentAction {
    /// SIGTERM, then a new pod: what a rollout does
    Restart,
    /// SIGKILL; the pod gets a new one
    Kill,
}

/// What to do with a node.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeAction {
    /// Everything on it is killed.
    PowerOff,
    /// It boots again.
    PowerOn,
}

impl LocalCommand {
    /// A part of a cluster that writes a log, not a command that ends with an answer.
    pub fn is_service(&self) -> bool {
        let nodes = matches!(self, Self::MakeNode { .. } | Self::NodeInit { .. } | Self::MakePod { .. });
        nodes || matches!(self, Self::Daemon | Self::StandIn { .. })
    }

    /// Carries it out.
    ///
    /// # Errors
    /// [`LocalError::exit_code`] says what to end with.
    pub async fn run(self) -> Result<ExitCode, LocalError> {
        // A stand-in runs as the brokers' user.
        if !matches!(self, Self::StandIn { .. }) && !nix::unistd::geteuid().is_root() {
            let message = "`flux-distribute local` makes and looks into namespaces, cgroups and links: run it as root, such as \
                           with sudo";
            return Err(LocalError::Usage(message.to_owned()));
        }
        let layout = Layout::from_env()?;
        match self {
            Self::Up(up) => up::run(&layout, *up).await?,
            Self::Exec { node, agent, command } => {
                let place = if agent { exec::Place::Pod } else { exec::Place::Node };
                return exec::run(&layout, &node, place, command).await;
            }
            Self::Logs { node, broker } => logs::run(&layout, &node, broker)?,
            Self::StandIn { words } => return stand_in::run(&words).await,
            Self::Status { output } => status::run(&layout, output == OutputFormat::Json).await?,
            Self::AddNode { count, kind } => {
                for node in Client::connect(&layout).await?.ask(Request::Add { count, kind }).await? {
                    say(&format!("{} is up at {}", node.name, node.address))?;
                }
            }
            Self::RemoveNode { node } => {
                ask(&layout, &node, |node| Request::Remove { node }).await?;
                say(&format!("{node} is gone; its rank is kept for spec.ranks.retain (10m), the lead's for ever"))?;
            }
            Self::Agent { node, action: AgentAction::Restart } => {
                ask(&layout, &node, |node| Request::RestartAgent { node }).await?
            }
            Self::Agent { node, action: AgentAction::Kill } => {
                ask(&layout, &node, |node| Request::KillAgent { node }).await?
            }
            Self::Node { node, action: NodeAction::PowerOff, .. } => {
                ask(&layout, &node, |node| Request::PowerOff { node }).await?
            }
            Self::Node { node, action: NodeAction::PowerOn, kind } => {
                if kind != Kind::default() {
                    let node = exec::known(&layout, &node).await?.name;
                    kind.save(&layout.node_kind(&node))?;
                }
                ask(&layout, &node, |node| Request::PowerOn { node }).await?
            }
            Self::Api { fault } => Client::connect(&layout).await?.ask(Request::Api { fault }).await.map(drop)?,
            Self::Kubeconfig => {
                layout.load()?;
                let path = layout.kubeconfig();
                let text = std::fs::read_to_string(&path).context(|| format!("can't read {}", path.display()))?;
                say(text.trim_end())?;
            }
            Self::Down => {
                let taken_down = down::run(&layout).await?;
                say(if taken_down { "the local cluster is down" } else { "there is no local cluster" })?;
            }
            Self::Daemon => return tell_failure(daemon::run(&layout).await),
            Self::MakeNode { node } => return tell_failure(node::boot(&layout, &node).await),
            Self::NodeInit { node } => return tell_failure(init::run(&layout, &node).await),
            Self::MakePod { node, init, uid, name } => {
                let node_name = layout.kind(&node)?.node_of(&node).to_owned();
                return tell_failure(pod::run(&layout, pod::Pod { node, node_name, init, uid, name }).await);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn ask(layout: &Layout, node: &str, request: fn(String) -> Request) -> Result<(), LocalError> {
    let request = request(exec::known(layout, node).await?.name);
    Client::connect(layout).await?.ask(request).await.map(drop)
}
