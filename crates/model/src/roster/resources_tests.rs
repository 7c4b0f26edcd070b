use api::{IdSet, NodePhase, Rank, Resources};
use serde_json::json;
use std::collections::BTreeMap;

use super::{
    tests::{World, entry_of as entry},
    *,
};
use crate::{
    eligibility::{Cpu, NodeView},
    members::rank_of,
};

type Edit = fn(&mut World);
/// Cores, GPUs, excluded.
type Shown = (&'static str, u32, bool);

/// Two nodes with 8 cores and 2 GPUs each, both online.
fn world() -> World {
    let mut world = World::up(2);
    for node in ["node1", "node2"] {
        has(&mut world, node, 8, 2);
    }
    world.settle();
    world.online("node1");
    world
}

fn has(world: &mut World, node: &str, cores: u32, gpus: u32) {
    let facts = world.reports.get_mut(node).unwrap().facts.as_mut().unwrap();
    facts.resources = Resources { cores, gpus };
}

fn lead_reports(world: &mut World, drained: &str, allocated: &str) {
    let lead = world.reports.get_mut("node1").unwrap();
    (lead.drained, lead.allocated) = (Some(drained.parse().unwrap()), Some(allocated.parse().unwrap()));
}

/// Lets enough time pass that the lead's report is about the present drain and that `spec.resources.retain` is over.
fn time_passes(world: &mut World) {
    world.now += 600;
}

fn exclude(world: &mut World, exclude: serde_json::Value) {
    world.spec.resources.exclude = serde_json::from_value(exclude).unwrap();
}

fn drain(world: &World, rank: Rank) -> Option<(String, bool)> {
    entry(world, rank).drain.map(|drain| (drain.reason, drain.leave))
}

fn declared(world: &World, rank: Rank) -> (String, u32, bool) {
    let declared = entry(world, rank).resources.unwrap();
    (declared.core_ids().to_string(), declared.gpus, declared.excluded)
}

/// A FluxNode outlives its Node for a while, with what the old machine's agent reported.
#[test]
fn a_new_machine_with_a_removed_nodes_name_joins_once_its_own_agent_has_reported() {
    let mut world = world();
    let gone = world.nodes.remove(1);
    world.settle();
    time_passes(&mut world);
    world.settle();
    let new = NodeView { uid: "new".to_owned(), boot_id: "new".to_owned(), ..gone };
    world.nodes.push(new);
    world.reports.get_mut("node2").unwrap().adopted = None;
    world.settle();
    let rank = |world: &World| rank_of(world.roster.as_ref().unwrap(), "new");
    assert_eq!(rank(&world), None, "what is known of it is of the old machine");
    has(&mut world, "node2", 2, 0);
    world.reports.get_mut("node2").unwrap().facts.as_mut().unwrap().boot_id = "new".to_owned();
    world.settle();
    let rank = rank(&world).expect("a member");
    assert_eq!((declared(&world, rank), drain(&world, rank)), (("0-1".to_owned(), 0, false), None));
}

#[test]
fn a_node_with_less_is_drained_and_declares_what_it_has_once_it_is_idle() {
    let table: [(Edit, Rank, &str, Shown); 8] = [
        (|w| has(w, "node2", 6, 2), 1, "it has 6 cores, 8 are declared", ("0-5", 2, false)),
        (|w| has(w, "node1", 6, 4), 0, "it has 6 cores, 8 are declared", ("0-5", 4, false)),
        (|w| has(w, "node2", 8, 0), 1, "it has 0 GPUs for Flux, 2 are declared", ("0-7", 0, false)),
        (|w| w.nodes[1].advertises_gpus = true, 1, "it has 0 GPUs for Flux, 2 are declared", ("0-7", 0, false)),
        (
            |w| w.nodes[1].cpu = Some(Cpu { capacity: 8000, allocatable: 6000 }),
            1,
            "it has cores 2-7 for Flux, 0-7 are declared",
            ("2-7", 2, false),
        ),
        (|w| exclude(w, json!({"cores": "7"})), 0, "it has cores 0-6 for Flux, 0-7 are declared", ("0-6", 2, false)),
        (
            |w| exclude(w, json!({"lead": true})),
            0,
            "spec.resources.exclude keeps it out of scheduling",
            ("0-7", 2, true),
        ),
        (
            |w| exclude(w, json!({"nodes": ["node2"]})),
            1,
            "spec.resources.exclude keeps it out of scheduling",
            ("0-7", 2, true),
        ),
    ];
    for (change, rank, reason, expected) in table {
        let mut world = world();
        let before = declared(&world, rank);
        change(&mut world);
        lead_reports(&mut world, "0-1", "");
        world.settle();
        assert_eq!(declared(&world, rank), before, "the lead's report may be about an earlier drain");
        time_passes(&mut world);
        // The rank is not drained yet; nor idle; it is drained, but jobs run there; the lead is away; the node is away.
        let steps: [Edit; 5] = [
            |w| lead_reports(w, "", ""),
            |w| lead_reports(w, "", "0-1"),
            |w| lead_reports(w, "0-1", "0-1"),
            |w| {
                lead_reports(w, "0-1", "");
                w.reports.get_mut("node1").unwrap().phase = NodePhase::Offline;
            },
            |w| w.reports.get_mut("node2").unwrap().phase = NodePhase::Starting,
        ];
        for step in &steps[..if rank == 0 { 4 } else { 5 }] {
            step(&mut world);
            world.settle();
            assert_eq!(declared(&world, rank), before, "{reason}");
            assert_eq!(drain(&world, rank), Some((reason.to_owned(), false)));
            assert!(world.projected("node1").drain.values().any(|ranks| ranks.contains(rank)));
            world.online("node1");
            world.online("node2");
        }
        lead_reports(&mut world, "0-1", "");
        world.settle();
        let (cores, gpus, excluded) = expected;
        assert_eq!(declared(&world, rank), (cores.to_owned(), gpus, excluded), "{reason}");
        assert_eq!(drain(&world, rank), None);
        assert!(world.projected("node1").revision > world.reports["node1"].applied_revision.unwrap());
    }
}

#[test]
fn a_node_that_has_more_declares_it_at_once_beside_its_jobs() {
    let mut world = world();
    lead_reports(&mut world, "", "0-1");
    has(&mut world, "node2", 16, 4);
    world.settle();
    assert_eq!(declared(&world, 1), ("0-15".to_owned(), 4, false));
    exclude(&mut world, json!({"nodes": ["node2"], "cores": "0"}));
    world.settle();
    lead_reports(&mut world, "0-1", "");
    time_passes(&mut world);
    world.settle();
    assert_eq!(declared(&world, 1), ("1-15".to_owned(), 4, true));
    lead_reports(&mut world, "", "0");
    world.spec.resources = Default::default();
    world.settle();
    assert_eq!((declared(&world, 1), drain(&world, 1)), (("0-15".to_owned(), 4, false), None));
}

#[test]
fn a_node_that_again_has_all_that_it_declares_is_undrained() {
    let mut world = world();
    lead_reports(&mut world, "", "1");
    has(&mut world, "node2", 6, 2);
    world.settle();
    assert!(drain(&world, 1).is_some());
    has(&mut world, "node2", 8, 2);
    world.settle();
    assert_eq!((drain(&world, 1), declared(&world, 1)), (None, ("0-7".to_owned(), 2, false)));
}

#[test]
fn a_gpu_that_is_back_within_minutes_stays_declared() {
    let at_once: Edit = |world| world.spec.resources.retain = Some("0s".to_owned());
    for (what, change, secs, expected) in [
        ("a driver that is reloaded", (|_| {}) as Edit, 599, 2),
        ("a GPU that is gone", |_| {}, 600, 0),
        ("a longer time in the spec", |world| world.spec.resources.retain = Some("1h".to_owned()), 3599, 2),
        ("no time in the spec", at_once, 6, 0),
        ("a device plugin takes them", |world| world.nodes[1].advertises_gpus = true, 6, 0),
    ] {
        let mut world = world();
        lead_reports(&mut world, "1", "");
        // An old drain for another reason must not count as waiting for the GPU.
        world.nodes[1].cordoned = true;
        world.settle();
        world.now += 86400;
        change(&mut world);
        has(&mut world, "node2", 8, if what.contains("plugin") { 2 } else { 0 });
        world.settle();
        world.now += secs;
        world.settle();
        assert_eq!(declared(&world, 1).1, expected, "{what}");
        // An epoch that begins meanwhile must not change that.
        let roster = world.roster.as_ref().unwrap();
        world.roster = epoch::next_epoch(&world.seen(), roster, roster.settings.clone());
        assert_eq!(declared(&world, 1).1, expected, "{what}, in the next epoch");
        has(&mut world, "node2", 8, 2);
        world.nodes[1].advertises_gpus = false;
        world.settle();
        assert_eq!((declared(&world, 1).1, entry(&world, 1).lacks_since), (2, None), "{what}: it is back");
    }
}

#[test]
fn facts_that_vanish_change_nothing() {
    let mut world = world();
    lead_reports(&mut world, "0-1", "");
    world.nodes[1].cpu = None;
    assert_eq!(world.settle(), Decision::Keep);
    world.reports.get_mut("node2").unwrap().facts = None;
    assert_eq!(world.settle(), Decision::Keep);
    world.reports.clear();
    assert_eq!(world.settle(), Decision::Keep);
    world.nodes.remove(1);
    world.settle();
    assert_eq!((declared(&world, 1), drain(&world, 1)), (("0-7".to_owned(), 2, false), None));
}

/// Excludes the second node, which was idle, so that it gets no jobs.
fn with_an_excluded_member() -> World {
    let mut world = world();
    exclude(&mut world, json!({"nodes": ["node2"]}));
    world.settle();
    lead_reports(&mut world, "0-1", "");
    time_passes(&mut world);
    world.settle();
    world
}

#[test]
fn an_excluded_member_can_leave_without_being_drained() {
    let mut world = with_an_excluded_member();
    (world.spec.size, world.nodes[1].cordoned) = (Some(1), true);
    world.settle();
    lead_reports(&mut world, "", "");
    assert_eq!(world.projected("node1").drain, BTreeMap::new(), "Flux refuses to drain an excluded rank");
    assert_eq!(world.wants("node2"), api::Want::Run, "the lead has not applied the exclusion yet");
    world.online("node1");
    lead_reports(&mut world, "", "");
    assert_eq!(world.wants("node2"), api::Want::Leave);
}

#[test]
fn a_cordoned_member_stays_excluded_until_it_is_uncordoned() {
    let mut world = with_an_excluded_member();
    world.nodes[1].cordoned = true;
    world.settle();
    exclude(&mut world, json!({}));
    world.settle();
    assert!(declared(&world, 1).2, "Flux could not drain the excluded rank, so jobs would start there");
    world.nodes[1].cordoned = false;
    world.settle();
    assert!(!declared(&world, 1).2);
}

#[test]
fn a_rank_stays_excluded_until_its_broker_is_out_of_the_overlay() {
    let mut world = with_an_excluded_member();
    assert!(declared(&world, 1).2);
    let excluded = |world: &World| {
        let text = crate::broker_toml::render(world.roster.as_ref().unwrap()).unwrap();
        text.contains("exclude = \"1\"")
    };
    world.nodes.pop();
    world.settle();
    world.now += 601;
    world.settle();
    assert_eq!(entry(&world, 1).member, None);
    assert!(excluded(&world), "its broker may still run without its Node");
    world.reports.get_mut("node1").unwrap().offline = vec![1];
    world.settle();
    assert!(!excluded(&world));
}

#[test]
fn a_joining_node_and_a_new_epoch_declare_what_the_nodes_have() {
    let mut world = world();
    exclude(&mut world, json!({"lead": true, "cores": "0"}));
    world.add("node3", 3);
    world.passed("node3", 4);
    world.settle();
    assert_eq!(declared(&world, 2), ("1-3".to_owned(), 0, false));
    let next = epoch::next_epoch(&world.seen(), world.roster.as_ref().unwrap(), {
        world.roster.as_ref().unwrap().settings.clone()
    });
    world.roster = next;
    assert_eq!(declared(&world, 0), ("1-7".to_owned(), 2, true));
    assert_eq!(declared(&world, 1), ("1-7".to_owned(), 2, false));
}

#[test]
fn the_lead_gets_changes_of_labels_and_architectures_as_properties() {
    let mut world = world();
    let of = |world: &World, rank| entry(world, rank).properties.into_iter().collect::<Vec<_>>().join(" ");
    world.spec.resources.properties = vec!["zone".to_owned()];
    world.nodes[1].labels.insert("zone".into(), "eu-1a".into());
    world.nodes.iter_mut().for_each(|node| node.architecture = "amd64".into());
    world.settle();
    assert_eq!((of(&world, 0), of(&world, 1)), (String::new(), "zone=eu-1a".to_owned()));
    assert!(world.projected("node1").revision > world.reports["node1"].applied_revision.unwrap());

    world.nodes[1].architecture = "arm64".into();
    world.settle();
    assert_eq!((of(&world, 0), of(&world, 1)), ("amd64".to_owned(), "arm64 zone=eu-1a".to_owned()));
    let gone = world.nodes.pop().unwrap();
    world.settle();
    assert_eq!((of(&world, 0), of(&world, 1)), ("amd64".to_owned(), "arm64 zone=eu-1a".to_owned()));
    world.now += 601;
    world.settle();
    assert_eq!((of(&world, 0), of(&world, 1)), (String::new(), String::new()), "rank 1 has no member any more");
    world.nodes.push(gone);
    world.reports.get_mut("node2").unwrap().adopted = None;
    world.settle();
    assert_eq!((of(&world, 0), of(&world, 1)), ("amd64".to_owned(), "arm64 zone=eu-1a".to_owned()));
}

/// Pseudo-random numbers, the same in each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 % u64::from(limit)).unwrap()
    }
}

