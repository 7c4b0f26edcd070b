use crate::{
    eligibility::{Cpu, NodeView},
    lead::LEAD_PATIENCE,
    members::{Planned, rank_of},
    observed::{DEFAULT_RETAIN_SECS, Unusable},
    project::project,
    roster::first::REPORTS_TIMEOUT,
    status::status,
    tree::parent,
};
use api::{
    Adopted, EpochSettings, Facts, FluxInstanceSpec, FluxInstanceStatus, FluxNodeSpec, FluxNodeStatus, NodePhase, Rank,
    Resources, RosterEntry, Want,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::*;

/// A small cluster that the tests change step by step.
pub(crate) struct World {
    pub spec: FluxInstanceSpec,
    pub generation: i64,
    pub status: FluxInstanceStatus,
    pub nodes: Vec<NodeView>,
    pub reports: BTreeMap<String, FluxNodeStatus>,
    pub roster: Option<Roster>,
    pub now: i64,
    pub waited: Duration,
    pub restart_word: Option<&'static str>,
    pub digest: &'static str,
    pub agentless: BTreeMap<String, String>,
    pub unusable: BTreeMap<String, Unusable>,
}

impl World {
    pub fn new(count: u8) -> Self {
        let mut world = Self {
            spec: FluxInstanceSpec::default(),
            generation: 1,
            status: FluxInstanceStatus::default(),
            nodes: Vec::new(),
            reports: BTreeMap::new(),
            roster: None,
            now: 1000,
            waited: Duration::ZERO,
            restart_word: None,
            digest: "digest",
            agentless: BTreeMap::new(),
            unusable: BTreeMap::new(),
        };
        (1..=count).for_each(|number| world.add(&format!("node{number}"), number));
        world
    }

    pub fn add(&mut self, name: &str, number: u8) {
        self.nodes.push(NodeView {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            created: i64::from(number),
            ready: true,
            linux: true,
            address: Some([10, 0, 0, number].into()),
            cpu: Some(Cpu { capacity: 8000, allocatable: 8000 }),
            ..NodeView::default()
        });
    }

    pub fn passed(&mut self, name: &str, cores: u32) {
        let facts = Facts {
            resources: Resources { cores, gpus: 0 },
            memory_mib: 1024,
            platform: "linux-64".into(),
            glibc: "2.36".into(),
            boot_id: "boot".into(),
            systemd: false,
            static_cpus: false,
            prefix: "/opt/flux-distribute".into(),
        };
        self.reports.entry(name.to_owned()).or_default().facts = Some(facts);
    }

    pub fn all_passed(&mut self) {
        let names: Vec<_> = self.nodes.iter().map(|node| node.name.clone()).collect();
        names.iter().for_each(|name| self.passed(name, 2));
    }

    pub fn online(&mut self, name: &str) {
        let roster = self.roster.clone().unwrap();
        let node = self.nodes.iter().find(|node| node.name == name).unwrap();
        let rank = rank_of(&roster, &node.uid).unwrap();
        let report = self.reports.entry(name.to_owned()).or_default();
        report.phase = NodePhase::Online;
        report.adopted = Some(Adopted {
            rank,
            broker_name: roster.ranks[&rank].broker_name.clone(),
            node_uid: node.uid.clone(),
            instance_uid: Some(roster.instance_uid.clone()),
            instance_id: roster.instance_id.clone(),
            epoch: roster.epoch,
            pid: 100,
            digest: "digest".into(),
        });
        if rank == 0 {
            report.applied_revision = Some(roster.revision);
            self.status.instance_id = Some(roster.instance_id.clone());
            self.status.lead = Some(name.to_owned());
        }
    }

    pub fn seen(&self) -> Observed<'_> {
        Observed {
            instance_uid: "instance",
            spec: &self.spec,
            generation: self.generation,
            status: &self.status,
            nodes: self.nodes.iter().collect(),
            reports: self.reports.iter().map(|(name, report)| (name.as_str(), report)).collect(),
            roster: self.roster.as_ref(),
            digest: Some(self.digest),
            certificate: Some("cert"),
            is_certificate_gone: false,
            now: self.now,
            waited: self.waited,
            restart_word: self.restart_word,
            fresh_id: "fresh",
            agentless: &self.agentless,
            unusable: &self.unusable,
        }
    }

    /// Decides until nothing changes any more; returns the last decision.
    pub fn settle(&mut self) -> Decision {
        loop {
            match decide(&self.seen()) {
                Decision::Write(next) => self.roster = Some(*next),
                other => return other,
            }
        }
    }

    pub fn up(count: u8) -> Self {
        let mut world = Self::new(count);
        world.all_passed();
        assert_eq!(world.settle(), Decision::Keep);
        for number in 1..=count {
            world.online(&format!("node{number}"));
            world.settle();
        }
        world
    }

    pub fn rank(&self, node: &str) -> Option<Rank> {
        rank_of(self.roster.as_ref()?, &format!("uid-{node}"))
    }

    pub fn wants(&self, node: &str) -> Want {
        self.projected(node).want
    }

    pub fn restart(&self) -> epoch::Restart {
        let roster = self.roster.as_ref().unwrap();
        epoch::restart(&self.seen(), &Members::observe(&self.seen(), roster), roster)
    }

    /// The roster with its members; None if there is no roster.
    pub fn planned(&self) -> Option<Planned<'_>> {
        self.roster.as_ref().map(|roster| Planned::observe(&self.seen(), roster))
    }

    pub fn projected(&self, node: &str) -> FluxNodeSpec {
        let node = self.nodes.iter().find(|view| view.name == node).unwrap();
        project(&self.seen(), self.planned().as_ref(), node)
    }
}

