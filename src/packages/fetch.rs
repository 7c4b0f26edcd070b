//! Fills `pkgs/` on the host from the pod: the only part that needs a network.
//!
//! An archive is written aside as `.<name>.part`, hashed while it streams, and gets its name only when its sha256 is the
//! one that is wanted. A cut or killed download is taken up where it ended. Nothing is synced: whoever reads an archive
//! hashes it again, so that a power cut costs a download and not an installation.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use futures::{StreamExt, TryStreamExt, stream};
use reqwest::{StatusCode, header};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

use super::{
    HttpClient, archive,
    http::{may_pass, shown, words},
    lock::{self, LockError},
};
use crate::{api::PackageSet, host::Progress};

/// Archives at a time: enough to hide latency, few enough for a mirror that a thousand nodes ask at once.
const CONCURRENCY: usize = 6;
/// Tries per archive in one go; each goes on where the one before ended.
const ATTEMPTS: u32 = 6;

/// What is in `pkgs/` now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// Archives of the package set.
    pub archives: usize,
    /// Their bytes.
    pub bytes: u64,
    /// How many of these bytes had to be fetched, the others were there.
    pub fetched_bytes: u64,
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
struct Wanted {
    url: String,
    name: String,
    sha256: String,
    size: Option<u64>,
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
    mut progress: impl FnMut(Progress),
) -> Result<Fetched, FetchError> {
    if !archive::is_digest(digest) {
        return Err(FetchError::NotADigest {
            digest: digest.to_owned(),
        });
    }
    let wanted = wanted(set, digest, platform)?;
    let total = wanted.iter().map(|w| w.size).sum::<Option<u64>>().unwrap_or(0);
    let _lock = lock_directory(pkgs)?;
    drop_leftovers(pkgs, &wanted).map_err(|source| FetchError::Write {
        path: ".".to_owned(),
        source,
    })?;

    let (advance, mut advanced) = tokio::sync::mpsc::unbounded_channel::<i64>();
    let host_file = &host_file;
    let getting = async move {
        let each = wanted.iter().map(|one| {
            Download {
                one,
                pkgs,
                http,
                advance: advance.clone(),
            }
            .get(host_file)
        });
        let each = stream::iter(each)
            .buffer_unordered(CONCURRENCY)
            .try_collect::<Vec<(u64, bool)>>()
            .await;
        drop(advance);
        each
    };
    let reporting = async {
        let mut done = 0_u64;
        while let Some(bytes) = advanced.recv().await {
            done = done.saturating_add_signed(bytes);
            progress(Progress {
                what: "fetching packages".to_owned(),
                done,
                total,
            });
        }
    };
    let (got, ()) = futures::join!(getting, reporting);
    let got = got?;
    Ok(Fetched {
        archives: got.len(),
        bytes: got.iter().map(|(bytes, _)| bytes).sum(),
        fetched_bytes: got.iter().filter(|(_, fresh)| *fresh).map(|(bytes, _)| bytes).sum(),
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
    let unreadable = |source| FetchError::Write {
        path: ".".to_owned(),
        source,
    };
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

struct Download<'a> {
    one: &'a Wanted,
    pkgs: &'a Path,
    http: &'a HttpClient,
    advance: tokio::sync::mpsc::UnboundedSender<i64>,
}

/// How one try ended.
enum Try {
    Whole {
        sha256: String,
        bytes: u64,
        resumed: bool,
    },
    /// Worth another one at once.
    Cut(FetchError),
}

impl Download<'_> {
    /// Returns the archive's bytes, and whether they had to be fetched.
    async fn get(self, host_file: &impl Fn(&str) -> io::Result<File>) -> Result<(u64, bool), FetchError> {
        let (path, sha256) = (self.pkgs.join(&self.one.name), self.one.sha256.clone());
        let there = blocking(move || archive::intact(&path, &sha256))
            .await
            .map_err(|e| self.unwritten(e))?;
        if let Some(bytes) = there {
            self.report(bytes as i64);
            return Ok((bytes, false));
        }
        let url = url::Url::parse(&self.one.url).map_err(|_| self.not_a_url())?;
        let bytes = match url.scheme() {
            "file" => self.copy(&url, host_file).await?,
            "http" | "https" => self.download(url).await?,
            _ => return Err(self.not_a_url()),
        };
        Ok((bytes, true))
    }

    async fn copy(&self, url: &url::Url, host_file: &impl Fn(&str) -> io::Result<File>) -> Result<u64, FetchError> {
        let path = url.to_file_path().map_err(|()| self.not_a_url())?;
        let unread = |source| FetchError::HostFile {
            url: self.one.url.clone(),
            source,
        };
        let mut from = host_file(&path.to_string_lossy()).map_err(unread)?;
        let part = self.part();
        let copied = blocking(move || {
            let mut to = File::options()
                .create(true)
                .truncate(true)
                .write(true)
                .read(true)
                .open(&part)?;
            io::copy(&mut from, &mut to)?;
            io::Seek::rewind(&mut to)?;
            archive::sha256_of(to)
        });
        let (found, bytes) = copied.await.map_err(|e| self.unwritten(e))?;
        self.report(bytes as i64);
        self.keep(found, bytes)
    }

    async fn download(&self, url: url::Url) -> Result<u64, FetchError> {
        let mut delays = backon::BackoffBuilder::build(
            backon::ExponentialBuilder::default()
                .with_jitter()
                .with_max_times(ATTEMPTS as usize - 1),
        );
        loop {
            let cut = match self.try_download(&url).await? {
                // The beginning may be of an older file: once more, from the start.
                Try::Whole {
                    sha256,
                    bytes,
                    resumed: true,
                } if sha256 != self.one.sha256 => {
                    self.report(-(bytes as i64));
                    self.discard()?;
                    self.digest_error(sha256)
                }
                Try::Whole { sha256, bytes, .. } => return self.keep(sha256, bytes),
                Try::Cut(error) => error,
            };
            let Some(delay) = delays.next() else { return Err(cut) };
            tracing::info!(
                url = shown(&self.one.url),
                error = cut.to_string(),
                "download is taken up again"
            );
            tokio::time::sleep(delay).await;
        }
    }

    async fn try_download(&self, url: &url::Url) -> Result<Try, FetchError> {
        let part = self.part();
        let (mut hash, mut have) = blocking(move || hash_so_far(&part))
            .await
            .map_err(|e| self.unwritten(e))?;
        let mut request = self
            .http
            .inner()
            .get(url.clone())
            .header(header::ACCEPT_ENCODING, "identity");
        if have > 0 {
            request = request.header(header::RANGE, format!("bytes={have}-"));
        }
        let response = match request.send().await.and_then(reqwest::Response::error_for_status) {
            Ok(response) => response,
            // Nothing is left to send: either all is there, or it is not the beginning of this file.
            Err(e) if e.status() == Some(StatusCode::RANGE_NOT_SATISFIABLE) && have > 0 => {
                self.report(have as i64);
                return Ok(Try::Whole {
                    sha256: hex::encode(hash.finalize()),
                    bytes: have,
                    resumed: true,
                });
            }
            Err(e) => return self.cut(e),
        };
        let resumed = have > 0 && continues_at(&response, have);
        if !resumed {
            (hash, have) = (Sha256::new(), 0);
        }
        let mut file = tokio::fs::OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(!resumed)
            .append(false)
            .open(self.part())
            .await
            .map_err(|e| self.unwritten(e))?;
        tokio::io::AsyncSeekExt::seek(&mut file, io::SeekFrom::Start(have))
            .await
            .map_err(|e| self.unwritten(e))?;
        self.report(have as i64);
        let mut body = response.bytes_stream();
        while let Some(chunk) = body.next().await {
            let chunk = match chunk {
                Ok(chunk) => chunk,
                Err(e) => {
                    file.flush().await.map_err(|e| self.unwritten(e))?;
                    self.report(-(have as i64));
                    return self.cut(e);
                }
            };
            file.write_all(&chunk).await.map_err(|e| self.unwritten(e))?;
            hash.update(&chunk);
            have += chunk.len() as u64;
            self.report(chunk.len() as i64);
        }
        file.flush().await.map_err(|e| self.unwritten(e))?;
        Ok(Try::Whole {
            sha256: hex::encode(hash.finalize()),
            bytes: have,
            resumed,
        })
    }

    fn cut(&self, error: reqwest::Error) -> Result<Try, FetchError> {
        let transient = may_pass(&error);
        let error = FetchError::Http {
            url: shown(&self.one.url),
            reason: words(error),
            transient,
        };
        if transient { Ok(Try::Cut(error)) } else { Err(error) }
    }

    /// Gives the archive its name, or throws it away.
    fn keep(&self, found: String, bytes: u64) -> Result<u64, FetchError> {
        if found != self.one.sha256 {
            self.discard()?;
            return Err(self.digest_error(found));
        }
        std::fs::rename(self.part(), self.pkgs.join(&self.one.name)).map_err(|e| self.unwritten(e))?;
        Ok(bytes)
    }

    fn discard(&self) -> Result<(), FetchError> {
        std::fs::remove_file(self.part()).map_err(|e| self.unwritten(e))
    }

    fn part(&self) -> PathBuf {
        self.pkgs.join(format!(".{}.part", self.one.name))
    }

    fn report(&self, bytes: i64) {
        // Nobody listens any more only when the whole fetch is being dropped.
        let _ = self.advance.send(bytes);
    }

    fn digest_error(&self, found: String) -> FetchError {
        FetchError::Digest {
            url: shown(&self.one.url),
            wanted: self.one.sha256.clone(),
            found,
        }
    }

    fn not_a_url(&self) -> FetchError {
        FetchError::NotAUrl {
            url: shown(&self.one.url),
        }
    }

    fn unwritten(&self, source: io::Error) -> FetchError {
        FetchError::Write {
            path: self.one.name.clone(),
            source,
        }
    }
}

/// Whether the answer is the rest of the file from `at`. Servers may ignore the wish and send all of it.
fn continues_at(response: &reqwest::Response, at: u64) -> bool {
    let range = response
        .headers()
        .get(header::CONTENT_RANGE)
        .and_then(|v| v.to_str().ok());
    response.status() == StatusCode::PARTIAL_CONTENT
        && range.is_some_and(|range| range.starts_with(&format!("bytes {at}-")))
}

/// State of the hash over what an earlier try left, and how much that is.
fn hash_so_far(part: &Path) -> io::Result<(Sha256, u64)> {
    let mut hash = Sha256::new();
    let mut file = match File::open(part) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((hash, 0)),
        Err(e) => return Err(e),
    };
    let bytes = io::copy(&mut file, &mut HashWriter(&mut hash))?;
    Ok((hash, bytes))
}

struct HashWriter<'a>(&'a mut Sha256);

impl io::Write for HashWriter<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.update(buffer);
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}
