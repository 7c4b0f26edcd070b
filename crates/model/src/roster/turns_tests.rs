//! An instance that was never online and on whose nodes no broker comes up.

use std::{collections::BTreeSet, time::Duration};

use super::{Decision, decide, no_lead, tests::World};
use crate::{fixture::roster, obstacle::Obstacle};
use api::{FailedLeads, FluxNodeStatus, LeadFailed, NodePhase, Roster};

const LAST_OUTPUT: &str = "the broker has ended; its log says: libarchive.so.13: cannot open shared object file";

/// A cluster in which each broker dies at once, with the agents' reports about it.
struct Hopeless {
    world: World,
    /// (second, node) of each start.
    starts: Vec<(i64, String)>,
}

impl Hopeless {
    fn new(count: u8) -> Self {
        let mut world = World::new(count);
        world.all_passed();
        Self { world, starts: Vec::new() }
    }

    fn roster(&self) -> &Roster {
        self.world.roster.as_ref().unwrap()
    }

    /// In each second the planner decides once, and a lead that has not tried to start its broker yet does so.
    fn live(&mut self, seconds: i64) {
        for _ in 0..seconds {
            let fresh = format!("id-{}", self.roster_count());
            let decision = decide(&super::Observed { fresh_id: &fresh, ..self.world.seen() });
            if let Decision::Write(next) = decision {
                self.world.roster = Some(*next);
            }
            self.act();
            self.world.now += 1;
            self.world.waited += Duration::from_secs(1);
        }
    }

    fn roster_count(&self) -> u64 {
        self.world.roster.as_ref().map_or(0, |roster| roster.revision)
    }

    fn act(&mut self) {
        let Some(roster) = &self.world.roster else { return };
        let (lead, instance_id) = (roster.lead().unwrap().node.clone(), roster.instance_id.clone());
        for (name, report) in &mut self.world.reports {
            if *name != lead {
                (report.phase, report.lead_failed) = (NodePhase::Waiting, None);
                continue;
            }
            let is_this = |failed: &LeadFailed| failed.instance_id == instance_id;
            if !report.lead_failed.as_ref().is_some_and(is_this) {
                self.starts.push((self.world.now, name.clone()));
                let last_words = Some(if self.starts.len() == 1 { LAST_OUTPUT } else { "something else" }.to_owned());
                report.phase = NodePhase::Failed;
                report.lead_failed = Some(LeadFailed { instance_id: instance_id.clone(), last_words });
            }
        }
    }

    fn obstacle(&self) -> Option<Obstacle> {
        no_lead(&self.world.seen(), &self.world.planned().unwrap())
    }
}

#[test]
fn each_eligible_node_gets_its_turn_as_lead_with_growing_pauses() {
    let mut hopeless = Hopeless::new(4);
    hopeless.live(600);
    let starts = &hopeless.starts;
    assert!((6..=10).contains(&starts.len()), "{starts:?}");
    let first_four: BTreeSet<_> = starts.iter().take(4).map(|(_, node)| node.as_str()).collect();
    assert_eq!(first_four, BTreeSet::from(["node1", "node2", "node3", "node4"]), "{starts:?}");
    let pauses: Vec<_> = starts.windows(2).map(|two| two[1].0 - two[0].0).collect();
    assert!(pauses.is_sorted() && pauses.last() > Some(&200), "{pauses:?}");
    assert_eq!(hopeless.roster().epoch, 1);
    let times: Vec<_> = hopeless.roster().failed_leads.nodes.values().map(|node| node.times).collect();
    assert!(times.iter().all(|times| (2..=3).contains(times)), "{times:?}");
}

#[test]
fn the_first_failure_is_kept_and_reported_by_every_later_planner() {
    let mut hopeless = Hopeless::new(4);
    hopeless.live(1);
    assert_eq!(hopeless.obstacle(), None, "nothing has failed yet");
    hopeless.live(1);
    let Some(Obstacle::Waiting(message)) = hopeless.obstacle() else { panic!("{:?}", hopeless.obstacle()) };
    assert!(message.contains(LAST_OUTPUT) && message.contains("node1"), "{message}");
    hopeless.live(100);
    // Another planner knows only what is in the roster.
    hopeless.world.waited = Duration::ZERO;
    let text = serde_json::to_string(hopeless.roster()).unwrap();
    hopeless.world.roster = Some(Roster::parse(&text).unwrap());
    let before = hopeless.starts.len();
    hopeless.live(10);
    assert_eq!(hopeless.starts.len(), before);
    let Some(Obstacle::Problem { reason: "NoLead", message }) = hopeless.obstacle() else {
        panic!("{:?}", hopeless.obstacle())
    };
    assert!(message.contains(LAST_OUTPUT) && message.contains("on 4 of 4 nodes"), "{message}");
    assert!(hopeless.world.projected("node3").reason.unwrap().contains(LAST_OUTPUT));
}

