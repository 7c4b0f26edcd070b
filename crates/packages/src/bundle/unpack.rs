//! Unpacks a bundle. Its content is untrusted: it must neither escape from its directory nor fill the disk.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use tar::{Archive, Entry, EntryType};

use crate::{
    Limits,
    bundle::{
        manifest::{BUNDLE_MANIFEST, BundleManifest, MAX_MANIFEST_BYTES},
        packages::{self, Contents},
    },
    environment::{
        guard::{Checked, Tree, leads_to_users, stays_inside},
        limits::{Entries, Guarded, reached},
    },
};
use hostapi::Progress;
use locks::LockError;

/// Why a bundle was refused or could not be unpacked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnpackError {
    /// The file is not a `.tar.gz`, or is truncated or damaged.
    #[error("{0}")]
    Archive(String),
    /// A tarball without a manifest.
    #[error(
        "it does not begin with {BUNDLE_MANIFEST}, so it is not a bundle; make one with `flux-distribute bundle create`"
    )]
    NotABundle,
    /// The manifest is unusable.
    #[error("{0}")]
    Manifest(String),
    /// The bundle is for other platforms.
    #[error("it is for {found}, but this host is {wanted}")]
    Platform { found: String, wanted: String },
    /// An entry is not allowed.
    #[error("its entry {path} {reason}")]
    Entry { path: String, reason: String },
    /// The lock of a packages bundle is unusable.
    #[error("its lock can't be used")]
    Lock(#[from] LockError),
    /// An archive differs from the one that the lock names.
    #[error("its archive of package {package} is not the one that its lock names; make the bundle again")]
    Differs { package: String },
    /// An archive is missing.
    #[error("it lacks the archive of package {package}, which its lock names; make the bundle again")]
    Lacks { package: String },
    /// The content exceeds a limit, so the bundle may be a decompression bomb.
    #[error("it holds more than {limit}")]
    Limit { limit: String },
    /// The disk refused a write.
    #[error("can't write {path}: {source}")]
    Write {
        path: String,
        #[source]
        source: io::Error,
    },
}

impl UnpackError {
    pub(crate) fn write(path: &Path, source: io::Error) -> Self {
        Self::Write { path: path.display().to_string(), source }
    }
}

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

/// The content of an unpacked bundle.
pub(crate) struct Unpacked {
    pub manifest: BundleManifest,
    /// Number of files, directories and links in a tree, or of archives.
    pub entries: u64,
    /// Total size of the files.
    pub bytes: u64,
    /// The lock and packages of a packages bundle; `None` for a tree.
    pub contents: Option<Contents>,
    /// The first file of a tree that lost a set-user-ID or set-group-ID bit.
    pub privileged: Option<PathBuf>,
}

/// Unpacks a bundle of `size` bytes. Without `into`, it only performs the checks.
pub(crate) fn unpack(
    archive: impl Read,
    size: u64,
    into: Option<Target<'_>>,
    limits: Limits,
    progress: &mut dyn FnMut(Progress),
) -> Result<Unpacked, UnpackError> {
    let mut guarded = Guarded::gzip(archive, limits);
    let position = guarded.position();
    let now = || Progress::bytes("unpacking the bundle", position.get(), size);

    let allowed = guarded.allowed();
    let mut tar = Archive::new(&mut guarded);
    let mut entries = Entries::new(tar.entries().map_err(broken)?, allowed);
    let first = entries.next().ok_or(UnpackError::NotABundle)?.map_err(|e| not_tar(&e))?;
    let manifest = read_manifest(first)?;
    if let Some(wanted) = into.map(|into| into.platform).filter(|w| !manifest.platforms().iter().any(|p| p == w)) {
        return Err(UnpackError::Platform { found: manifest.platforms().join(" and "), wanted: wanted.to_owned() });
    }
    let unpacked = if manifest.is_packages() {
        let archives = |_| progress(now());
        let contents = packages::unpack(entries, &manifest, into, limits, archives)?;
        Unpacked {
            manifest,
            entries: contents.entries,
            bytes: contents.bytes,
            contents: Some(contents),
            privileged: None,
        }
    } else {
        let each = |entry: u64| {
            if entry.is_multiple_of(256) {
                progress(now());
            }
        };
        unpack_tree(entries, manifest, into.map(|into| into.tree), limits, each)?
    };
    // The sha256 also covers what follows the last entry.
    io::copy(&mut guarded, &mut io::sink()).map_err(broken)?;
    Ok(unpacked)
}

