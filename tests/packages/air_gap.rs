//! A bundle of a lock is all that a site without internet needs, and nothing in it is believed.

use std::{
    io::Write,
    process::{Command, Output},
};

use api::BundleSource;
use flate2::{Compression, write::GzEncoder};
use packages::{BUNDLE_LOCK, BUNDLE_MANIFEST, BundleError, CreateBundle, InspectBundle, OutputFormat};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tar::{EntryType, Header};

use super::*;

const OTHER: &str = "linux-aarch64";

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().unwrap().block_on(future)
}

/// The lock of flux-core for these platforms.
fn lock(channel: &str, platforms: &[&str]) -> String {
    let platforms = platforms.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>();
    let asked = asked(channel, &["flux-core"]);
    match wait(packages::resolve(&asked, &platforms, &http(), None, host_file, |_| ())).unwrap() {
        PackageSet::Lock { lock, .. } => lock,
        PackageSet::Bundle(_) => panic!("a bundle was not asked for"),
    }
}

/// A channel with flux-core for both platforms.
fn channel_for_both() -> Channel {
    let channel = Channel::with_flux();
    channel.list_for(OTHER);
    for archive in ["libflux-1.0-0.tar.bz2", "flux-core-1.0-0.conda"] {
        fs::copy(channel.archive(archive), channel.path().join(OTHER).join(archive)).unwrap();
    }
    channel
}

/// A directory with a lock in it.
struct Desk(tempfile::TempDir);

