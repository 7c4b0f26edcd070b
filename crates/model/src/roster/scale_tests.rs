//! The number of members, and the ranks of members that leave.

use super::{Decision, epoch::Restart, tests::World};
use crate::{gone::NODE_IS_GONE, members::Members, project::project_all, status::status};
use api::{CONDITION_SCALE_DENIED, Closing, FluxInstanceStatus, FluxNode, FluxNodeSpec, Want};

fn status_of(world: &World) -> FluxInstanceStatus {
    status(&world.seen(), 1, world.planned().as_ref(), None)
}

fn denied(world: &World) -> Option<String> {
    status_of(world).holding(CONDITION_SCALE_DENIED).map(|condition| condition.message.clone())
}

fn members(world: &World) -> usize {
    world.roster.as_ref().unwrap().members().count()
}

#[test]
fn the_default_size_is_every_eligible_node_and_the_status_shows_max_size() {
    for (nodes, max_size) in [(3, 64), (40, 80)] {
        let world = World::up(nodes);
        let status = status_of(&world);
        assert_eq!((status.size, status.max_size), (u32::from(nodes), max_size));
        assert_eq!(denied(&world), None);
    }
}

#[test]
fn a_size_above_the_default_max_size_is_denied_with_both_numbers() {
    let mut world = World::up(2);
    world.roster.as_mut().unwrap().settings.max_size = 3;
    (3..=6).for_each(|number| world.add(&format!("node{number}"), number));
    (3..=6).for_each(|number| world.passed(&format!("node{number}"), 2));
    world.spec.size = Some(5);
    let asked = world.spec.clone();
    world.settle();
    assert_eq!(members(&world), 3);
    let message = denied(&world).unwrap();
    assert!(message.contains("size 5 is more than maxSize 3"), "{message}");
    assert!(message.contains("set spec.maxSize"), "{message}");
    assert_eq!(world.spec, asked);
    world.spec.size = Some(3);
    assert_eq!(denied(&world), None);
}

#[test]
fn more_nodes_than_the_default_max_size_are_denied_and_each_says_why() {
    let mut world = World::up(2);
    world.roster.as_mut().unwrap().settings.max_size = 3;
    (3..=6).for_each(|number| world.add(&format!("node{number}"), number));
    assert_eq!(world.projected("node6").reason, None, "there is room for one more");
    (3..=6).for_each(|number| world.passed(&format!("node{number}"), 2));
    world.settle();
    assert_eq!(members(&world), 3);
    let message = denied(&world).unwrap();
    assert!(message.contains("6 members and eligible nodes are more than maxSize 3"), "{message}");
    assert_eq!(
        (world.projected("node6").want, world.projected("node6").reason.as_deref()),
        (Want::Install, Some("maxSize is 3"))
    );
    world.nodes.iter_mut().take(3).for_each(|member| member.cordoned = true);
    assert_eq!(denied(&world), Some(message), "cordoned members keep their ranks");
    world.spec.max_size = Some(3);
    assert_eq!(denied(&world), None, "the spec asks for no more");
    world.spec.size = Some(3);
    assert_eq!(world.projected("node6").reason.as_deref(), Some("size is 3"));
}

#[test]
fn a_raised_max_size_is_announced_and_takes_effect_in_the_next_epoch() {
    let mut world = World::up(4);
    world.reports.get_mut("node1").unwrap().allocated = Some("0-3".parse().unwrap());
    world.roster.as_mut().unwrap().settings.max_size = 4;
    (5..=6).for_each(|number| world.add(&format!("node{number}"), number));
    (5..=6).for_each(|number| world.passed(&format!("node{number}"), 2));
    (world.spec.size, world.spec.max_size) = (Some(6), Some(8));
    world.settle();
    let message = denied(&world).unwrap();
    assert!(message.contains("size 6 is more than maxSize 4"), "{message}");
    assert!(message.contains("maxSize 8 takes effect at the next coordinated restart"), "{message}");
    let Restart::Waits { difference, .. } = world.restart() else { panic!() };
    assert_eq!(difference, "maxSize 4 -> 8");

    world.reports.get_mut("node1").unwrap().allocated = Some("".parse().unwrap());
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().closing, Some(Closing::WhenIdle));
    world.reports.values_mut().for_each(|report| report.adopted = None);
    world.reports.get_mut("node1").unwrap().closed_epoch = Some(1);
    world.settle();
    assert_eq!((members(&world), world.roster.as_ref().unwrap().settings.max_size), (6, 8));
    assert_eq!(denied(&world), None);
}

