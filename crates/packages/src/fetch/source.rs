//! The servers that have the archives of a package set.

use std::{
    collections::BTreeSet,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::{OnceCell, Semaphore};
use url::Url;

use base::chance::jittered;

/// The servers to ask for archives that are not yet in the host's `pkgs/`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sources {
    /// `IP:PORT` of peers, tried in this order before the set's own source.
    pub peers: Vec<String>,
    /// `spec.packages.mirror`: replaces the channels of a lock.
    ///
    /// `https://mirror/conda` yields `https://mirror/conda/conda-forge/linux-64/x.conda` for
    /// `https://any.host/conda-forge/linux-64/x.conda`: the whole path is kept; user, password, query and `/t/<token>`
    /// are not, since they are meant for the other host. A lock's `file://` URLs and bundles are not mirrored.
    pub mirror: Option<String>,
}

/// The URL at `mirror` of what a lock has at `url`.
pub(crate) fn mirrored(mirror: &Url, url: &Url) -> Url {
    if !matches!(url.scheme(), "http" | "https") {
        return url.clone();
    }
    let path = match url.path().strip_prefix("/t/").and_then(|rest| rest.split_once('/')) {
        Some((_token, path)) => path,
        None => url.path().trim_start_matches('/'),
    };
    let mut at = mirror.clone();
    at.set_path(&format!("{}/{path}", mirror.path().trim_end_matches('/')));
    at.set_fragment(None);
    at
}

/// Most peers to ask: as many as a planner names. Each that lies costs a download some minutes.
const MOST_PEERS: usize = 3;
/// Concurrent downloads from one peer, which has other nodes to serve too.
const STREAMS: usize = 2;

/// The peers of one fetch.
pub(crate) struct Peers {
    all: Vec<Peer>,
    delay_before_source: OnceCell<()>,
}

pub(crate) struct Peer {
    pub address: String,
    /// Held while an archive is requested and sent, but not during pauses between requests.
    pub streams: Semaphore,
    dropped: AtomicBool,
    /// Bytes of complete archives that came from this peer.
    brought: AtomicU64,
    waits: Mutex<Waits>,
}

/// The time in which at least one archive waits for the peer or is sent by it.
#[derive(Default)]
struct Waits {
    archives: usize,
    since: Option<Instant>,
    before: Duration,
}

impl Waits {
    fn total(&self) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// One archive that waits for a peer, until dropped.
pub(crate) struct Wait<'a>(&'a Peer);

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let mut waits = self.0.waits();
        waits.archives -= 1;
        if waits.archives == 0 {
            waits.before = waits.total();
            waits.since = None;
        }
    }
}

impl Peers {
    pub(crate) fn new(sources: &Sources) -> Self {
        let peer = |address: &String| Peer {
            address: address.clone(),
            streams: Semaphore::new(STREAMS),
            dropped: AtomicBool::new(false),
            brought: AtomicU64::new(0),
            waits: Mutex::default(),
        };
        let mut seen = BTreeSet::new();
        let named = sources.peers.iter().filter(|address| seen.insert(*address)).take(MOST_PEERS);
        Self { all: named.map(peer).collect(), delay_before_source: OnceCell::new() }
    }

    pub(crate) fn all(&self) -> &[Peer] {
        &self.all
    }

    /// Waits up to `spread` before the first request to the source. If this node's peers can't help, other nodes' peers
    /// most likely can't either at this moment, and without the delay all nodes would ask the source at once.
    pub(crate) async fn delay_before_source(&self, spread: Duration) {
        if !self.all.is_empty() {
            let spread = 2 * (jittered(spread).saturating_sub(spread));
            self.delay_before_source.get_or_init(async || tokio::time::sleep(spread).await).await;
        }
    }
}

impl Peer {
    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::Relaxed)
    }

    fn waits(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the time until the result is dropped as time that the peer took.
    pub(crate) fn wait(&self) -> Wait<'_> {
        let mut waits = self.waits();
        waits.archives += 1;
        waits.since.get_or_insert_with(Instant::now);
        drop(waits);
        Wait(self)
    }

    /// The time that all archives of this fetch have waited for the peer. Archives that wait at once count once.
    pub(crate) fn waited(&self) -> Duration {
        self.waits().total()
    }

    /// Bytes that the peer has sent of complete archives.
    pub(crate) fn brought(&self) -> u64 {
        self.brought.load(Ordering::Relaxed)
    }

    pub(crate) fn has_brought(&self, bytes: u64) {
        self.brought.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Excludes the peer for the rest of this fetch.
    pub(crate) fn drop_for(&self, package: &str, problem: &str) {
        if !self.dropped.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                package,
                peer = self.address,
                problem,
                "peer dropped for this fetch; the rest comes from other servers"
            );
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn no_more_peers_are_asked_than_a_planner_names() {
        let peers: Vec<String> = ["a", "a", "b", "c", "d"].map(|host| format!("{host}:8052")).into();
        let asked = Peers::new(&Sources { peers, mirror: None });
        let asked: Vec<_> = asked.all().iter().map(|peer| peer.address.as_str()).collect();
        assert_eq!(asked, ["a:8052", "b:8052", "c:8052"]);
    }

    #[test]
    fn a_mirrored_url_keeps_the_path_but_none_of_the_secrets() {
        for (mirror, url, expected) in [
            ("https://m/conda", "https://h/conda-forge/noarch/x.conda", "https://m/conda/conda-forge/noarch/x.conda"),
            ("https://m/", "https://h/a/label/b/noarch/x.conda", "https://m/a/label/b/noarch/x.conda"),
            ("https://u:p@m:8/c/?k=v", "http://me:you@h:9/t/secret/a/x.conda?q=1#f", "https://u:p@m:8/c/a/x.conda?k=v"),
            ("file:///srv/c", "https://h/a/noarch/x%201.conda", "file:///srv/c/a/noarch/x%201.conda"),
            ("https://m", "file:///srv/c/noarch/x.conda", "file:///srv/c/noarch/x.conda"),
        ] {
            let at = mirrored(&Url::parse(mirror).unwrap(), &Url::parse(url).unwrap());
            assert_eq!(at.as_str(), expected);
        }
    }
}
