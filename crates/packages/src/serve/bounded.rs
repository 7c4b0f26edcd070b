//! HTTP to anybody, within bounds: connections, the size of a request's head, and how long a client may be silent. Whatever
//! strangers send, this costs at most [`CONNECTIONS`] times a few buffers.

use std::{convert::Infallible, future::Future, time::Duration};

use axum::{body::Body, serve::Listener};
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::task::JoinSet;

use super::impatient::Impatient;

/// At a time. Further ones wait in the kernel, which bounds them as well.
const CONNECTIONS: usize = 256;
/// A request's head; hyper alone would take 400 KiB.
const HEAD_BYTES: usize = 1 << 14;
/// A client has this long for the whole head of its next request.
const IDLE: Duration = Duration::from_secs(10);
/// For a client that takes nothing of what it asked for.
const STALL: Duration = Duration::from_secs(5);

/// Has `respond` answer what comes to `listener`, until the future is dropped, and all connections with it.
pub async fn serve<L, F, A>(mut listener: L, respond: F)
where
    L: Listener<Io: Unpin>,
    F: Fn(Request<Incoming>) -> A + Clone + Send + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        if connections.len() >= CONNECTIONS {
            connections.join_next().await;
        }
        let (stream, _) = listener.accept().await;
        let respond = respond.clone();
        let service = service_fn(move |request| {
            let answer = respond(request);
            async move { Ok::<_, Infallible>(answer.await) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE)
            .max_buf_size(HEAD_BYTES)
            .serve_connection(TokioIo::new(Impatient::new(stream, STALL)), service);
        connections.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = base::error_chain(&error), "a connection ended");
            }
        });
    }
}
