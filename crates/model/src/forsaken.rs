//! FluxNodes that nothing needs any more: their Node is gone, and no rank depends on their report.

use std::collections::BTreeSet;

use super::members::Planned;
use crate::observed::{Observed, is_of_instance};

/// Returns the names of those FluxNodes. While a broker runs without a member, its FluxNode is still needed: the report
/// keeps its rank from being given out, and the spec ends the broker. If the roster is lost, the planner also needs
/// every report that has a copy of the roster or names a running broker: it rebuilds the roster from the former, and
/// starts no epoch because of the latter.
pub fn forsaken(seen: &Observed, planned: Option<&Planned>) -> BTreeSet<String> {
    let members = planned.map(|planned| &planned.members);
    let is_member = |name: &str| planned.is_some_and(|planned| planned.rank_on(name).is_some());
    let is_needed = |name: &str| {
        let report = seen.report(name);
        report.is_some_and(|report| match members {
            Some(members) => members.orphan_broker_rank(report).is_some(),
            None => {
                report.roster.is_some() || report.adopted.as_ref().is_some_and(|adopted| is_of_instance(seen, adopted))
            }
        })
    };
    let is_forsaken = |name: &&str| seen.nodes.named(name).is_none() && !is_member(name) && !is_needed(name);
    seen.reports.keys().copied().filter(is_forsaken).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roster::tests::World;

    #[test]
    fn a_report_outlives_its_node_if_a_rank_or_a_lost_roster_depends_on_it() {
        type Edit = fn(&mut World);
        let cases: [(&str, Edit, bool); 7] = [
            ("its Node exists", |_| {}, false),
            ("it is a member", |world| world.nodes.retain(|node| node.name != "node2"), false),
            ("it has no rank", gone, true),
            (
                "its broker still runs",
                |world| {
                    gone(world);
                    world.reports.get_mut("node2").unwrap().adopted = world.reports["node1"].adopted.clone();
                    let adopted = world.reports.get_mut("node2").unwrap().adopted.as_mut().unwrap();
                    adopted.rank = 1;
                },
                false,
            ),
            (
                "the roster is lost, and no broker runs there",
                |world| {
                    gone(world);
                    world.roster = None;
                },
                true,
            ),
            (
                "the roster is lost, and its broker runs",
                |world| {
                    let adopted = world.reports["node2"].adopted.clone();
                    gone(world);
                    world.reports.get_mut("node2").unwrap().adopted = adopted;
                    world.roster = None;
                },
                false,
            ),
            (
                "the roster is lost, and the report has a copy",
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
            assert_eq!(forsaken(&seen, world.planned().as_ref()).contains("node2"), expected, "{what}");
        }
    }

    /// The Node of node2 is gone, its rank has no member, and its report names no broker.
    fn gone(world: &mut World) {
        world.nodes.retain(|node| node.name != "node2");
        let entries = world.roster.as_mut().unwrap().ranks.values_mut();
        let is_its = |entry: &&mut api::RosterEntry| entry.member.as_ref().is_some_and(|member| member.node == "node2");
        entries.filter(is_its).for_each(|entry| entry.member = None);
        world.reports.get_mut("node2").unwrap().adopted = None;
    }
}
