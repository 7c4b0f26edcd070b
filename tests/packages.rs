//! What the packages part promises, with a small channel that is made here.
#![allow(clippy::unwrap_used)]

#[path = "support/channel.rs"]
mod channel;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use channel::{Channel, Content, Server, noise};
use flux_distribute::{
    api::{PackageSet, Packages},
    host::{LinkOrder, Linked, Refusal},
    packages::{self, FetchError, Fetched, HttpClient, SolveError},
};

const PLATFORM: &str = "linux-64";

fn http() -> HttpClient {
    HttpClient::new().unwrap()
}

fn host_file(path: &str) -> io::Result<File> {
    File::open(path)
}

fn asked(channel: &str, specs: &[&str]) -> Packages {
    Packages {
        channels: vec![channel.to_owned()],
        specs: specs.iter().map(|s| (*s).to_owned()).collect(),
        ..Packages::default()
    }
}

async fn resolve(packages: &Packages) -> Result<PackageSet, SolveError> {
    packages::resolve(packages, &[PLATFORM.to_owned()], &http(), None, host_file).await
}

/// A host's prefix with an empty `pkgs/`.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        fs::create_dir(host.pkgs()).unwrap();
        host
    }

    fn prefix(&self) -> &Path {
        self.0.path()
    }

    fn pkgs(&self) -> PathBuf {
        self.prefix().join("pkgs")
    }

    fn environment(&self, set: &PackageSet) -> PathBuf {
        self.prefix().join("envs").join(set.digest())
    }

    async fn fetch(&self, set: &PackageSet) -> Result<Fetched, FetchError> {
        // As the agent does it: through a descriptor, since the path is another one in the pod.
        let directory = File::open(self.pkgs()).unwrap();
        let pkgs = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&directory));
        packages::fetch(set, &set.digest(), PLATFORM, Path::new(&pkgs), host_file, &http(), |_| ()).await
    }

    async fn link(&self, set: &PackageSet) -> Result<Linked, Refusal> {
        self.link_for(set, PLATFORM).await
    }

    async fn link_for(&self, set: &PackageSet, platform: &str) -> Result<Linked, Refusal> {
        let order = LinkOrder {
            prefix: self.prefix().to_owned(),
            digest: set.digest(),
            set: set.clone(),
            platform: platform.to_owned(),
        };
        tokio::task::spawn_blocking(move || packages::link(&order, &mut |_| ())).await.unwrap()
    }

    /// Names in `envs/`, the hidden ones too.
    fn envs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.prefix().join("envs")).into_iter().flatten();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }
}

#[tokio::test]
async fn a_channel_becomes_an_environment_with_the_final_prefix_in_it() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    for url in [server.url().to_owned(), channel.file_url()] {
        let host = Host::new();
        let set = resolve(&asked(&url, &["flux-core"])).await.unwrap();
        let fetched = host.fetch(&set).await.unwrap();
        assert_eq!(fetched.archives, 2);
        assert_eq!(fetched.fetched_bytes, fetched.bytes);
        let linked = host.link(&set).await.unwrap();
        assert_eq!(linked.compiled_prefix, None);
        assert!(linked.bytes > 300_000);

        let environment = host.environment(&set);
        let flux = environment.join("bin/flux");
        let text = fs::read_to_string(&flux).unwrap();
        assert_eq!(text, format!("#!/bin/sh\necho {}/etc\n", environment.display()));
        assert!(fs::metadata(flux).unwrap().permissions().mode() & 0o111 != 0);
        let library = fs::read(environment.join("lib/libflux.so")).unwrap();
        let baked = environment.join("etc").into_os_string().into_encoded_bytes();
        assert!(library.windows(baked.len()).any(|w| w == baked), "the binary does not name its prefix");
        assert!(
            !fs::read_to_string(environment.join("conda-meta/flux-core-1.0-0.json")).unwrap().contains(".partial\"")
        );
        assert_eq!(host.envs(), [set.digest()], "nothing but the environment is left");
        assert_eq!(packages::ready(host.prefix()), [set.digest()]);
    }
}

#[tokio::test]
async fn a_lock_names_the_channel_that_was_asked_and_no_path_of_ours() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let PackageSet::Lock { lock, question } = &set else { panic!("not a lock") };
    assert!(lock.contains(&channel.path().display().to_string()), "{lock}");
    assert!(!lock.contains("/proc/"), "{lock}");
    let asked = asked(&channel.file_url(), &["flux-core"]);
    assert_eq!(*question, packages::question(&asked, &[PLATFORM.to_owned()]));
    assert!(packages::estimate_bytes(&set, PLATFORM) > 4 * 300_000);
}

