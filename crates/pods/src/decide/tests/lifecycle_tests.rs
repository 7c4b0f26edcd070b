//! Gangs that are completed, begun again or cancelled.

use broker::job_id::JobId;

use super::{again, bed::Bed, gang, with_job};
use crate::{
    action::{Action, Reason},
    facts::{KubeJob, OfJobSet, SuspendReason, job_sets},
    fixture::{kube_job, of_job},
    pod::{Phase, PodView},
    record::GangKind,
    time::SECOND,
};

#[test]
fn a_refused_pod_is_replaced_on_the_same_cores_and_its_siblings_stay() {
    let mut bed = Bed::new(&[2, 2]);
    with_job(&mut bed, "train", 4);
    bed.settle();
    bed.run_all();
    let place = bed.pods["uid-train-2"].record.clone();
    for count in 1..4 {
        let name = if count == 1 { "train-2".to_owned() } else { format!("train-2-{}", count - 1) };
        bed.change(&name, |pod| (pod.phase, pod.is_refused) = (Phase::Failed, true));
        bed.create([again("train", 2, count)]);
        bed.settle();
        assert_eq!(bed.pods[&format!("uid-train-2-{count}")].record, place);
    }
    assert_eq!(bed.shown_jobs(), ["default/train 4x1 @0-1"]);
    assert!(!bed.done.iter().any(|action| matches!(action, Action::Evict { .. } | Action::SuspendJob { .. })));
}

#[test]
fn a_member_whose_node_is_gone_gets_one_slot_elsewhere() {
    let mut bed = Bed::new(&[1, 1, 1]);
    with_job(&mut bed, "train", 2);
    bed.settle();
    bed.run_all();
    bed.seen.targets.remove(&1);
    bed.end("train-1", Phase::Failed);
    bed.create([again("train", 1, 1)]);
    bed.settle();
    assert_eq!(bed.bound(), ["train-0@node0", "train-1-1@node2"]);
    assert_eq!(bed.shown_jobs(), ["default/train 2x1 @0-1", "default/train 1x1 @2"]);
    bed.end("train-0", Phase::Succeeded);
    bed.end("train-1-1", Phase::Succeeded);
    bed.settle();
    assert_eq!(bed.shown_jobs(), [] as [&str; 0]);
}

#[test]
fn a_replacement_waits_for_a_node_that_is_not_ready_for_a_while() {
    let mut bed = Bed::new(&[1, 1, 1]);
    with_job(&mut bed, "train", 2);
    bed.settle();
    bed.run_all();
    bed.seen.targets.get_mut(&1).unwrap().is_ready = false;
    bed.end("train-1", Phase::Failed);
    bed.create([again("train", 1, 1)]);
    bed.pass(30 * SECOND);
    assert_eq!(bed.bound(), ["train-0@node0"]);
    bed.seen.targets.get_mut(&1).unwrap().is_ready = true;
    bed.settle();
    assert_eq!(bed.bound(), ["train-0@node0", "train-1-1@node1"]);
}

#[test]
fn a_gang_that_cant_be_completed_is_begun_again_by_its_job() {
    let mut bed = Bed::new(&[1, 1]);
    with_job(&mut bed, "train", 2);
    bed.settle();
    bed.change("train-0", |pod| (pod.phase, pod.is_taken_up) = (Phase::Running, true));
    bed.pass(119 * SECOND);
    let suspended = |bed: &Bed| bed.seen.facts.jobs["uid-train"].suspended_for;
    assert_eq!(suspended(&bed), None);
    assert!(bed.done.iter().any(|action| matches!(action, Action::Tell(tell) if tell.reason == Reason::NotStarted)));
    bed.pass(SECOND);
    assert_eq!(suspended(&bed), Some(SuspendReason::Incomplete));
    for name in ["train-0", "train-1"] {
        bed.end(name, Phase::Failed);
        bed.vanish(name);
    }
    bed.settle();
    assert_eq!((suspended(&bed), bed.shown_jobs().len()), (None, 0));
}

