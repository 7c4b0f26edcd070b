//! The planner: the one agent that holds the Lease. It alone reads all nodes, and it writes the roster, the packages, the
//! certificate, `broker.toml`, each FluxNode's spec and the FluxInstance's status. What to write is decided in
//! [`model`]; here are the effects.
//!
//! It sends no order to a host: it reaches agents only through objects of the API server. Of its own host it reads the
//! directories that `file:` channels name.

mod caches;
mod flux_nodes;
mod instance;
mod kept;
mod marks;
mod measured;
mod package_set;
mod publish;
mod reconcile;
mod views;

use std::time::Duration;

use cluster::{ApiError, lease, lease_rules::Place};
use kube::Client;
use metrics::Metrics;
use tokio::sync::watch;
use tracing::{info, warn};

/// In each round, each of these begins no further write after this time, and the next round goes on with the rest: annotations, FluxNodes (but for the
/// lead's), deletions of FluxNodes, labels. Writes under way are awaited, each for up to 10 s, unless the instance ends. Thousands of writes take longer
/// than this, and nodes that join meanwhile would wait for the next roster.
const LONGEST_WRITES: Duration = Duration::from_secs(2);

/// True if the API server is away or too busy, so that the next call would probably fail, too. A call that got no answer in time may have waited for a
/// webhook of its object, so it says nothing about other objects.
fn is_unavailable(error: &ApiError) -> bool {
    !matches!(error, ApiError::Timeout(_)) && matches!(error.code(), None | Some(429 | 502..=504))
}

/// Candidate and planner by turns, for as long as the agent lives. `identity` is the pod's name.
/// `place`: this agent's place among the candidates. While this agent is the planner, `metrics` get what it observes of the instance.
pub async fn run(client: Client, identity: String, place: watch::Receiver<Place>, metrics: Metrics) {
    let mut lease = lease::Candidate::new(client.clone(), identity.clone(), place);
    loop {
        let predecessor_time = lease.acquire().await;
        let has_limits = lease.has_limits();
        info!(identity, "this agent is the planner now");
        let _planning = metrics.planning();
        // Whatever is under way when the Lease is lost is dropped. A write that is already out is fenced by its resourceVersion; a FluxNode's spec is not,
        // and the next planner writes it again.
        tokio::select! {
            () = lease.keep() => warn!("lost the Lease: another agent is the planner now"),
            () = reconcile::run(client.clone(), &identity, predecessor_time, &has_limits, &metrics) => {}
        }
    }
}
