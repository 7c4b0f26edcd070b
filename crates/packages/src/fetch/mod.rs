//! Fills `pkgs/` on the host from the pod: the only part that needs a network.
//!
//! An archive is written aside as `.<name>.part`, hashed while it streams, and gets its name only when its sha256 is the
//! one that is wanted. A cut or killed download is taken up where it ended. Nothing is synced: whoever reads an archive
//! hashes it again, so that a power cut costs a download and not an installation.
//!
//! Peers are asked first, in the order given, then the package set's own source. A peer that is silent or lies is not asked
//! again in the same fetch, nor is one that is cut off or dead while another one can help. What sha256 a file has decides,
//! not who sent it.

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
        download::{Download, Got},
        source::{Peers, mirrored},
    },
    files::{Free, free},
};
use api::PackageSet;
use base::redact::shown;
use hostapi::Progress;
use locks::LockError;

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
    /// It has another size than what was asked for, and was not read to its end.
    #[error(
        "{url} has {than} than the {wanted} bytes that are wanted; it was changed at its source, or the lock is wrong"
    )]
    Size {
        /// Without secrets.
        url: String,
        /// `more` or `fewer`.
        than: &'static str,
        /// How many it should have.
        wanted: u64,
    },
    /// The host's disk.
    #[error("can't write {path} under the packages' directory{room}")]
    Write {
        /// Name in `pkgs/`.
        path: String,
        /// Where the disk is full: which, and how much is lacking. Empty otherwise.
        room: String,
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
            Self::Lock(_)
            | Self::NotADigest { .. }
            | Self::NotAUrl { .. }
            | Self::Digest { .. }
            | Self::Size { .. } => false,
        }
    }
}

/// One archive that is wanted.
pub(crate) struct Wanted {
    pub url: String,
    /// In `pkgs/`.
    pub name: String,
    /// Lower-case hex.
    pub sha256: String,
    pub size: Option<u64>,
}

impl Wanted {
    /// What people call it, such as `flux-core-0.88.0-h1.conda`.
    pub(crate) fn package(&self) -> String {
        shown(&self.url).rsplit('/').next().unwrap_or_default().to_owned()
    }
}

/// Brings every archive of `set` for `platform` into `pkgs`, which must exist.
///
/// `sources` tells who is asked, peers first; everybody's bytes are checked the same way.
///
/// `pkgs` may be a path such as `/proc/self/fd/N`; only names directly below it are used. `host_file` opens the path of
/// a `file://` URL in the host's root.
///
/// # Errors
/// The first archive that could not be had; what came before stays.
#[expect(clippy::too_many_arguments, reason = "each is another matter, and there are two callers")]
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
    let (troubles, mut told) = tokio::sync::mpsc::unbounded_channel::<(String, Option<String>)>();
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
            // Told at once, and so are the last ones. Nobody listens only when all of this is being dropped.
            let _ = advance.send(0);
        });
        each.try_collect::<Vec<Got>>().await
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
                Some((name, words)) = told.recv() => match words {
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
        // The same bytes under two names are one archive.
        if names.insert(package.archive.clone()) {
            let url = &package.record.url;
            wanted.push(Wanted {
                url: mirror.as_ref().map_or_else(|| url.to_string(), |mirror| mirrored(mirror, url).to_string()),
                name: package.archive,
                sha256: package.sha256,
                size: package.record.package_record.size,
            });
        }
    }
    Ok(wanted)
}

fn directory_unwritten(source: io::Error) -> FetchError {
    FetchError::Write { path: ".".to_owned(), room: String::new(), source }
}

/// Says what is full and how much is lacking, if it is that.
fn with_room(error: FetchError, pkgs: &Path, wanted: &[Wanted]) -> FetchError {
    let FetchError::Write { path, source, .. } = error else { return error };
    let is_full = matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    let room = if is_full { lacking(pkgs, wanted) } else { String::new() };
    FetchError::Write { path, room, source }
}

fn lacking(pkgs: &Path, wanted: &[Wanted]) -> String {
    // It is often given as a descriptor, which tells nobody anything.
    let directory = std::fs::read_link(pkgs).unwrap_or_else(|_| PathBuf::from(pkgs));
    let directory = directory.display();
    let length = |name: &str| std::fs::metadata(pkgs.join(name)).map_or(0, |file| file.len());
    let there = |one: &Wanted| length(&one.name).max(length(&archive::part_name(&one.name)));
    let missing = wanted.iter().map(|one| Some(one.size?.saturating_sub(there(one)))).sum::<Option<u64>>();
    let missing = missing.map_or_else(|| "more bytes".to_owned(), |bytes| format!("{bytes} more bytes"));
    let what = match free(pkgs) {
        Ok(Free { files: Some(0), .. }) => "has no inodes left for another file".to_owned(),
        Ok(Free { bytes, .. }) => format!("has {bytes} bytes left"),
        Err(_) => "is full".to_owned(),
    };
    format!(": {directory} {what}, and {missing} are needed; make room there, the download then goes on where it ended")
}

/// Two agents that append to the same `.part` would only lose time, but they would lose all of it.
fn lock_directory(pkgs: &Path) -> Result<nix::fcntl::Flock<File>, FetchError> {
    host::lock::take(&pkgs.join(host::lock::HIDDEN), Duration::ZERO).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => FetchError::Busy,
        _ => directory_unwritten(error),
    })
}

/// Downloads that nobody will go on with.
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
