//! What is in `pkgs/` is whole, whatever happened on the way.

use std::{
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    http::{StatusCode, header},
};

use super::*;

#[tokio::test]
async fn a_package_that_changed_at_its_source_is_refused_with_both_digests() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    for url in [server.url().to_owned(), channel.file_url()] {
        let set = resolve(&asked(&url, &["flux-core"])).await.unwrap();
        let archive = channel.archive("flux-core-1.0-0.conda");
        let original = fs::read(&archive).unwrap();
        let mut flipped = original.clone();
        flipped[original.len() / 2] ^= 1;
        fs::write(&archive, flipped).unwrap();
        let host = Host::new();
        let error = host.fetch(&set).await.unwrap_err();
        let FetchError::Digest { url, wanted, found } = &error else { panic!("{error}") };
        assert!(url.ends_with("flux-core-1.0-0.conda"), "{url}");
        assert_ne!(wanted, found);
        assert!(!error.is_transient());
        assert!(!host.archives().iter().any(|path| path.to_string_lossy().contains(wanted.as_str())));
        fs::write(&archive, original).unwrap();
        host.fetch(&set).await.unwrap();
    }
}

#[tokio::test]
async fn a_broken_download_is_resumed() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
    let host = Host::new();
    let before = server.trouble().sent.load(Ordering::SeqCst);
    server.trouble().cuts.store(2, Ordering::SeqCst);
    let fetched = host.fetch(&set).await.unwrap();
    assert_eq!(server.trouble().sent.load(Ordering::SeqCst) - before, fetched.bytes, "bytes were sent twice");
}

#[tokio::test]
async fn a_broken_download_starts_over_if_the_server_has_no_ranges() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
    server.trouble().cuts.store(1, Ordering::SeqCst);
    server.trouble().no_ranges.store(1, Ordering::SeqCst);
    let host = Host::new();
    host.fetch(&set).await.unwrap();
}

#[tokio::test]
async fn remains_of_a_killed_fetch_are_used_or_removed() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let archive = host.archives().remove(0);
    let name = archive.file_name().unwrap().to_str().unwrap().to_owned();
    let content = fs::read(&archive).unwrap();
    let part = host.pkgs().join(format!(".{name}.part"));
    let stale = host.pkgs().join(".older.conda.part");
    for left in [&content[..content.len() / 2], &content[..], b"of another file", &noise(content.len() + 9)] {
        fs::remove_file(&archive).unwrap();
        fs::write(&part, left).unwrap();
        fs::write(&stale, "stale").unwrap();
        host.fetch(&set).await.unwrap();
        assert_eq!(fs::read(&archive).unwrap(), content);
        assert!(!part.exists() && !stale.exists());
    }
}

#[tokio::test]
async fn a_fetch_that_is_dropped_is_finished_by_the_next_and_only_one_runs() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    let (began, mut begun) = tokio::sync::mpsc::unbounded_channel();
    let (pkgs, http, digest, sources) = (host.pkgs(), http(), set.digest(), Sources::default());
    {
        let fetching =
            packages::fetch(&set, &digest, PLATFORM, &pkgs, host_file, &http, &sources, |p| began.send(p).unwrap());
        tokio::pin!(fetching);
        tokio::select! {
            _ = &mut fetching => panic!("fetched before its first progress"),
            _ = begun.recv() => {}
        }
        let second = host.fetch(&set).await.unwrap_err();
        assert!(matches!(second, FetchError::Busy) && second.is_transient(), "{second}");
    }
    assert_eq!(host.fetch(&set).await.unwrap().archives, 2);
    host.link(&set).await.unwrap();
}

#[tokio::test]
async fn an_archive_is_not_fetched_again_unless_it_is_damaged() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    assert_eq!(host.fetch(&set).await.unwrap().fetched_bytes, 0);
    let archive = host.archives().remove(0);
    let size = fs::metadata(&archive).unwrap().len();
    fs::write(&archive, "a power cut").unwrap();

    let refusal = host.link(&set).await.unwrap_err();
    assert!(refusal.transient && refusal.message.contains("fetched again"), "{refusal}");
    assert!(packages::ready(host.prefix()).is_empty());
    let refusal = host.link(&set).await.unwrap_err();
    assert!(refusal.transient && refusal.message.contains("not on this host"), "{refusal}");

    assert_eq!(host.fetch(&set).await.unwrap().fetched_bytes, size);
    host.link(&set).await.unwrap();
}

