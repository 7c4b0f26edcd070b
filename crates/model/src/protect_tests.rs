use super::*;
use crate::roster::tests::World;
use api::IdSet;

const CLUSTER_AUTOSCALER: &str = PROTECTING[0];
const KARPENTER: &str = PROTECTING[1];

/// Runs jobs on `ranks`.
fn busy(world: &mut World, ranks: &str) {
    world.reports.get_mut("node1").unwrap().allocated = Some(ranks.parse().unwrap());
}

/// Applies the changes of one round, and returns the names of the changed Nodes.
fn settle(world: &mut World, protection: &mut Protection) -> Vec<String> {
    let changes = protection.changes(&world.seen(), world.planned().as_ref());
    apply(world, changes)
}

fn apply(world: &mut World, changes: Vec<NodeChange>) -> Vec<String> {
    for change in &changes {
        let node = world.nodes.iter_mut().find(|node| node.uid == change.uid).unwrap();
        assert_eq!(node.name, change.node);
        for (key, value) in &change.annotations {
            match value {
                Some(value) => drop(node.annotations.insert(key.clone(), value.clone())),
                None => drop(node.annotations.remove(key)),
            }
        }
    }
    changes.into_iter().map(|change| change.node).collect()
}

fn annotate(world: &mut World, node: &str, key: &str, value: &str) {
    let node = world.nodes.iter_mut().find(|view| view.name == node).unwrap();
    node.annotations.insert(key.to_owned(), value.to_owned());
}

fn protected(world: &World) -> Vec<&str> {
    let has = |node: &&crate::eligibility::NodeView| PROTECTING.iter().all(|key| node.annotations.contains_key(*key));
    world.nodes.iter().filter(has).map(|node| node.name.as_str()).collect()
}

#[test]
fn nodes_are_protected_while_jobs_run_and_a_minute_longer_but_the_lead_always() {
    let (mut world, mut protection) = (World::up(4), Protection::default());
    busy(&mut world, "");
    // The lead is protected even without jobs, because pending jobs would be lost with its disk.
    assert_eq!(settle(&mut world, &mut protection), ["node1"]);
    busy(&mut world, "2");
    assert_eq!(settle(&mut world, &mut protection), ["node3"]);
    assert_eq!(protected(&world), ["node1", "node3"]);
    assert_eq!(settle(&mut world, &mut protection), [""; 0], "a second round writes nothing");

    // Jobs that come and go cause no writes.
    for second in 0..200 {
        world.now += 1;
        busy(&mut world, if second % 2 == 0 { "" } else { "2" });
        assert_eq!(settle(&mut world, &mut protection), [""; 0]);
    }
    busy(&mut world, "");
    world.now += REST_SECS - 1;
    assert_eq!(settle(&mut world, &mut protection), [""; 0]);
    world.now += 1;
    assert_eq!(settle(&mut world, &mut protection), ["node3"]);
    assert_eq!(protected(&world), ["node1"]);
    assert!(world.nodes[1..].iter().all(|node| node.annotations.is_empty()));
    assert_eq!(settle(&mut world, &mut protection), [""; 0]);
}

#[test]
fn nodes_of_gangs_are_protected_and_an_autoscaler_sees_single_pods_by_itself() {
    let (mut world, mut protection) = (World::up(4), Protection::default());
    busy(&mut world, "1-3");
    let lead = world.reports.get_mut("node1").unwrap();
    (lead.host_jobs, lead.gangs) = (Some("1".parse().unwrap()), "2".parse().unwrap());
    assert_eq!(settle(&mut world, &mut protection), ["node1", "node2", "node3"]);
}

#[test]
fn in_a_deep_tree_nodes_between_the_lead_and_a_job_are_protected_too() {
    let (mut world, mut protection) = (World::up(8), Protection::default());
    world.roster.as_mut().unwrap().settings.topology = "kary:2".into();
    busy(&mut world, "7");
    assert_eq!(settle(&mut world, &mut protection), ["node1", "node2", "node4", "node8"]);
}

#[test]
fn annotations_of_other_writers_stay_as_they_are() {
    for (key, value) in [(CLUSTER_AUTOSCALER, "true"), (KARPENTER, "true"), (KARPENTER, "false")] {
        let (mut world, mut protection) = (World::up(2), Protection::default());
        annotate(&mut world, "node2", key, value);
        busy(&mut world, "0-1");
        settle(&mut world, &mut protection);
        assert_eq!(protected(&world), ["node1", "node2"]);
        busy(&mut world, "");
        world.now += REST_SECS;
        settle(&mut world, &mut protection);
        assert_eq!(world.nodes[1].annotations, [(key.to_owned(), value.to_owned())].into());
    }
    // Other writers set both annotations: there is nothing to do.
    let (mut world, mut protection) = (World::up(1), Protection::default());
    PROTECTING.iter().for_each(|key| annotate(&mut world, "node1", key, "true"));
    busy(&mut world, "0");
    assert_eq!(settle(&mut world, &mut protection), [""; 0]);
}

