//! Turns the nodes of a Kubernetes cluster into one Flux system.
//!
//! See `README.md` for what it is to its users, and each module for what it promises.

pub mod agent;
pub mod api;
pub mod broker;
mod chance;
pub mod cli;
mod clock;
pub mod host;
pub mod local;
#[cfg(test)]
#[path = "../tests/support/needs.rs"]
mod needs;
pub mod packages;
pub mod plan;
pub mod planner;
mod redact;
mod words;

/// An error and its causes as one sentence, for a log, the wire, and errors that can't carry a source. Without the
/// credentials of URLs: the errors of libraries name what they asked.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut sentence = error.to_string();
    for cause in std::iter::successors(error.source(), |cause| cause.source()) {
        let words = cause.to_string();
        // Many errors repeat their source in their own words.
        if !sentence.contains(&words) {
            sentence = format!("{sentence}: {words}");
        }
    }
    redact::redacted(&sentence)
}
