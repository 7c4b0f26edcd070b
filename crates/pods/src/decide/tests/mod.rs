//! What the bridge does, rule by rule.

mod avoided_tests;
mod bed;
mod bed_actions;
mod lifecycle_tests;
mod placeholder_tests;
mod preempt_tests;
mod random_tests;
mod recovery_tests;
mod scale_tests;
mod shadow_tests;

use bed::{BEGIN, Bed, FluxJob};
use broker::job_id::JobId;
use k8s_openapi::api::core::v1::Taint;
use serde_json::json;

use crate::{
    action::{Action, Reason},
    fixture::{annotated, kube_job, of_job, plan, pod},
    pod::{FORCED_HOLD, Phase, PodView},
    record::{GangId, GangKind, PodRecord},
    time::SECOND,
    world::{PAUSE, Queues},
};

fn gang(name: &str, size: u32) -> Vec<PodView> {
    (0..size).map(|n| annotated(&format!("{name}{n}"), name, size)).collect()
}

fn gang_id(name: &str) -> GangId {
    GangId { kind: GangKind::Annotated, namespace: "default".into(), name: name.into(), uid: String::new() }
}

fn with_job(bed: &mut Bed, name: &str, size: u32) {
    let job = kube_job(name, size);
    bed.seen.facts.jobs.insert(job.uid.clone(), job);
    bed.create((0..size).map(|index| of_job(name, index)));
}

/// The successor of a Job's pod.
fn again(name: &str, index: u32, count: u32) -> PodView {
    let name = format!("{name}-{index}-{count}");
    PodView { uid: format!("uid-{name}"), name, ..of_job("train", index) }
}