/// The roster's entry of a rank.
pub(super) fn entry_of(world: &World, rank: Rank) -> RosterEntry {
    world.roster.as_ref().unwrap().ranks[&rank].clone()
}

#[test]
fn the_first_eligible_node_leads_and_all_get_their_real_names() {
    let mut world = World::new(3);
    world.passed("node1", 2);
    assert_eq!(world.settle(), Decision::Keep);
    let roster = world.roster.as_ref().unwrap();
    let names: Vec<_> = roster.ranks.values().map(|entry| entry.broker_name.as_str()).collect();
    assert_eq!(names, ["node1", "node2", "node3"]);
    assert_eq!((world.wants("node1"), world.wants("node2")), (Want::Run, Want::Install));
}

#[test]
fn a_slow_first_node_is_waited_for_but_not_for_ever() {
    let mut world = World::new(2);
    world.passed("node2", 2);
    assert!(matches!(world.settle(), Decision::Wait(_)));
    world.waited = LEAD_PATIENCE;
    world.settle();
    assert_eq!(world.rank("node2"), Some(0));
}

#[test]
fn a_failed_first_node_is_not_waited_for() {
    let mut world = World::new(2);
    world.passed("node2", 2);
    world.reports.insert("node1".into(), FluxNodeStatus { phase: NodePhase::Failed, ..Default::default() });
    world.settle();
    assert_eq!(world.rank("node2"), Some(0));
}

#[test]
fn the_lead_of_the_spec_wins() {
    let mut world = World::new(3);
    world.spec.lead = Some("node2".into());
    world.passed("node1", 2);
    assert!(matches!(world.settle(), Decision::Wait(reason) if reason.contains("node2")));
    world.passed("node2", 2);
    world.settle();
    assert_eq!(world.rank("node2"), Some(0));
}

#[test]
fn a_follower_runs_only_once_the_lead_is_online_and_has_its_resources() {
    let mut world = World::new(2);
    world.passed("node1", 2);
    world.settle();
    world.online("node1");
    world.settle();
    world.passed("node2", 4);
    world.settle();
    assert_eq!(world.wants("node2"), Want::Install, "the lead has not applied the new revision");
    world.online("node1");
    assert_eq!(world.wants("node2"), Want::Run);
}

