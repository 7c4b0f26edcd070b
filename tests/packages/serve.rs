//! An agent serves what was offered, to a few at a time, and nothing else.

use std::{collections::BTreeSet, time::Duration};

use packages::{Shelf, serve_peers_on};
use reqwest::{Response, StatusCode, header};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

struct Serving {
    url: String,
    shelf: Shelf,
    pkgs: tempfile::TempDir,
    client: reqwest::Client,
    task: tokio::task::JoinHandle<()>,
}

impl Serving {
    /// With `abc`, which is offered, and `hidden`, which isn't.
    async fn start(content: &[u8]) -> Self {
        let pkgs = tempfile::tempdir().unwrap();
        fs::write(pkgs.path().join("abc"), content).unwrap();
        fs::write(pkgs.path().join("hidden"), "hidden").unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shelf = Shelf::default();
        let task = tokio::spawn(serve_peers_on(listener, shelf.clone()));
        let client = reqwest::Client::builder().tls_certs_only([]).no_proxy().build().unwrap();
        let serving = Self { url, shelf, pkgs, client, task };
        serving.offer(&["abc"]);
        serving
    }

    fn offer(&self, names: &[&str]) {
        self.shelf.offer(self.pkgs.path().to_owned(), names.iter().map(|n| (*n).to_owned()).collect());
    }

    async fn get(&self, path: &str, range: Option<&str>) -> Response {
        let request = self.client.get(format!("{}{path}", self.url));
        range.into_iter().fold(request, |request, range| request.header(header::RANGE, range)).send().await.unwrap()
    }

