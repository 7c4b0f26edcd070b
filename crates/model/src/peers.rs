//! Who fetches the packages from whom, so that the internet is asked once for all nodes of a platform: one node asks the
//! source, the others fetch from those that hold the archives already, or from the one that is fetching them from the source,
//! each from a parent with at most [`CHILDREN`] children.
//!
//! There is no memory but the FluxNodes: who was told what is in their specs, and what has become of it in their status. So
//! a planner that has just taken over decides the same, and what was told and is still good is never told anew.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
};

use api::{FetchFrom, FluxNodeStatus, NodePhase, PEER_PORT};

/// So many nodes are sent to one parent, over time too: nobody uploads a package set more often.
pub const CHILDREN: usize = 4;
/// Other holders that a node may turn to before it asks the source by itself.
const FALLBACKS: usize = 2;
/// So many seconds a node that was told may take before it says that it is installing: its agent may be gone.
const BEGIN_WITHIN: i64 = 120;
/// So many seconds it may take until it holds the archives. It is not stopped then, but others don't wait for it any longer.
const HOLD_WITHIN: i64 = 900;
/// The second that fails at the source is followed so many seconds later, each further one after twice as long: a source
/// that is down must not have all nodes at it when it is back.
const ASK_AGAIN: i64 = 10;
/// The longest of these pauses.
const LONGEST_PAUSE: i64 = 600;

/// True if every URL is a `file:` URL; false for an empty list.
pub fn is_on_every_host(urls: &[String]) -> bool {
    !urls.is_empty() && urls.iter().all(|url| url.starts_with("file:"))
}

/// One node, as far as packages go.
#[derive(Debug, Clone, Copy)]
pub struct Fetcher<'a> {
    /// Digest of the package set that it is to have; None: nothing is to be installed there for now.
    pub wants: Option<&'a str>,
    /// What its FluxNode's spec tells it.
    pub told: Option<&'a FetchFrom>,
    /// What its agent says.
    pub report: &'a FluxNodeStatus,
    /// InternalIP of its Node, as long as that is Ready.
    pub address: Option<IpAddr>,
}

impl<'a> Fetcher<'a> {
    fn platform(&self) -> Option<&'a str> {
        self.report.facts.as_ref().map(|facts| facts.platform.as_str())
    }

    /// It has the package set, unpacked or as archives.
    fn has(&self, digest: &str) -> bool {
        self.report.digest.as_deref() == Some(digest)
            || self.report.adopted.as_ref().is_some_and(|adopted| adopted.digest == digest)
            || self.report.holds.iter().any(|held| held == digest)
    }

    /// Where it serves archives. Others are sent to the node's own address only: a node must not lead them elsewhere.
    fn peer(&self) -> Option<&'a str> {
        let peer = self.report.peer.as_deref()?;
        let told: SocketAddr = peer.parse().ok()?;
        (told == SocketAddr::new(self.address?, PEER_PORT)).then_some(peer)
    }

    fn serves(&self, digest: &str) -> Option<&'a str> {
        self.report.holds.iter().any(|held| held == digest).then(|| self.peer()).flatten()
    }

    /// Where it serves what has come so far, while it asks the source. Nobody else is a parent before it holds all, so that
    /// no two ever wait for each other; and only who says that it has begun is, so that its agent knows what it is to have.
    fn serves_soon(&self, digest: &str, now: i64) -> Option<&'a str> {
        let asks = self.told(digest).is_some_and(|told| told.peers.is_empty());
        let begun = self.report.phase == NodePhase::Installing && self.is_on_its_way(digest, now);
        (asks && begun).then(|| self.peer()).flatten()
    }

    /// Its words for `digest`.
    fn told(&self, digest: &str) -> Option<&'a FetchFrom> {
        self.told.filter(|told| told.digest == digest)
    }

    fn is_well(&self) -> bool {
        self.address.is_some() && self.report.phase != NodePhase::Failed
    }

    /// It was told, does not have it yet, and will.
    fn is_on_its_way(&self, digest: &str, now: i64) -> bool {
        // One whose broker is online has begun at once, beside it, and is not told from one that hasn't.
        let begun = matches!(self.report.phase, NodePhase::Installing | NodePhase::Online | NodePhase::Draining);
        let patience = if begun { HOLD_WITHIN } else { BEGIN_WITHIN };
        let in_time = self.told(digest).is_some_and(|told| now - told.since < patience);
        in_time && self.wants == Some(digest) && !self.has(digest) && self.is_well()
    }
}

