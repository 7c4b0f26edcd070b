//! What pods of other schedulers use is held by shadow jobs.

use api::IdSet;
use serde_json::json;

use super::{bed::Bed, gang, gang_id};
use crate::{
    action::{Action, ShadowStep},
    decide::{Recovery, Standing},
    fixture::{annotated, bound, foreign, pod},
    jobspec::USED_CORES_URGENCY,
    pod::{FORCED_HOLD, Phase, PodView},
    requests::Requests,
    shadow::Shadow,
    time::SECOND,
    world::{PAUSE, Queues},
};

/// The cores that other pods use, and how many of them other jobs have, as it is reported.
fn reported(bed: &mut Bed) -> (u32, u32) {
    bed.decide().report.accounts.of_other_pods()
}

/// A node of four cores, on which a pod of another scheduler requests so many thousandths of a core.
fn beside_web(milli: u64) -> Bed {
    let mut bed = Bed::new(&[4]);
    bed.create([foreign("web", milli)]);
    bed.settle();
    bed
}

/// How many cores each shadow job has asked for, in the order in which they were submitted.
fn sizes(bed: &Bed) -> Vec<u32> {
    bed.jobs.values().filter_map(|job| Some(Shadow::read(&job.jobspec)?.cores)).collect()
}

fn is_submission(action: &Action) -> bool {
    matches!(action, Action::Shadow(ShadowStep { submit, .. }) if !submit.is_empty())
}

/// The ranks of each shadow job and how many cores of each it asked for, in the order in which they were submitted.
fn shapes(bed: &Bed) -> Vec<String> {
    let shadows = bed.jobs.values().filter_map(|job| Shadow::read(&job.jobspec));
    shadows.map(|shadow| format!("{}x{}", shadow.nodes.into_keys().collect::<IdSet>(), shadow.cores)).collect()
}

/// So many nodes of four cores, each with a pod of another scheduler that uses two.
fn beside_web_on_all(nodes: u32) -> Bed {
    let mut bed = Bed::new(&vec![4; nodes as usize]);
    bed.create((0..nodes).map(|node| web_on(node, 2500)));
    bed.settle();
    bed
}

fn web_on(node: u32, milli: u64) -> PodView {
    PodView { node: Some(format!("node{node}")), ..foreign(&format!("web{node}"), milli) }
}

#[test]
fn ranks_whose_pods_use_equally_many_cores_share_a_job() {
    let bed = beside_web_on_all(130);
    assert_eq!(shapes(&bed), ["0-127x2", "128-129x2"]);
    assert!((0..130).all(|rank| bed.shadows(rank) == (2, 0)));
}

#[test]
fn a_rank_whose_pods_use_something_else_leaves_the_job_that_it_shared() {
    let mut bed = beside_web_on_all(6);
    bed.change("web1", |pod| pod.requests.cpu = 3500);
    bed.settle();
    assert_eq!(shapes(&bed), ["0-5x2", "1x1"], "more is one more job");
    bed.change("web1", |pod| pod.requests.cpu = 2500);
    bed.settle();
    assert_eq!(shapes(&bed), ["0-5x2"], "less ends that");
    bed.end("web4", Phase::Succeeded);
    bed.change("web2", |pod| pod.requests.cpu = 1500);
    bed.change("web3", |pod| pod.requests.cpu = 1500);
    bed.settle();
    let mut shapes = shapes(&bed);
    shapes.sort();
    assert_eq!(shapes, ["0-1,5x2", "2-3x1"]);
    assert_eq!((0..6).map(|rank| bed.shadows(rank)).collect::<Vec<_>>(), [2, 2, 1, 1, 0, 2].map(|cores| (cores, 0)));
}

#[test]
fn no_other_job_gets_the_cores_of_a_job_that_is_exchanged_because_of_one_of_its_ranks() {
    let mut bed = beside_web_on_all(3);
    bed.submit_host_job(3, 3);
    bed.settle();
    bed.end("web1", Phase::Succeeded);
    bed.settle();
    assert_eq!(
        (shapes(&bed), bed.held(0), bed.held(1)),
        (vec!["0,2x2".to_owned()], (0, 2), (0, 0)),
        "the host job waits"
    );
}

