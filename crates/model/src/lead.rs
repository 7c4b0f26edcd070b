//! Whether another node may become the lead.

use std::time::Duration;

use api::Roster;

/// How long the planner waits for preflight on the first eligible node before a later one may become the lead.
pub const LEAD_PATIENCE: Duration = Duration::from_secs(10);

/// True if only the host of rank 0 has the instance's queue: the instance was online, or an administrator named the
/// host whose queue this epoch begins with.
pub fn is_lead_fixed(roster: &Roster) -> bool {
    roster.established || was_named(roster)
}

/// True if an administrator named the lead of this epoch (see [`takeover`]).
pub(crate) fn was_named(roster: &Roster) -> bool {
    roster.jobs_lost_before == roster.epoch
}