#[test]
fn both_stages_of_the_pod_can_run_on_any_thread() {
    fn sendable(_: impl Send) {}
    let (http, packages) = (http(), Packages::default());
    let set = PackageSet::Bundle(api::BundleSource::default());
    sendable(packages::resolve(&packages, &[], &http, None, host_file, |_| ()));
    sendable(packages::fetch(&set, "", PLATFORM, Path::new("/"), host_file, &http, &Sources::default(), |_| ()));
}

#[tokio::test]
async fn a_fetch_obeys_retry_after() {
    let channel = Channel::with_flux();
    let rest = async |status| {
        let server = Server::start(channel.path()).await;
        let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
        let asked_at = Arc::new(Mutex::new(Vec::new()));
        let times = asked_at.clone();
        server.hook(move |_| {
            times.lock().unwrap().push(Instant::now());
            let is_first = times.lock().unwrap().len() == 1;
            is_first.then(|| answer(status, &[(header::RETRY_AFTER, "2")], "later")).flatten()
        });
        Host::new().fetch(&set).await.unwrap();
        let times = asked_at.lock().unwrap();
        assert!(times.len() == 2 && times[1] - times[0] >= Duration::from_secs(2), "{times:?}");
    };
    futures::join!(rest(StatusCode::TOO_MANY_REQUESTS), rest(StatusCode::SERVICE_UNAVAILABLE));
}

#[tokio::test]
async fn a_retry_is_reported_with_url_reason_and_pause_until_it_succeeds() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
    let asked_before = AtomicBool::new(false);
    server.hook(move |_| {
        let is_first = !asked_before.swap(true, Ordering::Relaxed);
        is_first.then(|| answer(StatusCode::BAD_GATEWAY, &[], "later")).flatten()
    });
    let (host, troubles) = (Host::new(), Mutex::new(Vec::new()));
    let tell = |now: Progress| troubles.lock().unwrap().push(now.trouble);
    let sources = Sources::default();
    packages::fetch(&set, &set.digest(), PLATFORM, &host.pkgs(), host_file, &http(), &sources, tell).await.unwrap();
    let mut troubles = troubles.into_inner().unwrap();
    assert_eq!(troubles.last(), Some(&None), "it went on");
    troubles.retain(Option::is_some);
    let told = troubles[0].clone().unwrap();
    for words in [server.url(), "libflux-1.0-0.tar.bz2", "502", "trying again in "] {
        assert!(told.contains(words), "{told}");
    }
}

#[tokio::test]
async fn a_refusal_is_reported_at_once_with_package_and_source() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
    server.hook(|_| answer(StatusCode::FORBIDDEN, &[], ""));
    let error = Host::new().fetch(&set).await.unwrap_err();
    assert!(!error.is_transient());
    let words = error.to_string();
    assert!(
        words.contains(server.url()) && words.contains("libflux-1.0-0.tar.bz2") && words.contains("403"),
        "{words}"
    );
}

#[tokio::test]
async fn a_range_that_was_not_requested_is_not_used() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
    server.trouble().cuts.store(1, Ordering::SeqCst);
    server.hook(|request| {
        request.headers().get(header::RANGE)?;
        answer(StatusCode::PARTIAL_CONTENT, &[(header::CONTENT_RANGE, "bytes 1-4/5")], "oops")
    });
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    assert_eq!(host.fetch(&set).await.unwrap().fetched_bytes, 0, "what is there is not right");
}

