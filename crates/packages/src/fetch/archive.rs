//! Names of the files in `pkgs/`, which are derived from sha256, and checks of their content.

use std::{
    fs::File,
    io::{self, BufReader, Read, Write},
    path::Path,
};

use sha2::{Digest, Sha256};

use api::PackageSet;
use locks::LockError;

/// The file names in `pkgs/` of the archives of `set` for `platform`.
///
/// # Errors
/// The lock can't be used.
pub fn archives(set: &PackageSet, platform: &str) -> Result<Vec<String>, LockError> {
    match set {
        PackageSet::Bundle(_) => Ok(vec![bundle_name(&set.digest())]),
        PackageSet::Lock { lock, .. } => {
            Ok(locks::packages(lock, platform)?.into_iter().map(|package| package.archive).collect())
        }
    }
}

/// The file names in `pkgs/` of every archive of the set, for all its platforms: what an agent may serve to peers.
pub fn archive_names(set: &PackageSet) -> Vec<String> {
    let mut names: Vec<_> = match set {
        PackageSet::Bundle(_) => vec![bundle_name(&set.digest())],
        PackageSet::Lock { lock, .. } => {
            let packages = locks::by_platform(lock).unwrap_or_default().into_iter().filter_map(Result::ok);
            packages.flatten().map(|package| package.archive).collect()
        }
    };
    names.sort_unstable();
    names.dedup();
    names
}

/// True if `pkgs` has a file for every archive of `set` for `platform`. The content isn't checked here: each receiver
/// checks the sha256.
pub fn holds(set: &PackageSet, digest: &str, platform: &str, pkgs: &Path) -> bool {
    let named = archives(set, platform).ok().filter(|_| is_digest(digest));
    named.is_some_and(|names| names.iter().all(|name| pkgs.join(name).is_file()))
}

/// A bundle's file name in `pkgs/`.
pub(crate) fn bundle_name(digest: &str) -> String {
    format!("bundle-{digest}.tar.gz")
}

/// The file name of an incomplete archive.
pub(crate) fn part_name(name: &str) -> String {
    format!(".{name}.part")
}

/// The archive's name, from the name that [`part_name`] made.
pub(crate) fn of_part(name: &str) -> Option<&str> {
    name.strip_prefix('.')?.strip_suffix(".part")
}

/// True for 1 to 64 lower-case hex digits. Digests become parts of paths, so they must be checked first.
pub(crate) fn is_digest(digest: &str) -> bool {
    (1..=64).contains(&digest.len()) && digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// True for a name that this module makes: [`bundle_name`], or a package's sha256 with one of conda's extensions.
pub(crate) fn is_archive(name: &str) -> bool {
    let of_bundle = name.strip_prefix("bundle-").and_then(|rest| rest.strip_suffix(".tar.gz"));
    let of_package = || [".conda", ".tar.bz2"].iter().find_map(|end| name.strip_suffix(end));
    match of_bundle {
        Some(digest) => is_digest(digest),
        None => of_package().is_some_and(|sha256| sha256.len() == 64 && is_digest(sha256)),
    }
}

/// Reads to the end. Returns the sha256 in lower-case hex and the number of bytes.
pub(crate) fn sha256_of(from: impl Read) -> io::Result<(String, u64)> {
    let mut hashing = BufReader::with_capacity(1 << 16, Hashing::new(from));
    let bytes = io::copy(&mut hashing, &mut io::sink())?;
    Ok((hashing.into_inner().sha256(), bytes))
}

/// The size of the file if it exists and has this sha256, `None` otherwise.
pub(crate) fn intact(path: &Path, sha256: &str) -> io::Result<Option<u64>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let (found, bytes) = sha256_of(file)?;
    Ok(found.eq_ignore_ascii_case(sha256).then_some(bytes))
}

/// A reader or writer that hashes the bytes that pass through it.
pub(crate) struct Hashing<T> {
    pub inner: T,
    hash: Sha256,
}

impl<T> Hashing<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self { inner, hash: Sha256::new() }
    }

    /// The sha256 in lower-case hex of the bytes so far.
    pub(crate) fn sha256(self) -> String {
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

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(buffer)?;
        self.hash.update(&buffer[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
