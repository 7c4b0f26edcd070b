//! What an unprivileged user of a node can try: each attack is a shell script beside this file, run as uid 65534 on a node of a
//! local cluster with real Flux, against an instance that runs. Each test ends with [`attack::nothing_gained`].

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

/// What a small machine can take.
const CLUSTERS_AT_ONCE: u32 = 1;

/// The longest life of a cluster.
const LONGEST: std::time::Duration = std::time::Duration::from_mins(20);

mod attack;
#[allow(dead_code, reason = "each target takes what it needs")]
#[path = "../local_flux/harness.rs"]
mod harness;
mod locks;
#[path = "../support/needs.rs"]
mod needs;
mod ports;
mod processes;
mod state;
#[allow(dead_code, reason = "each target takes what it needs")]
#[path = "../support/traces.rs"]
mod traces;
