//! What bundles promise: the same tree is the same file, and no bundle leaves its directory.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use api::{BundleSource, PackageSet};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use hostapi::{LinkOrder, Linked, Refusal};
use packages::{BUNDLE_MANIFEST, BundleError, CreateBundle, HttpClient, InspectBundle, OutputFormat, Sources};
use sha2::{Digest, Sha256};
use stage::launch::HostPlaces;
use tar::{EntryType, Header};

const PLATFORM: &str = "linux-64";

/// An installed Flux with everything a prefix may hold.
fn installed_flux(at: &Path) {
    for directory in ["bin", "lib/flux", "share"] {
        fs::create_dir_all(at.join(directory)).unwrap();
    }
    fs::write(at.join("bin/flux"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(at.join("bin/flux"), PermissionsExt::from_mode(0o4755)).unwrap();
    fs::hard_link(at.join("bin/flux"), at.join("bin/flux-again")).unwrap();
    symlink("flux/../libflux.so.1", at.join("lib/libflux.so")).unwrap();
    fs::write(at.join("lib/libflux.so.1"), "library").unwrap();
    symlink("/opt/flux/share", at.join("lib/flux/share")).unwrap();
    symlink("/usr/bin/python3", at.join("bin/python")).unwrap();
    fs::write(at.join("share").join("n".repeat(200)), "a long name").unwrap();
    let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    File::open(at.join("lib/libflux.so.1")).unwrap().set_modified(old).unwrap();
}

fn create(from: &Path, out: &Path) -> Result<String, BundleError> {
    CreateBundle {
        from_prefix: Some(from.to_owned()),
        out: out.to_owned(),
        compiled_prefix: Some("/opt/flux".into()),
        platform: vec![PLATFORM.to_owned()],
        ..CreateBundle::default()
    }
    .run()
}

fn sha256(file: &Path) -> String {
    hex::encode(Sha256::digest(fs::read(file).unwrap()))
}

/// A host that has fetched this bundle.
struct Host {
    prefix: tempfile::TempDir,
    set: PackageSet,
}

impl Host {
    fn with(bundle: &Path) -> Self {
        let url = url::Url::from_file_path(bundle).unwrap().to_string();
        let set = PackageSet::Bundle(BundleSource { url, sha256: sha256(bundle) });
        let host = Self { prefix: tempfile::tempdir().unwrap(), set };
        fs::create_dir(host.prefix.path().join("pkgs")).unwrap();
        fs::copy(bundle, host.archive()).unwrap();
        host
    }

    fn archive(&self) -> PathBuf {
        self.prefix.path().join(format!("pkgs/bundle-{}.tar.gz", self.set.digest()))
    }

    fn environment(&self) -> PathBuf {
        self.prefix.path().join("envs").join(self.set.digest())
    }

    fn link(&self) -> Result<Linked, Refusal> {
        let order = LinkOrder {
            prefix: self.prefix.path().to_owned(),
            digest: self.set.digest(),
            set: self.set.clone(),
            platform: PLATFORM.to_owned(),
            follow: false,
        };
        packages::link(&order, &HostPlaces::of_host(), &mut |_| ())
    }

    fn refused(&self) -> Refusal {
        let refusal = self.link().unwrap_err();
        let envs = fs::read_dir(self.prefix.path().join("envs")).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(envs.filter(|name| name != ".lock").count(), 0, "something is left after: {refusal}");
        refusal
    }
}

#[test]
fn the_same_tree_gives_the_same_bundle() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    installed_flux(&path("one"));
    installed_flux(&path("two"));
    for file in ["bin", "lib", "lib/flux", "share", "bin/flux", "."] {
        let time = fs::metadata(path("one").join(file)).unwrap().modified().unwrap();
        File::open(path("two").join(file)).unwrap().set_modified(time).unwrap();
    }
    let copied = |name: &str| {
        let long = format!("share/{}", "n".repeat(200));
        let time = std::time::UNIX_EPOCH;
        File::open(path(name).join(long)).unwrap().set_modified(time).unwrap();
        for link in ["lib/libflux.so", "lib/flux/share", "bin/python"] {
            use nix::sys::{stat, time::TimeSpec};
            let (link, time) = (path(name).join(link), TimeSpec::new(1, 0));
            let flags = stat::UtimensatFlags::NoFollowSymlink;
            stat::utimensat(nix::fcntl::AT_FDCWD, &link, &time, &time, flags).unwrap();
        }
    };
    copied("one");
    copied("two");
    create(&path("one"), &path("one.tar.gz")).unwrap();
    create(&path("two"), &path("two.tar.gz")).unwrap();
    assert_eq!(sha256(&path("one.tar.gz")), sha256(&path("two.tar.gz")));
}

#[test]
fn a_bundle_becomes_the_tree_it_was_made_from() {
    let directory = tempfile::tempdir().unwrap();
    let (from, bundle) = (directory.path().join("flux"), directory.path().join("flux.tar.gz"));
    installed_flux(&from);
    let printed = create(&from, &bundle).unwrap();
    assert!(printed.contains(&format!("sha256: {}", sha256(&bundle))), "{printed}");
    assert!(printed.contains(&format!("url: file://{}", bundle.canonicalize().unwrap().display())), "{printed}");

    let host = Host::with(&bundle);
    let linked = host.link().unwrap();
    assert_eq!(linked.compiled_prefix.as_deref(), Some(Path::new("/opt/flux")));
    assert_eq!(packages::linked(host.prefix.path(), &host.set.digest()), Some(linked));
    let there = host.environment();
    let flux = fs::metadata(there.join("bin/flux")).unwrap();
    assert_eq!(flux.mode() & 0o7777, 0o755, "setuid is not taken over");
    assert_eq!(flux.ino(), fs::metadata(there.join("bin/flux-again")).unwrap().ino());
    assert_eq!(fs::read_link(there.join("bin/python")).unwrap(), Path::new("/usr/bin/python3"));
    assert_eq!(fs::read_link(there.join("lib/flux/share")).unwrap(), Path::new("/opt/flux/share"));
    assert_eq!(fs::read_to_string(there.join("lib/libflux.so")).unwrap(), "library");
    assert_eq!(fs::metadata(there.join("lib/libflux.so.1")).unwrap().mtime(), 1_000_000_000);
    assert!(there.join("share").join("n".repeat(200)).is_file());

    // And back: what is installed makes the same bundle again, our own marker is no part of it.
    let again = directory.path().join("again.tar.gz");
    fs::set_permissions(from.join("bin/flux"), PermissionsExt::from_mode(0o755)).unwrap();
    create(&there, &again).unwrap();
    assert_eq!(sha256(&again), sha256(&bundle));
}

#[tokio::test]
async fn a_bundle_is_fetched_from_the_host_or_refused_by_its_digest() {
    let directory = tempfile::tempdir().unwrap();
    let (from, bundle) = (directory.path().join("flux"), directory.path().join("flux.tar.gz"));
    installed_flux(&from);
    let made = (from.clone(), bundle.clone());
    tokio::task::spawn_blocking(move || create(&made.0, &made.1)).await.unwrap().unwrap();
    let host = Host::with(&bundle);
    fs::remove_file(host.archive()).unwrap();
    let (http, pkgs) = (HttpClient::new().unwrap(), host.prefix.path().join("pkgs"));
    let fetch = async |set: &PackageSet| {
        packages::fetch(
            set,
            &set.digest(),
            PLATFORM,
            &pkgs,
            |path| File::open(path),
            &http,
            &Sources::default(),
            |_| (),
        )
        .await
    };
    fetch(&host.set).await.unwrap();
    let PackageSet::Bundle(mut source) = host.set.clone() else { panic!() };
    source.sha256 = "0".repeat(64);
    let error = fetch(&PackageSet::Bundle(source.clone())).await.unwrap_err().to_string();
    for part in [&source.url, &source.sha256, &sha256(&bundle)] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!pkgs.join(format!("bundle-{}.tar.gz", &source.sha256[..16])).exists());
    tokio::task::spawn_blocking(move || host.link().unwrap()).await.unwrap();
}

