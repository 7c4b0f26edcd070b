//! The peers' part of a download: who is asked, how often, and for how long one is waited for. Each byte that comes from a
//! peer is one that the source does not send again.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use reqwest::StatusCode;
use tokio::time::{sleep, timeout};

use crate::{
    FetchError,
    fetch::{
        download::{Download, Server, Taken},
        part::{Part, Sender},
        source::Peer,
    },
};
use base::chance::jittered;

/// What a peer may wish for with `Retry-After`.
const LONGEST_REST: Duration = Duration::from_secs(2);
/// What a busy peer is left alone at least.
const SHORTEST_REST: Duration = Duration::from_millis(100);
/// Peers that are busy are at work, so that it is worth to wait for them. So many times the patience with a silent one: 2
/// minutes.
const PATIENCES_WITH_THE_BUSY: u32 = 24;
/// So often a busy peer is asked before another one is: that one has children of its own.
const TRIES_WITH_THE_BUSY: usize = 3;
/// A peer whose agent is away may be back soon, as when it is upgraded. Where nobody else can help it is asked so many times
/// again, a fifth of the patience with a silent one apart: about a minute.
const TRIES_WITH_THE_AWAY: usize = 40;
/// A peer that is fetching the archive itself is waited for as long as the planner waits for a node that fetches. So many
/// times the patience with a silent one: 15 minutes.
const PATIENCES_WITH_THE_FETCHING: u32 = 180;
/// Bytes in a second: who sends fewer, all along its patience, is as good as silent.
const LEAST_RATE: u64 = 64_000;

impl Download<'_> {
    /// Whether a peer had it.
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
                    self.drop_peers(vec![(peer, "this is not an address and a port".to_owned())]);
                    continue;
                };
                let problem = match self.ask_peer(peer, &server, part).await? {
                    Taken::Whole => {
                        self.drop_peers(away);
                        return Ok(true);
                    }
                    Taken::Refused { status: StatusCode::NOT_FOUND, .. } => {
                        without[at] = true;
                        continue;
                    }
                    Taken::Refused { status, .. } if is_busy(status) => {
                        busy.push((peer, format!("it is busy for {:?}", patience * PATIENCES_WITH_THE_BUSY)));
                        continue;
                    }
                    Taken::Cut(problem) => {
                        away.push((peer, problem));
                        continue;
                    }
                    Taken::Coming => "it was to have the archive and does not get it".to_owned(),
                    Taken::Wrong(wrong) => wrong.to_string(),
                    Taken::Silent(problem) | Taken::Unable(problem) | Taken::Refused { reason: problem, .. } => problem,
                };
                self.drop_peers(vec![(peer, problem)]);
            }
            // They are dropped for all archives, else they would be waited for with each of them again.
            if away.is_empty() {
                tries = 0;
            } else if tries == TRIES_WITH_THE_AWAY {
                self.drop_peers(std::mem::take(&mut away));
            } else {
                tries += 1;
            }
            busy_since = (!busy.is_empty()).then(|| busy_since.unwrap_or_else(Instant::now));
            if busy_since.is_some_and(|since| since.elapsed() > patience * PATIENCES_WITH_THE_BUSY) {
                self.drop_peers(std::mem::take(&mut busy));
            }
            match (busy.is_empty(), away.is_empty()) {
                (true, true) => return Ok(false),
                (true, false) => sleep(jittered(patience / 5)).await,
                // Time has passed with them.
                (false, _) => {}
            }
        }
    }

    /// Asks one peer, again while it is busy or fetches the archive itself.
    async fn ask_peer(&self, peer: &Peer, server: &Server, part: &mut Part) -> Result<Taken, FetchError> {
        let until = Instant::now() + self.http.patience_with_peers() * PATIENCES_WITH_THE_FETCHING;
        let mut tries = 0;
        loop {
            let taken = {
                // Never closed.
                let _stream = peer.streams.acquire().await;
                if peer.is_dropped() {
                    return Ok(Taken::Unable("it was dropped meanwhile".to_owned()));
                }
                self.take(server, part).await?
            };
            match taken {
                Taken::Coming if Instant::now() < until => self.until_it_has_come(peer).await,
                Taken::Refused { status, rest, .. } if is_busy(status) => {
                    let rest = rest.unwrap_or(LONGEST_REST).clamp(SHORTEST_REST, LONGEST_REST);
                    sleep(jittered(rest)).await;
                    tries += 1;
                    if tries == TRIES_WITH_THE_BUSY {
                        return Ok(taken);
                    }
                }
                other => return Ok(other),
            }
        }
    }

    /// The peer answers when the archive has come there, or after a while. This is no stream: other archives come meanwhile.
    async fn until_it_has_come(&self, peer: &Peer) {
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

/// It is at work for others.
fn is_busy(status: StatusCode) -> bool {
    matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS)
}