#[test]
fn a_value_that_another_writer_changed_stays_and_a_removed_one_comes_back() {
    let (mut world, mut protection) = (World::up(2), Protection::default());
    busy(&mut world, "1");
    settle(&mut world, &mut protection);
    annotate(&mut world, "node2", KARPENTER, "false");
    world.nodes[1].annotations.remove(CLUSTER_AUTOSCALER);
    assert_eq!(settle(&mut world, &mut protection), ["node2"]);
    assert_eq!(protected(&world), ["node1", "node2"]);
    busy(&mut world, "");
    world.now += REST_SECS;
    settle(&mut world, &mut protection);
    assert_eq!(world.nodes[1].annotations, [(KARPENTER.to_owned(), "false".to_owned())].into());
}

#[test]
fn no_annotation_is_removed_while_it_is_unknown_what_runs() {
    let (mut world, mut protection) = (World::up(3), Protection::default());
    busy(&mut world, "1");
    settle(&mut world, &mut protection);
    world.now += 10 * REST_SECS;
    let lead = world.reports["node1"].clone();
    let silent = FluxNodeStatus { allocated: None, ..lead.clone() };
    let offline = FluxNodeStatus { phase: api::NodePhase::Offline, allocated: Some(IdSet::default()), ..lead.clone() };
    for report in [FluxNodeStatus::default(), silent, offline] {
        world.reports.insert("node1".into(), report);
        assert_eq!(settle(&mut world, &mut protection), [""; 0]);
    }
    world.reports.insert("node1".into(), lead);
    let roster = world.roster.take();
    assert_eq!(settle(&mut world, &mut protection), [""; 0]);
    world.roster = roster;
    // A new planner doesn't know since when a node has been idle.
    let mut another = Protection::default();
    busy(&mut world, "");
    assert_eq!(settle(&mut world, &mut another), [""; 0]);
    world.now += REST_SECS;
    assert_eq!(settle(&mut world, &mut another), ["node2"]);
}

#[test]
fn if_protection_is_switched_off_all_own_annotations_go_at_once() {
    let (mut world, mut protection) = (World::up(2), Protection::default());
    busy(&mut world, "0-1");
    settle(&mut world, &mut protection);
    world.spec.autoscaling.protect = false;
    assert_eq!(settle(&mut world, &mut protection), ["node1", "node2"]);
    assert_eq!(protected(&world), [""; 0]);
    assert_eq!(settle(&mut world, &mut protection), [""; 0]);
}

#[test]
fn at_the_end_all_own_annotations_go_except_on_hosts_that_still_run_jobs() {
    for (policy, ranks, kept) in [
        (RunningJobs::Wait, "", &[][..]),
        (RunningJobs::Wait, "1", &["node1", "node2"]),
        (RunningJobs::Cancel, "1", &[]),
    ] {
        let (mut world, mut protection) = (World::up(2), Protection::default());
        world.spec.uninstall.running_jobs = policy.clone();
        busy(&mut world, "0-1");
        settle(&mut world, &mut protection);
        busy(&mut world, ranks);
        let changes = protection.at_the_end(&world.seen().nodes, &world.seen().reports);
        apply(&mut world, changes);
        assert_eq!(protected(&world), kept, "{policy:?} {ranks}");
        // Now the hosts are clean.
        let changes = protection.at_the_end(&world.seen().nodes, &Reports::new());
        apply(&mut world, changes);
        assert_eq!(protected(&world), [""; 0]);
    }
}

#[test]
fn at_the_end_the_jobs_of_each_host_that_reports_rank_0_count() {
    for idle in ["node1", "node2"] {
        let (mut world, mut protection) = (World::up(2), Protection::default());
        world.spec.uninstall.running_jobs = RunningJobs::Wait;
        busy(&mut world, "0-1");
        settle(&mut world, &mut protection);
        let lead = world.reports["node1"].clone();
        world.reports.insert("node2".to_owned(), lead);
        world.reports.get_mut(idle).unwrap().allocated = Some(IdSet::default());
        let changes = protection.at_the_end(&world.seen().nodes, &world.seen().reports);
        apply(&mut world, changes);
        assert_eq!(protected(&world), ["node1", "node2"], "{idle} reports no jobs");
    }
}
