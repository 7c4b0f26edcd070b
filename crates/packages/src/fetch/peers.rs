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
/// The wait for a peer that is fetching the archive itself: as long as the planner waits for a node that fetches. As a
/// multiple of the patience with a silent peer: 15 minutes.
const FETCHING_PEER_PATIENCES: u32 = 180;
/// Bytes per second. A peer that stays below this for its whole patience counts as silent.
const LEAST_RATE: u64 = 64_000;

impl Download<'_> {
    /// Returns true if a peer sent the archive, false if the source must be asked.
    pub(super) async fn ask_peers(&self, part: &mut Part) -> Result<bool, FetchError> {
        let patience = self.http.patience_with_peers();
        let mut without = vec![false; self.peers.all().len()];
        let (mut busy_since, mut tries) = (None, 0);
        loop {
            let (mut busy, mut away) = (Vec::new(), Vec::new());
            for (at, peer) in self.peers.all().iter().enumerate() {
                if without[at] || peer.is_dropped() {
                    continue;
                }
                let Some(server) = self.peer(at, peer) else {
                    self.drop_peers(vec![(peer, "its address is not IP:PORT".to_owned())]);
                    continue;
                };
                let problem = match self.ask_peer(peer, &server, part).await? {
                    TransferEnd::Whole => {
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
                    TransferEnd::Coming => "it was fetching the archive itself but never got it".to_owned(),
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
                (true, false) => sleep(jittered(patience / 5)).await,
                // The requests to the busy peers already took time.
                (false, _) => {}
            }
        }
    }

    /// Asks one peer, and repeats that while it is busy or fetches the archive itself.
    async fn ask_peer(&self, peer: &Peer, server: &Server, part: &mut Part) -> Result<TransferEnd, FetchError> {
        let until = Instant::now() + self.http.patience_with_peers() * FETCHING_PEER_PATIENCES;
        let mut tries = 0;
        loop {
            let taken = {
                // The semaphore is never closed.
                let _stream = peer.streams.acquire().await;
                if peer.is_dropped() {
                    return Ok(TransferEnd::Unable("it was dropped in the meantime".to_owned()));
                }
                self.take(server, part).await?
            };
            match taken {
                TransferEnd::Coming if Instant::now() < until => self.wait_for_archive(peer).await,
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

    /// Waits with a HEAD request, which the peer answers once it has the archive, or after a while. The caller holds no
    /// stream of the peer meanwhile, so that other archives can use it.
    async fn wait_for_archive(&self, peer: &Peer) {
        let asked = self.http.look_at_peer(&self.url_at(&peer.address)).send();
        let answer = timeout(self.http.patience_with_peers(), asked).await;
        if !matches!(answer, Ok(Ok(answer)) if answer.status().is_success()) {
            sleep(jittered(SHORTEST_REST)).await;
        }
    }

    fn peer(&self, at: usize, peer: &Peer) -> Option<Server> {
        let _is_one: SocketAddr = peer.address.parse().ok()?;
        Some(Server {
            sender: Sender::Peer(at),
            request: self.http.ask_peer(&self.url_at(&peer.address)),
            patience: self.http.patience_with_peers(),
            least_rate: LEAST_RATE,
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
