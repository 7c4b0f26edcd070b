//! The way back after a start of the broker.

use std::collections::BTreeSet;

use broker::job_id::JobId;

use super::{
    again,
    bed::{Bed, FluxJob},
    gang, gang_id, with_job,
};
use crate::{
    action::Action,
    decide::{Recovery, Standing, recovery::MOST_CHANGES},
    fixture::pod,
    jobs::OUR_NOTE,
    jobspec::{FIRST_URGENCY, USED_CORES_URGENCY},
    pod::{FORCED_HOLD, Phase, PodView},
    time::SECOND,
    world::Queues,
};

/// Two nodes: gang `g` of three pods runs, gang `q` waits, and so does a host job.
fn running() -> Bed {
    let mut bed = Bed::new(&[2, 2]);
    bed.create(gang("g", 3));
    bed.settle();
    bed.run_all();
    bed.create(gang("q", 2));
    bed.settle();
    bed.submit_host_job(1, 2);
    bed.settle();
    bed.done.clear();
    bed
}

/// One decision, and all that follows from it.
fn step(bed: &mut Bed) -> Standing {
    let decision = bed.decide();
    decision.actions.iter().for_each(|action| bed.carry_out(action));
    bed.schedule();
    bed.deliver(usize::MAX, usize::MAX);
    decision.report.standing
}

fn is_allocated(bed: &Bed, name: &str) -> bool {
    bed.shown_jobs().iter().any(|job| job.starts_with(name) && job.contains('@'))
}

#[test]
fn pods_that_run_get_their_cores_again_before_anybody_else() {
    for (what, keeps, cancels) in [("power", false, false), ("kill", true, false), ("term", false, true)] {
        let mut bed = running();
        let before = bed.bound();
        bed.restart_broker(|_| keeps, cancels);
        bed.settle();
        assert_eq!(bed.bound(), before, "{what}");
        assert_eq!(bed.shown_jobs(), ["default/q 2x1 waits", "default/g 2x1 @0", "default/g 1x1 @1"], "{what}");
        assert!(!bed.done.iter().any(|action| matches!(action, Action::Evict { .. } | Action::SuspendJob { .. })));
        assert!(bed.jobs.values().filter(|job| job.slots.is_some()).all(|job| job.urgency == USED_CORES_URGENCY));
        ["g0", "g1", "g2"].into_iter().for_each(|name| bed.end(name, Phase::Succeeded));
        bed.settle();
        assert_eq!(bed.bound(), ["q0@node0", "q1@node0"], "{what}");
    }
}

#[test]
fn a_gang_that_gets_a_core_before_the_pod_that_runs_there_gives_it_back() {
    let mut bed = Bed::new(&[1]);
    // kubelet has room for two.
    bed.seen.targets.get_mut(&0).unwrap().allocatable.cpu = 4000;
    bed.create(gang("g", 1));
    bed.settle();
    bed.run_all();
    bed.create(gang("q", 1));
    bed.settle();
    assert_eq!(bed.bound(), ["g0@node0"]);
    bed.restart_broker(|_| false, false);
    // The rank's broker joins again only once the queue is started.
    bed.closed = [0].into();
    bed.settle();
    bed.closed.clear();
    let pin = bed.jobs.iter().find(|(_, job)| job.urgency == USED_CORES_URGENCY).map(|(id, _)| *id).unwrap();
    bed.jobs.get_mut(&pin).unwrap().urgency = 1;
    bed.schedule();
    bed.jobs.get_mut(&pin).unwrap().urgency = USED_CORES_URGENCY;
    assert!(is_allocated(&bed, "default/q"));
    bed.settle();
    assert_eq!((bed.bound(), bed.jobs[&pin].slots.is_some()), (vec!["g0@node0".to_owned()], true));
    bed.end("g0", Phase::Succeeded);
    bed.settle();
    assert_eq!(bed.bound(), ["q0@node0"]);
}