/// What each node is told next. The first of `fetchers` that can is the one that asks the source. A set for which `is_local`
/// holds is on every node's own disk: nobody needs anybody.
pub fn decide(fetchers: &[Fetcher], is_local: impl Fn(&str) -> bool, now: i64) -> Vec<Option<FetchFrom>> {
    let mut lacking: BTreeMap<(&str, &str), Vec<usize>> = BTreeMap::new();
    let mut next = Vec::with_capacity(fetchers.len());
    for (index, fetcher) in fetchers.iter().enumerate() {
        if let (Some(platform), Some(digest)) = (fetcher.platform(), fetcher.wants.filter(|set| !fetcher.has(set))) {
            lacking.entry((platform, digest)).or_default().push(index);
        }
        // What has been carried out stays: it tells how often its parent has uploaded the set.
        let stays = |told: &&FetchFrom| fetcher.has(&told.digest) || fetcher.wants.is_none();
        next.push(fetcher.told.filter(stays).cloned());
    }
    for ((platform, digest), lacking) in lacking {
        let set = Set { fetchers, platform, digest, now };
        for (index, told) in if is_local(digest) { set.all_at_once(lacking) } else { set.spread(lacking) } {
            next[index] = told;
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

impl<'a> Set<'a> {
    fn all_at_once(&self, lacking: Vec<usize>) -> Vec<(usize, Option<FetchFrom>)> {
        let told = |index: usize| {
            let kept = self.fetchers[index].told(self.digest).filter(|told| told.peers.is_empty());
            Some(kept.cloned().unwrap_or_else(|| self.tell(Vec::new())))
        };
        lacking.into_iter().map(|index| (index, told(index))).collect()
    }

    /// `lacking`: who has not got the set, in the order in which they are served.
    fn spread(&self, lacking: Vec<usize>) -> Vec<(usize, Option<FetchFrom>)> {
        let mut tree = Tree::of(self);
        let mut next = Vec::with_capacity(lacking.len());
        let mut without = Vec::new();
        for index in lacking {
            let fetcher = &self.fetchers[index];
            let told = fetcher.told(self.digest).filter(|told| self.is_good(fetcher, told, &tree)).cloned();
            match told.or_else(|| tree.next().map(|peers| self.tell(peers))) {
                Some(told) => next.push((index, Some(told))),
                None => without.push(index),
            }
        }
        let is_awaited = next.iter().any(|(index, told)| self.will_serve(&self.fetchers[*index], told.as_ref()));
        next.extend(self.at_the_source(without, is_awaited));
        next
    }

    /// A parent that is there, or a way to the source that leads on.
    fn is_good(&self, fetcher: &Fetcher, told: &FetchFrom, tree: &Tree) -> bool {
        match told.peers.as_slice() {
            [] => fetcher.is_on_its_way(self.digest, self.now),
            peers => peers.iter().any(|peer| tree.index.contains_key(peer.as_str())),
        }
    }

    /// It was told, just now or before, and is a holder soon.
    fn will_serve(&self, fetcher: &Fetcher, told: Option<&FetchFrom>) -> bool {
        let is_new = told.is_some_and(|told| told.since == self.now) && fetcher.is_well();
        (is_new || fetcher.is_on_its_way(self.digest, self.now)) && fetcher.peer().is_some()
    }

    /// For those that nobody has a place for: the source, for as few of them as can be. `is_awaited`: there will be another
    /// holder.
    fn at_the_source(&self, without: Vec<usize>, is_awaited: bool) -> Vec<(usize, Option<FetchFrom>)> {
        let asks = |index: &usize| self.fetchers[*index].told(self.digest).filter(|told| told.peers.is_empty());
        let (failing, waiting): (Vec<usize>, Vec<usize>) = without.into_iter().partition(|index| asks(index).is_some());
        let can_serve = |index: &&usize| self.fetchers[**index].peer().is_some();
        let best = waiting.iter().filter(can_serve).min_by_key(|index| !self.fetchers[**index].is_well()).copied();
        let last = failing.iter().filter_map(asks).map(|told| told.since).max();
        let in_time = last.is_none_or(|last| self.now - last >= pause(failing.len()));
        let chosen = |index: usize| match best {
            _ if is_awaited => false,
            Some(best) => in_time && index == best,
            // Nobody here can serve others, so nobody waits for another.
            None => true,
        };
        // Those that fail go on trying, until there is a holder for them.
        let failing = failing.iter().map(|index| (*index, asks(index).cloned()));
        let waiting = waiting.iter().map(|index| (*index, chosen(*index).then(|| self.tell(Vec::new()))));
        failing.chain(waiting).collect()
    }

    fn tell(&self, peers: Vec<String>) -> FetchFrom {
        FetchFrom { digest: self.digest.to_owned(), peers, since: self.now }
    }
}

/// Who may be a parent, and how many children each has.
struct Tree<'a> {
    /// The holders, then who holds the set soon.
    parents: Vec<&'a str>,
    /// So many are holders.
    holders: usize,
    index: HashMap<&'a str, usize>,
    /// (is no holder yet, children, index) of those that may get another one.
    free: BTreeSet<(bool, usize, usize)>,
}

impl<'a> Tree<'a> {
    fn of(set: &Set<'a>) -> Self {
        let kin = || set.fetchers.iter().filter(|fetcher| fetcher.platform() == Some(set.platform));
        let mut parents: Vec<_> = kin().filter_map(|fetcher| fetcher.serves(set.digest)).collect();
        let holders = parents.len();
        parents.extend(kin().filter_map(|fetcher| fetcher.serves_soon(set.digest, set.now)));
        let index: HashMap<_, _> = parents.iter().copied().zip(0..).collect();
        let mut children = vec![0; parents.len()];
        for fetcher in set.fetchers {
            let Some(told) = fetcher.told(set.digest) else { continue };
            let parent = if fetcher.has(set.digest) {
                told.peers.first().and_then(|parent| index.get(parent.as_str()))
            } else if fetcher.is_on_its_way(set.digest, set.now) {
                told.peers.iter().find_map(|peer| index.get(peer.as_str()))
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

    /// A parent for one more node, the one with the fewest children, and which holders to turn to after it.
    fn next(&mut self) -> Option<Vec<String>> {
        let (is_early, children, parent) = self.free.pop_first()?;
        if children + 1 < CHILDREN {
            self.free.insert((is_early, children + 1, parent));
        }
        // The neighbours, so that the children of different parents have different ones.
        let others = self.holders.saturating_sub(usize::from(!is_early)).min(FALLBACKS);
        let around = self.parents[..self.holders].iter().cycle().skip(parent + 1).take(others);
        Some([&self.parents[parent]].into_iter().chain(around).map(|peer| (*peer).to_owned()).collect())
    }
}

/// How long nobody else is sent to the source after `failing` nodes have failed there.
fn pause(failing: usize) -> i64 {
    let doublings = u32::try_from(failing.saturating_sub(2)).unwrap_or(u32::MAX).min(6);
    if failing < 2 { 0 } else { (ASK_AGAIN << doublings).min(LONGEST_PAUSE) }
}