#[test]
fn at_random_no_rank_declares_less_while_a_job_may_hold_it() {
    let (mut dice, mut world, mut corrected) = (Dice(1), world(), 0);
    world.spec.resources.retain = Some("3s".to_owned());
    for _ in 0..5000 {
        let before = world.roster.clone().unwrap();
        world.now += i64::from(dice.below(4));
        match dice.below(7) {
            0 => has(&mut world, ["node1", "node2"][dice.below(2) as usize], 1 + dice.below(8), dice.below(3)),
            1 => {
                let cpu = Cpu { capacity: 8000, allocatable: u64::from(4 + dice.below(5)) * 1000 };
                world.nodes[dice.below(2) as usize].cpu = (dice.below(4) > 0).then_some(cpu);
            }
            2 => {
                let cores = ["", "0", "0-7", "2,5"][dice.below(4) as usize];
                exclude(&mut world, json!({"cores": cores, "lead": dice.below(2) == 0}));
            }
            3 => world.nodes[1].cordoned = dice.below(2) == 0,
            4 => world.nodes[1].advertises_gpus = dice.below(2) == 0,
            _ => {}
        }
        let set = |dice: &mut Dice| ["", "0", "1", "0-1"][dice.below(4) as usize].parse::<IdSet>().unwrap();
        let (drained, allocated) = (set(&mut dice), set(&mut dice));
        lead_reports(&mut world, &drained.to_string(), &allocated.to_string());
        // Decide only once: one decision drains a rank, and a later one corrects what it declares.
        if let Decision::Write(next) = decide(&world.seen()) {
            world.roster = Some(*next);
        }
        world.online("node1");
        for (rank, now) in &world.roster.as_ref().unwrap().ranks {
            let (now, then) = (now.resources.as_ref().unwrap(), &before.ranks[rank]);
            let declared = then.resources.as_ref().unwrap();
            if !now.covers(declared) {
                corrected += 1;
                let since = then.drain.as_ref().unwrap().since;
                assert!(world.now - since > 5 && drained.contains(*rank) && !allocated.contains(*rank));
            }
        }
    }
    assert!(corrected > 100, "only {corrected} corrections");
}
