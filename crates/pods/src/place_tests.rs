use std::collections::{BTreeMap, BTreeSet};

use api::Rank;
use k8s_openapi::api::core::v1::{NodeSelector, Taint};
use serde_json::json;

use super::{
    check::{Shortfall, check},
    facts::{Facts, VolumeClaim},
    fixture::{annotated, plan, pod, targets},
    gangs::{Gang, Known, gangs},
    place::{Limits, NoPlace, Place, place},
    pod::PodView,
    requests::HostPort,
    target::Target,
    usage::UsageByNode,
};

/// Where the gang of all `pods` may run. `others` are on the nodes.
static NONE: BTreeSet<String> = BTreeSet::new();

fn placed(
    pods: &[PodView],
    targets: &BTreeMap<Rank, Target>,
    others: &[PodView],
    facts: &Facts,
    threads: Option<u32>,
) -> Result<Place, NoPlace> {
    placed_again(pods, (targets, others, facts), threads, false)
}

fn placed_again(
    pods: &[PodView],
    (targets, others, facts): (&BTreeMap<Rank, Target>, &[PodView], &Facts),
    threads: Option<u32>,
    deals_out: bool,
) -> Result<Place, NoPlace> {
    let (namespaces, listed) = (BTreeSet::from(["default".to_owned()]), BTreeMap::new());
    let gangs: Vec<Gang> =
        gangs(pods, Known { facts, namespaces: &namespaces, doubtful: &NONE, max_gang: 100, listed: &listed }, 0);
    assert_eq!(gangs.len(), 1);
    let usage = UsageByNode::of(others, |pod| !pod.is_bridged, 0);
    let members: Vec<_> = gangs[0].waiting().collect();
    place(&gangs[0], &members, Limits { targets, usage: &usage, facts, avoided: &BTreeSet::new(), threads, deals_out })
}

fn on(node: &str, pod: PodView) -> PodView {
    PodView { node: Some(node.into()), plan: None, ..pod }
}

fn taint(key: &str) -> Taint {
    Taint { key: key.into(), effect: "NoSchedule".into(), ..Taint::default() }
}

#[test]
fn a_gang_may_run_where_its_rules_its_volumes_and_the_room_permit() {
    let zone =
        json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]});
    let zone: NodeSelector = serde_json::from_value(zone).unwrap();
    let mut facts = Facts::default();
    facts.claims.insert(("default".into(), "data".into()), VolumeClaim::Bound { affinity: Some(zone) });
    let in_zone: fn(&mut BTreeMap<Rank, Target>) = |targets| {
        targets.get_mut(&1).unwrap().labels.insert("zone".into(), "a".into());
    };
    let nothing: fn(&mut PodView) = |_| {};
    let idle: fn(&mut BTreeMap<Rank, Target>) = |_| {};
    let foreign = |cores| PodView { is_bridged: false, is_taken_up: true, ..on("node0", pod("other", cores)) };
    for (what, change, nodes, others, expected) in [
        ("anywhere", nothing, idle, vec![], vec![0, 1, 2]),
        ("its selector", |p| plan(p).rules.selector = [("zone".into(), "a".into())].into(), in_zone, vec![], vec![1]),
        ("its volume", |p| plan(p).claims = ["data".into()].into(), in_zone, vec![], vec![1]),
        ("a taint", nothing, |t| t.get_mut(&0).unwrap().taints = vec![taint("gpu")], vec![], vec![1, 2]),
        (
            "a cordon",
            nothing,
            |t| t.get_mut(&0).unwrap().taints = vec![taint("node.kubernetes.io/unschedulable")],
            vec![],
            vec![1, 2],
        ),
        (
            "a condition",
            nothing,
            |t| t.get_mut(&0).unwrap().taints = vec![taint("node.kubernetes.io/not-ready")],
            vec![],
            vec![0, 1, 2],
        ),
        ("single pods get CPUs alone", nothing, |t| t.get_mut(&0).unwrap().static_cpus = true, vec![], vec![1, 2]),
        (
            "they do on a node that is dedicated",
            nothing,
            |t| {
                let target = t.get_mut(&0).unwrap();
                (target.static_cpus, target.is_dedicated) = (true, true);
            },
            vec![],
            vec![0, 1, 2],
        ),
        ("too few cores", |p| p.requests.cpu = 4000, idle, vec![], vec![0, 1]),
        ("pods of others", nothing, idle, vec![foreign(4)], vec![1, 2]),
        ("some pods of others", nothing, idle, vec![foreign(3)], vec![0, 1, 2]),
        (
            "one that kubelet may refuse",
            nothing,
            idle,
            vec![PodView { is_taken_up: false, ..foreign(4) }],
            vec![0, 1, 2],
        ),
        ("bridged pods, which Flux knows of", nothing, idle, vec![on("node0", pod("other", 4))], vec![0, 1, 2]),
        ("memory", |p| p.requests.memory = 5, |t| t.get_mut(&2).unwrap().allocatable.memory = 4, vec![], vec![0, 1]),
        (
            "a device",
            |p| p.requests.extended = [("x".into(), 1)].into(),
            |t| t.get_mut(&2).unwrap().allocatable.extended = [("x".into(), 2)].into(),
            vec![],
            vec![2],
        ),
    ] {
        let mut targets = targets(&[4, 4, 2]);
        nodes(&mut targets);
        let mut pods = [annotated("p0", "g", 1)];
        change(&mut pods[0]);
        let place = placed(&pods, &targets, &others, &facts, None).unwrap();
        assert_eq!(place.ranks, expected.into_iter().collect(), "{what}");
    }
}