fn suspended(bed: &Bed) -> Option<SuspendReason> {
    bed.seen.facts.jobs["uid-train"].suspended_for
}

/// Of the gang of Job `train`, train-1 can never end on its dead node, and the Job has been suspended.
fn with_a_dead_node() -> Bed {
    let mut bed = Bed::new(&[1, 1, 1, 1]);
    with_job(&mut bed, "train", 2);
    bed.settle();
    bed.change("train-0", |pod| (pod.phase, pod.is_taken_up) = (Phase::Running, true));
    bed.pass(120 * SECOND);
    assert_eq!(suspended(&bed), Some(SuspendReason::Incomplete));
    bed.end("train-0", Phase::Failed);
    bed.vanish("train-0");
    bed
}

#[test]
fn a_gang_begins_again_though_a_pod_of_it_can_never_end_on_its_dead_node() {
    let mut bed = with_a_dead_node();
    // train-1 has 30 s to end, and is waited for 60 s longer.
    bed.pass(89 * SECOND);
    assert_eq!(suspended(&bed), Some(SuspendReason::Incomplete));
    bed.pass(2 * SECOND);
    assert_eq!(suspended(&bed), None);
    bed.create((0..2).map(|index| again("train", index, 1)));
    bed.settle();
    assert_eq!(bed.bound(), ["train-0-1@node2", "train-1@node1", "train-1-1@node3"]);
}

#[test]
fn flux_cancel_of_a_gangs_old_job_leaves_its_new_pods_alone() {
    let mut bed = with_a_dead_node();
    bed.pass(91 * SECOND);
    bed.create((0..2).map(|index| again("train", index, 1)));
    bed.pass(10 * SECOND);
    assert_eq!(bed.shown_jobs(), ["default/train 2x1 @0-1", "default/train 2x1 @2-3"]);
    bed.cancel(JobId(1), "");
    bed.pass(10 * SECOND);
    assert_eq!(bed.shown_jobs(), ["default/train 2x1 @2-3", "default/train 1x1 @1"]);
    assert_eq!(suspended(&bed), None);
}