#[test]
fn a_node_that_sorts_first_joins_without_moving_others() {
    let mut world = World::up(3);
    let before = world.roster.clone().unwrap();
    world.add("aaa", 9);
    world.settle();
    assert_eq!(world.rank("aaa"), None, "no facts yet");
    world.passed("aaa", 8);
    world.settle();
    assert_eq!(world.rank("aaa"), Some(3));
    let after = world.roster.clone().unwrap();
    assert_eq!(after.ranks[&3].broker_name, "flux-spare-3");
    (0..3).for_each(|rank| assert_eq!(after.ranks[&rank], before.ranks[&rank]));
}

#[test]
fn a_burst_of_joins_is_one_live_change_and_one_more_for_later_joins() {
    let mut world = World::up(2);
    for burst in [3..=5, 6..=8] {
        for number in burst {
            world.add(&format!("node{number}"), number);
            world.passed(&format!("node{number}"), 2);
        }
        let before = world.roster.as_ref().unwrap().revision;
        world.settle();
        assert_eq!(world.roster.as_ref().unwrap().revision, before + 1);
        assert_eq!((world.projected("node1").revision, world.wants("node3")), (before + 1, Want::Install));
    }
    world.online("node1");
    assert!((3..=8).all(|number| world.wants(&format!("node{number}")) == Want::Run));
}

#[test]
fn not_ready_cordoned_and_tainted_members_keep_their_rank_and_run() {
    let mut world = World::up(2);
    let node = &mut world.nodes[1];
    node.ready = false;
    node.cordoned = true;
    node.taints = serde_json::from_str(r#"[{"key":"node.kubernetes.io/unreachable","effect":"NoExecute"}]"#).unwrap();
    assert_eq!(world.settle(), Decision::Keep);
    assert_eq!((world.rank("node2"), world.wants("node2")), (Some(1), Want::Run));
}

#[test]
fn a_gone_node_keeps_its_rank_for_retain_and_gets_it_back() {
    let mut world = World::up(3);
    let node = world.nodes.remove(1);
    world.settle();
    assert_eq!(world.rank("node2"), Some(1));
    world.now += DEFAULT_RETAIN_SECS - 1;
    world.nodes.push(node);
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().ranks[&1].member.as_ref().unwrap().gone_since, None);
    world.nodes.pop();
    world.settle();
    world.now += DEFAULT_RETAIN_SECS;
    world.settle();
    assert_eq!(world.rank("node2"), None);
}

#[test]
fn a_lead_that_is_gone_keeps_rank_0_for_ever() {
    let mut world = World::up(2);
    world.nodes.remove(0);
    world.settle();
    world.now += 100 * DEFAULT_RETAIN_SECS;
    world.settle();
    assert_eq!(world.rank("node1"), Some(0));
}

#[test]
fn another_node_under_the_same_name_gets_another_rank() {
    let mut world = World::up(3);
    world.nodes[1].uid = "uid-other".into();
    world.reports.get_mut("node2").unwrap().adopted = None;
    world.settle();
    let roster = world.roster.as_ref().unwrap();
    assert_eq!(rank_of(roster, "uid-other"), Some(3));
    assert_eq!(rank_of(roster, "uid-node2"), Some(1));
    assert_eq!(roster.ranks[&3].broker_name, "flux-spare-3");
}

#[test]
fn the_same_machine_under_a_new_node_object_keeps_its_rank_and_its_broker() {
    for (node, rank) in [("node1", 0), ("node2", 1)] {
        let mut world = World::up(2);
        let view = world.nodes.iter_mut().find(|view| view.name == node).unwrap();
        view.uid = "uid-again".into();
        world.settle();
        let at_once = (rank == 0).then_some(0);
        assert_eq!(rank_of(world.roster.as_ref().unwrap(), "uid-again"), at_once, "a follower may be another machine");
        world.nodes.iter_mut().find(|view| view.name == node).unwrap().boot_id = "boot".into();
        world.settle();
        let roster = world.roster.as_ref().unwrap();
        assert_eq!(rank_of(roster, "uid-again"), Some(rank));
        assert_eq!(roster.ranks[&rank].reserved_for.as_deref(), Some("uid-again"));
        assert_eq!(world.wants(node), Want::Run);
    }
}

