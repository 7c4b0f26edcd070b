use std::collections::BTreeMap;

use super::*;
use api::{Facts, Resources};

const PORT: u16 = 8052;

fn address(number: usize) -> IpAddr {
    let [_, a, b, c] = u32::try_from(number).unwrap().to_be_bytes();
    [10, a, b, c].into()
}

fn peer(number: usize) -> String {
    SocketAddr::new(address(number), PORT).to_string()
}

fn facts(platform: &str) -> Facts {
    Facts {
        resources: Resources { cores: 2, gpus: 0 },
        memory_mib: 1024,
        platform: platform.to_owned(),
        glibc: "2.36".into(),
        boot_id: "boot".into(),
        systemd: false,
        static_cpus: false,
        prefix: "/opt/flux-distribute".into(),
    }
}

/// A node that wants the package set `set`, has passed preflight and serves archives.
#[derive(Clone)]
struct Node {
    wants: Option<&'static str>,
    assigned: Option<FetchFrom>,
    report: FluxNodeStatus,
    address: Option<IpAddr>,
}

impl Node {
    fn new(number: usize) -> Self {
        let report =
            FluxNodeStatus { facts: Some(facts("linux-64")), peer: Some(peer(number)), ..FluxNodeStatus::default() };
        Self { wants: Some("set"), assigned: None, report, address: Some(address(number)) }
    }

    fn holds(mut self) -> Self {
        (self.report.cached_package_sets, self.report.phase) = (vec!["set".into()], NodePhase::Online);
        self
    }

    fn assigned(mut self, peers: &[usize], since: i64) -> Self {
        let peers = peers.iter().map(|number| peer(*number)).collect();
        self.assigned = Some(FetchFrom { digest: "set".into(), peers, since });
        self
    }

    fn phase(mut self, phase: NodePhase) -> Self {
        self.report.phase = phase;
        self
    }

    fn mute(mut self) -> Self {
        self.report.peer = None;
        self
    }

    fn gone(mut self) -> Self {
        self.address = None;
        self
    }
}

fn assign(nodes: &[Node], now: i64) -> Vec<Option<FetchFrom>> {
    assign_sources_of(nodes, false, now)
}

fn assign_sources_of(nodes: &[Node], is_local: bool, now: i64) -> Vec<Option<FetchFrom>> {
    let fetchers: Vec<_> = nodes
        .iter()
        .map(|node| Fetcher {
            wants: node.wants,
            assigned: node.assigned.as_ref(),
            report: &node.report,
            address: node.address,
        })
        .collect();
    assign_sources(&fetchers, |_| is_local, now)
}

/// What each node is assigned: `-` if it waits, `source`, or the numbers of its peers.
fn sent(nodes: &[Node], now: i64) -> Vec<String> {
    let number = |peer: &String| peer.split(':').next().unwrap().rsplit('.').next().unwrap().to_owned();
    let shown = |assigned: Option<FetchFrom>| match assigned {
        None => "-".to_owned(),
        Some(assigned) if assigned.peers.is_empty() => "source".to_owned(),
        Some(assigned) => assigned.peers.iter().map(number).collect::<Vec<_>>().join(" "),
    };
    assign(nodes, now).into_iter().map(shown).collect()
}

const NOW: i64 = 10_000;
const JUST_NOW: i64 = NOW - 10;
const LONG_AGO: i64 = 0;

