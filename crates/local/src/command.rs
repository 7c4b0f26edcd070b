use std::{path::PathBuf, process::ExitCode};

use super::{
    cluster::{
        container,
        control::{Client, Request, report_failure},
        daemon, down, exec, init,
        io::print_line,
        kind::Kind,
        layout::Layout,
        logs, manifest, node,
        options::Up,
        pod, pods, remove, restart, status, up,
    },
    error::{Context, LocalError},
    stand_in,
};
use apiserver::Fault;
use packages::OutputFormat;

/// Simulated nodes on this machine, with an API server of their own.
#[derive(clap::Subcommand, Clone, Debug)]
pub enum LocalCommand {
    /// Start nodes and make one Flux instance of them
    Up(Box<Up>),
    /// Run a command in a node and exit with its exit code
    Exec {
        /// The node, such as node1
        node: String,
        /// Run a command of flux-distribute in the agent's pod, such as `status` or `dump`; use this if a message says
        /// to run something in a node's pod, for example with `kubectl exec`
        #[arg(long)]
        agent: bool,
        /// The command
        #[arg(last = true, required = true, value_name = "CMD")]
        command: Vec<String>,
    },
    /// Print the log of a node's agent, or with --broker of its broker
    Logs {
        /// The node, such as node1
        node: String,
        /// Print the broker's log instead
        #[arg(long)]
        broker: bool,
    },
    /// Show the instance and its nodes
    ///
    /// AGENT is the agent's pid on this machine; BROKER is the broker's pid inside its node.
    Status {
        /// The output format
        #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
        output: OutputFormat,
    },
    /// Add nodes
    AddNode {
        /// The number of nodes
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        count: u32,
        /// How the nodes differ from this machine
        #[command(flatten)]
        kind: Kind,
    },
    /// Remove a node, like a machine that fails for good
    RemoveNode {
        /// The node, such as node2
        node: String,
    },
    /// Restart the agent of a node, or kill it
    Agent {
        /// The node, such as node2
        node: String,
        /// What to do with its agent
        action: AgentAction,
    },
    /// Restart all brokers at once; after `flux shutdown`, start the instance again. Running jobs are lost
    Restart,
    /// Create the objects of a YAML file, such as pods, or change those that exist; kubectl can do it too
    Apply {
        /// The file
        file: PathBuf,
    },
    /// Delete the objects of a YAML file; kubectl can do it too
    Delete {
        /// The file
        file: PathBuf,
    },
    /// Show the pods and their nodes
    Pods,
    /// Print the kubeconfig
    Kubeconfig,
    /// Stop everything and remove everything that `local up` made
    Down,
    /// Cut a node's power, or switch it on again
    Node {
        /// The node, such as node2
        node: String,
        /// What to do with it
        action: NodeAction,
        /// How it differs from this machine after power-on. Without any of these, it stays as it was
        #[command(flatten)]
        kind: Kind,
    },
    /// Make the embedded API server fail in some way, or end that
    #[command(hide = true)]
    Api {
        /// The kind of failure
        fault: Fault,
    },
    /// The daemon of a local cluster
    #[command(hide = true)]
    Daemon,
    /// The parent process of a node
    #[command(hide = true)]
    MakeNode {
        /// The node's name
        node: String,
    },
    /// A node's PID 1
    #[command(hide = true)]
    NodeInit {
        /// The node's name
        node: String,
    },
    /// What a node runs in place of `flux` if no Flux is available
    #[command(hide = true, disable_help_flag = true)]
    StandIn {
        /// The arguments, as for `flux`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// The parent process of an agent
    #[command(hide = true)]
    MakePod {
        /// The node's name
        node: String,
        /// The node's PID 1
        init: i32,
        /// The pod's uid
        uid: String,
        /// The pod's name
        name: String,
    },
    /// The parent process of a container
    #[command(hide = true)]
    MakeContainer {
        /// The node's name
        node: String,
        /// The node's PID 1
        init: i32,
        /// The pod's uid
        uid: String,
    },
}

/// What to do with an agent.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentAction {
    /// SIGTERM, then a new pod, as in a rollout
    Restart,
    /// SIGKILL, then a new agent in the same pod
    Kill,
}

