//! Assigns each node the sources from which it fetches the packages, so that for each platform only one node downloads
//! them from the internet. The others fetch from nodes that already hold the archives, or from the one that is
//! downloading them. Each such parent gets at most [`CHILDREN`] children.
//!
//! The FluxNodes are the only memory: their specs have the assignments, their status says what has become of them. So a
//! planner that has just taken over decides the same as the one before, and an assignment that is still good never
//! changes.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
};

use api::{FetchFrom, FluxNodeStatus, NodePhase, PEER_PORT};

/// Maximum number of nodes that are assigned to one parent, counted over time: no node uploads a package set more
/// often.
pub const CHILDREN: usize = 4;
/// How many other holders a node may try before it asks the source itself.
const FALLBACKS: usize = 2;
/// How long a node with an assignment may take before it reports that it is installing, in seconds: its agent may be
/// gone.
const BEGIN_WITHIN: i64 = 120;
/// How long a node with an assignment may take until it holds the archives, in seconds. After that it goes on, but
/// other nodes no longer wait for it.
const HOLD_WITHIN: i64 = 900;
/// The pause after two nodes have failed at the source before another one is sent there, in seconds. It doubles with
/// each further failure, so that not all nodes are at the source when it comes back.
const ASK_AGAIN: i64 = 10;
/// The longest of these pauses, in seconds.
const LONGEST_PAUSE: i64 = 600;

/// True if every URL is a `file:` URL; false for an empty list.
pub fn is_on_every_host(urls: &[String]) -> bool {
    !urls.is_empty() && urls.iter().all(|url| url.starts_with("file:"))
}

/// The part of a node's state that the assignment depends on.
#[derive(Debug, Clone, Copy)]
pub struct Fetcher<'a> {
    /// Digest of the package set that it is to have; None if nothing is to be installed there for now.
    pub wants: Option<&'a str>,
    /// The present assignment, from its FluxNode's spec.
    pub assigned: Option<&'a FetchFrom>,
    /// The report of its agent.
    pub report: &'a FluxNodeStatus,
    /// InternalIP of its Node; None while the Node is not Ready.
    pub address: Option<IpAddr>,
}

impl<'a> Fetcher<'a> {
    fn platform(&self) -> Option<&'a str> {
        self.report.facts.as_ref().map(|facts| facts.platform.as_str())
    }

    /// True if it has the package set, installed or as archives.
    fn has(&self, digest: &str) -> bool {
        self.report.digest.as_deref() == Some(digest)
            || self.report.adopted.as_ref().is_some_and(|adopted| adopted.digest == digest)
            || self.report.cached_package_sets.iter().any(|held| held == digest)
    }

    /// The address at which it serves archives. None if it is not the node's own address: a node must not send others
    /// elsewhere.
    fn peer(&self) -> Option<&'a str> {
        let peer = self.report.peer.as_deref()?;
        let reported: SocketAddr = peer.parse().ok()?;
        (reported == SocketAddr::new(self.address?, PEER_PORT)).then_some(peer)
    }

    /// [`Self::peer`], if it holds all archives of the set.
    fn serves(&self, digest: &str) -> Option<&'a str> {
        self.report.cached_package_sets.iter().any(|held| held == digest).then(|| self.peer()).flatten()
    }

    /// [`Self::peer`], if it is downloading the set from the source: it serves what it has so far. Only a node that
    /// downloads from the source can be a parent before it holds everything, so that no two nodes wait for each other.
    /// It must have reported that it is installing, so that its agent knows which set it is to have.
    fn serves_soon(&self, digest: &str, now: i64) -> Option<&'a str> {
        let asks = self.assignment(digest).is_some_and(|assigned| assigned.peers.is_empty());
        let begun = self.report.phase == NodePhase::Installing && self.is_on_its_way(digest, now);
        (asks && begun).then(|| self.peer()).flatten()
    }

    /// Its present assignment, if that is for set `digest`.
    fn assignment(&self, digest: &str) -> Option<&'a FetchFrom> {
        self.assigned.filter(|assigned| assigned.digest == digest)
    }

    fn is_well(&self) -> bool {
        self.address.is_some() && self.report.phase != NodePhase::Failed
    }

    /// True if it has an assignment for the set, does not have the set yet, and is expected to get it.
    fn is_on_its_way(&self, digest: &str, now: i64) -> bool {
        // A node with an online broker installs beside it without changing its phase, so assume that it has begun.
        let begun = matches!(self.report.phase, NodePhase::Installing | NodePhase::Online | NodePhase::Draining);
        let patience = if begun { HOLD_WITHIN } else { BEGIN_WITHIN };
        let in_time =
            self.assignment(digest).is_some_and(|assigned| now.abs_diff(assigned.since) < patience.unsigned_abs());
        in_time && self.wants == Some(digest) && !self.has(digest) && self.is_well()
    }
}