#[test]
fn a_lead_that_was_off_leads_again_under_a_new_node_object() {
    let mut world = World::up(3);
    let mut lead = world.nodes.remove(0);
    world.settle();
    lead.uid = "uid-again".into();
    world.nodes.insert(0, lead);
    world.reports.get_mut("node1").unwrap().adopted = None;
    world.settle();
    assert_eq!(rank_of(world.roster.as_ref().unwrap(), "uid-again"), Some(0));
    assert_eq!(world.wants("node1"), Want::Run);
}

#[test]
fn a_lead_that_can_not_be_installed_is_replaced_while_nothing_depends_on_it() {
    let mut world = World::new(3);
    world.all_passed();
    world.settle();
    world.reports.get_mut("node1").unwrap().phase = NodePhase::Failed;
    world.settle();
    assert_eq!(world.rank("node1"), Some(0), "it may be over in a moment");
    world.waited = LEAD_PATIENCE;
    world.settle();
    world.now += 2;
    world.settle();
    assert_eq!(world.rank("node2"), Some(0));
    assert_eq!(world.settle(), Decision::Keep);
}

#[test]
fn a_lead_lost_in_its_first_install_is_replaced_by_another() {
    let mut world = World::new(3);
    world.all_passed();
    world.settle();
    assert_eq!(world.rank("node1"), Some(0));
    world.nodes.remove(0);
    world.settle();
    let roster = world.roster.as_ref().unwrap();
    assert_eq!(world.rank("node2"), Some(0));
    assert_eq!((roster.epoch, roster.instance_id.as_str(), roster.revision), (2, "fresh", 2));
}

#[test]
fn a_lost_roster_is_restored_from_the_leads_copy() {
    let mut world = World::up(3);
    let lost = world.roster.take().unwrap();
    world.reports.get_mut("node2").unwrap().adopted = None;
    assert!(
        matches!(world.settle(), Decision::Wait(reason) if reason.contains("waiting for the lead's agent to report"))
    );
    world.reports.get_mut("node1").unwrap().roster = Some(serde_json::to_string(&lost).unwrap());
    world.settle();
    let back = world.roster.unwrap();
    assert_eq!((&back.ranks, &back.settings, back.epoch), (&lost.ranks, &lost.settings, lost.epoch));
    assert!(back.revision > lost.revision);
    // A captured node reports a copy of its own making.
    let forged = Roster { revision: back.revision + 1, ranks: BTreeMap::new(), ..back.clone() };
    world.status.lead = Some("node1".to_owned());
    world.reports.get_mut("node2").unwrap().roster = Some(serde_json::to_string(&forged).unwrap());
    world.roster = None;
    world.settle();
    assert_eq!(world.roster.unwrap().ranks, back.ranks);
}

#[test]
fn a_restored_roster_drains_those_that_are_to_be_drained_now() {
    let mut world = World::up(3);
    world.spec.drain.timeout = Some("1m".to_owned());
    world.spec.size = Some(2);
    world.settle();
    let lost = world.roster.take().unwrap();
    assert!(lost.ranks[&2].drain.as_ref().unwrap().leave);
    world.reports.get_mut("node1").unwrap().roster = Some(serde_json::to_string(&lost).unwrap());
    // Since the lead got its copy, the size has been restored, so that node3 stays, and node2 has been cordoned.
    world.spec.size = None;
    world.nodes[1].cordoned = true;
    world.now += 3600;
    let Decision::Write(back) = decide(&world.seen()) else { panic!("no roster") };
    world.roster = Some(*back);
    let spec = world.projected("node3");
    assert_eq!((spec.want, spec.stop_despite_jobs), (Want::Run, false));
    let drained: Vec<_> = world.projected("node1").drain.into_values().collect();
    assert_eq!(drained, ["1".parse().unwrap()]);
    // If node3 is to leave again, it has its whole time.
    let lost = Roster { ranks: lost.ranks, ..world.roster.take().unwrap() };
    world.reports.get_mut("node1").unwrap().roster = Some(serde_json::to_string(&lost).unwrap());
    world.spec.size = Some(2);
    world.settle();
    assert_eq!(world.wants("node3"), Want::Run);
    world.now += 60;
    assert_eq!(world.wants("node3"), Want::Leave);
}

