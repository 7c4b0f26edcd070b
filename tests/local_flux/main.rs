//! The whole thing on real Flux: local mode's nodes, the agents, the planner and the brokers, from `local up` to `local
//! down`. Needs root, namespaces, and a Flux in the prefix that FLUX_PREFIX names (default /opt/flux).

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

/// What a small machine can take.
const CLUSTERS_AT_ONCE: u32 = 3;

/// The longest life of a cluster.
const LONGEST: std::time::Duration = std::time::Duration::from_mins(20);

mod air_gap;
mod damage;
mod elastic;
mod epochs;
mod harness;
mod instance;
mod keep;
mod kinds;
mod loss;
#[path = "../support/rights.rs"]
mod manifest_rights;
mod names;
#[path = "../support/needs.rs"]
mod needs;
mod peers;
mod pods;
mod prometheus;
mod removal;
mod replaced;
mod rights;
mod scale;
mod scheduler;
mod shutdown;
mod sources;
mod state;
mod told;
#[path = "../support/traces.rs"]
mod traces;
mod trees;
