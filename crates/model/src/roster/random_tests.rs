//! Checks the roster's invariants after each of thousands of random steps.
//!
//! A machine and its agent's report are modelled separately, because reports may be late or lost.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{Decision, decide, tests::World};
use crate::{
    broker_names::broker_name, broker_toml::render, eligibility::NodeView, fixture::Random, hostlist,
    observed::retain_secs, project::project, tree::is_deep,
};
use api::{Adopted, FluxNodeStatus, IdSet, NodePhase, Rank, Roster, RosterEntry, Want};

/// A machine's real state, which its agent's report may not reflect.
struct Machine {
    node: NodeView,
    /// The machine has a Node object, and so an agent.
    is_registered: bool,
    cores: u32,
    broker: Option<Adopted>,
    left: bool,
}

struct Cluster {
    random: Random,
    world: World,
    machines: Vec<Machine>,
    most: usize,
    /// The roster that the lead's host and its broker have.
    lead_has: Roster,
}

const MAX_SIZE_MORE: usize = 40;

impl Cluster {
    fn new(seed: u64, most: usize, topology: Option<&str>) -> Self {
        let mut world = World::up(1);
        let max_size = u32::try_from(most + MAX_SIZE_MORE).unwrap();
        world.spec.max_size = Some(max_size);
        world.spec.topology = topology.map(str::to_owned);
        world.spec.ranks.retain = Some("10m".into());
        let mut roster = crate::fixture::roster(max_size, &[("node1", 2)]);
        roster.settings = crate::settings::settings(&world.spec, "root", 0, "digest", "cert");
        world.roster = Some(roster.clone());
        world.online("node1");
        let lead = Machine {
            node: world.nodes[0].clone(),
            is_registered: true,
            cores: 2,
            broker: world.reports["node1"].adopted.clone(),
            left: false,
        };
        let random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        Self { random, world, machines: vec![lead], most, lead_has: roster }
    }

