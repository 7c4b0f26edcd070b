//! One archive on its way into `pkgs/`: written aside, hashed while it streams, renamed when its sha256 is right.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use futures::StreamExt;
use reqwest::{StatusCode, header};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

use super::{
    FetchError, HttpClient, archive,
    fetch::Wanted,
    http::{may_pass, shown, words},
};

/// Tries per archive in one go; each goes on where the one before ended.
const ATTEMPTS: u32 = 6;

/// What one archive needs on its way.
pub(super) struct Download<'a> {
    pub one: &'a Wanted,
    pub pkgs: &'a Path,
    pub http: &'a HttpClient,
    /// Told how many bytes came; negative where some have to come again.
    pub advance: tokio::sync::mpsc::UnboundedSender<i64>,
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
    pub(super) async fn get(self, host_file: &impl Fn(&str) -> io::Result<File>) -> Result<(u64, bool), FetchError> {
        let (path, sha256) = (self.pkgs.join(&self.one.name), self.one.sha256.clone());
        let there = blocking(move || archive::intact(&path, &sha256)).await.map_err(|e| self.unwritten(e))?;
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
        let unread = |source| FetchError::HostFile { url: self.one.url.clone(), source };
        let mut from = host_file(&path.to_string_lossy()).map_err(unread)?;
        let part = self.part();
        let copied = blocking(move || {
            let mut to = File::options().create(true).truncate(true).write(true).read(true).open(&part)?;
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
            backon::ExponentialBuilder::default().with_jitter().with_max_times(ATTEMPTS as usize - 1),
        );
        loop {
            let cut = match self.try_download(&url).await? {
                // The beginning may be of an older file: once more, from the start.
                Try::Whole { sha256, bytes, resumed: true } if sha256 != self.one.sha256 => {
                    self.report(-(bytes as i64));
                    self.discard()?;
                    self.digest_error(sha256)
                }
                Try::Whole { sha256, bytes, .. } => return self.keep(sha256, bytes),
                Try::Cut(error) => error,
            };
            let Some(delay) = delays.next() else { return Err(cut) };
            tracing::info!(url = shown(&self.one.url), error = cut.to_string(), "download is taken up again");
            tokio::time::sleep(delay).await;
        }
    }

    async fn try_download(&self, url: &url::Url) -> Result<Try, FetchError> {
        let part = self.part();
        let (mut hash, mut have) = blocking(move || hash_so_far(&part)).await.map_err(|e| self.unwritten(e))?;
        let mut request = self.http.inner().get(url.clone()).header(header::ACCEPT_ENCODING, "identity");
        if have > 0 {
            request = request.header(header::RANGE, format!("bytes={have}-"));
        }
        let response = match request.send().await.and_then(reqwest::Response::error_for_status) {
            Ok(response) => response,
            // Nothing is left to send: either all is there, or it is not the beginning of this file.
            Err(e) if e.status() == Some(StatusCode::RANGE_NOT_SATISFIABLE) && have > 0 => {
                self.report(have as i64);
                return Ok(Try::Whole { sha256: hex::encode(hash.finalize()), bytes: have, resumed: true });
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
        tokio::io::AsyncSeekExt::seek(&mut file, io::SeekFrom::Start(have)).await.map_err(|e| self.unwritten(e))?;
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
        Ok(Try::Whole { sha256: hex::encode(hash.finalize()), bytes: have, resumed })
    }

    fn cut(&self, error: reqwest::Error) -> Result<Try, FetchError> {
        let transient = may_pass(&error);
        let error = FetchError::Http { url: shown(&self.one.url), reason: words(error), transient };
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
        FetchError::Digest { url: shown(&self.one.url), wanted: self.one.sha256.clone(), found }
    }

    fn not_a_url(&self) -> FetchError {
        FetchError::NotAUrl { url: shown(&self.one.url) }
    }

    fn unwritten(&self, source: io::Error) -> FetchError {
        FetchError::Write { path: self.one.name.clone(), source }
    }
}

/// Whether the answer is the rest of the file from `at`. Servers may ignore the wish and send all of it.
fn continues_at(response: &reqwest::Response, at: u64) -> bool {
    let range = response.headers().get(header::CONTENT_RANGE).and_then(|v| v.to_str().ok());
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
