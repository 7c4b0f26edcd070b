use super::{takeover::refusal, tests::World, *};
use api::{Closing, IdSet, NodePhase, Takeover};
use std::time::Duration;

/// A request to take over the present epoch; with an empty queue if `new` is the instance's new ID.
fn takeover_request(world: &World, new: Option<&str>) -> Takeover {
    let roster = world.roster.as_ref().unwrap();
    Takeover {
        instance_id: roster.instance_id.clone(),
        epoch: roster.epoch,
        at: 1000,
        dump: new.is_none().then(|| "dump.tgz".to_owned()),
        new_instance_id: new.map(str::to_owned),
        force: false,
    }
}

fn leave(world: &mut World, node: &str, request: Takeover) {
    world.reports.entry(node.to_owned()).or_default().takeover = Some(request);
}

/// The agent of the lead fails because its statedir is gone.
fn lose_the_disk(world: &mut World) {
    let lead = world.reports.get_mut("node1").unwrap();
    (lead.phase, lead.adopted) = (NodePhase::Failed, None);
}

fn members(world: &World) -> Vec<String> {
    let ranks = &world.roster.as_ref().unwrap().ranks;
    ranks.values().map(|entry| entry.member.as_ref().map(|m| m.node.clone()).unwrap_or_default()).collect()
}

#[test]
fn a_lead_whose_disk_is_gone_is_replaced_by_the_node_that_was_named() {
    let mut world = World::up(3);
    lose_the_disk(&mut world);
    world.settle();
    assert_eq!(members(&world), ["node1", "node2", "node3"], "nothing changes without a request");
    let request = takeover_request(&world, None);
    leave(&mut world, "node3", request);
    assert_eq!(world.settle(), Decision::Keep);
    let roster = world.roster.clone().unwrap();
    assert_eq!(members(&world), ["node3", "node2", "node1"]);
    assert_eq!((roster.epoch, roster.instance_id.as_str(), roster.established), (2, "fresh", true));
    assert_eq!((roster.previous, roster.closing), (None, None));
    let names: Vec<_> = roster.ranks.values().map(|entry| entry.broker_name.as_str()).collect();
    assert_eq!(names, ["node3", "node2", "node1"]);

    // The request is for an epoch that is over now, so it doesn't apply when the next disk is lost.
    world.online("node3");
    world.settle();
    let lead = world.reports.get_mut("node3").unwrap();
    (lead.phase, lead.adopted) = (NodePhase::Failed, None);
    world.settle();
    assert_eq!((world.roster.as_ref().unwrap().epoch, world.rank("node3")), (2, Some(0)));
}

#[test]
fn a_node_without_a_rank_can_take_over_from_a_lead_that_is_gone() {
    let mut world = World::up(2);
    world.nodes.retain(|node| node.name != "node1");
    world.reports.get_mut("node2").unwrap().phase = NodePhase::Starting;
    world.settle();
    world.spec.size = Some(2);
    world.add("node9", 9);
    world.passed("node9", 4);
    world.settle();
    assert_eq!(world.rank("node9"), None);
    let request = takeover_request(&world, None);
    leave(&mut world, "node9", request);
    world.settle();
    assert_eq!(members(&world)[..2], ["node9", "node2"]);
    assert_eq!(world.roster.as_ref().unwrap().epoch, 2);
}

#[test]
fn a_statedir_that_is_restored_on_the_lead_begins_no_epoch() {
    let mut world = World::up(2);
    lose_the_disk(&mut world);
    let request = takeover_request(&world, None);
    leave(&mut world, "node1", request);
    assert_eq!(world.settle(), Decision::Keep);
    assert_eq!(world.roster.as_ref().unwrap().epoch, 1);
}

#[test]
fn the_latest_request_counts_and_one_for_another_epoch_or_instance_does_not() {
    let mut world = World::up(3);
    lose_the_disk(&mut world);
    let now = takeover_request(&world, None);
    leave(&mut world, "node1", Takeover { epoch: 0, at: 9000, ..now.clone() });
    leave(&mut world, "node2", now.clone());
    leave(&mut world, "node3", Takeover { at: now.at + 1, ..now.clone() });
    world.settle();
    assert_eq!(members(&world)[0], "node3");
    let mut world = World::up(2);
    lose_the_disk(&mut world);
    leave(&mut world, "node2", Takeover { instance_id: "other".into(), ..now });
    assert_eq!(world.settle(), Decision::Keep);
}