    /// Takes one random step; returns its name.
    fn step(&mut self) -> &'static str {
        let some = 1 + self.random.below(1 + self.most / 20);
        // Make the lead fail less often than others, or hardly anything else would happen.
        let chosen = match self.random.below(self.machines.len()) {
            0 if self.random.below(4) > 0 => self.machines.len() - 1,
            chosen => chosen,
        };
        self.machines[0].is_registered |= self.random.below(8) == 0;
        match self.random.below(100) {
            0..15 => {
                for _ in 0..some {
                    self.add();
                }
                "new machines"
            }
            15..20 => {
                self.machines[chosen].is_registered = false;
                "a Node is deleted"
            }
            20..22 => {
                let deleting = self.random.flips();
                self.machines[chosen].node.deleting = deleting;
                "a Node is being deleted, or not any more"
            }
            22..32 => {
                self.machines[chosen].is_registered = true;
                self.machines[chosen].node.deleting = false;
                "a Node returns"
            }
            32..34 => {
                let name = self.fresh();
                let machine = &mut self.machines[chosen];
                (machine.node.uid, machine.node.boot_id) = (format!("uid-{name}"), format!("boot-{name}"));
                (machine.is_registered, machine.broker) = (true, None);
                "a machine is replaced under its name"
            }
            34..36 => {
                let name = self.fresh();
                let machine = &mut self.machines[chosen];
                (machine.node.uid, machine.is_registered) = (format!("uid-{name}"), true);
                "a machine is registered again"
            }
            36..40 => {
                self.machines[chosen].node.cordoned = self.random.below(3) == 0;
                "cordon, uncordon"
            }
            40..42 => {
                self.machines[chosen].node.ready = self.random.below(3) > 0;
                "Ready, NotReady"
            }
            42..45 => {
                let size = u32::try_from(1 + self.random.below(self.most + 2 * MAX_SIZE_MORE)).unwrap();
                self.world.spec.size =
                    (size <= self.world.spec.max_size.unwrap() && self.random.flips()).then_some(size);
                "another size"
            }
            45..70 => {
                for _ in 0..some * 4 {
                    let (chosen, reports) = (self.random.below(self.machines.len()), self.random.below(4) > 0);
                    self.act(chosen);
                    if reports {
                        self.report(chosen);
                    }
                }
                "agents act, and most of them report it"
            }
            70..73 => {
                let name = self.machines[chosen].node.name.clone();
                self.world.reports.remove(&name);
                "a FluxNode is lost"
            }
            73..76 => {
                self.world.waited = Duration::ZERO;
                "another planner"
            }
            76..77 => {
                // Without its lead, an instance starts over or waits; other tests cover that.
                if self.machines[0].is_registered && self.machines[0].broker.is_some() {
                    self.world.roster = None;
                    self.report(0);
                }
                "the roster is lost"
            }
            77..92 => {
                let seconds = self.random.below(240);
                self.world.now += i64::try_from(seconds).unwrap();
                self.world.waited += Duration::from_secs(seconds as u64);
                "time passes"
            }
            92..96 => {
                self.machines[chosen].cores = u32::try_from(1 + self.random.below(8)).unwrap();
                "other cores"
            }
            _ => {
                self.machines[chosen].broker = None;
                "a broker dies"
            }
        }
    }

    fn fresh(&mut self) -> String {
        format!("{}-{}", self.machines.len(), self.random.below(1 << 30))
    }

    fn add(&mut self) {
        let number = self.machines.len() + 1;
        if number > self.most {
            return;
        }
        let [.., high, low] = u32::try_from(number).unwrap().to_be_bytes();
        let node = NodeView {
            name: format!("node{number}"),
            uid: format!("uid-node{number}"),
            boot_id: format!("boot-node{number}"),
            created: self.world.now,
            ready: true,
            linux: true,
            address: Some([10, 0, high, low].into()),
            ..NodeView::default()
        };
        self.machines.push(Machine { node, is_registered: true, cores: 4, broker: None, left: false });
        self.report(number - 1);
    }

    /// Does what the agent would do. It acts on a rank only if FluxNode and roster agree, and here they always do.
    fn act(&mut self, index: usize) {
        let machine = &self.machines[index];
        let Some(roster) = self.world.roster.as_ref().filter(|_| machine.is_registered) else { return };
        let spec = project(&self.world.seen(), self.world.planned().as_ref(), &machine.node);
        let machine = &mut self.machines[index];
        let is_other = |broker: &Adopted| {
            let holder = roster.member(broker.rank);
            let is_ours = holder.is_some_and(|member| member.node == machine.node.name);
            !is_ours && spec.rank.map_or(holder.is_none(), |rank| rank != broker.rank)
        };
        if machine.broker.as_ref().is_some_and(is_other) || spec.want == Want::Leave {
            machine.broker = None;
        }
        if let (Some(rank), Want::Run, None) = (spec.rank, &spec.want, &machine.broker) {
            machine.broker = Some(Adopted {
                rank,
                broker_name: broker_name(roster, rank),
                node_uid: machine.node.uid.clone(),
                instance_uid: Some(roster.instance_uid.clone()),
                instance_id: roster.instance_id.clone(),
                epoch: roster.epoch,
                pid: 1,
                digest: "digest".into(),
            });
        }
        machine.left = machine.broker.is_none() && spec.want == Want::Leave;
        if spec.rank == Some(0) {
            self.lead_has = roster.clone();
        }
    }

    fn report(&mut self, index: usize) {
        let machine = &self.machines[index];
        if !machine.is_registered {
            return;
        }
        let name = machine.node.name.clone();
        self.world.passed(&name, machine.cores);
        let report = self.world.reports.get_mut(&name).unwrap();
        let mut facts = report.facts.clone();
        facts.iter_mut().for_each(|facts| facts.boot_id.clone_from(&machine.node.boot_id));
        *report = FluxNodeStatus {
            facts,
            phase: if machine.broker.is_some() { NodePhase::Online } else { NodePhase::Waiting },
            adopted: machine.broker.clone(),
            leave_completed: machine.left,
            ..FluxNodeStatus::default()
        };
        if machine.broker.as_ref().is_some_and(|broker| broker.rank == 0) {
            let running: BTreeSet<Rank> = self.machines.iter().filter_map(|m| Some(m.broker.as_ref()?.rank)).collect();
            let busy: IdSet = running.iter().copied().filter(|rank| rank % 3 == 1).collect();
            report.offline = self.lead_has.ranks.keys().copied().filter(|rank| !running.contains(rank)).collect();
            report.applied_revision = Some(self.lead_has.revision);
            report.drained = Some(drained(&self.lead_has));
            report.allocated = Some(if self.world.now % 2 == 0 { busy } else { IdSet::default() });
            report.roster = self.world.roster.is_none().then(|| serde_json::to_string(&self.lead_has).unwrap());
        }
    }

    /// Runs one round of the planner and checks its decision.
    fn plan(&mut self) {
        self.world.nodes = self.machines.iter().filter(|m| m.is_registered).map(|m| m.node.clone()).collect();
        let decision = decide(&self.world.seen());
        self.world.nodes.reverse();
        assert_eq!(decide(&self.world.seen()), decision, "in another order of Nodes and reports");
        let next = match decision {
            Decision::Keep | Decision::Wait(_) => return,
            Decision::Write(next) => *next,
        };
        let before = self.world.roster.as_ref().unwrap_or(&self.lead_has);
        self.check(before, &next);
        self.world.roster = Some(next);
        self.world.reports.values_mut().for_each(|report| report.roster = None);
    }

    fn check(&self, before: &Roster, next: &Roster) {
        assert_eq!(
            (before.epoch, &before.instance_id, &before.settings),
            (next.epoch, &next.instance_id, &next.settings)
        );
        assert!(next.revision > before.revision);
        let places = places(next);
        let count = next.ranks.values().filter(|entry| entry.member.is_some()).count();
        assert_eq!(places.len(), count, "a member has two ranks");
        assert!(next.ranks.keys().all(|rank| *rank < next.settings.max_size));
        let size = self.world.spec.size.unwrap_or(u32::MAX) as usize;
        assert!(count <= members(before).count().max(size), "more members than the size");

        let (lead, was) = (next.ranks[&0].member.as_ref().unwrap(), before.ranks[&0].member.as_ref().unwrap());
        assert_eq!(lead.node, was.node, "the lead has changed");
        for (rank, entry) in members(before) {
            self.check_member(
                before,
                next,
                rank,
                entry,
                places.get(entry.member.as_ref().unwrap().uid.as_str()).copied(),
            );
        }
        for (rank, entry) in &next.ranks {
            assert_eq!(broker_name(before, *rank), entry.broker_name, "a broker's name has changed");
        }
    }

    /// Checks the member that had `rank` and has rank `now`.
    fn check_member(&self, before: &Roster, next: &Roster, rank: Rank, entry: &RosterEntry, now: Option<Rank>) {
        let member = entry.member.as_ref().unwrap();
        let runs = |machine: &Machine, rank: Rank| machine.broker.as_ref().is_some_and(|broker| broker.rank == rank);
        let is_running = |rank| self.machines.iter().any(|m| m.node.uid == member.uid && runs(m, rank));
        let report = |node: &str| self.world.reports.get(node);
        let lead = report(&before.ranks[&0].member.as_ref().unwrap().node);
        let is_idle = lead.is_some_and(|lead| lead.allocated.as_ref().is_some_and(|ranks| !ranks.contains(rank)));
        match now {
            Some(now) if now == rank => {
                let (was, is) = (&entry.resources, &next.ranks[&rank].resources);
                let covers = was.as_ref().is_none_or(|was| is.as_ref().is_some_and(|is| is.covers(was)));
                assert!(covers || (entry.drain.is_some() && is_idle), "rank {rank} has shrunk: {was:?} {is:?}");
            }
            Some(now) => {
                let deep = is_deep(&next.settings);
                let reported = report(&member.node).map(|own| own.adopted.as_ref().map(|broker| broker.rank));
                let is_out = lead.is_some_and(|lead| lead.offline.contains(&rank))
                    || reported.is_some_and(|reported| reported != Some(rank));
                // A machine that was registered again is recognized by its broker, even if that is reported late.
                let is_known_again = reported == Some(Some(now)) && !is_running(rank);
                assert!((deep && is_out) || is_known_again, "{} has moved from rank {rank} to {now}", member.node);
            }
            None => {
                let now_here = next.ranks[&rank].member.as_ref();
                let is_registered_again = now_here.is_some_and(|here| here.node == member.node);
                let retain = retain_secs(&self.world.spec);
                let is_gone = rank != 0 && member.gone_since.is_some_and(|since| self.world.now - since >= retain);
                let has_left = entry.drain.as_ref().is_some_and(|drain| drain.leave) && is_idle;
                assert!(is_registered_again || is_gone || has_left, "{} has lost rank {rank}", member.node);
            }
        }
    }

    /// Checks the brokers, which no roster shows: two brokers of one rank would compete for its place in the overlay.
    fn check_brokers(&self) {
        let mut running = BTreeMap::new();
        for machine in &self.machines {
            if let Some(broker) = &machine.broker {
                let other = running.insert(broker.rank, &machine.node.name);
                assert_eq!(other, None, "two brokers of rank {}, the other one on {}", broker.rank, machine.node.name);
            }
        }
    }

    fn check_names(&self) {
        let Some(roster) = &self.world.roster else { return };
        let rendered: toml::Table = render(roster).unwrap().parse().unwrap();
        let hosts = hostlist::decode(rendered["bootstrap"]["hosts"][0]["host"].as_str().unwrap());
        let names: Vec<_> = (0..roster.settings.max_size).map(|rank| broker_name(roster, rank)).collect();
        assert_eq!(hosts, names);
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    }
}

