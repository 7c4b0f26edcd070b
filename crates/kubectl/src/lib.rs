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
mod status;
mod support;
mod tree;
mod uninstall;
mod upgrade;

use std::process::ExitCode;

pub use arguments::Arguments;
use arguments::Command;
pub use complete::complete;
pub use error::KubectlError;
use in_instance::FluxCommand;
use observed::Cluster;

/// Runs the command that the arguments name.
///
/// # Errors
/// [`KubectlError`]; its exit code is [`KubectlError::exit_code`].
pub async fn run(arguments: Arguments) -> Result<ExitCode, KubectlError> {
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
        Command::Scale { size } => scale::run(&cluster, size).await,
        Command::Upgrade { now } => upgrade::run(&cluster, now).await,
        Command::Uninstall(options) => uninstall::run(&cluster, &options).await,
    }
}
