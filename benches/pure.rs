//! How long the planner's pure functions take for large instances.
//!
//!     cargo bench --bench pure
//!
//! Before the measurements it prints a line of JSON with the sizes of what they make.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::hint::black_box;

use api::{Roster, packed::pack};
use criterion::Criterion;
use model::{broker_toml::render, fixture::roster};
use serde_json::json;

/// Members of this many kinds: each kind has a number of cores of its own.
fn members(count: u32, kinds: u32) -> Roster {
    let names: Vec<_> = (0..count).map(|number| (format!("node{number}"), 8 + number * kinds / count)).collect();
    let nodes: Vec<_> = names.iter().map(|(name, cores)| (name.as_str(), *cores)).collect();
    roster(count, &nodes)
}

fn main() {
    let (large, usual) = (members(10_000, 20), members(5000, 4));
    let (broker_toml, text) = (render(&large).unwrap(), serde_json::to_string(&usual).unwrap());
    let sizes = json!({
        "broker_toml_bytes": broker_toml.len(), "broker_toml_packed": pack(&broker_toml).unwrap().0.len(),
        "roster_bytes": text.len(), "roster_packed": pack(&text).unwrap().0.len(),
    });
    println!("{sizes}");
    let mut criterion = Criterion::default().configure_from_args();
    criterion.bench_function("render", |bench| bench.iter(|| render(black_box(&large))));
    criterion.bench_function("write_roster", |bench| {
        bench.iter(|| pack(&serde_json::to_string(black_box(&usual)).unwrap()).unwrap());
    });
    criterion.bench_function("read_roster", |bench| bench.iter(|| Roster::parse(black_box(&text))));
    criterion.final_summary();
}
