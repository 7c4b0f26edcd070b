//! Members that leave a deep tree, and the members below them.

use super::{
    epoch_tests::jobs_on,
    tests::{World, entry_of},
};
use crate::project::project_all;
use api::{FluxNode, FluxNodeSpec, Want};

/// Seven members in a binary tree, in which rank 5 is below rank 2. The only job runs on rank 5.
fn with_a_job_on_a_leaf() -> World {
    let mut world = World::new(7);
    world.spec.topology = Some("kary:2".into());
    world.all_passed();
    for number in 1..=7 {
        world.settle();
        world.online(&format!("node{number}"));
    }
    world.settle();
    let lead = world.reports.get_mut("node1").unwrap();
    (lead.drained, lead.allocated) = (Some("2-6".parse().unwrap()), Some("5".parse().unwrap()));
    world
}

/// Changes the selector so that it matches all Nodes except node3.
fn select_all_but_node3(world: &mut World) {
    world.spec.nodes.selector = Some(serde_json::from_str(r#"{"matchLabels": {"pool": "flux"}}"#).unwrap());
    let others = world.nodes.iter_mut().filter(|node| node.name != "node3");
    others.for_each(|node| drop(node.labels.insert("pool".to_owned(), "flux".to_owned())));
}

#[test]
fn ranks_below_a_leaving_member_get_no_new_jobs_until_it_has_left() {
    let mut world = with_a_job_on_a_leaf();
    select_all_but_node3(&mut world);
    jobs_on(&mut world, Some(""));
    world.reports.get_mut("node1").unwrap().drained = Some("2".parse().unwrap());
    world.settle();
    for rank in [5, 6] {
        let drain = entry_of(&world, rank).drain.unwrap();
        assert_eq!((drain.reason.as_str(), drain.leave), ("rank 2, above it in the tree, is leaving", false));
    }
    assert_eq!(entry_of(&world, 1).drain, None);
    assert_eq!(world.wants("node3"), Want::Run, "a job may start below it at any moment");
    world.reports.get_mut("node1").unwrap().drained = Some("2,5".parse().unwrap());
    assert_eq!(world.wants("node3"), Want::Run);
    world.reports.get_mut("node1").unwrap().offline = vec![6];
    assert_eq!(world.wants("node3"), Want::Leave);
    let report = world.reports.get_mut("node3").unwrap();
    (report.adopted, report.leave_completed) = (None, true);
    world.settle();
    assert_eq!((world.rank("node3"), entry_of(&world, 5).drain), (None, None));
}

#[test]
fn an_idle_member_stays_while_jobs_run_below_it() {
    type Leave = fn(&mut World);
    let leaves: [(&str, Leave); 2] =
        [("a smaller size", |world| world.spec.size = Some(2)), ("another selector", select_all_but_node3)];
    for (how, leave) in leaves {
        let mut world = with_a_job_on_a_leaf();
        leave(&mut world);
        world.settle();
        assert_eq!(world.wants("node3"), Want::Run, "{how}: stopping it would end the job below rank 2");
        world.spec.drain.timeout = Some("1m".to_owned());
        world.now += 60;
        assert_eq!(world.wants("node3"), Want::Leave, "{how}: the drain timeout has passed");
        world.spec.drain.timeout = None;
        jobs_on(&mut world, Some(""));
        assert_eq!(world.wants("node3"), Want::Leave, "{how}");
    }
}

#[test]
fn a_broker_whose_node_is_gone_for_good_stays_while_jobs_run_below_it() {
    let mut world = with_a_job_on_a_leaf();
    let node = world.nodes.remove(2);
    world.settle();
    world.now += 601;
    world.settle();
    assert_eq!(world.rank("node3"), None);
    let mut present = FluxNode::new("node3", FluxNodeSpec::default());
    present.status = world.reports.get("node3").cloned();
    let rank_and_want = |world: &World| {
        let seen = world.seen();
        let rows = project_all(&seen, world.planned().as_ref(), [&present], |_| true);
        let (_, spec) = rows.into_iter().next().unwrap();
        assert_eq!(
            spec.drain_reason.is_some(),
            spec.rank.is_some(),
            "a broker that is to end must be shown as draining"
        );
        (spec.rank, spec.want)
    };
    assert_eq!(rank_and_want(&world), (Some(2), Want::Nothing));
    // Without a rank in its spec, the agent would stop the broker of a rank that has no member.
    world.nodes.push(node);
    assert_eq!(rank_and_want(&world), (Some(2), Want::Nothing), "after its Node is back");
    jobs_on(&mut world, Some(""));
    assert_eq!(rank_and_want(&world), (None, Want::Install));
    world.nodes.pop();
    assert_eq!(rank_and_want(&world), (Some(2), Want::Leave));
}