    /// A client that asks and reads nothing.
    async fn sleeper(&self) -> tokio::net::TcpStream {
        let mut stream = tokio::net::TcpStream::connect(self.url.trim_start_matches("http://")).await.unwrap();
        stream.write_all(b"GET /archives/abc HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        // The first byte says that it is being sent.
        stream.readable().await.unwrap();
        stream
    }
}

fn install_crypto() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

#[tokio::test]
async fn only_what_was_offered_is_served() {
    install_crypto();
    let serving = Serving::start(b"0123456789").await;
    for path in ["/", "/archives", "/archives/", "/archives/hidden", "/archives/abc/", "/archives//abc", "/abc"] {
        assert_eq!(serving.get(path, None).await.status(), StatusCode::NOT_FOUND, "{path}");
    }
    // As they are, without a client that tidies them up.
    for path in
        ["/archives/../hidden", "/archives/%2e%2e/abc", "/archives/abc/../hidden", "/archives/./abc", "/archives/%61bc"]
    {
        let mut stream = tokio::net::TcpStream::connect(serving.url.trim_start_matches("http://")).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 404 "), "{path}: {answer}");
    }
    let posted = serving.client.post(format!("{}/archives/abc", serving.url)).send().await.unwrap();
    assert_eq!(posted.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(serving.get("/archives/abc", None).await.text().await.unwrap(), "0123456789");

    serving.offer(&["hidden", "gone"]);
    assert_eq!(serving.get("/archives/abc", None).await.status(), StatusCode::NOT_FOUND);
    assert_eq!(serving.get("/archives/gone", None).await.status(), StatusCode::NOT_FOUND);
    assert_eq!(serving.get("/archives/hidden", None).await.text().await.unwrap(), "hidden");
    serving.shelf.clear();
    assert_eq!(serving.get("/archives/hidden", None).await.status(), StatusCode::NOT_FOUND);
    serving.shelf.offer_with(|_| File::open("/dev/null"), BTreeSet::from(["device".to_owned()]));
    assert_eq!(serving.get("/archives/device", None).await.status(), StatusCode::NOT_FOUND);

    serving.task.abort();
    let _ = serving.task.await;
    assert!(serving.client.get(&serving.url).send().await.is_err(), "served after the end");
}

#[tokio::test]
async fn a_range_request_gets_that_range() {
    install_crypto();
    let serving = Serving::start(b"0123456789").await;
    let rest = serving.get("/archives/abc", Some("bytes=4-")).await;
    assert_eq!((rest.status(), rest.content_length()), (StatusCode::PARTIAL_CONTENT, Some(6)));
    assert_eq!(rest.headers()[header::CONTENT_RANGE], "bytes 4-9/10");
    assert_eq!(rest.text().await.unwrap(), "456789");
    assert_eq!(serving.get("/archives/abc", Some("bytes=10-")).await.status(), StatusCode::RANGE_NOT_SATISFIABLE);
    let head = serving.client.head(format!("{}/archives/abc", serving.url)).send().await.unwrap();
    assert_eq!((head.status(), &head.headers()[header::CONTENT_LENGTH]), (StatusCode::OK, &"10".parse().unwrap()));
}

#[tokio::test]
async fn eight_requests_are_served_at_a_time_and_a_stalled_one_is_closed() {
    install_crypto();
    let serving = Serving::start(b"").await;
    // More than what fits into the sockets.
    File::create(serving.pkgs.path().join("abc")).unwrap().set_len(64 << 20).unwrap();
    let mut sleepers = Vec::new();
    for _ in 0..8 {
        sleepers.push(serving.sleeper().await);
    }
    let busy = serving.get("/archives/abc", None).await;
    assert_eq!(
        (busy.status(), &busy.headers()[header::RETRY_AFTER]),
        (StatusCode::SERVICE_UNAVAILABLE, &"1".parse().unwrap())
    );
    let freed = async {
        while serving.get("/archives/abc", Some("bytes=0-0")).await.status() != StatusCode::PARTIAL_CONTENT {}
    };
    tokio::time::timeout(Duration::from_secs(10), freed).await.unwrap();
    // The others may wake in time.
    let mut least = u64::MAX;
    for mut sleeper in sleepers {
        let mut sent = Vec::new();
        let _ = sleeper.read_to_end(&mut sent).await;
        least = least.min(sent.len() as u64);
    }
    assert!(least < 64 << 20);
}

#[tokio::test]
async fn an_archive_that_is_replaced_while_it_is_sent_is_sent_as_it_was() {
    install_crypto();
    let before = noise(32 << 20);
    let serving = Serving::start(&before).await;
    let mut answer = serving.get("/archives/abc", None).await;
    let mut got = answer.chunk().await.unwrap().unwrap().to_vec();
    fs::write(serving.pkgs.path().join("new"), "new").unwrap();
    fs::rename(serving.pkgs.path().join("new"), serving.pkgs.path().join("abc")).unwrap();
    while let Some(chunk) = answer.chunk().await.unwrap() {
        got.extend_from_slice(&chunk);
    }
    assert!(got == before);
    assert_eq!(serving.get("/archives/abc", None).await.text().await.unwrap(), "new");
}

#[tokio::test]
async fn a_request_for_an_archive_on_its_way_waits_instead_of_failing() {
    install_crypto();
    let serving = Serving::start(b"0123456789").await;
    serving.offer(&["abc", "late"]);
    let look = |name: &str| serving.client.head(format!("{}/archives/{name}", serving.url)).send();
    assert_eq!(look("late").await.unwrap().status(), StatusCode::NOT_FOUND);

    serving.shelf.expect(true);
    for name in ["late", "of-another-set"] {
        let answer = serving.get(&format!("/archives/{name}"), None).await;
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "{name}");
        assert!(
            answer.headers().contains_key(header::RETRY_AFTER) && answer.headers().contains_key("archive-is-coming")
        );
    }
    // Waiting requests don't keep others from being served.
    let waiting: Vec<_> = (0..20).map(|_| tokio::spawn(look("late"))).collect();
    assert_eq!(serving.get("/archives/abc", None).await.text().await.unwrap(), "0123456789");
    serving.shelf.arrived();
    fs::write(serving.pkgs.path().join("late"), "late").unwrap();
    serving.shelf.arrived();
    for answer in waiting {
        assert_eq!(answer.await.unwrap().unwrap().status(), StatusCode::OK);
    }
    assert_eq!(serving.get("/archives/late", None).await.text().await.unwrap(), "late");

    // A request for an archive that no longer comes fails at once, and none waits longer than a client's time limit.
    serving.offer(&["never"]);
    let begun = std::time::Instant::now();
    assert_eq!(look("never").await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(begun.elapsed().as_secs() >= 2, "{:?}", begun.elapsed());
    let waiting = tokio::spawn(look("never"));
    tokio::task::yield_now().await;
    serving.shelf.expect(false);
    assert_eq!(waiting.await.unwrap().unwrap().status(), StatusCode::NOT_FOUND);
}