/// What to do with a node's power.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeAction {
    /// Kill everything on the node.
    PowerOff,
    /// Boot the node again.
    PowerOn,
}

impl LocalCommand {
    /// True for the processes of a cluster, which write a log; false for commands that print a result and exit.
    pub fn is_service(&self) -> bool {
        let nodes = matches!(self, Self::MakeNode { .. } | Self::NodeInit { .. });
        let pods = matches!(self, Self::MakePod { .. } | Self::MakeContainer { .. });
        nodes || pods || matches!(self, Self::Daemon | Self::StandIn { .. })
    }

    /// Runs the command.
    ///
    /// # Errors
    /// [`LocalError::exit_code`] is the exit code for each.
    pub async fn run(self) -> Result<ExitCode, LocalError> {
        // A stand-in runs as the brokers' user, not as root.
        if !matches!(self, Self::StandIn { .. }) && !nix::unistd::geteuid().is_root() {
            let message = "`flux-distribute local` creates namespaces, cgroups and network links: run it as root, for example \
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
                    print_line(&format!("{} is up at {}", node.name, node.address))?;
                }
            }
            Self::RemoveNode { node } => {
                let node = exec::find_node(&layout, &node).await?.name;
                let rank = remove::rank_of(&layout, &node).await;
                ask(&layout, &node, |node| Request::Remove { node }).await?;
                print_line(&remove::describe(&node, rank))?;
            }
            Self::Agent { node, action: AgentAction::Restart } => {
                ask(&layout, &node, |node| Request::RestartAgent { node }).await?;
                print_line(&format!("the agent of {node} has ended; the kubelet starts another one in a new pod"))?;
            }
            Self::Agent { node, action: AgentAction::Kill } => {
                ask(&layout, &node, |node| Request::KillAgent { node }).await?;
                print_line(&format!("the agent of {node} was killed; the kubelet starts it again in the same pod"))?;
            }
            Self::Node { node, action: NodeAction::PowerOff, .. } => {
                ask(&layout, &node, |node| Request::PowerOff { node }).await?;
                print_line(&format!("{node} is powered off"))?;
            }
            Self::Node { node, action: NodeAction::PowerOn, kind } => {
                if exec::find_node(&layout, &node).await?.init_pid.is_some() {
                    return Err(LocalError::Usage(format!("{node} is on already")));
                }
                if kind != Kind::default() {
                    kind.save(&layout.node_kind(&node))?;
                }
                ask(&layout, &node, |node| Request::PowerOn { node }).await?;
                print_line(&format!("{node} boots; `flux-distribute local status` shows when it is back"))?;
            }
            Self::Api { fault } => Client::connect(&layout).await?.ask(Request::Api { fault }).await.map(drop)?,
            Self::Restart => {
                restart::run(&layout).await?;
                print_line("asked for a restart; `flux-distribute local status` shows when the instance is back")?;
            }
            Self::Apply { file } => manifest::apply(&layout, &file).await?,
            Self::Delete { file } => manifest::delete(&layout, &file).await?,
            Self::Pods => pods::run(&layout).await?,
            Self::Kubeconfig => {
                layout.load()?;
                let path = layout.kubeconfig();
                let text = std::fs::read_to_string(&path).context(|| format!("can't read {}", path.display()))?;
                print_line(text.trim_end())?;
            }
            Self::Down => {
                let taken_down = down::run(&layout).await?;
                print_line(if taken_down { "the local cluster is down" } else { "there is no local cluster" })?;
            }
            Self::Daemon => return report_failure(daemon::run(&layout).await),
            Self::MakeNode { node } => return report_failure(node::boot(&layout, &node).await),
            Self::NodeInit { node } => return report_failure(init::run(&layout, &node).await),
            Self::MakePod { node, init, uid, name } => {
                let node_name = layout.kind(&node)?.node_of(&node).to_owned();
                return report_failure(pod::run(&layout, pod::Pod { node, node_name, init, uid, name }).await);
            }
            Self::MakeContainer { node, init, uid } => {
                return report_failure(container::run(&layout, &node, init, &uid).await);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn ask(layout: &Layout, node: &str, request: fn(String) -> Request) -> Result<(), LocalError> {
    let request = request(exec::find_node(layout, node).await?.name);
    Client::connect(layout).await?.ask(request).await.map(drop)
}
