//! Fills `pkgs/` on the host from the pod: the only part that needs a network.
//!
//! An archive is written to `.<name>.part`, hashed while it streams, and renamed only if its sha256 is right. An
//! interrupted download is resumed. Nothing is synced: each reader of an archive hashes it again, so a power failure
//! costs a download but never a correct installation.
//!
//! Peers are asked first, in the order given, then the package set's own source. A peer that is silent or sends wrong
//! bytes is not asked again in the same fetch. Neither is one whose connections break, while another peer can help.
//! Only the sha256 decides whether a file is accepted, not the sender.

pub(crate) mod access;
pub(crate) mod answer;
pub(crate) mod archive;
pub(crate) mod credentials;
pub(crate) mod download;
pub(crate) mod http;
pub(crate) mod part;
mod peers;
pub(crate) mod source;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use futures::{StreamExt, TryStreamExt, stream};
use url::Url;

use crate::{
    HttpClient, Sources,
    fetch::{
        download::{CompleteArchive, Download},
        part::MOST_BYTES,
        source::{Peers, mirrored},
    },
};
use api::PackageSet;
use base::redact::shown;
use host::{
    lock::{self, FileLock},
    room::Room,
};
use hostapi::Progress;
use locks::LockError;

/// Concurrent downloads: enough to hide latency, few enough for a mirror that a thousand nodes ask at once.
const CONCURRENCY: usize = 6;
/// The most that peers may send of a package whose size the lock doesn't state: [`CONCURRENCY`] of them stay below the limit
/// for a bundle. A larger one comes from the source.
const MOST_OF_UNKNOWN_SIZE: u64 = 1 << 30;

/// What a successful [`fetch()`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// Number of archives of the package set.
    pub archives: usize,
    /// Their total size in bytes.
    pub bytes: u64,
    /// Bytes that were downloaded or copied; the others were already there.
    pub fetched_bytes: u64,
    /// Of the fetched bytes, those that peers sent.
    pub from_peers: u64,
}

/// Why `pkgs/` could not be filled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The lock can't be used.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The digest can't be used as a file name.
    #[error("`{digest}` is not the digest of a package set")]
    NotADigest {
        /// The digest that the caller passed.
        digest: String,
    },
    /// The server did not send the archive.
    #[error("can't fetch {url}: {reason}")]
    Http {
        /// The URL without secrets.
        url: String,
        /// The server's status or the client's error.
        reason: String,
        /// True if another attempt may succeed.
        transient: bool,
    },
    /// A file on the host can't be read.
    #[error("can't read {url} on the host")]
    HostFile {
        /// The URL without secrets.
        url: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The URL has a scheme that can't be fetched.
    #[error("{url} is not an http, https or file URL")]
    NotAUrl {
        /// The URL without secrets.
        url: String,
    },
    /// The downloaded file has another sha256 than the lock or the bundle's source says.
    #[error(
        "{url} has sha256 {found}, but {wanted} is expected; the file changed at its source, or the expected sha256 is wrong"
    )]
    Digest {
        /// The URL without secrets.
        url: String,
        /// The expected sha256.
        wanted: String,
        /// The sha256 of the downloaded file.
        found: String,
    },
    /// The file has another size than the lock says. It was not read to its end.
    #[error("{url} has {than} than the expected {wanted} bytes; the file changed at its source, or the lock is wrong")]
    Size {
        /// The URL without secrets.
        url: String,
        /// `more` or `fewer`.
        than: &'static str,
        /// The expected size in bytes.
        wanted: u64,
    },
    /// The host's disk refused a write.
    #[error("can't write {path} in the packages' directory{room}")]
    Write {
        /// The file's name in `pkgs/`.
        path: String,
        /// If the disk is full: which one, and how much is missing. Empty otherwise.
        room: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Another agent holds the directory's lock, as happens during a rollout of the DaemonSet.
    #[error("another agent is filling the packages' directory")]
    Busy,
}

