//! One archive on its way into `pkgs/`: from the peers in their order, then from its source.

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
        answer::{Answer, Wrong, answer, may_pass, retry_after},
        archive,
        http::words,
        part::{MOST_BYTES, Part, Sender},
        source::Peers,
    },
    serve::COMING,
};
use base::chance::jittered;
use base::redact::shown;

/// Tries per archive at its source in one go; each goes on where the one before ended.
const ATTEMPTS: usize = 6;
/// What a source may wish for with `Retry-After`: longer rests are the caller's, who tells what it waits for.
const LONGEST_REST: Duration = Duration::from_secs(30);
/// A source that has not answered for this long is reported.
const SLOW: Duration = Duration::from_secs(5);

/// When something is tried again, for the end of a sentence.
pub fn tried_again(pause: Duration) -> String {
    format!("it is tried again in {} s", pause.as_secs_f64().ceil())
}

/// What one archive needs on its way.
pub(crate) struct Download<'a> {
    pub one: &'a Wanted,
    pub pkgs: &'a Path,
    pub http: &'a HttpClient,
    pub peers: &'a Peers,
    /// Told how many bytes came; negative where some have to come again.
    pub advance: tokio::sync::mpsc::UnboundedSender<i64>,
    /// Told what is in the way of the archive of this name, in words; None: nothing any more.
    pub troubles: tokio::sync::mpsc::UnboundedSender<(String, Option<String>)>,
}

/// An archive that is there.
pub(crate) struct Got {
    pub bytes: u64,
    /// It was not there before.
    pub fresh: bool,
    pub from_peers: u64,
}

/// Somebody who may send the archive.
pub(super) struct Server {
    pub sender: Sender,
    pub request: RequestBuilder,
    /// With each piece.
    pub patience: Duration,
    /// Bytes in a second.
    pub least_rate: u64,
}

impl Server {
    fn is_peer(&self) -> bool {
        matches!(self.sender, Sender::Peer(_))
    }
}

/// How one try ended.
pub(super) enum Taken {
    /// It is all there, and right.
    Whole,
    /// What was sent is thrown away, and nobody else is to blame.
    Wrong(Wrong),
    /// What came until then is good for all that is known.
    Cut(String),
    /// As after a cut, but it is there and sends next to nothing.
    Silent(String),
    /// The peer will have it.
    Coming,
    /// No archive, but an answer.
    Refused { status: StatusCode, rest: Option<Duration>, reason: String },
    /// There is no way to ask.
    Unable(String),
}