#[tokio::test]
async fn an_archive_of_another_size_is_refused_without_reading_it_all() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
    let archive = fs::read(channel.archive("libflux-1.0-0.tar.bz2")).unwrap();
    let endless = || futures::stream::repeat_with(|| Ok::<_, io::Error>(noise(1 << 16)));
    for (than, body) in [
        ("more", Box::new(move || Body::from_stream(endless())) as Box<dyn Fn() -> Body + Send>),
        ("more", Box::new(|| Body::from(noise(1 << 20)))),
        ("fewer", Box::new(move || Body::from(archive[..archive.len() / 2].to_vec()))),
    ] {
        server.hook(move |_| answer(StatusCode::OK, &[], body()));
        let error = Host::new().fetch(&set).await.unwrap_err();
        assert!(matches!(error, FetchError::Size { .. }) && !error.is_transient(), "{error}");
        let words = error.to_string();
        assert!(words.starts_with(server.url()) && words.contains("libflux") && words.contains(than), "{words}");
    }
}

#[tokio::test]
async fn a_truncated_body_without_length_is_resumed() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
    let archive = fs::read(channel.archive("libflux-1.0-0.tar.bz2")).unwrap();
    let half = archive[..archive.len() / 2].to_vec();
    server.hook(move |request| {
        let piece = half.clone();
        let body = Body::from_stream(futures::stream::once(async { Ok::<_, io::Error>(piece) }));
        if request.headers().contains_key(header::RANGE) { None } else { answer(StatusCode::OK, &[], body) }
    });
    let before = server.sent();
    Host::new().fetch(&set).await.unwrap();
    assert_eq!(server.sent() - before, archive.len().div_ceil(2) as u64);
}

#[tokio::test]
async fn a_mirror_takes_the_place_of_the_channel_of_a_lock() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["flux-core"])).await.unwrap();
    let before = server.sent();
    let directory = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(channel.path(), directory.path().join("conda")).unwrap();
    let mirror = Server::start(directory.path()).await;
    for mirror in [format!("{}conda", mirror.url()), format!("{}/", channel.file_url())] {
        let sources = Sources { mirror: Some(mirror), ..Sources::default() };
        Host::new().fetch_from(&set, &http(), &sources).await.unwrap();
    }
    assert!(server.sent() == before && mirror.sent() > 0);
    let sources = Sources { mirror: Some("//me:secret@mirror".to_owned()), ..Sources::default() };
    let error = Host::new().fetch_from(&set, &http(), &sources).await.unwrap_err();
    assert!(matches!(error, FetchError::NotAUrl { .. }) && !error.to_string().contains("secret"), "{error}");
}

/// A small file system, unmounted at the end.
struct Small(Host);

impl Small {
    /// None if the test can't run.
    fn new(options: &str) -> Option<Self> {
        if skips_without([Need::Namespaces]) {
            return None;
        }
        let host = Host::new();
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("tmpfs"), &host.pkgs(), Some("tmpfs"), flags, Some(options)).unwrap();
        Some(Self(host))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        nix::mount::umount2(&self.0.pkgs(), nix::mount::MntFlags::MNT_DETACH).unwrap();
    }
}

#[tokio::test]
async fn a_full_disk_is_reported_with_the_bytes_needed_and_the_fetch_resumes() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
    let size = fs::metadata(channel.archive("libflux-1.0-0.tar.bz2")).unwrap().len();
    let before = server.sent();
    let Some(small) = Small::new("size=128k") else { return };
    let error = small.0.fetch(&set).await.unwrap_err();
    assert!(matches!(error, FetchError::Write { .. }) && error.is_transient());
    let words = error.to_string();
    let there = fs::read_dir(small.0.pkgs()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum::<u64>();
    assert!(there > 0 && there < size);
    let missing = format!("{} more bytes are needed", size - there);
    assert!(words.contains(small.0.pkgs().to_str().unwrap()) && words.contains(&missing), "{words}");

    let flags = nix::mount::MsFlags::MS_REMOUNT;
    nix::mount::mount(None::<&str>, &small.0.pkgs(), None::<&str>, flags, Some("size=8m")).unwrap();
    let first = server.sent() - before;
    small.0.fetch(&set).await.unwrap();
    assert_eq!(server.sent() - before - first, size - there, "what was there was sent again");
}

#[tokio::test]
async fn a_disk_without_free_inodes_is_reported_as_such() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["flux-core"])).await.unwrap();
    let Some(small) = Small::new("size=8m,nr_inodes=2") else { return };
    let error = small.0.fetch(&set).await.unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("no inodes left"), "{error}");
}