#[test]
fn an_empty_queue_begins_with_a_new_id_if_the_lead_is_lost() {
    for lead in ["node1", "node2"] {
        let mut world = World::up(2);
        lose_the_disk(&mut world);
        // The planner has waited for long, and the lead has reported only why it refused the old queue.
        world.waited = Duration::from_mins(10);
        let request = takeover_request(&world, Some("new"));
        leave(&mut world, lead, request);
        world.settle();
        let roster = world.roster.as_ref().unwrap();
        assert_eq!((roster.instance_id.as_str(), roster.epoch, roster.established), ("new", 2, false));
        assert_eq!(members(&world)[0], lead);
    }
}

#[test]
fn a_queue_that_was_named_begins_on_the_named_host_or_not_at_all() {
    type Bad = fn(&mut World);
    let bad: [(&str, Bad, u64); 7] = [
        ("NotReady", |w| w.nodes[1].ready = false, 2),
        ("cordoned", |w| w.nodes[1].cordoned = true, 2),
        ("gone", |w| drop(w.nodes.remove(1)), 2),
        ("registered again", |w| w.nodes[1].uid = "again".into(), 2),
        ("failed", |w| w.reports.get_mut("node2").unwrap().phase = NodePhase::Failed, 2),
        ("a changed spec", |w| w.spec.broker.port = Some(9000), 3),
        (
            "a changed spec while it is NotReady",
            |w| {
                w.spec.broker.port = Some(9000);
                w.nodes[1].ready = false;
            },
            3,
        ),
    ];
    for (what, happens, epoch) in bad {
        let mut world = World::up(3);
        lose_the_disk(&mut world);
        world.waited = Duration::from_mins(10);
        let request = takeover_request(&world, Some("kept"));
        leave(&mut world, "node2", request);
        world.settle();
        happens(&mut world);
        assert_eq!(world.settle(), Decision::Keep, "{what}");
        let roster = world.roster.as_ref().unwrap();
        assert_eq!((roster.instance_id.as_str(), roster.epoch, roster.established), ("kept", epoch, false), "{what}");
        assert_eq!((roster.lead().unwrap().node.as_str(), &roster.previous), ("node2", &None), "{what}");
        assert_eq!(roster.jobs_lost_before, epoch, "{what}: jobs of the earlier brokers are lost");
        if let Some(node) = world.nodes.iter().find(|node| node.name == "node2") {
            assert_eq!(roster.lead().unwrap().uid, node.uid, "{what}");
        }
        // If that host never comes back, the administrator can name another one.
        let request = Takeover { force: true, ..takeover_request(&world, Some("another")) };
        leave(&mut world, "node3", request);
        world.settle();
        let roster = world.roster.as_ref().unwrap();
        assert_eq!((roster.instance_id.as_str(), roster.lead().unwrap().node.as_str()), ("another", "node3"), "{what}");
    }
}

#[test]
fn a_running_instance_is_stopped_before_it_begins_with_an_empty_queue() {
    for (force, closing) in [(false, Closing::WhenIdle), (true, Closing::AtOnce)] {
        let mut world = World::up(2);
        world.reports.get_mut("node1").unwrap().allocated = Some(IdSet::default());
        let request = Takeover { force, ..takeover_request(&world, Some("new")) };
        leave(&mut world, "node1", request);
        world.settle();
        let roster = world.roster.as_ref().unwrap();
        assert_eq!((roster.closing, roster.epoch), (Some(closing), 1));
        let lead = world.reports.get_mut("node1").unwrap();
        (lead.phase, lead.adopted, lead.closed_epoch) = (NodePhase::Waiting, None, Some(1));
        world.settle();
        let roster = world.roster.as_ref().unwrap();
        assert_eq!((roster.instance_id.as_str(), roster.epoch, roster.closing), ("new", 2, None));
    }
}

