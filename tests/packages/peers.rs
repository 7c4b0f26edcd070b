//! Peers send what they hold, and whatever a peer does, the archives get there.

use std::{
    collections::BTreeSet,
    io::Write,
    sync::{Arc, Mutex, atomic::AtomicU64},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::{StatusCode, header},
    response::Response,
};
use futures::StreamExt;
use packages::{Access, Shelf, Token, serve_peers_on};

use super::*;

/// A server at an address of its own.
pub(super) async fn peer(answer: impl Fn(Request) -> Response + Clone + Send + Sync + 'static) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let router = axum::Router::new().fallback(move |request: Request| std::future::ready(answer(request)));
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// An agent that serves what `host` holds of `set`.
async fn agent(host: &Host, set: &PackageSet) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let shelf = Shelf::default();
    shelf.offer(host.pkgs(), packages::archive_names(set).into_iter().collect::<BTreeSet<_>>());
    tokio::spawn(serve_peers_on(listener, shelf));
    address
}

pub(super) fn from(peers: &[&str]) -> Sources {
    Sources { peers: peers.iter().map(|p| (*p).to_owned()).collect(), ..Sources::default() }
}

fn quick() -> HttpClient {
    http().with_patience_with_peers(Duration::from_millis(300))
}

fn status(status: StatusCode) -> Response {
    Response::builder().status(status).body(Body::empty()).unwrap()
}

/// Sends `bytes`, and then nothing, or the end of the connection.
fn and_then(bytes: Vec<u8>, length: usize, silence: bool) -> Response {
    let pieces = futures::stream::iter([Some(bytes), None]).then(move |piece| async move {
        match piece {
            Some(piece) => Ok(Bytes::from(piece)),
            None if silence => std::future::pending().await,
            None => {
                // What is not sent when the body fails is thrown away.
                tokio::time::sleep(Duration::from_millis(100)).await;
                Err(io::Error::other("dead"))
            }
        }
    });
    Response::builder().header(header::CONTENT_LENGTH, length).body(Body::from_stream(pieces)).unwrap()
}

/// What is logged on this thread while it lives.
#[derive(Clone, Default)]
pub(super) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub(super) fn warnings(&self) -> Vec<String> {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap().lines().map(str::to_owned).collect()
    }

    pub(super) fn listen(&self) -> tracing::subscriber::DefaultGuard {
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_max_level(tracing::Level::WARN);
        tracing::subscriber::set_default(subscriber.with_writer(move || log.clone()).finish())
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A server with a package set of one large archive, which is also given.
async fn one_archive() -> (Channel, Server, PackageSet, Vec<u8>) {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
    let archive = fs::read(channel.archive("libflux-1.0-0.tar.bz2")).unwrap();
    (channel, server, set, archive)
}

#[tokio::test]
async fn archives_that_a_peer_has_are_not_requested_from_the_source() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["flux-core"])).await.unwrap();
    let digest = set.digest();
    let first = Host::new();
    assert!(!packages::holds(&set, &digest, PLATFORM, &first.pkgs()));
    assert_eq!(first.fetch(&set).await.unwrap().from_peers, 0);
    assert!(packages::holds(&set, &digest, PLATFORM, &first.pkgs()));
    let before = server.sent();
    let (parent, mut hosts) = (agent(&first, &set).await, Vec::new());
    // All at once, and more than a peer sends at a time.
    hosts.resize_with(6, Host::new);
    let (http, sources) = (http(), from(&[&parent]));
    let each = hosts.iter().map(|host| host.fetch_from(&set, &http, &sources));
    for fetched in futures::future::join_all(each).await {
        let fetched = fetched.unwrap();
        assert_eq!((fetched.from_peers, fetched.fetched_bytes), (fetched.bytes, fetched.bytes));
    }
    assert_eq!(server.sent(), before);
    drop(server);
    // The first one's archives are not needed any more.
    let second = agent(&hosts[0], &set).await;
    drop(first);
    let last = Host::new();
    last.fetch_from(&set, &http, &from(&[&parent, &second])).await.unwrap();
    last.link(&set).await.unwrap();
}

