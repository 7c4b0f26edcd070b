//! Local mode: N simulated nodes and a small API server on one Linux machine.
//!
//! The program of the image has nothing of this.
//!
//! The same agent, through the same Kubernetes client and the same host boundary as in production; only what stands
//! around it is made for it: nodes out of namespaces ([`cluster`]), an API server in memory (the crate [`apiserver`]), and where no Flux can
//! be had, a stand-in for its brokers ([`stand_in`]).

pub mod cluster;
mod command;
mod error;
pub mod stand_in;

pub use command::LocalCommand;
pub use error::LocalError;
