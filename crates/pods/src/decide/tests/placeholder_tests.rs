//! What host jobs use is requested by placeholder pods.

use broker::job_id::JobId;

use super::bed::Bed;
use crate::{
    action::{Action, PlaceholderStep},
    fixture::{foreign, pod},
    pod::{Phase, PodView},
    requests::Size,
    time::SECOND,
};

const GIB: u64 = 1 << 30;

/// Nodes of four cores and 8 GiB whose kubelets can resize pods.
fn bed(nodes: usize) -> Bed {
    let mut bed = Bed::new(&vec![4; nodes]);
    for target in bed.seen.targets.values_mut() {
        (target.can_resize, target.allocatable.memory) = (true, 8 * GIB);
    }
    bed
}

/// The placeholder pods with what they ask for, in thousandths of a core and MiB.
fn shown(bed: &Bed) -> Vec<String> {
    let asks = |pod: &PodView| Some((pod.name.clone(), pod.placeholder?.asks));
    let all = bed.pods.values().filter_map(asks);
    all.map(|(name, Size { cpu, memory })| format!("{name}: {cpu}m, {} MiB", memory >> 20)).collect()
}

fn placeholder_uid(bed: &Bed) -> String {
    bed.pods.values().find(|pod| pod.placeholder.is_some()).unwrap().uid.clone()
}

fn host_jobs(bed: &Bed) -> Vec<JobId> {
    bed.jobs.iter().filter(|(_, job)| job.is_host_job()).map(|(id, _)| *id).collect()
}

#[test]
fn a_placeholder_pod_follows_host_jobs_and_goes_thirty_seconds_after_the_last() {
    let mut bed = bed(2);
    bed.settle();
    assert_eq!(shown(&bed), [""; 0], "no host job runs");
    bed.submit_host_job(1, 2);
    bed.settle();
    assert_eq!(shown(&bed), ["node0: 2000m, 4096 MiB"]);
    bed.submit_host_job(1, 1);
    bed.settle();
    assert_eq!(shown(&bed), ["node0: 3000m, 6144 MiB"]);
    for job in host_jobs(&bed) {
        bed.cancel(job, "");
    }
    bed.pass(SECOND);
    assert_eq!(shown(&bed), ["node0: 1m, 4 MiB"]);
    bed.pass(20 * SECOND);
    bed.submit_host_job(1, 4);
    bed.settle();
    assert_eq!(shown(&bed), ["node0: 4000m, 8192 MiB"]);
    bed.cancel(host_jobs(&bed)[0], "");
    bed.pass(29 * SECOND);
    assert_eq!(shown(&bed), ["node0: 1m, 4 MiB"]);
    bed.pass(SECOND);
    assert_eq!(shown(&bed), [""; 0]);
}

#[test]
fn a_placeholder_pod_never_asks_for_more_than_other_pods_leave() {
    let mut bed = bed(1);
    bed.submit_host_job(1, 3);
    bed.settle();
    let mut web = foreign("web", 2500);
    web.requests.memory = 6 * GIB;
    bed.create([web]);
    bed.settle();
    assert_eq!(shown(&bed), ["node0: 1500m, 2048 MiB"]);
    assert_eq!(bed.shadows(0), (1, 1), "and what it requests is no use of other pods");
    bed.end("web", Phase::Succeeded);
    bed.pass(59 * SECOND);
    assert_eq!(shown(&bed), ["node0: 1500m, 2048 MiB"], "another pod may take its place");
    bed.pass(SECOND);
    assert_eq!((shown(&bed), bed.shadows(0)), (vec!["node0: 3000m, 6144 MiB".to_owned()], (0, 0)));
}

#[test]
fn a_pod_of_a_gang_is_bound_once_the_placeholder_pod_has_shrunk() {
    let mut bed = bed(1);
    bed.kubelet_is_slow = true;
    bed.submit_host_job(1, 4);
    bed.settle();
    bed.create([pod("a", 2)]);
    bed.settle();
    bed.cancel(host_jobs(&bed)[0], "");
    bed.pass(SECOND);
    assert_eq!((shown(&bed), bed.pods["uid-a"].node.clone()), (vec!["node0: 1m, 4 MiB".to_owned()], None));
    let uid = placeholder_uid(&bed);
    let mut shrunk = bed.pods[&uid].clone();
    (shrunk.requests.cpu, shrunk.requests.memory) = (1, 4 << 20);
    bed.set(shrunk);
    bed.settle();
    assert_eq!(bed.pods["uid-a"].node.as_deref(), Some("node0"));
}

#[test]
fn a_placeholder_pod_gives_up_memory_that_a_pod_of_a_gang_needs() {
    let mut bed = bed(1);
    bed.submit_host_job(1, 3);
    bed.settle();
    let mut large = pod("a", 1);
    large.requests.memory = 5 * GIB;
    bed.create([large]);
    bed.settle();
    assert_eq!(
        (shown(&bed), bed.pods["uid-a"].node.as_deref()),
        (vec!["node0: 3000m, 3072 MiB".to_owned()], Some("node0"))
    );
}

