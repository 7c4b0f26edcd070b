//! The command line.

mod input;
#[cfg(feature = "kubectl")]
mod plugin;
#[cfg(feature = "kubectl")]
mod render;
mod validate;

use std::{
    io::{ErrorKind, Write},
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use futures::future::BoxFuture;
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;

use agent::{ManualStep, Place};
use base::{error_chain, redact};
use metrics::Metrics;

/// Exit code for bad input, when nothing was changed yet. Every other failure is 1.
const BAD_INPUT: u8 = 2;

/// What an interrupted command leaves.
const NOTHING_WRITTEN: &str = "nothing was written";

/// Turns the nodes of a Kubernetes cluster into one Flux system.
#[derive(Parser, Debug)]
#[command(name = "flux-distribute", version, about, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Simulated nodes on this machine that are one Flux instance: try it here first
    #[cfg(feature = "local")]
    #[command(subcommand)]
    Local(local::LocalCommand),
    /// Write a lock: the exact packages to install. Or show what another lock would change
    Lock(packages::LockCommand),
    /// Create or inspect a bundle: a whole package set in one file
    #[command(subcommand)]
    Bundle(packages::BundleCommand),
    /// Show what the broker on this node reports and, on the lead, the state of the instance
    Status(agent::StatusArguments),
    /// Open a shell in the Flux instance on this node, or run a command in it
    Connect {
        /// The command and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Open a shell on the host, outside the pod, or run a command there
    Shell {
        /// The command and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Hash the files installed on this node again, and list those that differ from what was installed
    Verify(agent::VerifyArguments),
    /// Dump the instance's queue to a file on the lead's host; run it there
    Dump(agent::DumpArguments),
    /// Make another node the lead when the lead's disk is lost, with the queue from a dump
    Recover(agent::RecoverArguments),
    /// Discard the queue and start with an empty one
    Reset(agent::ResetArguments),
    /// Remove everything that was installed on this host, without a Kubernetes cluster
    Uninstall(agent::UninstallArguments),
    /// Run the agent, as the DaemonSet does: take every step below and keep the node in that state
    Agent(agent::AgentArguments),
    /// Step by hand: check whether this host can run a broker; changes nothing
    Preflight(agent::AgentArguments),
    /// Step by hand: create the prefix and its undo list on this host
    Claim(agent::AgentArguments),
    /// Step by hand: fetch and link the packages
    Install(agent::InstallArguments),
    /// Step by hand: write the files that the broker reads at start
    Configure(agent::AgentArguments),
    /// Step by hand: start the broker unless it already runs
    Start(agent::AgentArguments),
    /// Reload the roster's resources and the scheduler on the lead; running jobs continue
    Reload(agent::AgentArguments),
    /// Step by hand: fail unless the broker is online
    Online(agent::AgentArguments),
    /// Step by hand: write this node's state to its FluxNode
    Report(agent::AgentArguments),
    /// Print the CustomResourceDefinitions as YAML
    Crds,
    /// Check a FluxInstance in a file, and show what applying it would change
    Validate(validate::ValidateArguments),
    /// Show what an instance of some nodes would be, without a cluster: broker.toml, the tree, a unit, the steps on a node
    #[cfg(feature = "kubectl")]
    Render(render::RenderArguments),
    /// Fail unless the agent in this pod is alive; the kubelet's probe
    #[command(hide = true)]
    Probe(agent::ProbeArguments),
    /// Carry out one order in the host's namespaces
    #[command(hide = true)]
    Stage,
    /// Become the broker
    #[command(hide = true)]
    Launch,
    /// Be the process of a placeholder pod: wait until kubelet kills it
    #[command(hide = true)]
    Placeholder,
}

/// Parses the arguments, runs the command, and returns its exit code.
pub fn main() -> ExitCode {
    #[cfg(feature = "kubectl")]
    if let Some(code) = plugin::main() {
        return code;
    }
    let arguments = Arguments::parse();
    if holds_keys(&arguments.command) {
        forbid_cores();
    }
    // Both are single-threaded processes on the host: no runtime, no TLS, and stdout carries their replies.
    match arguments.command {
        Command::Stage => return stage::main(),
        Command::Launch => return stage::launch::launcher_main(),
        // As process 1 it ignores SIGTERM; with a grace period of 0, kubelet kills it at once.
        Command::Placeholder => loop {
            std::thread::park();
        },
        _ => {}
    }
    init_tracing(&arguments.command);
    install_crypto();
    exit_code("flux-distribute", run(arguments.command))
}

/// The exit code of a command; prints why it failed, after the name by which the user called the program.
fn exit_code(name: &str, done: Result<ExitCode, Failure>) -> ExitCode {
    done.unwrap_or_else(|failure| {
        // A closed stderr has no reader, so there is no way to report that.
        let _ = writeln!(std::io::stderr(), "{name}: {}", failure.message);
        failure.code
    })
}

/// rustls has no default provider in this build; only the first call of a process does anything.
fn install_crypto() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Keeps what this process holds out of core dumps. A process without this protection is better than none.
fn forbid_cores() {
    let _ = host::core_dump::forbid();
}

/// True for a command that may hold a key or a token, so that a core of it must not be kept. The others start programs
/// of users, whose cores are theirs.
fn holds_keys(command: &Command) -> bool {
    match command {
        #[cfg(feature = "local")]
        Command::Local(_) => false,
        Command::Connect { .. } | Command::Shell { .. } | Command::Launch => false,
        _ => true,
    }
}

/// How a command failed.
struct Failure {
    message: String,
    code: ExitCode,
}

impl Failure {
    fn new(error: &dyn std::error::Error) -> Self {
        Self { message: error_chain(error), code: ExitCode::FAILURE }
    }

    fn coded(code: impl Into<ExitCode>, error: &dyn std::error::Error) -> Self {
        Self { code: code.into(), ..Self::new(error) }
    }

    fn bad_input(message: String) -> Self {
        Self { message, code: ExitCode::from(BAD_INPUT) }
    }
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        #[cfg(feature = "local")]
        Command::Local(command) => {
            block_on(async { command.run().await.map_err(|error| Failure::coded(error.exit_code(), &error)) })
        }
        Command::Lock(command) => block_on(async {
            packages::end_if_interrupted(NOTHING_WRITTEN.to_owned());
            command.run().await.map_err(|error| Failure::coded(error.exit_code(), &error))?;
            Ok(ExitCode::SUCCESS)
        }),
        Command::Bundle(command) => {
            packages::end_if_interrupted(command.keeps().unwrap_or_else(|| NOTHING_WRITTEN.to_owned()));
            command.run().map_err(|error| Failure::coded(error.exit_code(), &error))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Status(arguments) => {
            block_on(async { agent::status(arguments).await.map_err(|error| Failure::new(&error)) })
        }
        Command::Verify(arguments) => block_on(async {
            agent::verify(arguments).await.map_err(|error| Failure::coded(error.exit_code(), &error))
        }),
        Command::Dump(arguments) => {
            block_on(async { agent::dump(arguments).await.map_err(|error| Failure::coded(error.exit_code(), &error)) })
        }
        Command::Recover(arguments) => block_on(async {
            agent::recover(arguments).await.map_err(|error| Failure::coded(error.exit_code(), &error))
        }),
        Command::Reset(arguments) => {
            block_on(async { agent::reset(arguments).await.map_err(|error| Failure::coded(error.exit_code(), &error)) })
        }
        Command::Uninstall(arguments) => block_on(async {
            agent::uninstall(arguments).await.map_err(|error| Failure::coded(error.exit_code(), &error))
        }),
        Command::Connect { command } => agent::connect(&command).map_err(|error| Failure::new(&error)),
        Command::Shell { command } => agent::shell(&command).map_err(|error| Failure::new(&error)),
        Command::Agent(arguments) => {
            block_on(async { agent::run(arguments, plan).await.map_err(|error| Failure::new(&error)) })
        }
        Command::Preflight(arguments) => manual_step(ManualStep::Preflight, arguments),
        Command::Claim(arguments) => manual_step(ManualStep::Claim, arguments),
        Command::Install(arguments) => manual_step(ManualStep::Install(arguments.output), arguments.agent),
        Command::Configure(arguments) => manual_step(ManualStep::Configure, arguments),
        Command::Start(arguments) => manual_step(ManualStep::Start, arguments),
        Command::Reload(arguments) => manual_step(ManualStep::Reload, arguments),
        Command::Online(arguments) => manual_step(ManualStep::Online, arguments),
        Command::Report(arguments) => manual_step(ManualStep::Report, arguments),
        Command::Crds => print(&api::crds().map_err(|error| Failure::new(&error))?),
        Command::Validate(arguments) => validate::validate(&arguments),
        #[cfg(feature = "kubectl")]
        Command::Render(arguments) => render::render(arguments),
        Command::Probe(arguments) => {
            agent::probe(&arguments).map(|()| ExitCode::SUCCESS).map_err(|error| Failure::new(&error))
        }
        Command::Stage | Command::Launch | Command::Placeholder => Ok(ExitCode::FAILURE),
    }
}

/// What plans while an agent holds the Lease.
fn plan(
    client: kube::Client,
    identity: String,
    place: watch::Receiver<Place>,
    metrics: Metrics,
) -> BoxFuture<'static, ()> {
    Box::pin(planner::run(client, identity, place, metrics))
}

fn manual_step(step: ManualStep, arguments: agent::AgentArguments) -> Result<ExitCode, Failure> {
    block_on(async { agent::manual_step(step, arguments).await.map_err(|error| Failure::new(&error)) })
}

/// Two workers suffice for an agent; one per core would cost 2 MiB of stack each on a node with 200 cores.
fn block_on(future: impl Future<Output = Result<ExitCode, Failure>>) -> Result<ExitCode, Failure> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).max_blocking_threads(16).enable_all().build();
    runtime.map_err(|error| Failure::new(&error))?.block_on(future)
}

