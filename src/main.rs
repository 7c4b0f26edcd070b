//! flux-distribute

use std::process::ExitCode;

use clap::Parser;
use flux_distribute::local::LocalCommand;

/// Turns the nodes of a Kubernetes cluster into one Flux system.
#[derive(Parser)]
enum Command {
    /// N simulated nodes on this machine
    #[command(subcommand)]
    Local(LocalCommand),
}

#[tokio::main(worker_threads = 2)]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    // Only the first one to be installed counts.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let Command::Local(command) = Command::parse();
    match command.run().await {
        Ok(code) => code,
        Err(error) => {
            tracing::error!(error = &error as &dyn std::error::Error, "failed");
            error.exit_code()
        }
    }
}