#[test]
fn a_resize_that_was_decided_and_not_done_is_decided_again() {
    let mut bed = bed(1);
    bed.submit_host_job(1, 1);
    bed.settle();
    bed.submit_host_job(1, 2);
    bed.schedule();
    bed.deliver(usize::MAX, usize::MAX);
    for _ in 0..2 {
        let wants = |action: &Action| matches!(action, Action::Placeholder(PlaceholderStep::Resize { .. }));
        assert!(bed.decide().actions.iter().any(wants));
    }
    bed.settle();
    assert_eq!(shown(&bed), ["node0: 3000m, 6144 MiB"]);
}

#[test]
fn a_placeholder_pod_that_must_shrink_does_not_grow_in_another_resource() {
    let mut bed = bed(1);
    bed.submit_host_job(1, 2);
    bed.create([foreign("web", 2500)]);
    bed.settle();
    assert_eq!(shown(&bed), ["node0: 1500m, 4096 MiB"]);
    bed.end("web", Phase::Succeeded);
    bed.settle();
    let mut large = pod("a", 1);
    large.requests.memory = 6 * GIB;
    bed.create([large]);
    bed.settle();
    assert_eq!(
        (shown(&bed), bed.pods["uid-a"].node.as_deref()),
        (vec!["node0: 1500m, 2048 MiB".to_owned()], Some("node0"))
    );
    bed.pass(61 * SECOND);
    assert_eq!(shown(&bed), ["node0: 2000m, 2048 MiB"]);
}

#[test]
fn a_host_job_that_begins_while_kubelet_shrinks_the_placeholder_pod_is_requested_at_once() {
    let mut bed = bed(1);
    bed.kubelet_is_slow = true;
    bed.submit_host_job(1, 3);
    bed.settle();
    bed.create([pod("a", 2)]);
    bed.cancel(host_jobs(&bed)[0], "");
    bed.settle();
    bed.submit_host_job(1, 1);
    bed.settle();
    assert_eq!(shown(&bed), ["node0: 1m, 4 MiB"], "kubelet has not shrunk it yet");
    let mut shrunk = bed.pods[&placeholder_uid(&bed)].clone();
    (shrunk.requests.cpu, shrunk.requests.memory) = (1, 4 << 20);
    bed.set(shrunk);
    bed.settle();
    assert_eq!(shown(&bed), ["node0: 1000m, 2048 MiB"]);
}

#[test]
fn a_resize_that_kubelet_cant_grant_beside_other_pods_holds_no_cores() {
    let mut bed = bed(1);
    bed.create([foreign("web", 1000), foreign("tiny", 500)]);
    bed.settle();
    bed.change("tiny", |tiny| (tiny.requests.cpu, tiny.deferred.cpu) = (3500, 3000));
    bed.settle();
    assert_eq!(bed.shadows(0), (1, 0));
}

#[test]
fn a_resize_that_kubelet_has_deferred_takes_no_room_from_host_jobs() {
    let mut bed = bed(1);
    bed.submit_host_job(1, 3);
    bed.create([foreign("web", 1000)]);
    bed.settle();
    bed.change("web", |web| (web.requests.cpu, web.deferred.cpu) = (4000, 3000));
    bed.pass(10 * SECOND);
    let accounts = bed.decide().report.accounts;
    assert_eq!((shown(&bed), accounts.overlaps), (vec!["node0: 3000m, 6144 MiB".to_owned()], 0));
    assert_eq!(bed.shadows(0), (1, 3), "and Flux gives it the cores once they are free");
}

#[test]
fn a_slowly_deleted_placeholder_pod_is_deleted_again_for_other_pods() {
    let mut bed = bed(1);
    bed.submit_host_job(1, 4);
    bed.settle();
    let uid = placeholder_uid(&bed);
    let mut deleting = bed.pods[&uid].clone();
    deleting.to_end_by = Some(i64::MAX);
    bed.set(deleting);
    bed.create([pod("a", 2)]);
    bed.cancel(host_jobs(&bed)[0], "");
    bed.pass(9 * SECOND);
    assert_eq!(bed.pods["uid-a"].node, None, "kubelet would refuse it");
    bed.pass(2 * SECOND);
    assert_eq!((bed.pods["uid-a"].node.as_deref(), shown(&bed)), (Some("node0"), vec![]));
}

#[test]
fn a_placeholder_pod_that_is_evicted_is_made_again_with_pauses() {
    let mut bed = bed(1);
    bed.submit_host_job(1, 1);
    bed.settle();
    let begin = bed.now;
    let mut made = Vec::new();
    for _ in 0..7 {
        let found = bed.pods.values().find(|pod| pod.placeholder.is_some());
        let (name, uid) = found.map(|pod| (pod.name.clone(), pod.uid.clone())).unwrap();
        assert_eq!(name, "node0");
        made.push((bed.now - begin) / SECOND);
        bed.pods.get_mut(&uid).unwrap().phase = Phase::Failed;
        bed.set(bed.pods[&uid].clone());
        bed.settle();
        while !bed.pods.values().any(|pod| pod.placeholder.is_some()) {
            bed.pass(SECOND);
        }
    }
    assert_eq!(made, [0, 15, 45, 105, 225, 345, 465], "later each time, but for two minutes at most");
}

