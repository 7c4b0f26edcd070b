//! What is in an archive was made elsewhere: no byte of it is believed, and every refusal names the package and where it
//! is from.

use std::io::Write;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::EntryType;

use super::{verify::verify, *};

/// Where the archives are said to be from.
const SOURCE: &str = "http://channel.invalid/linux-64";

/// An entry of a tar, whatever is in it.
struct Entry {
    path: String,
    kind: EntryType,
    target: String,
    bytes: Vec<u8>,
    mode: u32,
}

impl Entry {
    fn file(path: &str, bytes: &[u8]) -> Self {
        Self { path: path.into(), kind: EntryType::Regular, target: String::new(), bytes: bytes.into(), mode: 0o755 }
    }

    fn link(kind: EntryType, path: &str, target: &str) -> Self {
        Self { kind, target: target.into(), ..Self::file(path, b"") }
    }

    fn symlink(path: &str, target: &str) -> Self {
        Self::link(EntryType::Symlink, path, target)
    }
}

fn tar(entries: &[Entry]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for entry in entries {
        let mut header = tar::Header::new_ustar();
        // Byte for byte: the crate would not write what we want to be refused.
        header.as_mut_bytes()[..entry.path.len()].copy_from_slice(entry.path.as_bytes());
        header.as_mut_bytes()[157..157 + entry.target.len()].copy_from_slice(entry.target.as_bytes());
        header.set_entry_type(entry.kind);
        header.set_mode(entry.mode);
        header.set_size(entry.bytes.len() as u64);
        header.set_cksum();
        tar.append(&header, &entry.bytes[..]).unwrap();
    }
    tar.into_inner().unwrap()
}

fn info(name: &str, paths: &[Value]) -> Vec<Entry> {
    let index = json!({"name": name, "version": "1.0", "build": "0", "build_number": 0, "depends": [],
                       "subdir": PLATFORM});
    let paths = json!({"paths": paths, "paths_version": 1});
    vec![
        Entry::file("info/index.json", index.to_string().as_bytes()),
        Entry::file("info/paths.json", paths.to_string().as_bytes()),
    ]
}

/// The info of a Python package for any platform.
fn with_entry_points(name: &str, entry_points: &[&str], paths: &[Value]) -> Vec<Entry> {
    let index = json!({"name": name, "version": "1.0", "build": "0", "build_number": 0, "depends": [],
                       "subdir": "noarch", "noarch": "python"});
    let links = json!({"noarch": {"type": "python", "entry_points": entry_points}, "package_metadata_version": 1});
    vec![
        Entry::file("info/index.json", index.to_string().as_bytes()),
        Entry::file("info/link.json", links.to_string().as_bytes()),
        Entry::file("info/paths.json", json!({"paths": paths, "paths_version": 1}).to_string().as_bytes()),
    ]
}

/// What an honest info/paths.json says.
fn honest(entries: &[Entry]) -> Vec<Value> {
    let kind = |entry: &Entry| if entry.kind == EntryType::Symlink { "softlink" } else { "hardlink" };
    entries.iter().map(|entry| json!({"_path": entry.path, "path_type": kind(entry)})).collect()
}

