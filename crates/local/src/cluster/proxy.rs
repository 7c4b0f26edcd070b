//! An HTTP proxy on the bridge through which nodes reach other hosts. It connects from the machine itself, so a channel
//! at `http://127.0.0.1:PORT` is the machine's. If the machine's environment names a proxy, it goes through that one,
//! which the nodes themselves could not reach. Only nodes may use it.

use std::{
    future::Future,
    net::IpAddr,
    sync::{Arc, LazyLock},
};

use axum::body::Body;
use hyper::{
    Method, Request, Response, StatusCode, Uri,
    body::Incoming,
    client::conn::http1::handshake,
    header::{CONNECTION, HOST, HeaderName, HeaderValue, PROXY_AUTHORIZATION},
    service::service_fn,
    upgrade::Upgraded,
};
use hyper_util::{
    client::proxy::matcher::{Intercept, Matcher},
    rt::TokioIo,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, copy_bidirectional},
    net::{TcpListener, TcpStream},
};
use tracing::{debug, warn};

use super::layout::Cluster;

/// Headers that apply to one hop only (RFC 9110, 7.6.1).
const HOP_BY_HOP: [&str; 7] =
    ["connection", "proxy-connection", "keep-alive", "te", "trailer", "transfer-encoding", "proxy-authorization"];

/// The environment variables that name the machine's proxy.
pub(crate) const VARIABLES: [&str; 8] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"];

/// The machine's proxy for `target`, an http or https URL. None for the machine itself, whatever NO_PROXY says: from
/// another machine, its loopback is out of reach.
///
/// # Errors
/// The proxy is of a kind that can't be used.
pub(crate) fn upstream(target: &Uri) -> Result<Option<Intercept>, String> {
    static MATCHER: LazyLock<Matcher> = LazyLock::new(Matcher::from_env);
    let host = target.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    if host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback()) {
        return Ok(None);
    }
    match MATCHER.intercept(target) {
        Some(proxy) if proxy.uri().scheme_str() != Some("http") => {
            Err(format!("local mode can't use the proxy {}, only one at an http:// URL", proxy.uri()))
        }
        found => Ok(found),
    }
}

/// Serves the nodes until `shutdown`.
pub(crate) async fn serve(listener: TcpListener, cluster: Arc<Cluster>, shutdown: impl Future<Output = ()>) {
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "can't accept a connection to the proxy");
                // Probably out of file descriptors: wait until other connections are closed.
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                continue;
            }
        };
        let IpAddr::V4(address) = peer.ip() else { continue };
        if !cluster.holds(address) || address == cluster.gateway() {
            debug!(%peer, "the proxy refused a client outside the cluster");
            continue;
        }
        tokio::spawn(async move {
            let served = hyper::server::conn::http1::Builder::new()
                .preserve_header_case(true)
                .serve_connection(TokioIo::new(stream), service_fn(forward))
                .with_upgrades();
            if let Err(error) = served.await {
                debug!(%error, "a connection to the proxy ended with an error");
            }
        });
    }
}

async fn forward(request: Request<Incoming>) -> Result<Response<Body>, std::convert::Infallible> {
    let target = request.uri().clone();
    let answered = if request.method() == Method::CONNECT { tunnel(request).await } else { pass_on(request).await };
    Ok(answered.unwrap_or_else(|error| {
        debug!(%target, %error, "the proxy can't reach the target");
        let mut response = Response::new(Body::from(format!("can't reach {target}: {error}\n")));
        *response.status_mut() = StatusCode::BAD_GATEWAY;
        response
    }))
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn tunnel(request: Request<Incoming>) -> Result<Response<Body>, Failure> {
    let authority = request.uri().authority().ok_or("the request names no host")?.as_str();
    let target: Uri = format!("https://{authority}/").parse()?;
    match upstream(&target)? {
        None => {
            let server = connect(&target, 443).await?;
            tokio::spawn(join(request, server));
        }
        Some(proxy) => {
            let server = tunnel_through(&proxy, authority).await?;
            tokio::spawn(join(request, TokioIo::new(server)));
        }
    }
    Ok(Response::new(Body::empty()))
}

/// Joins both ends of a tunnel.
async fn join(request: Request<Incoming>, mut server: impl AsyncRead + AsyncWrite + Unpin) {
    match hyper::upgrade::on(request).await {
        Ok(upgraded) => {
            // Either end may close at any time.
            let _ = copy_bidirectional(&mut TokioIo::new(upgraded), &mut server).await;
        }
        Err(error) => debug!(%error, "can't open a tunnel"),
    }
}

/// A tunnel to `authority` (HOST:PORT) through `proxy`.
async fn tunnel_through(proxy: &Intercept, authority: &str) -> Result<Upgraded, Failure> {
    let (mut sender, connection) = handshake(TokioIo::new(connect(proxy.uri(), 80).await?)).await?;
    tokio::spawn(connection.with_upgrades());
    let mut request = Request::connect(authority).header(HOST, authority).body(Body::empty())?;
    authorize(request.headers_mut(), proxy);
    let response = sender.send_request(request).await?;
    if !response.status().is_success() {
        return Err(format!("the proxy {} answers {}", proxy.uri(), response.status()).into());
    }
    Ok(hyper::upgrade::on(response).await?)
}

fn authorize(headers: &mut hyper::HeaderMap, proxy: &Intercept) {
    headers.extend(proxy.basic_auth().map(|value| (PROXY_AUTHORIZATION, value.clone())));
}

async fn pass_on(mut request: Request<Incoming>) -> Result<Response<Body>, Failure> {
    if request.uri().scheme_str() != Some("http") {
        return Err("this is a proxy: request http://HOST/PATH, or use CONNECT".into());
    }
    let proxy = upstream(request.uri())?;
    let server = connect(proxy.as_ref().map_or(request.uri(), Intercept::uri), 80).await?;
    let (mut sender, connection) = handshake(TokioIo::new(server)).await?;
    tokio::spawn(connection);
    if let Some(authority) = request.uri().authority() {
        let host = HeaderValue::from_str(authority.as_str())?;
        request.headers_mut().insert(HOST, host);
    }
    strip(request.headers_mut());
    match &proxy {
        // A proxy needs the whole URL.
        Some(proxy) => authorize(request.headers_mut(), proxy),
        None => {
            let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
            *request.uri_mut() = path.parse::<Uri>()?;
        }
    }
    let mut response = sender.send_request(request).await?;
    strip(response.headers_mut());
    Ok(response.map(Body::new))
}

fn strip(headers: &mut hyper::HeaderMap) {
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in listed {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

async fn connect(uri: &Uri, port: u16) -> Result<TcpStream, Failure> {
    let host = uri.host().ok_or("the request names no host")?.trim_start_matches('[').trim_end_matches(']');
    Ok(TcpStream::connect((host, uri.port_u16().unwrap_or(port))).await?)
}