/// The crates of this project, whose log is worth more than that of others.
const OURS: [&str; 19] = [
    "flux_distribute",
    "agent",
    "api",
    "apiserver",
    "base",
    "bridge",
    "broker",
    "cluster",
    "host",
    "hostapi",
    "kubectl",
    "local",
    "locks",
    "metrics",
    "model",
    "packages",
    "planner",
    "pods",
    "stage",
];

/// The levels of our own log and of the libraries'. A command that ends with an answer tells people that answer, and not on which try it
/// came: only a service writes a log.
fn levels(command: &Command) -> (&'static str, &'static str) {
    match command {
        Command::Lock(_) | Command::Bundle(_) | Command::Validate(_) => ("warn", "off"),
        #[cfg(feature = "kubectl")]
        Command::Render(_) => ("warn", "off"),
        #[cfg(feature = "local")]
        Command::Local(command) if !command.is_service() => ("warn", "off"),
        _ => ("info", "warn"),
    }
}

fn default_log(command: &Command) -> String {
    let (ours, others) = levels(command);
    OURS.iter().map(|name| format!("{name}={ours},")).chain([others.to_owned()]).collect()
}

fn init_tracing(command: &Command) {
    let mut filter =
        EnvFilter::try_from_env(redact::LOG_VARIABLE).unwrap_or_else(|_| EnvFilter::new(default_log(command)));
    // With warnings, it logs each answer that it can't read as a whole: Secrets, and pods with their environment.
    let errors = if levels(command).1 == "off" { "kube_client::client=off" } else { "kube_client::client=error" };
    if let Ok(directive) = errors.parse() {
        filter = filter.add_directive(directive);
    }
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(redact::Stderr);
    if std::env::var("FLUX_DISTRIBUTE_LOG_FORMAT").is_ok_and(|format| format == "json") {
        log.json().init();
    } else {
        log.with_ansi(false).with_target(false).init();
    }
}

