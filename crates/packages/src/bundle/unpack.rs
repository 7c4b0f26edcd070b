//! Unpacks a bundle. Its content is untrusted: it must neither escape from its directory nor fill the disk.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
};

use tar::{Archive, Entry, EntryType};

use crate::{
    Limits,
    bundle::{
        manifest::{BUNDLE_MANIFEST, BundleManifest, MAX_MANIFEST_BYTES},
        packages::{self, Contents, Target},
    },
    environment::{
        guard::{Checked, UnpackedTree, bad_symlink},
        limits::{Entries, Guarded, reached},
    },
    unpack_error::{UnpackError, broken, truncated},
};
use hostapi::Progress;

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
    let mut tree = into.map(UnpackedTree::new);
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

fn read_manifest(mut entry: Entry<'_, impl Read>) -> Result<BundleManifest, UnpackError> {
    if entry.path_bytes().as_ref() != BUNDLE_MANIFEST.as_bytes() || !entry.header().entry_type().is_file() {
        return Err(UnpackError::NotABundle);
    }
    let mut json = Vec::new();
    entry.by_ref().take(MAX_MANIFEST_BYTES).read_to_end(&mut json).map_err(broken)?;
    Ok(BundleManifest::parse(&json)?)
}

fn not_tar(error: &io::Error) -> UnpackError {
    match reached(error) {
        Some(limit) => UnpackError::Limit { limit },
        None if error.kind() == io::ErrorKind::UnexpectedEof => truncated(),
        None => UnpackError::Archive(format!("it is not a .tar.gz: {error}")),
    }
}
