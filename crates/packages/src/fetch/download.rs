//! Downloads one archive into `pkgs/`: from the peers in their order, then from its source.

use std::{
    fs::File,
    io,
    path::Path,
    pin::pin,
    time::{Duration, Instant},
};

use reqwest::{RequestBuilder, StatusCode, header};
use tokio::{io::AsyncReadExt, time::timeout};
use url::Url;

use crate::{
    FetchError, HttpClient,
    fetch::{
        Wanted,
        answer::{ArchiveResponse, Mismatch, may_pass, read_response, retry_after},
        archive,
        http::error_text,
        part::{MOST_BYTES, Part, Sender},
        source::Peers,
    },
    serve::COMING,
};
use base::chance::jittered;
use base::redact::shown;
use host::room::Room;

/// Attempts at the source per call; each resumes where the last one stopped.
const ATTEMPTS: usize = 6;
/// The longest `Retry-After` that is honoured here. The caller waits between calls, and reports why.
const LONGEST_REST: Duration = Duration::from_secs(30);
/// If the source hasn't answered for this long, the progress reports it.
const SLOW: Duration = Duration::from_secs(5);
/// Bytes between two looks at the disk's room.
const LOOK_EVERY: u64 = 16 << 20;

/// True if a disk, a quota or a limit on files is exhausted.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
}

/// A clause for an error message that says when the next attempt follows.
pub fn tried_again(pause: Duration) -> String {
    format!("trying again in {} s", pause.as_secs_f64().ceil())
}

/// The download of one archive.
pub(crate) struct Download<'a> {
    pub one: &'a Wanted,
    pub pkgs: &'a Path,
    pub http: &'a HttpClient,
    pub peers: &'a Peers,
    /// Receives the number of bytes downloaded; negative if they were discarded.
    pub advance: tokio::sync::mpsc::UnboundedSender<i64>,
    /// Receives the archive's name and what currently delays it; `None` once nothing does.
    pub troubles: tokio::sync::mpsc::UnboundedSender<(String, Option<String>)>,
}

/// A complete archive in `pkgs/`.
pub(crate) struct CompleteArchive {
    pub bytes: u64,
    /// False if it was there before this fetch.
    pub fresh: bool,
    pub from_peers: u64,
}

/// A peer or the source.
pub(super) struct Server {
    pub sender: Sender,
    pub request: RequestBuilder,
    /// The longest wait for the response or for the next piece of its body.
    pub patience: Duration,
    /// Bytes per second; a slower server counts as silent.
    pub least_rate: u64,
    /// When the whole transfer must have ended, if it brings nothing. Each byte adds the time that it takes at the least
    /// rate, unless the archive's size is unknown.
    pub until: Option<Instant>,
}

impl Server {
    fn is_peer(&self) -> bool {
        matches!(self.sender, Sender::Peer(_))
    }
}

/// How one attempt ended.
pub(super) enum TransferEnd {
    /// The file is complete, and its sha256 is right.
    Whole,
    /// The file is wrong, was discarded, and came from this server alone.
    Mismatch(Mismatch),
    /// The connection broke. The bytes received are kept.
    Cut(String),
    /// The server is connected but sends nothing, or next to nothing. The bytes received are kept.
    Silent(String),
    /// The peer is still fetching the archive itself.
    Coming,
    /// The server answered without sending the archive.
    Refused { status: StatusCode, rest: Option<Duration>, reason: String },
    /// No request can be made.
    Unable(String),
    /// The archive's size is unknown, and it is bigger than peers may send or than the disk has room for. All of it was
    /// discarded, and only the source may send it.
    NotFromPeers(String),
}