#[tokio::test]
async fn a_bad_peer_is_dropped_with_one_log_line_and_another_server_is_used() {
    let (_channel, server, set, archive) = one_archive().await;
    let (length, half) = (archive.len(), archive.len() / 2);
    let garbage = noise(length);
    let nobody = {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap().to_string()
    };
    let endless = || futures::stream::repeat_with(|| Ok::<_, io::Error>(noise(1 << 16)));
    let (all, to_half) = (length as u64, (length - half) as u64);
    let (first, again) = (archive[..half].to_vec(), archive[..half].to_vec());
    let elsewhere = server.url().to_owned();
    let answers = |bytes: Vec<u8>| move |_: Request| Response::new(Body::from(bytes.clone()));
    let cases = [
        ("dead", nobody, "onnect", all),
        ("not an address", "peer:secret@x/y".to_owned(), "not IP:PORT", all),
        ("garbage", peer(answers(garbage)).await, "sha256", all),
        ("longer", peer(answers(noise(2 * length))).await, "more bytes", all),
        ("shorter", peer(answers(noise(half))).await, "fewer bytes", all),
        ("endless", peer(move |_| Response::new(Body::from_stream(endless()))).await, "more bytes", all),
        ("silent", peer(move |_| and_then(first.clone(), length, true)).await, "nothing for", to_half),
        ("dies", peer(move |_| and_then(again.clone(), length, false)).await, "body", to_half),
        ("broken", peer(|_| status(StatusCode::INTERNAL_SERVER_ERROR)).await, "500", all),
        (
            "sends elsewhere",
            peer(move |_| {
                let away = Response::builder().status(StatusCode::FOUND).header(header::LOCATION, &elsewhere);
                away.body(Body::empty()).unwrap()
            })
            .await,
            "302",
            all,
        ),
    ];
    for (case, address, problem, from_source) in cases {
        let (log, host, before) = (Log::default(), Host::new(), server.sent());
        let fetched = {
            let _guard = log.listen();
            // On a busy machine, a peer that is not silent may take its time.
            let http = if case == "silent" { quick() } else { http() };
            host.fetch_from(&set, &http, &from(&[&address])).await.unwrap()
        };
        assert_eq!(server.sent() - before, from_source, "{case}");
        assert_eq!(fetched.from_peers, all - from_source, "{case}");
        let warnings = log.warnings();
        assert_eq!(warnings.len(), 1, "{case}: {warnings:?}");
        for word in ["libflux-1.0-0.tar.bz2", address.as_str(), problem] {
            assert!(warnings[0].contains(word), "{case}: {warnings:?}");
        }
        assert_eq!(host.fetch(&set).await.unwrap().fetched_bytes, 0, "{case}: what is there is not right");
    }
}

async fn ten_archives() -> (Channel, Server, PackageSet) {
    let mut channel = Channel::with_flux();
    let names = ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9"];
    for name in names {
        channel.add(name, ".conda", &[], &[Content::plain("share/a", name.as_bytes())]);
    }
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &names)).await.unwrap();
    (channel, server, set)
}

#[tokio::test]
async fn a_dropped_peer_gets_no_more_requests() {
    let (_channel, _server, set) = ten_archives().await;
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let bad = peer(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        status(StatusCode::INTERNAL_SERVER_ERROR)
    })
    .await;
    let log = Log::default();
    let _guard = log.listen();
    Host::new().fetch_from(&set, &quick(), &from(&[&bad])).await.unwrap();
    assert!(asked.load(Ordering::SeqCst) <= 6, "more than were under way");
    assert_eq!(log.warnings().len(), 1, "{:?}", log.warnings());
}

#[tokio::test]
async fn a_peer_that_lacks_one_archive_is_asked_for_the_others() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["flux-core"])).await.unwrap();
    let (whole, partial) = (Host::new(), Host::new());
    let bytes = whole.fetch(&set).await.unwrap().bytes;
    partial.fetch(&set).await.unwrap();
    let lost = partial.archives().remove(0);
    fs::remove_file(lost).unwrap();
    let (whole, partial, before) = (agent(&whole, &set).await, agent(&partial, &set).await, server.sent());
    let log = Log::default();
    let _guard = log.listen();
    let fetched = Host::new().fetch_from(&set, &quick(), &from(&[&partial, &whole])).await.unwrap();
    assert_eq!((fetched.from_peers, server.sent()), (bytes, before));
    let fetched = Host::new().fetch_from(&set, &quick(), &from(&[&partial])).await.unwrap();
    assert!(fetched.from_peers > 0 && fetched.from_peers < bytes);
    assert!(log.warnings().is_empty(), "{:?}", log.warnings());
}

