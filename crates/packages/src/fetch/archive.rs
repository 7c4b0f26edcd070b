//! The names in `pkgs/` and their one truth, sha256.

use std::{
    fs::File,
    io::{self, BufReader, Read, Write},
    path::Path,
};

use sha2::{Digest, Sha256};

use api::PackageSet;
use locks::LockError;

/// What the archives of `set` for `platform` are called in `pkgs/`.
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

/// The names in `pkgs/` of every archive of the set, of all its platforms: what an agent may serve to others.
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

/// True when every archive of `set` for `platform` is in `pkgs`: by its name, the content is checked by who receives it.
pub fn holds(set: &PackageSet, digest: &str, platform: &str, pkgs: &Path) -> bool {
    let named = archives(set, platform).ok().filter(|_| is_digest(digest));
    named.is_some_and(|names| names.iter().all(|name| pkgs.join(name).is_file()))
}

/// What a bundle's archive is called in `pkgs/`.
pub(crate) fn bundle_name(digest: &str) -> String {
    format!("bundle-{digest}.tar.gz")
}

/// What an archive is called that is not whole yet.
pub(crate) fn part_name(name: &str) -> String {
    format!(".{name}.part")
}

/// The archive that a name of [`part_name`] is of.
pub(crate) fn of_part(name: &str) -> Option<&str> {
    name.strip_prefix('.')?.strip_suffix(".part")
}

/// A digest becomes part of paths, so it is looked at before it does.
pub(crate) fn is_digest(digest: &str) -> bool {
    (1..=64).contains(&digest.len()) && digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// One of the names in `pkgs/`: [`bundle_name`], or the sha256 of a package with one of conda's endings.
pub(crate) fn is_archive(name: &str) -> bool {
    let of_bundle = name.strip_prefix("bundle-").and_then(|rest| rest.strip_suffix(".tar.gz"));
    let of_package = || [".conda", ".tar.bz2"].iter().find_map(|end| name.strip_suffix(end));
    match of_bundle {
        Some(digest) => is_digest(digest),
        None => of_package().is_some_and(|sha256| sha256.len() == 64 && is_digest(sha256)),
    }
}

/// Reads to the end and returns sha256 in hex and the number of bytes.
pub(crate) fn sha256_of(from: impl Read) -> io::Result<(String, u64)> {
    let mut hashing = BufReader::with_capacity(1 << 16, Hashing::new(from));
    let bytes = io::copy(&mut hashing, &mut io::sink())?;
    Ok((hashing.into_inner().sha256(), bytes))
}

/// The number of bytes of the file, if it is there and has this content.
pub(crate) fn intact(path: &Path, sha256: &str) -> io::Result<Option<u64>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let (found, bytes) = sha256_of(file)?;
    Ok(found.eq_ignore_ascii_case(sha256).then_some(bytes))
}

/// Hashes what is read or written.
pub(crate) struct Hashing<T> {
    pub inner: T,
    hash: Sha256,
}

impl<T> Hashing<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self { inner, hash: Sha256::new() }
    }

    /// sha256 in hex of what went through so far.
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
