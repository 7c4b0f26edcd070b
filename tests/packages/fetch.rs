//! What is in `pkgs/` is whole, whatever happened on the way.

use super::*;

#[tokio::test]
async fn a_package_that_changed_at_its_source_is_refused_with_both_digests() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    for url in [server.url().to_owned(), channel.file_url()] {
        let set = resolve(&asked(&url, &["flux-core"])).await.unwrap();
        let archive = channel.archive("flux-core-1.0-0.conda");
        let original = fs::read(&archive).unwrap();
        fs::write(&archive, "something else").unwrap();
        let host = Host::new();
        let error = host.fetch(&set).await.unwrap_err();
        let FetchError::Digest { url, wanted, found } = &error else { panic!("{error}") };
        assert!(url.ends_with("flux-core-1.0-0.conda"), "{url}");
        assert_ne!(wanted, found);
        assert!(!error.is_transient());
        let left = fs::read_dir(host.pkgs()).unwrap().map(|e| e.unwrap().file_name());
        assert!(!left.into_iter().any(|name| name.to_string_lossy().contains(wanted.as_str())));
        fs::write(&archive, original).unwrap();
        host.fetch(&set).await.unwrap();
    }
}

#[tokio::test]
async fn a_cut_download_goes_on_where_it_ended() {
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
async fn a_cut_download_begins_again_where_the_server_knows_no_parts() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["libflux"])).await.unwrap();
    server.trouble().cuts.store(1, Ordering::SeqCst);
    server.trouble().no_ranges.store(1, Ordering::SeqCst);
    let host = Host::new();
    host.fetch(&set).await.unwrap();
}

#[tokio::test]
async fn what_a_killed_fetch_left_is_used_or_thrown_away() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let archive = fs::read_dir(host.pkgs()).unwrap().next().unwrap().unwrap().path();
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
async fn what_is_there_is_not_fetched_again_unless_it_is_damaged() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    assert_eq!(host.fetch(&set).await.unwrap().fetched_bytes, 0);
    let archive = fs::read_dir(host.pkgs()).unwrap().next().unwrap().unwrap().path();
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
    let set = PackageSet::Bundle(flux_distribute::api::BundleSource::default());
    sendable(packages::resolve(&packages, &[], &http, None, host_file));
    sendable(packages::fetch(&set, "", PLATFORM, Path::new("/"), host_file, &http, &Sources::default(), |_| ()));
}