#[test]
fn a_gang_that_is_given_what_a_larger_pin_waits_for_is_not_asked_for_there_again() {
    let mut bed = Bed::new(&[4]);
    // kubelet has room for all.
    bed.seen.targets.get_mut(&0).unwrap().allocatable.cpu = 9000;
    let of = |name: &str, cpu: u64| {
        let [mut pod] = <[PodView; 1]>::try_from(gang(name, 1)).unwrap();
        pod.requests.cpu = cpu;
        pod
    };
    bed.create([of("large", 4000)]);
    bed.settle();
    // Somebody has written the node's name into this one.
    bed.create([PodView { node: Some("node0".to_owned()), ..of("half", 2000) }]);
    bed.run_all();
    bed.restart_broker(|_| false, false);
    bed.settle();
    bed.create([of("waits", 1000)]);
    bed.pass(60 * SECOND);
    assert_eq!(bed.bound(), ["half0@node0", "large0@node0"]);
    let submitted = bed
        .done
        .iter()
        .filter(|action| matches!(action, Action::Submit(request) if request.record.gang == gang_id("waits")));
    assert!(submitted.count() <= 2, "{:?}", bed.shown_jobs());
}

#[test]
fn nothing_is_asked_for_pods_on_nodes_that_are_members_no_more() {
    let mut bed = running();
    for name in ["g0", "g1", "g2"] {
        bed.change(name, |pod| pod.node = Some("no-member".to_owned()));
    }
    bed.restart_broker(|_| true, false);
    bed.settle();
    assert!(
        !bed.done.iter().any(|action| matches!(action, Action::Submit(request) if request.record.gang == gang_id("g")))
    );
    assert!(bed.shown_jobs().iter().all(|job| !job.starts_with("default/g ")), "{:?}", bed.shown_jobs());
    assert_eq!(bed.decide().report.standing, Standing::Serving);
}

/// Flux stores R first, then event `alloc`: a broker may die, or a checkpoint be made, in between.
#[test]
fn a_job_that_would_make_flux_give_up_its_scheduler_is_cancelled_before_the_queues_start() {
    let mut bed = running();
    bed.restart_broker(|_| false, false);
    bed.settle();
    let before = bed.bound();
    // Of the pins, none had got its cores again: the nodes were down.
    bed.jobs.values_mut().for_each(|job| job.slots = None);
    bed.spoiled = bed.jobs.keys().copied().filter(|id| bed.jobs[id].gang_job().is_some()).collect();
    assert!(bed.spoiled.len() > 2, "{:?}", bed.spoiled);
    bed.done.clear();
    bed.restart_broker(|_| true, false);
    bed.settle();
    let starts = bed.done.iter().position(|action| *action == Action::StartQueues).unwrap();
    let canceled = bed.done[..starts].iter().filter_map(|action| match action {
        Action::Cancel { job, .. } => Some(*job),
        _ => None,
    });
    assert_eq!(canceled.collect::<BTreeSet<_>>(), bed.spoiled);
    assert!(bed.jobs.keys().all(|id| !bed.spoiled.contains(id)));
    assert_eq!(bed.bound(), before);
    assert_eq!(bed.shown_jobs(), ["default/g 2x1 @0", "default/g 1x1 @1", "default/q 2x1 waits"]);
}

#[test]
fn a_gang_whose_job_was_spoiled_keeps_its_turn() {
    let mut bed = Bed::busy(&[1]);
    for name in ["old", "young"] {
        bed.create([pod(name, 1)]);
        bed.pass(10 * SECOND);
    }
    // Of the host job, nothing is left after the restart.
    bed.spoiled = [JobId(2)].into();
    bed.restart_broker(|_| true, false);
    bed.settle();
    assert_eq!(bed.bound(), ["old@node0"]);
}

#[test]
fn a_scheduler_that_has_gone_offline_is_told() {
    let mut bed = running();
    bed.broker().queues = Queues::Offline;
    let words = bed.decide().report.standing.waits_for().unwrap();
    assert!(words.contains("scheduler is offline") && words.contains("flux-distribute reload"), "{words}");
}