#[test]
fn a_lost_roster_is_not_restored_from_a_former_leads_copy() {
    let mut world = World::up(3);
    let former = world.roster.clone().unwrap();
    let mut lost = former.clone();
    lost.epoch = 2;
    world.roster = Some(lost.clone());
    // An administrator has made node3 the lead, with the queue of the former lead.
    for number in 1..=3 {
        world.online(&format!("node{number}"));
    }
    world.reports.get_mut("node1").unwrap().adopted = None;
    world.reports.get_mut("node2").unwrap().adopted = None;
    world.reports.get_mut("node3").unwrap().adopted.as_mut().unwrap().rank = 0;
    world.roster = None;
    world.waited = REPORTS_TIMEOUT;
    world.reports.get_mut("node1").unwrap().roster = Some(serde_json::to_string(&former).unwrap());
    let by_broker = world.reports["node3"].adopted.clone();
    for (status_epoch, adopted) in [(2, by_broker.clone()), (1, by_broker.clone()), (2, None)] {
        world.status.epoch = status_epoch;
        world.reports.get_mut("node3").unwrap().adopted = adopted;
        match decide(&world.seen()) {
            Decision::Wait(_) => {}
            Decision::Write(roster) => assert!(roster.epoch > 2, "epoch {}", roster.epoch),
            Decision::Keep => panic!("there is no roster to keep"),
        }
    }
    world.reports.get_mut("node3").unwrap().adopted = by_broker;
    world.reports.get_mut("node3").unwrap().roster = Some(serde_json::to_string(&lost).unwrap());
    world.settle();
    assert_eq!(world.roster.unwrap().epoch, 2);
}

#[test]
fn what_claims_a_later_epoch_is_named_while_it_keeps_a_lost_roster_away() {
    let mut world = World::up(3);
    let lost = world.roster.take().unwrap();
    world.reports.get_mut("node1").unwrap().roster = Some(serde_json::to_string(&lost).unwrap());
    world.waited = REPORTS_TIMEOUT;
    world.reports.get_mut("node2").unwrap().adopted.as_mut().unwrap().epoch = 1_000_000;
    let named = "node node2 reports a broker of epoch 1000000";
    assert!(matches!(world.settle(), Decision::Wait(reason) if reason.contains(named)));
    world.reports.remove("node2");
    world.status.epoch = 2_000_000;
    let named = "the FluxInstance's status says epoch 2000000";
    assert!(matches!(world.settle(), Decision::Wait(reason) if reason.contains(named)));
    world.status.epoch = lost.epoch;
    world.settle();
    assert_eq!(world.roster.unwrap().epoch, lost.epoch);
}

#[test]
fn what_is_decided_and_said_does_not_depend_on_the_order_of_nodes_and_reports() {
    type Make = fn() -> World;
    fn lost(own_epoch: u64) -> World {
        let mut world = World::up(4);
        (world.roster, world.waited, world.status.lead) = (None, REPORTS_TIMEOUT, None);
        world.reports.values_mut().for_each(|report| report.adopted.as_mut().unwrap().epoch = own_epoch);
        world
    }
    let cases: [(&str, Make); 4] = [
        ("no Node may have a rank", || {
            let mut world = World::new(5);
            world.nodes.iter_mut().for_each(|node| node.cordoned = true);
            world
        }),
        ("two copies of a lost roster are as new", || {
            let (roster, mut world) = (World::up(4).roster.unwrap(), lost(1));
            for (name, jobs_lost_before) in [("node1", 0), ("node2", 1)] {
                let copy = Roster { jobs_lost_before, ..roster.clone() };
                world.reports.get_mut(name).unwrap().roster = Some(serde_json::to_string(&copy).unwrap());
            }
            world
        }),
        ("no copy is as new as the brokers", || lost(7)),
        ("several nodes can't install the packages of the next epoch", || {
            let mut world = World::up(4);
            world.digest = "another";
            for (name, report) in &mut world.reports {
                report.lacks_packages = Some(format!("{name} has no room"));
            }
            world
        }),
    ];
    for (what, world) in cases {
        let mut world = world();
        let told = |world: &World| {
            let restart = world.roster.is_some().then(|| format!("{:?}", world.restart()));
            (decide(&world.seen()), restart, status(&world.seen(), 1, world.planned().as_ref(), None))
        };
        let first = told(&world);
        for _ in 0..20 {
            world.nodes.reverse();
            assert_eq!(told(&world), first, "{what}");
        }
    }
}