/// Reads everything after the manifest; without `into`, it only performs the checks.
fn unpack_tree<R: Read>(
    entries: Entries<'_, R>,
    manifest: BundleManifest,
    into: Option<&Path>,
    limits: Limits,
    mut progress: impl FnMut(u64),
) -> Result<Unpacked, UnpackError> {
    let mut tree = into.map(Tree::new);
    let mut unpacked = Unpacked { manifest, entries: 0, bytes: 0, contents: None, privileged: None };
    for entry in entries {
        let mut entry = entry.map_err(broken)?;
        if entry.header().entry_type() == EntryType::XGlobalHeader {
            continue;
        }
        unpacked.entries += 1;
        if unpacked.entries > limits.entries {
            return Err(UnpackError::Limit { limit: format!("{} files", limits.entries) });
        }
        if entry.header().entry_type().is_file() {
            unpacked.bytes += entry.size();
        }
        let checked = Checked::new(&entry, |path, target| bad_symlink(&unpacked.manifest.prefix, path, target))?;
        if let Some(tree) = &mut tree {
            tree.add(&checked, &mut entry)?;
            progress(unpacked.entries);
        }
    }
    if let Some(tree) = tree {
        unpacked.privileged = tree.finish()?;
    }
    Ok(unpacked)
}

/// What is wrong with the symlink `path` of a tree that was built for `prefix`, if anything. An absolute target is
/// resolved on the host, where `prefix` will be a symlink to this tree.
pub(crate) fn bad_symlink(prefix: &Path, path: &Path, target: &Path) -> Option<String> {
    if target.is_absolute() {
        let inside = target.strip_prefix(prefix).is_ok_and(|below| stays_inside(Path::new(""), below));
        return if inside { None } else { leads_to_users(target) };
    }
    let out = !stays_inside(path.parent().unwrap_or(Path::new("")), target);
    out.then(|| format!("is a symlink to {}, out of {}", target.display(), prefix.display()))
}

fn read_manifest(mut entry: Entry<'_, impl Read>) -> Result<BundleManifest, UnpackError> {
    if entry.path_bytes().as_ref() != BUNDLE_MANIFEST.as_bytes() || !entry.header().entry_type().is_file() {
        return Err(UnpackError::NotABundle);
    }
    let mut json = Vec::new();
    entry.by_ref().take(MAX_MANIFEST_BYTES).read_to_end(&mut json).map_err(broken)?;
    BundleManifest::parse(&json).map_err(UnpackError::Manifest)
}

/// Like [`io::copy`], but distinguishes a damaged bundle from a faulty disk.
pub(crate) fn copy(from: &mut impl Read, to: &mut File, path: &Path) -> Result<(), UnpackError> {
    let mut buffer = vec![0; 1 << 15];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => to.write_all(&buffer[..n]).map_err(|source| UnpackError::write(path, source))?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(broken(e)),
        }
    }
}

fn not_tar(error: &io::Error) -> UnpackError {
    match reached(error) {
        Some(limit) => UnpackError::Limit { limit },
        None if error.kind() == io::ErrorKind::UnexpectedEof => truncated(),
        None => UnpackError::Archive(format!("it is not a .tar.gz: {error}")),
    }
}

pub(crate) fn broken(error: io::Error) -> UnpackError {
    // For a truncated archive, the tar crate has its own messages and no error kind.
    let early = error.kind() == io::ErrorKind::UnexpectedEof
        || ["unexpected EOF", "failed to read entire block"].iter().any(|words| error.to_string().contains(words));
    match reached(&error) {
        Some(limit) => UnpackError::Limit { limit },
        None if early => truncated(),
        None => UnpackError::Archive(format!("it is damaged: {error}")),
    }
}

fn truncated() -> UnpackError {
    UnpackError::Archive("it is truncated: the archive ends early".to_owned())
}