impl Download<'_> {
    pub(crate) async fn get(self, host_file: &impl Fn(&str) -> io::Result<File>) -> Result<Got, FetchError> {
        let (path, sha256) = (self.pkgs.join(&self.one.name), self.one.sha256.clone());
        let there = tokio::task::spawn_blocking(move || archive::intact(&path, &sha256)).await;
        if let Some(bytes) = there.map_err(io::Error::other).flatten().map_err(|e| self.unwritten(e))? {
            // Nobody listens any more only when the whole fetch is being dropped.
            let _ = self.advance.send(bytes as i64);
            return Ok(Got { bytes, fresh: false, from_peers: 0 });
        }
        let url = Url::parse(&self.one.url).map_err(|_| self.not_a_url())?;
        let part = Part::open(self.pkgs, &self.one.name, self.one.size, self.advance.clone()).await;
        let mut part = part.map_err(|e| self.unwritten(e))?;
        if !self.is_right(&part) {
            self.fill(&mut part, &url, host_file).await?;
        }
        let (bytes, from_peers) = (part.have(), part.peers_sent());
        part.keep(&self.pkgs.join(&self.one.name)).await.map_err(|e| self.unwritten(e))?;
        Ok(Got { bytes, fresh: true, from_peers })
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
                    self.peers.let_down(self.http.patience_with_peers() / 5).await;
                    self.ask_source(part, url).await?;
                }
                Ok(())
            }
            // On the host itself, which is nearer than any peer.
            "file" => match self.copy(part, url, host_file).await {
                Err(error) if !matches!(error, FetchError::Write { .. }) => {
                    if !self.ask_peers(part).await? {
                        return Err(error);
                    }
                    tracing::warn!(error = base::error_chain(&error), "the host's file is of no use, a peer sent it");
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
                0 => break Wrong::Sha256(part.sha256()),
                n if n as u64 > part.room() => break Wrong::Longer,
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
        };
        let mut delays = backon::BackoffBuilder::build(
            backon::ExponentialBuilder::default().with_jitter().with_max_times(ATTEMPTS - 1),
        );
        loop {
            let (reason, rest) = match self.take(&server, part).await? {
                Taken::Whole => return Ok(()),
                Taken::Wrong(wrong) => return Err(self.wrong(wrong)),
                Taken::Unable(reason) => return Err(self.http_error(reason, false)),
                Taken::Refused { status, reason, .. } if !may_pass(status) => {
                    let is_closed = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
                    let withheld = if is_closed { self.http.withheld(url) } else { String::new() };
                    return Err(self.http_error(reason + &withheld, false));
                }
                Taken::Refused { rest, reason, .. } => (reason, rest),
                Taken::Cut(reason) | Taken::Silent(reason) => (reason, None),
                Taken::Coming => ("it has not come there yet".to_owned(), None),
            };
            let Some(delay) = delays.next() else { return Err(self.http_error(reason, true)) };
            let delay: Duration = rest.map_or(delay, |rest| jittered(rest.min(LONGEST_REST)).max(delay));
            tracing::info!(url = shown(&self.one.url), reason, ?delay, "download is taken up again");
            self.tell(Some(format!("{}; {}", self.http_error(reason, true), tried_again(delay))));
            tokio::time::sleep(delay).await;
        }
    }

    /// Nobody listens any more only when the whole fetch is being dropped.
    fn tell(&self, trouble: Option<String>) {
        let _ = self.troubles.send((self.one.name.clone(), trouble));
    }

    /// Takes from `server` what is missing. Where the result is wrong and the beginning was somebody else's, that may be
    /// what is wrong, so all of it is taken from this one.
    pub(super) async fn take(&self, server: &Server, part: &mut Part) -> Result<Taken, FetchError> {
        loop {
            let taken = self.pull(server, part).await;
            let wrong = match taken.map_err(|e| self.unwritten(e))? {
                Taken::Whole if self.is_right(part) => return Ok(Taken::Whole),
                Taken::Whole => Wrong::Sha256(part.sha256()),
                Taken::Wrong(wrong) => wrong,
                other => return Ok(other),
            };
            let to_blame = part.is_all_from(server.sender);
            part.discard().map_err(|e| self.unwritten(e))?;
            if to_blame {
                return Ok(Taken::Wrong(wrong));
            }
        }
    }

    /// One request, and its body appended to `part`. Errors are the disk's.
    async fn pull(&self, server: &Server, part: &mut Part) -> io::Result<Taken> {
        let silent = || Taken::Silent(format!("it sent nothing for {:?}", server.patience));
        let have = part.have();
        let Some(mut request) = server.request.try_clone() else {
            return Ok(Taken::Unable("no request can be made of it".to_owned()));
        };
        // What a proxy packs anew is not what the sha256 is of.
        request = request.header(header::ACCEPT_ENCODING, "identity");
        if have > 0 {
            request = request.header(header::RANGE, format!("bytes={have}-"));
        }
        let mut asking = pin!(timeout(server.patience, request.send()));
        let answered = tokio::select! {
            answered = &mut asking => answered,
            () = tokio::time::sleep(SLOW) => {
                if !server.is_peer() {
                    self.tell(Some(format!("{} has not answered for {} s", shown(&self.one.url), SLOW.as_secs())));
                }
                asking.await
            }
        };
        let mut response = match answered {
            Err(_) => return Ok(silent()),
            Ok(Ok(response)) => response,
            Ok(Err(e)) if e.is_builder() || e.is_redirect() => return Ok(Taken::Unable(words(e))),
            Ok(Err(e)) => return Ok(Taken::Cut(words(e))),
        };
        let status = response.status();
        let length = match answer(status, response.headers(), have, self.one.size) {
            Answer::Body { from, length } => {
                self.tell(None);
                if from != have {
                    part.discard()?;
                }
                length
            }
            Answer::NothingMore if self.one.size.is_none() => return Ok(Taken::Whole),
            Answer::NothingMore => return Ok(Taken::Wrong(Wrong::Shorter)),
            Answer::Size(wrong) => return Ok(Taken::Wrong(wrong)),
            Answer::OtherPart => {
                part.discard()?;
                return Ok(Taken::Cut("it sent another part of the file than was asked for".to_owned()));
            }
            Answer::Refused if server.is_peer() && response.headers().contains_key(COMING) => return Ok(Taken::Coming),
            Answer::Refused => {
                let rest = retry_after(response.headers(), jiff::Timestamp::now());
                return Ok(Taken::Refused { status, rest, reason: format!("it answered {status}") });
            }
        };
        // Only what is waited for the sender counts, and not the disk.
        let (mut waited, mut came) = (Duration::ZERO, 0);
        let taken = loop {
            if waited >= server.patience {
                if u128::from(came) * 1000 < waited.as_millis() * u128::from(server.least_rate) {
                    break Taken::Silent(format!("it is too slow: it sent {came} bytes in {waited:.1?}"));
                }
                (waited, came) = (Duration::ZERO, 0);
            }
            let begun = Instant::now();
            let chunk = timeout(server.patience, response.chunk()).await;
            waited += begun.elapsed();
            match chunk {
                Err(_) => break silent(),
                Ok(Err(e)) => break Taken::Cut(words(e)),
                Ok(Ok(Some(chunk))) if chunk.len() as u64 > part.room() => break Taken::Wrong(Wrong::Longer),
                Ok(Ok(Some(chunk))) => {
                    came += chunk.len() as u64;
                    part.append(server.sender, &chunk).await?;
                }
                Ok(Ok(None)) => match length {
                    Some(length) if part.have() < length => {
                        break Taken::Cut(format!("it ended after {} of {length} bytes", part.have()));
                    }
                    _ => break Taken::Whole,
                },
            }
        };
        part.flush().await?;
        Ok(taken)
    }

    fn is_right(&self, part: &Part) -> bool {
        part.sha256() == self.one.sha256
    }

    fn wrong(&self, wrong: Wrong) -> FetchError {
        let url = shown(&self.one.url);
        let than = match wrong {
            Wrong::Sha256(found) => return FetchError::Digest { url, wanted: self.one.sha256.clone(), found },
            Wrong::Longer => "more",
            Wrong::Shorter => "fewer",
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