#[test]
fn a_job_that_waits_on_one_rank_costs_no_other_rank_its_cores_if_their_job_is_exchanged() {
    let mut bed = beside_web_on_all(3);
    bed.submit_host_job(3, 2);
    bed.settle();
    bed.submit_host_job(3, 2);
    bed.change("web2", |pod| pod.requests.cpu = 3500);
    bed.settle();
    assert_eq!((bed.shadows(2), bed.held(0)), ((2, 1), (0, 4)), "the first host job has the other cores");
    bed.change("web0", |pod| pod.requests.cpu = 1500);
    bed.settle();
    assert_eq!((0..3).map(|rank| bed.shadows(rank)).collect::<Vec<_>>(), [(1, 0), (2, 0), (2, 1)]);
    assert_eq!((bed.held(1), bed.held(2)), ((0, 4), (0, 4)), "the second one waits");
}

#[test]
fn a_rank_that_is_drained_or_down_shares_no_job() {
    let mut bed = Bed::new(&[4; 4]);
    bed.down = [1].into();
    bed.create((0..4).map(|node| web_on(node, 2500)));
    bed.settle();
    assert_eq!((0..4).map(|rank| bed.shadows(rank)).collect::<Vec<_>>(), [(2, 0), (0, 2), (2, 0), (2, 0)]);
    bed.down.clear();
    bed.settle();
    assert_eq!(bed.shadows(1), (2, 0));
}

#[test]
fn a_rank_that_goes_down_while_its_shared_job_waits_holds_nobody_up() {
    let mut bed = Bed::new(&[4; 4]);
    bed.create((0..4).map(|node| web_on(node, 2500)));
    bed.deliver(usize::MAX, usize::MAX);
    let decision = bed.decide();
    bed.down = [1].into();
    decision.actions.iter().for_each(|action| bed.carry_out(action));
    bed.settle();
    assert_eq!((0..4).map(|rank| bed.shadows(rank)).collect::<Vec<_>>(), [(2, 0), (0, 2), (2, 0), (2, 0)]);
}

#[test]
fn a_rank_that_flux_gives_to_nobody_keeps_those_that_share_its_job_for_half_a_minute_only() {
    let mut bed = Bed::new(&[4; 4]);
    bed.closed = [1].into();
    bed.create((0..4).map(|node| web_on(node, 2500)));
    bed.settle();
    assert_eq!((shapes(&bed), bed.shadows(0)), (vec!["0-3x2".to_owned()], (0, 2)));
    bed.pass(29 * SECOND);
    assert_eq!(bed.shadows(0), (0, 2));
    bed.pass(SECOND);
    assert_eq!((0..4).map(|rank| bed.shadows(rank)).collect::<Vec<_>>(), [(2, 0), (0, 2), (2, 0), (2, 0)]);
    // A stopped queue gives out nothing, and that is no reason to ask for each rank by itself.
    let mut bed = Bed::new(&[4; 4]);
    bed.broker().queues = Queues::StoppedByOthers;
    bed.create((0..4).map(|node| web_on(node, 2500)));
    bed.pass(120 * SECOND);
    bed.broker().queues = Queues::AllStarted;
    bed.settle();
    assert_eq!((shapes(&bed), bed.shadows(0)), (vec!["0-3x2".to_owned()], (2, 0)));
}

#[test]
fn a_shadow_job_that_somebody_has_held_or_put_behind_others_is_asked_for_again() {
    for urgency in [0, 16] {
        let mut bed = Bed::busy(&[4; 3]);
        bed.create((0..3).map(|node| web_on(node, 2500)));
        bed.settle();
        let waiting: Vec<_> = bed.jobs.iter().filter(|(_, job)| job.slots.is_none()).map(|(id, _)| *id).collect();
        for id in &waiting {
            bed.jobs.get_mut(id).unwrap().urgency = urgency;
            bed.show_job(*id, json!([{"name": "urgency", "urgency": urgency, "userid": 0}]), None, None, 0);
        }
        bed.pass(5 * SECOND);
        assert!(!waiting.is_empty() && waiting.iter().all(|id| !bed.jobs.contains_key(id)), "{urgency}");
        let of_shadows = bed.jobs.values().filter(|job| Shadow::read(&job.jobspec).is_some());
        assert!(of_shadows.clone().count() > 0 && of_shadows.clone().all(|job| job.urgency == USED_CORES_URGENCY));
        assert!((0..3).all(|rank| bed.shadows(rank) == (0, 2)), "{urgency}");
    }
}