#[test]
fn each_refusal_is_one_sentence() {
    type Case = (&'static str, fn(&mut World), &'static str, bool, bool, Option<&'static str>);
    let idle: fn(&mut World) = |world| world.reports.get_mut("node1").unwrap().allocated = Some(IdSet::default());
    let busy: fn(&mut World) =
        |world| world.reports.get_mut("node1").unwrap().allocated = Some(IdSet([0, 1].into_iter().collect()));
    let off: fn(&mut World) = |world| world.nodes[0].ready = false;
    let unknown: fn(&mut World) = |world| {
        lose_the_disk(world);
        world.reports.get_mut("node1").unwrap().unknown_broker = true;
    };
    let cases: [Case; 21] = [
        ("online", |_| {}, "node2", false, false, Some("node1 leads and is online")),
        ("lost", lose_the_disk, "node2", false, false, None),
        ("no such node", lose_the_disk, "node7", false, false, Some("there is no node node7")),
        ("cordoned", |w| w.nodes[1].cordoned = true, "node2", false, false, Some("can't be the lead")),
        (
            "not installed",
            |w| w.reports.get_mut("node2").unwrap().facts = None,
            "node2",
            false,
            false,
            Some("preflight"),
        ),
        (
            "never online",
            |w| w.roster.as_mut().unwrap().established = false,
            "node2",
            false,
            false,
            Some("not been online"),
        ),
        (
            "runs, but is not online",
            |w| w.reports.get_mut("node1").unwrap().phase = NodePhase::Waiting,
            "node2",
            false,
            false,
            Some("runs on node node1"),
        ),
        (
            "runs, but is not online, forced",
            |w| w.reports.get_mut("node1").unwrap().phase = NodePhase::Waiting,
            "node2",
            false,
            true,
            None,
        ),
        ("an unknown broker runs", unknown, "node2", false, false, Some("a broker runs on node node1, and")),
        ("an unknown broker runs, empty", unknown, "node2", true, false, Some("a broker runs on node node1")),
        ("an unknown broker runs, forced", unknown, "node2", false, true, None),
        ("an unknown broker runs on the named node", unknown, "node1", false, false, None),
        ("off, forced", off, "node2", false, true, None),
        ("off, but the others are still connected", off, "node2", false, false, Some("ranks 1-2 are connected")),
        (
            "off, and the others have noticed",
            |w| {
                w.nodes[0].ready = false;
                for follower in ["node2", "node3"] {
                    w.reports.get_mut(follower).unwrap().phase = NodePhase::Starting;
                }
            },
            "node2",
            false,
            false,
            None,
        ),
        ("gone", |w| drop(w.nodes.remove(0)), "node2", false, false, Some("are connected")),
        ("empty, idle", idle, "node1", true, false, None),
        ("empty, busy", busy, "node1", true, false, Some("jobs run on ranks 0-1")),
        ("empty, jobs unknown", |_| {}, "node1", true, false, Some("not reported yet")),
        ("empty, busy, forced", busy, "node1", true, true, None),
        (
            "empty, lead wanted elsewhere",
            |w| w.spec.lead = Some("node1".into()),
            "node2",
            true,
            true,
            Some("spec.lead"),
        ),
    ];
    for (what, change, node, empty, force, expected) in cases {
        let mut world = World::up(3);
        change(&mut world);
        let roster = world.roster.clone().unwrap();
        let request = Takeover { force, ..takeover_request(&world, empty.then_some("another")) };
        let refused = refusal(&world.seen(), &roster, node, &request);
        assert!(refused.is_some() == expected.is_some(), "{what}: {refused:?}");
        assert!(refused.as_deref().unwrap_or_default().contains(expected.unwrap_or_default()), "{what}: {refused:?}");
    }
}

/// The status's schema refuses a longer ID, so the planner could never write the status again.
#[test]
fn a_takeover_is_refused_if_its_instance_id_is_too_long_for_the_status() {
    for (length, is_refused) in [(253, false), (254, true)] {
        let mut world = World::up(3);
        lose_the_disk(&mut world);
        world.settle();
        let request = takeover_request(&world, Some(&"x".repeat(length)));
        leave(&mut world, "node3", request);
        world.settle();
        assert_eq!(members(&world)[0] != "node3", is_refused, "{length}");
    }
}
