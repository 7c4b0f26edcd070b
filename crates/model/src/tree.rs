//! The tree in which the brokers of a roster connect.

use super::topology::Topology;
use api::{EpochSettings, Rank, Roster};

/// The parent of `rank` in the roster's tree.
pub fn parent(roster: &Roster, rank: Rank) -> Option<Rank> {
    topology(roster)?.parent(rank)
}

/// The shape of the roster's tree; None if the roster's topology doesn't parse.
pub fn topology(roster: &Roster) -> Option<Topology> {
    Topology::parse(&roster.settings.topology, roster.settings.max_size).ok()
}

/// True if a broker of this epoch is the child of another one than the lead's.
pub(crate) fn is_deep(settings: &EpochSettings) -> bool {
    let (topology, size) = (&settings.topology, settings.max_size);
    Topology::parse(topology, size).is_ok_and(|topology| (1..size).any(|rank| topology.parent(rank) != Some(0)))
}