#[test]
fn a_smaller_size_frees_the_highest_ranks_and_a_larger_one_restores_them() {
    let mut world = World::up(4);
    world.spec.size = Some(1);
    world.settle();
    let leaves = |world: &World| {
        let ranks = &world.roster.as_ref().unwrap().ranks;
        ranks
            .iter()
            .filter(|(_, entry)| entry.drain.as_ref().is_some_and(|drain| drain.leave))
            .map(|(r, _)| *r)
            .collect()
    };
    let leaving: Vec<_> = leaves(&world);
    assert_eq!(leaving, [1, 2, 3]);
    world.spec.size = Some(3);
    world.settle();
    let leaving: Vec<_> = leaves(&world);
    assert_eq!(leaving, [3], "no member has left yet, and those that stay are undrained");

    // Now the rank is drained and idle.
    let lead = world.reports.get_mut("node1").unwrap();
    (lead.drained, lead.allocated) = (Some("3".parse().unwrap()), Some("".parse().unwrap()));
    assert_eq!(world.wants("node4"), Want::Leave);
    let report = world.reports.get_mut("node4").unwrap();
    (report.adopted, report.leave_completed) = (None, true);
    world.settle();
    assert_eq!(world.rank("node4"), None);
    world.reports.get_mut("node4").unwrap().leave_completed = false;
    world.spec.size = Some(4);
    world.settle();
    assert_eq!(world.rank("node4"), Some(3));
    assert_eq!(world.roster.as_ref().unwrap().ranks[&3].drain, None);
}

#[test]
fn a_node_that_comes_back_goes_before_an_older_one_that_never_had_a_rank() {
    for max_size in [4, 5] {
        let mut world = World::up(4);
        world.roster.as_mut().unwrap().settings.max_size = max_size;
        world.roster.as_mut().unwrap().ranks.get_mut(&3).unwrap().vacate();
        let report = world.reports.get_mut("node4").unwrap();
        (report.adopted, report.leave_completed) = (None, false);
        world.add("older", 0);
        world.passed("older", 2);
        world.spec.size = Some(4);
        world.settle();
        assert_eq!((world.rank("node4"), world.rank("older")), (Some(3), None), "maxSize {max_size}");
        assert_eq!(world.projected("older").reason.as_deref(), Some("size is 4"));
    }
}

#[test]
fn a_rank_that_is_reserved_for_its_node_goes_to_no_other_even_if_none_is_free() {
    let mut world = World::up(4);
    world.roster.as_mut().unwrap().settings.max_size = 4;
    world.roster.as_mut().unwrap().ranks.get_mut(&3).unwrap().vacate();
    world.nodes.pop();
    world.add("other", 9);
    world.passed("other", 2);
    world.settle();
    assert_eq!(world.rank("other"), None);
    let message = world.projected("other").reason.unwrap();
    assert!(message.contains("reserved for the node whose name it has"), "{message}");
}

#[test]
fn a_spare_that_an_administrator_has_drained_is_not_given_out() {
    let mut world = World::up(3);
    world.reports.get_mut("node1").unwrap().drained_by_others = "1,3".parse().unwrap();
    world.add("new", 9);
    world.passed("new", 2);
    world.settle();
    assert_eq!(world.rank("new"), Some(4), "Flux would keep the rank drained whatever machine gets it");
    // The report of a former lead is about ranks of an earlier epoch.
    world.reports.get_mut("node2").unwrap().drained_by_others = "5".parse().unwrap();
    world.add("newer", 10);
    world.passed("newer", 2);
    world.settle();
    assert_eq!(world.rank("newer"), Some(5));
}

#[test]
fn a_node_that_people_have_drained_tells_their_reason() {
    let mut world = World::up(3);
    let report = world.reports.get_mut("node1").unwrap();
    report.drained_by_others = "1-2".parse().unwrap();
    report.drain_reasons = [("bad disk ".repeat(99), "1".parse().unwrap())].into();
    let reason = |node| world.projected(node).reason.unwrap();
    assert!(reason("node2").starts_with("drained in Flux: bad disk bad disk"), "{}", reason("node2"));
    assert!(reason("node2").len() < 150, "{}", reason("node2"));
    assert_eq!(reason("node3"), "somebody has drained it in Flux: `flux resource drain` shows why");
}

#[test]
fn a_node_that_returns_in_time_keeps_its_rank_and_its_broker() {
    let mut world = World::up(3);
    world.spec.ranks.retain = Some("1h".into());
    let mut node = world.nodes.remove(2);
    node.deleting = true;
    world.nodes.push(node.clone());
    world.settle();
    let drained = |world: &World| world.projected("node1").drain.values().any(|ranks| ranks.contains(2));
    assert!(drained(&world), "it is being deleted");
    world.nodes.pop();
    world.settle();
    world.now += 3599;
    world.settle();
    assert!(drained(&world), "its broker must not get jobs although its Node is deleted");
    node.deleting = false;
    world.nodes.push(node);
    world.settle();
    let roster = world.roster.as_ref().unwrap();
    assert_eq!(world.rank("node3"), Some(2));
    assert!(Members::observe(&world.seen(), roster).runs(2));
    assert_eq!(world.wants("node3"), Want::Run);
    assert!(!drained(&world));
}