impl Desk {
    fn with(lock: &str) -> Self {
        let desk = Self(tempfile::tempdir().unwrap());
        fs::write(desk.at("lock.yml"), lock).unwrap();
        desk
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn out(&self) -> PathBuf {
        self.at("flux.tar.gz")
    }

    fn create(&self, platforms: &[&str]) -> Result<String, BundleError> {
        CreateBundle {
            lock: Some(self.at("lock.yml")),
            out: self.out(),
            platform: platforms.iter().map(|p| (*p).to_owned()).collect(),
            ..CreateBundle::default()
        }
        .run()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(self.0.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The program, asked to make the bundle.
    fn program(&self, words: &[&str]) -> Output {
        let mut program = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
        program.args(["bundle", "create"]).args(words).current_dir(self.0.path()).output().unwrap()
    }
}

fn set_of(bundle: &Path) -> PackageSet {
    let url = url::Url::from_file_path(bundle).unwrap().to_string();
    PackageSet::Bundle(BundleSource { url, sha256: sha256(bundle) })
}

fn sha256(file: &Path) -> String {
    hex::encode(Sha256::digest(fs::read(file).unwrap()))
}

fn inspect(file: &Path, output: OutputFormat) -> Result<String, BundleError> {
    InspectBundle { file: file.to_owned(), output }.run()
}

#[test]
fn the_same_lock_gives_the_same_bundle() {
    let channel = channel_for_both();
    let lock = lock(&channel.file_url(), &[PLATFORM, OTHER]);
    let (one, two) = (Desk::with(&lock), Desk::with(&lock));
    let printed = one.create(&[]).unwrap();
    assert!(printed.contains("2 packages for linux-64 and linux-aarch64"), "{printed}");
    assert!(printed.contains(&format!("sha256: {}", sha256(&one.out()))), "{printed}");
    assert_eq!(one.names(), ["flux.tar.gz", "lock.yml"], "nothing of the work is left");

    fs::write(two.out(), "an older one").unwrap();
    File::open(channel.archive("flux-core-1.0-0.conda")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    two.create(&[OTHER, PLATFORM, OTHER]).unwrap();
    assert_eq!(sha256(&one.out()), sha256(&two.out()));
    // Both platforms use the same archives here, and each is there once.
    let archives = fs::metadata(channel.archive("flux-core-1.0-0.conda")).unwrap().len()
        + fs::metadata(channel.archive("libflux-1.0-0.tar.bz2")).unwrap().len();
    assert!(fs::metadata(one.out()).unwrap().len() < archives * 3 / 2, "the archives are stored once");
}

#[test]
fn a_bundle_for_two_platforms_installs_on_both_and_names_them_elsewhere() {
    let channel = channel_for_both();
    let desk = Desk::with(&lock(&channel.file_url(), &[PLATFORM, OTHER]));
    desk.create(&[]).unwrap();
    let set = set_of(&desk.out());
    let host = Host::new();
    for platform in [PLATFORM, OTHER] {
        let host = Host::new();
        wait(host.fetch(&set)).unwrap();
        wait(host.link_for(&set, platform)).unwrap();
        let flux = host.environment(&set).join("bin/flux");
        assert!(fs::read_to_string(flux).unwrap().contains(host.environment(&set).to_str().unwrap()));
        assert_eq!(host.envs(), [set.digest()], "nothing but the environment is left");
    }
    wait(host.fetch(&set)).unwrap();
    let refusal = wait(host.link_for(&set, "linux-ppc64le")).unwrap_err();
    let words = "it is for linux-64 and linux-aarch64, but this host is linux-ppc64le";
    assert!(refusal.message.contains(words) && !refusal.transient, "{refusal}");

    desk.create(&[OTHER]).unwrap();
    let set = set_of(&desk.out());
    wait(host.fetch(&set)).unwrap();
    let refusal = wait(host.link(&set)).unwrap_err();
    assert!(refusal.message.contains("it is for linux-aarch64, but this host is linux-64"), "{refusal}");
    assert!(host.envs().is_empty(), "{:?}", host.envs());
}

#[test]
fn a_bundle_installs_without_any_network() {
    if skips_without([Need::Namespaces]) {
        return;
    }
    let channel = Channel::with_flux();
    let desk = Desk::with(&lock(&channel.file_url(), &[PLATFORM]));
    desk.create(&[]).unwrap();
    drop(channel);
    let set = set_of(&desk.out());
    // A thread of its own: it is in another network for good.
    let alone = std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let routes = fs::read_to_string("/proc/thread-self/net/route").unwrap();
        assert!(routes.lines().count() <= 1, "there is no more than the head of the table: {routes}");
        let host = Host::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(host.fetch(&set)).unwrap();
        runtime.block_on(host.link(&set)).unwrap();
        assert_eq!(packages::ready(host.prefix()), [set.digest()]);
    });
    alone.join().unwrap();
}

#[test]
fn downloads_of_an_interrupted_run_are_not_repeated() {
    let channel = channel_for_both();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(Server::start(channel.path()));
    let desk = Desk::with(&lock(server.url(), &[PLATFORM, OTHER]));
    let (libflux, flux_core) = (channel.archive("libflux-1.0-0.tar.bz2"), channel.archive("flux-core-1.0-0.conda"));
    let gone = channel.path().join("gone");
    fs::rename(&flux_core, &gone).unwrap();
    let error = desk.create(&[]).unwrap_err();
    let said = base::error_chain(&error);
    assert!(said.contains("flux-core-1.0-0.conda") && said.contains(".flux.tar.gz.download"), "{said}");
    assert_eq!(error.exit_code(), 1);
    assert!(!desk.out().exists());

    // Killed in the middle of one archive, when the other was whole.
    let pkgs = desk.at(".flux.tar.gz.download/pkgs");
    let bytes = fs::read(&libflux).unwrap();
    let name = format!("{}.tar.bz2", sha256(&libflux));
    let _ = fs::remove_file(pkgs.join(&name));
    fs::write(pkgs.join(format!(".{name}.part")), &bytes[..bytes.len() / 2]).unwrap();
    fs::rename(gone, &flux_core).unwrap();
    fs::copy(&flux_core, pkgs.join(format!("{}.conda", sha256(&flux_core)))).unwrap();
    let before = server.trouble().sent.load(Ordering::SeqCst);
    desk.create(&[]).unwrap();
    let sent = server.trouble().sent.load(Ordering::SeqCst) - before;
    assert_eq!(sent, (bytes.len() - bytes.len() / 2) as u64);
    assert_eq!(desk.names(), ["flux.tar.gz", "lock.yml"]);
}

/// In /tmp, another user can make the directory for downloads first, and put a link there or hold its lock.
#[test]
fn nothing_is_downloaded_to_a_directory_that_others_can_write_to() {
    if skips_without([Need::Root]) {
        return;
    }
    let channel = channel_for_both();
    let desk = Desk::with(&lock(&channel.file_url(), &["linux-64"]));
    let (theirs, victim) = (desk.at(".flux.tar.gz.download"), desk.at("victim"));
    fs::write(&victim, "kept").unwrap();
    for (owner, mode) in [(Some(65534), 0o755), (None, 0o777)] {
        fs::create_dir(&theirs).unwrap();
        std::os::unix::fs::symlink(&victim, theirs.join("bundle")).unwrap();
        std::os::unix::fs::chown(&theirs, owner, None).unwrap();
        fs::set_permissions(&theirs, fs::Permissions::from_mode(mode)).unwrap();
        let error = desk.create(&["linux-64"]).unwrap_err();
        assert!(error.to_string().contains("other users own it or can write to it"), "{error}");
        assert_eq!((error.exit_code(), fs::read_to_string(&victim).unwrap()), (2, "kept".to_owned()));
        fs::remove_dir_all(&theirs).unwrap();
    }
    desk.create(&["linux-64"]).unwrap();
}

/// In a directory without the sticky bit, another user can give root's own directory any name.
#[test]
fn a_directory_of_ours_that_another_user_moves_there_loses_nothing() {
    let channel = channel_for_both();
    let desk = Desk::with(&lock(&channel.file_url(), &["linux-64"]));
    let moved = desk.at(".flux.tar.gz.download");
    fs::create_dir_all(moved.join("pkgs")).unwrap();
    let error = desk.create(&["linux-64"]).unwrap_err();
    assert!(error.to_string().contains("so it may not be a download's: move it away"), "{error}");
    assert_eq!((error.exit_code(), moved.join("pkgs").exists()), (2, true));
}

/// In a directory without the sticky bit, another user can put a symlink in the place of the directory for downloads.
#[test]
fn no_download_follows_a_link_that_replaces_its_directory() {
    let channel = channel_for_both();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(Server::start(channel.path()));
    let desk = Desk::with(&lock(server.url(), &["linux-64"]));
    let (downloads, victim) = (desk.at(".flux.tar.gz.download"), desk.at("victim"));
    fs::create_dir_all(victim.join("pkgs")).unwrap();
    fs::write(victim.join("pkgs/kept"), "kept").unwrap();
    let (moved, to) = (desk.at("moved"), victim.clone());
    server.hook(move |_| {
        if !moved.exists() {
            fs::rename(&downloads, &moved).unwrap();
            std::os::unix::fs::symlink(&to, &downloads).unwrap();
        }
        None
    });
    desk.create(&["linux-64"]).unwrap();
    assert!(inspect(&desk.out(), OutputFormat::Text).is_ok());
    let names =
        |directory: PathBuf| fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!((names(victim.clone()), names(victim.join("pkgs"))), (vec!["pkgs".into()], vec!["kept".into()]));
}

#[test]
fn input_that_can_not_become_a_bundle_fails_with_one_sentence() {
    let channel = Channel::with_flux();
    let desk = Desk::with(&lock(&channel.file_url(), &[PLATFORM]));
    fs::write(desk.at("no-lock.yml"), "a: [1, 2").unwrap();
    fs::write(desk.at("binary.yml"), b"\xff\xfe\0").unwrap();
    fs::create_dir(desk.at("directory")).unwrap();
    let before = desk.names();
    for (words, said) in [
        (&["--lock", "gone.yml", "--out", "b.tar.gz"][..], "gone.yml: there is no such file"),
        (&["--lock", "directory", "--out", "b.tar.gz"], "directory: it is a directory, not a lock"),
        (&["--lock", "binary.yml", "--out", "b.tar.gz"], "binary.yml: it is not text"),
        (&["--lock", "no-lock.yml", "--out", "b.tar.gz"], "no-lock.yml: the lock can't be read"),
        (&["--lock", "lock.yml", "--platform", OTHER, "--out", "b.tar.gz"], "it has linux-64"),
        (&["--lock", "lock.yml", "--out", "directory"], "directory: it is a directory; name the file to write"),
        (&["--lock", "lock.yml", "--out", "gone/b.tar.gz"], "gone: there is no such directory"),
        (&["--lock", "lock.yml", "--from-prefix", "directory", "--out", "b.tar.gz"], "cannot be used with"),
        (&["--out", "b.tar.gz"], "--from-prefix <DIR>|--lock <FILE>"),
    ] {
        let output = desk.program(words);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {stderr}");
        assert!(stderr.contains(said), "{words:?}: {stderr}");
        assert!(stderr.lines().count() == 1 || stderr.contains("Usage:"), "{words:?}: {stderr}");
        assert_eq!(desk.names(), before, "{words:?} left something");
    }
}

#[test]
fn json_output_is_one_object_a_line_and_ends_with_the_bundle() {
    let channel = Channel::with_flux();
    let desk = Desk::with(&lock(&channel.file_url(), &[PLATFORM]));
    let output = desk.program(&["--lock", "lock.yml", "--out", "flux.tar.gz", "--output", "json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let lines = String::from_utf8(output.stdout).unwrap();
    let events: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ended: Vec<_> = events.iter().filter(|event| event["event"] == "phase-ended").collect();
    assert_eq!(ended[0]["phase"], "fetching packages for linux-64", "{lines}");
    assert_eq!(ended[0]["packages"]["done"], 2, "{lines}");
    assert_eq!(ended[0]["bytes"]["done"], ended[0]["bytes"]["total"], "{lines}");
    let done = events.last().unwrap();
    assert_eq!(done["event"], "done");
    assert_eq!(done["sha256"], sha256(&desk.out()));
    assert_eq!(done["kind"], "packages");
    assert_eq!(done["url"], url::Url::from_file_path(desk.out().canonicalize().unwrap()).unwrap().as_str());
}

#[test]
fn progress_is_a_bar_on_a_terminal_and_lines_elsewhere() {
    let channel = Channel::with_flux();
    let desk = Desk::with(&lock(&channel.file_url(), &[PLATFORM]));
    let fetched = "fetching packages for linux-64: 2 packages, ";
    let log = String::from_utf8(desk.program(&["--lock", "lock.yml", "--out", "flux.tar.gz"]).stderr).unwrap();
    assert!(log.lines().any(|line| line.starts_with(fetched)) && !log.contains('\x1b'), "{log}");

    let terminal = nix::pty::openpty(None, None).unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
    program.args(["bundle", "create", "--lock", "lock.yml", "--out", "flux.tar.gz"]).current_dir(desk.0.path());
    assert!(program.stderr(terminal.slave).stdout(std::process::Stdio::null()).status().unwrap().success());
    drop(program);
    let mut drawn = [0; 4096];
    let length = nix::unistd::read(&terminal.master, &mut drawn).unwrap();
    let drawn = String::from_utf8_lossy(&drawn[..length]);
    assert!(drawn.contains(&format!("\r\x1b[2K{fetched}")), "{drawn:?}");
}

#[test]
fn inspect_shows_what_is_in_a_bundle_of_packages() {
    let channel = channel_for_both();
    let desk = Desk::with(&lock(&channel.file_url(), &[PLATFORM, OTHER]));
    desk.create(&[]).unwrap();
    let text = inspect(&desk.out(), OutputFormat::Text).unwrap();
    for words in [
        "kind        packages\n",
        "platforms   linux-64, linux-aarch64\n",
        "created by  flux-distribute ",
        &format!("sha256      {}\n", sha256(&desk.out())),
        "\nlinux-aarch64: 2 packages, ",
        "\n  flux-core  1.0  0  ",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let json: Value = serde_json::from_str(&inspect(&desk.out(), OutputFormat::Json).unwrap()).unwrap();
    assert_eq!(json["manifest"]["kind"], "packages");
    assert_eq!(json["packages"][OTHER].as_array().unwrap().len(), 2);
    assert_eq!(json["sha256"], sha256(&desk.out()));
}

/// What versions that know trees only make of the manifest.
#[derive(serde::Deserialize)]
struct ManifestOfOld {
    format: u32,
    kind: String,
    #[serde(rename = "prefix")]
    _prefix: PathBuf,
    #[serde(rename = "platform")]
    _platform: String,
}

/// The entries of a real bundle, to be changed one by one.
#[derive(Clone)]
struct Forged(Vec<(EntryType, String, Vec<u8>)>);

impl Forged {
    fn new() -> Self {
        let channel = Channel::with_flux();
        let desk = Desk::with(&lock(&channel.file_url(), &[PLATFORM]));
        desk.create(&[]).unwrap();
        let gzip = flate2::read::GzDecoder::new(File::open(desk.out()).unwrap());
        let mut tar = tar::Archive::new(gzip);
        let entries = tar.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().to_str().unwrap().to_owned();
            let mut bytes = Vec::new();
            io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
            (entry.header().entry_type(), path, bytes)
        });
        Self(entries.collect())
    }

    fn bytes(&self, trailer: &[u8]) -> Vec<u8> {
        let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
        for (kind, path, bytes) in &self.0 {
            let mut header = Header::new_gnu();
            // Past the checks of the setters.
            header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
            if kind.is_symlink() || kind.is_hard_link() {
                header.set_link_name("/etc/passwd").unwrap();
            }
            header.set_entry_type(*kind);
            header.set_mode(0o644);
            header.set_size(bytes.len() as u64);
            header.set_cksum();
            tar.append(&header, bytes.as_slice()).unwrap();
        }
        let mut gzip = tar.into_inner().unwrap();
        gzip.write_all(trailer).unwrap();
        gzip.finish().unwrap()
    }
}

/// Neither a host nor `bundle inspect` takes it.
fn is_refused(bundle: &[u8], words: &str) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bundle).unwrap();
    let (host, set) = (Host::new(), set_of(file.path()));
    wait(host.fetch(&set)).unwrap();
    let Err(refusal) = wait(host.link(&set)) else { panic!("it was accepted: {words}") };
    assert!(refusal.message.contains(words), "{words}: {refusal}");
    assert!(refusal.message.contains(file.path().to_str().unwrap()), "it names the bundle: {refusal}");
    assert!(!refusal.transient, "{refusal}");
    assert!(host.envs().is_empty(), "{words} left {:?}", host.envs());
    let error = inspect(file.path(), OutputFormat::Text).unwrap_err();
    assert!(error.to_string().contains(words), "{words}: {error}");
    assert_eq!(error.exit_code(), 2, "{words}");
}

#[test]
fn false_statements_in_a_bundle_of_packages_are_refused() {
    let file = EntryType::Regular;
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Vec<(EntryType, String, Vec<u8>)>));
    // The channel of a lock that another tool wrote, and what a parser of URLs takes for a user in it.
    let channel = |entries: &mut [(EntryType, String, Vec<u8>)], url: &str| {
        let lock = String::from_utf8(entries[1].2.clone()).unwrap();
        let (before, channel) = lock.split_once("- url: ").unwrap();
        let (_, after) = channel.split_once('\n').unwrap();
        entries[1].2 = format!("{before}- url: {url}\n{after}").into();
    };
    let changes: [Change<'_>; 21] = [
        ("its archive of package libflux-1.0-0 is not", &|e| {
            e.iter_mut().for_each(|(_, path, bytes)| {
                if path.ends_with(".tar.bz2") {
                    bytes[1000] ^= 1;
                }
            });
        }),
        ("its archive of package libflux-1.0-0 is not", &|e| {
            e.iter_mut().for_each(|(_, path, bytes)| {
                if path.ends_with(".tar.bz2") {
                    bytes.truncate(1000);
                }
            });
        }),
        ("it lacks the archive of package flux-core-1.0-0", &|e| e.retain(|(_, path, _)| !path.ends_with(".conda"))),
        ("appears twice", &|e| e.push(e[2].clone())),
        ("is not an archive that its lock names", &|e| e.push((file, "pkgs/other.conda".into(), b"evil".into()))),
        ("is not an archive that its lock names", &|e| e[2].1 = format!("elsewhere/{}", &e[2].1[5..])),
        ("is not an archive that its lock names", &|e| e[2].1 = format!("pkgs/../{}", e[2].1)),
        ("is not an archive that its lock names", &|e| e.push((file, "../victim".into(), b"evil".into()))),
        ("is not an archive that its lock names", &|e| e.push((file, "/tmp/victim".into(), b"evil".into()))),
        ("is not a regular file", &|e| e.push((EntryType::Directory, "pkgs/d".into(), Vec::new()))),
        ("is not a regular file", &|e| e.push((EntryType::Char, "pkgs/null".into(), Vec::new()))),
        ("is not a regular file", &|e| e[2].0 = EntryType::Symlink),
        ("is not a regular file", &|e| e[2].0 = EntryType::Link),
        ("its flux-distribute-lock.yml does not follow", &|e| drop(e.remove(1))),
        ("its flux-distribute-lock.yml does not follow", &|e| e.truncate(1)),
        ("its lock can't be used: the lock can't be read", &|e| e[1].2 = b"a: [1".into()),
        ("has credentials in the URL https://***@h/c", &|e| channel(e, "https://me:pass@h/c")),
        ("has credentials in the URL https://h/c", &|e| channel(e, "https:///me:pass@h/c")),
        ("its flux-distribute-lock.yml is not text", &|e| e[1].2 = b"\xff\xfe".into()),
        ("holds more than", &|e| e[1].2 = vec![0; 65 << 20]),
        ("names no platform", &|e| {
            e[0].2 = String::from_utf8(e[0].2.clone()).unwrap().replace("\"linux-64\"", "").into();
        }),
    ];
    let honest = Forged::new();
    for (words, change) in changes {
        let mut forged = honest.clone();
        change(&mut forged.0);
        is_refused(&forged.bytes(b""), words);
    }
    is_refused(&honest.bytes(&vec![0; 200 << 20]), "times its own size");
    let whole = honest.bytes(b"");
    for length in [400, whole.len() / 2, whole.len() - 9] {
        is_refused(&whole[..length], "truncated");
    }
    let [(_, first, manifest), (_, second, _), ..] = honest.0.as_slice() else { panic!("a bundle has entries") };
    assert_eq!((first.as_str(), second.as_str()), (BUNDLE_MANIFEST, BUNDLE_LOCK));
    // Older versions refuse it by its kind, and not for a field they miss.
    let old: ManifestOfOld = serde_json::from_slice(manifest).unwrap();
    assert_eq!((old.format, old.kind.as_str()), (1, "packages"));
}
