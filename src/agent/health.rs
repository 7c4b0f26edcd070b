//! Probe and metrics. Alive is the process; ready is that what the roster wants of this node holds, which [`super::gate`] tells
//! kubelet.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

use axum::{Router, http::StatusCode, routing::get};
use tokio::{net::TcpListener, sync::watch};

/// What is told to those who ask.
#[derive(Debug, Clone)]
pub struct Health(Arc<Told>);

#[derive(Debug)]
struct Told {
    /// None: it is not known yet.
    ready: watch::Sender<Option<bool>>,
    /// Negative: not known here.
    pending_nodes: AtomicI64,
}

impl Default for Health {
    fn default() -> Self {
        Self(Arc::new(Told { ready: watch::channel(None).0, pending_nodes: AtomicI64::new(-1) }))
    }
}

impl Health {
    /// Whether the node is as it is wanted.
    pub fn set_ready(&self, ready: bool) {
        self.0.ready.send_if_modified(|known| known.replace(ready) != Some(ready));
    }

    /// The same for whoever follows it.
    pub fn ready(&self) -> watch::Receiver<Option<bool>> {
        self.0.ready.subscribe()
    }

    /// For how many more nodes jobs wait; None where this is not the lead's agent.
    pub fn set_pending_nodes(&self, nodes: Option<u32>) {
        self.0.pending_nodes.store(nodes.map_or(-1, i64::from), Ordering::Relaxed);
    }

    fn is_ready(&self) -> bool {
        *self.0.ready.borrow() == Some(true)
    }

    /// In Prometheus' text format. Who doesn't know says nothing: so it is one series, whoever the lead is.
    fn metrics(&self) -> String {
        match self.0.pending_nodes.load(Ordering::Relaxed) {
            ..0 => String::new(),
            nodes => format!(
                "# HELP flux_distribute_pending_nodes How many more nodes the largest pending job waits for.\n\
                 # TYPE flux_distribute_pending_nodes gauge\nflux_distribute_pending_nodes {nodes}\n"
            ),
        }
    }
}

/// Serves `/healthz`, `/readyz` and `/metrics`. The port is bound before any work begins, so that one that is taken is an
/// early error.
///
/// # Errors
/// The port can't be bound.
pub async fn serve(address: SocketAddr, health: Health) -> std::io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    let told = health.clone();
    let ready = move || async move {
        if health.is_ready() { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") }
    };
    let router = Router::new().route("/healthz", get(|| async { "alive\n" })).route("/readyz", get(ready));
    let router = router.route("/metrics", get(move || async move { told.metrics() }));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_that_jobs_wait_for_are_told_where_they_are_known() {
        let health = Health::default();
        assert_eq!(health.metrics(), "");
        for (nodes, expected) in
            [(Some(0), "flux_distribute_pending_nodes 0"), (Some(7), "flux_distribute_pending_nodes 7")]
        {
            health.set_pending_nodes(nodes);
            assert_eq!(health.metrics().lines().last(), Some(expected));
        }
        health.set_pending_nodes(None);
        assert_eq!(health.metrics(), "");
    }
}
