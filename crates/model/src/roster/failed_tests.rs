//! A lead that can't be started, and the changes that repair it.

use super::{
    Decision, decide, decide_unserved,
    epoch::{Restart, restart},
    epoch_tests::{close, idle, jobs_on, waits_for},
    tests::World,
};
use crate::{members::Members, observed::Observed};
use api::{Closing, NodePhase, OnFailure};

/// In the second epoch, the lead's broker was never started, because the host refuses what the spec asks for.
fn refused_by_the_host() -> World {
    let mut world = idle();
    world.spec.upgrade.on_failure = OnFailure::Stay;
    world.spec.broker.config = Some("[refused]".into());
    world.settle();
    close(&mut world);
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().epoch, 2);
    let lead = world.reports.get_mut("node1").unwrap();
    (lead.phase, lead.message, lead.closed_epoch) = (NodePhase::Failed, Some("refused".into()), None);
    lead.start_failing_epoch = Some(2);
    world
}

#[test]
fn a_change_that_may_repair_a_failed_lead_does_not_wait_for_it() {
    type Repair = fn(&mut World);
    let repairs: [(&str, Repair, Closing); 3] = [
        ("the spec", |world| world.spec.broker.config = None, Closing::WhenIdle),
        ("other packages, which are not there yet", |world| world.digest = "new", Closing::WhenIdle),
        ("a request", |world| world.restart_word = Some("2026-01-01"), Closing::AtOnce),
    ];
    for (what, repair, closing) in repairs {
        let mut world = refused_by_the_host();
        let before = world.roster.as_ref().unwrap().previous.clone();
        assert_eq!(world.settle(), Decision::Keep, "{what}: no change is requested yet");
        repair(&mut world);
        world.settle();
        assert_eq!(world.roster.as_ref().unwrap().closing, Some(closing), "{what}");
        close(&mut world);
        world.settle();
        let roster = world.roster.as_ref().unwrap();
        assert_eq!((roster.epoch, roster.closing), (3, None), "{what}");
        assert_eq!(roster.previous, before, "{what}: must not go back to settings that never came up");
        assert_eq!(
            restart(&world.seen(), &Members::observe(&world.seen(), roster), roster),
            Restart::None,
            "{what}: it must restart only once"
        );
    }
}

#[test]
fn a_lead_that_is_slow_or_away_does_not_count_as_failed() {
    type Away = fn(&mut World);
    let aways: [(&str, Away); 4] = [
        ("starting, or refused once, for example because a port was in use", |world| {
            world.reports.get_mut("node1").unwrap().start_failing_epoch = None;
        }),
        ("refused again and again, but in the previous epoch", |world| {
            world.reports.get_mut("node1").unwrap().start_failing_epoch = Some(1);
        }),
        ("off", |world| world.nodes[0].ready = false),
        ("running, but not online", |world| {
            let broker = world.reports["node2"].adopted.clone().unwrap();
            let lead = world.reports.get_mut("node1").unwrap();
            lead.adopted = Some(api::Adopted { rank: 0, epoch: 2, ..broker });
        }),
    ];
    for (what, away) in aways {
        let mut world = idle();
        let broker = world.reports["node2"].adopted.clone();
        world = refused_by_the_host();
        world.reports.get_mut("node2").unwrap().adopted = broker;
        away(&mut world);
        world.spec.broker.config = None;
        assert_eq!(world.settle(), Decision::Keep, "{what}");
        assert_eq!(waits_for(&world), "the lead to be online", "{what}");
    }
}

#[test]
fn a_lead_that_fails_long_after_it_was_online_can_be_repaired_by_the_spec() {
    let mut world = idle();
    jobs_on(&mut world, Some("1"));
    let lead = world.reports.get_mut("node1").unwrap();
    (lead.phase, lead.adopted, lead.start_failing_epoch) = (NodePhase::Failed, None, Some(1));
    assert_eq!(world.settle(), Decision::Keep);
    world.spec.broker.port = Some(9000);
    world.settle();
    let closing = world.roster.as_ref().unwrap().closing;
    assert_eq!(closing, Some(Closing::WhenIdle), "a broker that runs there unnoticed must keep its jobs");
}

#[test]
fn a_repair_is_not_reverted_by_the_report_about_the_failure_before_it() {
    let mut world = idle();
    world.spec.upgrade.on_failure = OnFailure::GoBack;
    let lead = world.reports.get_mut("node1").unwrap();
    (lead.phase, lead.adopted) = (NodePhase::Failed, None);
    (lead.start_failing_epoch, lead.message) = (Some(1), Some("the broker has ended".into()));
    world.digest = "new";
    world.settle();
    close(&mut world);
    world.settle();
    world.reports.get_mut("node1").unwrap().closed_epoch = None;
    assert_eq!(world.settle(), Decision::Keep);
    let roster = world.roster.as_ref().unwrap();
    assert_eq!((roster.epoch, roster.settings.digest.as_str(), &roster.refused), (2, "new", &None));
    // A report about the new epoch does revert it.
    world.reports.get_mut("node1").unwrap().start_failing_epoch = Some(2);
    world.settle();
    let roster = world.roster.as_ref().unwrap();
    assert_eq!((roster.epoch, roster.settings.digest.as_str()), (3, "digest"));
    assert!(roster.refused.is_some());
}

#[test]
fn an_instance_that_was_stopped_for_an_epoch_that_can_not_begin_goes_on() {
    let mut world = idle();
    assert_eq!(decide_unserved(&world.seen()), Decision::Keep);
    world.spec.broker.port = Some(9000);
    world.settle();
    let closing = world.roster.clone().unwrap();
    // While packages are being resolved, the planner neither starts nor cancels the stop.
    assert_eq!(decide(&Observed { digest: None, ..world.seen() }), Decision::Keep);
    let unserved = |world: &World| decide_unserved(&world.seen());
    let unresolved = |world: &World| decide(&Observed { digest: None, ..world.seen() });
    let unserved_and_not_stopped_yet = unserved(&world);
    close(&mut world);
    for (what, decision) in [
        ("the spec can't be served, but the lead still runs", unserved_and_not_stopped_yet),
        ("the spec can't be served", unserved(&world)),
        ("its packages are not available", unresolved(&world)),
    ] {
        let Decision::Write(next) = decision else { panic!("{what}: {decision:?}") };
        assert_eq!((next.epoch, next.closing, &next.settings), (1, None, &closing.settings), "{what}");
        assert_eq!(next.ranks[&0].revision, next.revision, "{what}: the lead must notice the change");
        assert!(next.revision > closing.revision, "{what}");
    }
    world.roster.as_mut().unwrap().instance_uid = "another".into();
    assert_eq!(decide_unserved(&world.seen()), Decision::Keep);
}

#[test]
fn an_epoch_that_does_not_come_up_is_reverted_even_if_the_spec_is_invalid() {
    let mut world = refused_by_the_host();
    world.spec.upgrade.on_failure = OnFailure::GoBack;
    let keeps_dying = world.reports.get_mut("node1").unwrap().start_failing_epoch.take();
    assert_eq!(decide_unserved(&world.seen()), Decision::Keep);
    world.reports.get_mut("node1").unwrap().start_failing_epoch = keeps_dying;
    world.spec.size = Some(0);
    let Decision::Write(next) = decide_unserved(&world.seen()) else { panic!("the instance stays down") };
    assert_eq!((next.epoch, next.settings.config.as_str(), next.ranks.len()), (3, "", 3));
    assert_eq!(next.refused.unwrap().reason, "refused");
}