fn conda(info: &[Entry], content: &[Entry]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, entries) in [("pkg-evil-1.0-0.tar.zst", content), ("info-evil-1.0-0.tar.zst", info)] {
        zip.start_file(name, stored).unwrap();
        zip.write_all(&zstd::encode_all(&tar(entries)[..], 3).unwrap()).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

fn tar_bz2(info: &[Entry], content: &[Entry]) -> Vec<u8> {
    let mut packed = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    let all = [tar(info), tar(content)];
    // Two empty blocks end a tar.
    packed.write_all(&all[0][..all[0].len() - 1024]).unwrap();
    packed.write_all(&all[1]).unwrap();
    packed.finish().unwrap()
}

/// A package of the lock, and its archive as it lies in `pkgs/`.
struct Lie {
    file_name: String,
    archive: Vec<u8>,
}

impl Lie {
    fn new(file_name: &str, archive: Vec<u8>) -> Self {
        Self { file_name: file_name.to_owned(), archive }
    }

    /// Of both kinds of archives.
    fn both(info: &[Entry], content: &[Entry]) -> [Self; 2] {
        [Self::new("evil-1.0-0.conda", conda(info, content)), Self::new("evil-1.0-0.tar.bz2", tar_bz2(info, content))]
    }

    fn sha256(&self) -> String {
        hex::encode(Sha256::digest(&self.archive))
    }
}

fn lock(packages: &[Lie]) -> PackageSet {
    let each = |line: &dyn Fn(&Lie) -> String| packages.iter().map(line).collect::<String>();
    let used = each(&|lie| format!("      - conda: {SOURCE}/{}\n", lie.file_name));
    let locked = each(&|lie| {
        format!("- conda: {SOURCE}/{}\n  sha256: {}\n  size: {}\n", lie.file_name, lie.sha256(), lie.archive.len())
    });
    let lock = format!(
        "version: 6\nenvironments:\n  default:\n    channels:\n    - url: {SOURCE}/\n    packages:\n      {PLATFORM}:\n\
         {used}packages:\n{locked}"
    );
    PackageSet::Lock { lock, question: String::new() }
}

/// A host that has fetched the archives of `packages`.
fn fetched(packages: &[Lie]) -> (Host, PackageSet) {
    let host = Host::new();
    for lie in packages {
        let extension = lie.file_name.trim_start_matches("evil-1.0-0.").trim_start_matches("good-1.0-0.");
        fs::write(host.pkgs().join(format!("{}.{extension}", lie.sha256())), &lie.archive).unwrap();
    }
    (host, lock(packages))
}

/// Links `packages`, whose archives are what the lock says, and tells what was said.
async fn told(packages: &[Lie]) -> Refusal {
    let (host, set) = fetched(packages);
    let refusal = host.link(&set).await.unwrap_err();
    assert!(host.envs().is_empty(), "{:?} is left", host.envs());
    refusal
}

/// A directory outside of the environment that a package may have a symlink to, since only root can write beside it.
fn outside() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/lib").unwrap()
}

#[tokio::test]
async fn an_entry_outside_of_the_tree_is_refused_before_it_is_written() {
    if skips_without([Need::Root]) {
        return;
    }
    let outside = outside();
    let out = outside.path().to_str().unwrap();
    let secret = outside.path().join("secret");
    fs::write(&secret, "not yours").unwrap();
    let absolute = format!("{out}/evil");
    let deep = format!("a/{}{absolute}", "../".repeat(20));
    for (content, words) in [
        (vec![Entry::file("../evil", b"x")], "its entry ../evil would be outside of the tree"),
        (vec![Entry::file(&deep, b"x")], "would be outside of the tree"),
        (vec![Entry::file(&absolute, b"x")], "would be outside of the tree"),
        (vec![Entry::symlink("lib/evil", "../../etc")], "its entry lib/evil is a symlink out of the environment"),
        (
            vec![Entry::symlink("lib/out", out), Entry::file("lib/out/evil", b"x")],
            "its entry lib/out/evil would be written through lib/out",
        ),
        (
            vec![Entry::symlink("lib/out", out), Entry::link(EntryType::Directory, "lib/out/evil/", "")],
            "would be written through lib/out",
        ),
        (
            vec![Entry::symlink("out", "."), Entry::symlink("out/evil", out), Entry::file("evil/evil", b"x")],
            "its entry out/evil would be written through out",
        ),
        (
            vec![Entry::link(EntryType::Link, "evil", secret.to_str().unwrap())],
            "its entry evil is a hard link out of the tree",
        ),
        (vec![Entry::link(EntryType::Link, "evil", "../../secret")], "is a hard link out of the tree"),
        (
            vec![Entry::symlink("lib/out", out), Entry::link(EntryType::Link, "evil", "lib/out/secret")],
            "would be written through lib/out",
        ),
        (vec![Entry::symlink("s", &absolute), Entry::link(EntryType::Link, "evil", "s")], "is a hard link to s"),
        (vec![Entry::link(EntryType::Char, "dev/null", "")], "its entry dev/null is a device"),
        (vec![Entry::link(EntryType::Block, "dev/sda", "")], "is a device"),
        (vec![Entry::link(EntryType::Fifo, "run/fifo", "")], "its entry run/fifo is a device, a fifo"),
        (vec![Entry::file("lib/a/b", b"x"), Entry::file("lib/a", b"x")], "its entry lib/a would replace a directory"),
        (vec![Entry::file("lib/a", b"x"), Entry::file("lib/a/b", b"x")], "would be written through lib/a"),
    ] {
        for lie in Lie::both(&info("evil", &honest(&content)), &content) {
            let refusal = told(std::slice::from_ref(&lie)).await;
            let from = format!("can't use package evil-1.0-0 from {SOURCE}/{}: ", lie.file_name);
            assert!(refusal.message.starts_with(&from) && refusal.message.contains(words), "{words}: {refusal}");
            assert!(!refusal.transient, "{refusal}");
        }
    }
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1, "something was written outside");
    assert_eq!(fs::read_to_string(secret).unwrap(), "not yours");
}