#[test]
fn one_node_asks_the_source_and_the_others_wait_for_a_holder() {
    use NodePhase::{Failed, Installing, Waiting};
    let node = Node::new;
    let asker = || node(1).assigned(&[], JUST_NOW).phase(Installing);
    for (what, nodes, expected) in [
        ("the first node asks", vec![node(1), node(2), node(3)], vec!["source", "-", "-"]),
        (
            "until it has begun, the others wait",
            vec![asker().phase(Waiting), node(2), node(3)],
            vec!["source", "-", "-"],
        ),
        (
            "a node that can't serve is not waited for",
            vec![asker().mute(), node(2), node(3)],
            vec!["source", "source", "-"],
        ),
        ("it holds the set", vec![asker().holds(), node(2), node(3)], vec!["source", "1", "1"]),
        ("it has failed", vec![asker().phase(Failed), node(2), node(3)], vec!["source", "source", "-"]),
        ("its Node is not Ready", vec![asker().gone(), node(2), node(3)], vec!["source", "source", "-"]),
        ("its FluxNode is gone", vec![node(2), node(3)], vec!["source", "-"]),
        (
            "it is no longer to install",
            vec![Node { wants: None, ..asker() }, node(2), node(3)],
            vec!["source", "source", "-"],
        ),
        ("it is slow", vec![node(1).assigned(&[], NOW - 800).phase(Installing), node(2)], vec!["source", "1"]),
        ("it is too slow", vec![node(1).assigned(&[], NOW - 900).phase(Installing), node(2)], vec!["source", "source"]),
        ("it does not begin", vec![node(1).assigned(&[], NOW - 120), node(2)], vec!["source", "source"]),
        ("a failed node is not the first", vec![node(1).phase(Failed), node(2)], vec!["-", "source"]),
        ("a node that can't serve is not the first", vec![node(1).mute(), node(2)], vec!["-", "source"]),
        ("no node can serve", vec![node(1).mute(), node(2).mute()], vec!["source", "source"]),
        ("a failed asker fetches from a holder", vec![asker().phase(Failed), node(2).holds()], vec!["2", "-"]),
    ] {
        assert_eq!(sent(&nodes, NOW), expected, "{what}");
    }
}

#[test]
fn a_node_that_asks_the_source_has_children_meanwhile() {
    use NodePhase::{Failed, Installing, Online};
    let node = Node::new;
    let asker = |number: usize| node(number).assigned(&[], JUST_NOW).phase(Installing);
    let of = |parent: usize, number: usize| node(number).assigned(&[parent], JUST_NOW).phase(Installing);
    let full = || [asker(1), of(1, 2), of(1, 3), of(1, 4), of(1, 5)].to_vec();
    let and = |mut nodes: Vec<Node>, more: &[Node]| {
        nodes.extend_from_slice(more);
        nodes
    };
    for (what, nodes, expected) in [
        ("at once", vec![asker(1), node(2), node(3)], vec!["source", "1", "1"]),
        ("at any position", vec![node(2), asker(1), node(3)], vec!["1", "source", "1"]),
        (
            "it has four, and its children have none",
            and(full(), &[node(6), node(7)]),
            vec!["source", "1", "1", "1", "1", "-", "-"],
        ),
        (
            "four over time: children that hold the set still count",
            and(vec![asker(1), of(1, 2).holds(), of(1, 3), of(1, 4), of(1, 5)], &[node(6)]),
            vec!["source", "1", "1", "1", "1", "2"],
        ),
        (
            "a holder is preferred as parent, and is the only fallback",
            and(vec![asker(1), node(2).holds(), node(3).holds()], &[node(4), node(5)]),
            vec!["source", "-", "-", "2 3", "3 2"],
        ),
        (
            "the holders are full",
            vec![
                node(9).holds(),
                of(9, 2).gone().holds(),
                of(9, 3).gone().holds(),
                of(9, 4).gone().holds(),
                of(9, 5).gone().holds(),
                asker(1),
                node(6),
            ],
            vec!["-", "9", "9", "9", "9", "source", "1 9"],
        ),
        ("it holds the set now", vec![asker(1).holds(), of(1, 2)], vec!["source", "1"]),
        ("it has failed", vec![asker(1).phase(Failed), of(1, 2), of(1, 3)], vec!["source", "source", "-"]),
        ("its Node is not Ready", vec![asker(1).gone(), of(1, 2), of(1, 3)], vec!["source", "source", "-"]),
        ("its FluxNode is gone", vec![of(1, 2), of(1, 3)], vec!["source", "-"]),
        (
            "it has failed, and another node asks",
            vec![asker(1).phase(Failed), asker(2), of(1, 3)],
            vec!["2", "source", "2"],
        ),
        ("it is sent to a holder itself", vec![of(4, 1), node(4).holds(), of(1, 2), node(3)], vec!["4", "-", "4", "4"]),
        ("an online node does not report that it installs", vec![asker(1).phase(Online), node(2)], vec!["source", "-"]),
    ] {
        assert_eq!(sent(&nodes, NOW), expected, "{what}");
    }
}

