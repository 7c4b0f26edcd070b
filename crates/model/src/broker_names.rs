//! The brokers' names in `[bootstrap]`: those of Nodes, and made-up ones for spares.

use api::{Rank, Roster};

/// Beginning of the made-up names.
const SPARE: &str = "flux-spare-";

/// The broker name of a rank in this epoch.
pub fn broker_name(roster: &Roster, rank: Rank) -> String {
    roster.ranks.get(&rank).map_or_else(|| spare_name(rank), |entry| entry.broker_name.clone())
}

/// The made-up name of a spare.
pub fn spare_name(rank: Rank) -> String {
    format!("{SPARE}{rank}")
}

/// True if a node's name can be its broker's name: flux-core accepts RFC 1035 names
/// (conf_bootstrap_validate_domain_name), and the made-up names of spares are reserved.
pub fn is_broker_name(name: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    name.len() <= 253 && name.split('.').all(label) && !name.starts_with(SPARE)
}