#[test]
fn a_job_that_is_faster_on_one_rank_holds_no_other_rank_up() {
    let mut bed = Bed::new(&[4; 3]);
    bed.create((0..3).map(|node| web_on(node, 3500)));
    bed.deliver(usize::MAX, usize::MAX);
    let decision = bed.decide();
    bed.submit_host_job(1, 2);
    bed.schedule();
    decision.actions.iter().for_each(|action| bed.carry_out(action));
    bed.settle();
    assert_eq!((0..3).map(|rank| bed.shadows(rank)).collect::<Vec<_>>(), [(2, 1), (3, 0), (3, 0)]);
}

#[test]
fn a_shared_job_that_flux_refuses_is_submitted_again_rank_by_rank_at_once() {
    for is_refused_at_once in [false, true] {
        let mut bed = Bed::new(&[4; 3]);
        if is_refused_at_once {
            bed.seen.refused_together = [0, 1, 2].into();
        }
        bed.create((0..3).map(|node| web_on(node, 2500)));
        bed.settle();
        if !is_refused_at_once {
            let job = *bed.jobs.keys().next().unwrap();
            bed.refuse(job, "unsatisfiable");
            bed.settle();
        }
        assert_eq!(shapes(&bed), ["0x2", "1x2", "2x2"]);
    }
}

#[test]
fn a_rank_that_is_drained_leaves_the_job_that_it_shared_before_it_is_taken_out_of_the_instance() {
    let mut bed = beside_web_on_all(3);
    assert_eq!(shapes(&bed), ["0-2x2"]);
    (bed.seen.drained, bed.down) = ([1].into_iter().collect(), [1].into());
    bed.settle();
    let mut found = shapes(&bed);
    found.sort();
    assert_eq!(found, ["0,2x2", "1x2"]);
    assert_eq!((0..3).map(|rank| bed.shadows(rank)).collect::<Vec<_>>(), [(2, 0), (0, 2), (2, 0)]);
}

#[test]
fn a_member_that_has_gone_leaves_the_job_that_it_shared() {
    let mut bed = beside_web_on_all(3);
    bed.seen.targets.remove(&1).unwrap();
    bed.seen.ranks.remove("node1");
    bed.settle();
    assert_eq!(shapes(&bed), ["0,2x2"]);
}

#[test]
fn shared_jobs_come_first_after_a_restart_of_the_broker() {
    for (what, keeps, cancels) in [("power", false, false), ("kill", true, false), ("term", false, true)] {
        let mut bed = beside_web_on_all(3);
        bed.restart_broker(|_| keeps, cancels);
        bed.submit_host_job(3, 3);
        bed.end("web2", Phase::Succeeded);
        bed.settle();
        assert_eq!((bed.broker().queues, shapes(&bed)), (Queues::AllStarted, vec!["0-1x2".to_owned()]), "{what}");
        assert_eq!((bed.held(0), bed.held(1), bed.held(2)), ((0, 2), (0, 2), (0, 0)), "{what}: the host job waits");
    }
}

#[test]
fn a_shared_job_of_the_brokers_earlier_life_stays_until_all_of_its_ranks_are_replaced() {
    let mut bed = beside_web_on_all(3);
    bed.restart_broker(|_| true, false);
    bed.seen.refused_ranks = [1].into();
    bed.settle();
    assert_eq!(bed.broker().queues, Queues::AllStarted);
    assert!((0..3).all(|rank| bed.shadows(rank).0 >= 2), "{:?}", shapes(&bed));
    bed.seen.refused_ranks.clear();
    bed.settle();
    assert_eq!((0..3).map(|rank| bed.shadows(rank)).collect::<Vec<_>>(), [(2, 0); 3]);
}

