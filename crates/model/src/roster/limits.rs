//! Time limits that one planner has begun and another one takes over.
//!
//! A limit is stored as its start time, by the clock of the planner that started it. The next planner's clock may differ: somebody
//! may have set the API server's clock, and each planner reads that clock when its process starts ([`cluster::clock`]). Moving the
//! start by the difference leaves each limit the time it had when the previous planner last renewed its Lease. So no limit ends
//! early, and it lasts longer by at most the time without a planner.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::SignedDuration};

use api::{CONDITION_RESTART_PENDING, FluxInstanceStatus, Roster};

/// Moves every start time in `roster` by `secs`; None if there is none.
pub fn move_limits(roster: &Roster, secs: i64) -> Option<Roster> {
    let mut moved = roster.clone();
    let begins = moved.ranks.values_mut().flat_map(|entry| {
        let drain = entry.drain.as_mut().map(|drain| &mut drain.since);
        let gone = entry.member.as_mut().and_then(|member| member.gone_since.as_mut());
        [drain, gone, entry.lacks_since.as_mut()]
    });
    let rests = moved.failed_leads.nodes.values_mut().map(|lead| &mut lead.at);
    begins.flatten().chain(rests).for_each(|begin| *begin = begin.saturating_add(secs));
    (moved != *roster).then_some(moved)
}

/// The start of an upgrade's deadline, moved as by [`move_limits`].
///
/// It is in the status, which is read from a watch that may be behind, so each reading that still shows the old value is moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovedDeadline {
    from: Time,
    to: Time,
}

impl MovedDeadline {
    /// What the status of an instance says, moved by `secs`; None if no such deadline is under way.
    pub fn new(status: &FluxInstanceStatus, secs: i64) -> Option<Self> {
        let Time(from) = status.holding(CONDITION_RESTART_PENDING)?.last_transition_time;
        let to = from.checked_add(SignedDuration::from_secs(secs)).unwrap_or(from);
        (from != to).then_some(Self { from: Time(from), to: Time(to) })
    }

    /// Moves it in `status`, unless another planner, or this one, has done so already.
    pub fn apply(&self, status: &mut FluxInstanceStatus) {
        for condition in &mut status.conditions {
            if condition.type_ == CONDITION_RESTART_PENDING && condition.last_transition_time == self.from {
                condition.last_transition_time = self.to.clone();
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]
mod tests {
    use super::*;
    use crate::{
        roster::{
            decide,
            epoch_tests::{idle, jobs_on},
            tests::World,
        },
        status::status,
    };

    const HOUR: i64 = 3600;

    fn told(world: &World) -> FluxInstanceStatus {
        status(&world.seen(), 1, world.roster.as_ref(), None)
    }

    /// The planner of `world` is gone after `used` seconds; one whose clock differs by `off` takes over.
    fn another_planner(world: &mut World, used: i64, off: i64) {
        world.status = told(world);
        world.now += used + off;
        world.roster = move_limits(world.roster.as_ref().unwrap(), off).or(world.roster.take());
        if let Some(deadline) = MovedDeadline::new(&world.status, off) {
            deadline.apply(&mut world.status);
            let once = world.status.clone();
            deadline.apply(&mut world.status);
            assert_eq!(world.status, once, "it is moved once");
        }
    }

    #[test]
    fn a_limit_is_neither_shorter_nor_longer_for_a_planner_with_another_clock() {
        type Begin = fn(&mut World);
        let limits: [(&str, Begin); 3] = [
            ("a member leaves", |world| {
                jobs_on(world, Some("2"));
                world.spec.size = Some(2);
                world.spec.drain.timeout = Some("10m".into());
            }),
            ("a Node is gone", |world| drop(world.nodes.pop())),
            ("an upgrade waits for jobs", |world| {
                jobs_on(world, Some("0"));
                world.spec.broker.port = Some(9000);
                world.spec.upgrade.deadline = Some("10m".into());
            }),
        ];
        for (what, begin) in limits {
            for off in [-5 * HOUR, -1, 0, 1, HOUR] {
                let mut world = idle();
                begin(&mut world);
                world.settle();
                another_planner(&mut world, 300, off);
                let before = world.outcome();
                world.now += 290;
                assert_eq!(world.outcome(), before, "{what}, {off} s: it ends early");
                world.now += 20;
                assert_ne!(world.outcome(), before, "{what}, {off} s: it goes on");
            }
        }
    }

    impl World {
        /// What is planned now, and told to whoever is drained.
        fn outcome(&self) -> String {
            let is_overdue = self.nodes.iter().any(|node| node.name == "node3") && self.told("node3").overdue;
            format!("{:?} {is_overdue}", decide(&self.seen()))
        }
    }

    #[test]
    fn nothing_is_written_while_no_limit_is_under_way() {
        let world = idle();
        assert_eq!(move_limits(world.roster.as_ref().unwrap(), HOUR), None);
        assert_eq!(MovedDeadline::new(&told(&world), HOUR), None);
    }
}
