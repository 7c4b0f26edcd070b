//! Runs the bridge between pods and jobs while this host has the lead's broker.

use std::sync::Arc;

use tokio::{sync::watch, task::JoinHandle};

use crate::{
    inputs::{broker_state, node_inputs::NodeInputs},
    node_ops::NodeOps,
};
use api::{FluxInstanceSpec, PodCounts, Roster, parse_duration};
use bridge::{Bridge, Told};
use pods::world::Settings;

/// The bridge, if it runs.
pub struct Bridging {
    /// Name of this agent's pod.
    identity: String,
    running: Option<Running>,
}

struct Running {
    told: watch::Sender<Told>,
    counts: watch::Receiver<PodCounts>,
    task: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Bridging {
    /// `identity`: the name of this agent's pod.
    pub fn new(identity: &str) -> Self {
        Self { identity: identity.to_owned(), running: None }
    }

    /// Begins, tells or ends the bridge, as it is wanted now.
    pub fn follow(&mut self, ops: &NodeOps, inputs: &NodeInputs) {
        let Some(roster) = roster(inputs) else {
            self.running = None;
            return;
        };
        let told = Told { roster: Arc::clone(roster), settings: settings(&inputs.spec) };
        match &self.running {
            Some(running) if !running.task.is_finished() => {
                running.told.send_if_modified(|before| std::mem::replace(before, told.clone()) != told);
            }
            _ => {
                let (sender, told) = watch::channel(told);
                let (report, counts) = watch::channel(PodCounts::default());
                let bridge = Bridge {
                    client: ops.client.clone(),
                    connect: Box::new(|| Box::pin(broker_state::connect())),
                    told,
                    identity: self.identity.clone(),
                    report,
                };
                self.running = Some(Running { told: sender, counts, task: tokio::spawn(bridge::run(bridge)) });
            }
        }
    }

    /// What the bridge reports, if it runs.
    pub fn counts(&self) -> Option<PodCounts> {
        self.running.as_ref().map(|running| running.counts.borrow().clone())
    }
}

/// The roster that the bridge works by; None if it is not to run here.
fn roster(inputs: &NodeInputs) -> Option<&Arc<Roster>> {
    let leads = inputs.host.broker.as_ref().is_some_and(|broker| broker.record.rank == 0);
    let roster = inputs.roster.as_ref().filter(|roster| roster.settings.pods && !inputs.nothing_wanted)?;
    (leads && inputs.broker.is_online(&inputs.host)).then_some(roster)
}

fn settings(spec: &FluxInstanceSpec) -> Settings {
    let default = Settings::default();
    let duration = |text: &Option<String>| text.as_deref().and_then(parse_duration);
    let pods = &spec.pods;
    Settings {
        max_gang: pods.max_gang.unwrap_or(default.max_gang),
        default_duration: duration(&pods.default_duration)
            .map_or(default.default_duration, |duration| duration.as_secs()),
        complete_after: duration(&pods.complete_after)
            .and_then(|duration| i64::try_from(duration.as_millis()).ok())
            .unwrap_or(default.complete_after),
    }
}
