//! Unpacks a tree bundle. What is in it was made elsewhere, so nothing of it is believed, see [`super::guard`].

use std::{
    io::{self, Read},
    path::Path,
};

use tar::{Archive, Entry, EntryType};

use super::{
    Limits,
    guard::{Checked, Tree, stays_inside},
    limits::{Guarded, reached},
    manifest::{BUNDLE_MANIFEST, BundleManifest, MAX_MANIFEST_BYTES},
};

/// Why a bundle was not unpacked.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnpackError {
    /// Not a `.tar.gz`, or one that ends early.
    #[error("{0}")]
    Archive(String),
    /// A tarball of something else.
    #[error(
        "it does not begin with {BUNDLE_MANIFEST}, so it is not a bundle; make one with `flux-distribute bundle create`"
    )]
    NotABundle,
    /// Its manifest.
    #[error("{0}")]
    Manifest(String),
    /// For other machines.
    #[error("it is for {found}, but this host is {wanted}")]
    Platform { found: String, wanted: String },
    /// An entry that must not be unpacked.
    #[error("its entry {path} {reason}")]
    Entry { path: String, reason: String },
    /// A bomb.
    #[error("it holds more than {limit}")]
    Limit { limit: String },
    /// The disk.
    #[error("can't write {path}: {source}")]
    Write {
        path: String,
        #[source]
        source: io::Error,
    },
}

/// What was unpacked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unpacked {
    pub manifest: BundleManifest,
    pub entries: u64,
    /// Bytes of files.
    pub bytes: u64,
}

/// Unpacks into `into`, an empty directory that nobody else writes to. Without `into` it only looks.
pub(super) fn unpack(
    archive: impl Read,
    into: Option<&Path>,
    platform: Option<&str>,
    limits: Limits,
    mut progress: impl FnMut(u64),
) -> Result<Unpacked, UnpackError> {
    let mut guarded = Guarded::gzip(archive, limits);
    let mut tree = into.map(Tree::new);

    let mut tar = Archive::new(&mut guarded);
    let mut entries = tar.entries().map_err(broken)?;
    let first = entries.next().ok_or(UnpackError::NotABundle)?.map_err(|e| not_tar(&e))?;
    let manifest = read_manifest(first)?;
    if let Some(wanted) = platform.filter(|wanted| *wanted != manifest.platform) {
        return Err(UnpackError::Platform { found: manifest.platform, wanted: wanted.to_owned() });
    }
    let mut unpacked = Unpacked { manifest, entries: 0, bytes: 0 };
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
        let checked = Checked::new(&entry, |path, target| {
            // An absolute one is looked up on the host, where the compiled-in prefix will be a symlink to this tree.
            let parent = path.parent().unwrap_or(Path::new(""));
            let out = target.is_relative() && !stays_inside(parent, target);
            out.then(|| format!("is a symlink out of {}", unpacked.manifest.prefix.display()))
        })?;
        if let Some(tree) = &mut tree {
            tree.add(&checked, &mut entry)?;
            progress(unpacked.entries);
        }
    }
    // What follows the last entry belongs to the checksum too.
    io::copy(&mut guarded, &mut io::sink()).map_err(broken)?;
    if let Some(tree) = tree {
        tree.finish()?;
    }
    Ok(unpacked)
}

fn read_manifest(mut entry: Entry<'_, impl Read>) -> Result<BundleManifest, UnpackError> {
    if entry.path_bytes().as_ref() != BUNDLE_MANIFEST.as_bytes() || !entry.header().entry_type().is_file() {
        return Err(UnpackError::NotABundle);
    }
    let mut json = Vec::new();
    entry.by_ref().take(MAX_MANIFEST_BYTES).read_to_end(&mut json).map_err(broken)?;
    BundleManifest::parse(&json).map_err(UnpackError::Manifest)
}

fn not_tar(error: &io::Error) -> UnpackError {
    match reached(error) {
        Some(limit) => UnpackError::Limit { limit },
        None if error.kind() == io::ErrorKind::UnexpectedEof => truncated(),
        None => UnpackError::Archive(format!("it is not a .tar.gz: {error}")),
    }
}

pub(super) fn broken(error: io::Error) -> UnpackError {
    // The tar crate has its own words for an archive that ends early, and keeps no kind for them.
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