/// Computes the next assignment of each node, in the order of `fetchers`; None if it has to wait. The first suitable
/// node is the one that asks the source. A set for which `is_local` is true is on every node's own disk, so no node
/// needs another.
pub fn assign_sources(fetchers: &[Fetcher], is_local: impl Fn(&str) -> bool, now: i64) -> Vec<Option<FetchFrom>> {
    let mut lacking: BTreeMap<(&str, &str), Vec<usize>> = BTreeMap::new();
    let mut next = Vec::with_capacity(fetchers.len());
    for (index, fetcher) in fetchers.iter().enumerate() {
        if let (Some(platform), Some(digest)) = (fetcher.platform(), fetcher.wants.filter(|set| !fetcher.has(set))) {
            lacking.entry((platform, digest)).or_default().push(index);
        }
        // A finished assignment stays, because it counts as one upload of its parent.
        let stays = |assigned: &&FetchFrom| fetcher.has(&assigned.digest) || fetcher.wants.is_none();
        next.push(fetcher.assigned.filter(stays).cloned());
    }
    for ((platform, digest), lacking) in lacking {
        let set = Set { fetchers, platform, digest, now };
        for (index, assigned) in if is_local(digest) { set.all_at_once(lacking) } else { set.spread(lacking) } {
            next[index] = assigned;
        }
    }
    next
}

/// One package set on one platform.
struct Set<'a> {
    fetchers: &'a [Fetcher<'a>],
    platform: &'a str,
    digest: &'a str,
    now: i64,
}

impl Set<'_> {
    /// Sends all `lacking` nodes to the source.
    fn all_at_once(&self, lacking: Vec<usize>) -> Vec<(usize, Option<FetchFrom>)> {
        let assigned = |index: usize| {
            let kept = self.fetchers[index].assignment(self.digest).filter(|assigned| assigned.peers.is_empty());
            Some(kept.cloned().unwrap_or_else(|| self.assign(Vec::new())))
        };
        lacking.into_iter().map(|index| (index, assigned(index))).collect()
    }

    /// Gives each `lacking` node a parent, or sends it to the source, or lets it wait. The first nodes are served
    /// first.
    fn spread(&self, lacking: Vec<usize>) -> Vec<(usize, Option<FetchFrom>)> {
        let mut tree = FetchTree::of(self);
        let mut next = Vec::with_capacity(lacking.len());
        let mut without = Vec::new();
        for index in lacking {
            let fetcher = &self.fetchers[index];
            let kept =
                fetcher.assignment(self.digest).filter(|assigned| self.is_good(fetcher, assigned, &tree)).cloned();
            match kept.or_else(|| tree.next().map(|peers| self.assign(peers))) {
                Some(assigned) => next.push((index, Some(assigned))),
                None => without.push(index),
            }
        }
        let is_awaited =
            next.iter().any(|(index, assigned)| self.will_serve(&self.fetchers[*index], assigned.as_ref()));
        next.extend(self.at_the_source(without, is_awaited));
        next
    }

    /// True if an assignment can stay: one of its parents still serves, or the node makes progress at the source.
    fn is_good(&self, fetcher: &Fetcher, assigned: &FetchFrom, tree: &FetchTree) -> bool {
        match assigned.peers.as_slice() {
            [] => fetcher.is_on_its_way(self.digest, self.now),
            peers => peers.iter().any(|peer| tree.index.contains_key(peer.as_str())),
        }
    }

    /// True if the node has an assignment, new or old, and will soon be a holder that serves others.
    fn will_serve(&self, fetcher: &Fetcher, assigned: Option<&FetchFrom>) -> bool {
        let is_new = assigned.is_some_and(|assigned| assigned.since == self.now) && fetcher.is_well();
        (is_new || fetcher.is_on_its_way(self.digest, self.now)) && fetcher.peer().is_some()
    }

    /// Sends as few as possible of the nodes `without` parent to the source. `is_awaited`: another holder is expected
    /// soon.
    fn at_the_source(&self, without: Vec<usize>, is_awaited: bool) -> Vec<(usize, Option<FetchFrom>)> {
        let asks =
            |index: &usize| self.fetchers[*index].assignment(self.digest).filter(|assigned| assigned.peers.is_empty());
        let (failing, waiting): (Vec<usize>, Vec<usize>) = without.into_iter().partition(|index| asks(index).is_some());
        let can_serve = |index: &&usize| self.fetchers[**index].peer().is_some();
        let best = waiting.iter().filter(can_serve).min_by_key(|index| !self.fetchers[**index].is_well()).copied();
        let last = failing.iter().filter_map(asks).map(|assigned| assigned.since).max();
        let in_time = last.is_none_or(|last| self.now.abs_diff(last) >= pause(failing.len()).unsigned_abs());
        let chosen = |index: usize| match best {
            _ if is_awaited => false,
            Some(best) => in_time && index == best,
            // None of these nodes can serve others, so there is no point in waiting.
            None => true,
        };
        // Nodes that fail at the source keep trying there until there is a holder for them.
        let failing = failing.iter().map(|index| (*index, asks(index).cloned()));
        let waiting = waiting.iter().map(|index| (*index, chosen(*index).then(|| self.assign(Vec::new()))));
        failing.chain(waiting).collect()
    }

    /// A new assignment to `peers`; to the source if that is empty.
    fn assign(&self, peers: Vec<String>) -> FetchFrom {
        FetchFrom { digest: self.digest.to_owned(), peers, since: self.now }
    }
}