#[test]
fn a_source_that_is_down_gets_new_askers_ever_more_rarely() {
    let mut nodes: Vec<_> = (1..=40).map(Node::new).collect();
    let mut askers = Vec::new();
    for now in 0..3600 {
        let next = assign(&nodes, now);
        for (node, assigned) in nodes.iter_mut().zip(next) {
            node.report.phase = if assigned.is_some() { NodePhase::Failed } else { NodePhase::Waiting };
            node.assigned = assigned;
        }
        askers.push(nodes.iter().filter(|node| node.assigned.is_some()).count());
    }
    assert_eq!([askers[2], askers[60], askers[600], askers[3599]], [2, 4, 7, 12]);
}

#[test]
fn a_holder_has_four_children_and_each_child_has_two_fallbacks() {
    let node = Node::new;
    let of_1 = |number: usize| node(number).assigned(&[1], LONG_AGO).holds();
    let first = node(1).assigned(&[], LONG_AGO).holds();
    for (what, nodes, expected) in [
        (
            "a fifth waits",
            vec![first.clone(), node(2), node(3), node(4), node(5), node(6)],
            vec!["source", "1", "1", "1", "1", "-"],
        ),
        (
            "a full parent gets no more, its children do",
            vec![first.clone(), of_1(2), of_1(3), of_1(4), of_1(5), node(6), node(7)],
            vec!["source", "1", "1", "1", "1", "2 3 4", "3 4 5"],
        ),
        (
            "the one with the fewest children is the parent",
            vec![first.clone(), of_1(2), of_1(3), node(4)],
            vec!["source", "1", "1", "2 3 1"],
        ),
        (
            "a holder that can't serve is no parent",
            vec![first.clone().mute(), node(2), node(3)],
            vec!["source", "source", "-"],
        ),
        ("nor is one whose Node is not Ready", vec![first.clone().gone(), of_1(2), node(3)], vec!["source", "1", "2"]),
        (
            "children that are gone make room",
            vec![first.clone(), node(2).assigned(&[1], JUST_NOW).gone(), node(3), node(4), node(5), node(6)],
            vec!["source", "1", "1", "1", "1", "1"],
        ),
        (
            "a list with one serving peer stays",
            vec![first.clone(), node(2).assigned(&[9, 1], LONG_AGO)],
            vec!["source", "9 1"],
        ),
        (
            "a list without a serving peer is replaced",
            vec![first.clone(), node(2).assigned(&[8, 9], JUST_NOW)],
            vec!["source", "1"],
        ),
        ("or its node goes to the source", vec![node(2).assigned(&[8, 9], JUST_NOW), node(3)], vec!["source", "-"]),
    ] {
        assert_eq!(sent(&nodes, NOW), expected, "{what}");
    }
}

#[test]
fn a_good_assignment_is_not_changed() {
    let node = Node::new;
    let other = FetchFrom { digest: "old".into(), peers: vec![peer(1)], since: 7 };
    let ready = |mut node: Node| {
        node.report.digest = Some("set".into());
        node
    };
    for kept in [
        node(2).assigned(&[1], JUST_NOW),
        node(2).assigned(&[1], LONG_AGO),
        node(2).assigned(&[1], LONG_AGO).holds(),
        ready(node(2).assigned(&[], LONG_AGO)),
        ready(node(2).assigned(&[77], LONG_AGO).gone()),
        Node { wants: None, ..node(2).assigned(&[1], LONG_AGO) },
        Node { assigned: None, ..node(2).holds() },
    ] {
        let nodes = [node(1).assigned(&[], LONG_AGO).holds(), kept.clone()];
        assert_eq!(assign(&nodes, NOW)[1], kept.assigned);
    }
    let next = assign(&[node(1).assigned(&[], LONG_AGO).holds(), Node { assigned: Some(other), ..node(2) }], NOW);
    assert_eq!(next[1], Some(FetchFrom { digest: "set".into(), peers: vec![peer(1)], since: NOW }));
}