fn members(roster: &Roster) -> impl Iterator<Item = (Rank, &RosterEntry)> {
    roster.ranks.iter().filter(|(_, entry)| entry.member.is_some()).map(|(rank, entry)| (*rank, entry))
}

fn places(roster: &Roster) -> BTreeMap<&str, Rank> {
    members(roster).map(|(rank, entry)| (entry.member.as_ref().unwrap().uid.as_str(), rank)).collect()
}

fn drained(roster: &Roster) -> IdSet {
    members(roster).filter(|(_, entry)| entry.drain.is_some()).map(|(rank, _)| rank).collect()
}

/// Prints the last steps if the test fails.
struct Story(String, Vec<&'static str>);

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self(which, steps) = self;
            let last = &steps[steps.len().saturating_sub(8)..];
            eprintln!("{which}: failed at step {}, after {last:?}", steps.len());
        }
    }
}

fn run(seed: u64, most: usize, topology: Option<&str>, steps: usize) {
    let mut cluster = Cluster::new(seed, most, topology);
    let mut story = Story(format!("seed {seed}, at most {most} nodes, topology {topology:?}"), Vec::new());
    let mut largest = 0;
    for step in 0..steps {
        story.1.push(cluster.step());
        // Let the lead's agent act about as often as the planner.
        if cluster.random.flips() {
            let lead =
                cluster.world.roster.as_ref().and_then(|roster| Some(roster.ranks[&0].member.as_ref()?.uid.clone()));
            if let Some(lead) = cluster.machines.iter().position(|m| lead.as_ref() == Some(&m.node.uid)) {
                cluster.act(lead);
                cluster.report(lead);
            }
        }
        cluster.plan();
        cluster.check_brokers();
        if step % (1 + most / 20) == 0 {
            cluster.check_names();
        }
        largest = largest.max(cluster.machines.iter().filter(|machine| machine.broker.is_some()).count());
    }
    // A run in which hardly a broker starts would prove nothing.
    assert!(largest > most / 4, "{largest} brokers at most");
}

#[test]
fn after_any_steps_no_member_has_two_ranks_and_no_rank_two_members() {
    for seed in 1..=8 {
        run(seed, 24, None, 400);
        run(seed, 24, Some("kary:2"), 400);
    }
}

#[test]
fn a_thousand_nodes_keep_the_invariants_too() {
    run(1, 1000, None, 400);
}
