//! An HTTP server for untrusted clients that limits connections, the size of a request's head, and how long a client
//! may stall. Whatever clients send, it costs at most [`CONNECTIONS`] times a few buffers.

use std::{convert::Infallible, future::Future, time::Duration};

use axum::{body::Body, serve::Listener};
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::task::JoinSet;

use super::impatient::Impatient;

/// Concurrent connections. More wait in the kernel's backlog, which is limited too.
const CONNECTIONS: usize = 256;
/// Limit for a request's head; hyper's default is 400 KiB.
const HEAD_BYTES: usize = 1 << 14;
/// Limit for a client to send the whole head of its next request.
const IDLE: Duration = Duration::from_secs(10);
/// Limit for a client to read some of the response.
const STALL: Duration = Duration::from_secs(5);

/// Answers requests on `listener` with `respond`. Dropping the future closes all connections.
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
                tracing::debug!(error = base::error_chain(&error), "connection ended with an error");
            }
        });
    }
}