#[tokio::test]
async fn solving_twice_gives_the_same_digest() {
    let channel = Channel::with_flux();
    let asked = asked(&channel.file_url(), &["flux-core"]);
    assert_eq!(resolve(&asked).await.unwrap().digest(), resolve(&asked).await.unwrap().digest());
}

#[test]
fn the_question_changes_with_what_is_asked_and_with_nothing_else() {
    let ask = |packages: &Packages, platforms: &[&str]| {
        packages::question(packages, &platforms.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>())
    };
    let default = ask(&Packages::default(), &["linux-64"]);
    assert_eq!(default, ask(&Packages::default(), &["linux-64", "linux-64"]));
    assert_eq!(ask(&Packages::default(), &["a", "b"]), ask(&Packages::default(), &["b", "a"]));
    assert_ne!(default, ask(&Packages::default(), &["linux-64", "linux-aarch64"]));
    let pinned = Packages { platforms: vec!["linux-64".to_owned()], ..Packages::default() };
    assert_eq!(default, ask(&pinned, &["linux-aarch64"]));
    assert_ne!(default, ask(&asked("https://host/channel", &[]), &["linux-64"]));
    let glibc = Packages { glibc: Some("2.34".to_owned()), ..Packages::default() };
    assert_ne!(default, ask(&glibc, &["linux-64"]));
}

#[tokio::test]
async fn a_channel_that_is_not_there_is_named_and_may_come_back() {
    let unused = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/lost", unused.local_addr().unwrap());
    drop(unused);
    let there = Channel::with_flux();
    let mut asked = asked(&there.file_url(), &["flux-core"]);
    asked.channels.push(url.clone());
    let error = resolve(&asked).await.unwrap_err();
    assert!(error.to_string().contains(&url), "{error}");
    assert!(!error.to_string().contains(&there.file_url()), "{error}");
    assert!(error.is_transient());
}

#[tokio::test]
async fn specs_that_nothing_satisfies_are_named_and_stay_so() {
    let mut channel = Channel::with_flux();
    channel.add("newer", ".conda", &["__glibc >=2.40"], &[Content::plain("x", b"x")]);
    let url = channel.file_url();
    for (specs, named) in [
        (&["flux-core", "flux-nonsense"][..], "flux-nonsense"),
        (&["flux-core >=7"][..], "flux-core"),
        (&["newer"][..], "__glibc"),
    ] {
        let error = resolve(&asked(&url, specs)).await.unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
        assert!(!error.is_transient(), "{error}");
    }
    let newer = Packages { glibc: Some("2.41".to_owned()), ..asked(&url, &["newer"]) };
    resolve(&newer).await.unwrap();
}

#[tokio::test]
async fn what_can_not_be_asked_is_refused_by_name() {
    let channel = Channel::with_flux();
    for (packages, named) in [
        (asked("conda-forge", &[]), "conda-forge"),
        (asked("ftp://host/channel", &[]), "ftp://host/channel"),
        (asked(&channel.file_url(), &["flux-core >=>1"]), "flux-core >=>1"),
        (asked(&channel.file_url(), &["https://host/x-1.0-0.conda"]), "https://host/x-1.0-0.conda"),
        (Packages { platforms: vec!["win-64".to_owned()], ..Packages::default() }, "win-64"),
        (Packages { glibc: Some("new!".to_owned()), ..Packages::default() }, "new!"),
        (Packages { lock: Some("nonsense: [".to_owned()), ..Packages::default() }, "packages.lock"),
    ] {
        let error = resolve(&packages).await.unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
        assert!(!error.is_transient(), "{error}");
    }
}