#[tokio::test]
async fn a_fetch_waits_for_a_busy_peer_instead_of_asking_the_source() {
    let (_channel, server, set, archive) = one_archive().await;
    let (before, asked, bytes) = (server.sent(), Arc::new(AtomicU64::new(0)), archive.len() as u64);
    let busy = peer(move |_| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => Response::builder().status(503).header(header::RETRY_AFTER, "1").body(Body::empty()).unwrap(),
        1 => Response::builder().status(503).header(header::RETRY_AFTER, "0").body(Body::empty()).unwrap(),
        _ => Response::new(Body::from(archive.clone())),
    })
    .await;
    let fetched = Host::new().fetch_from(&set, &quick(), &from(&[&busy])).await.unwrap();
    assert_eq!((fetched.from_peers, server.sent()), (bytes, before));
}

#[tokio::test]
async fn a_fetch_waits_once_for_a_peer_that_stays_busy_not_for_each_archive() {
    let (_channel, _server, set) = ten_archives().await;
    let (log, late) = (Log::default(), Arc::new(AtomicU64::new(0)));
    let (heard, count) = (log.clone(), late.clone());
    let busy = peer(move |_| {
        count.fetch_add(u64::from(!heard.warnings().is_empty()), Ordering::SeqCst);
        Response::builder().status(503).header(header::RETRY_AFTER, "0").body(Body::empty()).unwrap()
    })
    .await;
    let _guard = log.listen();
    let hasty = http().with_patience_with_peers(Duration::from_millis(50));
    Host::new().fetch_from(&set, &hasty, &from(&[&busy])).await.unwrap();
    let warnings = log.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("busy"), "{warnings:?}");
    assert!(late.load(Ordering::SeqCst) <= 6, "more than were under way");
}

/// A client whose patience with one peer ends after some seconds.
fn hasty() -> HttpClient {
    quick().with_time_for_a_peer(Duration::from_secs(2))
}

fn busy_for(seconds: &str) -> Response {
    Response::builder().status(503).header(header::RETRY_AFTER, seconds).body(Body::empty()).unwrap()
}

/// What a peer sends counts, not what it says.
#[tokio::test]
async fn a_peer_that_finds_ever_new_excuses_is_given_up() {
    let (_channel, server, set, archive) = one_archive().await;
    let length = archive.len();
    let count = Arc::new(AtomicU64::new(0));
    let asked = count.clone();
    let cut = move || and_then(Vec::new(), length, false);
    // Busy until the client goes to the next peer, and then cut off, by turns: neither lasts long.
    let by_turns = peer(move |_| match asked.fetch_add(1, Ordering::SeqCst) % 4 {
        3 => cut(),
        _ => busy_for("0"),
    })
    .await;
    let asked = count.clone();
    // Has the archive as soon as it is only asked for it.
    let never_comes = peer(move |request| {
        asked.fetch_add(1, Ordering::SeqCst);
        if request.method() == axum::http::Method::HEAD {
            return status(StatusCode::OK);
        }
        let coming = Response::builder().status(503).header("archive-is-coming", "1");
        coming.body(Body::empty()).unwrap()
    })
    .await;
    for address in [by_turns, never_comes] {
        count.store(0, Ordering::SeqCst);
        let (host, before, log) = (Host::new(), server.sent(), Log::default());
        let guard = log.listen();
        let (http, sources) = (hasty(), from(&[&address]));
        let fetched = tokio::time::timeout(Duration::from_mins(1), host.fetch_from(&set, &http, &sources)).await;
        drop(guard);
        assert_eq!((fetched.unwrap().unwrap().from_peers, server.sent() - before), (0, length as u64));
        assert!(count.load(Ordering::SeqCst) < 600, "it was asked {count:?} times");
        let warnings = log.warnings();
        assert!(warnings.len() == 1 && warnings[0].contains("has waited for it"), "{warnings:?}");
    }
}