#[tokio::test]
async fn set_user_id_bits_of_a_package_are_dropped_with_a_warning() {
    let with_mode = |path: &str, mode| Entry { mode, ..Entry::file(path, b"#!/bin/sh\n") };
    let content = [with_mode("bin/flux", 0o4755), with_mode("bin/other", 0o2755), with_mode("bin/plain", 0o755)];
    for lie in Lie::both(&info("evil", &honest(&content)), &content) {
        let (host, set) = fetched(&[lie]);
        let linked = host.link(&set).await.unwrap();
        let words = "package evil-1.0-0 has files with set-user-ID or set-group-ID bits, such as bin/flux;";
        assert!(matches!(&linked.warnings[..], [only] if only.starts_with(words)), "{:?}", linked.warnings);
        for path in ["bin/flux", "bin/other", "bin/plain"] {
            let found = fs::metadata(host.environment(&set).join(path)).unwrap();
            assert_eq!(found.permissions().mode() & 0o7777, 0o755, "{path}");
        }
        assert_eq!(host.link(&set).await.unwrap().warnings, Vec::<String>::new(), "it is said once");
    }
}

#[tokio::test]
async fn nobody_but_root_can_write_what_a_package_brought() {
    let with_mode = |path: &str, mode| Entry { mode, ..Entry::file(path, b"#!/bin/sh\n") };
    let directory = Entry { mode: 0o777, ..Entry::link(EntryType::Directory, "share/", "") };
    let files = [with_mode("bin/flux", 0o777), with_mode("share/open", 0o666), with_mode("share/group", 0o2464)];
    let (listed, content) = (honest(&files), files.into_iter().chain([directory]).collect::<Vec<_>>());
    for lie in Lie::both(&info("evil", &listed), &content) {
        let (host, set) = fetched(&[lie]);
        host.link(&set).await.unwrap();
        for (path, mode) in [("bin/flux", 0o755), ("share/open", 0o644), ("share/group", 0o444), ("share", 0o755)] {
            let found = fs::metadata(host.environment(&set).join(path)).unwrap();
            assert_eq!(found.permissions().mode() & 0o7777, mode, "{path}");
        }
        assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    }
}

#[tokio::test]
async fn nobody_but_root_can_write_the_scripts_that_a_python_package_asks_for() {
    let python = [Entry::file("bin/flux", b"#!/bin/sh\n"), Entry::file("bin/python1.0", b"")];
    let evil = with_entry_points("evil", &["evil = evil:main"], &[]);
    let packages = [
        Lie::new("python-1.0-0.conda", conda(&info("python", &honest(&python)), &python)),
        Lie::new("evil-1.0-0.conda", conda(&evil, &[])),
    ];
    let (host, set) = (Host::new(), lock(&packages));
    for lie in &packages {
        fs::write(host.pkgs().join(format!("{}.conda", lie.sha256())), &lie.archive).unwrap();
    }
    host.link(&set).await.unwrap();
    let script = fs::metadata(host.environment(&set).join("bin/evil")).unwrap();
    assert_eq!(script.permissions().mode() & 0o7777, 0o755);
    assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
}

