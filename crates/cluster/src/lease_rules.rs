//! Decides which agent is the planner, by a Lease. A candidate judges the Lease by when it saw the Lease change itself,
//! so the clocks of different machines need not agree.

use std::time::Duration;

/// How long a holder may be silent. It is short, because a new node has to wait for the next planner. That is safe:
/// every write of the roster names the resourceVersion that it replaces, so a planner whose Lease has expired can't
/// overwrite the next one's, and the next one corrects in its first round what else was still under way.
pub const LEASE_DURATION: Duration = Duration::from_secs(5);
/// About a third of [`LEASE_DURATION`], so that the holder keeps the Lease if one renewal fails.
pub const RENEW_EVERY: Duration = Duration::from_millis(1600);

/// The Lease as a candidate sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseView {
    /// spec.holderIdentity
    pub holder: Option<String>,
    /// Time since its resourceVersion last changed, by the candidate's own clock.
    pub unchanged_for: Duration,
    /// spec.leaseDurationSeconds.
    pub duration: Duration,
}

/// What to do about the Lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseStep {
    /// Create it.
    Create,
    /// The candidate holds it: write a new renewTime.
    Renew,
    /// Its holder is silent or has released it: write the candidate as holder, by a replace that names the
    /// resourceVersion.
    Take,
    /// Another candidate holds it: it expires after this time.
    Yield(Duration),
}

/// Decides the next step of the candidate `me`.
pub fn next_step(seen: Option<&LeaseView>, me: &str) -> LeaseStep {
    let Some(lease) = seen else { return LeaseStep::Create };
    match lease.holder.as_deref() {
        Some(holder) if holder == me => LeaseStep::Renew,
        None | Some("") => LeaseStep::Take,
        Some(_) if lease.unchanged_for >= lease.duration => LeaseStep::Take,
        Some(_) => LeaseStep::Yield(lease.duration.saturating_sub(lease.unchanged_for)),
    }
}

/// How often the Lease has changed hands after `step`, if `seen` is what it says. An agent's token may write any number there: the
/// largest must stop no candidate, and the API server refuses a negative one.
pub fn next_transitions(seen: Option<i32>, step: LeaseStep) -> i32 {
    seen.unwrap_or(0).max(0).saturating_add(i32::from(step == LeaseStep::Take))
}

/// The longest that a candidate waits between two looks, whatever number of agents it reads.
const LONGEST_LOOK: Duration = Duration::from_mins(5);

/// How long a candidate waits between two looks, when `agents` others look too: all together ask about twenty times a
/// second at most, up to the number for which that is [`LONGEST_LOOK`].
pub fn look_every(agents: u32) -> Duration {
    Duration::from_millis(u64::from(agents) * 50).clamp(RENEW_EVERY, LONGEST_LOOK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_wait_until_the_holder_is_silent_or_releases_the_lease() {
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
            assert_eq!(next_step(seen.as_ref(), "me"), expected, "{seen:?}");
        }
    }

    #[test]
    fn no_forged_number_of_transitions_keeps_a_candidate_from_the_lease() {
        for (seen, step, expected) in [
            (None, LeaseStep::Take, 1),
            (Some(3), LeaseStep::Renew, 3),
            (Some(3), LeaseStep::Take, 4),
            (Some(i32::MAX), LeaseStep::Take, i32::MAX),
            (Some(-1), LeaseStep::Renew, 0),
        ] {
            assert_eq!(next_transitions(seen, step), expected, "{seen:?} {step:?}");
        }
    }

    #[test]
    fn a_thousand_candidates_send_at_most_twenty_requests_a_second() {
        assert_eq!(look_every(4), RENEW_EVERY);
        assert!(1000.0 / look_every(1000).as_secs_f64() <= 20.0);
    }

    #[test]
    fn no_number_of_agents_puts_a_candidate_to_sleep_for_long() {
        assert_eq!(look_every(u32::MAX), Duration::from_mins(5));
    }
}
