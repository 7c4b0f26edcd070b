//! Downloading from peers: which peer is asked, how often, and how long the agent waits for it. Each byte from a peer
//! saves the source from sending it again.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use reqwest::StatusCode;
use tokio::time::{sleep, timeout};

use crate::{
    FetchError,
    fetch::{
        download::{Download, Server, TransferEnd},
        part::{Part, Sender},
        source::Peer,
    },
};
use base::chance::jittered;

/// The longest `Retry-After` of a peer that is honoured.
const LONGEST_REST: Duration = Duration::from_secs(2);
/// The shortest pause before a busy peer is asked again.
const SHORTEST_REST: Duration = Duration::from_millis(100);
/// Busy peers make progress, so waiting for them is worthwhile. As a multiple of the patience with a silent peer: 2
/// minutes.
const BUSY_PEER_PATIENCES: u32 = 24;
/// Attempts at a busy peer before the next peer is asked, which has children of its own to serve.
const BUSY_PEER_TRIES: usize = 3;
/// A peer whose agent is down may be back soon, for example after an upgrade. If no other peer can help, it is asked
/// this many times, a fifth of the patience with a silent peer apart: for about a minute.
const ABSENT_PEER_TRIES: usize = 40;
/// Bytes per second. A peer that stays below this for its whole patience counts as silent.
const LEAST_RATE: u64 = 64_000;

impl Download<'_> {
    /// Returns true if a peer sent the archive, false if the source must be asked.
    pub(super) async fn ask_peers(&self, part: &mut Part) -> Result<bool, FetchError> {
        // What an earlier fetch has got would be lost if peers then sent more of it than they may.
        if part.have() > 0 && self.one.size.is_none() && !self.one.is_bundle {
            return Ok(false);
        }
        let patience = self.http.patience_with_peers();
        let mut without = vec![false; self.peers.all().len()];
        let (mut busy_since, mut tries) = (None, 0);
        loop {
            let (mut busy, mut away) = (Vec::new(), Vec::new());
            for (at, peer) in self.peers.all().iter().enumerate() {
                if without[at] || peer.is_dropped() {
                    continue;
                }
                let Some(mut server) = self.peer(at, peer) else {
                    self.drop_peers(vec![(peer, "its address is not IP:PORT".to_owned())]);
                    continue;
                };
                let problem = match self.ask_peer(at, peer, &mut server, part).await? {
                    TransferEnd::Whole => {
                        for (at, peer) in self.peers.all().iter().enumerate() {
                            peer.has_brought(part.peer_sent(at));
                        }
                        self.drop_peers(away);
                        return Ok(true);
                    }
                    TransferEnd::Refused { status: StatusCode::NOT_FOUND, .. } => {
                        without[at] = true;
                        continue;
                    }
                    TransferEnd::Refused { status, .. } if is_busy(status) => {
                        busy.push((peer, format!("it has been busy for {:?}", patience * BUSY_PEER_PATIENCES)));
                        continue;
                    }
                    TransferEnd::Cut(problem) => {
                        away.push((peer, problem));
                        continue;
                    }
                    TransferEnd::NotFromPeers(problem) => {
                        let (package, peer) = (self.one.package(), &peer.address);
                        tracing::warn!(package, peer, problem, "only the source can send this archive");
                        return Ok(false);
                    }
                    TransferEnd::Coming => "it does not have the archive yet".to_owned(),
                    TransferEnd::Mismatch(wrong) => wrong.to_string(),
                    TransferEnd::Silent(problem)
                    | TransferEnd::Unable(problem)
                    | TransferEnd::Refused { reason: problem, .. } => problem,
                };
                self.drop_peers(vec![(peer, problem)]);
            }
            // Peers are dropped for all archives; otherwise every archive would wait for them again.
            if away.is_empty() {
                tries = 0;
            } else if tries == ABSENT_PEER_TRIES {
                self.drop_peers(std::mem::take(&mut away));
            } else {
                tries += 1;
            }
            busy_since = (!busy.is_empty()).then(|| busy_since.unwrap_or_else(Instant::now));
            if busy_since.is_some_and(|since| since.elapsed() > patience * BUSY_PEER_PATIENCES) {
                self.drop_peers(std::mem::take(&mut busy));
            }
            match (busy.is_empty(), away.is_empty()) {
                (true, true) => return Ok(false),
                (true, false) => {
                    let _waits: Vec<_> = away.iter().map(|(peer, _)| peer.wait()).collect();
                    sleep(jittered(patience / 5)).await;
                }
                // The requests to the busy peers already took time.
                (false, _) => {}
            }
        }
    }

    /// Asks one peer, and repeats that while it is busy or fetches the archive itself, until its time is over.
    async fn ask_peer(
        &self,
        at: usize,
        peer: &Peer,
        server: &mut Server,
        part: &mut Part,
    ) -> Result<TransferEnd, FetchError> {
        let _wait = peer.wait();
        let mut tries = 0;
        loop {
            let taken = {
                // The semaphore is never closed.
                let _stream = peer.streams.acquire().await;
                if peer.is_dropped() {
                    return Ok(TransferEnd::Unable("it was dropped in the meantime".to_owned()));
                }
                let Some(left) = self.time_left(peer, part.peer_sent(at)) else {
                    return Ok(TransferEnd::Unable(format!("this fetch has waited for it for {:.0?}", peer.waited())));
                };
                server.until = Some(Instant::now() + left);
                self.take(server, part).await?
            };
            match taken {
                TransferEnd::Coming => self.wait_for_archive(peer).await,
                TransferEnd::Refused { status, rest, .. } if is_busy(status) => {
                    let rest = rest.unwrap_or(LONGEST_REST).clamp(SHORTEST_REST, LONGEST_REST);
                    sleep(jittered(rest)).await;
                    tries += 1;
                    if tries == BUSY_PEER_TRIES {
                        return Ok(taken);
                    }
                }
                other => return Ok(other),
            }
        }
    }

    /// The time that the peer may still take for this archive; `None` if there is none left. Nothing that a peer does
    /// begins it anew. What it has sent of complete archives, and of this one, adds the time that it takes at
    /// [`LEAST_RATE`]; [`Server::until`] grows with what it sends now. If the size is unknown, bytes of this archive add
    /// nothing. A bundle, which is big, doubles the time.
    fn time_left(&self, peer: &Peer, sent: u64) -> Option<Duration> {
        let time = self.http.time_for_a_peer();
        let taken_by = |bytes: u64| Duration::from_secs(bytes / LEAST_RATE);
        let archive = match self.one.size {
            Some(_) => taken_by(sent),
            None if self.one.is_bundle => time,
            None => Duration::ZERO,
        };
        (time + taken_by(peer.brought()) + archive).checked_sub(peer.waited()).filter(|left| !left.is_zero())
    }

    /// Waits with a HEAD request, which the peer answers once it has the archive, or after a while. The caller holds no
    /// stream of the peer meanwhile, so that other archives can use it.
    async fn wait_for_archive(&self, peer: &Peer) {
        let asked = self.http.look_at_peer(&self.url_at(&peer.address)).send();
        // Whatever it answers, the next request comes after a pause.
        let _ = futures::join!(timeout(self.http.patience_with_peers(), asked), sleep(jittered(SHORTEST_REST)));
    }

    fn peer(&self, at: usize, peer: &Peer) -> Option<Server> {
        let _is_one: SocketAddr = peer.address.parse().ok()?;
        Some(Server {
            sender: Sender::Peer(at),
            request: self.http.ask_peer(&self.url_at(&peer.address)),
            patience: self.http.patience_with_peers(),
            least_rate: LEAST_RATE,
            until: None,
        })
    }

    fn url_at(&self, address: &str) -> String {
        format!("http://{address}/archives/{}", self.one.name)
    }

    fn drop_peers(&self, peers: Vec<(&Peer, String)>) {
        for (peer, problem) in peers {
            peer.drop_for(&self.one.package(), &problem);
        }
    }
}

