//! What is broken on purpose while a job runs over all nodes, and what becomes of it: each fault many times, at random
//! moments, on real Flux in local mode. `make chaos`, or FLUX_DISTRIBUTE_CHAOS=1 (=long: more of all).
//!
//! - FLUX_DISTRIBUTE_CHAOS_TABLE names a file for the table of results;
//! - FLUX_DISTRIBUTE_CHAOS_ROWS takes only the rows whose name holds one of these words, separated by commas;
//! - FLUX_DISTRIBUTE_CHAOS_PODS=1 switches `spec.pods` on, with a gang of pods beside the job. Each node gives Flux a core less then: on a
//!   machine of two cores, job and gang are on different nodes;
//! - FLUX_DISTRIBUTE_CHAOS_RUNS, _OUTAGE (seconds), _WORKERS and _SEED are numbers.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

mod dice;
mod gang;
#[allow(dead_code, reason = "each target takes what it needs")]
#[path = "../local_flux/harness.rs"]
mod harness;
#[path = "../support/needs.rs"]
mod needs;
mod oracle;
mod packets;
mod processes;
mod rosters;
mod rows;
mod scene;
mod suite;
mod table;
#[path = "../support/traces.rs"]
mod traces;

/// The suite has its own limit.
const CLUSTERS_AT_ONCE: u32 = 64;

/// The longest life of a cluster.
const LONGEST: std::time::Duration = std::time::Duration::from_hours(2);

#[test]
fn every_fault_heals_by_itself_and_costs_no_more_than_its_row_allows() {
    if needs::skips_without([needs::Need::Chaos]) || harness::bundle().is_none() {
        return;
    }
    let settings = suite::Settings::from_env();
    let failures = suite::run(&settings, rows::all());
    assert!(failures.is_empty(), "{} failures, the first: {}", failures.len(), failures[0]);
}