/// Only what a peer sends gives it more time: a big archive that it never sends does not.
#[tokio::test]
async fn an_archive_that_a_peer_does_not_send_gives_it_no_time() {
    let (_channel, _server, set, archive) = one_archive().await;
    let PackageSet::Lock { lock, question } = set else { panic!("not a lock") };
    let size = format!("size: {}\n", archive.len());
    assert!(lock.contains(&size), "{lock}");
    // At 64 kB a second it would take an hour.
    let set = PackageSet::Lock { lock: lock.replace(&size, "size: 230000000\n"), question };
    let busy = peer(|_| busy_for("0")).await;
    let log = Log::default();
    let _guard = log.listen();
    let (host, http, sources) = (Host::new(), hasty(), from(&[&busy]));
    let fetched = tokio::time::timeout(Duration::from_secs(20), host.fetch_from(&set, &http, &sources)).await;
    // The source has an archive of another size.
    assert!(fetched.unwrap().is_err());
    let warnings = log.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("has waited for it"), "{warnings:?}");
}

/// A server with a bundle of 8 bytes.
pub(super) async fn small_bundle() -> (tempfile::TempDir, Server, PackageSet) {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("flux.tar.gz"), "a bundle").unwrap();
    let server = Server::start(directory.path()).await;
    let sha256 = hex::encode(<sha2::Sha256 as sha2::Digest>::digest("a bundle"));
    let url = format!("{}flux.tar.gz", server.url());
    (directory, server, PackageSet::Bundle(api::BundleSource { url, sha256 }))
}

/// A bundle has no published size, so a peer that lies could send without end.
#[tokio::test]
async fn a_peer_that_sends_a_bundle_without_end_is_given_up() {
    let (_directory, _server, set) = small_bundle().await;
    let endless = || {
        futures::stream::repeat(vec![0; 1 << 14]).then(async |bytes| {
            tokio::time::sleep(Duration::from_millis(10)).await;
            Ok::<_, io::Error>(Bytes::from(bytes))
        })
    };
    let liar = peer(move |_| Response::new(Body::from_stream(endless()))).await;
    let log = Log::default();
    let _guard = log.listen();
    let (host, http, sources) = (Host::new(), hasty(), from(&[&liar]));
    let fetched = tokio::time::timeout(Duration::from_mins(1), host.fetch_from(&set, &http, &sources)).await;
    assert_eq!(fetched.unwrap().unwrap().bytes, 8);
    let warnings = log.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("it takes too long"), "{warnings:?}");
}

/// An agent that fetches `set` itself, and has none of it yet.
async fn fetching(host: &Host, set: &PackageSet) -> (String, Shelf) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let shelf = Shelf::default();
    shelf.offer(host.pkgs(), packages::archive_names(set).into_iter().collect::<BTreeSet<_>>());
    shelf.expect(true);
    tokio::spawn(serve_peers_on(listener, shelf.clone()));
    (address, shelf)
}

#[tokio::test]
async fn a_fetch_waits_for_archives_that_a_peer_is_fetching() {
    let (_channel, server, set) = ten_archives().await;
    let (whole, parent, before) = (Host::new(), Host::new(), server.sent());
    let bytes = whole.fetch(&set).await.unwrap().bytes;
    let once = server.sent();
    assert!(once > before);
    let (address, shelf) = fetching(&parent, &set).await;
    let child = Host::new();
    let arriving = async {
        let archives = whole.archives();
        for (count, archive) in archives.iter().enumerate() {
            fs::copy(archive, parent.pkgs().join(archive.file_name().unwrap())).unwrap();
            shelf.arrived();
            // The last one is let come only when the child has all the others.
            while count + 2 == archives.len() && child.archives().len() < count + 1 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    };
    let log = Log::default();
    let _guard = log.listen();
    let (http, sources) = (http(), from(&[&address]));
    let (fetched, ()) = futures::join!(child.fetch_from(&set, &http, &sources), arriving);
    assert_eq!((fetched.unwrap().from_peers, server.sent()), (bytes, once));
    assert!(log.warnings().is_empty(), "{:?}", log.warnings());
}

#[tokio::test]
async fn a_fetch_does_not_wait_for_a_peer_that_stopped_fetching() {
    let (_channel, server, set) = ten_archives().await;
    let (address, shelf) = fetching(&Host::new(), &set).await;
    let before = server.sent();
    let stopping = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        shelf.expect(false);
    };
    let (host, http, sources) = (Host::new(), http(), from(&[&address]));
    let (fetched, ()) = futures::join!(host.fetch_from(&set, &http, &sources), stopping);
    assert_eq!((fetched.unwrap().from_peers, server.sent() > before), (0, true));
}