#[test]
fn inspect_describes_a_bundle() {
    let directory = tempfile::tempdir().unwrap();
    let (from, file) = (directory.path().join("flux"), directory.path().join("flux.tar.gz"));
    installed_flux(&from);
    create(&from, &file).unwrap();
    let json = InspectBundle { file: file.clone(), output: OutputFormat::Json }.run().unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["manifest"]["prefix"], "/opt/flux");
    assert_eq!(json["sha256"], sha256(&file));
    assert_eq!(json["files"], 11);
    let text = InspectBundle { file: file.clone(), output: OutputFormat::Text }.run().unwrap();
    assert!(text.contains("linux-64") && text.contains("/opt/flux"), "{text}");
    // What it says to write into the FluxInstance can be written there, and names this very bundle.
    let (_, spec) = text.split_once("spec:\n").unwrap();
    let spec: serde_json::Value = serde_norway::from_str(spec).unwrap();
    let bundle = serde_json::json!({"url": format!("file://{}", file.display()), "sha256": sha256(&file)});
    assert_eq!(spec, serde_json::json!({"packages": {"bundle": bundle}}));
    assert_eq!((&json["url"], &json["sha256"]), (&bundle["url"], &bundle["sha256"]));
}

#[test]
fn a_directory_without_flux_is_not_bundled() {
    let directory = tempfile::tempdir().unwrap();
    let (from, out) = (directory.path().join("flux"), directory.path().join("flux.tar.gz"));
    let refused = |from: &Path, out: &Path, word: &str| {
        let error = create(from, out).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        assert_eq!(error.exit_code(), 2, "{error}");
        assert!(!out.exists());
    };
    refused(&from, &out, "no such directory");
    fs::create_dir(&from).unwrap();
    refused(&from, &out, "no bin/flux");
    installed_flux(&from);
    refused(&from, &from.join("flux.tar.gz"), "into the directory that it packs");
    symlink("../../outside", from.join("lib/out")).unwrap();
    refused(&from, &out, "out of /opt/flux");
    fs::remove_file(from.join("lib/out")).unwrap();
    symlink("/tmp/libx.so", from.join("lib/out")).unwrap();
    refused(&from, &out, "users can write to /tmp");
    fs::remove_file(from.join("lib/out")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();
    refused(&from, &out, "socket");
    let usr =
        CreateBundle { from_prefix: Some(from), out, compiled_prefix: Some("/usr".into()), ..CreateBundle::default() };
    assert!(usr.run().unwrap_err().to_string().contains("directory that every host has"));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is left of what was not made");
    let inspected = InspectBundle { file: "/proc/version".into(), output: OutputFormat::Text }.run();
    assert_eq!(inspected.unwrap_err().exit_code(), 2);
}

/// Without its configuration, Flux loads another scheduler, and says so nowhere.
#[test]
fn a_flux_whose_configuration_is_elsewhere_is_packed_with_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let (from, out) = (directory.path().join("from"), directory.path().join("flux.tar.gz"));
    installed_flux(&from);
    for (configuration, is_packed) in [("/etc/flux", false), ("/opt/flux/etc/flux", true)] {
        fs::write(
            from.join("bin/flux"),
            format!("#!/bin/sh\n[ \"$*\" = 'config builtin confdir' ] && echo {configuration}\n"),
        )
        .unwrap();
        let said = create(&from, &out).unwrap();
        assert_eq!(
            !said.contains("warning: this Flux reads /etc/flux, which is not in the bundle"),
            is_packed,
            "{said}"
        );
    }
}

