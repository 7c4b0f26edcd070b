//! A FluxInstance that is created while hosts still have brokers of a previous one.

use super::{Decision, first::REPORTS_TIMEOUT, tests::World};
use crate::{
    fixture::roster,
    lead::LEAD_PATIENCE,
    observed::{Observed, is_certificate_in_use, is_certificate_of_another},
    obstacle::Obstacle,
    status::status,
};
use api::{Adopted, CONDITION_CERTIFICATE_MISSING, NodePhase};

fn adopted(rank: u32, instance_uid: Option<&str>, instance_id: &str) -> Adopted {
    Adopted {
        rank,
        broker_name: format!("node{}", rank + 1),
        node_uid: format!("uid-node{}", rank + 1),
        instance_uid: instance_uid.map(str::to_owned),
        instance_id: instance_id.to_owned(),
        epoch: 1,
        pid: 7,
        digest: "digest".into(),
    }
}

/// A new FluxInstance, while `node` still has a broker of the previous one.
fn after_another(node: usize) -> World {
    let mut world = World::new(3);
    world.all_passed();
    let report = world.reports.get_mut(&format!("node{node}")).unwrap();
    report.adopted = Some(adopted(u32::try_from(node).unwrap() - 1, Some("before"), "its-id"));
    world
}

#[test]
fn a_node_that_is_off_with_the_previous_instance_does_not_block_the_new_one() {
    let mut world = after_another(2);
    world.nodes[1].ready = false;
    assert_eq!(world.settle(), Decision::Keep);
    assert_eq!((world.rank("node1"), world.rank("node2"), world.rank("node3")), (Some(0), None, Some(1)));
}

#[test]
fn a_node_that_still_holds_the_previous_instance_does_not_become_the_lead() {
    let mut world = after_another(1);
    let Decision::Wait(reason) = world.settle() else { panic!("it must wait for node1 to be cleaned") };
    assert!(reason.contains("node1 still holds the previous instance"), "{reason}");
    world.reports.get_mut("node1").unwrap().message = Some("jobs are running".to_owned());
    let Decision::Wait(reason) = world.settle() else { panic!("{:?}", world.roster) };
    assert!(reason.contains("node1 still holds the previous instance: jobs are running"), "{reason}");
    world.waited = LEAD_PATIENCE;
    world.settle();
    assert_eq!(world.rank("node2"), Some(0));

    let mut world = after_another(1);
    world.waited = LEAD_PATIENCE;
    world.spec.lead = Some("node1".into());
    let Decision::Wait(reason) = world.settle() else { panic!("{:?}", world.roster) };
    assert!(reason.contains("node1") && reason.contains("still holds the previous instance"), "{reason}");
    world.reports.get_mut("node1").unwrap().adopted = None;
    world.settle();
    assert_eq!(world.rank("node1"), Some(0));
}

#[test]
fn no_new_roster_is_made_while_a_broker_of_this_instance_may_run() {
    // The broker's FluxInstance uid and instance ID, the known ID and epoch of this FluxInstance, whether the broker
    // counts.
    for (uid, id, known, epoch, counts) in [
        (Some("instance"), "id", Some("id"), 1, true),
        (Some("instance"), "id", None, 0, true),
        (Some("before"), "its-id", None, 0, false),
        (Some("before"), "its-id", Some("id"), 1, false),
        (None, "id", Some("id"), 1, true),
        (None, "its-id", Some("id"), 1, false),
        // The lead has not been online yet, or no planner has seen it online.
        (None, "id", None, 1, true),
        (None, "its-id", None, 0, false),
    ] {
        let mut world = World::new(2);
        world.all_passed();
        (world.status.instance_id, world.status.epoch) = (known.map(str::to_owned), epoch);
        world.reports.get_mut("node2").unwrap().adopted = Some(adopted(1, uid, id));
        world.waited = REPORTS_TIMEOUT;
        let waits =
            matches!(world.settle(), Decision::Wait(reason) if reason.contains("node node2 reports a broker of epoch"));
        assert_eq!(waits, counts, "{uid:?} {id} {known:?} {epoch}");
        let in_use = known.is_some() || counts || world.roster.is_some_and(|roster| roster.established);
        world.roster = None;
        assert_eq!(is_certificate_in_use(&world.seen()), in_use, "{uid:?} {id} {known:?} {epoch}");
    }
}

#[test]
fn a_new_instance_gets_its_own_certificate_and_a_running_one_keeps_its_own() {
    let is_anothers = |world: &World, made_for| is_certificate_of_another(&world.seen(), made_for);
    let mut world = after_another(2);
    assert!(is_anothers(&world, Some("before")));
    assert!(is_anothers(&world, None), "an older version made it without saying for which instance");
    assert!(!is_anothers(&world, Some("instance")));

    world.roster = Some(roster(3, &[("node1", 2)]));
    world.roster.as_mut().unwrap().instance_uid = "before".into();
    assert!(is_anothers(&world, Some("before")), "the roster belongs to the previous instance too");
    world.roster.as_mut().unwrap().instance_uid = "instance".into();
    world.roster.as_mut().unwrap().established = false;
    assert!(!is_anothers(&world, None), "the lead may be starting with it");

    world.roster = None;
    world.reports.get_mut("node1").unwrap().adopted = Some(adopted(0, Some("instance"), "id"));
    assert!(!is_anothers(&world, Some("before")), "a broker of this instance runs");
    world.reports.get_mut("node1").unwrap().adopted = None;
    world.status.instance_id = Some("id".into());
    assert!(!is_anothers(&world, None), "the lead was online and may come back with it");
}

#[test]
fn a_missing_certificate_is_reported_beside_any_other_problem() {
    let mut world = World::up(2);
    let problem = Obstacle::Problem { reason: "InvalidSpec", message: "a value is misspelt".to_owned() };
    for (obstacle, is_gone) in [(None, true), (Some(problem.clone()), true), (Some(problem), false), (None, false)] {
        for name in ["node1", "node2"] {
            let seen = Observed { is_certificate_gone: is_gone, ..world.seen() };
            let status = status(&seen, 1, world.planned().as_ref(), obstacle.as_ref());
            assert_eq!(status.holding(CONDITION_CERTIFICATE_MISSING).is_some(), is_gone, "{obstacle:?} {name}");
            world.reports.get_mut(name).unwrap().phase = NodePhase::Offline;
        }
        world = World::up(2);
    }
}
