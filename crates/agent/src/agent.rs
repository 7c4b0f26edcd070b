//! The agent of one node: its parts, how it observes and how it reports. [`super::run`] drives it, [`super::execute`] carries out
//! its steps.

use std::{path::PathBuf, sync::Arc, time::Instant};

use tokio::sync::Mutex;
use tracing::warn;

use super::{
    background::Background,
    decide::uninstall_to_remember,
    error::StepError,
    inputs::{broker_state::BrokerState, node_inputs::NodeInputs, sources::Sources},
    memory::Memory,
    node_ops::NodeOps,
    reporter::Reporter,
    status::{measured, node_status},
    step::Step,
};
use api::FluxNodeStatus;
use base::error_chain;
use metrics::Metrics;

/// The agent of one node.
pub struct Agent {
    /// Operations on the host.
    pub ops: NodeOps,
    /// Writes the FluxNode's status.
    pub reporter: Reporter,
    /// Where a round's inputs come from.
    pub sources: Sources,
    /// What is remembered between two rounds.
    pub memory: Memory,
    /// What goes on beside the rounds.
    pub background: Background,
    /// What Prometheus reads.
    pub metrics: Metrics,
    /// The file from which kubelet takes a container's last message.
    pub termination_log: PathBuf,
    /// Held during a live change, which must not be cut off by the end of this process.
    pub live_change: Arc<Mutex<()>>,
}

impl Agent {
    /// Observes what the next decision needs.
    ///
    /// # Errors
    /// The host can't be observed.
    pub async fn observe(&mut self) -> Result<NodeInputs, StepError> {
        let inputs = self.sources.observe(&self.ops, &self.reporter).await?;
        self.background.look(&inputs, self.sources.published.sets(), self.sources.instance_uid());
        let inputs = self.background.up_to_date(inputs);
        self.memory.observed(&inputs);
        Ok(inputs)
    }

    /// Reports status and readiness. Returns false if the FluxNode does not show all of `status` afterwards, so that another round has to write it.
    pub async fn report(
        &mut self,
        inputs: &NodeInputs,
        status: Option<&FluxNodeStatus>,
        readiness: Option<bool>,
    ) -> bool {
        if let Some(ready) = readiness {
            self.background.health.set_ready(ready);
        }
        self.metrics.set_node(measured::of_node(inputs), measured::of_lead(inputs));
        let (Some(node), Some(status)) = (&inputs.flux_node, status) else { return true };
        let mut broker = self.sources.broker.clone();
        let pid = inputs.broker.pid;
        let is_gone = |now: &BrokerState| pid.is_some() && now.pid != pid;
        let own_writes = &self.sources.own_writes;
        tokio::select! {
            is_reported = self.reporter.try_write(node, status, |written| own_writes.wrote(node, written)) => is_reported,
            // A broker that dies must not wait for an API server that is away.
            Ok(_) = broker.wait_for(is_gone) => false,
        }
    }

    /// Reports while `step` is carried out, or after it has failed. `progress` says how far it is.
    pub async fn report_step(&mut self, inputs: &NodeInputs, step: &Step, progress: Option<&str>) {
        // A step may take minutes: what changes without an observation of the host is up to date.
        let now = NodeInputs {
            at: Instant::now(),
            flux_node: self.sources.watched.borrow().flux_node.here().cloned(),
            broker: self.sources.broker.borrow().clone(),
            ..inputs.clone()
        };
        let now = self.background.up_to_date(now);
        let status = node_status::node_status(&now, &self.memory, step, progress);
        self.report(&now, status.as_ref(), node_status::readiness(&now)).await;
    }

    /// When somebody asks how the instance is to end, the FluxInstance is gone, so the host remembers it. Nothing waits for that: the
    /// disk may be full.
    pub async fn remember_uninstall(&self, inputs: &NodeInputs) {
        let uid = self.sources.instance_uid();
        if let (Some(uninstall), Some(preflight)) = (uninstall_to_remember(inputs, uid), &inputs.preflight)
            && let Err(error) = self.ops.claim(preflight, uid, uninstall).await
        {
            warn!(error = error_chain(&error), "this host does not remember yet how the instance is to end");
        }
    }
}
