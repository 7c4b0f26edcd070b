//! An HTTP proxy on the bridge through which nodes reach other hosts. It connects from the machine itself, so a channel
//! at `http://127.0.0.1:PORT` is the machine's. Only nodes may use it.

use std::{future::Future, net::IpAddr, sync::Arc};

use axum::body::Body;
use hyper::{
    Method, Request, Response, StatusCode, Uri,
    body::Incoming,
    header::{CONNECTION, HOST, HeaderName, HeaderValue},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tracing::{debug, warn};

use super::layout::Cluster;

/// Headers that apply to one hop only (RFC 9110, 7.6.1).
const HOP_BY_HOP: [&str; 7] =
    ["connection", "proxy-connection", "keep-alive", "te", "trailer", "transfer-encoding", "proxy-authorization"];

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
    let mut server = connect(request.uri(), 443).await?;
    tokio::spawn(async move {
        match hyper::upgrade::on(request).await {
            Ok(upgraded) => {
                // Either end may close at any time.
                let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(upgraded), &mut server).await;
            }
            Err(error) => debug!(%error, "can't open a tunnel"),
        }
    });
    Ok(Response::new(Body::empty()))
}

async fn pass_on(mut request: Request<Incoming>) -> Result<Response<Body>, Failure> {
    if request.uri().scheme_str() != Some("http") {
        return Err("this is a proxy: request http://HOST/PATH, or use CONNECT".into());
    }
    let server = connect(request.uri(), 80).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(server)).await?;
    tokio::spawn(connection);
    if let Some(authority) = request.uri().authority() {
        let host = HeaderValue::from_str(authority.as_str())?;
        request.headers_mut().insert(HOST, host);
    }
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = path.parse::<Uri>()?;
    strip(request.headers_mut());
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
