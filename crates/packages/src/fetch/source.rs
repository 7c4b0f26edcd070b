//! Where the archives of a package set come from.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio::sync::{OnceCell, Semaphore};
use url::Url;

use base::chance::jittered;

/// Where archives come from, besides the host's own `pkgs/`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sources {
    /// `address:port` of peers, tried in this order before the set's own source.
    pub peers: Vec<String>,
    /// `spec.packages.mirror`: takes the place of a lock's channels.
    ///
    /// `https://mirror/conda` gives `https://mirror/conda/conda-forge/linux-64/x.conda` for
    /// `https://any.host/conda-forge/linux-64/x.conda`: all of the path below the host is kept, user, password, query and
    /// `/t/<token>` are not, since they are meant for the other host. A lock's `file://` URLs and bundles stay as they are.
    pub mirror: Option<String>,
}

/// Where `mirror` has what a lock says is at `url`.
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

/// Archives that one peer is asked for at a time: it has others to serve.
const STREAMS: usize = 2;

/// The peers of one fetch.
pub(crate) struct Peers {
    all: Vec<Peer>,
    let_down: OnceCell<()>,
}

pub(crate) struct Peer {
    pub address: String,
    /// Held while an archive is being asked for and sent, and not while it is waited for.
    pub streams: Semaphore,
    dropped: AtomicBool,
}

impl Peers {
    pub(crate) fn new(sources: &Sources) -> Self {
        let peer = |address: &String| Peer {
            address: address.clone(),
            streams: Semaphore::new(STREAMS),
            dropped: AtomicBool::new(false),
        };
        Self { all: sources.peers.iter().map(peer).collect(), let_down: OnceCell::new() }
    }

    pub(crate) fn all(&self) -> &[Peer] {
        &self.all
    }

    /// To be awaited before the source is asked. Where there were peers that could not help, they most likely could not
    /// help others in the same moment either, who would now all fall on the source at once: up to `spread` apart.
    pub(crate) async fn let_down(&self, spread: Duration) {
        if !self.all.is_empty() {
            let spread = 2 * (jittered(spread).saturating_sub(spread));
            self.let_down.get_or_init(async || tokio::time::sleep(spread).await).await;
        }
    }
}

impl Peer {
    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Asks it for nothing more in this fetch.
    pub(crate) fn drop_for(&self, package: &str, problem: &str) {
        if !self.dropped.swap(true, Ordering::Relaxed) {
            tracing::warn!(package, peer = self.address, problem, "peer is not asked any more; others send the rest");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_has_the_paths_of_the_channels_and_none_of_their_secrets() {
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
