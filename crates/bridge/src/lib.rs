//! The bridge between pods and jobs: observes both sides, lets crate `pods` decide, and carries out what it wants.
//!
//! It runs beside the broker of rank 0, in the lead's agent. It keeps nothing that it could lose: whoever starts it again
//! reads the pods and the journal of jobs, and goes on. It writes only while it holds Lease `flux-bridge`, so that the
//! bridge of an old lead that was cut off does nothing.

mod accounts;
mod begin;
mod facts;
mod flux;
mod lease;
mod opted_in;
mod placeholders;
mod preempt;
mod run;
mod tell;
mod under_way;
mod watched;
mod without_bridge;

use std::sync::Arc;

use api::{IdSet, Nodes, PodCounts, Roster};
use broker::{
    rfc3::{Client as Broker, RpcError},
    status::InstanceStatus,
};
use futures::future::BoxFuture;
use kube::Client;
use pods::world::Settings;
use tokio::sync::watch;

pub use placeholders::{
    pod as placeholder_pod, remove_all as remove_placeholder_pods, remove_on as remove_placeholder_pod,
};
pub use run::run;
pub use without_bridge::{Occupancy, clean_up};

/// What the agent tells the bridge, as it changes.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// The roster, which says which node has which rank.
    pub roster: Arc<Roster>,
    /// The agent is about to stop the broker: the epoch or the instance ends.
    pub is_closing: bool,
    /// `spec.pods`
    pub settings: Settings,
    /// `spec.nodes`, which says which nodes are Flux's alone.
    pub nodes: Nodes,
    /// See [`available`].
    pub available: IdSet,
    /// See [`drained`].
    pub drained: IdSet,
}

/// The ranks that are drained, by what the lead's broker reports. None without a report.
pub fn drained(reported: Option<&InstanceStatus>) -> IdSet {
    reported
        .into_iter()
        .flat_map(|reported| &reported.drained)
        .flat_map(|drained| drained.ranks.0.iter().copied())
        .collect()
}

/// The ranks that Flux gives jobs now, by what the lead's broker reports: those that are online, and neither drained nor slow to answer. None
/// without a report.
pub fn available(reported: Option<&InstanceStatus>) -> IdSet {
    let Some(InstanceStatus { online, torpid, .. }) = reported else { return IdSet::default() };
    let drained = drained(reported);
    online.0.iter().copied().filter(|rank| !torpid.contains(*rank) && !drained.contains(*rank)).collect()
}

/// What the bridge tells the agent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reported {
    /// For people.
    pub counts: PodCounts,
    /// The ranks that are to get no more jobs for now, because host jobs have cores there that pods use. None: not known now.
    pub overlapping_on: Option<IdSet>,
}

/// What the bridge works with.
pub struct Bridge {
    /// The API server.
    pub client: Client,
    /// Connects to the broker of this host.
    pub connect: Box<dyn Fn() -> BoxFuture<'static, Result<Broker, RpcError>> + Send + Sync>,
    /// What the agent tells.
    pub told: watch::Receiver<Told>,
    /// Asked right before queues are started. False while they must stay stopped, though the agent has not told so.
    pub may_start_queues: Box<dyn Fn() -> bool + Send + Sync>,
    /// Name of the agent's pod, which holds the Lease.
    pub identity: String,
    /// Where the bridge reports.
    pub report: watch::Sender<Reported>,
}

#[cfg(test)]
mod tests {
    use broker::status::Drained;

    use super::*;

    #[test]
    fn ranks_that_are_offline_drained_or_slow_get_no_jobs() {
        let set = |ranks: &str| ranks.parse::<IdSet>().unwrap();
        let two = Drained { ranks: set("1,4"), reason: String::new(), since: 0.0 };
        let reported =
            InstanceStatus { online: set("0-3"), drained: vec![two], torpid: set("2"), ..InstanceStatus::default() };
        assert_eq!(available(Some(&reported)), set("0,3"));
        assert_eq!(drained(Some(&reported)), set("1,4"));
        assert_eq!((available(None), drained(None)), (IdSet::default(), IdSet::default()));
    }
}
