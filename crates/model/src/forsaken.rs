//! FluxNodes that nobody needs any more: their Node is gone, and they say nothing that a rank depends on.

use std::collections::BTreeSet;

use super::roster::{Observed, is_of_instance, lingers};
use api::Roster;

/// Their names. While a broker runs, its report is what keeps its rank from being given out, and its spec what ends it; and
/// where there is no roster, it is made again from such reports, and no epoch begins while one of them tells of a broker.
pub fn forsaken(seen: &Observed, roster: Option<&Roster>) -> BTreeSet<String> {
    let nodes: BTreeSet<&str> = seen.nodes.iter().map(|node| node.name.as_str()).collect();
    let members: BTreeSet<&str> =
        roster.into_iter().flat_map(Roster::members).map(|member| member.node.as_str()).collect();
    let is_needed = |name: &str| {
        let report = seen.reports.get(name);
        report.is_some_and(|report| match roster {
            Some(roster) => lingers(seen, roster, report).is_some(),
            None => {
                report.roster.is_some() || report.adopted.as_ref().is_some_and(|adopted| is_of_instance(seen, adopted))
            }
        })
    };
    let is_forsaken = |name: &&String| {
        !nodes.contains(name.as_str()) && !members.contains(name.as_str()) && !is_needed(name.as_str())
    };
    seen.reports.keys().filter(is_forsaken).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roster::tests::World;

    #[test]
    fn a_report_that_a_rank_or_a_lost_roster_depends_on_is_kept_without_its_node() {
        type Change = fn(&mut World);
        let cases: [(&str, Change, bool); 7] = [
            ("its Node is there", |_| {}, false),
            ("it is a member", |world| world.nodes.retain(|node| node.name != "node2"), false),
            ("it is nobody's", gone, true),
            (
                "its broker runs on",
                |world| {
                    gone(world);
                    world.reports.get_mut("node2").unwrap().adopted = world.reports["node1"].adopted.clone();
                    let adopted = world.reports.get_mut("node2").unwrap().adopted.as_mut().unwrap();
                    adopted.rank = 1;
                },
                false,
            ),
            (
                "there is no roster, and no broker there",
                |world| {
                    gone(world);
                    world.roster = None;
                },
                true,
            ),
            (
                "there is no roster, and its broker runs",
                |world| {
                    let adopted = world.reports["node2"].adopted.clone();
                    gone(world);
                    world.reports.get_mut("node2").unwrap().adopted = adopted;
                    world.roster = None;
                },
                false,
            ),
            (
                "there is no roster, and it has a copy",
                |world| {
                    gone(world);
                    world.reports.get_mut("node2").unwrap().roster = Some("copy".to_owned());
                    world.roster = None;
                },
                false,
            ),
        ];
        for (what, change, expected) in cases {
            let mut world = World::up(3);
            change(&mut world);
            let seen = world.seen();
            assert_eq!(forsaken(&seen, seen.roster).contains("node2"), expected, "{what}");
        }
    }

    /// The Node is gone, its rank is nobody's, and no broker is told of.
    fn gone(world: &mut World) {
        world.nodes.retain(|node| node.name != "node2");
        let entries = world.roster.as_mut().unwrap().ranks.values_mut();
        let is_its = |entry: &&mut api::RosterEntry| entry.member.as_ref().is_some_and(|member| member.node == "node2");
        entries.filter(is_its).for_each(|entry| entry.member = None);
        world.reports.get_mut("node2").unwrap().adopted = None;
    }
}