#[test]
fn a_flux_that_does_not_answer_is_packed_all_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let (from, out) = (directory.path().join("from"), directory.path().join("flux.tar.gz"));
    installed_flux(&from);
    // Its child keeps the output open, too.
    fs::write(from.join("bin/flux"), "#!/bin/sh\nsleep 1000 &\nsleep 1000\n").unwrap();
    create(&from, &out).unwrap();
}

/// A bundle with entries that no honest tool writes.
struct Forged(tar::Builder<GzEncoder<Vec<u8>>>);

impl Forged {
    fn new() -> Self {
        Self::of("/opt/flux", PLATFORM)
    }

    fn of(prefix: &str, platform: &str) -> Self {
        let mut forged = Self(tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast())));
        let manifest = format!(
            r#"{{"format":1,"kind":"tree","prefix":"{prefix}","platform":"{platform}","created_by":"a test"}}"#
        );
        forged.file(BUNDLE_MANIFEST, manifest.as_bytes());
        forged.file("bin/flux", b"#!/bin/sh\n");
        forged
    }

    fn file(&mut self, path: &str, content: &[u8]) -> &mut Self {
        self.entry(EntryType::Regular, path, None, content)
    }

    fn entry(&mut self, kind: EntryType, path: &str, target: Option<&str>, content: &[u8]) -> &mut Self {
        let mut header = Header::new_gnu();
        // Past the checks of the setters.
        header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
        if let Some(target) = target {
            header.as_gnu_mut().unwrap().linkname[..target.len()].copy_from_slice(target.as_bytes());
        }
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_size(content.len() as u64);
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap().finish().unwrap()
    }

    fn host(self) -> Host {
        host_with(&self.bytes())
    }
}

fn host_with(bytes: &[u8]) -> Host {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    Host::with(file.path())
}

