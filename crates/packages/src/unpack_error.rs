//! Why an archive was not unpacked.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

use crate::{
    bundle::manifest::{BUNDLE_MANIFEST, ManifestError},
    environment::limits::reached,
};
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
    #[error(transparent)]
    Manifest(#[from] ManifestError),
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

pub(crate) fn truncated() -> UnpackError {
    UnpackError::Archive("it is truncated: the archive ends early".to_owned())
}