#[test]
fn a_node_that_stays_away_leaves_an_undrained_spare() {
    let mut world = World::up(3);
    world.add("late", 9);
    world.passed("late", 2);
    world.settle();
    world.online("node1");
    world.online("late");
    world.settle();
    world.spec.ranks.retain = Some("1h".into());
    for name in ["node3", "late"] {
        let node = world.nodes.iter_mut().find(|node| node.name == name).unwrap();
        node.deleting = true;
    }
    world.settle();
    world.nodes.retain(|node| !node.deleting);
    world.settle();
    world.now += 3600;
    world.settle();
    let roster = world.roster.clone().unwrap();
    for rank in [2, 3] {
        assert_eq!((&roster.ranks[&rank].member, &roster.ranks[&rank].drain), (&None, &None));
        assert!(roster.ranks[&rank].resources.is_some(), "it still declares its resources");
    }
    let drained =
        |world: &World| world.projected("node1").drain.into_values().flat_map(|ranks| ranks.0).collect::<Vec<_>>();
    assert_eq!(drained(&world), [2, 3], "the brokers may still run without their Nodes");
    let mut without = world.reports["node1"].clone();
    without.offline = vec![2, 3];
    let before = world.reports.insert("node1".into(), without).unwrap();
    assert!(drained(&world).is_empty());
    world.reports.insert("node1".into(), before);
    assert_eq!(status_of(&world).size, 2);

    // A rank with a node's name is reserved for that node. One with a spare's name is free once no broker runs under
    // it.
    world.add("new", 10);
    world.passed("new", 2);
    world.settle();
    assert_eq!(world.rank("new"), Some(4), "the agent still reports the old broker");
    world.reports.remove("late");
    world.add("next", 12);
    world.passed("next", 2);
    world.settle();
    assert_eq!(world.rank("next"), Some(5), "the lead still reports it online");
    world.reports.get_mut("node1").unwrap().offline = vec![2, 3];
    world.add("newer", 11);
    world.passed("newer", 2);
    world.reports.get_mut("node1").unwrap().allocated = Some("3".parse().unwrap());
    world.settle();
    assert_eq!(world.rank("newer"), Some(6), "the lead still reports a job there");
    world.reports.get_mut("node1").unwrap().allocated = Some("".parse().unwrap());
    world.add("newest", 13);
    world.passed("newest", 2);
    assert_eq!(world.settle(), Decision::Keep);
    assert_eq!(world.rank("newest"), Some(3));
}

/// Projects the roster into the spec of the FluxNode of `name`. None if the spec stays as it is.
fn project_into(world: &World, name: &str) -> Option<FluxNodeSpec> {
    let mut present = FluxNode::new(name, FluxNodeSpec { node_name: name.to_owned(), ..FluxNodeSpec::default() });
    present.status = world.reports.get(name).cloned();
    let all = project_all(&world.seen(), world.planned().as_ref(), [&present], |_| false);
    all.into_iter().map(|(_, spec)| spec).next()
}

#[test]
fn a_broker_whose_node_is_gone_for_good_is_drained_and_stopped_once_it_is_idle() {
    let mut world = World::up(3);
    world.nodes.retain(|node| node.name != "node3");
    world.settle();
    let spec = project_into(&world, "node3").unwrap();
    let expected =
        FluxNodeSpec { node_name: "node3".to_owned(), reason: spec.reason.clone(), ..FluxNodeSpec::default() };
    assert_eq!(spec, expected, "it keeps its rank, and so its spec, for ranks.retain");
    assert!(spec.reason.unwrap().starts_with(NODE_IS_GONE));
    world.now += 600;
    world.settle();
    assert_eq!(members(&world), 2);
    for (drained, allocated, want) in [
        (None, None, Want::Nothing),
        (Some("2"), None, Want::Nothing),
        (Some("2"), Some("2"), Want::Nothing),
        (Some(""), Some(""), Want::Nothing),
        (Some("2"), Some("0"), Want::Leave),
    ] {
        let lead = world.reports.get_mut("node1").unwrap();
        (lead.drained, lead.allocated) =
            (drained.map(|ranks| ranks.parse().unwrap()), allocated.map(|ranks| ranks.parse().unwrap()));
        assert_eq!(world.projected("node1").drain["its node has left the instance"].to_string(), "2");
        let spec = project_into(&world, "node3").unwrap();
        assert_eq!((spec.want, spec.rank), (want, Some(2)), "{drained:?} {allocated:?}");
        assert!(spec.drain_reason.is_some());
    }
    // The machine is off, and its agent can't correct its last report, but the lead reports the broker offline.
    world.reports.get_mut("node1").unwrap().offline = vec![2];
    assert_eq!(project_into(&world, "node3"), None);
    world.reports.get_mut("node1").unwrap().offline = Vec::new();
    world.reports.get_mut("node3").unwrap().adopted = None;
    assert_eq!(project_into(&world, "node3"), None);
}