#[test]
fn a_pod_is_bound_to_the_cores_that_its_job_was_given() {
    let mut bed = Bed::new(&[2, 2]);
    bed.create([pod("a", 2), pod("b", 1), pod("c", 1), pod("d", 1)]);
    bed.settle();
    assert_eq!(bed.bound(), ["a@node0", "b@node1", "c@node1"]);
    let record = PodRecord::read(r#"{"cores":"1","id":"f4","rank":1}"#);
    assert!(record.is_some() && bed.pods["uid-c"].record == record);
    bed.end("b", Phase::Succeeded);
    bed.settle();
    assert_eq!(bed.bound(), ["a@node0", "c@node1", "d@node1"]);
}

#[test]
fn a_gang_is_bound_whole_or_not_at_all() {
    let mut bed = Bed::new(&[2, 2]);
    bed.create([pod("a", 1)]);
    bed.settle();
    bed.create(gang("g", 4));
    bed.settle();
    assert_eq!(bed.bound(), ["a@node0"]);
    bed.end("a", Phase::Succeeded);
    bed.settle();
    assert_eq!(bed.bound(), ["g0@node0", "g1@node0", "g2@node1", "g3@node1"]);
    assert_eq!(bed.shown_jobs(), ["default/g 4x1 @0-1"]);
}

#[test]
fn an_incomplete_gang_holds_nothing_and_says_what_is_missing() {
    let mut bed = Bed::new(&[4]);
    bed.create(gang("g", 3).into_iter().take(2));
    bed.settle();
    assert_eq!(bed.shown_jobs(), [] as [&str; 0]);
    assert_eq!(bed.told("g0"), "Incomplete: 2 of 3 pods of gang default/g exist");
    bed.create(gang("g", 3).into_iter().skip(2));
    bed.settle();
    assert_eq!(bed.bound().len(), 3);
}

#[test]
fn a_gang_that_loses_a_pod_before_it_is_bound_holds_nothing() {
    let mut bed = Bed::busy(&[2]);
    bed.create(gang("g", 2));
    bed.settle();
    assert_eq!(bed.shown_jobs(), ["default/g 2x1 waits"]);
    bed.vanish("g1");
    bed.pass(5 * SECOND);
    assert_eq!(bed.shown_jobs(), [] as [&str; 0]);
}

#[test]
fn a_gang_that_changes_back_and_forth_is_submitted_once() {
    let mut bed = Bed::busy(&[2]);
    bed.create(gang("g", 2));
    bed.settle();
    for size in [3, 2].repeat(10) {
        bed.change("g0", |pod| pod.hints.annotated = Some(("g".into(), size.to_string())));
        bed.pass(100);
    }
    let submits = bed.done.iter().filter(|action| matches!(action, Action::Submit(_))).count();
    assert_eq!((submits, bed.shown_jobs()), (1, vec!["default/g 2x1 waits".to_owned()]));
}

#[test]
fn a_gang_that_is_not_whole_any_more_loses_its_place() {
    let mut bed = Bed::busy(&[2]);
    bed.create(gang("g", 2));
    bed.pass(60 * SECOND);
    bed.create([pod("young", 1)]);
    bed.pass(60 * SECOND);
    let resize = |bed: &mut Bed, size: u32| {
        bed.change("g0", |pod| pod.hints.annotated = Some(("g".into(), size.to_string())));
        bed.pass(20 * SECOND);
    };
    resize(&mut bed, 3);
    assert_eq!(bed.told("g0"), "Incomplete: 2 of 3 pods of gang default/g exist");
    resize(&mut bed, 2);
    assert_eq!(bed.shown_jobs(), ["default/young 1x1 waits", "default/g 2x1 waits"]);
    assert!(!bed.done.iter().any(|action| matches!(action, Action::Resubmit { .. })));
}

#[test]
fn growth_is_one_slot_jobs() {
    let mut bed = Bed::new(&[4]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.create([annotated("more", "g", 2)]);
    bed.settle();
    assert_eq!(bed.shown_jobs(), ["default/g 2x1 @0", "default/more 1x1 @0"]);
}

#[test]
fn unlike_pods_hold_what_the_largest_does_and_are_told() {
    let mut bed = Bed::new(&[6]);
    let mut pods = gang("g", 2);
    pods[1].requests.cpu = 3000;
    bed.create(pods);
    bed.settle();
    assert_eq!(bed.shown_jobs(), ["default/g 2x3 @0"]);
    let told = bed.done.iter().filter_map(|action| match action {
        Action::Tell(tell) => Some((tell.reason, tell.pod.name.as_str(), tell.message.as_str())),
        _ => None,
    });
    let told: Vec<_> = told.collect();
    let words = "asks for 1 core and holds 3 cores, as the largest pod of gang default/g does";
    assert_eq!(told, [(Reason::Padded, "g0", words)]);
}

#[test]
fn cores_are_held_until_the_last_pod_has_ended_or_is_gone() {
    let mut bed = Bed::new(&[2]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.run_all();
    let held = |bed: &mut Bed| {
        bed.settle();
        bed.shown_jobs().len()
    };
    bed.end("g0", Phase::Succeeded);
    assert_eq!(held(&mut bed), 1, "a sibling runs");
    bed.change("g1", |pod| pod.to_end_by = Some(BEGIN));
    assert_eq!(held(&mut bed), 1, "a sibling is terminating");
    bed.end("g1", Phase::Failed);
    assert_eq!(held(&mut bed), 0);
}

#[test]
fn a_pod_that_was_deleted_by_force_holds_its_cores_ten_seconds_longer() {
    let mut bed = Bed::new(&[1]);
    bed.create([pod("a", 1)]);
    bed.settle();
    bed.run_all();
    bed.vanish("a");
    bed.pass(FORCED_HOLD - 1);
    assert_eq!(bed.shown_jobs(), ["default/a 1x1 @0"]);
    bed.pass(1);
    assert_eq!(bed.shown_jobs(), [] as [&str; 0]);
}

#[test]
fn nothing_ends_while_the_scheduler_is_offline() {
    let mut bed = Bed::new(&[1]);
    bed.create([pod("a", 1), pod("b", 1)]);
    bed.settle();
    bed.broker().queues = Queues::Offline;
    bed.vanish("b");
    bed.end("a", Phase::Succeeded);
    bed.settle();
    assert_eq!(bed.shown_jobs(), ["default/a 1x1 @0", "default/b 1x1 waits"]);
    bed.broker().queues = Queues::AllStarted;
    bed.settle();
    assert_eq!(bed.shown_jobs(), [] as [&str; 0]);
}

#[test]
fn the_wait_status_says_how_the_pods_ended() {
    for (phases, expected) in [
        ([Some(Phase::Succeeded), Some(Phase::Succeeded)], 0),
        ([Some(Phase::Succeeded), Some(Phase::Failed)], 256),
        ([Some(Phase::Succeeded), None], 15),
    ] {
        let mut bed = Bed::new(&[2]);
        bed.create(gang("g", 2));
        bed.settle();
        for (name, phase) in ["g0", "g1"].into_iter().zip(phases) {
            match phase {
                Some(phase) => bed.end(name, phase),
                None => bed.vanish(name),
            }
        }
        bed.pass(FORCED_HOLD);
        let status = bed.done.iter().find_map(|action| match action {
            Action::Finish { status, .. } => Some(*status),
            _ => None,
        });
        assert_eq!(status, Some(expected), "{phases:?}");
    }
}

#[test]
fn a_job_is_submitted_again_if_it_may_run_elsewhere_by_now() {
    let mut bed = Bed::busy(&[1, 1]);
    let mut picky = pod("a", 1);
    plan(&mut picky).rules.selector.insert("gpu".into(), "yes".into());
    bed.create([picky, pod("b", 1)]);
    bed.settle();
    assert_eq!(
        bed.told("a"),
        "Unschedulable: may run on 0 of 2 nodes: 2 not selected by nodeSelector or node affinity"
    );
    assert_eq!(bed.shown_jobs(), ["default/b 1x1 waits"]);
    bed.seen.targets.get_mut(&0).unwrap().labels.insert("gpu".into(), "yes".into());
    bed.pass(5 * SECOND);
    let permits = |bed: &Bed, rank| -> Vec<bool> {
        let jobs = bed.jobs.values().filter_map(FluxJob::gang_job);
        jobs.map(|job| job.shape.constraint.permits(rank)).collect()
    };
    assert_eq!((permits(&bed, 0), permits(&bed, 1)), (vec![true, true], vec![true, false]));
    let cordon =
        Taint { key: "node.kubernetes.io/unschedulable".into(), effect: "NoSchedule".into(), ..Taint::default() };
    bed.seen.targets.get_mut(&1).unwrap().taints = vec![cordon];
    bed.pass(5 * SECOND);
    assert_eq!(permits(&bed, 1), [false, false]);
}

#[test]
fn the_older_gang_is_first_though_it_was_submitted_again() {
    let mut bed = Bed::busy(&[2, 2]);
    bed.create(gang("old", 2));
    bed.settle();
    bed.set_time(BEGIN + 10 * SECOND);
    bed.create(gang("young", 2));
    let mut urgent = pod("urgent", 1);
    urgent.priority = 1000;
    bed.create([urgent]);
    bed.settle();
    bed.set_time(BEGIN + 20 * SECOND);
    // Somebody resizes it, and so it is submitted again behind the younger one.
    bed.change("old0", |pod| pod.requests.cpu = 1001);
    bed.pass(6 * SECOND);
    assert_eq!(bed.shown_jobs(), ["default/urgent 1x1 waits", "default/old 2x2 waits", "default/young 2x1 waits"]);
}

#[test]
fn a_job_keeps_the_urgency_that_an_administrator_has_given_it() {
    let label = |bed: &mut Bed, rank| {
        bed.seen.targets.get_mut(&rank).unwrap().labels.insert("gpu".into(), "yes".into());
    };
    for urgency in [0, 20] {
        let mut bed = Bed::busy(&[1, 1]);
        label(&mut bed, 0);
        let mut old = pod("old", 1);
        plan(&mut old).rules.selector.insert("gpu".into(), "yes".into());
        bed.create([old]);
        bed.pass(10 * SECOND);
        bed.create([pod("young", 1)]);
        bed.settle();
        for id in [JobId(2), JobId(3)] {
            bed.jobs.get_mut(&id).unwrap().urgency = urgency;
            bed.show_job(id, json!([{"name": "urgency", "urgency": urgency}]), None, None, 0);
        }
        label(&mut bed, 1);
        bed.pass(60 * SECOND);
        assert_eq!(bed.shown_jobs(), ["default/young 1x1 waits", "default/old 1x1 waits"], "not asked for again");
        assert!(bed.jobs.values().skip(1).all(|job| job.urgency == urgency));
    }
}

#[test]
fn a_job_that_an_administrator_has_put_back_moves_no_other_when_it_is_submitted_again() {
    let mut bed = Bed::busy(&[1, 1]);
    let label = |bed: &mut Bed, rank| {
        bed.seen.targets.get_mut(&rank).unwrap().labels.insert("gpu".into(), "yes".into());
    };
    label(&mut bed, 0);
    bed.create([pod("first", 1), pod("second", 1)]);
    let mut high = PodView { priority: 1000, ..pod("high", 1) };
    plan(&mut high).rules.selector.insert("gpu".into(), "yes".into());
    bed.create([high]);
    bed.pass(10 * SECOND);
    let id = *bed.jobs.iter().find(|(_, job)| job.urgency > 16).unwrap().0;
    bed.jobs.get_mut(&id).unwrap().urgency = 16;
    bed.show_job(id, json!([{"name": "urgency", "urgency": 16}]), None, None, 0);
    bed.done.clear();
    label(&mut bed, 1);
    bed.pass(60 * SECOND);
    let again = bed.done.iter().filter(|action| matches!(action, Action::Resubmit { .. })).count();
    assert_eq!(again, 1, "{:?}", bed.shown_jobs());
}

#[test]
fn a_gang_that_could_not_be_submitted_sooner_is_behind_those_that_waited() {
    let mut bed = Bed::busy(&[2, 2]);
    let mut late = pod("late", 1);
    plan(&mut late).rules.selector.insert("gpu".into(), "yes".into());
    bed.create([late]);
    bed.pass(60 * SECOND);
    bed.create([pod("young", 1)]);
    bed.pass(60 * SECOND);
    bed.seen.targets.get_mut(&0).unwrap().labels.insert("gpu".into(), "yes".into());
    bed.pass(60 * SECOND);
    assert_eq!(bed.shown_jobs(), ["default/young 1x1 waits", "default/late 1x1 waits"]);
    assert!(!bed.done.iter().any(|action| matches!(action, Action::Resubmit { .. })), "host jobs would overtake it");
    // A change of its request costs it no place.
    bed.change("young", |pod| pod.requests.cpu = 1001);
    bed.pass(20 * SECOND);
    assert_eq!(bed.shown_jobs(), ["default/young 1x2 waits", "default/late 1x1 waits"]);
}

#[test]
fn a_gang_that_no_node_could_take_for_a_while_keeps_its_place() {
    let mut bed = Bed::busy(&[2, 2]);
    bed.seen.targets.get_mut(&0).unwrap().labels.insert("gpu".into(), "yes".into());
    let mut old = pod("old", 1);
    plan(&mut old).rules.selector.insert("gpu".into(), "yes".into());
    bed.create([old]);
    bed.pass(60 * SECOND);
    bed.create([pod("young", 1)]);
    bed.pass(60 * SECOND);
    bed.seen.targets.get_mut(&0).unwrap().labels.clear();
    bed.pass(600 * SECOND);
    assert_eq!(bed.shown_jobs(), ["default/young 1x1 waits"]);
    bed.seen.targets.get_mut(&0).unwrap().labels.insert("gpu".into(), "yes".into());
    bed.pass(20 * SECOND);
    assert_eq!(bed.shown_jobs(), ["default/old 1x1 waits", "default/young 1x1 waits"]);
}

#[test]
fn gangs_that_flux_has_forgotten_are_queued_by_age() {
    let mut bed = Bed::busy(&[2]);
    for name in ["b", "c", "a"] {
        bed.create([pod(name, 1)]);
        bed.pass(10 * SECOND);
    }
    // Flux has taken them in another order than the bridge has sent them.
    bed.jobs.retain(|id, _| *id == JobId(1));
    bed.seen.jobs.as_mut().unwrap().keep(|id| id == JobId(1));
    let decision = bed.decide();
    decision.actions.iter().rev().for_each(|action| bed.carry_out(action));
    bed.pass(20 * SECOND);
    assert_eq!(bed.shown_jobs(), ["default/b 1x1 waits", "default/c 1x1 waits", "default/a 1x1 waits"]);
}

#[test]
fn a_job_that_is_submitted_again_stays_before_those_of_later_gangs() {
    for is_forgotten in [false, true] {
        let mut bed = Bed::busy(&[1, 1]);
        let label = |bed: &mut Bed, rank, is_there| {
            let labels = &mut bed.seen.targets.get_mut(&rank).unwrap().labels;
            labels.clear();
            labels.extend([("gpu".to_owned(), "yes".to_owned())].into_iter().filter(|_| is_there));
        };
        (0..2).for_each(|rank| label(&mut bed, rank, true));
        let mut old = pod("old", 1);
        plan(&mut old).rules.selector.insert("gpu".into(), "yes".into());
        bed.create([old]);
        bed.pass(10 * SECOND);
        bed.create([pod("young", 1)]);
        bed.pass(10 * SECOND);
        if is_forgotten {
            // The broker has restarted, and lost what was submitted last.
            bed.jobs.remove(&JobId(3));
            bed.seen.jobs.as_mut().unwrap().keep(|id| id != JobId(3));
        }
        label(&mut bed, 1, false);
        let asked = |actions: &[Action]| {
            let name = |action: &Action| match action {
                Action::Submit(request) | Action::Resubmit { request, .. } => Some(request.record.gang.to_string()),
                _ => None,
            };
            actions.iter().filter_map(name).collect::<Vec<_>>()
        };
        let decision = bed.decide();
        let at_once = if is_forgotten { &["default/old"][..] } else { &["default/old", "default/young"] };
        assert_eq!(asked(&decision.actions), at_once);
        decision.actions.iter().for_each(|action| bed.carry_out(action));
        assert_eq!(asked(&bed.decide().actions), [""; 0], "the first one is under way");
        bed.settle();
        assert_eq!(bed.shown_jobs(), ["default/old 1x1 waits", "default/young 1x1 waits"]);
    }
}

#[test]
fn a_job_that_flux_denies_is_not_submitted_again_and_again() {
    let mut bed = Bed::new(&[2]);
    bed.create([pod("a", 1)]);
    bed.deliver(usize::MAX, usize::MAX);
    let submits = |bed: &Bed| bed.done.iter().filter(|action| matches!(action, Action::Submit(_))).count();
    for count in 1..3 {
        bed.decide().actions.iter().for_each(|action| bed.carry_out(action));
        assert_eq!(submits(&bed), count);
        bed.refuse(JobId(count as u64), "alloc denied");
        bed.pass(PAUSE - 1);
        assert_eq!(submits(&bed), count);
        bed.set_time(bed.now + 1);
    }
    assert_eq!(bed.told("a"), "Unschedulable: Flux has ended its job: alloc denied");
}

#[test]
fn a_namespace_that_has_not_opted_in_is_told_by_an_event() {
    let mut bed = Bed::new(&[2]);
    bed.create([PodView { namespace: "other".into(), ..pod("a", 1) }]);
    bed.pass(300 * SECOND);
    assert_eq!((bed.bound().len(), bed.jobs.len(), bed.done.len()), (0, 0, 1));
    assert!(matches!(&bed.done[0], Action::Tell(tell) if tell.reason == Reason::NotOptedIn));
    assert_eq!(bed.told("a"), "", "no condition can be written there");
}

#[test]
fn a_queued_gang_is_told_its_place_and_becomes_unschedulable_for_autoscalers() {
    let mut bed = Bed::busy(&[2]);
    bed.create([pod("a", 1)]);
    for (time, expected) in [
        (4 * SECOND, ""),
        (SECOND, "Queued: waits in Flux's queue as job f3, at place 1"),
        (25 * SECOND, "Unschedulable: waits in Flux's queue as job f3, at place 1"),
    ] {
        bed.pass(time);
        assert_eq!(bed.told("a"), expected);
    }
    let before = bed.done.len();
    bed.pass(600 * SECOND);
    assert_eq!(bed.done.len(), before, "an idle queue costs nothing");
}

#[test]
fn what_was_refused_is_left_alone_and_told_and_the_rest_goes_on() {
    let mut bed = Bed::new(&[2, 2]);
    bed.create(gang("g", 2));
    bed.seen.refused.insert(gang_id("g"), "Flux refuses the job: job submission is disabled".into());
    bed.create([pod("a", 1)]);
    bed.settle();
    assert_eq!((bed.bound(), bed.shown_jobs()), (vec!["a@node0".to_owned()], vec!["default/a 1x1 @0".to_owned()]));
    let told = bed.done.iter().find_map(|action| match action {
        Action::Tell(tell) if tell.pod.name == "g0" => Some((tell.reason, tell.message.as_str())),
        _ => None,
    });
    let words = "Flux refuses the job: job submission is disabled; tried again in a while";
    assert_eq!(told, Some((Reason::Refused, words)));
    bed.seen.refused.clear();
    bed.settle();
    assert_eq!(bed.bound().len(), 3);
}

#[test]
fn a_forged_record_gives_a_pod_none_of_another_pods_cores() {
    let mut bed = Bed::new(&[2]);
    bed.create([pod("a", 1)]);
    bed.settle();
    let record = bed.pods["uid-a"].record.clone();
    let forged = PodView { record, ..pod("b", 1) };
    bed.create([PodView { node: Some("node0".into()), plan: None, ..forged.clone() }, forged_name(forged)]);
    bed.settle();
    // The one that is bound by somebody else is accounted for as what runs; the other one waits for its turn.
    assert_eq!(bed.shown_jobs(), ["default/a 1x1 @0", "default/b 1x1 @0", "default/c 1x1 waits"]);
}

fn forged_name(pod: PodView) -> PodView {
    PodView { name: "c".into(), uid: "uid-c".into(), ..pod }
}

#[test]
fn pods_on_a_node_that_has_left_are_forgotten() {
    let mut bed = Bed::new(&[1, 1]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.run_all();
    bed.seen.targets.remove(&1);
    bed.seen.ranks.remove("node1");
    bed.settle();
    bed.end("g0", Phase::Succeeded);
    bed.pass_long();
    assert_eq!((bed.bound(), bed.shown_jobs().len()), (vec!["g1@node1".to_owned()], 0));
}

/// An administrator deletes a Node, and kubelet makes it again. Its pods run on, if that is soon enough.
#[test]
fn pods_whose_node_object_is_deleted_keep_their_cores_while_the_member_keeps_its_rank() {
    let mut bed = Bed::new(&[1, 1]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.run_all();
    let deleted = bed.seen.targets.remove(&1).unwrap();
    bed.submit_host_job(1, 1);
    bed.settle();
    bed.end("g0", Phase::Succeeded);
    bed.pass_long();
    assert_eq!(bed.shown_jobs(), ["default/g 2x1 @0-1"]);
    // The lead's broker restarts meanwhile, with the job that holds the cores.
    bed.restart_broker(|_| true, false);
    bed.settle();
    assert_eq!(bed.shown_jobs(), ["default/g 2x1 @0-1"]);
    bed.seen.targets.insert(1, deleted);
    bed.settle();
    bed.end("g1", Phase::Succeeded);
    bed.settle();
    assert_eq!(bed.shown_jobs(), [] as [&str; 0]);
}

/// A pod that names its node itself. kubelet refuses such a pod a moment later.
fn huge() -> PodView {
    PodView { is_bridged: false, plan: None, node: Some("node0".into()), ..pod("huge", 1000) }
}

#[test]
fn a_pod_that_names_a_node_without_room_takes_nothing_from_others() {
    let mut bed = Bed::busy(&[1]);
    bed.create([pod("waits", 1)]);
    bed.settle();
    let before = bed.shown_jobs();
    bed.create([huge()]);
    bed.pass_long();
    assert_eq!((bed.shown_jobs(), bed.jobs.len()), (before, 2));
    // Flux gives it cores there, and it is bound.
    bed.cancel(JobId(1), "");
    bed.settle();
    assert_eq!(bed.bound(), ["huge@node0", "waits@node0"]);
}

#[test]
fn a_pod_that_names_its_node_and_is_deleted_by_force_fills_no_node() {
    let mut bed = Bed::new(&[1]);
    bed.create([huge()]);
    bed.vanish("huge");
    bed.create([pod("waits", 1)]);
    bed.settle();
    assert_eq!(bed.bound(), ["waits@node0"]);
}

#[test]
fn gangs_of_nearly_the_same_priority_run_in_its_order() {
    let mut bed = Bed::busy(&[1]);
    for priority in [102, 101, 104, 100, 103] {
        let mut waits = pod(&format!("p{priority}"), 1);
        waits.priority = priority;
        bed.create([waits]);
        bed.settle();
        bed.pass(SECOND);
    }
    bed.pass(10 * SECOND);
    let host_job = *bed.jobs.iter().find(|(_, job)| job.is_host_job()).unwrap().0;
    bed.cancel(host_job, "");
    let mut order = Vec::new();
    for _ in 0..5 {
        bed.settle();
        let runs = bed.pods.values().find(|pod| pod.node.is_some() && !pod.is_terminal()).unwrap().name.clone();
        order.push(runs.clone());
        bed.end(&runs, Phase::Succeeded);
    }
    assert_eq!(order, ["p104", "p103", "p102", "p101", "p100"]);
}