#[test]
fn the_steps_come_one_after_the_other() {
    let mut bed = running();
    bed.restart_broker(|_| true, false);
    bed.broker().queues = Queues::Offline;
    assert_eq!(step(&mut bed), Standing::Recovering(Recovery::Scheduler));
    bed.broker().queues = Queues::AllStarted;
    assert_eq!(step(&mut bed), Standing::Recovering(Recovery::Queues));
    assert_eq!(step(&mut bed), Standing::Recovering(Recovery::Submit));
    assert_eq!(step(&mut bed), Standing::Recovering(Recovery::Cancel));
    assert_eq!(step(&mut bed), Standing::Recovering(Recovery::Start));
    assert_eq!(step(&mut bed), Standing::Serving);
}

#[test]
fn it_can_be_interrupted_anywhere() {
    for steps in 0..6 {
        let mut bed = running();
        let before = bed.bound();
        bed.restart_broker(|_| true, false);
        for _ in 0..steps {
            bed.deliver(usize::MAX, usize::MAX);
            let actions = bed.decide().actions;
            // Only the first action is done.
            actions.iter().take(1).for_each(|action| bed.carry_out(action));
        }
        bed.restart_agent();
        bed.settle();
        assert_eq!(bed.bound(), before);
        assert_eq!(bed.shown_jobs(), ["default/q 2x1 waits", "default/g 2x1 @0", "default/g 1x1 @1"], "{steps} steps");
    }
}

#[test]
fn a_gang_that_was_being_bound_gets_all_that_it_was_given() {
    let mut bed = Bed::new(&[1, 1, 1]);
    bed.create(gang("g", 2));
    bed.deliver(usize::MAX, usize::MAX);
    bed.decide().actions.iter().for_each(|action| bed.carry_out(action));
    bed.schedule();
    bed.deliver(usize::MAX, usize::MAX);
    let bind = bed.decide().actions.into_iter().find(|action| matches!(action, Action::Bind(_))).unwrap();
    bed.carry_out(&bind);
    bed.restart_broker(|_| true, false);
    bed.submit_host_job(3, 1);
    bed.settle();
    assert_eq!(bed.bound(), ["g0@node0", "g1@node1"]);
    assert_eq!(bed.shown_jobs(), ["default/g 1x1 @0", "default/g 1x1 @1"]);
}

#[test]
fn a_gang_that_was_given_cores_and_not_bound_is_the_first_of_those_that_wait() {
    let mut bed = Bed::new(&[2]);
    bed.create(gang("g", 2));
    bed.deliver(usize::MAX, usize::MAX);
    bed.decide().actions.iter().for_each(|action| bed.carry_out(action));
    bed.schedule();
    bed.create([pod("a", 1)]);
    bed.restart_broker(|_| true, false);
    bed.settle();
    assert_eq!(bed.bound(), ["g0@node0", "g1@node0"]);
    let urgencies: Vec<_> = bed.jobs.values().map(|job| job.urgency).collect();
    assert!(urgencies.contains(&FIRST_URGENCY));
}

#[test]
fn nothing_waits_for_a_rank_that_is_down() {
    let mut bed = running();
    bed.down.insert(1);
    bed.restart_broker(|_| true, false);
    bed.settle();
    assert_eq!(bed.broker().queues, Queues::AllStarted);
    assert!(bed.shown_jobs().contains(&"default/g 1x1 waits".to_owned()));
    ["g0", "g1"].into_iter().for_each(|name| bed.end(name, Phase::Succeeded));
    bed.settle();
    assert!(is_allocated(&bed, "default/q"), "others run meanwhile");
    bed.down.clear();
    bed.settle();
    assert!(is_allocated(&bed, "default/g 1x1"), "it is the first there");
    assert!(bed.bound().contains(&"g2@node1".to_owned()));
}

#[test]
fn nothing_waits_for_a_gang_whose_jobs_flux_refuses() {
    for (what, keeps) in [("its old job holds its cores", true), ("nobody holds its cores", false)] {
        let mut bed = running();
        let before = bed.bound();
        bed.restart_broker(|_| keeps, false);
        bed.seen.refused.insert(gang_id("g"), "job submission is disabled".into());
        bed.settle();
        assert_eq!((bed.broker().queues, bed.bound().len()), (Queues::AllStarted, 3), "{what}");
        let old = bed.shown_jobs().contains(&"default/g 3x1 @0-1".to_owned());
        assert_eq!(old, keeps, "{what}");
        // Once Flux takes jobs again, what is missing is asked for.
        bed.seen.refused.clear();
        bed.settle();
        assert!(before.iter().all(|pod| bed.bound().contains(pod)), "{what}");
        let asked: u32 = bed.jobs.values().filter_map(FluxJob::gang_job).map(|job| job.shape.slots).sum();
        assert_eq!(asked, 5, "{what}: {:?}", bed.shown_jobs());
    }
}

