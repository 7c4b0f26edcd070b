//! Pods that Flux has placed outlive a broker: what waits for jobs does not wait for them.

use super::{
    epoch::Restart,
    epoch_tests::{close, idle, waits_for},
    tests::World,
};
use api::{Closing, Facts, NodePhase, OnFailure, Resources, Roster, Want};

/// The lead reports that jobs of these ranks hold resources.
fn held(world: &mut World, all: &str, by_host_jobs: &str, by_gangs: &str) {
    let lead = world.reports.get_mut("node1").unwrap();
    lead.allocated = Some(all.parse().unwrap());
    lead.host_jobs = Some(by_host_jobs.parse().unwrap());
    lead.gangs = by_gangs.parse().unwrap();
}

fn drained(world: &mut World, ranks: &str) {
    world.reports.get_mut("node1").unwrap().drained = Some(ranks.parse().unwrap());
}

#[test]
fn an_epoch_ends_beside_pods_and_gangs_but_not_beside_a_host_job() {
    let mut world = idle();
    world.spec.broker.port = Some(9000);
    held(&mut world, "0-2", "1", "2");
    world.settle();
    assert_eq!(waits_for(&world), "the jobs on ranks 1 to end");
    held(&mut world, "0-2", "", "2");
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().closing, Some(Closing::WhenIdle));
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().closing, Some(Closing::WhenIdle), "pods are no reason to go on");
    held(&mut world, "0-2", "0", "2");
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().closing, None, "a job slipped in");
}

#[test]
fn a_member_leaves_beside_single_pods_and_waits_for_gangs_and_host_jobs() {
    for (all, by_host_jobs, by_gangs, want) in
        [("2", "2", "", Want::Run), ("2", "", "2", Want::Run), ("2", "", "", Want::Leave), ("", "", "", Want::Leave)]
    {
        let mut world = idle();
        world.spec.size = Some(2);
        world.settle();
        drained(&mut world, "2");
        held(&mut world, all, by_host_jobs, by_gangs);
        assert_eq!(world.wants("node3"), want, "{all} {by_host_jobs} {by_gangs}");
    }
}

#[test]
fn a_node_with_less_declares_it_only_once_no_pod_has_what_it_lacks() {
    let mut world = idle();
    let before = world.roster.as_ref().unwrap().ranks[&2].resources.clone();
    let facts = world.reports.get_mut("node3").unwrap().facts.as_mut().unwrap();
    facts.resources = Resources { cores: facts.resources.cores - 1, ..facts.resources };
    for (all, has_changed) in [("2", false), ("", true)] {
        world.settle();
        drained(&mut world, "2");
        held(&mut world, all, "", "");
        world.now += 600;
        world.settle();
        assert_eq!(world.roster.as_ref().unwrap().ranks[&2].resources != before, has_changed, "{all:?}");
    }
}

#[test]
fn a_member_whose_kubelet_gets_another_cpu_policy_keeps_what_flux_has_loaded() {
    type Change = fn(&mut World);
    let mut world = idle();
    let revision = world.roster.as_ref().unwrap().ranks[&2].revision;
    let steps: [(&str, Change, bool); 5] = [
        ("static", |world| facts(world).static_cpus = true, true),
        (
            "the host has booted, and its agent has not reported yet",
            |world| world.nodes[2].boot_id = "new".into(),
            true,
        ),
        ("none since then", |world| (facts(world).static_cpus, facts(world).boot_id) = (false, "new".into()), false),
        ("static again", |world| facts(world).static_cpus = true, true),
        ("the Node is gone, and comes back perhaps", |world| drop(world.nodes.remove(2)), true),
    ];
    for (what, change, expected) in steps {
        change(&mut world);
        world.settle();
        let entry = &world.roster.as_ref().unwrap().ranks[&2];
        assert_eq!((entry.static_cpus, entry.revision), (expected, revision), "{what}");
    }
    world.now += 3600;
    world.settle();
    assert!(!world.roster.as_ref().unwrap().ranks[&2].static_cpus, "the rank is a spare");
}

/// What node3 reports, the member of rank 2.
fn facts(world: &mut World) -> &mut Facts {
    world.reports.get_mut("node3").unwrap().facts.as_mut().unwrap()
}

/// The cores that each member declares.
fn cores(world: &World) -> Vec<String> {
    let ranks = world.roster.as_ref().unwrap().ranks.values();
    ranks.map(|entry| entry.resources.as_ref().unwrap().core_ids().to_string()).collect()
}

/// An instance that had pods on before this version: it declares all cores.
fn upgraded() -> World {
    let mut world = idle();
    world.spec.pods.enabled = true;
    world.roster.as_mut().unwrap().settings.pods = true;
    world
}

fn next_epoch(world: &mut World) {
    world.settle();
    close(world);
    world.settle();
}

#[test]
fn an_upgrade_drains_no_node_and_the_next_epoch_declares_only_whole_cores() {
    let mut world = upgraded();
    world.add("node4", 4);
    world.passed("node4", 2);
    let began = Roster::parse(&serde_json::to_string(world.roster.as_ref().unwrap()).unwrap()).unwrap();
    assert!(began.settings.pods && !began.settings.only_whole_cores, "an older version knew no such setting");
    world.settle();
    assert_eq!(cores(&world), ["0-1"; 4]);
    assert!(world.roster.as_ref().unwrap().ranks.values().all(|entry| entry.drain.is_none()));
    assert_eq!(world.restart(), Restart::None);
    world.spec.broker.port = Some(9000);
    next_epoch(&mut world);
    assert_eq!(cores(&world), ["1"; 4]);
}

#[test]
fn going_back_declares_what_the_settings_before_declared() {
    let switched_on = |world: &mut World| world.spec.pods.enabled = true;
    let another_port = |world: &mut World| world.spec.broker.port = Some(9000);
    for (mut world, change) in [(idle(), switched_on as fn(&mut World)), (upgraded(), another_port)] {
        world.spec.upgrade.on_failure = OnFailure::GoBack;
        change(&mut world);
        next_epoch(&mut world);
        assert_eq!(cores(&world), ["1"; 3]);
        let lead = world.reports.get_mut("node1").unwrap();
        (lead.phase, lead.start_failing_epoch) = (NodePhase::Failed, Some(2));
        world.settle();
        assert_eq!((world.roster.as_ref().unwrap().epoch, cores(&world)), (3, vec!["0-1".to_owned(); 3]));
    }
}
