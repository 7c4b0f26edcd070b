//! What goes on beside the agent's rounds. Nothing waits for it.

pub(super) mod agents;
mod bridging;
pub(super) mod dump;
pub(super) mod gate;
pub(super) mod health;
mod inspect;
mod port;
mod reviews;
pub(super) mod scrape;
pub(super) mod serve;
mod tidy;

use bridging::Bridging;
use dump::Dumping;
use health::Health;
use inspect::Inspecting;
use port::Port;
use serve::Serving;
use tidy::Tidied;

use super::{
    inputs::{node_inputs::NodeInputs, sources::Sources},
    node_ops::NodeOps,
    step::Step,
};
use api::PackageSet;

/// Servers and tasks beside the rounds.
pub struct Background {
    /// Answers probes.
    pub health: Health,
    /// Serves archives to other nodes.
    pub serving: Serving,
    scraped: Option<Port>,
    tidied: Tidied,
    inspecting: Inspecting,
    dumping: Dumping,
    bridging: Bridging,
}

impl Background {
    /// With the servers that run already; `scraped` is the port of one.
    pub fn new(health: Health, serving: Serving, scraped: Option<Port>, pod_name: &str, node_name: &str) -> Self {
        Self {
            health,
            serving,
            scraped,
            tidied: Tidied::default(),
            inspecting: Inspecting::default(),
            dumping: Dumping::default(),
            bridging: Bridging::new(pod_name, node_name),
        }
    }

    /// Looks which of the published `sets` this host holds, and offers their archives to other nodes. `instance_uid`: the
    /// instance whose packages may be offered.
    pub fn look(&mut self, inputs: &NodeInputs, sets: &[(String, PackageSet)], instance_uid: &str) {
        let ours = inputs.host.state.as_ref().filter(|state| state.instance_uid == instance_uid);
        self.serving.look(ours.map(|state| state.prefix.as_path()), sets, &inputs.host.environments);
    }

    /// Runs the bridge between pods and jobs where it belongs.
    pub fn serve_pods(&mut self, ops: &NodeOps, inputs: &NodeInputs) {
        self.bridging.follow(ops, inputs);
    }

    /// `inputs` with what is known here now.
    pub fn up_to_date(&self, inputs: NodeInputs) -> NodeInputs {
        NodeInputs {
            held_archives: self.serving.holds().to_vec(),
            peer: self.serving.peer(),
            port_problems: [self.serving.trouble(), self.scraped.as_ref().and_then(Port::trouble)]
                .into_iter()
                .flatten()
                .collect(),
            damage: self.inspecting.damage(),
            pods: self.bridging.counts(),
            overlapping_on: self.bridging.overlapping_on(),
            ..inputs
        }
    }

    /// Does what is due, in a round without a step to carry out.
    pub async fn upkeep(&mut self, ops: &NodeOps, sources: &Sources, inputs: &NodeInputs, step: &Step) {
        self.tidied.tidy(ops, sources, inputs).await;
        self.dumping.begin_if_due(&ops.host, inputs, step);
        self.inspecting.inspect(ops, sources, inputs).await;
    }

    /// True while a look or a mending goes on, or its outcome is not yet in `inputs`: then the next round must come soon.
    pub fn needs_round_soon(&self, inputs: &NodeInputs) -> bool {
        self.inspecting.is_at_work() || self.inspecting.damage() != inputs.damage
    }

    /// Stops what writes below the prefix: an installation or a removal is about to begin.
    pub async fn stop_mending(&mut self) {
        self.inspecting.stop_mending().await;
    }
}