impl Download<'_> {
    pub(crate) async fn get(
        self,
        host_file: &impl Fn(&str) -> io::Result<File>,
    ) -> Result<CompleteArchive, FetchError> {
        let (path, sha256) = (self.pkgs.join(&self.one.name), self.one.sha256.clone());
        let there = tokio::task::spawn_blocking(move || archive::intact(&path, &sha256)).await;
        if let Some(bytes) = there.map_err(io::Error::other).flatten().map_err(|e| self.unwritten(e))? {
            // The receiver is gone only if the whole fetch is being dropped.
            let _ = self.advance.send(bytes.cast_signed());
            return Ok(CompleteArchive { bytes, fresh: false, from_peers: 0 });
        }
        let url = Url::parse(&self.one.url).map_err(|_| self.not_a_url())?;
        let part = Part::open(self.pkgs, &self.one.name, self.one.size, self.advance.clone()).await;
        let mut part = part.map_err(|e| self.unwritten(e))?;
        if !self.is_right(&part) {
            self.fill(&mut part, &url, host_file).await?;
        }
        let (bytes, from_peers) = (part.have(), part.peers_sent());
        part.keep(&self.pkgs.join(&self.one.name)).await.map_err(|e| self.unwritten(e))?;
        Ok(CompleteArchive { bytes, fresh: true, from_peers })
    }

    async fn fill(
        &self,
        part: &mut Part,
        url: &Url,
        host_file: &impl Fn(&str) -> io::Result<File>,
    ) -> Result<(), FetchError> {
        match url.scheme() {
            "http" | "https" => {
                if !self.ask_peers(part).await? {
                    self.peers.delay_before_source(self.http.patience_with_peers() / 5).await;
                    self.ask_source(part, url).await?;
                }
                Ok(())
            }
            // The file is on the host itself, nearer than any peer.
            "file" => match self.copy(part, url, host_file).await {
                Err(error) if !matches!(error, FetchError::Write { .. }) => {
                    if !self.ask_peers(part).await? {
                        return Err(error);
                    }
                    tracing::warn!(
                        error = base::error_chain(&error),
                        "can't use the file on the host; a peer sent the archive instead"
                    );
                    Ok(())
                }
                copied => copied,
            },
            _ => Err(self.not_a_url()),
        }
    }

    async fn copy(
        &self,
        part: &mut Part,
        url: &Url,
        host_file: &impl Fn(&str) -> io::Result<File>,
    ) -> Result<(), FetchError> {
        let unread = |source| FetchError::HostFile { url: shown(&self.one.url), source };
        let path = url.to_file_path().map_err(|()| self.not_a_url())?;
        let mut from = tokio::fs::File::from_std(host_file(&path.to_string_lossy()).map_err(unread)?);
        part.discard().map_err(|e| self.unwritten(e))?;
        let mut buffer = vec![0; 1 << 18];
        let wrong = loop {
            match from.read(&mut buffer).await.map_err(unread)? {
                0 if self.is_right(part) => return Ok(()),
                0 => break Mismatch::Sha256(part.sha256()),
                n if n as u64 > part.room() => break Mismatch::Longer,
                n => part.append(Sender::Source, &buffer[..n]).await.map_err(|e| self.unwritten(e))?,
            }
        };
        part.discard().map_err(|e| self.unwritten(e))?;
        Err(self.wrong(wrong))
    }

    async fn ask_source(&self, part: &mut Part, url: &Url) -> Result<(), FetchError> {
        let server = Server {
            sender: Sender::Source,
            request: self.http.ask(url),
            patience: crate::fetch::http::READ_TIMEOUT,
            least_rate: 0,
            until: None,
        };
        let mut delays = backon::BackoffBuilder::build(
            backon::ExponentialBuilder::default().with_jitter().with_max_times(ATTEMPTS - 1),
        );
        loop {
            let (reason, rest) = match self.take(&server, part).await? {
                TransferEnd::Whole => return Ok(()),
                TransferEnd::Mismatch(wrong) => return Err(self.wrong(wrong)),
                TransferEnd::Unable(reason) | TransferEnd::NotFromPeers(reason) => {
                    return Err(self.http_error(reason, false));
                }
                TransferEnd::Refused { status, reason, .. } if !may_pass(status) => {
                    let is_closed = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
                    let withheld = if is_closed { self.http.withheld(url) } else { String::new() };
                    return Err(self.http_error(reason + &withheld, false));
                }
                TransferEnd::Refused { rest, reason, .. } => (reason, rest),
                TransferEnd::Cut(reason) | TransferEnd::Silent(reason) => (reason, None),
                TransferEnd::Coming => ("it doesn't have the archive yet".to_owned(), None),
            };
            let Some(delay) = delays.next() else { return Err(self.http_error(reason, true)) };
            let delay: Duration = rest.map_or(delay, |rest| jittered(rest.min(LONGEST_REST)).max(delay));
            tracing::info!(url = shown(&self.one.url), reason, ?delay, "resuming the download after a pause");
            self.tell(Some(format!("{}; {}", self.http_error(reason, true), tried_again(delay))));
            tokio::time::sleep(delay).await;
        }
    }

    /// Reports what delays the archive. The receiver is gone only if the whole fetch is being dropped.
    fn tell(&self, trouble: Option<String>) {
        let _ = self.troubles.send((self.one.name.clone(), trouble));
    }

    /// Downloads from `server` what is missing. If the result is wrong but another server sent some of it, that part
    /// may be the wrong one, so everything is downloaded again from this server.
    pub(super) async fn take(&self, server: &Server, part: &mut Part) -> Result<TransferEnd, FetchError> {
        loop {
            let taken = match self.pull(server, part).await {
                Err(error) if self.one.size.is_none() && is_full(&error) => {
                    // A peer that sends without end may be what fills the disk.
                    if server.is_peer() {
                        TransferEnd::NotFromPeers(format!("can't write what it sends: {error}"))
                    } else if part.peers_sent() > 0 {
                        part.discard().map_err(|e| self.unwritten(e))?;
                        continue;
                    } else {
                        return Err(self.unwritten(error));
                    }
                }
                taken => taken.map_err(|e| self.unwritten(e))?,
            };
            let wrong = match taken {
                TransferEnd::Whole if self.is_right(part) => return Ok(TransferEnd::Whole),
                TransferEnd::Whole => Mismatch::Sha256(part.sha256()),
                TransferEnd::Mismatch(wrong) => wrong,
                TransferEnd::NotFromPeers(problem) => {
                    part.discard().map_err(|e| self.unwritten(e))?;
                    return Ok(TransferEnd::NotFromPeers(problem));
                }
                other => return Ok(other),
            };
            let to_blame = part.is_all_from(server.sender);
            part.discard().map_err(|e| self.unwritten(e))?;
            if to_blame {
                return Ok(TransferEnd::Mismatch(wrong));
            }
        }
    }

    /// Sends one request and appends the body to `part`. An `Err` is an error of the local disk.
    async fn pull(&self, server: &Server, part: &mut Part) -> io::Result<TransferEnd> {
        let silent = || TransferEnd::Silent(format!("it sent nothing for {:?}", server.patience));
        let have = part.have();
        let Some(mut request) = server.request.try_clone() else {
            return Ok(TransferEnd::Unable("the request can't be repeated".to_owned()));
        };
        // A recompressed body would have another sha256.
        request = request.header(header::ACCEPT_ENCODING, "identity");
        if have > 0 {
            request = request.header(header::RANGE, format!("bytes={have}-"));
        }
        let mut asking = pin!(timeout(server.patience, request.send()));
        let answered = tokio::select! {
            answered = &mut asking => answered,
            () = tokio::time::sleep(SLOW) => {
                if !server.is_peer() {
                    self.tell(Some(format!("{} has not responded for {} s", shown(&self.one.url), SLOW.as_secs())));
                }
                asking.await
            }
        };
        let mut response = match answered {
            Err(_) => return Ok(silent()),
            Ok(Ok(response)) => response,
            Ok(Err(e)) if e.is_builder() || e.is_redirect() => return Ok(TransferEnd::Unable(error_text(e))),
            Ok(Err(e)) => return Ok(TransferEnd::Cut(error_text(e))),
        };
        let status = response.status();
        let length = match read_response(status, response.headers(), have, self.one.size) {
            ArchiveResponse::Body { from, length } => {
                self.tell(None);
                if from != have {
                    part.discard()?;
                }
                length
            }
            ArchiveResponse::NothingMore if self.one.size.is_none() => return Ok(TransferEnd::Whole),
            ArchiveResponse::NothingMore => return Ok(TransferEnd::Mismatch(Mismatch::Shorter)),
            ArchiveResponse::Size(wrong) => return Ok(TransferEnd::Mismatch(wrong)),
            ArchiveResponse::OtherPart => {
                part.discard()?;
                return Ok(TransferEnd::Cut("it sent another range of the file than requested".to_owned()));
            }
            ArchiveResponse::Refused if server.is_peer() && response.headers().contains_key(COMING) => {
                return Ok(TransferEnd::Coming);
            }
            ArchiveResponse::Refused => {
                let rest = retry_after(response.headers(), jiff::Timestamp::now());
                return Ok(TransferEnd::Refused { status, rest, reason: format!("it answered {status}") });
            }
        };
        // Count only the time spent waiting for the server, not for the disk.
        let (mut waited, mut came, mut sent) = (Duration::ZERO, 0, 0);
        let mut spare = 0;
        let taken = loop {
            if waited >= server.patience {
                if u128::from(came) * 1000 < waited.as_millis() * u128::from(server.least_rate) {
                    break TransferEnd::Silent(format!("it is too slow: it sent {came} bytes in {waited:.1?}"));
                }
                (waited, came) = (Duration::ZERO, 0);
            }
            let begun = Instant::now();
            let more = self.one.size.map_or(Duration::ZERO, |_| Duration::from_secs(sent / server.least_rate.max(1)));
            if server.until.is_some_and(|until| begun > until + more) {
                break TransferEnd::Silent(format!("it takes too long: it has sent {} bytes so far", part.have()));
            }
            let chunk = timeout(server.patience, response.chunk()).await;
            waited += begun.elapsed();
            match chunk {
                Err(_) => break silent(),
                Ok(Err(e)) => break TransferEnd::Cut(error_text(e)),
                Ok(Ok(Some(chunk))) if chunk.len() as u64 > part.room() => {
                    break TransferEnd::Mismatch(Mismatch::Longer);
                }
                Ok(Ok(Some(chunk))) => {
                    let bytes = chunk.len() as u64;
                    if server.is_peer()
                        && let Some(why) = self.not_from_peers(part, bytes, &mut spare).await?
                    {
                        break TransferEnd::NotFromPeers(why);
                    }
                    came += bytes;
                    sent += bytes;
                    part.append(server.sender, &chunk).await?;
                }
                Ok(Ok(None)) => match length {
                    Some(length) if part.have() < length => {
                        break TransferEnd::Cut(format!("it ended after {} of {length} bytes", part.have()));
                    }
                    _ => break TransferEnd::Whole,
                },
            }
        };
        part.flush().await?;
        Ok(taken)
    }

    /// Why peers may not send `bytes` more of this archive; None if they may. `spare`: the bytes that they may send until the disk's room is
    /// looked at again.
    async fn not_from_peers(&self, part: &mut Part, bytes: u64, spare: &mut u64) -> io::Result<Option<String>> {
        let (Some(most), have) = (self.one.most_of_unknown_size(), part.have()) else { return Ok(None) };
        if have + bytes > most {
            return Ok(Some(format!("it is bigger than {most} bytes")));
        }
        if bytes > *spare {
            // What is still in the buffer has no room on the disk yet.
            part.flush().await?;
            *spare = self.spare().await?;
        }
        let Some(left) = spare.checked_sub(bytes) else {
            return Ok(Some(format!("after {have} bytes, the disk has no more than what kubelet keeps free")));
        };
        *spare = left;
        Ok(None)
    }

    /// Bytes that may be written before the room is looked at again; never what the kubelet keeps free.
    async fn spare(&self) -> io::Result<u64> {
        let pkgs = self.pkgs.to_owned();
        let room = tokio::task::spawn_blocking(move || Room::of(&pkgs)).await.map_err(io::Error::other)??;
        Ok(room.above_kept_free().min(LOOK_EVERY))
    }

    fn is_right(&self, part: &Part) -> bool {
        part.sha256() == self.one.sha256
    }

    fn wrong(&self, wrong: Mismatch) -> FetchError {
        let url = shown(&self.one.url);
        let than = match wrong {
            Mismatch::Sha256(found) => return FetchError::Digest { url, wanted: self.one.sha256.clone(), found },
            Mismatch::Longer => "more",
            Mismatch::Shorter => "fewer",
        };
        FetchError::Size { url, than, wanted: self.one.size.unwrap_or(MOST_BYTES) }
    }

    fn http_error(&self, reason: String, transient: bool) -> FetchError {
        FetchError::Http { url: shown(&self.one.url), reason, transient }
    }

    fn not_a_url(&self) -> FetchError {
        FetchError::NotAUrl { url: shown(&self.one.url) }
    }

    fn unwritten(&self, source: io::Error) -> FetchError {
        FetchError::Write { path: self.one.name.clone(), room: String::new(), source }
    }
}