#[tokio::test]
async fn a_fetch_waits_for_a_peer_whose_agent_restarts() {
    let (_channel, server, set, archive) = one_archive().await;
    let (before, bytes) = (server.sent(), archive.len() as u64);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let back = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let router = axum::Router::new()
            .fallback(move |_: Request| std::future::ready(Response::new(Body::from(archive.clone()))));
        tokio::spawn(async move { axum::serve(listener, router).await });
    };
    let (host, quick, sources) = (Host::new(), quick(), from(&[&address.to_string()]));
    let (fetched, ()) = futures::join!(host.fetch_from(&set, &quick, &sources), back);
    assert_eq!((fetched.unwrap().from_peers, server.sent()), (bytes, before));
}

#[tokio::test]
async fn a_peer_gets_at_most_two_requests_at_a_time() {
    let (_channel, server, set) = ten_archives().await;
    let whole = Host::new();
    let bytes = whole.fetch(&set).await.unwrap().bytes;
    let (pkgs, before) = (whole.pkgs(), server.sent());
    let (now, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let highest = most.clone();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let router = axum::Router::new().fallback(move |request: Request| {
        let (now, most) = (now.clone(), highest.clone());
        let content = fs::read(pkgs.join(request.uri().path().trim_start_matches("/archives/"))).unwrap();
        async move {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(30)).await;
            now.fetch_sub(1, Ordering::SeqCst);
            Response::new(Body::from(content))
        }
    });
    tokio::spawn(async move { axum::serve(listener, router).await });
    let fetched = Host::new().fetch_from(&set, &http(), &from(&[&address])).await.unwrap();
    assert_eq!((fetched.from_peers, server.sent(), most.load(Ordering::SeqCst)), (bytes, before, 2));
}

#[tokio::test]
async fn a_busy_parent_is_asked_again_before_another_holder_is() {
    let (_channel, server, set, archive) = one_archive().await;
    let (before, bytes, asked) = (server.sent(), archive.len() as u64, Arc::new(AtomicU64::new(0)));
    let busy = || Response::builder().status(503).header(header::RETRY_AFTER, "0").body(Body::empty()).unwrap();
    let (count, content) = (Arc::new(AtomicU64::new(0)), archive.clone());
    let parent = peer(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 | 1 => busy(),
        _ => Response::new(Body::from(content.clone())),
    })
    .await;
    let counted = asked.clone();
    let other = peer(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        Response::new(Body::from(archive.clone()))
    })
    .await;
    let fetched = Host::new().fetch_from(&set, &quick(), &from(&[&parent, &other])).await.unwrap();
    assert_eq!((fetched.from_peers, server.sent(), asked.load(Ordering::SeqCst)), (bytes, before, 0));
    // One that stays busy is not waited for while another holder is there.
    let busy = peer(move |_| busy()).await;
    let fetched = Host::new().fetch_from(&set, &quick(), &from(&[&busy, &other])).await.unwrap();
    assert_eq!((fetched.from_peers, asked.load(Ordering::SeqCst)), (bytes, 1));
}

#[tokio::test]
async fn a_peer_that_trickles_is_given_up() {
    let (_channel, _server, set, archive) = one_archive().await;
    let length = archive.len();
    let slow = peer(move |_| {
        let bytes = futures::stream::iter(archive.clone()).then(async |byte| {
            tokio::time::sleep(Duration::from_millis(50)).await;
            Ok::<_, io::Error>(Bytes::from(vec![byte]))
        });
        Response::builder().header(header::CONTENT_LENGTH, length).body(Body::from_stream(bytes)).unwrap()
    })
    .await;
    let log = Log::default();
    let _guard = log.listen();
    let fetched = Host::new().fetch_from(&set, &quick(), &from(&[&slow])).await.unwrap();
    assert!(fetched.from_peers > 0 && fetched.from_peers < 100, "{fetched:?}");
    let warnings = log.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("too slow"), "{warnings:?}");
}