#[test]
fn a_recovery_ends_though_flux_refuses_more_gangs_than_can_be_asked_for_within_a_pause() {
    let mut bed = Bed::new(&[4]);
    bed.create(["a", "b", "c"].map(|name| pod(name, 1)));
    bed.settle();
    bed.run_all();
    let held = ["default/a 1x1 @0", "default/b 1x1 @0", "default/c 1x1 @0"];
    for life in 1..=2 {
        bed.restart_broker(|_| false, false);
        let mut refusals = 0;
        let asked = |action: &Action| match action {
            Action::Submit(request) => Some(request.record.gang.clone()),
            _ => None,
        };
        while let Some(gang) = bed.decide().actions.iter().find_map(asked) {
            refusals += 1;
            assert!(refusals <= 3, "life {life}: a gang is asked for again before the queues are started");
            // By the time at which one is refused, those before it might be asked for again.
            bed.seen.refused = [(gang, "no".to_owned())].into();
        }
        assert_eq!(refusals, 3, "life {life}: each is asked for once");
        bed.seen.refused.clear();
        bed.settle();
        assert_eq!((bed.broker().queues, bed.shown_jobs()), (Queues::AllStarted, held.map(str::to_owned).into()));
    }
}

#[test]
fn the_queues_stay_stopped_while_flux_takes_no_jobs_and_pods_run_on_cores_that_no_job_holds() {
    for (what, keeps) in [("its old job holds its cores", true), ("nobody holds its cores", false)] {
        let mut bed = running();
        let before = bed.bound();
        bed.restart_broker(|_| keeps, false);
        bed.broker().accepts_jobs = false;
        bed.settle();
        let expected = if keeps { Queues::AllStarted } else { Queues::Stopped };
        assert_eq!((bed.broker().queues, bed.bound()), (expected, before), "{what}");
        bed.broker().accepts_jobs = true;
        bed.settle();
        assert_eq!(bed.broker().queues, Queues::AllStarted, "{what}");
        assert!(is_allocated(&bed, "default/g"), "{what}");
    }
}

#[test]
fn pods_of_a_namespace_in_doubt_keep_their_cores_and_no_other_pod_is_bound_there() {
    let mut bed = running();
    let before = bed.bound();
    bed.seen.namespaces.clear();
    bed.seen.doubtful.insert("default".to_owned());
    bed.restart_broker(|_| false, false);
    bed.create([pod("late", 1)]);
    bed.settle();
    assert_eq!((bed.broker().queues, bed.bound()), (Queues::AllStarted, before));
    assert!(is_allocated(&bed, "default/g"));
}

#[test]
fn a_gang_that_was_given_cores_and_can_not_be_asked_for_again_is_bound_to_them() {
    let mut bed = Bed::new(&[2]);
    bed.create(gang("g", 2));
    bed.deliver(usize::MAX, usize::MAX);
    bed.decide().actions.iter().for_each(|action| bed.carry_out(action));
    bed.schedule();
    bed.restart_broker(|_| true, false);
    bed.seen.refused.insert(gang_id("g"), "job submission is disabled".into());
    bed.settle();
    assert_eq!((bed.broker().queues, bed.shown_jobs()), (Queues::AllStarted, vec!["default/g 2x1 @0".to_owned()]));
    bed.seen.refused.clear();
    bed.settle();
    assert_eq!(bed.bound(), ["g0@node0", "g1@node0"]);
}

