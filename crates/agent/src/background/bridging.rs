//! Runs the bridge between pods and jobs while this host has the lead's broker.

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, time::sleep};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info};

use crate::{
    inputs::{broker_state, node_inputs::NodeInputs},
    node_ops::NodeOps,
};
use api::{FluxInstanceSpec, PodCounts, Roster, parse_duration};
use base::error_chain;
use bridge::{Bridge, Told, cancel_left};
use pods::world::Settings;

/// Pause before the jobs that a bridge has left are looked for again, if the broker did not answer.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// The bridge, if it runs.
pub struct Bridging {
    /// Name of this agent's pod.
    identity: String,
    running: Option<Running>,
    cleanup: Option<Cleanup>,
}

/// Cancels the jobs that an earlier bridge left.
struct Cleanup {
    /// The process of the broker that it asks.
    broker: i32,
    _task: AbortOnDropHandle<()>,
}

struct Running {
    told: watch::Sender<Told>,
    counts: watch::Receiver<PodCounts>,
    task: AbortOnDropHandle<()>,
}

impl Bridging {
    /// `identity`: the name of this agent's pod.
    pub fn new(identity: &str) -> Self {
        Self { identity: identity.to_owned(), running: None, cleanup: None }
    }

    /// Begins, tells or ends the bridge, as it is wanted now.
    pub fn follow(&mut self, ops: &NodeOps, inputs: &NodeInputs) {
        let Some(roster) = roster(inputs) else {
            self.running = None;
            return self.cancel_left_jobs(inputs);
        };
        // It would cancel the jobs of this bridge.
        self.cleanup = None;
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
                let task = AbortOnDropHandle::new(tokio::spawn(bridge::run(bridge)));
                self.running = Some(Running { told: sender, counts, task });
            }
        }
    }

    /// Starts to cancel the jobs that an earlier bridge left when `spec.pods.enabled` was switched off. Once for each process of the
    /// lead's broker.
    fn cancel_left_jobs(&mut self, inputs: &NodeInputs) {
        let is_off = inputs.roster.as_ref().is_some_and(|roster| !roster.settings.pods) && !inputs.nothing_wanted;
        let Some(broker) = lead_online(inputs).filter(|_| is_off) else {
            self.cleanup = None;
            return;
        };
        if self.cleanup.as_ref().is_some_and(|cleanup| cleanup.broker == broker) {
            return;
        }
        let task = tokio::spawn(async {
            loop {
                let left = async { cancel_left(&broker_state::connect().await?).await };
                match left.await {
                    Ok(0) => return,
                    Ok(jobs) => return info!(jobs, "cancelled the jobs of pods: spec.pods.enabled is off"),
                    Err(error) => debug!(error = error_chain(&error), "can't look for jobs of pods"),
                }
                sleep(LOOK_AGAIN).await;
            }
        });
        self.cleanup = Some(Cleanup { broker, _task: AbortOnDropHandle::new(task) });
    }

    /// What the bridge reports, if it runs.
    pub fn counts(&self) -> Option<PodCounts> {
        self.running.as_ref().map(|running| running.counts.borrow().clone())
    }
}

/// The roster that the bridge works by; None if it is not to run here.
fn roster(inputs: &NodeInputs) -> Option<&Arc<Roster>> {
    let roster = inputs.roster.as_ref().filter(|roster| roster.settings.pods && !inputs.nothing_wanted)?;
    lead_online(inputs).map(|_| roster)
}

/// The process of the lead's broker, if that runs here and is online.
fn lead_online(inputs: &NodeInputs) -> Option<i32> {
    let lead = inputs.host.broker.as_ref().filter(|broker| broker.record.rank == 0)?;
    inputs.broker.is_online(&inputs.host).then_some(lead.pid)
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
