//! Who is the planner: a Lease, decided on what was seen and when *we* saw it, so that clocks need not agree.

use std::time::Duration;

/// How long a holder may be silent. Short, because a new node waits for it; safe, because an expired planner can't write:
/// every write of the roster names the resourceVersion it was made from.
pub const LEASE_DURATION: Duration = Duration::from_secs(5);
/// A third of [`LEASE_DURATION`], so that one lost renewal is no loss.
pub const RENEW_EVERY: Duration = Duration::from_millis(1600);

/// What was seen of the Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseView {
    /// spec.holderIdentity
    pub holder: Option<String>,
    /// Its resourceVersion changed last so long ago, by our own clock.
    pub unchanged_for: Duration,
    /// spec.leaseDurationSeconds as the holder promised.
    pub duration: Duration,
}

/// What to do about the Lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseStep {
    /// Create it.
    Create,
    /// It is ours: write a new renewTime.
    Renew,
    /// Its holder is silent or has let go: put ourselves in, by replace with its resourceVersion.
    Take,
    /// Look again after this time.
    Yield(Duration),
}

/// Decides for the candidate `me`.
pub fn decide(seen: Option<&LeaseView>, me: &str) -> LeaseStep {
    let Some(lease) = seen else { return LeaseStep::Create };
    match lease.holder.as_deref() {
        Some(holder) if holder == me => LeaseStep::Renew,
        None | Some("") => LeaseStep::Take,
        Some(_) if lease.unchanged_for >= lease.duration => LeaseStep::Take,
        Some(_) => LeaseStep::Yield(lease.duration - lease.unchanged_for),
    }
}

/// The longest that a candidate waits between two looks. The number of members is in the FluxInstance's status, which every
/// agent's token may write: a forged one must not put all other candidates to sleep for years.
const LONGEST_LOOK: Duration = Duration::from_secs(300);

/// How long a candidate waits between two looks, when `members` others look too: all together ask about twenty times a
/// second at most, up to the number for which that is [`LONGEST_LOOK`].
pub fn look_every(members: u32) -> Duration {
    Duration::from_millis(u64::from(members) * 50).clamp(RENEW_EVERY, LONGEST_LOOK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holds_and_the_others_wait_until_he_is_silent() {
        let lease = |holder: Option<&str>, secs| {
            Some(LeaseView {
                holder: holder.map(str::to_owned),
                unchanged_for: Duration::from_secs(secs),
                duration: LEASE_DURATION,
            })
        };
        for (seen, expected) in [
            (None, LeaseStep::Create),
            (lease(Some("me"), 0), LeaseStep::Renew),
            (lease(Some("me"), 99), LeaseStep::Renew),
            (lease(None, 0), LeaseStep::Take),
            (lease(Some(""), 0), LeaseStep::Take),
            (lease(Some("other"), 0), LeaseStep::Yield(LEASE_DURATION)),
            (lease(Some("other"), 3), LeaseStep::Yield(Duration::from_secs(2))),
            (lease(Some("other"), 5), LeaseStep::Take),
        ] {
            assert_eq!(decide(seen.as_ref(), "me"), expected, "{seen:?}");
        }
    }

    #[test]
    fn a_thousand_candidates_ask_no_more_than_twenty_times_a_second() {
        assert_eq!(look_every(4), RENEW_EVERY);
        assert!(1000.0 / look_every(1000).as_secs_f64() <= 20.0);
    }

    #[test]
    fn a_forged_number_of_members_puts_no_candidate_to_sleep_for_long() {
        assert_eq!(look_every(u32::MAX), Duration::from_secs(300));
    }
}
