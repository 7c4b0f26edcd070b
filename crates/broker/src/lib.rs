//! The broker: its command line, its unit, its log, and the protocol of its socket (RFC 3).
//!
//! It knows how to speak to a broker and how one is described to a host; who starts it, and when, is for others to decide.

pub mod command;
pub mod log;
pub mod message;
pub mod pending;
pub mod reload;
pub mod rfc3;
pub mod status;
pub mod unit;
