//! Decides which agent is the planner, by a Lease. A candidate judges the Lease by when it saw the Lease change itself,
//! so the clocks of different machines need not agree.
//!
//! Few candidates watch the Lease and take it as soon as it is free. The others look at it so rarely that all together ask little of
//! the API server, however many they are: they are there in case no candidate that watches lives. The more there are, the sooner one looks.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

/// How long a holder may be silent before others take the Lease.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// A holder that could not renew the Lease for this long stops planning: well before others may take the Lease.
pub const GIVE_UP_AFTER: Duration = Duration::from_secs(10);
/// How often the holder renews the Lease. The candidates that watch it get an event each time.
pub const RENEW_EVERY: Duration = Duration::from_secs(5);
/// From the begin of an attempt to renew the Lease that failed to the next one, and how long an attempt may take: until
/// [`GIVE_UP_AFTER`] there are three.
pub const TRY_AGAIN: Duration = Duration::from_secs(2);
/// The members of the lowest ranks watch the Lease: this many.
const WATCHING_RANKS: u32 = 4;
/// If there are no more agents than this, all of them watch the Lease: perhaps none has a rank yet.
const ALL_WATCH: u32 = 8;
/// How often a candidate looks that does not watch, on average: together with the watches of its agent it sends less than a request a
/// minute.
pub const LOOK_EVERY: Duration = Duration::from_mins(10);
/// Candidates that wait for the Lease to expire take it within this time of each other, so that few of them ask in vain. A Lease that is
/// released is taken at once.
const SPREAD: Duration = Duration::from_secs(1);

/// What a candidate knows of its place among the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Place {
    /// The rank of its node.
    pub rank: Option<u32>,
    /// How many agents there are; 0 if that is not known.
    pub agents: u32,
}

impl Place {
    /// True if this candidate watches the Lease.
    pub fn watches(self) -> bool {
        self.rank.is_some_and(|rank| rank < WATCHING_RANKS) || (1..=ALL_WATCH).contains(&self.agents)
    }
}

/// How long from now until a candidate that watches takes the Lease, if the Lease does not change. `left`: until it is free. `chance` is
/// between 0 and 1.
pub fn take_after(left: Duration, chance: f64) -> Duration {
    left + SPREAD.mul_f64(chance)
}

/// How long a candidate that does not watch waits after it saw that another one holds the Lease. `left`: after this time the Lease is
/// free, if it does not change. `seems_silent`: by the cluster's clock, the holder has not renewed it for [`GIVE_UP_AFTER`]; then the
/// candidate looks again as soon as it may take the Lease. `chance` is between 0 and 1.
pub fn look_after(left: Duration, seems_silent: bool, chance: f64) -> Duration {
    if seems_silent { take_after(left, chance) } else { LOOK_EVERY.mul_f64(0.5 + chance) }
}

/// True unless the holder `renewed` the Lease within [`GIVE_UP_AFTER`] of `now`, the cluster's time. A candidate then looks again, and no more:
/// it never takes a Lease because of what its holder writes.
pub fn seems_silent(renewed: Option<Timestamp>, now: Timestamp) -> bool {
    renewed.is_none_or(|renewed| now.duration_since(renewed).unsigned_abs() >= GIVE_UP_AFTER)
}