#[test]
fn a_peer_address_other_than_the_nodes_own_is_ignored() {
    let mut liar = Node::new(1).holds();
    for elsewhere in ["169.254.169.254:80", "10.0.0.2:8052", "node1:8052", ""] {
        liar.report.peer = Some(elsewhere.to_owned());
        assert_eq!(sent(&[liar.clone(), Node::new(2)], NOW), ["-", "source"]);
    }
}

#[test]
fn each_platform_has_its_own_asker_and_its_own_holders() {
    let arm = |number| {
        let mut node = Node::new(number);
        node.report.facts = Some(facts("linux-aarch64"));
        node
    };
    let unknown = Node { report: FluxNodeStatus::default(), ..Node::new(9) };
    let nodes = [unknown, Node::new(1).holds(), arm(2), arm(3), Node::new(4)];
    assert_eq!(sent(&nodes, NOW), ["-", "-", "source", "-", "1"]);
}

#[test]
fn a_set_that_is_on_every_host_is_installed_everywhere_at_once() {
    let nodes = [Node::new(1), Node::new(2).mute(), Node::new(3).holds(), Node::new(4).assigned(&[], 5)];
    let next = assign_sources_of(&nodes, true, NOW);
    let of = |since| Some(FetchFrom { digest: "set".into(), peers: vec![], since });
    assert_eq!(next, [of(NOW), of(NOW), None, of(5)]);
}

#[test]
fn a_set_is_on_every_host_only_if_all_its_urls_are_files() {
    for (urls, expected) in [
        (&["file:///b.tar.gz"][..], true),
        (&["file:///c/a.conda", "file:///c/b.conda"], true),
        (&["file:///c/a.conda", "https://h/c/b.conda"], false),
        (&["http://h/b.tar.gz"], false),
        (&[], false),
    ] {
        let urls: Vec<_> = urls.iter().map(|url| (*url).to_owned()).collect();
        assert_eq!(is_on_every_host(&urls), expected, "{urls:?}");
    }
}

/// Pseudo-random numbers, the same in each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

/// Runs until all nodes have the set: in each round some nodes with an assignment get it. Returns the number of rounds.
fn run(nodes: &mut [Node], mut finishes: impl FnMut(usize) -> bool) -> i64 {
    for round in 0.. {
        let next = assign(nodes, round);
        for (node, assigned) in nodes.iter_mut().zip(next) {
            assert!(node.assigned.is_none() || node.assigned == assigned, "reassigned in round {round}");
            node.assigned = assigned;
        }
        // A planner that has just taken over makes the same assignments.
        assert!(
            nodes
                .iter()
                .zip(assign(nodes, round + 1))
                .all(|(node, assigned)| node.assigned.is_none() || node.assigned == assigned)
        );
        if nodes.iter().all(|node| !node.report.cached_package_sets.is_empty()) {
            return round;
        }
        for (index, node) in nodes.iter_mut().enumerate() {
            if node.assigned.is_some() && node.report.cached_package_sets.is_empty() {
                node.report.phase = NodePhase::Installing;
                if finishes(index) {
                    *node = node.clone().holds();
                }
            }
        }
        assert!(round < 800, "some nodes never get the set");
    }
    unreachable!()
}

