//! An HTTP server for untrusted clients that limits connections, the size of a request's head, and how long a client
//! may stall. Whatever clients send, it costs at most as many times a few buffers as it takes connections.

use std::{
    convert::Infallible,
    future::{Future, ready},
    time::Duration,
};

use axum::{body::Body, serve::Listener};
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::JoinSet,
    time::timeout,
};

use super::impatient::Impatient;

/// Concurrent connections of [`serve`]. More wait in the kernel's backlog, which is limited too.
const CONNECTIONS: usize = 256;
/// Limit for a request's head; hyper's default is 400 KiB.
const HEAD_BYTES: usize = 1 << 14;
/// Limit for a client to send the whole head of its next request.
const IDLE: Duration = Duration::from_secs(10);
/// Limit for a client to read some of the response.
const STALL: Duration = Duration::from_secs(5);

/// Answers requests on `listener` with `respond`. Dropping the future closes all connections.
pub async fn serve<L, F, A>(listener: L, respond: F)
where
    L: Listener<Io: Unpin>,
    F: Fn(Request<Incoming>) -> A + Clone + Send + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    serve_after(listener, CONNECTIONS, |stream| ready(Some(stream)), respond).await;
}

/// As [`serve`], on at most `most` connections, and after a handshake: `shake_hands` makes of a new connection one for requests, or
/// None of a client that fails. It gets as long as a request's head.
pub async fn serve_after<L, H, C, S, F, A>(mut listener: L, most: usize, shake_hands: H, respond: F)
where
    L: Listener<Io: Unpin>,
    H: Fn(L::Io) -> C,
    C: Future<Output = Option<S>> + Send + 'static,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Fn(Request<Incoming>) -> A + Clone + Send + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        if connections.len() >= most {
            connections.join_next().await;
        }
        let (stream, _) = listener.accept().await;
        let (respond, shaken) = (respond.clone(), shake_hands(stream));
        let service = service_fn(move |request| {
            let answer = respond(request);
            async move { Ok::<_, Infallible>(answer.await) }
        });
        connections.spawn(async move {
            let Ok(Some(stream)) = timeout(IDLE, shaken).await else { return };
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(IDLE)
                .max_buf_size(HEAD_BYTES)
                .serve_connection(TokioIo::new(Impatient::new(stream, STALL)), service);
            if let Err(error) = connection.await {
                tracing::debug!(error = base::error_chain(&error), "connection ended with an error");
            }
        });
    }
}
