//! Serves the metrics at the Node's own address, over TLS, to clients that the API server permits ([`super::reviews`]).
//!
//! The certificate is made at each start and nobody's: its key never leaves this process, and no client can check it. So the
//! connection is private, and whoever answers in the agent's place gets the token of whoever asks. A token for the audience
//! [`api::METRICS_AUDIENCE`] is worth nothing there.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use axum::{body::Body, response::Response};
use http::{HeaderMap, Method, Request, StatusCode, header};
use hyper::body::Incoming;
use kube::Client;
use rcgen::{CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivatePkcs8KeyDer},
    server::NoServerSessionStorage,
    version::TLS13,
};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tracing::warn;

use super::{
    port::Port,
    reviews::{PATH, Reviews, Verdict},
};
use api::METRICS_PORT;
use base::error_chain;
use metrics::{Format, Metrics};
use packages::bounded;

/// Concurrent connections: a Prometheus keeps one.
const CONNECTIONS: usize = 32;

/// Why there is nothing to answer with.
#[derive(Debug, thiserror::Error)]
enum IdentityError {
    #[error("can't make a certificate")]
    Certificate(#[from] rcgen::Error),
    #[error("can't use the certificate that was made")]
    Tls(#[from] rustls::Error),
}

/// Serves `metrics` at `address`. None without an address.
pub async fn serve(address: Option<IpAddr>, metrics: &Metrics, client: Client) -> Option<Port> {
    let Some(address) = address else {
        warn!("HOST_IP is not set: this agent serves no metrics to Prometheus");
        return None;
    };
    match identity(address) {
        Ok(identity) => {
            let (metrics, reviews) = (metrics.clone(), Arc::new(Reviews::new(client)));
            let serve = move |listener| serve_on(listener, identity.clone(), metrics.clone(), reviews.clone());
            Some(Port::hold("metrics", SocketAddr::new(address, METRICS_PORT), serve).await)
        }
        Err(error) => {
            warn!(error = error_chain(&error), "this agent serves no metrics to Prometheus");
            None
        }
    }
}

async fn serve_on(listener: TcpListener, identity: TlsAcceptor, metrics: Metrics, reviews: Arc<Reviews>) {
    let shake_hands = move |stream| {
        let shaken = identity.accept(stream);
        async move { shaken.await.ok() }
    };
    let respond = move |request: Request<Incoming>| {
        let (metrics, reviews) = (metrics.clone(), reviews.clone());
        async move { respond(&request, &metrics, &reviews).await }
    };
    bounded::serve_after(listener, CONNECTIONS, shake_hands, respond).await;
}

async fn respond<B>(request: &Request<B>, metrics: &Metrics, reviews: &Reviews) -> Response {
    // Nobody's token is reviewed for what is not there.
    if request.uri().path() != PATH {
        return answer(StatusCode::NOT_FOUND, &[], "the metrics are at /metrics\n");
    }
    if request.method() != Method::GET {
        return answer(StatusCode::METHOD_NOT_ALLOWED, &[(header::ALLOW, "GET")], "");
    }
    let verdict = match bearer(request.headers()) {
        Some(token) => reviews.verdict(token).await,
        None => Verdict::Unknown,
    };
    match verdict {
        Verdict::Allowed => {
            let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
            let format = Format::wanted_by(accept.unwrap_or_default());
            answer(StatusCode::OK, &[(header::CONTENT_TYPE, format.content_type())], metrics.text(format))
        }
        Verdict::Unknown => {
            let words = "the metrics need a token that the API server knows (Authorization: Bearer)\n";
            answer(StatusCode::UNAUTHORIZED, &[(header::WWW_AUTHENTICATE, "Bearer")], words)
        }
        Verdict::Forbidden => {
            let words = "this token may not get /metrics: bind its account to ClusterRole flux-distribute-metrics\n";
            answer(StatusCode::FORBIDDEN, &[], words)
        }
        Verdict::NotReviewed => {
            let words = "the API server does not say who may read the metrics: the agent's log has more\n";
            answer(StatusCode::SERVICE_UNAVAILABLE, &[(header::RETRY_AFTER, "10")], words)
        }
        Verdict::Busy => answer(StatusCode::TOO_MANY_REQUESTS, &[(header::RETRY_AFTER, "10")], ""),
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    Some(token.trim()).filter(|token| scheme.eq_ignore_ascii_case("bearer") && !token.is_empty())
}

fn answer(status: StatusCode, headers: &[(header::HeaderName, &'static str)], body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    if status != StatusCode::OK {
        // Else strangers could hold all connections by asking now and then.
        response.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
    }
    for (name, value) in headers {
        response.headers_mut().insert(name, header::HeaderValue::from_static(value));
    }
    response
}

/// With a new key. No session is kept, so that clients take no memory after they have gone.
fn identity(address: IpAddr) -> Result<TlsAcceptor, IdentityError> {
    let (certificate, key) = certificate(address)?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key.into())?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config).into())
}

/// A key, and a certificate for `address` that it signs itself.
fn certificate(address: IpAddr) -> Result<(CertificateDer<'static>, PrivatePkcs8KeyDer<'static>), rcgen::Error> {
    let mut params = CertificateParams::new(vec![address.to_string()])?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "flux-distribute agent");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    Ok((certificate.into(), key.serialize_der().into()))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Mutex, time::Duration};

    use axum::body::to_bytes;
    use kube::client::Body as KubeBody;
    use serde_json::{Value, json};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;

    /// An API server that knows these tokens, and lets user `allowed` get `/metrics`. It keeps the names of the kinds that were created.
    fn api_server(code: StatusCode, asked: Arc<Mutex<Vec<String>>>) -> Client {
        let answers = tower::service_fn(move |request: Request<KubeBody>| {
            let asked = asked.clone();
            async move {
                let review: Value =
                    serde_json::from_slice(&to_bytes(Body::new(request.into_body()), 1 << 20).await.unwrap()).unwrap();
                let kind = review["kind"].as_str().unwrap().to_owned();
                let status = match kind.as_str() {
                    "TokenReview" => match review["spec"]["token"].as_str().unwrap() {
                        "of-nobody" => json!({ "authenticated": false }),
                        token => json!({ "authenticated": true, "user": { "username": token, "groups": ["g"] } }),
                    },
                    _ => {
                        let spec = &review["spec"];
                        assert_eq!(spec["nonResourceAttributes"], json!({ "path": "/metrics", "verb": "get" }));
                        assert_eq!(spec["groups"], json!(["g"]));
                        json!({ "allowed": spec["user"] == "allowed" })
                    }
                };
                asked.lock().unwrap().push(kind.clone());
                let answer = match code {
                    StatusCode::CREATED => {
                        let version = review["apiVersion"].clone();
                        json!({ "apiVersion": version, "kind": kind, "metadata": {}, "spec": review["spec"], "status": status })
                    }
                    code => json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code.as_u16(),
                                    "reason": "Forbidden", "message": "no, not with allowed" }),
                };
                http::Response::builder().status(code).body(KubeBody::from(answer.to_string().into_bytes()))
            }
        });
        Client::new(answers, "default")
    }

    async fn status(reviews: &Reviews, method: Method, path: &str, authorization: &str) -> u16 {
        let request = Request::builder().method(method).uri(path);
        let request = match authorization {
            "" => request,
            value => request.header(header::AUTHORIZATION, value),
        };
        respond(&request.body(()).unwrap(), &Metrics::default(), reviews).await.status().as_u16()
    }

    #[tokio::test]
    async fn the_metrics_are_for_those_whom_the_api_server_permits_them() {
        let asked = Arc::default();
        let reviews = Reviews::new(api_server(StatusCode::CREATED, Arc::clone(&asked)));
        for (authorization, expected) in [
            ("", 401),
            ("Bearer", 401),
            ("Bearer ", 401),
            ("Basic YWxsb3dlZA==", 401),
            ("Bearer of-nobody", 401),
            ("Bearer another", 403),
            ("Bearer allowed", 200),
            ("bearer  allowed", 200),
        ] {
            assert_eq!(status(&reviews, Method::GET, "/metrics", authorization).await, expected, "{authorization}");
        }
        for (method, path, expected) in
            [(Method::POST, "/metrics", 405), (Method::GET, "/", 404), (Method::GET, "/metrics/", 404)]
        {
            assert_eq!(status(&reviews, method, path, "Bearer new").await, expected, "{path}");
        }
        // One question for whoever is unknown, two for whoever has no right, two for all scrapes of the one who has.
        let mut counts = BTreeMap::new();
        asked.lock().unwrap().iter().for_each(|kind: &String| *counts.entry(kind.clone()).or_insert(0) += 1);
        assert_eq!(counts, [("SubjectAccessReview".to_owned(), 2), ("TokenReview".to_owned(), 3)].into());
    }

    #[tokio::test]
    async fn nobody_gets_the_metrics_while_the_api_server_does_not_say_who_may() {
        for code in [StatusCode::FORBIDDEN, StatusCode::NOT_FOUND, StatusCode::INTERNAL_SERVER_ERROR] {
            let reviews = Reviews::new(api_server(code, Arc::default()));
            for _ in 0..2 {
                assert_eq!(status(&reviews, Method::GET, "/metrics", "Bearer allowed").await, 503, "{code}");
            }
        }
    }

    async fn serving(code: StatusCode) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let reviews = Arc::new(Reviews::new(api_server(code, Arc::default())));
        tokio::spawn(serve_on(listener, identity(address.ip()).unwrap(), Metrics::default(), reviews));
        address
    }

    #[tokio::test]
    async fn prometheus_reads_the_metrics_over_tls_and_a_client_without_it_gets_nothing() {
        let _ = ring::default_provider().install_default();
        let address = serving(StatusCode::CREATED).await;
        let client = reqwest::Client::builder().danger_accept_invalid_certs(true).build().unwrap();
        let ask = || client.get(format!("https://{address}/metrics"));
        let scrape = ask().bearer_auth("allowed").header("accept", "application/openmetrics-text");
        let scraped = scrape.send().await.unwrap();
        assert_eq!(scraped.headers()["content-type"], Format::OpenMetrics.content_type());
        assert!(scraped.text().await.unwrap().ends_with("# EOF\n"));
        assert_eq!(ask().send().await.unwrap().status(), 401);
        // A head without end is not read to its end: it is refused, or cut off while it is sent.
        let oversized = ask().bearer_auth("allowed").header("x", "x".repeat(1 << 20)).send().await;
        assert!(oversized.is_err() || oversized.is_ok_and(|answer| answer.status() == 431));

        let mut plain = TcpStream::connect(address).await.unwrap();
        plain.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer allowed\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        let _ = plain.read_to_end(&mut answer).await;
        assert!(!String::from_utf8_lossy(&answer).contains("HTTP"), "{answer:?}");
    }

    /// Time is the test's own, and stands still while anything happens.
    #[tokio::test(start_paused = true)]
    async fn strangers_who_send_nothing_or_a_part_of_a_handshake_are_cut_off_however_many_there_are() {
        let address = serving(StatusCode::CREATED).await;
        let mut strangers = Vec::new();
        for number in 0..2 * CONNECTIONS {
            let mut stranger = TcpStream::connect(address).await.unwrap();
            if number % 2 == 0 {
                // The beginning of a ClientHello.
                stranger.write_all(&[0x16, 3, 1, 2, 0, 1]).await.unwrap();
            }
            strangers.push(stranger);
        }
        for mut stranger in strangers {
            let ended = tokio::time::timeout(Duration::from_mins(1), stranger.read_to_end(&mut Vec::new())).await;
            assert!(ended.is_ok(), "a stranger keeps a connection");
        }
    }

    #[test]
    fn each_start_has_a_key_of_its_own_also_at_an_address_of_ipv6() {
        for address in ["10.0.0.1", "fd00::1"] {
            let address = address.parse().unwrap();
            let [(one, key), (another, other_key)] = [certificate(address).unwrap(), certificate(address).unwrap()];
            assert!(one != another && key.secret_pkcs8_der() != other_key.secret_pkcs8_der());
            assert!(identity(address).is_ok());
        }
    }
}
