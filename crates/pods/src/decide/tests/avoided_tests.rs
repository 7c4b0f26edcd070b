//! Nodes on which pods did not fit when their gang had been given cores there.

use super::{
    bed::{BEGIN, Bed},
    gang,
};
use crate::{
    action::Action,
    fixture::pod,
    pod::{Phase, PodView},
    time::SECOND,
};

#[test]
fn nodes_where_the_pods_dont_fit_are_left_out_at_once_until_they_do() {
    let mut bed = Bed::new(&[2, 2, 2, 2]);
    for rank in [0, 1] {
        bed.seen.targets.get_mut(&rank).unwrap().allocatable.cpu = 1940;
    }
    bed.create(gang("g", 4));
    bed.settle();
    assert_eq!(bed.bound(), ["g0@node2", "g1@node2", "g2@node3", "g3@node3"]);
    let again = bed.done.iter().filter(|action| matches!(action, Action::Resubmit { .. })).count();
    assert_eq!(again, 1, "both nodes at once");
}

#[test]
fn nodes_that_were_left_out_count_again_though_other_pods_have_a_part_of_them_by_now() {
    let mut bed = Bed::new(&[2, 2, 2]);
    let set = |bed: &mut Bed, cpu| [0, 1].map(|rank| bed.seen.targets.get_mut(&rank).unwrap().allocatable.cpu = cpu);
    set(&mut bed, 1940);
    bed.create(gang("g", 4));
    bed.settle();
    assert!(bed.told("g0").contains("2 where its pods did not fit"), "{}", bed.told("g0"));
    bed.create([pod("a", 1), pod("b", 1)]);
    bed.settle();
    set(&mut bed, 2000);
    bed.pass(60 * SECOND);
    assert_eq!(bed.bound().len(), 6, "{:?}", bed.bound());
}

#[test]
fn nodes_that_were_left_out_count_again_once_host_jobs_leave_no_more_than_fits() {
    let mut bed = Bed::new(&[4, 4]);
    // Else shadow jobs would hold what the other pods use.
    bed.seen.settings.tolerance = 2000;
    for node in ["node0", "node1"] {
        let other = pod(&format!("other-{node}"), 2);
        let (node, bound) = (Some(node.into()), Some(BEGIN));
        bed.create([PodView { is_bridged: false, plan: None, node, bound, ..other }]);
    }
    // Three can't be dealt out equally to two nodes.
    bed.create(gang("g", 3));
    bed.settle();
    // Flux would give it three cores of one node, where two are left.
    assert!(bed.told("g0").contains("2 where its pods did not fit"), "{}", bed.told("g0"));
    for rank in ["0", "1"] {
        bed.submit_host_job_on(rank, 2);
    }
    bed.pass(60 * SECOND);
    let bound: Vec<_> = bed.bound().into_iter().filter(|pod| pod.starts_with('g')).collect();
    assert_eq!(bound, ["g0@node0", "g1@node0", "g2@node1"]);
}

#[test]
fn a_gang_runs_on_nodes_that_have_more_cores_than_gpus() {
    for (gpus, size, expected) in [
        (vec![1, 1, 0], 2, vec!["g0@node0", "g1@node1"]),
        (vec![2, 3, 1], 4, vec!["g0@node0", "g1@node0", "g2@node1", "g3@node1"]),
        (vec![0, 4, 1], 4, vec!["g0@node1", "g1@node1", "g2@node1", "g3@node1"]),
        (vec![1, 1, 0], 3, vec![]),
    ] {
        let mut bed = Bed::new(&[8, 8, 8]);
        for (rank, gpus) in (0..).zip(&gpus) {
            bed.seen.targets.get_mut(&rank).unwrap().allocatable.extended = [("gpu".to_owned(), *gpus)].into();
        }
        let with_gpu = |mut pod: PodView| {
            pod.requests.extended = [("gpu".to_owned(), 1)].into();
            pod
        };
        bed.create(gang("g", size).into_iter().map(with_gpu));
        bed.pass(60 * SECOND);
        assert_eq!(bed.bound(), expected, "{gpus:?}");
        let again = bed.done.iter().filter(|action| matches!(action, Action::Resubmit { .. })).count();
        assert!(again <= 2 || expected.is_empty(), "{gpus:?}: asked for {again} times again");
        if expected.is_empty() {
            assert!(bed.told("g0").contains("gpu"), "{}", bed.told("g0"));
        }
        // What is free beside it goes to a single pod.
        bed.create([with_gpu(pod("single", 1))]);
        bed.pass(60 * SECOND);
        let left = gpus.iter().sum::<u64>() > expected.len() as u64;
        assert_eq!(bed.bound().len(), expected.len() + usize::from(left), "{gpus:?}");
    }
}

#[test]
fn a_gang_that_fits_as_flux_gives_it_cores_is_not_dealt_out() {
    let mut bed = Bed::new(&[4; 6]);
    bed.submit_host_job(6, 3);
    bed.settle();
    for target in bed.seen.targets.values_mut() {
        target.allocatable.extended = [("gpu".to_owned(), 3)].into();
    }
    bed.create(gang("g", 6).into_iter().map(|mut pod| {
        pod.requests.extended = [("gpu".to_owned(), 1)].into();
        pod
    }));
    bed.settle();
    assert_eq!(bed.bound().len(), 6, "{:?}", bed.shown_jobs());
}

#[test]
fn pods_that_fit_on_no_node_now_are_not_sent_to_and_fro() {
    let mut bed = Bed::new(&[2, 2, 2]);
    bed.seen.targets.values_mut().for_each(|target| target.allocatable.cpu = 1975);
    bed.create((0..3).map(|n| pod(&format!("first{n}"), 1)));
    bed.settle();
    bed.create([pod("a", 1), pod("b", 1)]);
    bed.pass(60 * SECOND);
    assert_eq!(bed.bound().len(), 3);
    let again = bed.done.iter().filter(|action| matches!(action, Action::Resubmit { .. })).count();
    assert!(again < 10, "{again}");
    bed.end("first1", Phase::Succeeded);
    bed.pass(10 * SECOND);
    assert_eq!(bed.bound().len(), 3, "{:?}", bed.bound());
}

#[test]
fn a_full_node_with_reserved_cpu_is_no_endless_loop() {
    let mut bed = Bed::new(&[4]);
    bed.seen.targets.get_mut(&0).unwrap().allocatable.cpu = 3940;
    bed.create((0..4).map(|n| pod(&format!("p{n}"), 1)));
    bed.pass(60 * SECOND);
    assert_eq!(bed.bound().len(), 3);
    assert!(bed.told("p3").starts_with("Unschedulable: may run on 0 of 1 node: 1 where its pods did not fit"));
    assert!(bed.done.len() < 40, "{}", bed.done.len());
    bed.end("p0", Phase::Succeeded);
    bed.settle();
    assert_eq!(bed.bound(), ["p1@node0", "p2@node0", "p3@node0"]);
}