#[test]
fn bare_pods_are_not_deleted_for_a_refusal() {
    let mut bed = Bed::new(&[2]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.change("g0", |pod| (pod.phase, pod.is_refused) = (Phase::Failed, true));
    bed.pass(300 * SECOND);
    assert!(!bed.done.iter().any(|action| matches!(action, Action::Evict { .. })));
}

#[test]
fn a_cancel_by_a_person_evicts_the_gang() {
    let mut bed = Bed::new(&[2]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.run_all();
    bed.cancel(JobId(1), "");
    bed.pass(2 * SECOND - 1);
    assert!(bed.pods.values().all(|pod| !pod.is_deleting()));
    bed.pass(1);
    assert!(bed.pods.values().all(PodView::is_deleting));
    assert_eq!(bed.shown_jobs(), ["default/g 2x1 @0"], "what runs keeps its cores until it has ended");
    ["g0", "g1"].into_iter().for_each(|name| bed.end(name, Phase::Failed));
    bed.pass_long();
    assert_eq!(bed.shown_jobs(), [] as [&str; 0]);
}

#[test]
fn a_cancel_of_a_jobs_gang_suspends_the_job() {
    let mut bed = Bed::new(&[2]);
    with_job(&mut bed, "train", 2);
    bed.settle();
    bed.cancel(JobId(1), "");
    bed.pass(2 * SECOND);
    assert_eq!(bed.seen.facts.jobs["uid-train"].suspended_for, Some(SuspendReason::Canceled));
    ["train-0", "train-1"].into_iter().for_each(|name| bed.vanish(name));
    bed.pass_long();
    assert!(bed.seen.facts.jobs["uid-train"].is_suspended, "a person has to resume it");
}

#[test]
fn a_cancel_of_a_gang_that_is_a_part_of_a_job_evicts_its_pods() {
    let mut bed = Bed::new(&[2]);
    let job = KubeJob { completions: None, ..kube_job("train", 5) };
    bed.seen.facts.jobs.insert(job.uid.clone(), job);
    let hints = gang("g", 2)[0].hints.clone();
    bed.create((0..2).map(|index| PodView { hints: hints.clone(), ..of_job("train", index) }));
    bed.settle();
    bed.cancel(JobId(1), "");
    bed.pass(2 * SECOND);
    assert_eq!(suspended(&bed), None);
    assert!(bed.pods.values().all(PodView::is_deleting));
}

/// A PodGroup is looked up only while pods of it wait.
#[test]
fn a_gang_whose_pod_group_is_not_known_any_more_is_not_the_whole_job() {
    let mut bed = Bed::new(&[2]);
    let job = KubeJob { completions: None, ..kube_job("train", 5) };
    bed.seen.facts.jobs.insert(job.uid.clone(), job);
    bed.seen.facts.pod_groups.insert((GangKind::Coscheduling, "default".into(), "g".into()), Some(2));
    bed.create((0..2).map(|index| {
        let mut pod = of_job("train", index);
        pod.hints.coscheduling = Some("g".into());
        pod
    }));
    bed.settle();
    bed.seen.facts.pod_groups.clear();
    bed.cancel(JobId(1), "");
    bed.pass(2 * SECOND);
    assert_eq!(suspended(&bed), None);
    assert!(bed.pods.values().all(PodView::is_deleting));
}

/// Its controller would resume the Job, and count evicted pods as failures.
#[test]
fn a_cancel_of_a_job_sets_job_leaves_its_pods_alone() {
    for is_gang in [true, false] {
        let mut bed = Bed::new(&[2]);
        let of = OfJobSet { name: "set".into(), uid: "uid-set".into(), attempt: "0".into(), jobs: 1 };
        let job = KubeJob { job_set: Some(of), joins_job_set: is_gang, ..kube_job("train", 2) };
        bed.seen.facts.job_sets = job_sets([&job]);
        bed.seen.facts.jobs.insert(job.uid.clone(), job);
        bed.create((0..2).map(|index| of_job("train", index)));
        bed.settle();
        bed.run_all();
        bed.cancel(JobId(1), "");
        bed.pass(10 * SECOND);
        assert_eq!(suspended(&bed), None);
        assert!(bed.pods.values().all(PodView::stays));
        assert_eq!(bed.held(0), (2, 2), "they have their cores again");
    }
}

#[test]
fn a_job_that_somebody_else_resumes_loses_our_annotation() {
    let mut bed = Bed::new(&[2]);
    with_job(&mut bed, "train", 2);
    bed.settle();
    bed.seen.facts.jobs.get_mut("uid-train").unwrap().suspended_for = Some(SuspendReason::Incomplete);
    bed.settle();
    assert_eq!(suspended(&bed), None);
    bed.seen.facts.jobs.get_mut("uid-train").unwrap().is_suspended = true;
    bed.pass(600 * SECOND);
    assert!(bed.seen.facts.jobs["uid-train"].is_suspended, "that person suspends it again");
}

#[test]
fn a_cancel_of_a_gang_that_waits_removes_it() {
    let mut bed = Bed::busy(&[2]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.cancel(JobId(2), "");
    bed.pass(2 * SECOND);
    assert!(bed.pods.is_empty());
}

#[test]
fn a_cancel_by_a_broker_that_stops_touches_no_pod() {
    for (leaves_run_after, evicted) in [(0, false), (SECOND, false), (3 * SECOND, true)] {
        let mut bed = Bed::new(&[2]);
        bed.create(gang("g", 2));
        bed.settle();
        bed.run_all();
        bed.cancel(JobId(1), "");
        if leaves_run_after > 0 {
            bed.pass(leaves_run_after);
        }
        bed.broker().in_run_since = None;
        bed.pass(10 * SECOND);
        // Another life of the broker does not take it up.
        bed.broker().in_run_since = Some(bed.now);
        bed.pass(10 * SECOND);
        assert_eq!(bed.pods.values().any(PodView::is_deleting), evicted, "left run after {leaves_run_after} ms");
    }
}
