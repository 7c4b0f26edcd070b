//! The roster: which member holds which rank. One function, [`decide`], computes the next roster from what was
//! observed.
//!
//! Invariants within an epoch, whatever is observed: no rank has two members and no member has two ranks; a member's
//! rank changes only if its broker is out of the overlay and its parent's rank can't come back; resources never shrink
//! under a job; once the instance was online, the lead changes only if an administrator orders it ([`takeover`]).

#[cfg(test)]
mod another_tests;
mod decision;
#[cfg(test)]
mod deep_tests;
mod drain;
pub(super) mod epoch;
#[cfg(test)]
mod epoch_tests;
#[cfg(test)]
mod failed_tests;
mod first;
mod join;
mod keep;
mod limits;
#[cfg(test)]
mod pods_tests;
mod properties;
#[cfg(test)]
mod random_tests;
#[cfg(test)]
mod resources_tests;
#[cfg(test)]
mod scale_tests;
pub mod takeover;
#[cfg(test)]
mod takeover_tests;
#[cfg(test)]
pub(crate) mod tests;
mod turns;
#[cfg(test)]
mod turns_tests;

pub use decision::Decision;
pub use drain::{is_former_idle, is_overdue, may_stop};
pub use limits::{MovedDeadline, move_limits};
pub use turns::no_lead;

use super::{lead::is_lead_fixed, members::Members, observed::Observed};
use api::{FailedLeads, Roster};

/// Decides the next roster.
pub fn decide(seen: &Observed) -> Decision {
    match seen.roster {
        Some(roster) if roster.instance_uid == seen.instance_uid => with_roster(seen, roster),
        _ => first::without_roster(seen),
    }
}

/// As [`decide`], if the spec can't be served: the roster stays as it is, but the instance doesn't stay stopped. An
/// epoch that was about to end continues, and one that does not come up goes back to the previous settings.
pub fn decide_unserved(seen: &Observed) -> Decision {
    let own = |roster: &&Roster| roster.instance_uid == seen.instance_uid;
    let roster = seen.roster.filter(own).filter(|roster| roster.established);
    let next = roster.and_then(|roster| epoch::carry_on(seen, &Members::observe(seen, roster), roster));
    next.map_or(Decision::Keep, |next| Decision::Write(Box::new(next)))
}

fn with_roster(seen: &Observed, roster: &Roster) -> Decision {
    let mut next = roster.clone();
    let members = Members::observe(seen, roster);
    if !roster.established && members.is_online(0) {
        next.established = true;
        next.failed_leads = FailedLeads::default();
    } else if let Some(next) = takeover::advance(seen, &members, roster) {
        return Decision::Write(Box::new(next));
    } else if roster.established {
        if let Some(next) = epoch::advance(seen, &members, roster) {
            return Decision::Write(Box::new(next));
        }
    } else if let Some(again) = first::begin_again(seen, roster) {
        return again;
    } else if !is_lead_fixed(roster) {
        next.failed_leads = turns::failed_leads(seen, roster);
    }
    keep::keep_members(seen, &members, &mut next);
    // What was observed holds as long as no rank has changed; observing again would take a large part of a round.
    let members = if next.ranks == roster.ranks { members } else { Members::observe(seen, &next) };
    drain::drain(seen, &members, &mut next);
    join::relocate_stranded(seen, &members, &mut next);
    join::join(seen, &members, &mut next);
    properties::assign(seen, &mut next);
    if next == *roster {
        return Decision::Keep;
    }
    next.revision += 1;
    for (rank, entry) in &mut next.ranks {
        let before = roster.ranks.get(rank);
        let same = before.is_some_and(|before| {
            before.resources == entry.resources
                && before.properties == entry.properties
                && before.member.as_ref().map(|m| (&m.uid, m.address))
                    == entry.member.as_ref().map(|m| (&m.uid, m.address))
        });
        if !same {
            entry.revision = next.revision;
        }
    }
    Decision::Write(Box::new(next))
}