#[test]
fn an_agent_that_restarts_beside_the_same_broker_changes_nothing() {
    let mut bed = running();
    let before = (bed.bound(), bed.shown_jobs());
    bed.restart_agent();
    bed.pass_long();
    assert_eq!((bed.bound(), bed.shown_jobs()), before);
    let harmless = |action: &Action| matches!(action, Action::Tell(_));
    assert!(bed.done.iter().all(harmless), "{:?}", bed.done);
}

#[test]
fn a_pod_that_vanished_while_no_agent_ran_may_run_on_for_ten_seconds() {
    let mut bed = Bed::new(&[1]);
    bed.create([pod("a", 1)]);
    bed.settle();
    bed.run_all();
    bed.vanish("a");
    bed.restart_agent();
    bed.pass(FORCED_HOLD - 1);
    assert_eq!(bed.shown_jobs(), ["default/a 1x1 @0"]);
    bed.pass(1);
    assert_eq!(bed.shown_jobs(), [] as [&str; 0]);
}

#[test]
fn nobody_gets_the_cores_of_a_pod_that_may_run_unseen() {
    let mut bed = Bed::new(&[2]);
    with_job(&mut bed, "train", 2);
    bed.settle();
    bed.run_all();
    bed.vanish("train-0");
    bed.restart_agent();
    bed.create([again("train", 0, 1)]);
    bed.pass(FORCED_HOLD - 1);
    assert_eq!(bed.bound(), ["train-1@node0"]);
    bed.pass(1);
    assert_eq!(bed.bound(), ["train-0-1@node0", "train-1@node0"]);
}

#[test]
fn the_queue_stays_closed_until_the_pods_are_known() {
    let mut bed = running();
    bed.restart_broker(|_| true, false);
    let pods = bed.seen.pods.take();
    let decision = bed.decide();
    assert_eq!((decision.report.standing, decision.actions.len()), (Standing::Loading, 0));
    bed.seen.pods = pods;
    bed.settle();
    assert_eq!(bed.broker().queues, Queues::AllStarted);
}