#[test]
fn cores_that_other_pods_use_are_given_to_nobody_else() {
    let mut bed = Bed::new(&[4, 4]);
    bed.create([foreign("system", 400), foreign("web", 2000)]);
    bed.settle();
    assert_eq!((bed.shadows(0), bed.shadows(1), reported(&mut bed)), ((2, 0), (0, 0), (2, 0)));
    bed.create([pod("a", 3)]);
    bed.settle();
    assert_eq!(bed.bound(), ["a@node1", "system@node0", "web@node0"]);
    bed.create([foreign("db", 1000)]);
    bed.settle();
    assert_eq!((bed.shadows(0), sizes(&bed)), ((3, 0), vec![2, 1]), "what grows is one more job");
    assert_eq!(bed.jobs.values().filter(|job| job.urgency == USED_CORES_URGENCY).count(), 2);
    bed.end("web", Phase::Succeeded);
    bed.settle();
    assert_eq!((bed.shadows(0), sizes(&bed)), ((1, 0), vec![1]), "the job of that size has ended");
    bed.vanish("system");
    bed.vanish("db");
    bed.settle();
    assert_eq!(bed.shadows(0), (1, 0), "deleted by force, they may run on");
    bed.pass(FORCED_HOLD);
    assert_eq!((bed.shadows(0), reported(&mut bed)), ((0, 0), (0, 0)));
}

#[test]
fn what_fits_on_the_cores_that_flux_does_not_have_is_held_by_no_job() {
    let mut bed = Bed::new(&[3]);
    // Flux leaves one of four cores to the system.
    bed.seen.targets.get_mut(&0).unwrap().allocatable.cpu = 3940;
    bed.create([foreign("system", 940)]);
    bed.settle();
    assert_eq!(bed.shadows(0), (0, 0));
    bed.create([foreign("small", 10)]);
    bed.settle();
    assert_eq!(bed.shadows(0), (1, 0));
}

#[test]
fn a_pod_of_the_bridge_that_is_resized_has_the_difference_held_too() {
    let mut bed = Bed::new(&[4]);
    bed.create([pod("a", 1)]);
    bed.settle();
    bed.change("a", |pod| pod.requests.cpu = 2600);
    bed.settle();
    assert_eq!((bed.shadows(0), bed.shown_jobs()), ((2, 0), vec!["default/a 1x1 @0".to_owned()]));
    bed.restart_broker(|_| true, false);
    bed.settle();
    assert_eq!((bed.shadows(0), bed.shown_jobs()), ((0, 0), vec!["default/a 1x3 @0".to_owned()]));
}

