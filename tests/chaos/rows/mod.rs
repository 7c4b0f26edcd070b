//! The faults.

mod api;
mod clock;
mod daemonset;
mod disk;
mod elastic;
mod kill;
mod live;
mod network;
mod node;
mod objects;
mod uninstall;

use crate::scene::{Hit, Scene};

/// What cluster a row needs.
#[derive(Debug, PartialEq, Eq)]
pub struct Shape {
    pub nodes: u32,
    /// Of `local up`.
    pub options: &'static [&'static str],
}

pub static FLAT: Shape = Shape { nodes: 4, options: &[] };
/// Rank 1 is above rank 3.
pub static DEEP: Shape = Shape { nodes: 4, options: &["--topology", "kary:2"] };

/// One fault.
pub struct Row {
    pub name: &'static str,
    pub runs: u32,
    pub shape: &'static Shape,
    /// Flux itself loses a job that runs there.
    pub job_dies: bool,
    /// Seconds from the fault's end until everything must be well.
    pub heals_in: u64,
    /// It takes an outage's length.
    pub takes_outage: bool,
    /// Each run has a cluster of its own.
    pub fresh: bool,
    /// Brings the fault about, and takes it off again where it does not heal by itself.
    pub inject: fn(&mut Scene) -> Hit,
}

/// A fault that costs nothing: no job, no broker.
pub fn row(name: &'static str, inject: fn(&mut Scene) -> Hit) -> Row {
    Row { name, runs: OFTEN, shape: &FLAT, job_dies: false, heals_in: 30, takes_outage: false, fresh: false, inject }
}

/// The promises' own rows, and the others.
pub const OFTEN: u32 = 20;
pub const SELDOM: u32 = 3;

pub fn all() -> Vec<Row> {
    let rooms = [
        kill::rows(),
        api::rows(),
        objects::rows(),
        live::rows(),
        network::rows(),
        node::rows(),
        disk::rows(),
        daemonset::rows(),
        clock::rows(),
        elastic::rows(),
        uninstall::rows(),
    ];
    rooms.into_iter().flatten().collect()
}
