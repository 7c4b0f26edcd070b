//! The commands of `kubectl flux`, for people at their own machines: they need a kubeconfig, and no Flux.
//!
//! Each command reads the objects of this project once ([`observed`]), computes what it shows by pure functions, and prints
//! that. What needs Flux runs in the agent's pod on a node, by `kubectl exec`: whoever calls a plugin of kubectl has kubectl, with
//! its terminals and its ways to log in.
//!
//! Nothing here knows hosts or brokers, so this crate also builds where no node runs.

mod arguments;
mod change;
mod complete;
mod doctor;
mod error;
#[cfg(test)]
mod fixture;
mod observed;
mod overview;
mod screen;
mod status;
mod support;
mod through_kubectl;
mod tree;
mod uninstall;

use std::process::ExitCode;

pub use arguments::Arguments;
use arguments::Command;
pub use complete::complete;
pub use error::KubectlError;
use observed::Cluster;

/// Runs the command that the arguments name.
///
/// # Errors
/// [`KubectlError`]; its exit code is [`KubectlError::exit_code`].
pub async fn run(arguments: Arguments) -> Result<ExitCode, KubectlError> {
    let Arguments { connection, command } = arguments;
    let cluster = Cluster::connect(&connection).await?;
    match command {
        Command::Status(options) => status::run(&cluster, &options).await?,
        Command::Tree(options) => tree::run(&cluster, options.output).await?,
        Command::Doctor(options) => return doctor::run(&cluster, options.output).await,
        Command::Connect { node } => return through_kubectl::connect(&cluster, node.as_deref()).await,
        Command::Run { node, command } => return through_kubectl::run(&cluster, node.as_deref(), &command).await,
        Command::Jobs { arguments } => return through_kubectl::jobs(&cluster, arguments).await,
        Command::Logs(options) => return through_kubectl::logs(&cluster, &options).await,
        Command::Drain { nodes, reason } => return through_kubectl::drain(&cluster, &nodes, &reason.join(" ")).await,
        Command::Undrain { nodes } => return through_kubectl::undrain(&cluster, &nodes).await,
        Command::Pause => return through_kubectl::pause(&cluster).await,
        Command::Resume => return through_kubectl::resume(&cluster).await,
        Command::SupportBundle(options) => support::run(&cluster, &options).await?,
        Command::Uninstall(options) => return uninstall::run(&cluster, &options).await,
        Command::Scale { nodes } => change::scale(&cluster, nodes).await?,
        Command::Upgrade { now } => change::upgrade(&cluster, now).await?,
    }
    Ok(ExitCode::SUCCESS)
}