#[tokio::test]
async fn a_file_list_that_does_not_match_the_archive_is_refused() {
    let content = [Entry::file("bin/flux", b"#!/bin/sh\n"), Entry::symlink("etc/host", "/etc/hostname")];
    let patched = |path: &str, kind: &str| json!({"_path": path, "path_type": kind, "file_mode": "text", "prefix_placeholder": "/opt/placeholder"});
    for (path, words) in [
        (json!({"_path": "../../evil", "path_type": "hardlink"}), "../../evil in info/paths.json would be outside"),
        (json!({"_path": "/etc/evil", "path_type": "hardlink"}), "/etc/evil in info/paths.json would be outside"),
        (json!({"_path": "lib/none", "path_type": "hardlink"}), "lib/none in info/paths.json is not in the archive"),
        (json!({"_path": "lib/none", "path_type": "softlink"}), "lib/none in info/paths.json is not in the archive"),
        (json!({"_path": "bin/flux", "path_type": "softlink"}), "bin/flux in info/paths.json is something else"),
        (json!({"_path": "bin", "path_type": "softlink"}), "bin in info/paths.json is not in the archive"),
        // Its target is a file of the host, and would be read.
        (patched("etc/host", "hardlink"), "etc/host in info/paths.json is something else"),
        (patched("etc/host", "softlink"), "etc/host in info/paths.json is a symlink that should be patched"),
        (json!({"_path": "conda-meta/other-1.0-0.json", "path_type": "hardlink"}), "would be the record of a package"),
    ] {
        let mut paths = honest(&content);
        paths.push(path);
        for lie in Lie::both(&info("evil", &paths), &content) {
            let refusal = told(&[lie]).await;
            assert!(refusal.message.contains("evil-1.0-0") && refusal.message.contains(words), "{words}: {refusal}");
            assert!(!refusal.transient, "{refusal}");
        }
    }
}

#[tokio::test]
async fn a_package_with_another_packages_metadata_is_refused() {
    let content = [Entry::file("bin/flux", b"x")];
    for lie in Lie::both(&info("..", &honest(&content)), &content) {
        let refusal = told(&[lie]).await;
        assert!(refusal.message.contains("evil-1.0-0") && !refusal.transient, "{refusal}");
    }
    for lie in Lie::both(&info("other", &honest(&content)), &content) {
        let refusal = told(&[lie]).await;
        assert!(refusal.message.contains("it is package other, but the lock has it as evil"), "{refusal}");
    }
}

#[tokio::test]
async fn a_zip_bomb_is_stopped_during_unpacking() {
    let content = [Entry::file("bin/flux", &vec![0; 200 << 20])];
    for lie in Lie::both(&info("evil", &honest(&content)), &content) {
        assert!(lie.archive.len() < 1 << 20);
        let refusal = told(&[lie]).await;
        assert!(refusal.message.contains("evil-1.0-0"), "{refusal}");
        assert!(refusal.message.contains("it holds more than 100 times its own size"), "{refusal}");
        assert!(!refusal.transient, "{refusal}");
    }
}

#[tokio::test]
async fn a_zstd_frame_that_needs_too_much_memory_is_refused() {
    let content = [Entry::file("bin/flux", b"x")];
    let mut lie = Lie::new("evil-1.0-0.conda", conda(&info("evil", &honest(&content)), &content));
    // The descriptors of both frames: no single segment, and a window of 2 GiB.
    let frames = lie.archive.windows(4).enumerate().filter(|(_, w)| w == &[0x28, 0xb5, 0x2f, 0xfd]);
    for at in frames.map(|(at, _)| at).collect::<Vec<_>>() {
        lie.archive[at + 4..at + 6].copy_from_slice(&[0, 21 << 3]);
    }
    let refusal = told(&[lie]).await;
    assert!(refusal.message.contains("it holds more than 128 MiB of window"), "{refusal}");
}

