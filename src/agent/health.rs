//! Probes. Alive is the process; ready is that what the roster wants of this node holds.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::{Router, http::StatusCode, routing::get};
use tokio::net::TcpListener;

/// Whether the node is as it is wanted.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<AtomicBool>);

impl Readiness {
    /// Says so.
    pub fn set(&self, ready: bool) {
        self.0.store(ready, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Serves `/healthz` and `/readyz`. The port is bound before any work begins, so that one that is taken is an early error.
///
/// # Errors
/// The port can't be bound.
pub async fn serve(address: SocketAddr, readiness: Readiness) -> std::io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    let ready = move || async move {
        if readiness.get() { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") }
    };
    let router = Router::new().route("/healthz", get(|| async { "alive\n" })).route("/readyz", get(ready));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(())
}