#[test]
fn a_change_that_may_be_the_cure_is_tried_at_once() {
    type Edit = fn(&mut World);
    let changes: [(&str, Edit, u64); 6] = [
        ("the configuration", |world| world.spec.broker.config = Some("[x]".into()), 2),
        ("the packages", |world| world.digest = "other", 2),
        ("anything in the spec", |world| world.generation += 1, 1),
        ("a request", |world| world.restart_word = Some("again"), 1),
        ("a node", |world| world.reports.get_mut("node3").unwrap().facts.as_mut().unwrap().boot_id = "new".into(), 1),
        ("an agent", |world| world.reports.get_mut("node1").unwrap().agent_version = Some("2.0".into()), 1),
    ];
    for (what, change, epoch) in changes {
        let mut hopeless = Hopeless::new(4);
        // Now a pause of minutes has begun.
        hopeless.live(140);
        let before = hopeless.starts.len();
        hopeless.live(10);
        assert_eq!(hopeless.starts.len(), before, "{what}");
        change(&mut hopeless.world);
        hopeless.live(4);
        assert!(hopeless.starts.len() > before, "{what}");
        assert_eq!(hopeless.roster().epoch, epoch, "{what}");
    }
}

#[test]
fn the_lead_of_the_spec_or_an_only_node_is_tried_again_and_again() {
    for count in [1, 3] {
        let mut hopeless = Hopeless::new(count);
        hopeless.world.spec.lead = (count > 1).then(|| "node2".to_owned());
        hopeless.live(100);
        let starts = &hopeless.starts;
        let only = if count > 1 { "node2" } else { "node1" };
        assert!((4..=7).contains(&starts.len()) && starts.iter().all(|(_, node)| node == only), "{starts:?}");
        let Some(Obstacle::Problem { message, .. }) = hopeless.obstacle() else { panic!("{:?}", hopeless.obstacle()) };
        assert!(message.contains("on 1 of 1 node"), "{message}");
    }
}

#[test]
fn a_lead_that_recovers_is_not_replaced_and_its_failures_are_forgotten() {
    let mut hopeless = Hopeless::new(2);
    hopeless.live(40);
    let lead = hopeless.roster().lead().unwrap().node.clone();
    let report = hopeless.world.reports.get_mut(&lead).unwrap();
    (report.phase, report.lead_failed) = (NodePhase::Starting, None);
    hopeless.world.now += 1000;
    assert_eq!(hopeless.world.settle(), Decision::Keep);
    assert_eq!(hopeless.roster().lead().unwrap().node, lead);
    assert!(!hopeless.roster().failed_leads.is_empty());
    hopeless.world.online(&lead);
    hopeless.world.settle();
    assert_eq!((hopeless.roster().established, &hopeless.roster().failed_leads), (true, &FailedLeads::default()));
    assert_eq!(hopeless.obstacle(), None);
}

#[test]
fn an_instance_that_was_online_keeps_its_lead_however_often_it_fails() {
    let mut world = World::up(3);
    world.waited = Duration::from_secs(1000);
    let lead_failed = Some(LeadFailed { instance_id: "fresh".into(), last_words: Some(LAST_OUTPUT.into()) });
    let failed = FluxNodeStatus { phase: NodePhase::Failed, lead_failed, ..FluxNodeStatus::default() };
    world.reports.insert("node1".into(), failed);
    for _ in 0..100 {
        world.now += 100;
        world.settle();
    }
    let roster = world.roster.as_ref().unwrap();
    assert_eq!((roster.lead().unwrap().node.as_str(), &roster.failed_leads), ("node1", &FailedLeads::default()));
}

#[test]
fn the_number_of_remembered_failures_is_bounded_and_older_rosters_have_none() {
    let mut hopeless = Hopeless::new(70);
    for _ in 0..100 {
        hopeless.live(3);
        hopeless.world.now += 300;
    }
    assert!(hopeless.starts.len() > 90);
    assert_eq!(hopeless.roster().failed_leads.nodes.len(), super::turns::MOST_NODES);
    let older = serde_json::to_string(&roster(4, &[("node1", 2)])).unwrap();
    assert!(!older.contains("failedLeads"));
    assert!(Roster::parse(&older).unwrap().failed_leads.is_empty());
}
