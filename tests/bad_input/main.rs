//! Bad input, one test for each cause: each is one sentence where people look, an Event, nothing half-made is live, and it
//! heals by itself when the cause is taken away. On local clusters; needs root.

#![allow(clippy::unwrap_used, reason = "clippy.toml's exception ends at the tests' own functions")]

#[path = "../support/channel.rs"]
#[allow(dead_code, reason = "each test binary uses its part")]
mod channel;

mod broker;
mod bundle;
mod certificate;
mod cluster;
mod command_line;
mod deletes;
mod host;
mod managers;
#[path = "../support/needs.rs"]
mod needs;
mod newer;
mod objects;
mod packages;
mod placeholders;
mod pods;
mod priority;
mod readable;
mod rights;
mod spec;
