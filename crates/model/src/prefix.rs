//! Checks that all hosts of an instance have the same prefix. Packages are linked for their location, and the paths of
//! the lead's Flux launch every job. On a host with another prefix each job would fail at once, and because that host
//! would always be idle, it would get one job after the other.

use crate::observed::Observed;
use api::{NodePhase, Roster};

/// The prefix of the host of node `name`; None if it is unknown or the host is being cleaned: then the prefix is that
/// of an earlier instance.
fn of<'a>(seen: &Observed<'a>, name: &str) -> Option<&'a str> {
    let report = seen.report(name).filter(|report| report.phase != NodePhase::Removing)?;
    report.facts.as_ref().map(|facts| facts.prefix.as_str())
}

/// The prefix of the instance, which is its lead's.
pub fn of_instance<'a>(seen: &Observed<'a>, roster: &Roster) -> Option<&'a str> {
    of(seen, &roster.lead()?.node)
}

/// Says that the prefix of node `name` differs from the lead's, and how to fix that. None if it doesn't or one is still
/// unknown.
pub fn differs(seen: &Observed, roster: &Roster, name: &str) -> Option<String> {
    differs_from(seen, &roster.lead()?.node, name)
}

/// As [`differs`], with node `lead` as the lead.
pub fn differs_from(seen: &Observed, lead: &str, name: &str) -> Option<String> {
    let (instance, own) = (of(seen, lead)?, of(seen, name)?);
    (instance != own).then(|| {
        format!(
            "its prefix is {own} and the lead's is {instance}, so jobs could not be started on both: make {instance} writable \
             and executable there, and if {own} is in use on the host, clean it (`flux-distribute uninstall`)"
        )
    })
}

#[cfg(test)]
mod tests {
    use crate::roster::{Decision, decide, tests::World};
    use api::{NodePhase, Want};

    fn elsewhere(world: &mut World, name: &str) {
        world.passed(name, 2);
        world.reports.get_mut(name).unwrap().facts.as_mut().unwrap().prefix = "/var/lib/flux-distribute".to_owned();
    }

    #[test]
    fn a_host_with_a_prefix_other_than_the_leads_gets_no_rank_but_a_reason() {
        let mut world = World::up(2);
        world.add("node3", 3);
        elsewhere(&mut world, "node3");
        assert_eq!(world.settle(), Decision::Keep);
        let spec = world.projected("node3");
        assert_eq!((spec.rank, spec.want, spec.prefix.as_deref()), (None, Want::Nothing, Some("/opt/flux-distribute")));
        let reason = spec.reason.unwrap();
        assert!(reason.contains("/var/lib/flux-distribute") && reason.contains("/opt/flux-distribute"), "{reason}");
        world.passed("node3", 2);
        assert!(matches!(decide(&world.seen()), Decision::Write(_)));
    }

    #[test]
    fn the_lead_decides_the_prefix_until_it_was_online_once() {
        let mut world = World::up(2);
        for (established, prefix) in [(true, Some("/opt/flux-distribute")), (false, None)] {
            world.roster.as_mut().unwrap().established = established;
            assert_eq!(world.projected("node1").prefix.as_deref(), prefix);
            assert_eq!(world.projected("node2").prefix.as_deref(), Some("/opt/flux-distribute"));
        }
        // While a host is being cleaned, its report is about the previous instance.
        world.reports.get_mut("node1").unwrap().phase = NodePhase::Removing;
        assert_eq!(world.projected("node2").prefix, None);
    }

    #[test]
    fn a_member_with_another_prefix_is_not_started_but_a_running_one_is_left_alone() {
        let mut world = World::up(3);
        elsewhere(&mut world, "node2");
        assert_eq!(world.wants("node2"), Want::Run, "its broker runs");
        world.reports.get_mut("node2").unwrap().adopted = None;
        let spec = world.projected("node2");
        assert_eq!((spec.rank, spec.want, spec.reason.is_some()), (Some(1), Want::Nothing, true));
        assert_eq!(world.wants("node3"), Want::Run);
    }
}
