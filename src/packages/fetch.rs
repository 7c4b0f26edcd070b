//! Fills `pkgs/` on the host from the pod: the only part that needs a network.
//!
//! An archive is written aside as `.<name>.part`, hashed while it streams, and gets its name only when its sha256 is the
//! one that is wanted. A cut or killed download is taken up where it ended. Nothing is synced: whoever reads an archive
//! hashes it again, so that a power cut costs a download and not an installation.

use std::{fs::File, io, path::Path};

use futures::{StreamExt, TryStreamExt, stream};

use super::{
    HttpClient, Sources, archive,
    download::Download,
    lock::{self, LockError},
};
use crate::{api::PackageSet, host::Progress};

/// Archives at a time: enough to hide latency, few enough for a mirror that a thousand nodes ask at once.
const CONCURRENCY: usize = 6;

/// What is in `pkgs/` now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// Archives of the package set.
    pub archives: usize,
    /// Their bytes.
    pub bytes: u64,
    /// How many of these bytes had to be fetched, the others were there.
    pub fetched_bytes: u64,
    /// How many of these came from peers.
    pub from_peers: u64,
}

/// Why `pkgs/` could not be filled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The lock can't be used.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The digest could not be a directory's name.
    #[error("`{digest}` is not the digest of a package set")]
    NotADigest {
        /// As it was given.
        digest: String,
    },
    /// The server did not give it.
    #[error("can't fetch {url}: {reason}")]
    Http {
        /// Without secrets.
        url: String,
        /// In its own words.
        reason: String,
        /// The server or the way to it may be better later.
        transient: bool,
    },
    /// The host's file could not be read.
    #[error("can't read {url} on the host")]
    HostFile {
        /// As it was given.
        url: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// Not a URL that we can read.
    #[error("{url} is not an http, https or file URL")]
    NotAUrl {
        /// Without secrets.
        url: String,
    },
    /// It is something else than what was asked for.
    #[error(
        "{url} has sha256 {found}, but {wanted} is wanted; it was changed at its source, or the wanted one is wrong"
    )]
    Digest {
        /// Without secrets.
        url: String,
        /// What is asked for.
        wanted: String,
        /// What came.
        found: String,
    },
    /// The host's disk.
    #[error("can't write {path} under the packages' directory")]
    Write {
        /// Name in `pkgs/`.
        path: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// Another agent is at it, as happens while a DaemonSet is rolled out.
    #[error("another agent is filling the packages' directory")]
    Busy,
}

impl FetchError {
    /// Trying again later can help without anybody changing anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Http { transient, .. } => *transient,
            Self::Write { .. } | Self::HostFile { .. } | Self::Busy => true,
            Self::Lock(_) | Self::NotADigest { .. } | Self::NotAUrl { .. } | Self::Digest { .. } => false,
        }
    }
}

/// One archive that is wanted.
pub(super) struct Wanted {
    pub url: String,
    /// In `pkgs/`.
    pub name: String,
    /// Lower-case hex.
    pub sha256: String,
    pub size: Option<u64>,
}

/// Brings every archive of `set` for `platform` into `pkgs`, which must exist.
///
/// `pkgs` may be a path such as `/proc/self/fd/N`; only names directly below it are used. `host_file` opens the path of
/// a `file://` URL in the host's root.
///
/// # Errors
/// The first archive that could not be had; what came before stays.
pub async fn fetch(
    set: &PackageSet,
    digest: &str,
    platform: &str,
    pkgs: &Path,
    host_file: impl Fn(&str) -> io::Result<File>,
    http: &HttpClient,
    sources: &Sources,
    mut progress: impl FnMut(Progress),
) -> Result<Fetched, FetchError> {
    if !archive::is_digest(digest) {
        return Err(FetchError::NotADigest { digest: digest.to_owned() });
    }
    let _ = sources;
    let wanted = wanted(set, digest, platform)?;
    let total = wanted.iter().map(|w| w.size).sum::<Option<u64>>().unwrap_or(0);
    let _lock = lock_directory(pkgs)?;
    drop_leftovers(pkgs, &wanted).map_err(|source| FetchError::Write { path: ".".to_owned(), source })?;

    let (advance, mut advanced) = tokio::sync::mpsc::unbounded_channel::<i64>();
    let host_file = &host_file;
    let getting = async move {
        let each = wanted
            .iter()
            .map(|one| Download { one, pkgs, http, advance: advance.clone() }.get(host_file))
            .collect::<Vec<_>>();
        let each = stream::iter(each).buffer_unordered(CONCURRENCY).try_collect::<Vec<(u64, bool)>>().await;
        drop(advance);
        each
    };
    let reporting = async {
        let mut done = 0_u64;
        while let Some(bytes) = advanced.recv().await {
            done = done.saturating_add_signed(bytes);
            progress(Progress { what: "fetching packages".to_owned(), done, total });
        }
    };
    let (got, ()) = futures::join!(getting, reporting);
    let got = got?;
    Ok(Fetched {
        archives: got.len(),
        bytes: got.iter().map(|(bytes, _)| bytes).sum(),
        fetched_bytes: got.iter().filter(|(_, fresh)| *fresh).map(|(bytes, _)| bytes).sum(),
        from_peers: 0,
    })
}

fn wanted(set: &PackageSet, digest: &str, platform: &str) -> Result<Vec<Wanted>, LockError> {
    match set {
        PackageSet::Bundle(source) => Ok(vec![Wanted {
            url: source.url.clone(),
            name: archive::bundle_name(digest),
            sha256: source.sha256.to_ascii_lowercase(),
            size: None,
        }]),
        PackageSet::Lock { lock, .. } => Ok(lock::packages(lock, platform)?
            .into_iter()
            .map(|package| Wanted {
                url: package.record.url.to_string(),
                name: package.archive,
                sha256: package.sha256,
                size: package.record.package_record.size,
            })
            .collect()),
    }
}

/// Two agents that append to the same `.part` would only lose time, but they would lose all of it.
fn lock_directory(pkgs: &Path) -> Result<nix::fcntl::Flock<File>, FetchError> {
    let unreadable = |source| FetchError::Write { path: ".".to_owned(), source };
    let directory = File::open(pkgs).map_err(unreadable)?;
    nix::fcntl::Flock::lock(directory, nix::fcntl::FlockArg::LockExclusiveNonblock).map_err(|(_, error)| match error {
        nix::errno::Errno::EWOULDBLOCK => FetchError::Busy,
        error => unreadable(error.into()),
    })
}

/// Downloads that nobody will go on with.
fn drop_leftovers(pkgs: &Path, wanted: &[Wanted]) -> io::Result<()> {
    for entry in std::fs::read_dir(pkgs)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(of) = name.to_str().and_then(|n| n.strip_prefix('.')?.strip_suffix(".part")) else {
            continue;
        };
        if !wanted.iter().any(|w| w.name == of) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
