//! Gangs of lower priority make way for one that has waited for long.

use super::{bed::Bed, gang, with_job};
use crate::{
    action::Action,
    fixture::pod,
    pod::PodView,
    record::{GangId, GangKind},
    time::SECOND,
};

/// After this, gangs make way.
const AFTER: i64 = 20 * SECOND;

fn bed(nodes: &[u32]) -> Bed {
    let mut bed = Bed::new(nodes);
    bed.seen.settings.preempt_after = Some(AFTER);
    bed
}

/// Makes a pod of this priority a second later than what was made before.
fn make(bed: &mut Bed, name: &str, cores: u64, priority: i32) {
    bed.pass(SECOND);
    bed.create([PodView { priority, ..pod(name, cores) }]);
    bed.settle();
    bed.run_all();
    bed.settle();
}

/// Names of the pods that were made to go, in order.
fn gone(bed: &Bed) -> Vec<String> {
    let names = |action: &Action| match action {
        Action::Preempt { victims, .. } => {
            victims.iter().flat_map(|victim| &victim.pods).map(|pod| pod.name.clone()).collect()
        }
        _ => Vec::new(),
    };
    bed.done.iter().flat_map(names).collect()
}

/// What is deleted ends.
fn end_deleted(bed: &mut Bed) {
    let deleted: Vec<_> = bed.pods.values().filter(|pod| pod.is_deleting()).map(|pod| pod.name.clone()).collect();
    for name in deleted {
        bed.end(&name, crate::pod::Phase::Failed);
        bed.vanish(&name);
    }
    bed.settle();
}

#[test]
fn the_youngest_gangs_of_the_lowest_priority_make_way_and_no_more_than_needed() {
    let mut bed = bed(&[4]);
    for (name, priority) in [("a", 10), ("b", 5), ("c", 5), ("d", 20)] {
        make(&mut bed, name, 1, priority);
    }
    make(&mut bed, "urgent", 1, 100);
    bed.pass(AFTER - 2 * SECOND);
    assert_eq!(gone(&bed), [""; 0]);
    bed.pass(2 * SECOND);
    assert_eq!(gone(&bed), ["c"]);
    end_deleted(&mut bed);
    assert_eq!(bed.bound(), ["a@node0", "b@node0", "d@node0", "urgent@node0"]);
}

#[test]
fn gangs_make_way_as_a_whole_and_only_for_a_higher_priority() {
    let mut bed = bed(&[4]);
    bed.create(gang("g", 4));
    bed.settle();
    bed.run_all();
    make(&mut bed, "equal", 1, 0);
    bed.pass(10 * AFTER);
    assert_eq!(gone(&bed), [""; 0], "an equal priority waits");
    make(&mut bed, "urgent", 1, 100);
    bed.pass(AFTER);
    assert_eq!(gone(&bed), ["g0", "g1", "g2", "g3"]);
}

#[test]
fn nothing_makes_way_in_vain_or_if_that_is_off() {
    for (is_on, cores) in [(false, 1), (true, 4)] {
        let mut bed = bed(&[4]);
        bed.seen.settings.preempt_after = is_on.then_some(AFTER);
        bed.submit_host_job(1, 3);
        bed.settle();
        make(&mut bed, "a", 1, 0);
        make(&mut bed, "urgent", cores, 100);
        bed.pass(10 * AFTER);
        assert_eq!(gone(&bed), [""; 0], "a host job has three cores");
    }
}

#[test]
fn what_a_budget_protects_stays_and_another_gang_makes_way() {
    let mut bed = bed(&[2]);
    make(&mut bed, "a", 1, 0);
    make(&mut bed, "b", 1, 0);
    make(&mut bed, "urgent", 1, 100);
    bed.pass(AFTER - SECOND);
    bed.set_time(bed.now + SECOND);
    let decision = bed.decide();
    let tried = |action: &Action| matches!(action, Action::Preempt { victims, .. } if victims[0].pods[0].name == "b");
    assert!(decision.actions.iter().any(tried), "{:?}", decision.actions);
    let urgent =
        GangId { kind: GangKind::Pod, namespace: "default".into(), name: "urgent".into(), uid: "uid-urgent".into() };
    bed.seen.refused.insert(urgent.clone(), "PodDisruptionBudget web protects others".to_owned());
    bed.decide();
    bed.seen.refused.remove(&urgent);
    bed.pass(60 * SECOND);
    assert_eq!(gone(&bed), ["a"]);
}

#[test]
fn nothing_makes_way_for_a_gang_that_is_held_or_behind_others_or_while_the_queue_is_stopped() {
    let stopped: fn(&mut Bed) = |bed| bed.broker().queues = crate::world::Queues::StoppedByOthers;
    let disabled: fn(&mut Bed) = |bed| bed.broker().accepts_jobs = false;
    let behind: fn(&mut Bed) = |bed| bed.submit_host_job(1, 2);
    for (what, edit) in [("stopped", stopped), ("disabled", disabled), ("behind", behind)] {
        let mut bed = bed(&[2]);
        make(&mut bed, "a", 1, -5);
        make(&mut bed, "b", 1, -5);
        edit(&mut bed);
        bed.settle();
        make(&mut bed, "waits", 1, 0);
        bed.pass(3 * AFTER);
        assert_eq!(gone(&bed), [""; 0], "{what}");
    }
}

#[test]
fn cores_that_come_free_already_are_waited_for() {
    let mut bed = bed(&[2]);
    make(&mut bed, "a", 1, 0);
    make(&mut bed, "b", 1, 0);
    make(&mut bed, "urgent", 1, 100);
    bed.change("a", |pod| pod.to_end_by = Some(i64::MAX));
    bed.pass(10 * AFTER);
    assert_eq!(gone(&bed), [""; 0], "one pod ends slowly");
}

#[test]
fn a_job_that_makes_way_is_suspended_and_begins_again() {
    let mut bed = bed(&[3]);
    with_job(&mut bed, "train", 3);
    bed.settle();
    bed.run_all();
    make(&mut bed, "urgent", 1, 100);
    bed.pass(AFTER);
    assert_eq!(gone(&bed).len(), 3);
    assert!(bed.seen.facts.jobs["uid-train"].is_suspended);
    end_deleted(&mut bed);
    bed.pass(SECOND);
    assert!(!bed.seen.facts.jobs["uid-train"].is_suspended, "it is resumed, and its next pods wait");
    assert_eq!(bed.bound(), ["urgent@node0"]);
}
