//! Faults injected into the API server, for tests of components that depend on it. They affect every client whose
//! address is not the server's own.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Json,
    body::{Body, Bytes, to_bytes},
    extract::{ConnectInfo, Request, State, connect_info::Connected},
    http::{HeaderValue, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
    serve::IncomingStream,
};
use futures::StreamExt;
use k8s_openapi::jiff::{SignedDuration, Timestamp, fmt::rfc2822};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::{sync::watch, time::sleep};

use super::{discovery, tls::TlsListener};
use base::chance::chance;

/// A kind of failure.
#[derive(clap::ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// No fault.
    #[default]
    None,
    /// Every response is delayed by five seconds.
    Slow,
    /// Most requests get 429 or 500, and watches end.
    Errors,
    /// Watches end soon after they begin.
    WatchesEnd,
    /// Lists always return what they returned first.
    StaleLists,
    /// Most replaces get a conflict.
    Conflicts,
    /// The server's clock is one hour ahead of the machine's.
    ClockAhead,
    /// The server claims to be Kubernetes 1.29.
    Old,
    /// The server hides its version.
    Versionless,
}

/// The current fault, which the daemon sets.
pub type Switch = watch::Receiver<Fault>;

const SLOW: Duration = Duration::from_secs(5);
/// The longest duration of a watch under [`Fault::WatchesEnd`].
const WATCH: Duration = Duration::from_secs(2);
/// Limit for a list's size; lists are small here.
const MAX_LIST: usize = 64 << 20;

/// The client's address.
#[derive(Clone, Copy, Debug)]
pub struct Peer(SocketAddr);

impl Peer {
    /// Its IP address.
    pub fn ip(&self) -> IpAddr {
        self.0.ip()
    }
}

impl Connected<IncomingStream<'_, TlsListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, TlsListener>) -> Self {
        Self(*stream.remote_addr())
    }
}

/// The state of the middleware.
#[derive(Clone)]
pub struct Faults {
    switch: Switch,
    /// Clients with this address, the machine itself, see no faults.
    spared: IpAddr,
    stale: Arc<Mutex<HashMap<String, (StatusCode, Bytes)>>>,
}

impl Faults {
    /// Injects the faults of `switch` for all clients except `spared`.
    pub fn new(switch: Switch, spared: IpAddr) -> Self {
        Self { switch, spared, stale: Arc::default() }
    }
}

/// The middleware that injects the current fault.
pub async fn inject(State(faults): State<Faults>, request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<ConnectInfo<Peer>>().map(|info| info.0.ip());
    if peer.is_none_or(|peer| peer == faults.spared) {
        return next.run(request).await;
    }
    let fault = *faults.switch.borrow();
    if fault != Fault::StaleLists {
        faults.stale.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
    let watches =
        request.uri().query().unwrap_or_default().split('&').any(|part| matches!(part, "watch=true" | "watch=1"));
    match fault {
        Fault::Slow => sleep(SLOW).await,
        Fault::Errors if chance() < 0.8 => return refuse(chance() < 0.5),
        Fault::Conflicts if request.method() == Method::PUT && chance() < 0.7 => return conflict(),
        Fault::Old if request.uri().path() == "/version" => {
            return Json(discovery::version("29")).into_response();
        }
        Fault::Versionless if request.uri().path() == "/version" => return StatusCode::FORBIDDEN.into_response(),
        Fault::StaleLists if !watches && is_list(&request) => return faults.stale(request, next).await,
        _ => {}
    }
    let mut answer = next.run(request).await;
    if fault == Fault::ClockAhead
        && let Ok(date) = date(Timestamp::now() + SignedDuration::from_hours(1))
    {
        answer.headers_mut().insert(header::DATE, date);
    }
    if watches { faults.bounded(answer) } else { answer }
}

impl Faults {
    /// Makes a watch end if a fault begins that ends watches.
    fn bounded(&self, answer: Response) -> Response {
        let mut switch = self.switch.clone();
        let end = async move {
            let ends = |fault: &Fault| matches!(fault, Fault::WatchesEnd | Fault::Errors);
            if switch.wait_for(ends).await.is_err() {
                std::future::pending::<()>().await;
            }
            sleep(WATCH.mul_f64(chance())).await;
        };
        let (parts, body) = answer.into_parts();
        Response::from_parts(parts, Body::from_stream(body.into_data_stream().take_until(Box::pin(end))))
    }

    async fn stale(&self, request: Request, next: Next) -> Response {
        let accept = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let key = format!("{} {accept}", request.uri());
        let known = self.stale.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        let (code, body) = match known {
            Some(known) => known,
            None => {
                let (parts, body) = next.run(request).await.into_parts();
                let Ok(body) = to_bytes(body, MAX_LIST).await else { return refuse(false) };
                let answer = (parts.status, body);
                self.stale.lock().unwrap_or_else(PoisonError::into_inner).insert(key, answer.clone());
                answer
            }
        };
        (code, [(header::CONTENT_TYPE, "application/json")], body).into_response()
    }
}

/// True for a GET of a collection.
fn is_list(request: &Request) -> bool {
    let target = super::request::Target::parse(request.uri().path());
    request.method() == Method::GET && target.is_some_and(|target| target.name.is_none())
}

fn refuse(overloaded: bool) -> Response {
    if overloaded {
        return ([(header::RETRY_AFTER, "1")], status(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests"))
            .into_response();
    }
    status(StatusCode::INTERNAL_SERVER_ERROR, "InternalError")
}

fn conflict() -> Response {
    status(StatusCode::CONFLICT, "Conflict")
}

fn status(code: StatusCode, reason: &str) -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "injected fault", "reason": reason, "code": code.as_u16(),
    });
    (code, [(header::CONTENT_TYPE, "application/json")], status.to_string()).into_response()
}

/// Formats a time for the header `Date` (RFC 9110).
fn date(time: Timestamp) -> Result<HeaderValue, Box<dyn std::error::Error>> {
    Ok(rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&time)?.parse()?)
}
