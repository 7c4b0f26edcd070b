//! One prefix for all hosts of an instance. Packages are linked for the place where they are, and a job is launched by the
//! paths of the lead's Flux: on a host that has it elsewhere each job fails, and that host, always idle, would get them all.

use super::roster::Observed;
use api::{NodePhase, Roster};

/// The prefix of node `name`'s host, once it is known. What is being cleaned had the one of the instance before.
fn of<'a>(seen: &Observed<'a>, name: &str) -> Option<&'a str> {
    let report = seen.reports.get(name).filter(|report| report.phase != NodePhase::Removing)?;
    report.facts.as_ref().map(|facts| facts.prefix.as_str())
}

/// That of the instance: its lead's.
pub fn of_instance<'a>(seen: &Observed<'a>, roster: &Roster) -> Option<&'a str> {
    of(seen, &roster.lead()?.node)
}

/// Why node `name` can't take part, in words; None also where a prefix is not known yet.
pub fn differs(seen: &Observed, roster: &Roster, name: &str) -> Option<String> {
    differs_from(seen, &roster.lead()?.node, name)
}

/// The same where node `lead` is to be the lead.
pub fn differs_from(seen: &Observed, lead: &str, name: &str) -> Option<String> {
    let (instance, own) = (of(seen, lead)?, of(seen, name)?);
    (instance != own).then(|| {
        format!(
            "its prefix is {own} and the lead's is {instance}, so jobs could not be started on both: let {instance} be \
             written and executed there, and clean the host if {own} is in use on it (`flux-distribute uninstall`)"
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
    fn a_host_with_another_prefix_than_the_leads_gets_no_rank_and_is_told_why() {
        let mut world = World::up(2);
        world.add("node3", 3);
        elsewhere(&mut world, "node3");
        assert_eq!(world.settle(), Decision::Keep);
        let told = world.told("node3");
        assert_eq!((told.rank, told.want, told.prefix.as_deref()), (None, Want::Nothing, Some("/opt/flux-distribute")));
        let reason = told.reason.unwrap();
        assert!(reason.contains("/var/lib/flux-distribute") && reason.contains("/opt/flux-distribute"), "{reason}");
        world.passed("node3", 2);
        assert!(matches!(decide(&world.seen()), Decision::Write(_)));
    }

    #[test]
    fn the_lead_decides_the_prefix_until_it_was_online_once() {
        let mut world = World::up(2);
        for (established, told) in [(true, Some("/opt/flux-distribute")), (false, None)] {
            world.roster.as_mut().unwrap().established = established;
            assert_eq!(world.told("node1").prefix.as_deref(), told);
            assert_eq!(world.told("node2").prefix.as_deref(), Some("/opt/flux-distribute"));
        }
        // What it says while it is being cleaned is about the instance before.
        world.reports.get_mut("node1").unwrap().phase = NodePhase::Removing;
        assert_eq!(world.told("node2").prefix, None);
    }

    #[test]
    fn a_member_whose_prefix_turns_out_to_be_another_one_is_not_started_and_one_that_runs_is_left_alone() {
        let mut world = World::up(3);
        elsewhere(&mut world, "node2");
        assert_eq!(world.wants("node2"), Want::Run, "its broker runs");
        world.reports.get_mut("node2").unwrap().adopted = None;
        let told = world.told("node2");
        assert_eq!((told.rank, told.want, told.reason.is_some()), (Some(1), Want::Nothing, true));
        assert_eq!(world.wants("node3"), Want::Run);
    }
}