#[tokio::test]
async fn a_later_zstd_frame_gets_no_more_memory_than_the_first() {
    let content = [Entry::file("bin/flux", b"x")];
    let mut zip = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, entries) in [("pkg-a.tar.zst", &content[..]), ("info-a.tar.zst", &info("evil", &honest(&content)))] {
        zip.start_file(name, stored).unwrap();
        zip.write_all(&zstd::encode_all(&tar(entries)[..], 3).unwrap()).unwrap();
        // A window of 128 MiB, and one empty block.
        zip.write_all(&[0x28, 0xb5, 0x2f, 0xfd, 0, 17 << 3, 1, 0, 0]).unwrap();
    }
    let refusal = told(&[Lie::new("evil-1.0-0.conda", zip.finish().unwrap().into_inner())]).await;
    assert!(refusal.message.contains("evil-1.0-0") && refusal.message.contains("too much memory"), "{refusal}");
}

#[tokio::test]
async fn a_name_that_would_fill_the_memory_is_refused() {
    let named = |kind, bytes: usize| {
        let name = Entry { bytes: vec![b'a'; bytes], ..Entry::link(kind, "name", "") };
        [Entry::file("bin/flux", &noise(3 << 20)), name, Entry::file("bin/other", b"x")]
    };
    for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader] {
        for lie in Lie::both(&info("evil", &[]), &named(kind, 2 << 20)) {
            let refusal = told(&[lie]).await;
            let words = ["package evil-1.0-0 from", "it holds more than 1 MiB of names and headers for one entry"];
            assert!(words.iter().all(|words| refusal.message.contains(words)), "{kind:?}: {refusal}");
            assert!(!refusal.transient, "{refusal}");
        }
    }
}

#[tokio::test]
async fn a_truncated_archive_or_another_file_is_refused() {
    let content = [Entry::file("bin/flux", &noise(300_000))];
    for lie in Lie::both(&info("evil", &honest(&content)), &content) {
        for keep in [lie.archive.len() - 1, lie.archive.len() - 100_000, 100, 3, 0] {
            let cut = Lie::new(&lie.file_name, lie.archive[..keep].to_vec());
            let refusal = told(&[cut]).await;
            assert!(refusal.message.starts_with("can't use package evil-1.0-0 from"), "{keep}: {refusal}");
            assert!(!refusal.transient, "{keep}: {refusal}");
        }
        let other = Lie::new(&lie.file_name, b"<html>404</html>".to_vec());
        assert!(told(&[other]).await.message.contains("neither a .conda nor a .tar.bz2"));
    }
}

#[tokio::test]
async fn an_archive_with_a_flipped_bit_is_fetched_again_and_never_goes_live() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let archives = host.archives();
    for archive in archives.iter().filter(|path| path.extension().is_some()) {
        let mut bytes = fs::read(archive).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(archive, &bytes).unwrap();
        let refusal = host.link(&set).await.unwrap_err();
        assert!(refusal.transient && refusal.message.contains("was damaged"), "{refusal}");
        assert!(["flux-core-1.0-0", "libflux-1.0-0"].iter().any(|n| refusal.message.contains(n)), "{refusal}");
        assert!(!archive.exists(), "the next fetch must bring it again");
        assert!(host.envs().is_empty());
        host.fetch(&set).await.unwrap();
    }
    host.link(&set).await.unwrap();
}

#[tokio::test]
async fn one_package_can_not_write_through_the_symlink_of_another() {
    if skips_without([Need::Root]) {
        return;
    }
    let outside = outside();
    let out = outside.path().to_str().unwrap();
    let door = [Entry::symlink("share", out)];
    let guest = [Entry::file("share/evil", b"x"), Entry::file("bin/flux", b"#!/bin/sh\n")];
    // Whichever comes first.
    for [first, second] in [["evil", "good"], ["good", "evil"]] {
        let packages = [
            Lie::new(&format!("{first}-1.0-0.conda"), conda(&info(first, &honest(&door)), &door)),
            Lie::new(&format!("{second}-1.0-0.conda"), conda(&info(second, &honest(&guest)), &guest)),
        ];
        let (host, set) = (Host::new(), lock(&packages));
        for lie in &packages {
            fs::write(host.pkgs().join(format!("{}.conda", lie.sha256())), &lie.archive).unwrap();
        }
        // It may be refused or one of them may win; nothing but the outside matters.
        let _ = host.link(&set).await;
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "something was written outside");
    }
}

