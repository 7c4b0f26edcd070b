//! Nodes that come, go, return and are replaced, while planners die and FluxNodes are lost.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use api::{FluxNode, IdSet};
use kube::api::DeleteParams;
use serde_json::json;

use super::{Row, Shape, row};
use crate::scene::{Hit, Scene};

static MANY: Shape = Shape { nodes: 8, options: &[] };
/// In each run.
const CHANGES: u32 = 25;
/// At any time.
const NODES: std::ops::RangeInclusive<usize> = 4..=10;

pub fn rows() -> Vec<Row> {
    vec![Row {
        shape: &MANY,
        fresh: true,
        job_dies: true,
        heals_in: 180,
        ..row("25 random joins, leaves, returns, replacements, planner deaths and lost FluxNodes", |scene| {
            // Short enough that ranks are freed on the way.
            scene.cluster.patch(json!({ "spec": { "ranks": { "retain": "5s" } } }));
            let (lead, spared) = (scene.lead(), scene.pick_follower());
            let mut nodes = Nodes { there: scene.names().into_iter().collect(), ..Nodes::default() };
            nodes.spared.clone_from(&spared);
            // No fault of this row hits the machines of these two nodes.
            let job = scene.submit_on([&lead, &spared]);
            for _ in 0..CHANGES {
                nodes.change(scene, &lead);
                scene.dice.pause(Duration::from_secs(2));
            }
            nodes.come_back(scene);
            scene.nodes = u32::try_from(nodes.there.len()).unwrap();
            scene.until("Flux's own list", Duration::from_mins(3), |scene| is_flux_s_list(scene, &lead));
            let moved = scene.rosters.moved();
            assert!(moved.is_empty(), "{moved:?}");
            scene.end(&job).unwrap();
            Hit::brokers_of(nodes.hit)
        })
    }]
}

#[derive(Default)]
struct Nodes {
    there: BTreeSet<String>,
    off: BTreeSet<String>,
    cordoned: BTreeSet<String>,
    /// Nothing happens to its machine.
    spared: String,
    /// Their machines have lost power, or are others.
    hit: BTreeSet<String>,
}

impl Nodes {
    fn change(&mut self, scene: &mut Scene, lead: &str) {
        let on: Vec<_> = self.there.difference(&self.off).filter(|node| *node != lead).cloned().collect();
        let node = scene.dice.pick(&on);
        let is_spared = node == self.spared;
        let is_full = self.there.len() >= *NODES.end();
        let may_leave = on.len() >= *NODES.start();
        match scene.dice.below(7) {
            0 if !is_full => self.add(scene),
            1 if may_leave && !is_spared => self.remove(scene, &node),
            2 if may_leave && !is_spared => {
                scene.cluster.must(&["node", &node, "power-off"]);
                self.hit.insert(node.clone());
                self.off.insert(node);
            }
            3 => match self.off.pop_first() {
                Some(node) => drop(scene.cluster.must(&["node", &node, "power-on"])),
                None if is_spared => {}
                None => self.replace(scene, &node),
            },
            4 => {
                let planner = scene.cluster.planner();
                // The machine that the last one was on may be off.
                if let Some(agent) = scene.agents().get(&planner) {
                    agent.kill();
                }
            }
            5 => {
                let nodes = scene.cluster.api::<FluxNode>();
                let _ = scene.cluster.wait(nodes.delete(&node, &DeleteParams::default()));
            }
            _ => {
                let cordon = self.cordoned.insert(node.clone()) || !self.cordoned.remove(&node);
                set_cordon(scene, &node, cordon);
            }
        }
    }

    fn add(&mut self, scene: &Scene) {
        scene.cluster.must(&["add-node"]);
        self.there.extend(scene.cluster.nodes().into_iter().map(|node| node.name));
    }

    fn remove(&mut self, scene: &Scene, node: &str) {
        scene.cluster.must(&["remove-node", node]);
        self.hit.insert(node.to_owned());
        self.there.remove(node);
        self.cordoned.remove(node);
    }

    /// Another machine under the same name.
    fn replace(&mut self, scene: &Scene, node: &str) {
        self.remove(scene, node);
        self.add(scene);
    }

    fn come_back(&mut self, scene: &Scene) {
        for node in std::mem::take(&mut self.off) {
            scene.cluster.must(&["node", &node, "power-on"]);
        }
        for node in std::mem::take(&mut self.cordoned) {
            set_cordon(scene, &node, false);
        }
    }
}

fn set_cordon(scene: &Scene, node: &str, cordon: bool) {
    scene.cluster.patch_node(node, json!({ "spec": { "unschedulable": cordon } }));
}

/// The ranks that Flux has up are those that have a member, every node is one of these, and no rank is drained.
fn is_flux_s_list(scene: &Scene, lead: &str) -> Result<(), String> {
    let roster = scene.cluster.roster().ok_or("no roster")?;
    let members: BTreeMap<u32, String> =
        roster.ranks.iter().filter_map(|(rank, entry)| Some((*rank, entry.member.as_ref()?.node.clone()))).collect();
    if members[&0] != lead {
        return Err(format!("{} leads, not {lead}", members[&0]));
    }
    let there: BTreeSet<_> = scene.cluster.nodes().into_iter().map(|node| node.name).collect();
    if members.values().cloned().collect::<BTreeSet<_>>() != there || members.len() != there.len() {
        return Err(format!("members {members:?} of {there:?}"));
    }
    let up: IdSet = scene
        .ask(&["flux", "resource", "list", "-s", "up", "-no", "{ranks}"])?
        .lines()
        .map(|line| line.parse::<IdSet>().map_err(|error| format!("{line}: {error}")))
        .try_fold(IdSet::default(), |mut all, ranks| {
            all.0.extend(ranks?.0);
            Ok::<_, String>(all)
        })?;
    if up.0.iter().ne(members.keys()) {
        return Err(format!("Flux has {up} up, the roster {members:?}"));
    }
    let drained = scene.ask(&["flux", "resource", "drain", "-n"])?;
    if drained.is_empty() { Ok(()) } else { Err(drained) }
}