#[test]
fn unlike_pods_get_slots_of_the_largest() {
    let mut pods = [annotated("p0", "g", 2), annotated("p1", "g", 2)];
    pods[1].requests.cpu = 2500;
    let place = placed(&pods, &targets(&[4, 4, 2]), &[], &Facts::default(), None).unwrap();
    assert_eq!((place.cores, place.ranks), (3, BTreeSet::from([0, 1])));
}

#[test]
fn a_gang_runs_on_nodes_of_one_thread_count() {
    let mut targets = targets(&[4, 4, 4, 8]);
    for rank in [2, 3] {
        targets.get_mut(&rank).unwrap().threads = 2;
    }
    targets.values_mut().for_each(|target| target.allocatable.cpu = 16_000);
    let pods = |count: u32| -> Vec<_> {
        let wide = |mut pod: PodView| {
            pod.requests.cpu = 2000;
            pod
        };
        (0..count).map(|n| wide(annotated(&format!("p{n}"), "g", count))).collect()
    };
    for (count, before, cores, ranks) in [
        (2, None, 1, BTreeSet::from([2, 3])),
        (2, Some(1), 2, BTreeSet::from([0, 1])),
        (5, Some(1), 1, BTreeSet::from([2, 3])),
    ] {
        let place = placed(&pods(count), &targets, &[], &Facts::default(), before).unwrap();
        assert_eq!((place.cores, place.ranks), (cores, ranks), "{count} pods, before on {before:?} threads");
    }
}

#[test]
fn slots_are_dealt_out_once_flux_has_put_more_pods_on_a_node_than_fit() {
    for (what, size, cores, memory, expected) in [
        ("each node takes all", 4, [4, 4, 4], [4, 4, 4], (None, vec![0, 1, 2])),
        ("enough nodes take as many as they have cores", 6, [4, 4, 4], [4, 1, 4], (None, vec![0, 1, 2])),
        ("two on each", 4, [4, 4, 4], [2, 3, 1], (Some(2), vec![0, 1])),
        ("one on each", 3, [4, 4, 4], [2, 2, 2], (Some(1), vec![0, 1, 2])),
        ("one node takes all", 4, [4, 8, 8], [1, 5, 1], (None, vec![0, 1, 2])),
        ("by cores", 4, [2, 4, 4], [1, 2, 2], (Some(2), vec![1, 2])),
        ("not equally", 5, [4, 4, 4], [2, 2, 2], (None, vec![0, 1, 2])),
        ("a single pod", 1, [4, 4, 4], [1, 1, 1], (None, vec![0, 1, 2])),
    ] {
        let mut targets = targets(&cores);
        for (target, memory) in targets.values_mut().zip(memory) {
            target.allocatable.memory = memory;
        }
        let mut pods: Vec<_> = (0..size).map(|n| annotated(&format!("p{n}"), "g", size)).collect();
        pods.iter_mut().for_each(|pod| pod.requests.memory = 1);
        assert_eq!(placed(&pods, &targets, &[], &Facts::default(), None).unwrap().per_node, None, "{what}");
        let place = placed_again(&pods, (&targets, &[], &Facts::default()), None, true).unwrap();
        assert_eq!((place.per_node, place.ranks.into_iter().collect()), expected, "{what}");
    }
}