#[tokio::test]
async fn a_lock_that_is_given_is_taken_as_it_is_if_it_can_be_checked() {
    let channel = Channel::with_flux();
    let PackageSet::Lock { lock, .. } = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap() else {
        panic!("not a lock")
    };
    let given = |lock: String| Packages { lock: Some(lock), ..Packages::default() };
    let PackageSet::Lock { lock: taken, .. } = resolve(&given(lock.clone())).await.unwrap() else {
        panic!("not a lock")
    };
    assert_eq!(taken, lock);
    let without = lock.lines().filter(|l| !l.contains("sha256:")).map(|l| format!("{l}\n")).collect::<String>();
    let error = resolve(&given(without)).await.unwrap_err();
    assert!(error.to_string().contains("has no sha256"), "{error}");
    let other = Packages { platforms: vec!["linux-aarch64".to_owned()], ..given(lock) };
    let error = resolve(&other).await.unwrap_err();
    assert!(error.to_string().contains("no packages for platform linux-aarch64; it has linux-64"), "{error}");
}

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
    let (pkgs, http, digest) = (host.pkgs(), http(), set.digest());
    {
        let fetching = packages::fetch(&set, &digest, PLATFORM, &pkgs, host_file, &http, |p| began.send(p).unwrap());
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

#[tokio::test]
async fn packages_without_flux_never_go_live() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["libflux"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let refusal = host.link(&set).await.unwrap_err();
    assert!(refusal.message.contains("has no bin/flux") && !refusal.transient, "{refusal}");
    assert!(host.envs().is_empty(), "{:?}", host.envs());
}

#[tokio::test]
async fn a_killed_link_is_finished_by_the_next_one() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let envs = host.prefix().join("envs");
    for left in [format!(".{}.partial", set.digest()), ".0123.partial".into(), format!(".{}.unpacked", set.digest())] {
        fs::create_dir_all(envs.join(&left).join("bin")).unwrap();
        fs::write(envs.join(&left).join("bin/flux"), "half").unwrap();
    }
    assert!(packages::ready(host.prefix()).is_empty(), "what is half-done is not ready");
    let linked = host.link(&set).await.unwrap();
    assert_eq!(host.envs(), [set.digest()]);
    // Given again, it changes nothing.
    let flux = host.environment(&set).join("bin/flux");
    let before = fs::metadata(&flux).unwrap().modified().unwrap();
    fs::remove_dir_all(host.pkgs()).unwrap();
    assert_eq!(host.link(&set).await.unwrap(), linked);
    assert_eq!(fs::metadata(&flux).unwrap().modified().unwrap(), before);
}

/// Not a promise of its own: the process that the next test kills.
#[test]
#[ignore = "runs in a child of another test"]
fn linking_child() {
    let Ok(order) = std::env::var("TEST_LINK_ORDER") else { return };
    let order = serde_json::from_str::<LinkOrder>(&order).unwrap();
    packages::link(&order, &mut |progress| eprintln!("{} {}", progress.what, progress.done)).unwrap();
}

#[tokio::test]
async fn a_link_can_be_killed_at_any_step_and_leaves_nothing_live() {
    use std::io::BufRead;
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let order = LinkOrder {
        prefix: host.prefix().to_owned(),
        digest: set.digest(),
        set: set.clone(),
        platform: PLATFORM.to_owned(),
    };
    for step in ["unpacking packages 1", "unpacking packages 2", "linking packages 0", "linking packages 2", "syncing"]
    {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "linking_child", "--ignored", "--nocapture"])
            .env("TEST_LINK_ORDER", serde_json::to_string(&order).unwrap())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = io::BufReader::new(child.stderr.take().unwrap()).lines();
        let reached = lines.map_while(Result::ok).any(|line| line.starts_with(step));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(reached, "never came to {step}");
        // The last step is so short that the kill may be too late; then all of it is there.
        for digest in packages::ready(host.prefix()) {
            assert!(host.prefix().join("envs").join(&digest).join("share/big").exists());
            fs::remove_dir_all(host.prefix().join("envs").join(digest)).unwrap();
        }
    }
    host.link(&set).await.unwrap();
    assert_eq!(host.envs(), [set.digest()]);
}

#[tokio::test]
async fn a_directory_without_our_marker_is_never_removed() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    host.link(&set).await.unwrap();
    fs::remove_file(host.environment(&set).join(packages::ENVIRONMENT_MARKER)).unwrap();
    let refusal = host.link(&set).await.unwrap_err();
    assert!(!refusal.transient, "{refusal}");
    assert!(host.environment(&set).join("bin/flux").exists());
}

#[tokio::test]
async fn no_edit_in_an_environment_reaches_an_archive_or_another_environment() {
    use std::os::unix::fs::MetadataExt;
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    host.link(&set).await.unwrap();
    assert_eq!(fs::metadata(host.environment(&set).join("share/flux")).unwrap().nlink(), 1);
}

#[tokio::test]
async fn a_digest_can_not_lead_out_of_the_prefix() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    for digest in ["../../etc", "", "ABC", "a/b"] {
        let order = LinkOrder {
            prefix: host.prefix().to_owned(),
            digest: digest.to_owned(),
            set: set.clone(),
            platform: PLATFORM.to_owned(),
        };
        let refused = tokio::task::spawn_blocking(move || packages::link(&order, &mut |_| ())).await.unwrap();
        assert!(!refused.unwrap_err().transient);
    }
    let refusal = host.link_for(&set, "linux-aarch64").await.unwrap_err();
    assert!(refusal.message.contains("linux-aarch64"), "{refusal}");
}
