//! A stand-in for Flux's brokers, for machines on which Flux is not available. Agents, planner and API server are the
//! real ones; each node runs this instead of a broker. It connects to the others, reports which ranks are online, and
//! runs no jobs.
//!
//! Its version is [`STAND_IN`](api::STAND_IN), which agent and planner repeat in their messages.

mod broker;
mod bundle;
mod overlay;
mod socket;

pub use broker::{Broker, Config, ORDERS};
pub use socket::{Asked, Service, Socket};

pub(crate) use bundle::{NAME, make};

use std::process::ExitCode;

use super::{cluster::io::print_line, error::LocalError};
use api::STAND_IN;

/// Acts as `flux` with these arguments, as far as that is possible without Flux.
///
/// # Errors
/// The broker can't be started, or the command needs Flux.
pub(crate) async fn run(words: &[String]) -> Result<ExitCode, LocalError> {
    match words.first().map(String::as_str) {
        Some("broker") => broker::run(&words[1..]).await,
        Some("--version" | "version") => print_line(STAND_IN).map(|()| ExitCode::SUCCESS),
        // The agent stops the queues before an epoch ends; the stand-in has none.
        Some("queue") => Ok(ExitCode::SUCCESS),
        _ => Err(LocalError::NeedsFlux(words.join(" "))),
    }
}