impl FetchError {
    /// True if another attempt may succeed without a change by an administrator.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Http { transient, .. } => *transient,
            Self::Write { .. } | Self::HostFile { .. } | Self::Busy => true,
            Self::Lock(_)
            | Self::NotADigest { .. }
            | Self::NotAUrl { .. }
            | Self::Digest { .. }
            | Self::Size { .. } => false,
        }
    }
}

/// An archive to fetch.
pub(crate) struct Wanted {
    pub url: String,
    /// The file name in `pkgs/`.
    pub name: String,
    /// Lower-case hex.
    pub sha256: String,
    /// As the lock states it.
    pub size: Option<u64>,
    /// A bundle has no stated size, and is bigger than any package.
    pub is_bundle: bool,
}

impl Wanted {
    /// The most bytes that peers may send if the archive's size is unknown: they could send without end.
    pub(crate) fn most_of_unknown_size(&self) -> Option<u64> {
        let most = if self.is_bundle { MOST_BYTES } else { MOST_OF_UNKNOWN_SIZE };
        self.size.is_none().then_some(most)
    }

    /// The package's file name as users know it, such as `flux-core-0.88.0-h1.conda`.
    pub(crate) fn package(&self) -> String {
        shown(&self.url).rsplit('/').next().unwrap_or_default().to_owned()
    }
}

/// Brings every archive of `set` for `platform` into the directory `pkgs`, which must exist.
///
/// `sources` says which servers to ask, peers first. Bytes from any of them are checked in the same way.
///
/// `pkgs` may be a path such as `/proc/self/fd/N`; only names directly below it are used. `host_file` opens the path of
/// a `file://` URL in the host's root.
///
/// # Errors
/// The error of the first archive that can't be fetched. Archives that were complete by then stay.
#[expect(clippy::too_many_arguments, reason = "each argument is independent, and there are only two callers")]
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
    let wanted = wanted(set, digest, platform, sources)?;
    let total = wanted.iter().map(|w| w.size).sum::<Option<u64>>().unwrap_or(0);
    let _lock = lock_directory(pkgs)?;
    drop_leftovers(pkgs, &wanted).map_err(directory_unwritten)?;

    let (advance, mut advanced) = tokio::sync::mpsc::unbounded_channel::<i64>();
    let (troubles, mut trouble_updates) = tokio::sync::mpsc::unbounded_channel::<(String, Option<String>)>();
    let (host_file, peers, wanted) = (&host_file, &Peers::new(sources), &wanted);
    let (packages, all) = (&AtomicU64::new(0), wanted.len() as u64);
    let getting = async move {
        let each = wanted
            .iter()
            .map(|one| Download { one, pkgs, http, peers, advance: advance.clone(), troubles: troubles.clone() })
            .map(|download| download.get(host_file))
            .collect::<Vec<_>>();
        let each = stream::iter(each).buffer_unordered(CONCURRENCY).inspect_ok(|_| {
            packages.fetch_add(1, Ordering::Relaxed);
            // Reported at once, including the last ones. The receiver is gone only if the whole fetch is being dropped.
            let _ = advance.send(0);
        });
        each.try_collect::<Vec<CompleteArchive>>().await
    };
    let reporting = async {
        let (mut done, mut in_the_way) = (0_u64, BTreeMap::new());
        loop {
            let trouble = in_the_way.values().next().cloned();
            let now = Progress { trouble, ..Progress::bytes("fetching packages", done, total) };
            progress(match set {
                PackageSet::Lock { .. } => now.with_packages(packages.load(Ordering::Relaxed), all),
                PackageSet::Bundle(_) => now,
            });
            tokio::select! {
                Some((name, words)) = trouble_updates.recv() => match words {
                    Some(words) => drop(in_the_way.insert(name, words)),
                    None => drop(in_the_way.remove(&name)),
                },
                bytes = advanced.recv() => match bytes {
                    Some(bytes) => done = done.saturating_add_signed(bytes),
                    None => break,
                },
            }
        }
    };
    let (got, ()) = futures::join!(getting, reporting);
    let got = got.map_err(|error| with_room(error, pkgs, wanted))?;
    Ok(Fetched {
        archives: got.len(),
        bytes: got.iter().map(|one| one.bytes).sum(),
        fetched_bytes: got.iter().filter(|one| one.fresh).map(|one| one.bytes).sum(),
        from_peers: got.iter().map(|one| one.from_peers).sum(),
    })
}