#[tokio::test]
async fn no_peer_is_dropped_for_the_garbage_of_another() {
    let (_channel, server, set, archive) = one_archive().await;
    let (length, before) = (archive.len(), server.sent());
    let garbage = noise(length / 2);
    let liar = peer(move |_| and_then(garbage.clone(), length, false)).await;
    let good = Host::new();
    good.fetch(&set).await.unwrap();
    let good = agent(&good, &set).await;
    let before = server.sent().max(before);
    let log = Log::default();
    let _guard = log.listen();
    let fetched = Host::new().fetch_from(&set, &quick(), &from(&[&liar, &good])).await.unwrap();
    assert_eq!((fetched.from_peers, server.sent()), (length as u64, before));
    let warnings = log.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains(&liar), "{warnings:?}");
}

#[tokio::test]
async fn one_peer_resumes_the_download_of_another() {
    let (_channel, _server, set, archive) = one_archive().await;
    let (length, half) = (archive.len(), archive.len() / 2);
    let first = archive[..half].to_vec();
    let dying = peer(move |_| and_then(first.clone(), length, false)).await;
    let wished = Arc::new(Mutex::new(Vec::new()));
    let wishes = wished.clone();
    let second = peer(move |request: Request| {
        let range = request.headers().get(header::RANGE).map(|range| range.to_str().unwrap().to_owned());
        wishes.lock().unwrap().push(range);
        let range = format!("bytes {half}-{}/{length}", length - 1);
        let answer = Response::builder().status(StatusCode::PARTIAL_CONTENT).header(header::CONTENT_RANGE, range);
        answer.body(Body::from(archive[half..].to_vec())).unwrap()
    })
    .await;
    let fetched = Host::new().fetch_from(&set, &quick(), &from(&[&dying, &second])).await.unwrap();
    assert_eq!(fetched.from_peers, length as u64);
    assert_eq!(*wished.lock().unwrap(), [Some(format!("bytes={half}-"))]);
}

#[tokio::test]
async fn peers_never_see_the_token() {
    let (_channel, server, set, _) = one_archive().await;
    let seen = Arc::new(AtomicU64::new(0));
    let count = seen.clone();
    let curious = peer(move |request: Request| {
        count.fetch_add(1 + 10 * u64::from(request.headers().contains_key(header::AUTHORIZATION)), Ordering::SeqCst);
        status(StatusCode::NOT_FOUND)
    })
    .await;
    let access = Access { token: Some(Token::new("secret")), ..Access::default() };
    let urls = [server.url().to_owned(), format!("http://{curious}.example.org/")];
    let http = HttpClient::with_access(&access, &urls).unwrap();
    Host::new().fetch_from(&set, &http, &from(&[&curious])).await.unwrap();
    assert_eq!(seen.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_bundle_on_the_host_is_used_before_any_peer_unless_it_is_damaged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("flux.tar.gz");
    fs::write(&path, "a bundle").unwrap();
    let sha256 = hex::encode(<sha2::Sha256 as sha2::Digest>::digest("a bundle"));
    let url = url::Url::from_file_path(&path).unwrap().to_string();
    let set = PackageSet::Bundle(api::BundleSource { url, sha256 });
    let first = Host::new();
    first.fetch(&set).await.unwrap();
    let sources = from(&[&agent(&first, &set).await]);
    assert_eq!(Host::new().fetch_from(&set, &quick(), &sources).await.unwrap().from_peers, 0);
    fs::write(&path, "another").unwrap();
    assert_eq!(Host::new().fetch_from(&set, &quick(), &sources).await.unwrap().from_peers, 8);
    fs::remove_file(&path).unwrap();
    assert_eq!(Host::new().fetch_from(&set, &quick(), &sources).await.unwrap().from_peers, 8);
    let error = Host::new().fetch(&set).await.unwrap_err();
    assert!(matches!(error, FetchError::HostFile { .. }), "{error}");
}