#[test]
fn a_gang_that_fits_on_no_idle_nodes_is_told_why() {
    let gang = |count: u32, change: fn(&mut PodView)| -> Vec<_> {
        let mut pods: Vec<_> = (0..count).map(|n| annotated(&format!("p{n}"), "g", count)).collect();
        pods.iter_mut().for_each(change);
        pods
    };
    for (pods, words) in [
        (gang(11, |_| {}), "may run on 3 of 3 nodes; they have cores for 10 of its 11 pods"),
        (gang(4, |p| plan(p).spreads = Ok(true)), "may run on 3 of 3 nodes; they have cores for 3 of its 4 pods"),
        (gang(1, |p| p.requests.cpu = 5000), "may run on 0 of 3 nodes: 3 with too few cores"),
        (gang(1, |p| p.requests.memory = 1 << 41), "may run on 0 of 3 nodes: 3 with too little memory"),
        (
            gang(3, |p| p.requests.cpu = 3000),
            "may run on 2 of 3 nodes: 1 with too few cores; they have cores for 2 of its 3 pods",
        ),
    ] {
        let error = placed(&pods, &targets(&[4, 4, 2]), &[], &Facts::default(), None).unwrap_err();
        assert_eq!(error.to_string(), words);
    }
    let mut targets = targets(&[4, 4, 2]);
    targets.values_mut().for_each(|target| target.static_cpus = target.rank < 2);
    let error = placed(&gang(3, |_| {}), &targets, &[], &Facts::default(), None).unwrap_err();
    let words = "may run on 1 of 3 nodes: 2 with kubelet's CPU manager policy static (dedicate such nodes to Flux by a taint that \
                 spec.nodes.tolerations names, or give kubelet policy none); they have cores for 2 of its 3 pods";
    assert_eq!(error.to_string(), words);
}

#[test]
fn the_check_counts_every_pod_against_what_the_node_has() {
    let foreign = |cpu| {
        let mut pod = PodView { is_bridged: false, is_taken_up: true, ..on("node0", pod("other", 0)) };
        pod.requests.cpu = cpu;
        pod
    };
    let room = |resource: &str, free, wanted| Some(Shortfall::Room { resource: resource.into(), free, wanted });
    let nothing: fn(&mut PodView) = |_| {};
    let idle: fn(&mut Target) = |_| {};
    for (what, change, node, others, expected) in [
        ("room", nothing, idle, vec![foreign(2000)], None),
        ("not Ready", nothing, |t| t.is_ready = false, vec![], Some(Shortfall::NotReady)),
        (
            "a taint",
            nothing,
            |t| t.taints = vec![taint("gpu")],
            vec![],
            Some(Shortfall::Taint("gpu:NoSchedule".into())),
        ),
        (
            "its selector",
            |p| plan(p).rules.selector = [("a".into(), "b".into())].into(),
            idle,
            vec![],
            Some(Shortfall::NotSelected),
        ),
        ("single pods get CPUs alone", nothing, |t| t.static_cpus = true, vec![], Some(Shortfall::StaticCpus)),
        (
            "they do on a node that is dedicated",
            nothing,
            |t| (t.static_cpus, t.is_dedicated) = (true, true),
            vec![],
            None,
        ),
        ("cpu in thousandths", nothing, |t| t.allocatable.cpu = 1999, vec![], room("cpu", 999, 1000)),
        ("cpu of others", nothing, idle, vec![foreign(2001)], room("cpu", 999, 1000)),
        ("cpu of bridged pods", nothing, idle, vec![on("node0", pod("other", 3))], room("cpu", 0, 1000)),
        ("memory", |p| p.requests.memory = 3, |t| t.allocatable.memory = 5, vec![], room("memory", 2, 3)),
        (
            "storage",
            |p| p.requests.ephemeral = 3,
            |t| t.allocatable.ephemeral = 5,
            vec![],
            room("ephemeral-storage", 2, 3),
        ),
        ("a device", |p| p.requests.extended = [("x".into(), 1)].into(), idle, vec![], room("x", 0, 1)),
        ("pods", nothing, |t| t.allocatable.pods = 2, vec![foreign(0)], room("pods", 0, 1)),
        (
            "a port",
            |p| p.requests.ports = [HostPort { port: 1, protocol: "TCP".into(), ip: String::new() }].into(),
            idle,
            vec![],
            Some(Shortfall::Port(1)),
        ),
    ] {
        let mut targets = targets(&[4, 4]);
        node(targets.get_mut(&0).unwrap());
        let mut pods = [pod("p0", 1), pod("p1", 1)];
        pods.iter_mut().for_each(change);
        let usage = UsageByNode::of(&others, |pod| !pod.is_bridged, 0);
        let failing = check(&[(&pods[0], 0), (&pods[1], 0)], &targets, &usage);
        assert_eq!(failing.get(&0), expected.as_ref(), "{what}");
    }
}

#[test]
fn all_nodes_that_fail_are_named_at_once() {
    let mut targets = targets(&[1, 1, 1]);
    targets.get_mut(&0).unwrap().is_ready = false;
    let pods = [pod("a", 1), pod("b", 2), pod("c", 1), pod("d", 1)];
    let dealt: Vec<_> = pods.iter().zip([0, 1, 2, 7]).collect();
    let failing = check(&dealt, &targets, &UsageByNode::default());
    assert_eq!(failing.keys().copied().collect::<Vec<_>>(), [0, 1, 7]);
    assert_eq!(failing[&7], Shortfall::Gone);
}