/// Checks the tree in which all nodes got the set; returns its depth.
fn check(nodes: &[Node]) -> usize {
    let mut children: BTreeMap<&str, usize> = BTreeMap::new();
    let mut askers: BTreeMap<&str, usize> = BTreeMap::new();
    let by_peer: BTreeMap<_, _> = nodes.iter().map(|node| (node.report.peer.as_deref().unwrap(), node)).collect();
    let platform = |node: &Node| node.report.facts.as_ref().unwrap().platform.clone();
    let mut deepest = 0;
    for node in nodes {
        let assigned = node.assigned.as_ref().unwrap();
        match assigned.peers.first() {
            Some(parent) => *children.entry(parent).or_default() += 1,
            None => *askers.entry(&node.report.facts.as_ref().unwrap().platform).or_default() += 1,
        }
        let mut distinct = assigned.peers.clone();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() == assigned.peers.len() && assigned.peers.len() <= 1 + FALLBACKS);
        let (mut depth, mut above) = (0, node);
        while let Some(parent) = above.assigned.as_ref().unwrap().peers.first() {
            let next = by_peer[parent.as_str()];
            assert_eq!(platform(next), platform(node));
            (depth, above) = (depth + 1, next);
            assert!(depth < nodes.len(), "the parents form a circle");
        }
        deepest = deepest.max(depth);
    }
    assert!(children.values().all(|children| *children <= CHILDREN), "{children:?}");
    assert!(askers.values().all(|askers| *askers == 1), "{askers:?}");
    deepest
}

#[test]
fn a_thousand_nodes_form_a_tree_with_four_children_each_under_one_asker() {
    let mut nodes: Vec<_> = (1..=1000).map(Node::new).collect();
    let rounds = run(&mut nodes, |_| true);
    let deepest = check(&nodes);
    // 1, 5, 25, 125, 625, …: in each round every holder brings the set to four others.
    assert_eq!((rounds, deepest), (6, 5), "the fifth power of four is 1,024");
}

#[test]
fn at_any_speeds_there_are_four_children_each_and_one_asker_per_platform() {
    for seed in 0..8 {
        let mut dice = Dice(seed);
        let count = 1 + dice.below(1000);
        let mut nodes: Vec<_> = (1..=count).map(Node::new).collect();
        for node in &mut nodes {
            let platform = ["linux-64", "linux-64", "linux-aarch64"][dice.below(3)];
            node.report.facts = Some(facts(platform));
        }
        let speeds: Vec<_> = nodes.iter().map(|_| 1 + dice.below(6)).collect();
        run(&mut nodes, |index| dice.below(speeds[index]) == 0);
        check(&nodes);
    }
}

#[test]
fn nodes_that_fail_leave_or_come_back_get_the_packages_in_the_end() {
    for seed in 0..5 {
        let mut dice = Dice(seed);
        let mut nodes: Vec<_> = (1..=100).map(Node::new).collect();
        let mut askers = 0;
        for now in 0.. {
            let next = assign(&nodes, now);
            for (node, assigned) in nodes.iter_mut().zip(next) {
                let asks =
                    assigned.as_ref().is_some_and(|assigned| assigned.peers.is_empty()) && node.assigned != assigned;
                askers += usize::from(asks);
                node.assigned = assigned;
            }
            if nodes.iter().all(|node| !node.report.cached_package_sets.is_empty()) {
                break;
            }
            for (number, node) in nodes.iter_mut().enumerate() {
                let fetches = node.assigned.is_some() && node.report.cached_package_sets.is_empty();
                match dice.below(if now < 100 { 20 } else { 100 }) {
                    // The Node comes and goes, the agent fails, the disk is replaced.
                    0 => node.address = node.address.xor(Some(address(number + 1))),
                    1 if fetches => node.report.phase = NodePhase::Failed,
                    2 if now < 100 => node.report.cached_package_sets.clear(),
                    3..=8 if fetches && node.address.is_some() => *node = node.clone().holds(),
                    _ if fetches => node.report.phase = NodePhase::Installing,
                    _ => {}
                }
            }
            assert!(now < 20_000, "some nodes never get the set");
        }
        assert!(askers < 60, "{askers} nodes asked the source, of 100 nodes that fail again and again");
    }
}

/// Whoever has an agent's token may write any time into an assignment.
#[test]
fn a_time_of_another_clock_lets_no_node_wait_for_ever() {
    use NodePhase::{Failed, Installing};
    for since in [i64::MIN, i64::MAX] {
        for phase in [Failed, Installing] {
            let forged = Node::new(1).phase(phase).assigned(&[], since);
            let assigned = assign(&[forged, Node::new(2)], 1);
            assert!(assigned[1].as_ref().is_some_and(|source| source.peers.is_empty()), "{since} {assigned:?}");
        }
    }
}
