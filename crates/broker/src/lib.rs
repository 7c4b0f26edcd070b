//! The broker: its command line, its unit, its log, and the protocol of its socket (RFC 3).
//!
//! It talks to a broker and builds the order that starts one; other crates decide when and where a broker starts.

pub mod command;
pub mod files;
pub mod job_id;
pub mod jobs;
pub mod journal;
pub mod log;
pub mod message;
pub mod pending;
pub mod queues;
pub mod reload;
pub mod resource_set;
pub mod rfc3;
pub mod status;
pub mod unit;