#[test]
fn nodes_of_flux_alone_and_kubelets_that_cant_resize_have_no_placeholder_pod() {
    for (is_dedicated, can_resize) in [(true, true), (false, false)] {
        let mut bed = bed(1);
        bed.submit_host_job(1, 2);
        bed.settle();
        assert_eq!(shown(&bed).len(), 1);
        let target = bed.seen.targets.get_mut(&0).unwrap();
        (target.is_dedicated, target.can_resize) = (is_dedicated, can_resize);
        bed.create([foreign("web", 2000)]);
        bed.settle();
        assert_eq!(shown(&bed), [""; 0]);
        assert_eq!(bed.shadows(0), if is_dedicated { (0, 0) } else { (2, 0) });
        assert!(bed.done.iter().any(|action| matches!(action, Action::Placeholder(PlaceholderStep::Remove { .. }))));
    }
}

#[test]
fn a_placeholder_pod_that_kubelet_cant_resize_is_replaced() {
    let mut bed = bed(1);
    bed.submit_host_job(1, 1);
    bed.settle();
    let uid = placeholder_uid(&bed);
    let mut stuck = bed.pods[&uid].clone();
    stuck.placeholder.as_mut().unwrap().cant_be_resized = true;
    bed.set(stuck);
    bed.pass(15 * SECOND);
    assert_eq!(shown(&bed), ["node0: 1000m, 2048 MiB"]);
    assert!(!bed.pods.contains_key(&uid));
}

#[test]
fn a_cordoned_node_gets_no_placeholder_pod() {
    let mut bed = bed(1);
    let cordon = k8s_openapi::api::core::v1::Taint {
        key: "node.kubernetes.io/unschedulable".into(),
        effect: "NoSchedule".into(),
        ..Default::default()
    };
    bed.seen.targets.get_mut(&0).unwrap().taints.push(cordon);
    bed.submit_host_job(1, 1);
    bed.settle();
    assert_eq!(shown(&bed), [""; 0]);
}

#[test]
fn an_unreadable_node_keeps_its_placeholder_pod_and_a_former_member_does_not() {
    let mut bed = bed(2);
    bed.submit_host_job(2, 4);
    bed.settle();
    assert_eq!(shown(&bed).len(), 2);
    bed.seen.targets.remove(&1);
    bed.settle();
    assert_eq!(shown(&bed).len(), 2);
    bed.seen.ranks.remove("node1");
    bed.settle();
    assert_eq!(shown(&bed), ["node0: 4000m, 8192 MiB"]);
}

#[test]
fn a_gang_is_bound_as_a_whole_once_all_placeholder_pods_have_shrunk() {
    let mut bed = bed(2);
    bed.seen.targets.values_mut().for_each(|target| target.allocatable.cpu = 4500);
    bed.kubelet_is_slow = true;
    bed.submit_host_job_on("0", 4);
    bed.settle();
    bed.create(super::gang("g", 8));
    bed.settle();
    bed.cancel(host_jobs(&bed)[0], "");
    bed.pass(SECOND);
    let bound = |bed: &Bed| bed.pods.values().filter(|pod| pod.is_bridged && pod.node.is_some()).count();
    assert_eq!(bound(&bed), 0, "node1 has room for four of them");
    bed.pass(10 * SECOND);
    assert_eq!((bound(&bed), shown(&bed)), (8, vec![]), "a pod that kubelet does not shrink is removed");
}

#[test]
fn a_placeholder_pod_makes_way_for_a_pod_that_needs_its_place() {
    let mut bed = bed(1);
    bed.seen.targets.get_mut(&0).unwrap().allocatable.pods = 1;
    bed.submit_host_job(1, 3);
    bed.settle();
    assert_eq!(shown(&bed).len(), 1);
    bed.create([pod("a", 1)]);
    bed.settle();
    assert_eq!((bed.pods["uid-a"].node.as_deref(), shown(&bed)), (Some("node0"), vec![]));
}

#[test]
fn placeholder_pods_go_with_the_last_host_job_if_the_instance_ends() {
    let mut bed = bed(1);
    bed.submit_host_job(1, 3);
    bed.settle();
    bed.seen.is_closing = true;
    bed.settle();
    assert_eq!(shown(&bed).len(), 1);
    bed.cancel(host_jobs(&bed)[0], "");
    bed.settle();
    assert_eq!(shown(&bed), [""; 0]);
}

#[test]
fn the_memory_of_host_jobs_is_their_part_of_all_cpus() {
    let mut bed = bed(1);
    bed.seen.targets.get_mut(&0).unwrap().allocatable.cpu = 8000;
    bed.submit_host_job(1, 4);
    bed.settle();
    assert_eq!(shown(&bed), ["node0: 4000m, 4096 MiB"], "Flux declares half of the node");
}
