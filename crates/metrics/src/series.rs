//! Writes the facts at each scrape. What is not known is left out.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge},
};

use super::facts::{InstanceFacts, LeadFacts, NodeFacts, PHASES};

/// What this agent knows now.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    pub(crate) is_planner: bool,
    pub(crate) node: NodeFacts,
    /// When a broker was last started in the place of one that had died, in seconds since 1970.
    pub(crate) broker_died: Option<u64>,
    pub(crate) lead: Option<LeadFacts>,
    pub(crate) instance: Option<InstanceFacts>,
}

/// The facts as series.
#[derive(Debug)]
pub(crate) struct Series(pub(crate) Arc<Mutex<Facts>>);

impl Collector for Series {
    fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
        let facts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut gauges = Gauges(encoder);
        gauges.one("planner_is_me", "1 if this agent is the planner", u64::from(facts.is_planner))?;
        if let Some(is_up) = facts.node.broker_up {
            let help = "1 if this node's broker is online; absent if none is to run here";
            gauges.one("broker_up", help, u64::from(is_up))?;
        }
        if let Some(at) = facts.broker_died {
            let help = "When this agent last started a broker in the place of one that had died, in seconds since 1970; absent if none has";
            gauges.one("broker_died_timestamp_seconds", help, at)?;
        }
        if let Some(lead) = &facts.lead {
            gauges.lead(lead)?;
        }
        if let Some(instance) = &facts.instance {
            gauges.instance(instance)?;
        }
        Ok(())
    }
}

struct Gauges<'a>(DescriptorEncoder<'a>);

impl Gauges<'_> {
    fn lead(&mut self, lead: &LeadFacts) -> fmt::Result {
        let LeadFacts { ranks_up, ranks_down, ranks_drained, cores, gpus, .. } = lead;
        let ranks = [("up", *ranks_up), ("down", *ranks_down), ("drained", *ranks_drained)];
        self.family("ranks", "Ranks with a member: they get jobs, or are offline, or are drained", "state", ranks)?;
        self.one("cores", "Cores of all members", cores.all)?;
        self.one("cores_allocated", "Cores that jobs have", cores.allocated)?;
        self.one("gpus", "GPUs of all members", gpus.all)?;
        self.one("gpus_allocated", "GPUs that jobs have", gpus.allocated)?;
        if let Some((running, pending)) = lead.jobs {
            let help = "Jobs that run, and the first 1000 of those that wait";
            self.family("jobs", help, "state", [("running", running), ("pending", pending)])?;
            let waited = lead.oldest_pending_since.map_or(0, |since| super::now().saturating_sub(since));
            let help = "How long the oldest of the first 1000 jobs in the queue has waited; 0 if there is none";
            self.one("oldest_pending_job_seconds", help, waited)?;
        }
        if let Some(nodes) = lead.pending_nodes {
            self.one("pending_nodes", "How many more nodes the largest pending job waits for", nodes)?;
        }
        Ok(())
    }

    fn instance(&mut self, instance: &InstanceFacts) -> fmt::Result {
        let members = PHASES.into_iter().zip(instance.members);
        self.family("members", "Members, by the phase of their FluxNode", "phase", members)?;
        self.one("members_online", "Members whose broker is online, as the lead sees it", instance.online)?;
        if let Some(is_online) = instance.lead_online {
            let help = "1 if the lead's broker is online; absent until it has been online once";
            self.one("lead_online", help, u64::from(is_online))?;
        }
        self.one("epoch", "The epoch: it grows with each coordinated restart", instance.epoch)?;
        if let Some(at) = instance.dumped_at {
            let help = "When the newest dump of the queue was made, in seconds since 1970";
            self.one("dump_timestamp_seconds", help, at.unsigned_abs())?;
        }
        if let Some(every) = instance.dump_every {
            let help = "How often the lead is to dump the queue (spec.state.dumpEvery); absent if it is not to";
            self.one("dump_every_seconds", help, every)?;
        }
        Ok(())
    }

    fn one(&mut self, name: &str, help: &str, value: impl EncodeGaugeValue) -> fmt::Result {
        ConstGauge::new(value).encode(self.0.encode_descriptor(name, &sentence(help), None, MetricType::Gauge)?)
    }

    fn family(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (&'static str, u64)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, &sentence(help), None, MetricType::Gauge)?;
        values
            .into_iter()
            .try_for_each(|(value, count)| ConstGauge::new(count).encode(encoder.encode_family(&[(label, value)])?))
    }
}

/// As the registry writes the others.
fn sentence(help: &str) -> String {
    format!("{help}.")
}