/// Prints an answer. A reader that has gone away, as `head` does, has seen enough.
fn print(text: &str) -> Result<ExitCode, Failure> {
    match base::process::print(text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure { message: format!("can't write to stdout: {error}"), code: ExitCode::FAILURE })
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_crate_of_the_project_logs_as_one_of_ours() {
        let crates = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/crates")).unwrap();
        let mut names: Vec<_> = crates.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.push("flux_distribute".to_owned());
        names.sort_unstable();
        let mut ours = OURS.to_vec();
        ours.sort_unstable();
        assert_eq!(names, ours);
    }

    #[test]
    fn no_command_has_two_arguments_with_the_same_name() {
        Arguments::command().debug_assert();
    }

    /// Every command below `command`, with its full name.
    fn all(command: &clap::Command, above: &str) -> Vec<(String, clap::Command)> {
        let below = |command: &clap::Command| {
            let name = format!("{above} {}", command.get_name()).trim().to_owned();
            let mut found = all(command, &name);
            found.push((name, command.clone()));
            found
        };
        command.get_subcommands().flat_map(below).collect()
    }

    #[test]
    fn every_command_that_reports_takes_the_same_output_option() {
        let commands = all(&Arguments::command(), "");
        for (name, command) in &commands {
            for argument in command.get_arguments().filter(|argument| argument.get_short() == Some('o')) {
                assert_eq!(argument.get_id(), "output", "-o of {name}");
            }
            if let Some(output) = command.get_arguments().find(|argument| argument.get_id() == "output") {
                let words: Vec<_> =
                    output.get_possible_values().iter().map(|word| word.get_name().to_owned()).collect();
                // A tree is drawn, not reported.
                let expected = if name == "render tree" { &["text", "dot", "svg"][..] } else { &["text", "json"] };
                assert_eq!(
                    (output.get_short(), words),
                    (Some('o'), expected.iter().map(ToString::to_string).collect()),
                    "{name}"
                );
            }
        }
        let reporting: Vec<_> = commands
            .iter()
            .filter(|(_, command)| command.get_arguments().any(|argument| argument.get_id() == "output"))
            .map(|(name, _)| name.as_str())
            .collect();
        let expected = [
            "local status",
            "lock diff",
            "bundle create",
            "bundle inspect",
            "status",
            "verify",
            "install",
            "validate",
            "render tree",
        ];
        assert_eq!(reporting, expected);
    }

    #[test]
    fn no_option_that_a_command_needs_is_hidden() {
        for (name, command) in all(&Arguments::command(), "").iter().filter(|(_, command)| !command.is_hide_set()) {
            for argument in command.get_arguments() {
                assert!(!(argument.is_required_set() && argument.is_hide_set()), "{} of {name}", argument.get_id());
            }
        }
    }
}