#[test]
fn no_entry_gets_out_of_its_directory() {
    use EntryType::{Block, Char, Directory, Fifo, Link, Regular, Symlink};
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    fs::write(&victim, "safe").unwrap();
    let (absolute, directory) = (victim.to_str().unwrap(), outside.path().to_str().unwrap());
    type Entries<'a> = &'a [(EntryType, &'a str, Option<&'a str>)];
    let cases: [(Entries<'_>, &str); 16] = [
        (&[(Regular, "../victim", None)], "outside of the tree"),
        (&[(Regular, "lib/../../victim", None)], "outside of the tree"),
        (&[(Regular, absolute, None)], "outside of the tree"),
        (&[(Directory, "../victim", None)], "outside of the tree"),
        (&[(Symlink, "lib/link", Some("../../victim"))], "out of "),
        (&[(Symlink, "link", Some(".."))], "out of "),
        (&[(Symlink, "link", None)], "to nothing"),
        (&[(Link, "link", Some(absolute))], "hard link out of"),
        (&[(Link, "link", Some("../victim"))], "hard link out of"),
        (&[(Link, "link", Some("not/there"))], "not a file before it"),
        (&[(Symlink, "door", Some(directory)), (Regular, "door/victim", None)], "written through door"),
        (&[(Symlink, "door", Some(directory)), (Directory, "door", None)], "in the place of a file"),
        (&[(Symlink, "door", Some(directory)), (Link, "link", Some("door/victim"))], "written through door"),
        (&[(Char, "null", None)], "is a device"),
        (&[(Block, "disk", None)], "is a device"),
        (&[(Fifo, "fifo", None)], "is a device"),
    ];
    for (entries, words) in cases {
        // A symlink into the prefix that the bundle is for may be in it.
        let mut forged = Forged::of(directory, PLATFORM);
        for (kind, path, target) in entries {
            let content: &[u8] = if *kind == Regular { b"evil" } else { b"" };
            forged.entry(*kind, path, *target, content);
        }
        let refusal = forged.host().refused();
        assert!(refusal.message.contains(words), "{words}: {refusal}");
        assert!(!refusal.transient, "{refusal}");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "safe");
    }
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
}

#[test]
fn a_bundle_has_no_symlink_to_where_users_can_write() {
    for (target, words) in [
        ("/tmp/x.so", "users can write to /tmp"),
        ("/home/user/x.so", "users can write to /home"),
        ("/proc/self/root/tmp/x.so", "users can write to /proc"),
        ("/opt/flux/../../tmp/x.so", "must have no `..`"),
        ("/", "users can write to"),
    ] {
        let mut forged = Forged::new();
        forged.entry(EntryType::Symlink, "lib/x.so", Some(target), b"");
        let refusal = forged.host().refused();
        assert!(refusal.message.contains(&format!("lib/x.so is a symlink to {target}")), "{refusal}");
        assert!(refusal.message.contains(words) && !refusal.transient, "{refusal}");
    }
    let mut forged = Forged::of("/home/build/flux", PLATFORM);
    forged.entry(EntryType::Symlink, "lib/x.so", Some("/home/build/flux/lib/y.so"), b"");
    forged.host().link().unwrap();
}

#[test]
fn nobody_but_root_can_write_what_a_bundle_brought() {
    use EntryType::{Directory, Regular};
    let mut forged = Forged::new();
    for (kind, path, mode) in
        [(Directory, "share/", 0o777), (Regular, "share/open", 0o666), (Regular, "share/group", 0o464)]
    {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(0);
        forged.0.append_data(&mut header, path, io::empty()).unwrap();
    }
    let host = forged.host();
    host.link().unwrap();
    for (path, mode) in [("share", 0o755), ("share/open", 0o644), ("share/group", 0o444)] {
        assert_eq!(fs::metadata(host.environment().join(path)).unwrap().mode() & 0o7777, mode, "{path}");
    }
}

#[test]
fn a_bundle_gives_nobody_but_the_owner_the_right_to_write() {
    let directory = tempfile::tempdir().unwrap();
    let (from, bundle) = (directory.path().join("flux"), directory.path().join("flux.tar.gz"));
    installed_flux(&from);
    for (path, mode) in [("share", 0o2777), ("bin", 0o775), ("lib/libflux.so.1", 0o666), ("bin/flux", 0o777)] {
        fs::set_permissions(from.join(path), PermissionsExt::from_mode(mode)).unwrap();
    }
    create(&from, &bundle).unwrap();
    let mut tar = tar::Archive::new(GzDecoder::new(File::open(&bundle).unwrap()));
    let mut modes = std::collections::BTreeMap::new();
    for entry in tar.entries().unwrap() {
        let entry = entry.unwrap();
        let path = entry.path().unwrap().display().to_string();
        modes.insert(path.trim_end_matches('/').to_owned(), entry.header().mode().unwrap());
    }
    let of = |path: &str| modes[path];
    assert_eq!(["share", "bin", "bin/flux", "bin/flux-again"].map(of), [0o755; 4]);
    assert_eq!(of("lib/libflux.so.1"), 0o644);
}