fn wanted(set: &PackageSet, digest: &str, platform: &str, sources: &Sources) -> Result<Vec<Wanted>, FetchError> {
    let (lock, mirror) = match set {
        PackageSet::Bundle(source) => {
            return Ok(vec![Wanted {
                url: source.url.clone(),
                name: archive::bundle_name(digest),
                sha256: source.sha256.to_ascii_lowercase(),
                size: None,
                is_bundle: true,
            }]);
        }
        PackageSet::Lock { lock, .. } => (lock, sources.mirror.as_deref()),
    };
    let mirror = mirror.map(|mirror| Url::parse(mirror).map_err(|_| FetchError::NotAUrl { url: shown(mirror) }));
    let mirror = mirror.transpose()?;
    let mut names = BTreeSet::new();
    let mut wanted = Vec::new();
    let mut packages = locks::packages(lock, platform)?;
    locks::biggest_first(&mut packages);
    for package in packages {
        // Two packages with the same bytes share one archive.
        if names.insert(package.archive.clone()) {
            let url = &package.record.url;
            wanted.push(Wanted {
                url: mirror.as_ref().map_or_else(|| url.to_string(), |mirror| mirrored(mirror, url).to_string()),
                name: package.archive,
                sha256: package.sha256,
                size: package.record.package_record.size,
                is_bundle: false,
            });
        }
    }
    Ok(wanted)
}

fn directory_unwritten(source: io::Error) -> FetchError {
    FetchError::Write { path: ".".to_owned(), room: String::new(), source }
}

/// If the disk is full, adds to the error which one it is and how much space is missing.
fn with_room(error: FetchError, pkgs: &Path, wanted: &[Wanted]) -> FetchError {
    let FetchError::Write { path, source, .. } = error else { return error };
    let is_full = matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    let room = if is_full { lacking(pkgs, wanted) } else { String::new() };
    FetchError::Write { path, room, source }
}

fn lacking(pkgs: &Path, wanted: &[Wanted]) -> String {
    // `pkgs` is often the path of a descriptor, which means nothing to users.
    let directory = std::fs::read_link(pkgs).unwrap_or_else(|_| PathBuf::from(pkgs));
    let directory = directory.display();
    let length = |name: &str| std::fs::metadata(pkgs.join(name)).map_or(0, |file| file.len());
    let there = |one: &Wanted| length(&one.name).max(length(&archive::part_name(&one.name)));
    let missing = wanted.iter().map(|one| Some(one.size?.saturating_sub(there(one)))).sum::<Option<u64>>();
    let missing = missing.map_or_else(|| "more bytes".to_owned(), |bytes| format!("{bytes} more bytes"));
    let what = match Room::of(pkgs) {
        Ok(Room { files: Some(0), .. }) => "has no inodes left".to_owned(),
        Ok(Room { available, .. }) => format!("has {available} bytes left"),
        Err(_) => "is full".to_owned(),
    };
    format!(
        ": {directory} {what}, and {missing} are needed; free some space, and the download resumes where it stopped"
    )
}

/// Two agents that append to the same `.part` would corrupt it, and both would have to start again.
fn lock_directory(pkgs: &Path) -> Result<FileLock, FetchError> {
    lock::take(&pkgs.join(lock::HIDDEN), Duration::ZERO).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => FetchError::Busy,
        _ => directory_unwritten(error),
    })
}

/// Removes partial downloads of archives that are no longer wanted.
fn drop_leftovers(pkgs: &Path, wanted: &[Wanted]) -> io::Result<()> {
    for entry in std::fs::read_dir(pkgs)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(of) = name.to_str().and_then(archive::of_part) else {
            continue;
        };
        if !wanted.iter().any(|w| w.name == of) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
