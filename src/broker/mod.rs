//! The broker: its command line, its unit, and the protocol of its socket (RFC 3).

pub mod command;
pub mod log;
pub mod message;
pub mod pending;
pub mod reload;
pub mod rfc3;
pub mod status;
pub mod unit;

/// The version (`version` in flux-broker-attributes(7)) of local mode's stand-in for a broker. Every report about such
/// an instance begins with it, because no Flux runs there.
pub const STAND_IN: &str = "stand-in, no Flux";