#[test]
fn a_symlink_that_is_replaced_is_not_followed() {
    let outside = tempfile::NamedTempFile::new().unwrap();
    fs::write(outside.path(), "safe").unwrap();
    let mut forged = Forged::of(outside.path().to_str().unwrap(), PLATFORM);
    for name in ["file", packages::ENVIRONMENT_MARKER] {
        forged.entry(EntryType::Symlink, name, outside.path().to_str(), b"");
    }
    forged.file("file", b"new");
    let host = forged.host();
    host.link().unwrap();
    assert_eq!(fs::read_to_string(outside.path()).unwrap(), "safe");
    assert_eq!(fs::read_to_string(host.environment().join("file")).unwrap(), "new");
    assert_eq!(packages::ready(host.prefix.path()), [host.set.digest()]);
}

#[test]
fn a_bundle_for_another_architecture_is_refused_by_name() {
    let refusal = Forged::of("/opt/flux", "linux-aarch64").host().refused();
    assert!(refusal.message.contains("is for linux-aarch64, but this host is linux-64"), "{refusal}");
    for prefix in ["/usr", "/", "opt/flux", "/opt/../etc"] {
        let refusal = Forged::of(prefix, PLATFORM).host().refused();
        assert!(refusal.message.contains("its prefix"), "{refusal}");
    }
}

#[test]
fn the_error_about_an_ordinary_tarball_names_bundle_create() {
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    let mut header = Header::new_gnu();
    header.set_size(0);
    tar.append_data(&mut header, "bin/flux", io::empty()).unwrap();
    let refusal = host_with(&tar.into_inner().unwrap().finish().unwrap()).refused();
    assert!(refusal.message.contains("flux-distribute bundle create"), "{refusal}");
    let refusal = host_with(b"PK\x03\x04 not a tarball at all").refused();
    assert!(refusal.message.contains("not a .tar.gz"), "{refusal}");
}

#[test]
fn a_truncated_bundle_says_so_wherever_it_ends() {
    let mut forged = Forged::new();
    let mut state = 1_u32;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let content = std::iter::repeat_with(&mut noise).take(100_000).collect::<Vec<_>>();
    let whole = {
        forged.file("share/big", &content);
        forged.bytes()
    };
    host_with(&whole).link().unwrap();
    for length in [50, 400, whole.len() / 2, whole.len() - 9, whole.len() - 1] {
        let refusal = host_with(&whole[..length]).refused();
        assert!(refusal.message.contains("truncated"), "at {length}: {refusal}");
    }
}

#[test]
fn a_bundle_that_was_damaged_on_the_host_is_fetched_again() {
    let host = Forged::new().host();
    let mut bytes = fs::read(host.archive()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs::write(host.archive(), bytes).unwrap();
    let refusal = host.refused();
    assert!(refusal.transient && refusal.message.contains("fetched again"), "{refusal}");
    assert!(!host.archive().exists());
}

#[test]
fn a_bomb_is_stopped_before_it_fills_the_disk() {
    let mut forged = Forged::new();
    forged.file("share/zeros", &vec![0; 200 << 20]);
    let refusal = forged.host().refused();
    assert!(refusal.message.contains("times its own size"), "{refusal}");
}

#[test]
fn a_tree_without_flux_never_goes_live() {
    let dead = |target: &str| {
        let mut forged = Forged::new();
        forged.entry(EntryType::Symlink, "bin/flux", Some(target), b"");
        forged.host()
    };
    for target in ["/usr/bin/flux", "missing", "flux", "/opt/flux/bin/missing"] {
        let refusal = dead(target).refused();
        assert!(refusal.message.contains("no bin/flux"), "{target}: {refusal}");
    }
    let mut alive = Forged::new();
    alive.file("libexec/flux", b"#!/bin/sh\n");
    alive.entry(EntryType::Symlink, "bin/flux", Some("/opt/flux/libexec/flux"), b"");
    alive.host().link().unwrap();
}
