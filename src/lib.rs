//! Turns the nodes of a Kubernetes cluster into one Flux system.
//!
//! See `README.md` for what it is to its users, and each module for what it promises.

pub mod agent;
pub mod api;
pub mod broker;
pub mod cli;
pub mod host;
pub mod local;
pub mod packages;
pub mod plan;
pub mod planner;

/// An error and its causes as one sentence.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