#[test]
fn no_forged_number_leads_to_a_roster_that_can_not_be_read() {
    let read = |world: &World| Roster::parse(&serde_json::to_string(world.roster.as_ref().unwrap()).unwrap()).unwrap();
    for forged in [1 << 53, (1 << 52) + 1, u64::MAX] {
        let mut world = World::up(2);
        let lost = world.roster.take().unwrap();
        let copy = Roster { epoch: forged, revision: forged, ranks: BTreeMap::new(), ..lost.clone() };
        world.status.epoch = forged;
        let captured = world.reports.get_mut("node2").unwrap();
        captured.adopted.as_mut().unwrap().epoch = forged;
        captured.roster = Some(serde_json::to_string(&copy).unwrap());
        world.waited = REPORTS_TIMEOUT;
        assert!(matches!(world.settle(), Decision::Wait(_)), "a broker may run: {forged}");
        world.reports.get_mut("node1").unwrap().roster = Some(serde_json::to_string(&lost).unwrap());
        world.settle();
        assert_eq!((read(&world).epoch, read(&world).ranks), (lost.epoch, lost.ranks), "{forged}");
        // Nobody has a copy, and no broker runs.
        world.roster = None;
        world.reports.values_mut().for_each(|report| (report.adopted, report.roster) = (None, None));
        world.settle();
        assert_eq!(read(&world).epoch, 1, "{forged}");
    }
}

#[test]
fn without_a_roster_no_rank_is_given_out_while_brokers_run_or_agents_are_silent() {
    let mut world = World::up(2);
    world.roster = None;
    world.reports.remove("node2");
    assert!(matches!(world.settle(), Decision::Wait(reason) if reason.contains("waiting for the agents of 1")));
    world.waited = REPORTS_TIMEOUT;
    assert!(
        matches!(world.settle(), Decision::Wait(reason) if reason.contains("node node1 reports a broker of epoch 1"))
    );
    world.reports.values_mut().for_each(|report| report.adopted = None);
    world.settle();
    let roster = world.roster.unwrap();
    assert_eq!((roster.instance_id.as_str(), roster.established), ("fresh", true));
}

#[test]
fn a_second_planner_changes_nothing_that_the_first_has_done() {
    let world = World::up(4);
    assert_eq!(decide(&world.seen()), Decision::Keep);
    assert_eq!(decide(&Observed { waited: Duration::ZERO, fresh_id: "another", ..world.seen() }), Decision::Keep);
}

#[test]
fn size_limits_the_members() {
    let mut world = World::new(4);
    world.spec.size = Some(2);
    world.all_passed();
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().ranks.len(), 2);
    world.spec.size = Some(3);
    world.online("node1");
    world.settle();
    assert_eq!(world.rank("node3"), Some(2));
    assert_eq!(world.rank("node4"), None);
}

#[test]
fn in_a_deep_tree_an_empty_interior_rank_strands_no_member() {
    let mut world = World::new(8);
    world.spec.topology = Some("kary:2".into());
    world.all_passed();
    world.settle();
    world.online("node1");
    world.settle();
    assert_eq!((world.wants("node2"), world.wants("node4")), (Want::Run, Want::Install));
    // node2 (rank 1, parent of 3 and 4) dies before it is online; the members below it move below ranks that are
    // online.
    world.nodes.retain(|node| node.name != "node2");
    let names: Vec<_> = world.nodes.iter().map(|node| node.name.clone()).collect();
    for _round in 0..4 {
        world.settle();
        for name in &names {
            if world.wants(name) == Want::Run {
                world.online(name);
            }
        }
    }
    let roster = world.roster.clone().unwrap();
    for name in &names {
        assert!(Members::observe(&world.seen(), &roster).is_online(world.rank(name).unwrap()), "{name}");
    }
    let members: BTreeSet<_> = roster.ranks.values().filter_map(|e| e.member.as_ref()).map(|m| &m.uid).collect();
    assert_eq!(members.len(), 8);
}

