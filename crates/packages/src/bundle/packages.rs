//! A bundle of kind `packages`: the manifest, a lock, and `pkgs/<archive>` for each archive that the lock names.
//!
//! The same lock and platforms give the same bytes: archives are sorted by name, which is derived from their content,
//! and have no owners or times. gzip only frames them, since they are already compressed. An archive that several
//! platforms use is stored once.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
};

use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType};

use crate::{
    BUNDLE_LOCK, BundleManifest, Limits,
    bundle::pack::{PackError, append_bytes, append_file, append_manifest, header},
    environment::{conda::file_name, limits::Entries},
    fetch::archive::Hashing,
    unpack_error::{UnpackError, broken, copy},
};
use hostapi::Progress;
use locks::{LockError, Locked, MAX_LOCK_BYTES};

/// Where to unpack a bundle.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target<'a> {
    /// The host's conda platform.
    pub platform: &'a str,
    /// For a tree: an empty directory that no other process writes to.
    pub tree: &'a Path,
    /// For archives: a directory that is created if there are any.
    pub archives: &'a Path,
}

/// The directory of the archives in the bundle.
const ARCHIVES: &str = "pkgs";

/// The packages of a lock by platform.
pub(crate) type ByPlatform = Vec<(String, Vec<Locked>)>;

/// The packages of `lock` for each of `platforms`. A lock that could not be published is refused: everybody who has the
/// bundle can read it, too.
pub(crate) fn by_platform(lock: &str, platforms: &[String]) -> Result<ByPlatform, LockError> {
    locks::check_lock(lock, platforms)?;
    platforms.iter().map(|platform| Ok((platform.clone(), locks::packages(lock, platform)?))).collect()
}

/// Every archive by name, with one of the packages that use it.
pub(crate) fn archives(packages: &ByPlatform) -> BTreeMap<&str, &Locked> {
    let all = packages.iter().flat_map(|(_, packages)| packages);
    all.map(|package| (package.archive.as_str(), package)).collect()
}

/// Writes the lock and the archives in `pkgs` as a bundle and returns the writer.
pub(crate) fn pack<W: Write>(
    lock: &str,
    packages: &ByPlatform,
    pkgs: &Path,
    out: W,
    progress: &mut dyn FnMut(Progress),
) -> Result<W, PackError> {
    let platforms = packages.iter().map(|(platform, _)| platform.clone()).collect();
    let mut tar = Builder::new(GzBuilder::new().write(out, Compression::none()));
    append_manifest(&mut tar, &BundleManifest::packages(platforms))?;
    append_bytes(&mut tar, BUNDLE_LOCK, lock.as_bytes())?;
    let archives = archives(packages);
    let total = archives.len() as u64;
    let mut bytes = 0;
    for (done, (name, package)) in (0..).zip(archives) {
        progress(Progress::packages("writing the bundle", done, total).with_bytes(bytes, 0));
        let full = pkgs.join(name);
        let file = File::open(&full).map_err(PackError::read(&full))?;
        let size = file.metadata().map_err(PackError::read(&full))?.len();
        bytes += size;
        let header = header(EntryType::Regular, 0o644, 0);
        let path = Path::new(ARCHIVES).join(name);
        let read = append_file(&mut tar, header, &path, (&full, size), Hashing::new(file))?;
        if read.sha256() != package.sha256 {
            // Delete it, so that the next run downloads it again.
            fs::remove_file(&full).map_err(PackError::read(&full))?;
            let reason = "it was damaged after it was downloaded; try again".to_owned();
            return Err(PackError::Entry { path: full, reason });
        }
    }
    progress(Progress::packages("writing the bundle", total, total).with_bytes(bytes, 0));
    tar.into_inner().and_then(flate2::write::GzEncoder::finish).map_err(PackError::Write)
}

/// The content of a packages bundle.
pub(crate) struct Contents {
    pub lock: String,
    pub packages: ByPlatform,
    /// Number of archives.
    pub entries: u64,
    /// Their total size in bytes.
    pub bytes: u64,
}