/// The nodes that may be a parent, and how many children each has.
struct FetchTree<'a> {
    /// Addresses of the holders, followed by those of the nodes that will hold the set soon.
    parents: Vec<&'a str>,
    /// How many of `parents` are holders.
    holders: usize,
    /// Position in `parents`, by address.
    index: HashMap<&'a str, usize>,
    /// (is not a holder yet, children, position) of the parents that may get another child.
    free: BTreeSet<(bool, usize, usize)>,
}

impl<'a> FetchTree<'a> {
    fn of(set: &Set<'a>) -> Self {
        let same_platform = || set.fetchers.iter().filter(|fetcher| fetcher.platform() == Some(set.platform));
        let mut parents: Vec<_> = same_platform().filter_map(|fetcher| fetcher.serves(set.digest)).collect();
        let holders = parents.len();
        parents.extend(same_platform().filter_map(|fetcher| fetcher.serves_soon(set.digest, set.now)));
        let index: HashMap<_, _> = parents.iter().copied().zip(0..).collect();
        let mut children = vec![0; parents.len()];
        for fetcher in set.fetchers {
            let Some(assigned) = fetcher.assignment(set.digest) else { continue };
            let parent = if fetcher.has(set.digest) {
                assigned.peers.first().and_then(|parent| index.get(parent.as_str()))
            } else if fetcher.is_on_its_way(set.digest, set.now) {
                assigned.peers.iter().find_map(|peer| index.get(peer.as_str()))
            } else {
                None
            };
            if let Some(parent) = parent {
                children[*parent] += 1;
            }
        }
        let free = children.into_iter().zip(0..).filter(|(children, _)| *children < CHILDREN);
        let free = free.map(|(children, parent)| (parent >= holders, children, parent)).collect();
        Self { parents, holders, index, free }
    }

    /// Takes a place for one more child. Returns the address of the parent with the fewest children, followed by those
    /// of the holders to try after it. None if no parent has a place left.
    fn next(&mut self) -> Option<Vec<String>> {
        let (is_early, children, parent) = self.free.pop_first()?;
        if children + 1 < CHILDREN {
            self.free.insert((is_early, children + 1, parent));
        }
        // The holders after the parent, so that the children of different parents try different ones.
        let others = self.holders.saturating_sub(usize::from(!is_early)).min(FALLBACKS);
        let around = self.parents[..self.holders].iter().cycle().skip(parent + 1).take(others);
        Some([&self.parents[parent]].into_iter().chain(around).map(|peer| (*peer).to_owned()).collect())
    }
}

/// How long no further node is sent to the source after `failing` nodes have failed there, in seconds.
fn pause(failing: usize) -> i64 {
    let doublings = u32::try_from(failing.saturating_sub(2)).unwrap_or(u32::MAX).min(6);
    if failing < 2 { 0 } else { (ASK_AGAIN << doublings).min(LONGEST_PAUSE) }
}
