//! A stand-in for Flux's brokers, for a machine that can reach no Flux: agents, planner and API server are the real ones,
//! and each node runs this in place of a broker. It joins the others, tells who is online, and runs no jobs.
//!
//! Whatever it is asked for its version, it answers [`STAND_IN`](api::STAND_IN), which agent and planner repeat.

mod broker;
mod bundle;
mod overlay;
mod socket;

pub use socket::{Asked, Service, Socket};

pub(crate) use bundle::{NAME, make};

use std::process::ExitCode;

use super::{cluster::up::say, error::LocalError};
use api::STAND_IN;

/// Does what `flux` with these arguments would do, as far as there is anything to do without Flux.
///
/// # Errors
/// The broker could not be started; everything that needs Flux.
pub(crate) async fn run(words: &[String]) -> Result<ExitCode, LocalError> {
    match words.first().map(String::as_str) {
        Some("broker") => broker::run(&words[1..]).await,
        Some("--version" | "version") => say(STAND_IN).map(|()| ExitCode::SUCCESS),
        // The agent stops the queues before an epoch ends. There are none.
        Some("queue") => Ok(ExitCode::SUCCESS),
        _ => Err(LocalError::Refused(format!(
            "{STAND_IN}: this node runs flux-distribute's stand-in for a broker, so `flux {}` can't be run; for Flux itself give \
             `local up` a --bundle or --channel",
            words.join(" ")
        ))),
    }
}