/// True if the peer is occupied with other requests.
fn is_busy(status: StatusCode) -> bool {
    matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{
        HttpClient, Sources,
        fetch::{CONCURRENCY, Wanted, part::MOST_BYTES, source::Peers},
    };

    #[test]
    fn only_a_bundle_gives_a_peer_more_time_and_room_than_archives_of_known_size() {
        let sources = Sources { peers: vec!["127.0.0.1:1".to_owned()], ..Sources::default() };
        let (http, peers) = (HttpClient::new().unwrap(), Peers::new(&sources));
        let time = http.time_for_a_peer();
        let minute = LEAST_RATE * 60;
        for (size, is_bundle, expected, most) in [
            (Some(1 << 40), false, time + Duration::from_mins(1), None),
            (None, false, time, Some(MOST_BYTES / CONCURRENCY as u64)),
            (None, true, 2 * time, Some(MOST_BYTES)),
        ] {
            let one = Wanted { url: String::new(), name: String::new(), sha256: String::new(), size, is_bundle };
            let ((advance, _), (troubles, _)) =
                (tokio::sync::mpsc::unbounded_channel(), tokio::sync::mpsc::unbounded_channel());
            let pkgs = std::path::Path::new("/nowhere");
            let download = Download { one: &one, pkgs, http: &http, peers: &peers, advance, troubles };
            assert_eq!(download.time_left(&peers.all()[0], minute), Some(expected), "{size:?}, {is_bundle}");
            assert!(one.most_of_unknown_size() <= most, "{size:?}, {is_bundle}");
        }
    }
}
