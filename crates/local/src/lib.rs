//! Local mode: N simulated nodes and a small API server on one Linux machine.
//!
//! Nodes run the same agent, through the same Kubernetes client and the same host boundary, as in production. Only the
//! surroundings are simulated: nodes are made of namespaces ([`cluster`]), the API server keeps its objects in memory
//! ([`apiserver`]), and if Flux is not available, a stand-in replaces its brokers ([`stand_in`]).

pub mod cluster;
mod command;
mod error;
pub mod stand_in;

pub use command::LocalCommand;
pub use error::LocalError;
