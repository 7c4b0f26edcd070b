//! Runs the bridge between pods and jobs while this host has the lead's broker.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{sync::watch, time::sleep};
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;

use crate::{
    inputs::{
        broker_state,
        node_inputs::{Instance, NodeInputs},
    },
    node_ops::NodeOps,
    other_process::uninstall_is_under_way,
};
use api::{FluxInstanceSpec, IdSet, PodCounts, Roster, parse_duration, quantity::milli};
use base::error_chain;
use bridge::{Bridge, Reported, Told};
use broker::queues::QueueError;
use cluster::ApiError;
use hostapi::Host;
use model::broker_toml::stops_queues_on_restart;
use pods::world::Settings;

/// Drains of ranks where host jobs have cores that pods use stay for this long though no bridge knows whether that is so.
const UNKNOWN_FOR: Duration = Duration::from_mins(5);
/// Pause before a clean-up is tried again: the broker did not answer, or the scheduler is offline.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// The bridge, if it runs.
pub struct Bridging {
    /// Name of this agent's pod.
    identity: String,
    /// Name of this node.
    node: String,
    running: Option<Running>,
    /// When a bridge of this agent last knew where host jobs have cores that pods use; before, when the agent began.
    counted: Instant,
    cleanup: Option<Cleanup>,
    /// The instance is over and no broker runs here: this node's placeholder pod has been, or is being, removed.
    removes_placeholder: bool,
}

/// Ends what an earlier bridge left.
struct Cleanup {
    /// The process of the broker that it asks.
    broker: i32,
    _task: AbortOnDropHandle<()>,
}

struct Running {
    told: watch::Sender<Told>,
    reported: watch::Receiver<Reported>,
    task: AbortOnDropHandle<()>,
}

/// What is to run beside the broker of this host.
#[derive(Debug, PartialEq)]
enum Wanted<'a> {
    Nothing,
    /// The bridge, with this roster.
    Bridge {
        roster: &'a Arc<Roster>,
        is_closing: bool,
    },
    /// A clean-up after an earlier bridge.
    Cleanup {
        /// The process of the broker.
        broker: i32,
        /// Whether queues that a restart stopped are to be started, too.
        starts_queues: bool,
    },
}

impl Bridging {
    /// `identity`: the name of this agent's pod. `node`: that of this node.
    pub fn new(identity: &str, node: &str) -> Self {
        let (identity, node) = (identity.to_owned(), node.to_owned());
        Self { identity, node, running: None, counted: Instant::now(), cleanup: None, removes_placeholder: false }
    }

    /// Begins, tells or ends the bridge, as it is wanted now.
    pub fn follow(&mut self, ops: &NodeOps, inputs: &NodeInputs) {
        if self.running.as_ref().is_some_and(|running| running.reported.borrow().overlapping_on.is_some()) {
            self.counted = Instant::now();
        }
        let wanted = wanted(inputs);
        if !matches!(wanted, Wanted::Bridge { .. }) {
            self.running = None;
        }
        // Without pods through Flux, deploy/pods.yaml need not be there, nor the right to delete one.
        // An agent that started after the end knows only the host's copy of the roster.
        let roster = inputs.roster.as_deref().or(inputs.local_roster.as_deref());
        let had_pods = inputs.spec.pods.enabled || roster.is_some_and(|roster| roster.settings.pods);
        let is_over = had_pods && inputs.instance == Instance::Over && inputs.host.broker.is_none();
        let was_over = std::mem::replace(&mut self.removes_placeholder, is_over);
        if is_over && !was_over {
            // Perhaps no bridge is left to remove it, and none will come.
            let (client, node) = (ops.client.clone(), self.node.clone());
            tokio::spawn(async move {
                until_removed(|| bridge::remove_placeholder_pod(&client, &node)).await;
            });
        }
        if !matches!(wanted, Wanted::Cleanup { .. }) {
            // A clean-up that goes on would cancel the jobs of the next bridge.
            self.cleanup = None;
        }
        match wanted {
            Wanted::Nothing => {}
            Wanted::Bridge { roster, is_closing } => {
                let settings = settings(&inputs.spec);
                let nodes = inputs.spec.nodes.clone();
                let reported = inputs.broker.instance.as_ref();
                let (available, drained) = (bridge::available(reported), bridge::drained(reported));
                let roster = Arc::clone(roster);
                self.run_bridge(ops, Told { roster, is_closing, settings, nodes, available, drained });
            }
            Wanted::Cleanup { broker, starts_queues } => self.begin_cleanup(ops, broker, starts_queues),
        }
    }

