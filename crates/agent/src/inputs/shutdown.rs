//! Whether an administrator shut down the epoch. Pure.

use api::Roster;
use hostapi::{EpochId, HostView};

/// An administrator ended the epoch of `roster` by flux-shutdown(1) on this host, its lead. Only the next epoch starts a broker
/// again. After a signal or a crash the agent starts it.
pub fn is_shut_down(host: &HostView, roster: &Roster) -> bool {
    roster.established && was_shut_down_here(host, roster)
}

/// As [`is_shut_down`], with a copy of the roster that may be older than the first time the lead was online.
pub fn was_shut_down_here(host: &HostView, roster: &Roster) -> bool {
    let is_of = |ended: &EpochId| (&ended.instance_id, ended.epoch) == (&roster.instance_id, roster.epoch);
    host.broker.is_none() && host.shut_down.as_ref().is_some_and(is_of)
}