/// How long a candidate waits after a failed attempt to look at the Lease or to take it. `failed`: how many failed in a row before it.
pub fn after_failure(failed: u32, watches: bool, chance: f64) -> Duration {
    let longest = if watches { LEASE_DURATION } else { LOOK_EVERY };
    TRY_AGAIN.saturating_mul(1 << failed.min(10)).min(longest).mul_f64(0.5 + chance)
}

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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]
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
            (lease(Some("other"), 11), LeaseStep::Yield(Duration::from_secs(4))),
            (lease(Some("other"), 15), LeaseStep::Take),
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
    fn only_few_candidates_watch_the_lease_however_many_there_are() {
        for (rank, agents, expected) in [
            (None, 0, false),
            (None, 1, true),
            (None, 8, true),
            (None, 9, false),
            (Some(0), 0, true),
            (Some(3), 5000, true),
            (Some(4), 5000, false),
            (Some(4), u32::MAX, false),
            (Some(4999), 8, true),
        ] {
            assert_eq!(Place { rank, agents }.watches(), expected, "{rank:?} of {agents}");
        }
    }

    #[test]
    fn a_candidate_looks_again_soon_only_if_the_holder_seems_silent() {
        let (secs, left) = (Duration::from_secs, Duration::from_secs(7));
        for (seems_silent, chance, expected) in
            [(true, 0.0, left), (true, 1.0, secs(8)), (false, 0.0, secs(300)), (false, 1.0, secs(900))]
        {
            assert_eq!(look_after(left, seems_silent, chance), expected, "{seems_silent} {chance}");
        }
        for (failed, watches, expected) in
            [(0, true, 2), (1, true, 4), (3, true, 15), (0, false, 2), (5, false, 64), (u32::MAX, false, 600)]
        {
            assert_eq!(after_failure(failed, watches, 0.5), secs(expected), "{failed} {watches}");
        }
    }

    #[test]
    fn a_holder_seems_silent_if_the_lease_does_not_tell_that_it_was_renewed_lately() {
        for (renewed, expected) in [
            (Some(100), false),
            (Some(91), false),
            (Some(90), true),
            (Some(105), false),
            (Some(110), true),
            (None, true),
        ] {
            let renewed = renewed.map(|second| Timestamp::from_second(second).unwrap());
            assert_eq!(seems_silent(renewed, Timestamp::from_second(100).unwrap()), expected, "{renewed:?}");
        }
    }

    #[test]
    fn a_holder_gives_up_before_others_may_take_the_lease_and_tries_three_times_before() {
        assert!(GIVE_UP_AFTER < LEASE_DURATION);
        assert!(RENEW_EVERY + 2 * TRY_AGAIN < GIVE_UP_AFTER);
    }

    /// Seconds from the death of a holder, with all that watch, until one of `candidates` others takes the Lease, and how many looks
    /// they take in that time. None knows of the others.
    fn takeover(candidates: u32) -> (f64, u32) {
        // Of two irrational multiples the fractions are as evenly spread as chance.
        let chance = |number: u32, factor: f64| (f64::from(number) * factor).fract();
        let (died, mut looks) = (LOOK_EVERY * 2, Vec::new());
        for number in 0..candidates {
            let mut at = LOOK_EVERY.mul_f64(0.5 + chance(number, 0.618_033_988_7));
            for turn in 0.. {
                let seems_silent = at >= died + GIVE_UP_AFTER;
                looks.push((at, seems_silent));
                if seems_silent {
                    break;
                }
                at += look_after(LEASE_DURATION, seems_silent, chance(number + turn, 0.414_213_562_4));
            }
        }
        let first = looks.iter().filter(|(_, seems_silent)| *seems_silent).map(|(at, _)| *at).min().unwrap_or_default();
        let taken = first + take_after(LEASE_DURATION, 1.0);
        let asked = looks.iter().filter(|(at, _)| (died..taken).contains(at)).count();
        (taken.saturating_sub(died).as_secs_f64(), u32::try_from(asked).unwrap_or_default())
    }

    #[test]
    fn without_any_that_watches_one_that_looks_takes_the_lease_within_a_time_that_has_a_bound() {
        let bound = GIVE_UP_AFTER + LOOK_EVERY.mul_f64(1.5) + LEASE_DURATION + SPREAD;
        for (candidates, within) in [(1, bound.as_secs_f64()), (9, 400.0), (100, 60.0), (1000, 30.0), (5000, 27.0)] {
            let (secs, looks) = takeover(candidates);
            assert!(secs <= within, "{candidates}: {secs} s");
            assert!(
                f64::from(looks) <= f64::from(candidates) * secs / 300.0 + 1.0,
                "{candidates}: {looks} in {secs} s"
            );
        }
    }
}
