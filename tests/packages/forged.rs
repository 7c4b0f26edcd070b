//! Archives that say anything, byte for byte.

use std::io::Write;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::EntryType;

use super::*;

/// Where the archives are said to be from.
pub(super) const SOURCE: &str = "http://channel.invalid/linux-64";

/// An entry of a tar, whatever is in it.
pub(super) struct Entry {
    pub(super) path: String,
    pub(super) kind: EntryType,
    pub(super) target: String,
    pub(super) bytes: Vec<u8>,
    pub(super) mode: u32,
}

impl Entry {
    pub(super) fn file(path: &str, bytes: &[u8]) -> Self {
        Self { path: path.into(), kind: EntryType::Regular, target: String::new(), bytes: bytes.into(), mode: 0o755 }
    }

    pub(super) fn link(kind: EntryType, path: &str, target: &str) -> Self {
        Self { kind, target: target.into(), ..Self::file(path, b"") }
    }

    pub(super) fn symlink(path: &str, target: &str) -> Self {
        Self::link(EntryType::Symlink, path, target)
    }
}

pub(super) fn tar(entries: &[Entry]) -> Vec<u8> {
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

pub(super) fn info(name: &str, paths: &[Value]) -> Vec<Entry> {
    let index = json!({"name": name, "version": "1.0", "build": "0", "build_number": 0, "depends": [],
                       "subdir": PLATFORM});
    let paths = json!({"paths": paths, "paths_version": 1});
    vec![
        Entry::file("info/index.json", index.to_string().as_bytes()),
        Entry::file("info/paths.json", paths.to_string().as_bytes()),
    ]
}

/// The info of a Python package for any platform.
pub(super) fn with_entry_points(name: &str, entry_points: &[&str], paths: &[Value]) -> Vec<Entry> {
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
pub(super) fn honest(entries: &[Entry]) -> Vec<Value> {
    let kind = |entry: &Entry| if entry.kind == EntryType::Symlink { "softlink" } else { "hardlink" };
    entries.iter().map(|entry| json!({"_path": entry.path, "path_type": kind(entry)})).collect()
}

pub(super) fn conda(info: &[Entry], content: &[Entry]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, entries) in [("pkg-evil-1.0-0.tar.zst", content), ("info-evil-1.0-0.tar.zst", info)] {
        zip.start_file(name, stored).unwrap();
        zip.write_all(&zstd::encode_all(&tar(entries)[..], 3).unwrap()).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

pub(super) fn tar_bz2(info: &[Entry], content: &[Entry]) -> Vec<u8> {
    let mut packed = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    let all = [tar(info), tar(content)];
    // Two empty blocks end a tar.
    packed.write_all(&all[0][..all[0].len() - 1024]).unwrap();
    packed.write_all(&all[1]).unwrap();
    packed.finish().unwrap()
}

/// A package of the lock, and its archive as it lies in `pkgs/`.
pub(super) struct Lie {
    pub(super) file_name: String,
    pub(super) archive: Vec<u8>,
}

impl Lie {
    pub(super) fn new(file_name: &str, archive: Vec<u8>) -> Self {
        Self { file_name: file_name.to_owned(), archive }
    }

    /// Of both kinds of archives.
    pub(super) fn both(info: &[Entry], content: &[Entry]) -> [Self; 2] {
        [Self::new("evil-1.0-0.conda", conda(info, content)), Self::new("evil-1.0-0.tar.bz2", tar_bz2(info, content))]
    }

    pub(super) fn sha256(&self) -> String {
        hex::encode(Sha256::digest(&self.archive))
    }
}

pub(super) fn lock(packages: &[Lie]) -> PackageSet {
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
pub(super) fn fetched(packages: &[Lie]) -> (Host, PackageSet) {
    let host = Host::new();
    for lie in packages {
        let (_, extension) = lie.file_name.split_once("-1.0-0.").unwrap();
        fs::write(host.pkgs().join(format!("{}.{extension}", lie.sha256())), &lie.archive).unwrap();
    }
    (host, lock(packages))
}

/// The lock says these `lines` about a package too.
pub(super) fn also_locked(set: PackageSet, package: &Lie, lines: &str) -> PackageSet {
    let PackageSet::Lock { lock, question } = set else { panic!("not a lock") };
    let size = format!("  size: {}\n", package.archive.len());
    PackageSet::Lock { lock: lock.replace(&size, &format!("{size}{lines}")), question }
}

/// Links `packages`, whose archives are what the lock says, and tells what was said.
pub(super) async fn told(packages: &[Lie]) -> Refusal {
    let (host, set) = fetched(packages);
    let refusal = host.link(&set).await.unwrap_err();
    assert!(host.envs().is_empty(), "{:?} is left", host.envs());
    refusal
}

/// A directory outside of the environment that a package may have a symlink to, since only root can write beside it.
pub(super) fn outside() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/lib").unwrap()
}