#[test]
fn what_a_pod_in_anothers_slot_asks_for_later_is_held_too() {
    let mut bed = Bed::new(&[4]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.run_all();
    bed.end("g1", Phase::Failed);
    bed.create([PodView { hints: bed.pods["uid-g0"].hints.clone(), ..pod("successor", 1) }]);
    bed.settle();
    bed.run_all();
    assert_eq!(bed.bound(), ["g0@node0", "successor@node0"]);
    bed.change("successor", |pod| pod.requests.cpu = 3000);
    bed.settle();
    assert_eq!((bed.held(0), bed.shadows(0)), ((2, 4), (2, 0)), "no job lists the successor");
}

#[test]
fn pods_of_flux_that_request_little_take_no_cores_from_other_pods() {
    for milli in [0, 50, 750] {
        let mut bed = beside_web(2500);
        bed.create(["a", "b"].map(|name| {
            let mut small = pod(name, 1);
            small.requests.cpu = milli;
            small
        }));
        bed.settle();
        bed.submit_host_job(1, 1);
        bed.settle();
        assert_eq!((bed.held(0), bed.shadows(0), reported(&mut bed)), ((2, 4), (2, 0), (2, 0)), "{milli}");
    }
}

/// A pod that says that it was bound. It requests nothing, and a pin would hold a core for it.
fn forged() -> PodView {
    let requests = Requests::default();
    let running = PodView { requests, phase: Phase::Running, is_taken_up: true, ..annotated("forged", "f", 2) };
    PodView { bound: Some(0), ..bound(running) }
}

#[test]
fn a_gang_whose_pin_is_refused_takes_no_cores_from_other_pods() {
    let mut bed = beside_web(3500);
    bed.seen.refused.insert(gang_id("f"), "its job is refused".to_owned());
    bed.create([forged()]);
    bed.settle();
    assert_eq!((bed.shadows(0), bed.shown_jobs()), ((3, 0), vec![]));
}

#[test]
fn a_gang_that_comes_during_a_recovery_takes_no_cores_from_other_pods() {
    let mut bed = beside_web(3500);
    bed.restart_broker(|_| true, false);
    bed.decide();
    bed.create([forged()]);
    bed.deliver(usize::MAX, usize::MAX);
    while bed.broker().queues == Queues::Stopped {
        bed.step();
    }
    assert_eq!(bed.shadows(0), (0, 3), "they are first in the queue");
}

#[test]
fn a_shadow_job_too_large_is_exchanged_and_no_other_job_gets_its_cores() {
    let mut bed = beside_web(3500);
    bed.submit_host_job(1, 2);
    bed.settle();
    assert_eq!((bed.shadows(0), bed.held(0)), ((3, 0), (0, 3)), "the host job waits");
    bed.change("web", |pod| pod.requests.cpu = 2500);
    bed.settle();
    assert_eq!((bed.shadows(0), sizes(&bed), bed.held(0)), ((2, 0), vec![2], (0, 4)), "resized in place");
}

#[test]
fn what_jobs_have_already_is_waited_for_core_by_core_and_nothing_is_killed() {
    let mut bed = Bed::new(&[4]);
    bed.submit_host_job(1, 1);
    bed.submit_host_job(1, 2);
    bed.settle();
    bed.create([foreign("web", 3500)]);
    bed.settle();
    assert_eq!((bed.shadows(0), sizes(&bed), reported(&mut bed)), ((1, 2), vec![1, 1, 1], (3, 2)));
    bed.create([pod("a", 1)]);
    bed.settle();
    let hosts: Vec<_> = bed.jobs.iter().filter(|(_, job)| job.is_host_job()).map(|(id, _)| *id).collect();
    assert_eq!(hosts.len(), 2);
    bed.cancel(hosts[0], "");
    bed.settle();
    assert_eq!((bed.shadows(0), reported(&mut bed)), ((2, 1), (3, 1)), "before the pod that waits");
    bed.cancel(hosts[1], "");
    bed.settle();
    assert_eq!((bed.shadows(0), reported(&mut bed)), ((3, 0), (3, 0)));
}

#[test]
fn what_is_free_is_held_before_what_has_to_be_waited_for() {
    let mut bed = Bed::new(&[4]);
    bed.submit_host_job(1, 2);
    bed.settle();
    bed.create([foreign("web", 4500)]);
    bed.settle();
    assert_eq!((bed.shadows(0), sizes(&bed)), ((2, 2), vec![2, 1, 1]));
}

#[test]
fn an_overlap_of_two_seconds_is_counted_and_reported_until_it_ends() {
    let mut bed = Bed::new(&[4, 4]);
    bed.submit_host_job(1, 4);
    bed.settle();
    assert_eq!(bed.decide().report.accounts.overlapping_on, None, "not known yet");
    bed.pass(2 * SECOND);
    bed.create([foreign("web", 2500)]);
    bed.settle();
    let reported = |bed: &mut Bed| {
        let accounts = bed.decide().report.accounts;
        (accounts.overlapping_on.unwrap().to_string(), accounts.overlaps, accounts.longest_overlap)
    };
    assert_eq!(reported(&mut bed), (String::new(), 0, 0));
    bed.pass(2 * SECOND);
    assert_eq!(reported(&mut bed), ("0".to_owned(), 1, 2 * SECOND));
    bed.pass(3 * SECOND);
    bed.end("web", Phase::Succeeded);
    bed.settle();
    assert_eq!(reported(&mut bed), (String::new(), 1, 5 * SECOND));
}

#[test]
fn other_pods_have_their_cores_first_after_a_restart_of_the_broker() {
    for (what, keeps, cancels) in [("power", false, false), ("kill", true, false), ("term", false, true)] {
        let mut bed = Bed::new(&[2, 2]);
        bed.create([foreign("web", 2500)]);
        bed.create(gang("g", 1));
        bed.settle();
        bed.run_all();
        bed.submit_host_job(2, 2);
        bed.settle();
        bed.restart_broker(|_| keeps, cancels);
        // More comes while the queues are stopped.
        bed.create([PodView { node: Some("node1".into()), ..foreign("db", 1500) }]);
        bed.settle();
        assert_eq!(bed.bound(), ["db@node1", "g0@node1", "web@node0"], "{what}");
        assert_eq!((bed.shadows(0), bed.shadows(1)), ((2, 0), (1, 0)), "{what}");
        assert!(
            bed.jobs.values().filter(|job| job.slots.is_some()).all(|job| job.urgency == USED_CORES_URGENCY),
            "{what}"
        );
        assert_eq!(bed.decide().report.standing, Standing::Serving);
    }
}

#[test]
fn a_recovery_ends_though_other_pods_come_and_go() {
    let mut bed = beside_web(1500);
    bed.restart_broker(|_| true, false);
    for milli in [2500, 1500, 3500, 1500, 3500] {
        bed.change("web", |pod| pod.requests.cpu = milli);
        bed.deliver(usize::MAX, usize::MAX);
        bed.step();
    }
    bed.settle();
    assert_eq!((bed.broker().queues, bed.shadows(0)), (Queues::AllStarted, (3, 0)));
}

#[test]
fn a_recovery_ends_though_the_clock_was_set_back_or_the_bridge_connects_again() {
    let mut bed = beside_web(1500);
    bed.restart_broker(|_| true, false);
    bed.broker().in_run_since = Some(bed.now + 3600 * SECOND);
    bed.settle();
    assert_eq!((bed.broker().queues, bed.shadows(0), sizes(&bed)), (Queues::AllStarted, (1, 0), vec![1]));
    bed.restart_broker(|_| true, false);
    bed.step();
    bed.set_time(bed.now + 60 * SECOND);
    bed.broker().in_run_since = Some(bed.now);
    bed.settle();
    let submitted = bed.done.iter().filter(|action| is_submission(action)).count();
    assert_eq!(
        (bed.broker().queues, sizes(&bed), submitted),
        (Queues::AllStarted, vec![1], 3),
        "once for each restart"
    );
}

#[test]
fn a_shadow_job_that_the_scheduler_ended_is_replaced_in_the_same_recovery() {
    let mut bed = beside_web(1500);
    bed.restart_broker(|_| true, false);
    let old = *bed.jobs.keys().next().unwrap();
    bed.fail_to_take_back(old);
    bed.submit_host_job(1, 4);
    bed.settle();
    assert_eq!(
        (bed.broker().queues, bed.shadows(0), bed.held(0)),
        (Queues::AllStarted, (1, 0), (0, 1)),
        "the host job waits"
    );
}

#[test]
fn a_recovery_waits_for_no_rank_whose_shadow_job_is_refused_and_leaves_it_what_it_has() {
    let mut bed = Bed::new(&[4, 4]);
    bed.create([foreign("web", 1500), PodView { node: Some("node1".into()), ..foreign("db", 2500) }]);
    bed.settle();
    bed.restart_broker(|_| true, false);
    bed.seen.refused_ranks = [0].into();
    bed.settle();
    assert_eq!((bed.broker().queues, bed.shadows(0), bed.shadows(1)), (Queues::AllStarted, (1, 0), (2, 0)));
    assert_eq!(bed.jobs.values().filter(|job| job.slots.is_some()).count(), 2);
    bed.change("web", |pod| pod.requests.cpu = 2500);
    bed.settle();
    assert_eq!(bed.shadows(0), (1, 0), "nothing is asked for while the refusal counts");
    bed.seen.refused_ranks.clear();
    bed.settle();
    assert_eq!(bed.shadows(0), (2, 0));
}

#[test]
fn queues_stay_stopped_while_flux_takes_no_jobs_and_other_pods_use_cores_that_no_job_holds() {
    for (keeps, expected) in [(true, Queues::AllStarted), (false, Queues::Stopped)] {
        let mut bed = beside_web(1500);
        bed.restart_broker(|_| keeps, false);
        bed.broker().accepts_jobs = false;
        bed.settle();
        assert_eq!(bed.broker().queues, expected, "the old job is there: {keeps}");
        let is_disabled = bed.decide().report.standing == Standing::Recovering(Recovery::Disabled);
        assert_eq!(is_disabled, !keeps);
        bed.broker().accepts_jobs = true;
        bed.settle();
        assert_eq!((bed.broker().queues, bed.shadows(0)), (Queues::AllStarted, (1, 0)));
    }
}

#[test]
fn a_member_whose_node_is_deleted_keeps_its_shadow_jobs_over_a_restart() {
    let mut bed = beside_web(1500);
    let target = bed.seen.targets.remove(&0).unwrap();
    bed.restart_broker(|_| true, false);
    bed.settle();
    assert_eq!((bed.broker().queues, bed.shadows(0)), (Queues::AllStarted, (1, 0)));
    bed.seen.targets.insert(0, target);
    bed.settle();
    assert_eq!(bed.shadows(0), (1, 0));
}

#[test]
fn shadow_jobs_leave_the_cores_that_pins_ask_for() {
    let mut bed = Bed::new(&[8]);
    bed.seen.targets.get_mut(&0).unwrap().allocatable.cpu = 8900;
    let mut members = gang("g", 2);
    members[1].requests.cpu = 3000;
    bed.create(members);
    bed.settle();
    bed.run_all();
    bed.create([foreign("web", 4900)]);
    bed.settle();
    assert_eq!((bed.held(0), bed.shadows(0)), ((6, 8), (2, 0)), "two slots of three cores");
    bed.restart_broker(|_| false, true);
    while bed.broker().queues == Queues::Stopped {
        bed.step();
        let (held, waits) = bed.shadows(0);
        assert!(held + waits <= 2, "{waits} cores beside a pin of six, on eight");
    }
    bed.settle();
    assert_eq!((bed.held(0), bed.shadows(0)), ((6, 8), (2, 0)));
}

#[test]
fn a_forged_pod_that_is_gone_takes_no_cores_from_other_pods() {
    let mut bed = beside_web(3500);
    assert_eq!(bed.shadows(0), (3, 0));
    bed.create([bound(pod("forged", 4))]);
    bed.settle();
    bed.vanish("forged");
    bed.settle();
    assert_eq!(bed.shadows(0), (3, 0));
}

#[test]
fn a_forged_pod_that_kubelet_has_not_taken_up_takes_no_cores_from_other_pods() {
    let mut bed = beside_web(3500);
    bed.submit_host_job(1, 2);
    bed.create([bound(pod("forged", 4))]);
    bed.settle();
    assert_eq!((bed.shadows(0), bed.held(0)), ((3, 0), (0, 3)), "the host job waits");
}

#[test]
fn the_next_node_of_a_rank_has_shadow_jobs_of_its_own() {
    let mut bed = beside_web(1500);
    let before = *bed.jobs.keys().next().unwrap();
    bed.seen.targets.get_mut(&0).unwrap().node = "next".into();
    bed.seen.ranks = [("next".to_owned(), 0)].into();
    bed.create([PodView { node: Some("next".into()), ..foreign("db", 1500) }]);
    bed.settle();
    assert_eq!(bed.shadows(0), (1, 0));
    assert!(!bed.jobs.contains_key(&before), "that of the node before");
}

#[test]
fn what_is_held_is_given_up_last() {
    let mut bed = Bed::new(&[8]);
    bed.submit_host_job(1, 6);
    bed.submit_host_job(1, 2);
    bed.settle();
    bed.create([foreign("web", 8500)]);
    bed.settle();
    assert_eq!((bed.shadows(0), sizes(&bed)), ((0, 8), vec![1, 2, 4, 1]));
    let small = bed.jobs.iter().filter(|(_, job)| job.is_host_job()).map(|(id, _)| *id).nth(1).unwrap();
    bed.cancel(small, "");
    bed.settle();
    assert_eq!(bed.shadows(0), (2, 6));
    bed.change("web", |pod| pod.requests.cpu = 7500);
    bed.settle();
    assert_eq!(bed.shadows(0), (2, 5));
}

#[test]
fn no_rank_has_many_jobs_that_wait() {
    let mut bed = Bed::new(&[16]);
    bed.submit_host_job(1, 16);
    bed.settle();
    for number in 0..12 {
        bed.create([foreign(&format!("web{number}"), 1000)]);
        bed.settle();
    }
    assert_eq!(bed.shadows(0), (0, 12));
    assert!(sizes(&bed).len() <= 8, "{:?}", sizes(&bed));
}

#[test]
fn no_rank_has_many_jobs_that_wait_though_pods_use_much_more_at_once() {
    let mut bed = Bed::new(&[512]);
    bed.submit_host_job(1, 512);
    bed.settle();
    for (number, milli) in [1000, 1000, 1000, 1000, 1000, 121_000, 256_000].into_iter().enumerate() {
        bed.create([foreign(&format!("web{number}"), milli)]);
        bed.settle();
        assert!(sizes(&bed).len() <= 8, "{:?}", sizes(&bed));
    }
    assert_eq!(bed.shadows(0), (0, 382));
}

#[test]
fn many_shadow_jobs_of_a_rank_are_merged_once_no_job_waits() {
    let mut bed = Bed::new(&[16]);
    bed.submit_host_job(1, 6);
    bed.settle();
    let runs = *bed.jobs.keys().last().unwrap();
    bed.submit_host_job(1, 16);
    for number in 0..8 {
        bed.create([foreign(&format!("web{number}"), 1000)]);
        bed.settle();
    }
    assert_eq!((bed.shadows(0), sizes(&bed).len()), ((8, 0), 8), "not while a job waits");
    let waits = *bed.jobs.keys().find(|id| **id > runs).unwrap();
    bed.cancel(waits, "");
    bed.settle();
    assert_eq!((bed.shadows(0), sizes(&bed)), ((8, 0), vec![8]));
}

#[test]
fn what_is_free_is_held_though_another_job_was_faster() {
    let mut bed = Bed::new(&[4]);
    bed.create([foreign("web", 3500)]);
    bed.deliver(usize::MAX, usize::MAX);
    let decision = bed.decide();
    bed.submit_host_job(1, 2);
    bed.schedule();
    decision.actions.iter().for_each(|action| bed.carry_out(action));
    bed.settle();
    assert_eq!((bed.shadows(0), sizes(&bed)), ((2, 1), vec![2, 1]), "a job for three cores waited");
}

#[test]
fn a_shadow_job_that_flux_refuses_is_submitted_again_after_a_pause() {
    let mut bed = beside_web(1500);
    let job = *bed.jobs.keys().next().unwrap();
    bed.refuse(job, "unsatisfiable");
    bed.settle();
    assert_eq!(bed.shadows(0), (0, 0));
    bed.pass(PAUSE - SECOND);
    assert_eq!(bed.shadows(0), (0, 0));
    bed.pass(SECOND);
    assert_eq!(bed.shadows(0), (1, 0));
}

#[test]
fn a_shadow_job_that_somebody_cancels_is_submitted_again_at_once() {
    let mut bed = beside_web(1500);
    let job = *bed.jobs.keys().next().unwrap();
    bed.cancel(job, "");
    bed.settle();
    assert_eq!(bed.shadows(0), (1, 0));
}

#[test]
fn a_node_that_can_not_be_read_keeps_its_shadow_jobs_and_a_former_member_has_none() {
    let mut bed = Bed::new(&[4, 4]);
    bed.create([foreign("web", 1500)]);
    bed.settle();
    let target = bed.seen.targets.remove(&0).unwrap();
    bed.settle();
    assert_eq!(bed.shadows(0), (1, 0));
    bed.seen.ranks.remove(&target.node);
    bed.settle();
    assert_eq!(bed.shadows(0), (0, 0));
}

#[test]
fn nothing_of_a_shadow_job_ends_while_the_scheduler_is_offline() {
    let mut bed = beside_web(1500);
    bed.broker().queues = Queues::Offline;
    bed.end("web", Phase::Succeeded);
    bed.settle();
    assert_eq!(bed.shadows(0), (1, 0));
    bed.broker().queues = Queues::AllStarted;
    bed.settle();
    assert_eq!(bed.shadows(0), (0, 0));
    assert!(!bed.done.iter().any(|action| matches!(action, Action::Evict { .. })));
}
