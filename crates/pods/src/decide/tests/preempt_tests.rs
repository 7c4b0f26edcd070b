//! Gangs of lower priority make way for one that has waited for long.

use broker::job_id::JobId;
use serde_json::json;

use super::{bed::Bed, gang, with_job};
use crate::{
    action::Action,
    facts::{KubeJob, SuspendReason},
    fixture::{annotated, kube_job, of_job, plan, pod},
    pod::{Phase, PodView},
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

/// Names of the pods that are being deleted.
fn deleted(bed: &Bed) -> Vec<String> {
    bed.pods.values().filter(|pod| pod.is_deleting()).map(|pod| pod.name.clone()).collect()
}

/// What is deleted ends.
fn end_deleted(bed: &mut Bed) {
    for name in deleted(bed) {
        bed.end(&name, Phase::Failed);
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
fn what_a_budget_protects_stays_and_another_gang_makes_way_soon() {
    let names: Vec<_> = ('a'..='l').map(String::from).collect();
    let mut bed = bed(&[12]);
    let single = |name: &String| GangId {
        kind: GangKind::Pod,
        namespace: "default".into(),
        name: name.clone(),
        uid: format!("uid-{name}"),
    };
    for name in &names {
        make(&mut bed, name, 1, 0);
    }
    bed.protects = names[1..].iter().map(single).collect();
    make(&mut bed, "urgent", 1, 100);
    bed.pass(AFTER + 11 * 15 * SECOND - SECOND);
    assert_eq!((gone(&bed), deleted(&bed)), (names[1..].iter().rev().cloned().collect(), vec![]));
    bed.pass(SECOND);
    assert_eq!(deleted(&bed), ["a"]);
    // It takes what comes free otherwise meanwhile.
    bed.end("l", Phase::Succeeded);
    bed.settle();
    assert!(bed.bound().contains(&"urgent@node0".to_owned()));
}

#[test]
fn ranks_that_get_no_jobs_are_neither_free_nor_made_free() {
    let mut bed = bed(&[1, 1, 1]);
    for name in ["a", "b"] {
        make(&mut bed, name, 1, 0);
    }
    bed.down = [1, 2].into();
    make(&mut bed, "urgent", 1, 100);
    bed.pass(AFTER);
    assert_eq!(gone(&bed), ["a"], "node1 is down with the younger one, and so is node2");
}

#[test]
fn what_made_way_does_not_take_its_cores_back_though_its_pods_are_made_again_at_once() {
    let mut bed = bed(&[2]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.run_all();
    bed.remakes = true;
    make(&mut bed, "urgent", 1, 100);
    bed.pass(AFTER);
    assert_eq!(deleted(&bed), ["g0", "g1"]);
    bed.end("g0", Phase::Failed);
    bed.vanish("g0");
    bed.pass(SECOND);
    end_deleted(&mut bed);
    assert_eq!(bed.bound(), ["urgent@node0"]);
    bed.end("urgent", Phase::Succeeded);
    bed.settle();
    assert_eq!(bed.bound(), ["g0-next@node0", "g1-next@node0"]);
}

#[test]
fn what_made_way_and_runs_elsewhere_by_now_is_completed_there() {
    let mut bed = bed(&[2, 2]);
    bed.submit_host_job_on("1", 2);
    bed.create(gang("g", 2));
    bed.settle();
    bed.run_all();
    bed.remakes = true;
    make(&mut bed, "urgent", 2, 100);
    bed.pass(AFTER);
    assert_eq!(deleted(&bed), ["g0", "g1"]);
    bed.end("g0", Phase::Failed);
    bed.cancel(JobId(1), "");
    bed.settle();
    bed.end("urgent", Phase::Succeeded);
    bed.settle();
    assert_eq!(bed.bound(), ["g0-next@node1", "g1@node0", "g1-next@node1"]);
    bed.end("g0-next", Phase::Failed);
    bed.create([annotated("third", "g", 2)]);
    bed.settle();
    assert_eq!(bed.bound(), ["g1@node0", "g1-next@node1", "third@node1"], "not on the core that g0 has left");
}

#[test]
fn nothing_makes_way_while_a_job_that_has_the_cores_is_being_ended() {
    let mut bed = bed(&[2]);
    make(&mut bed, "a", 1, 0);
    make(&mut bed, "b", 1, 0);
    make(&mut bed, "urgent", 1, 100);
    bed.pass(AFTER - SECOND);
    bed.set_time(bed.now + SECOND);
    bed.end("a", Phase::Succeeded);
    bed.deliver(usize::MAX, usize::MAX);
    for what in ["its end is decided", "it is under way"] {
        let actions = bed.decide().actions;
        assert!(!actions.iter().any(|action| matches!(action, Action::Preempt { .. })), "{what}: {actions:?}");
        actions.iter().for_each(|action| bed.carry_out(action));
    }
}

/// On node1 there is what one gang ahead waits for, and it can't have it.
#[test]
fn a_gang_ahead_that_waits_for_nodes_of_its_own_keeps_only_these() {
    let mut bed = bed(&[1, 2]);
    bed.seen.targets.get_mut(&1).unwrap().labels.insert("gpu".into(), "yes".into());
    make(&mut bed, "a", 1, 0);
    make(&mut bed, "precious", 1, 1000);
    make(&mut bed, "b", 1, 0);
    let mut ahead = PodView { priority: 100, ..pod("ahead", 2) };
    plan(&mut ahead).rules.selector.insert("gpu".into(), "yes".into());
    bed.create([ahead]);
    make(&mut bed, "urgent", 1, 99);
    bed.pass(2 * AFTER);
    assert_eq!(gone(&bed), ["a"], "not b, the younger one");
}

#[test]
fn a_host_job_that_waits_for_another_job_keeps_nothing() {
    let slot = json!({"type": "slot", "count": 1, "label": "task", "with": [{"type": "core", "count": 1}]});
    for (is_held_up, expected) in [(true, vec!["a"]), (false, vec![])] {
        let mut bed = bed(&[1]);
        make(&mut bed, "a", 1, 0);
        let mut events = vec![json!({"name": "submit", "userid": 0, "urgency": 31})];
        events.extend((!is_held_up).then(|| json!({"name": "depend"})));
        bed.show_job(JobId(99), events.into(), Some(json!({"resources": [slot]})), None, 0);
        make(&mut bed, "urgent", 1, 100);
        bed.pass(AFTER);
        assert_eq!(gone(&bed), expected);
    }
}

#[test]
fn nothing_makes_way_for_a_pod_that_may_not_preempt() {
    let mut bed = bed(&[2]);
    make(&mut bed, "a", 1, 0);
    make(&mut bed, "b", 1, 0);
    let mut pods = gang("g", 2);
    pods.iter_mut().for_each(|pod| pod.priority = 100);
    pods[1].never_preempts = true;
    bed.create(pods);
    bed.pass(10 * AFTER);
    assert_eq!(gone(&bed), [""; 0]);
}

#[test]
fn pods_that_are_only_a_part_of_a_job_stay() {
    let mut bed = bed(&[2]);
    let job = KubeJob { completions: None, ..kube_job("train", 5) };
    bed.seen.facts.jobs.insert(job.uid.clone(), job);
    let hints = gang("g", 2)[0].hints.clone();
    bed.create((0..2).map(|index| PodView { hints: hints.clone(), ..of_job("train", index) }));
    bed.settle();
    bed.run_all();
    make(&mut bed, "urgent", 1, 100);
    bed.pass(AFTER);
    assert_eq!((bed.bound().len(), gone(&bed)), (2, vec![]));
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
fn cores_that_come_free_soon_are_waited_for() {
    let minute = 60 * SECOND;
    for (ends_in, expected) in [(minute, [""; 0].as_slice()), (minute + 1, &["b"]), (i64::MAX / 2, &["b"])] {
        let mut bed = bed(&[2]);
        make(&mut bed, "a", 1, 0);
        make(&mut bed, "b", 1, 0);
        make(&mut bed, "urgent", 1, 100);
        let end = bed.now + AFTER + ends_in;
        bed.change("a", |pod| pod.to_end_by = Some(end));
        bed.pass(AFTER);
        assert_eq!(gone(&bed), expected, "{ends_in}");
    }
}

#[test]
fn a_gang_that_made_way_and_ends_slowly_is_waited_for() {
    let mut bed = bed(&[3]);
    for name in ["a", "b", "c"] {
        make(&mut bed, name, 1, 0);
    }
    make(&mut bed, "urgent", 1, 100);
    bed.pass(AFTER);
    assert_eq!(gone(&bed), ["c"]);
    let end = bed.now + 600 * SECOND;
    bed.change("c", |pod| pod.to_end_by = Some(end));
    bed.pass(300 * SECOND);
    assert_eq!(gone(&bed), ["c"], "no other gang goes for the same one meanwhile");
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
    let job = &bed.seen.facts.jobs["uid-train"];
    assert_eq!((job.is_suspended, job.suspended_for), (true, Some(SuspendReason::Preempted)));
    end_deleted(&mut bed);
    bed.pass(SECOND);
    assert!(!bed.seen.facts.jobs["uid-train"].is_suspended, "it is resumed, and its next pods wait");
    assert_eq!(bed.bound(), ["urgent@node0"]);
}
