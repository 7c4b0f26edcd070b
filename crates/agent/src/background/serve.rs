//! Serves the archives that this host holds to other nodes: those that a published package set names, and nothing else. The port is
//! bound on the Node's own address only.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tracing::warn;

use super::port::Port;
use api::{PEER_PORT, PackageSet};
use host::{
    host_root::{open_host_file, open_in_host_root},
    opening::path_of,
};
use hostapi::Progress;
use packages::{Shelf, archive_names, holds, native_platform, serve_peers_on};

/// How often the agent looks whether the archives are still there although nothing has changed.
const LOOK_AGAIN: Duration = Duration::from_mins(1);

/// The server of archives.
pub struct Serving {
    shelf: Shelf,
    port: Option<Port>,
    looked: Option<(Offered, Instant)>,
    holds: Vec<String>,
}

/// What the agent looks for. If it changes, the agent looks at once.
#[derive(Clone, PartialEq, Eq)]
struct Offered {
    prefix: Option<PathBuf>,
    digests: Vec<String>,
    /// Environments come and go together with their archives.
    environments: Vec<String>,
}

impl Serving {
    /// Serves at `address`. If another process has the port, this node only fetches.
    pub async fn begin(address: Option<IpAddr>) -> Self {
        let shelf = Shelf::default();
        // Until the agent knows what to do, other nodes must not take it for one without archives.
        shelf.expect(true);
        let port = match address.map(|address| SocketAddr::new(address, PEER_PORT)) {
            None => {
                warn!("HOST_IP is not set: this agent serves no packages to other nodes");
                None
            }
            Some(address) => {
                let shelf = shelf.clone();
                let serve = move |listener| serve_peers_on(listener, shelf.clone());
                Some(Port::hold("packages to other nodes", address, serve).await)
            }
        };
        Self { shelf, port, looked: None, holds: Vec::new() }
    }

    /// Its address, for other nodes.
    pub fn peer(&self) -> Option<String> {
        self.port.as_ref()?.address().map(|address| address.to_string())
    }

    /// Why there is none, for people.
    pub fn trouble(&self) -> Option<String> {
        self.port.as_ref()?.trouble()
    }

    /// Digests of the package sets whose archives are all on this host.
    pub fn holds(&self) -> &[String] {
        &self.holds
    }

    /// Says whether archives are on their way here: a node that asks for one then waits for it, and asks no other.
    pub fn expect(&self, are_coming: bool) {
        self.shelf.expect(are_coming);
    }

    /// Wakes nodes that wait for an archive, whenever the progress shows that one has arrived.
    pub fn watch(&self) -> impl FnMut(&Progress) + Send + use<> {
        let (shelf, mut known) = (self.shelf.clone(), 0);
        move |progress| {
            let packages = progress.packages.map_or(0, |packages| packages.done);
            if packages != known {
                known = packages;
                shelf.arrived();
            }
        }
    }

    /// Looks which of the published `sets` this host holds below `prefix`, and offers their archives.
    pub fn look(&mut self, prefix: Option<&Path>, sets: &[(String, PackageSet)], environments: &[String]) {
        let digests = sets.iter().map(|(digest, _)| digest.clone()).collect();
        let offered = Offered { prefix: prefix.map(Path::to_path_buf), digests, environments: environments.to_vec() };
        if self.looked.as_ref().is_some_and(|(known, at)| *known == offered && at.elapsed() < LOOK_AGAIN) {
            return;
        }
        if self
            .looked
            .as_ref()
            .is_none_or(|(known, _)| (&known.prefix, &known.digests) != (&offered.prefix, &offered.digests))
        {
            self.offer(prefix, sets);
        }
        let pkgs = prefix.and_then(|prefix| open_in_host_root(&prefix.join("pkgs")).ok());
        let is_held =
            |digest: &str, set| pkgs.as_ref().is_some_and(|pkgs| holds(set, digest, native_platform(), &path_of(pkgs)));
        self.holds =
            sets.iter().filter(|(digest, set)| is_held(digest, set)).map(|(digest, _)| digest.clone()).collect();
        self.looked = Some((offered, Instant::now()));
    }

    /// As [`Serving::look`], after archives have arrived.
    pub fn look_anew(&mut self, prefix: &Path, sets: &[(String, PackageSet)], environments: &[String]) {
        self.looked = None;
        self.look(Some(prefix), sets, environments);
        self.shelf.arrived();
    }

    fn offer(&self, prefix: Option<&Path>, sets: &[(String, PackageSet)]) {
        let names: BTreeSet<_> = match prefix {
            Some(_) => sets.iter().flat_map(|(_, set)| archive_names(set)).collect(),
            None => BTreeSet::new(),
        };
        let pkgs = prefix.unwrap_or(Path::new("/")).join("pkgs");
        self.shelf.offer_with(move |name| open_host_file(&pkgs.join(name)), names);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_node_whose_port_is_taken_only_fetches() {
        // The whole of 127.0.0.0/8 belongs to this machine, and nothing else uses these two addresses.
        let [taken, free] = [[127, 82, 5, 1], [127, 82, 5, 2]].map(IpAddr::from);
        let _somebody = std::net::TcpListener::bind((taken, PEER_PORT)).unwrap();
        let serving = Serving::begin(Some(taken)).await;
        assert!(serving.peer().is_none() && serving.trouble().is_some_and(|said| said.contains("127.82.5.1:8052")));
        assert_eq!(Serving::begin(None).await.peer(), None);
        let serving = Serving::begin(Some(free)).await;
        assert_eq!((serving.peer().as_deref(), serving.trouble()), (Some("127.82.5.2:8052"), None));
        assert!(std::net::TcpStream::connect((free, PEER_PORT)).is_ok());
        assert!(std::net::TcpStream::connect(("127.0.0.1", PEER_PORT)).is_err(), "at that address only");
    }
}
