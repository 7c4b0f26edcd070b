//! A site's own authority and token are used, and go nowhere else.

use std::sync::{Arc, atomic::AtomicU64};

use api::BundleSource;
use axum::http::{StatusCode, header};
use packages::{Access, Token};
use sha2::{Digest, Sha256};

use super::*;

fn is_index(request: &axum::extract::Request) -> bool {
    request.uri().path().contains("repodata")
}

#[tokio::test]
async fn a_redirect_is_followed_without_the_token() {
    let channel = Channel::with_flux();
    let (server, other) = (Server::start(channel.path()).await, Server::start(channel.path()).await);
    let access = Access { token: Some(Token::new("s3cret\n")), allow_http: true, ..Access::default() };
    let http = HttpClient::with_access(&access, &[server.url().to_owned()]).unwrap();
    assert!(!format!("{access:?} {http:?}").contains("s3cret"));
    let elsewhere = other.url().trim_end_matches('/').to_owned();
    server.hook(move |request| {
        let token = request.headers().get(header::AUTHORIZATION);
        if token.is_none_or(|token| token != "Bearer s3cret") {
            return answer(StatusCode::UNAUTHORIZED, &[], "");
        }
        let to = format!("{elsewhere}{}", request.uri().path());
        (!is_index(request)).then(|| answer(StatusCode::FOUND, &[(header::LOCATION, &to)], "")).flatten()
    });
    let leaked = Arc::new(AtomicU64::new(0));
    let leaks = leaked.clone();
    other.hook(move |request| {
        leaks.fetch_add(u64::from(request.headers().contains_key(header::AUTHORIZATION)), Ordering::SeqCst);
        None
    });
    let asked = asked(server.url(), &["flux-core"]);
    let error = resolve(&asked).await.unwrap_err();
    assert!(!format!("{error:?}").contains("s3cret"));
    let set = packages::resolve(&asked, &[PLATFORM.to_owned()], &http, None, host_file, |_| ()).await.unwrap();
    let fetched = Host::new().fetch_from(&set, &http, &Sources::default()).await.unwrap();
    assert_eq!((other.sent(), leaked.load(Ordering::SeqCst)), (fetched.bytes, 0));
}

#[tokio::test]
async fn a_private_authority_and_a_token_give_access_to_a_private_server() {
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let pem = authority.self_signed(&authority_key).unwrap().pem();
    let issuer = rcgen::Issuer::new(authority, authority_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let names = vec!["localhost".to_owned()];
    let certificate = rcgen::CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let private = rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = rustls::ServerConfig::builder().with_no_client_auth();
    let config = config.with_single_cert(vec![certificate.der().clone()], private).unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind("localhost:0").await.unwrap();
    let url = format!("https://localhost:{}/flux.tar.gz", listener.local_addr().unwrap().port());
    tokio::spawn(async move {
        loop {
            let Ok(stream) = acceptor.accept(listener.accept().await.unwrap().0).await else { continue };
            let service = hyper::service::service_fn(async |request: axum::http::Request<hyper::body::Incoming>| {
                let token = request.headers().get(header::AUTHORIZATION).is_some_and(|t| t == "Bearer t");
                let status = if token { StatusCode::OK } else { StatusCode::UNAUTHORIZED };
                Ok::<_, std::convert::Infallible>(answer(status, &[], "a bundle").unwrap())
            });
            let stream = hyper_util::rt::TokioIo::new(stream);
            let _ = hyper::server::conn::http1::Builder::new().serve_connection(stream, service).await;
        }
    });
    let sha256 = hex::encode(Sha256::digest("a bundle"));
    let set = PackageSet::Bundle(BundleSource { url: url.clone(), sha256 });
    let access = Access::from_secret(Some(pem.as_bytes()), Some(b"t\n"), None).unwrap();
    let fetch = async |access: &Access| {
        let http = HttpClient::with_access(access, std::slice::from_ref(&url)).unwrap();
        Host::new().fetch_from(&set, &http, &Sources::default()).await
    };
    fetch(&access).await.unwrap();
    let error = fetch(&Access { token: None, ..access.clone() }).await.unwrap_err();
    assert!(error.to_string().contains("401"), "{error}");
}

#[test]
fn an_unusable_secret_is_reported_by_name_and_key_without_its_value() {
    let pem = "-----BEGIN CERTIFICATE-----\nc2VjcmV0\n-----END CERTIFICATE-----\n";
    for (authorities, token, key) in [
        (&b"secret"[..], &b""[..], "ca.crt"),
        (pem.as_bytes(), b"", "ca.crt"),
        (&pem.as_bytes()[..40], b"", "ca.crt"),
        (b"\xff", b"", "ca.crt"),
        (b"", b"secret\nsecret", "token"),
        (b"", b"\xff", "token"),
    ] {
        let access = Access::from_secret(Some(authorities), Some(token), None);
        let error = access.and_then(|access| HttpClient::with_access(&access, &[])).unwrap_err();
        let words = base::error_chain(&error);
        assert!(
            words.contains("flux-packages-access") && words.contains(key) && !words.contains("c2VjcmV0"),
            "{words}"
        );
        assert!(!words.contains("secret\n"), "{words}");
    }
    assert_eq!(Access::from_secret(Some(b" \n"), None, Some(b"")).unwrap(), Access::default());
}