#[test]
fn a_job_that_ended_while_its_pod_runs_is_replaced_by_a_pin() {
    let mut bed = Bed::new(&[2]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.run_all();
    bed.cancel(JobId(1), OUR_NOTE);
    bed.pass(10 * SECOND);
    assert_eq!(bed.shown_jobs(), ["default/g 2x1 @0"]);
    let pinned = bed.jobs.values().filter_map(FluxJob::gang_job).all(|job| job.record.pinned == Some(0));
    assert!(pinned && bed.pods.values().all(|pod| !pod.is_deleting()));
}

#[test]
fn no_queue_is_started_while_the_epoch_ends() {
    for is_recovered in [false, true] {
        let mut bed = running();
        bed.restart_broker(|_| true, false);
        bed.broker().queues = Queues::Stopped;
        bed.broker().is_recovered = is_recovered;
        bed.seen.is_closing = true;
        bed.settle();
        assert_eq!(bed.broker().queues, Queues::Stopped);
        assert!(!bed.done.contains(&Action::StartQueues), "recovered: {is_recovered}");
        bed.seen.is_closing = false;
        bed.settle();
        assert_eq!(bed.broker().queues, Queues::AllStarted, "the epoch goes on");
        assert!(is_allocated(&bed, "default/g"));
    }
}

#[test]
fn queues_that_an_administrator_stopped_stay_stopped_during_a_recovery() {
    let mut bed = running();
    bed.restart_broker(|_| true, false);
    bed.broker().queues = Queues::StoppedByOthers;
    bed.settle();
    let broker = bed.broker();
    assert_eq!((broker.queues, broker.is_recovered), (Queues::StoppedByOthers, true));
    assert!(!bed.done.iter().any(|action| matches!(action, Action::StopQueues(_))));
    assert!(!is_allocated(&bed, "default/g"), "it waits for the administrator, before all others");
    bed.broker().queues = Queues::AllStarted;
    bed.settle();
    assert!(is_allocated(&bed, "default/g"));
}

#[test]
fn no_queue_stays_open_during_a_recovery_and_those_that_waited_for_it_start() {
    let mut bed = running();
    bed.restart_broker(|_| true, false);
    bed.broker().queues = Queues::PartlyStarted;
    bed.settle();
    assert!(bed.done.iter().any(|action| matches!(action, Action::StopQueues(_))));
    assert_eq!(bed.broker().queues, Queues::AllStarted);
    bed.broker().queues = Queues::PartlyStarted;
    bed.settle();
    assert_eq!(bed.broker().queues, Queues::AllStarted);
}

/// Whoever may make pods in a namespace can write the name of a node in one, and delete it by force before kubelet has taken it up.
#[test]
fn forged_pods_that_come_and_go_hold_no_cores_and_delay_no_recovery() {
    for is_deleted in [true, false] {
        let mut bed = running();
        bed.restart_broker(|_| true, false);
        let record = bed.pods["uid-g2"].record.clone();
        let forge = |bed: &mut Bed, number: u32| {
            let name = format!("forged{number}");
            bed.create([PodView { node: Some("node1".to_owned()), record: record.clone(), ..pod(&name, 1) }]);
            bed.deliver(usize::MAX, usize::MAX);
            if is_deleted {
                bed.vanish(&name);
            }
        };
        let ended = (1..20).find(|number| {
            forge(&mut bed, *number);
            step(&mut bed) == Standing::Serving
        });
        assert!(ended.is_some_and(|number| number > 3), "it was forged during the recovery, and that ended: {ended:?}");
        bed.settle();
        let forged = bed.shown_jobs().into_iter().filter(|job| job.contains("forged")).count();
        assert_eq!(forged == 0, is_deleted, "{:?}", bed.shown_jobs());
        let jobs: Vec<_> = bed.shown_jobs().into_iter().filter(|job| !job.contains("forged")).collect();
        assert_eq!(jobs, ["default/q 2x1 waits", "default/g 2x1 @0", "default/g 1x1 @1"]);
    }
}

/// As a user who goes on deleting members of a gang and making them again, with the name of a node in them.
#[test]
fn a_gang_that_goes_on_changing_delays_a_recovery_only_for_a_while() {
    let mut bed = running();
    bed.restart_broker(|_| true, false);
    let template = bed.pods["uid-g2"].clone();
    let ended = (1..200).find(|number| {
        bed.vanish(&format!("g2x{}", number - 1));
        let (uid, name) = (format!("uid-g2x{number}"), format!("g2x{number}"));
        bed.set(PodView { uid, name, is_taken_up: false, ..template.clone() });
        step(&mut bed) == Standing::Serving
    });
    assert!(ended.is_some_and(|number| number >= MOST_CHANGES), "{ended:?}");
}

/// The executor begins some actions at a time, and asks for a decision again after each.
#[test]
fn a_gang_whose_turn_comes_late_is_asked_for_before_the_queues_start() {
    let mut bed = Bed::new(&[8]);
    bed.create(["a", "b", "c", "d"].map(|name| pod(name, 1)));
    bed.settle();
    bed.run_all();
    bed.submit_host_job(1, 8);
    bed.settle();
    bed.restart_broker(|_| true, false);
    for round in 0.. {
        assert!(round < 1000, "no end");
        let decision = bed.decide();
        // The first submission hangs for many rounds.
        let is_late = |action: &&Action| matches!(action, Action::Submit(_)) && round % 100 != 99;
        decision.actions.iter().filter(|action| !is_late(action)).take(1).for_each(|action| bed.carry_out(action));
        bed.schedule();
        bed.deliver(usize::MAX, usize::MAX);
        if decision.report.standing == Standing::Serving {
            break;
        }
    }
    assert_eq!(bed.held(0), (4, 4), "{:?}", bed.shown_jobs());
}

#[test]
fn a_gang_whose_old_job_the_starting_scheduler_ends_gets_its_cores_again_in_the_same_recovery() {
    let mut bed = Bed::new(&[4]);
    bed.create(gang("g", 2));
    bed.settle();
    bed.run_all();
    bed.restart_broker(|_| true, false);
    let old = *bed.jobs.keys().next().unwrap();
    bed.fail_to_take_back(old);
    bed.submit_host_job(1, 4);
    bed.settle();
    assert_eq!((bed.broker().queues, bed.held(0)), (Queues::AllStarted, (2, 2)), "the host job waits");
}
