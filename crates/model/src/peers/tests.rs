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
        prefix: "/opt/flux-distribute".into(),
    }
}

/// A node that wants the set `set`, has passed preflight, and has its port.
#[derive(Clone)]
struct Node {
    wants: Option<&'static str>,
    told: Option<FetchFrom>,
    report: FluxNodeStatus,
    address: Option<IpAddr>,
}

impl Node {
    fn new(number: usize) -> Self {
        let report =
            FluxNodeStatus { facts: Some(facts("linux-64")), peer: Some(peer(number)), ..FluxNodeStatus::default() };
        Self { wants: Some("set"), told: None, report, address: Some(address(number)) }
    }

    fn holds(mut self) -> Self {
        (self.report.holds, self.report.phase) = (vec!["set".into()], NodePhase::Online);
        self
    }

    fn told(mut self, peers: &[usize], since: i64) -> Self {
        let peers = peers.iter().map(|number| peer(*number)).collect();
        self.told = Some(FetchFrom { digest: "set".into(), peers, since });
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

fn told(nodes: &[Node], now: i64) -> Vec<Option<FetchFrom>> {
    decided(nodes, false, now)
}

fn decided(nodes: &[Node], is_local: bool, now: i64) -> Vec<Option<FetchFrom>> {
    let fetchers: Vec<_> = nodes
        .iter()
        .map(|node| Fetcher {
            wants: node.wants,
            told: node.told.as_ref(),
            report: &node.report,
            address: node.address,
        })
        .collect();
    decide(&fetchers, |_| is_local, now)
}

/// Whom each node is sent to: `-` nobody yet, `source`, or its peers' numbers.
fn sent(nodes: &[Node], now: i64) -> Vec<String> {
    let number = |peer: &String| peer.split(':').next().unwrap().rsplit('.').next().unwrap().to_owned();
    let shown = |told: Option<FetchFrom>| match told {
        None => "-".to_owned(),
        Some(told) if told.peers.is_empty() => "source".to_owned(),
        Some(told) => told.peers.iter().map(number).collect::<Vec<_>>().join(" "),
    };
    told(nodes, now).into_iter().map(shown).collect()
}

const NOW: i64 = 10_000;
const JUST_NOW: i64 = NOW - 10;
const LONG_AGO: i64 = 0;

#[test]
fn one_node_asks_the_source_and_the_others_wait_for_a_holder() {
    use NodePhase::{Failed, Installing, Waiting};
    let node = Node::new;
    let asker = || node(1).told(&[], JUST_NOW).phase(Installing);
    for (what, nodes, expected) in [
        ("the first asks", vec![node(1), node(2), node(3)], vec!["source", "-", "-"]),
        ("until it has begun, all wait", vec![asker().phase(Waiting), node(2), node(3)], vec!["source", "-", "-"]),
        ("who can't serve is not waited for", vec![asker().mute(), node(2), node(3)], vec!["source", "source", "-"]),
        ("it holds", vec![asker().holds(), node(2), node(3)], vec!["source", "1", "1"]),
        ("it has failed", vec![asker().phase(Failed), node(2), node(3)], vec!["source", "source", "-"]),
        ("its Node is not Ready", vec![asker().gone(), node(2), node(3)], vec!["source", "source", "-"]),
        ("its FluxNode is gone", vec![node(2), node(3)], vec!["source", "-"]),
        (
            "it is not to install any more",
            vec![Node { wants: None, ..asker() }, node(2), node(3)],
            vec!["source", "source", "-"],
        ),
        ("it is slow", vec![node(1).told(&[], NOW - 800).phase(Installing), node(2)], vec!["source", "1"]),
        ("it is too slow", vec![node(1).told(&[], NOW - 900).phase(Installing), node(2)], vec!["source", "source"]),
        ("it does not even begin", vec![node(1).told(&[], NOW - 120), node(2)], vec!["source", "source"]),
        ("who has failed before is not the first", vec![node(1).phase(Failed), node(2)], vec!["-", "source"]),
        ("who can't serve is not the first", vec![node(1).mute(), node(2)], vec!["-", "source"]),
        ("nobody can serve", vec![node(1).mute(), node(2).mute()], vec!["source", "source"]),
        ("a failed asker fetches from a holder", vec![asker().phase(Failed), node(2).holds()], vec!["2", "-"]),
    ] {
        assert_eq!(sent(&nodes, NOW), expected, "{what}");
    }
}

#[test]
fn who_asks_the_source_has_children_while_it_does() {
    use NodePhase::{Failed, Installing, Online};
    let node = Node::new;
    let asker = |number: usize| node(number).told(&[], JUST_NOW).phase(Installing);
    let of = |parent: usize, number: usize| node(number).told(&[parent], JUST_NOW).phase(Installing);
    let full = || [asker(1), of(1, 2), of(1, 3), of(1, 4), of(1, 5)].to_vec();
    let and = |mut nodes: Vec<Node>, more: &[Node]| {
        nodes.extend_from_slice(more);
        nodes
    };
    for (what, nodes, expected) in [
        ("at once", vec![asker(1), node(2), node(3)], vec!["source", "1", "1"]),
        ("wherever it stands", vec![node(2), asker(1), node(3)], vec!["1", "source", "1"]),
        (
            "four of them, and none of its children has any",
            and(full(), &[node(6), node(7)]),
            vec!["source", "1", "1", "1", "1", "-", "-"],
        ),
        (
            "four over time: they stay its own when they hold the set",
            and(vec![asker(1), of(1, 2).holds(), of(1, 3), of(1, 4), of(1, 5)], &[node(6)]),
            vec!["source", "1", "1", "1", "1", "2"],
        ),
        (
            "a holder is the better parent, and the only one to turn to",
            and(vec![asker(1), node(2).holds(), node(3).holds()], &[node(4), node(5)]),
            vec!["source", "-", "-", "2 3", "3 2"],
        ),
        (
            "whose holders are full",
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
            "it has failed, and another one asks",
            vec![asker(1).phase(Failed), asker(2), of(1, 3)],
            vec!["2", "source", "2"],
        ),
        ("it is sent to a holder itself", vec![of(4, 1), node(4).holds(), of(1, 2), node(3)], vec!["4", "-", "4", "4"]),
        ("one that is online does not tell what it is at", vec![asker(1).phase(Online), node(2)], vec!["source", "-"]),
    ] {
        assert_eq!(sent(&nodes, NOW), expected, "{what}");
    }
}

#[test]
fn a_source_that_is_down_has_ever_fewer_new_askers() {
    let mut nodes: Vec<_> = (1..=40).map(Node::new).collect();
    let mut askers = Vec::new();
    for now in 0..3600 {
        let next = told(&nodes, now);
        for (node, told) in nodes.iter_mut().zip(next) {
            node.report.phase = if told.is_some() { NodePhase::Failed } else { NodePhase::Waiting };
            node.told = told;
        }
        askers.push(nodes.iter().filter(|node| node.told.is_some()).count());
    }
    assert_eq!([askers[2], askers[60], askers[600], askers[3599]], [2, 4, 7, 12]);
}

#[test]
fn a_holder_has_four_children_and_each_child_two_others_to_turn_to() {
    let node = Node::new;
    let of_1 = |number: usize| node(number).told(&[1], LONG_AGO).holds();
    let first = node(1).told(&[], LONG_AGO).holds();
    for (what, nodes, expected) in [
        (
            "a fifth waits",
            vec![first.clone(), node(2), node(3), node(4), node(5), node(6)],
            vec!["source", "1", "1", "1", "1", "-"],
        ),
        (
            "those who have it have children, the parent no more",
            vec![first.clone(), of_1(2), of_1(3), of_1(4), of_1(5), node(6), node(7)],
            vec!["source", "1", "1", "1", "1", "2 3 4", "3 4 5"],
        ),
        (
            "the one with the fewest children is the parent",
            vec![first.clone(), of_1(2), of_1(3), node(4)],
            vec!["source", "1", "1", "2 3 1"],
        ),
        (
            "a holder that can't serve is none",
            vec![first.clone().mute(), node(2), node(3)],
            vec!["source", "source", "-"],
        ),
        ("nor one that is away", vec![first.clone().gone(), of_1(2), node(3)], vec!["source", "1", "2"]),
        (
            "children that are gone leave room",
            vec![first.clone(), node(2).told(&[1], JUST_NOW).gone(), node(3), node(4), node(5), node(6)],
            vec!["source", "1", "1", "1", "1", "1"],
        ),
        (
            "a list of which one is there is good",
            vec![first.clone(), node(2).told(&[9, 1], LONG_AGO)],
            vec!["source", "9 1"],
        ),
        (
            "a list of which none is there is made anew",
            vec![first.clone(), node(2).told(&[8, 9], JUST_NOW)],
            vec!["source", "1"],
        ),
        ("or is the way to the source", vec![node(2).told(&[8, 9], JUST_NOW), node(3)], vec!["source", "-"]),
    ] {
        assert_eq!(sent(&nodes, NOW), expected, "{what}");
    }
}

#[test]
fn what_was_told_and_is_good_is_not_told_anew() {
    let node = Node::new;
    let other = FetchFrom { digest: "old".into(), peers: vec![peer(1)], since: 7 };
    let ready = |mut node: Node| {
        node.report.digest = Some("set".into());
        node
    };
    for kept in [
        node(2).told(&[1], JUST_NOW),
        node(2).told(&[1], LONG_AGO),
        node(2).told(&[1], LONG_AGO).holds(),
        ready(node(2).told(&[], LONG_AGO)),
        ready(node(2).told(&[77], LONG_AGO).gone()),
        Node { wants: None, ..node(2).told(&[1], LONG_AGO) },
        Node { told: None, ..node(2).holds() },
    ] {
        let nodes = [node(1).told(&[], LONG_AGO).holds(), kept.clone()];
        assert_eq!(told(&nodes, NOW)[1], kept.told);
    }
    let next = told(&[node(1).told(&[], LONG_AGO).holds(), Node { told: Some(other), ..node(2) }], NOW);
    assert_eq!(next[1], Some(FetchFrom { digest: "set".into(), peers: vec![peer(1)], since: NOW }));
}

#[test]
fn nobody_is_sent_to_another_address_than_the_nodes_own() {
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
    let nodes = [Node::new(1), Node::new(2).mute(), Node::new(3).holds(), Node::new(4).told(&[], 5)];
    let next = decided(&nodes, true, NOW);
    let of = |since| Some(FetchFrom { digest: "set".into(), peers: vec![], since });
    assert_eq!(next, [of(NOW), of(NOW), None, of(5)]);
}

#[test]
fn only_what_comes_from_files_alone_is_on_every_host() {
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

/// Numbers that look random and are the same in each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

/// Runs until all have the set: in each round some of those that were told get it. Returns the rounds.
fn run(nodes: &mut [Node], mut finishes: impl FnMut(usize) -> bool) -> i64 {
    for round in 0.. {
        let next = told(nodes, round);
        for (node, told) in nodes.iter_mut().zip(next) {
            assert!(node.told.is_none() || node.told == told, "told anew in round {round}");
            node.told = told;
        }
        // A planner that has just taken over sees the same and says the same.
        assert!(nodes.iter().zip(told(nodes, round + 1)).all(|(node, told)| node.told.is_none() || node.told == told));
        if nodes.iter().all(|node| !node.report.holds.is_empty()) {
            return round;
        }
        for (index, node) in nodes.iter_mut().enumerate() {
            if node.told.is_some() && node.report.holds.is_empty() {
                node.report.phase = NodePhase::Installing;
                if finishes(index) {
                    *node = node.clone().holds();
                }
            }
        }
        assert!(round < 800, "it does not end");
    }
    unreachable!()
}

/// What must be true of the way in which everybody got it.
fn check(nodes: &[Node]) -> usize {
    let mut children: BTreeMap<&str, usize> = BTreeMap::new();
    let mut askers: BTreeMap<&str, usize> = BTreeMap::new();
    let by_peer: BTreeMap<_, _> = nodes.iter().map(|node| (node.report.peer.as_deref().unwrap(), node)).collect();
    let platform = |node: &Node| node.report.facts.as_ref().unwrap().platform.clone();
    let mut deepest = 0;
    for node in nodes {
        let told = node.told.as_ref().unwrap();
        match told.peers.first() {
            Some(parent) => *children.entry(parent).or_default() += 1,
            None => *askers.entry(&node.report.facts.as_ref().unwrap().platform).or_default() += 1,
        }
        let mut distinct = told.peers.clone();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() == told.peers.len() && told.peers.len() <= 1 + FALLBACKS);
        let (mut depth, mut above) = (0, node);
        while let Some(parent) = above.told.as_ref().unwrap().peers.first() {
            let next = by_peer[parent.as_str()];
            assert_eq!(platform(next), platform(node));
            (depth, above) = (depth + 1, next);
            assert!(depth < nodes.len(), "a circle");
        }
        deepest = deepest.max(depth);
    }
    assert!(children.values().all(|children| *children <= CHILDREN), "{children:?}");
    assert!(askers.values().all(|askers| *askers == 1), "{askers:?}");
    deepest
}

#[test]
fn a_thousand_nodes_are_a_tree_of_four_children_over_one_asker() {
    let mut nodes: Vec<_> = (1..=1000).map(Node::new).collect();
    let rounds = run(&mut nodes, |_| true);
    let deepest = check(&nodes);
    // 1, 5, 25, 125, 625: each that has it brings it to four others.
    assert_eq!((rounds, deepest), (6, 5), "the fifth power of four is 1,024");
}

#[test]
fn however_fast_each_is_there_are_four_children_and_one_asker_per_platform() {
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
fn nodes_that_fail_leave_or_come_back_at_any_time_end_with_the_packages() {
    for seed in 0..5 {
        let mut dice = Dice(seed);
        let mut nodes: Vec<_> = (1..=100).map(Node::new).collect();
        let mut askers = 0;
        for now in 0.. {
            let next = told(&nodes, now);
            for (node, told) in nodes.iter_mut().zip(next) {
                let asks = told.as_ref().is_some_and(|told| told.peers.is_empty()) && node.told != told;
                askers += usize::from(asks);
                node.told = told;
            }
            if nodes.iter().all(|node| !node.report.holds.is_empty()) {
                break;
            }
            for (number, node) in nodes.iter_mut().enumerate() {
                let fetches = node.told.is_some() && node.report.holds.is_empty();
                match dice.below(if now < 100 { 20 } else { 100 }) {
                    // Its Node comes and goes, its agent fails, its disk is replaced.
                    0 => node.address = node.address.xor(Some(address(number + 1))),
                    1 if fetches => node.report.phase = NodePhase::Failed,
                    2 if now < 100 => node.report.holds.clear(),
                    3..=8 if fetches && node.address.is_some() => *node = node.clone().holds(),
                    _ if fetches => node.report.phase = NodePhase::Installing,
                    _ => {}
                }
            }
            assert!(now < 20_000, "it does not end");
        }
        assert!(askers < 60, "{askers} askers of 100 nodes, each of which fails again and again");
    }
}
