//! Time limits that one planner started and the next planner takes over.
//!
//! A limit is stored as its start time, by the clock of the planner that started it. The next planner's clock may
//! differ: each planner reads the API server's clock when its process starts (module `clock` of crate `cluster`), and an administrator
//! may have set that clock in between. Moving the start by the difference leaves each limit the time that it had left
//! when the previous planner last renewed its Lease. So no limit ends early, and it lasts longer by at most the time
//! without a planner.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::SignedDuration};

use api::{CONDITION_RESTART_PENDING, FluxInstanceStatus, Roster};

/// Moves every start time in `roster` by `secs`, which is a change like any other, with a revision of its own; None if
/// that changes nothing.
pub fn move_limits(roster: &Roster, secs: i64) -> Option<Roster> {
    let mut moved = roster.clone();
    let starts = moved.ranks.values_mut().flat_map(|entry| {
        let drain = entry.drain.as_mut().map(|drain| &mut drain.since);
        let gone = entry.member.as_mut().and_then(|member| member.gone_since.as_mut());
        [drain, gone, entry.lacks_since.as_mut()]
    });
    let failures = moved.failed_leads.nodes.values_mut().map(|lead| &mut lead.at);
    starts.flatten().chain(failures).for_each(|start| *start = start.saturating_add(secs));
    if moved == *roster {
        return None;
    }
    moved.revision += 1;
    Some(moved)
}

/// The start of an upgrade's deadline, moved as by [`move_limits`].
///
/// It is stored in the status. The planner reads the status from a watch that may lag behind, so it moves the value in
/// every status that still shows the old one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovedDeadline {
    from: Time,
    to: Time,
}

impl MovedDeadline {
    /// Takes the deadline's start from the status of an instance and moves it by `secs`; None if no deadline is running
    /// or the start doesn't change.
    pub fn new(status: &FluxInstanceStatus, secs: i64) -> Option<Self> {
        let Time(from) = status.holding(CONDITION_RESTART_PENDING)?.last_transition_time;
        let to = from.checked_add(SignedDuration::from_secs(secs)).unwrap_or(from);
        (from != to).then_some(Self { from: Time(from), to: Time(to) })
    }

    /// Moves the start in `status`, unless it has been moved already.
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

    fn status_of(world: &World) -> FluxInstanceStatus {
        status(&world.seen(), 1, world.planned().as_ref(), None)
    }

    /// The planner of `world` ends after `used` seconds, and one whose clock differs by `off` seconds takes over.
    fn another_planner(world: &mut World, used: i64, off: i64) {
        world.status = status_of(world);
        world.now += used + off;
        world.roster = move_limits(world.roster.as_ref().unwrap(), off).or(world.roster.take());
        if let Some(deadline) = MovedDeadline::new(&world.status, off) {
            deadline.apply(&mut world.status);
            let once = world.status.clone();
            deadline.apply(&mut world.status);
            assert_eq!(world.status, once, "a second call must not move it again");
        }
    }

    #[test]
    fn a_time_limit_keeps_its_length_under_a_planner_with_another_clock() {
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
                assert_eq!(world.outcome(), before, "{what}, {off} s: the limit ended early");
                world.now += 20;
                assert_ne!(world.outcome(), before, "{what}, {off} s: the limit did not end");
            }
        }
    }

    impl World {
        /// The decision now, and whether node3 is overdue.
        fn outcome(&self) -> String {
            let is_overdue =
                self.nodes.iter().any(|node| node.name == "node3") && self.projected("node3").stop_despite_jobs;
            format!("{:?} {is_overdue}", decide(&self.seen()))
        }
    }

    #[test]
    fn nothing_is_written_while_no_time_limit_runs() {
        let world = idle();
        assert_eq!(move_limits(world.roster.as_ref().unwrap(), HOUR), None);
        assert_eq!(MovedDeadline::new(&status_of(&world), HOUR), None);
    }
}