#[tokio::test]
async fn no_entry_point_is_written_through_a_symlink_or_over_a_file() {
    if skips_without([Need::Root]) {
        return;
    }
    let outside = outside();
    let out = outside.path().join("evil");
    let out = out.to_str().unwrap();
    let python = [Entry::file("lib/flux", b""), Entry::file("lib/python1.0", b"")];
    let entry = |name: &str| format!("{name} = evil:main");
    for (door, entry_points) in [
        (vec![Entry::symlink("bin/evil", out)], vec![entry("evil")]),
        (vec![Entry::symlink("python-scripts/evil", out)], vec![entry("evil")]),
        (vec![Entry::symlink("bin", outside.path().to_str().unwrap())], vec![entry("evil")]),
        (vec![Entry::file("bin/evil", b"x")], vec![entry("evil")]),
    ] {
        let entry_points: Vec<&str> = entry_points.iter().map(String::as_str).collect();
        let both = conda(&with_entry_points("evil", &entry_points, &honest(&door)), &door);
        let mut sets = vec![vec![Lie::new("evil-1.0-0.conda", both)]];
        // Whichever comes first.
        for [first, second] in [["evil", "good"], ["good", "evil"]] {
            sets.push(vec![
                Lie::new(&format!("{first}-1.0-0.conda"), conda(&with_entry_points(first, &entry_points, &[]), &[])),
                Lie::new(
                    &format!("{second}-1.0-0.conda"),
                    conda(&with_entry_points(second, &[], &honest(&door)), &door),
                ),
            ]);
        }
        for mut packages in sets {
            packages.push(Lie::new("python-1.0-0.conda", conda(&info("python", &honest(&python)), &python)));
            let (host, set) = (Host::new(), lock(&packages));
            for lie in &packages {
                fs::write(host.pkgs().join(format!("{}.conda", lie.sha256())), &lie.archive).unwrap();
            }
            let linked = host.link(&set).await;
            assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "something was written outside");
            let refusal = linked.unwrap_err();
            assert!(refusal.message.contains("bin/evil of package ") && !refusal.transient, "{refusal}");
            assert!(refusal.message.contains("is an entry point"), "{refusal}");
        }
    }
}

#[tokio::test]
async fn a_package_has_no_symlink_to_where_users_can_write() {
    for (target, place) in
        [("/tmp/x.so", "/tmp"), ("/var/tmp", "/var/tmp"), ("/proc/self/cwd/x.so", "/proc"), ("/", "/")]
    {
        let content = [Entry::symlink("lib/x.so", target)];
        for lie in Lie::both(&info("evil", &honest(&content)), &content) {
            let refusal = told(&[lie]).await;
            let words = format!("its entry lib/x.so is a symlink to {target}, and users can write to {place}");
            assert!(refusal.message.contains(&words) && !refusal.transient, "{refusal}");
        }
    }
}

#[tokio::test]
async fn an_absolute_symlink_is_kept_and_not_followed() {
    let content = [
        Entry::file("bin/flux", b"#!/bin/sh\n"),
        Entry::symlink("etc/localtime", "/etc/localtime"),
        Entry::symlink("lib/libc.so", "../bin/flux"),
    ];
    for lie in Lie::both(&info("evil", &honest(&content)), &content) {
        let extension = lie.file_name.trim_start_matches("evil-1.0-0.").to_owned();
        let packages = [lie];
        let (host, set) = (Host::new(), lock(&packages));
        fs::write(host.pkgs().join(format!("{}.{extension}", packages[0].sha256())), &packages[0].archive).unwrap();
        host.link(&set).await.unwrap();
        let environment = host.environment(&set);
        assert_eq!(fs::read_link(environment.join("etc/localtime")).unwrap(), Path::new("/etc/localtime"));
        assert_eq!(fs::read_link(environment.join("lib/libc.so")).unwrap(), Path::new("../bin/flux"));
    }
}
