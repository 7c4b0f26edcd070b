//! The broker: its command line, its unit, and the protocol of its socket (RFC 3).

pub mod command;
pub mod log;
pub mod message;
pub mod pending;
pub mod reload;
pub mod rfc3;
pub mod status;
pub mod unit;

/// The version (`version` of flux-broker-attributes(7)) that local mode's stand-in for a broker has, and what everybody who
/// speaks of such an instance begins with: no Flux runs there.
pub const STAND_IN: &str = "stand-in, no Flux";