/// Reads everything after the manifest. With a target, writes the archives of its platform to its directory; without,
/// checks that the archives of all platforms are there.
pub(crate) fn unpack<R: Read>(
    mut entries: Entries<'_, R>,
    manifest: &BundleManifest,
    into: Option<Target<'_>>,
    limits: Limits,
    mut progress: impl FnMut(u64),
) -> Result<Contents, UnpackError> {
    let lock = read_lock(&mut entries)?;
    let packages = by_platform(&lock, &manifest.platforms)?;
    let named = archives(&packages);
    let wanted = packages.iter().filter(|(platform, _)| into.is_none_or(|into| into.platform == platform));
    let mut missing = wanted.flat_map(|(_, packages)| packages).map(|p| p.archive.as_str()).collect::<BTreeSet<_>>();
    if let Some(Target { archives, .. }) = into {
        fs::create_dir(archives).map_err(|source| UnpackError::write(archives, source))?;
    }
    let (mut seen, mut bytes) = (BTreeSet::new(), 0);
    for entry in entries {
        let mut entry = entry.map_err(broken)?;
        if entry.header().entry_type() == EntryType::XGlobalHeader {
            continue;
        }
        let given = entry.path().map_err(broken)?.into_owned();
        let refuse = |reason: &str| UnpackError::Entry { path: given.display().to_string(), reason: reason.to_owned() };
        if !entry.header().entry_type().is_file() {
            return Err(refuse("is not a regular file; a packages bundle contains nothing else"));
        }
        // Only names from the lock become paths.
        let name = given.strip_prefix(ARCHIVES).ok().and_then(|name| name.to_str());
        let Some((name, package)) = name.and_then(|name| named.get_key_value(name)) else {
            return Err(refuse("is not an archive that its lock names"));
        };
        if !seen.insert(*name) {
            return Err(refuse("appears twice"));
        }
        // Check before writing any of it.
        if package.record.package_record.size.is_some_and(|size| size != entry.size()) {
            return Err(differs(package));
        }
        if seen.len() as u64 > limits.entries {
            return Err(UnpackError::Limit { limit: format!("{} files", limits.entries) });
        }
        bytes += entry.size();
        let mut content = Hashing::new(&mut entry);
        match into.filter(|_| missing.contains(name)) {
            Some(Target { archives, .. }) => {
                let full = archives.join(name);
                let mut file = File::create_new(&full).map_err(|source| UnpackError::write(&full, source))?;
                copy(&mut content, &mut file, &full)?;
            }
            None => drop(io::copy(&mut content, &mut io::sink()).map_err(broken)?),
        }
        if content.sha256() != package.sha256 {
            return Err(differs(package));
        }
        missing.remove(name);
        progress(seen.len() as u64);
    }
    if let Some(package) = missing.first().and_then(|name| named.get(name)) {
        return Err(UnpackError::Lacks { package: file_name(&package.record) });
    }
    let entries = seen.len() as u64;
    Ok(Contents { lock, packages, entries, bytes })
}

fn differs(package: &Locked) -> UnpackError {
    UnpackError::Differs { package: file_name(&package.record) }
}

fn read_lock<R: Read>(entries: &mut Entries<'_, R>) -> Result<String, UnpackError> {
    let lacks = || UnpackError::Archive(format!("its {BUNDLE_LOCK} does not follow its manifest"));
    let mut entry = entries.next().ok_or_else(lacks)?.map_err(broken)?;
    if entry.path_bytes().as_ref() != BUNDLE_LOCK.as_bytes() || !entry.header().entry_type().is_file() {
        return Err(lacks());
    }
    if entry.size() > MAX_LOCK_BYTES as u64 {
        return Err(UnpackError::Limit { limit: format!("{MAX_LOCK_BYTES} bytes in its lock") });
    }
    let mut lock = Vec::new();
    entry.read_to_end(&mut lock).map_err(broken)?;
    String::from_utf8(lock).map_err(|_| UnpackError::Archive(format!("its {BUNDLE_LOCK} is not text")))
}
