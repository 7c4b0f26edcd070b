//! The names in `pkgs/` and their one truth, sha256.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use sha2::{Digest, Sha256};

use super::lock;
use crate::api::PackageSet;

/// The names in `pkgs/` of every archive of the set, of all its platforms: what an agent may serve to others.
pub fn archive_names(set: &PackageSet) -> Vec<String> {
    let mut names = match set {
        PackageSet::Bundle(_) => vec![bundle_name(&set.digest())],
        PackageSet::Lock { lock, .. } => {
            let platforms = lock::platforms(lock).unwrap_or_default();
            let packages = platforms.iter().filter_map(|platform| lock::packages(lock, platform).ok());
            packages.flatten().map(|package| package.archive).collect()
        }
    };
    names.sort_unstable();
    names.dedup();
    names
}

/// True when every archive of `set` for `platform` is in `pkgs`: by its name, the content is checked by who receives it.
pub fn holds(set: &PackageSet, digest: &str, platform: &str, pkgs: &Path) -> bool {
    let is_there = |name: &str| pkgs.join(name).is_file();
    match set {
        PackageSet::Bundle(_) => is_digest(digest) && is_there(&bundle_name(digest)),
        PackageSet::Lock { lock, .. } => {
            lock::packages(lock, platform).is_ok_and(|all| all.iter().all(|package| is_there(&package.archive)))
        }
    }
}

/// What a bundle's archive is called in `pkgs/`.
pub(super) fn bundle_name(digest: &str) -> String {
    format!("bundle-{digest}.tar.gz")
}

/// A digest becomes part of paths, so it is looked at before it does.
pub(super) fn is_digest(digest: &str) -> bool {
    (1..=64).contains(&digest.len()) && digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// One of the names in `pkgs/`: [`bundle_name`], or the sha256 of a package with one of conda's endings.
pub(super) fn is_archive(name: &str) -> bool {
    let of_bundle = name.strip_prefix("bundle-").and_then(|rest| rest.strip_suffix(".tar.gz"));
    let of_package = || [".conda", ".tar.bz2"].iter().find_map(|end| name.strip_suffix(end));
    match of_bundle {
        Some(digest) => is_digest(digest),
        None => of_package().is_some_and(|sha256| sha256.len() == 64 && is_digest(sha256)),
    }
}

/// Reads to the end and returns sha256 in hex and the number of bytes.
pub(super) fn sha256_of(mut from: impl Read) -> io::Result<(String, u64)> {
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 16];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok((hex::encode(hash.finalize()), bytes)),
            Ok(n) => {
                hash.update(&buffer[..n]);
                bytes += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// The number of bytes of the file, if it is there and has this content.
pub(super) fn intact(path: &Path, sha256: &str) -> io::Result<Option<u64>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let (found, bytes) = sha256_of(file)?;
    Ok(found.eq_ignore_ascii_case(sha256).then_some(bytes))
}

/// Hashes what is read.
pub(super) struct Hashing<R> {
    inner: R,
    hash: Sha256,
}

impl<R: Read> Hashing<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, hash: Sha256::new() }
    }

    /// sha256 in hex of what was read so far.
    pub(super) fn sha256(self) -> String {
        hex::encode(self.hash.finalize())
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hash.update(&buffer[..n]);
        Ok(n)
    }
}
