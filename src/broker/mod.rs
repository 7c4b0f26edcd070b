//! The broker: its command line, its unit, and the protocol of its socket (RFC 3).

pub mod command;
pub mod log;
pub mod message;
pub mod pending;
pub mod reload;
pub mod rfc3;
pub mod status;
pub mod unit;
