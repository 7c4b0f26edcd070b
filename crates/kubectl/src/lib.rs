//! The commands of `kubectl flux`, for people at their own machines: they need a kubeconfig, and no Flux.
//!
//! Each command reads the objects of this project once ([`observed`]), computes what it shows by pure functions, and prints
//! that. What needs Flux runs in the agent's pod on a node, by `kubectl exec`: whoever calls a plugin of kubectl has kubectl, with
//! its terminals and its ways to log in.
//!
//! Nothing here knows hosts or brokers, so this crate also builds where no node runs.

mod agent_pod;
mod alike;
mod arguments;
mod change;
#[cfg(test)]
#[path = "../../../tests/support/columns.rs"]
mod columns;
mod complete;
mod doctor;
mod error;
#[cfg(test)]
mod fixture;
mod in_instance;
mod kubectl;
mod logs;
mod observed;
mod overview;
mod scale;
mod screen;
#[cfg(test)]
mod states;
mod status;
mod support;
mod tree;
mod uninstall;
mod upgrade;
mod wait;

use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use clap::Parser;

use arguments::Command;
pub use arguments::{Arguments, TreeFormat};
use complete::complete;
use error::KubectlError;
use in_instance::FluxCommand;
use observed::Cluster;

/// The name of a plugin (kubectl's documentation, "Extend kubectl with plugins").
const PLUGIN: &str = "kubectl-flux";
/// What kubectl runs to complete a command line of `kubectl flux`.
const COMPLETES: &str = "kubectl_complete-flux";

/// True if this process was called by one of the names by which kubectl finds a plugin.
pub fn is_called() -> bool {
    matches!(called().as_str(), PLUGIN | COMPLETES)
}

fn called() -> String {
    let first = std::env::args_os().next().unwrap_or_default();
    Path::new(&first).file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Runs the command of `kubectl flux` that the process's arguments name, or completes what they begin if the process was called by
/// that name.
pub fn main() -> ExitCode {
    // rustls has no default provider in this build; only the first call of a process does anything.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let done = if called() == COMPLETES {
        let words: Vec<String> = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
        base::process::print(&complete(&words)).map(|()| ExitCode::SUCCESS).map_err(KubectlError::Write)
    } else {
        let arguments = Arguments::parse();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.map_err(KubectlError::Runtime).and_then(|runtime| runtime.block_on(run(arguments)))
    };
    match done {
        Ok(code) => code,
        Err(error) if error.is_closed_output() => ExitCode::SUCCESS,
        Err(error) => {
            // A closed stderr has no reader, so there is no way to report that.
            let _ = writeln!(io::stderr(), "kubectl flux: {}", error.text());
            error.exit_code().into()
        }
    }
}

async fn run(arguments: Arguments) -> Result<ExitCode, KubectlError> {
    let Arguments { connection, command } = arguments;
    let cluster = Cluster::connect(&connection).await?;
    match command {
        Command::Status(options) => status::run(&cluster, &options).await,
        Command::Tree(options) => tree::run(&cluster, options.output).await,
        Command::Doctor(options) => doctor::run(&cluster, options.output).await,
        Command::SupportBundle(options) => support::run(&cluster, &options).await,
        Command::Connect { node } => in_instance::connect(&cluster, node.as_deref()).await,
        Command::Run { node, command } => in_instance::run(&cluster, node.as_deref(), &command).await,
        Command::Jobs { arguments } => in_instance::flux(&cluster, FluxCommand::Jobs(arguments)).await,
        Command::Logs(options) => logs::run(&cluster, &options).await,
        Command::Drain { nodes, reason } => in_instance::drain(&cluster, &nodes, &reason).await,
        Command::Undrain { nodes } => in_instance::undrain(&cluster, &nodes).await,
        Command::Pause => in_instance::flux(&cluster, FluxCommand::Pause).await,
        Command::Resume => in_instance::flux(&cluster, FluxCommand::Resume).await,
        Command::Scale { size, waiting } => scale::run(&cluster, size, &waiting).await,
        Command::Upgrade { now, waiting } => upgrade::run(&cluster, now, &waiting).await,
        Command::Uninstall(options) => uninstall::run(&cluster, &options).await,
    }
}