#[test]
fn a_broker_under_a_parent_that_is_gone_moves_once_the_lead_reports_it_offline() {
    let mut world = World::new(8);
    world.spec.topology = Some("kary:2".into());
    world.all_passed();
    world.settle();
    for number in 1..=8 {
        world.settle();
        world.online(&format!("node{number}"));
    }
    world.settle();
    // node2 (rank 1) is gone; ranks 3, 4 and 7 are below it.
    world.nodes.retain(|node| node.name != "node2");
    world.settle();
    assert_eq!(world.rank("node4"), Some(3));
    world.reports.get_mut("node1").unwrap().offline = vec![1, 3, 4, 7];
    world.settle();
    let roster = world.roster.clone().unwrap();
    for name in ["node4", "node5"] {
        let rank = world.rank(name).unwrap();
        assert!(
            Members::observe(&world.seen(), &roster).is_online(parent(&roster, rank).unwrap()),
            "{name} has rank {rank}"
        );
    }
    assert_eq!(["node1", "node3", "node6", "node7"].map(|name| world.rank(name).unwrap()), [0, 2, 5, 6]);
}

#[test]
fn a_rank_that_a_running_broker_claims_is_not_given_out() {
    let mut world = World::up(2);
    world.add("node9", 9);
    world.passed("node9", 2);
    let mut claim = world.reports["node2"].adopted.clone().unwrap();
    (claim.rank, claim.node_uid) = (2, "uid-node8".into());
    world.reports.insert("node8".into(), FluxNodeStatus { adopted: Some(claim), ..Default::default() });
    world.settle();
    assert_eq!(world.rank("node9"), Some(3));
}

#[test]
fn a_changed_spec_does_not_change_the_settings_of_the_running_epoch() {
    let mut world = World::up(2);
    let before: EpochSettings = world.roster.as_ref().unwrap().settings.clone();
    world.spec.broker.port = Some(9999);
    assert_eq!(world.settle(), Decision::Keep);
    assert_eq!(world.roster.as_ref().unwrap().settings, before);
}

#[test]
fn a_lead_is_silent_if_most_children_miss_it_or_one_does_and_its_node_is_not_ready() {
    for (what, topology, unheard, missed, ready, silent) in [
        ("none misses it", "kary:0", &[][..], &[][..], true, false),
        ("none, and the Node is not Ready", "kary:0", &[], &[], false, false),
        ("one of four is cut off", "kary:0", &["node2"], &[], true, false),
        ("one, and the Node is not Ready", "kary:0", &["node2"], &[], false, true),
        ("half of them", "kary:0", &["node2", "node3"], &[], true, false),
        ("most of them", "kary:0", &["node2", "node3", "node4"], &[], true, true),
        ("children that it has lost itself don't count", "kary:0", &["node2", "node3", "node4"], &[1, 2], true, false),
        ("those below an interior broker that is gone", "kary:2", &["node4", "node5"], &[], true, false),
        ("both children", "kary:2", &["node2", "node3"], &[], true, true),
    ] {
        let mut world = World::up(5);
        world.roster.as_mut().unwrap().settings.topology = topology.to_owned();
        unheard.iter().for_each(|node| world.reports.get_mut(*node).unwrap().lead_unreachable = true);
        world.reports.get_mut("node1").unwrap().offline = missed.to_vec();
        world.nodes[0].ready = ready;
        let roster = world.roster.as_ref().unwrap();
        let members = Members::observe(&world.seen(), roster);
        assert_eq!(members.is_lead_silent(), silent, "{what}");
        assert_eq!(members.is_online(0), !silent, "{what}");
        let spec = world.projected("node1");
        assert_eq!((spec.lost_by_lead, spec.reason.is_some()), (silent, silent), "{what}");
    }
}
