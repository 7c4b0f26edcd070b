//! The tree in which the brokers of a roster connect.

use super::topology::Topology;
use api::{EpochSettings, Rank, Roster};

/// The parent of `rank` in the roster's tree. None for rank 0, and for every rank if the roster's topology doesn't parse.
pub fn parent(roster: &Roster, rank: Rank) -> Option<Rank> {
    topology(roster)?.parent(rank)
}

/// The shape of the roster's tree; None if the roster's topology doesn't parse.
pub fn topology(roster: &Roster) -> Option<Topology> {
    Topology::parse(&roster.settings.topology, roster.settings.max_size).ok()
}

/// True if all brokers of this epoch but the lead's are children of the lead's; false if its topology doesn't parse.
pub(crate) fn is_flat(settings: &EpochSettings) -> bool {
    Topology::parse(&settings.topology, settings.max_size).is_ok_and(|topology| topology.is_flat(settings.max_size))
}

/// True if a broker of this epoch is the child of another one than the lead's; false if its topology doesn't parse.
pub(crate) fn is_deep(settings: &EpochSettings) -> bool {
    Topology::parse(&settings.topology, settings.max_size).is_ok_and(|topology| !topology.is_flat(settings.max_size))
}