    fn run_bridge(&mut self, ops: &NodeOps, told: Told) {
        match &self.running {
            Some(running) if !running.task.is_finished() => {
                running.told.send_if_modified(|before| std::mem::replace(before, told.clone()) != told);
            }
            _ => {
                let (sender, told) = watch::channel(told);
                let (report, reported) = watch::channel(Reported::default());
                let host = Arc::clone(&ops.host);
                let bridge = Bridge {
                    client: ops.client.clone(),
                    connect: Box::new(move || {
                        let host = Arc::clone(&host);
                        Box::pin(async move { broker_state::connect_on(&*host).await })
                    }),
                    told,
                    // The uninstall is about to stop the broker, which would end a job that starts now.
                    may_start_queues: Box::new(|| !uninstall_is_under_way()),
                    identity: self.identity.clone(),
                    report,
                };
                let task = AbortOnDropHandle::new(tokio::spawn(bridge::run(bridge)));
                self.running = Some(Running { told: sender, reported, task });
            }
        }
    }

    /// Begins a clean-up, once for each process of the lead's broker.
    fn begin_cleanup(&mut self, ops: &NodeOps, broker: i32, starts_queues: bool) {
        if self.cleanup.as_ref().is_some_and(|cleanup| cleanup.broker == broker) {
            return;
        }
        let (client, host) = (ops.client.clone(), Arc::clone(&ops.host));
        let task = tokio::spawn(async move {
            // Side by side: queues must not stay stopped while the API server takes no deletion.
            tokio::join!(
                until_removed(|| bridge::remove_placeholder_pods(&client)),
                until_clean(&*host, starts_queues)
            );
        });
        self.cleanup = Some(Cleanup { broker, _task: AbortOnDropHandle::new(task) });
    }

    /// What people want to know of the bridge, if it runs.
    pub fn counts(&self) -> Option<PodCounts> {
        self.running.as_ref().map(|running| running.reported.borrow().counts.clone())
    }

    /// The ranks where host jobs have cores that pods use. None while that is not known, as after a restart of the broker; but not for long: ranks
    /// must not stay drained for pods that no bridge counts any more.
    pub fn overlapping_on(&self) -> Option<IdSet> {
        let known = self.running.as_ref().and_then(|running| running.reported.borrow().overlapping_on.clone());
        known.or_else(|| (self.counted.elapsed() >= UNKNOWN_FOR).then(IdSet::default))
    }
}

/// Calls `remove` until it succeeds, or the API server forbids it.
async fn until_removed<F: Future<Output = Result<(), ApiError>>>(remove: impl Fn() -> F) {
    while let Err(error) = remove().await {
        // deploy/pods.yaml is not applied, so no bridge has made any.
        if error.code() == Some(403) {
            return;
        }
        debug!(error = error_chain(&error), "can't remove placeholder pods: trying again");
        sleep(LOOK_AGAIN).await;
    }
}

/// Ends what a bridge may have left in the instance.
async fn until_clean(host: &dyn Host, starts_queues: bool) {
    loop {
        match uninstall_is_under_way() {
            true => debug!("flux-distribute uninstall runs: what a bridge may have left stays"),
            false => match clean_up_once(host, starts_queues).await {
                Ok(()) => return,
                Err(error) => {
                    debug!(error = error_chain(&error), "can't end what a bridge may have left: trying again");
                }
            },
        }
        sleep(LOOK_AGAIN).await;
    }
}

async fn clean_up_once(host: &dyn Host, starts_queues: bool) -> Result<(), QueueError> {
    bridge::clean_up(&broker_state::connect_on(host).await?, starts_queues).await
}

