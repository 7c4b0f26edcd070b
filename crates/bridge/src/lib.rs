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
mod run;
mod tell;
mod under_way;
mod watched;
mod without_bridge;

use std::sync::Arc;

use api::{IdSet, Nodes, PodCounts, Roster};
use broker::rfc3::{Client as Broker, RpcError};
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
}

/// What the bridge tells the agent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reported {
    /// For people.
    pub counts: PodCounts,
    /// The ranks that are to get no more jobs for now, because host jobs have cores there that pods use. None: not known yet.
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
