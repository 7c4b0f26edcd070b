//! Local mode: N simulated nodes and a small API server on one Linux machine.
//!
//! The same agent, through the same Kubernetes client and the same host boundary as in production; only what stands
//! around it is a stand-in: nodes made of namespaces ([`cluster`]), and an API server in memory ([`apiserver`]).

pub mod apiserver;
pub mod cluster;
mod command;
mod error;

pub use command::LocalCommand;
pub use error::LocalError;