/// Decides what is to run beside the broker of this host.
fn wanted(inputs: &NodeInputs) -> Wanted<'_> {
    let lead = inputs.host.broker.as_ref().filter(|broker| broker.record.rank == 0 && inputs.is_online());
    let (Some(roster), Some(lead)) = (&inputs.roster, lead) else { return Wanted::Nothing };
    // Between two epochs, the roster may be that of the next one already.
    let is_its_roster = (lead.record.epoch, &lead.record.instance_id) == (roster.epoch, &roster.instance_id);
    let is_closing = roster.closing.is_some() || inputs.instance == Instance::Over;
    match () {
        () if inputs.nothing_wanted || !is_its_roster => Wanted::Nothing,
        () if roster.settings.pods => Wanted::Bridge { roster, is_closing },
        // The broker is about to stop, which would end a job that starts now.
        () if is_closing => Wanted::Nothing,
        () => {
            let starts_queues = !stops_queues_on_restart(&roster.settings.config);
            Wanted::Cleanup { broker: lead.pid, starts_queues }
        }
    }
}

fn settings(spec: &FluxInstanceSpec) -> Settings {
    let default = Settings::default();
    let duration = |text: &Option<String>| text.as_deref().and_then(parse_duration);
    let millis = |text: &Option<String>| i64::try_from(duration(text)?.as_millis()).ok();
    let pods = &spec.pods;
    Settings {
        max_gang: pods.max_gang.unwrap_or(default.max_gang),
        default_duration: duration(&pods.default_duration)
            .map_or(default.default_duration, |duration| duration.as_secs()),
        complete_after: millis(&pods.complete_after).unwrap_or(default.complete_after),
        preempt_after: millis(&pods.preempt_after),
        tolerance: pods.tolerance.as_deref().and_then(|text| milli(text).ok()).unwrap_or(default.tolerance),
    }
}

#[cfg(test)]
mod tests {
    use api::Closing;

    use super::*;
    use crate::fixture;

    type Edit = fn(&mut Roster);

    #[test]
    fn a_bridge_or_a_cleanup_runs_beside_the_leads_broker_of_the_rosters_epoch() {
        let pods: Edit = |roster| roster.settings.pods = true;
        let none: Edit = |_| {};
        let closing: Edit = |roster| roster.closing = Some(Closing::WhenIdle);
        let next_epoch: Edit = |roster| roster.epoch += 1;
        let another: Edit = |roster| roster.instance_id = "another".into();
        let stops: Edit = |roster| roster.settings.config = "[job-manager]\nstop-queues-on-restart = true".to_owned();
        for (what, edits, expected) in [
            ("pods are on", [pods, none], "bridge"),
            ("pods of a gang may be half bound", [pods, closing], "bridge, queues stay"),
            ("the broker is still the last epoch's", [pods, next_epoch], "nothing"),
            ("the broker is another instance's", [pods, another], "nothing"),
            ("pods are off", [none, none], "cleanup, starts"),
            ("an administrator starts the queues", [stops, none], "cleanup"),
            ("the queues have been stopped for the end", [none, closing], "nothing"),
            ("pods are off in the next epoch", [none, next_epoch], "nothing"),
        ] {
            let mut inputs = fixture::lead_with_broker(Default::default());
            inputs.broker = fixture::inputs().broker;
            edits.iter().for_each(|edit| edit(Arc::make_mut(inputs.roster.as_mut().unwrap())));
            let found = |inputs: &NodeInputs| match wanted(inputs) {
                Wanted::Nothing => "nothing",
                Wanted::Bridge { is_closing: false, .. } => "bridge",
                Wanted::Bridge { is_closing: true, .. } => "bridge, queues stay",
                Wanted::Cleanup { broker: 7, starts_queues: true } => "cleanup, starts",
                Wanted::Cleanup { .. } => "cleanup",
            };
            assert_eq!(found(&inputs), expected, "{what}");
            let mut over = inputs.clone();
            over.instance = Instance::Over;
            let stays_stopped = ["bridge, queues stay", "nothing"].contains(&found(&over));
            assert!(stays_stopped, "{what}: the instance is being deleted");
            let off: [fn(&mut NodeInputs); 4] = [
                |inputs| inputs.nothing_wanted = true,
                |inputs| inputs.broker.state = "cleanup".into(),
                |inputs| inputs.roster = None,
                |inputs| inputs.host.broker = Some(fixture::broker(1, 1)),
            ];
            for edit in off {
                let mut inputs = inputs.clone();
                edit(&mut inputs);
                assert_eq!(found(&inputs), "nothing", "{what}");
            }
        }
    }
}
