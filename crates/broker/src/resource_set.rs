//! How much a resource set has, and on which ranks.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use api::{IdSet, MOST_DECLARED, MOST_RANKS, NotAnIdSet};
use model::hostlist;

/// An amount of resources, and the ranks that have them.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Ranks that have any of it.
    pub ranks: IdSet,
    /// Number of cores.
    pub cores: usize,
    /// Number of GPUs.
    pub gpus: usize,
}

/// The parts of R (RFC 20) that we use.
#[derive(Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(try_from = "Written")]
pub struct ResourceSet {
    entries: Vec<Entry>,
    nodelist: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
struct Entry {
    rank: IdSet,
    children: BTreeMap<String, IdSet>,
}

/// R as it is written. A few bytes of it can stand for millions of ids.
#[derive(Deserialize)]
struct Written {
    execution: WrittenExecution,
}

#[derive(Deserialize)]
struct WrittenExecution {
    #[serde(rename = "R_lite", default)]
    entries: Vec<WrittenEntry>,
    #[serde(default)]
    nodelist: Vec<String>,
}

#[derive(Deserialize)]
struct WrittenEntry {
    rank: String,
    children: BTreeMap<String, String>,
}

/// Why R is not read.
#[derive(Debug, thiserror::Error)]
enum UnreadableSet {
    /// A rank or a resource.
    #[error(transparent)]
    NotAnIdSet(#[from] NotAnIdSet),
    /// Whoever can answer in the place of a broker could otherwise take all memory.
    #[error("it has more than {MOST_IDS} ids of ranks, cores and other resources on all ranks together")]
    TooMany,
    /// Each rank gets a copy of it.
    #[error("it has a kind of resource with a name of {0} bytes, more than {LONGEST_KIND}")]
    LongKind(usize),
    /// [`ResourceSet::by_rank`] copies each kind to each rank.
    #[error("it has more than {MOST_KINDS} kinds of resources")]
    ManyKinds,
}

/// Most ids on all ranks together. No roster declares more: [`MOST_DECLARED`] bounds its cores and GPUs, [`MOST_RANKS`] its ranks.
const MOST_IDS: u64 = MOST_DECLARED + MOST_RANKS as u64;

/// Longest name of a kind of resource, in bytes. Flux has `core` and `gpu`.
const LONGEST_KIND: usize = 64;
/// Most kinds of resources. Flux has two.
const MOST_KINDS: usize = 8;

impl TryFrom<Written> for ResourceSet {
    type Error = UnreadableSet;

    fn try_from(Written { execution }: Written) -> Result<Self, UnreadableSet> {
        let (mut left, mut kinds) = (MOST_IDS, BTreeSet::new());
        let mut entry = |written: WrittenEntry| {
            let rank: IdSet = written.rank.parse()?;
            let mut children = BTreeMap::new();
            // Charged as if expanded, as `by_rank` does; at least 1, because an entry without ranks, or a kind without ids, takes memory, too.
            let each = rank.len().max(1) as u64;
            left = left.checked_sub(each).ok_or(UnreadableSet::TooMany)?;
            for (kind, ids) in written.children {
                if kind.len() > LONGEST_KIND {
                    return Err(UnreadableSet::LongKind(kind.len()));
                }
                kinds.insert(kind.clone());
                if kinds.len() > MOST_KINDS {
                    return Err(UnreadableSet::ManyKinds);
                }
                let ids: IdSet = ids.parse()?;
                let on_each = ids.len().max(1) as u64;
                left = left.checked_sub(each * on_each).ok_or(UnreadableSet::TooMany)?;
                children.insert(kind, ids);
            }
            Ok(Entry { rank, children })
        };
        let entries = execution.entries.into_iter().map(&mut entry).collect::<Result<_, UnreadableSet>>()?;
        Ok(Self { entries, nodelist: execution.nodelist })
    }
}

impl ResourceSet {
    /// True if it is of no rank.
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(|entry| entry.rank.is_empty())
    }

    /// The ids on each rank, by kind (`core`, `gpu`). Entries may be in any order, and one may stand for several ranks.
    /// A nodelist need not be in the order of the entries, so the roster gives the names of the ranks.
    pub fn by_rank(&self) -> BTreeMap<u32, BTreeMap<String, IdSet>> {
        let mut by_rank = BTreeMap::<u32, BTreeMap<String, IdSet>>::new();
        for Entry { rank, children } in &self.entries {
            for rank in &rank.0 {
                let kinds = by_rank.entry(*rank).or_default();
                for (kind, ids) in children {
                    kinds.entry(kind.clone()).or_default().0.extend(&ids.0);
                }
            }
        }
        by_rank
    }

    /// The names of its ranks. A nodelist is in rank order (RFC 20).
    pub(super) fn names(&self) -> BTreeMap<u32, String> {
        let names = self.nodelist.iter().flat_map(|names| hostlist::decode(names));
        self.amount().ranks.0.into_iter().zip(names).take(MOST_RANKS as usize).collect()
    }

    /// Number of cores by rank.
    pub(super) fn cores(&self) -> BTreeMap<u32, usize> {
        let mut cores = BTreeMap::new();
        for Entry { rank, children } in &self.entries {
            let each = children.get("core").map_or(0, IdSet::len);
            rank.0.iter().for_each(|rank| *cores.entry(*rank).or_default() += each);
        }
        cores
    }

    pub(super) fn amount(&self) -> Amount {
        self.amount_on(|_| true)
    }

    pub(super) fn amount_on(&self, is_meant: impl Fn(u32) -> bool) -> Amount {
        let mut amount = Amount::default();
        for Entry { rank, children } in &self.entries {
            let ranks = rank.0.iter().copied().filter(|rank| is_meant(*rank)).collect::<IdSet>();
            let count = |kind| ranks.len() * children.get(kind).map_or(0, IdSet::len);
            amount.cores += count("core");
            amount.gpus += count("gpu");
            amount.ranks.0.extend(ranks.0);
        }
        amount
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_few_bytes_that_stand_for_billions_of_ids_are_not_read() {
        let read = |entries: Vec<serde_json::Value>| {
            serde_json::from_value::<ResourceSet>(json!({"execution": {"R_lite": entries}})).is_ok()
        };
        let entry = |ranks: &str, cores: &str| json!({"rank": ranks, "children": {"core": cores}});
        assert!(read(vec![entry("0-16383", "0-1022")]));
        assert!(!read(vec![entry("0-65535", "0-65535")]));
        assert!(!read(vec![entry("0", "0-65535"); 300]));
        assert!(!read(vec![entry("", "0-65535"); 300]));
    }

    #[test]
    fn r_with_many_kinds_of_resources_or_a_long_name_of_one_is_not_read() {
        for (what, names, expected) in [
            ("a long name", vec!["k".repeat(64)], true),
            ("one that is too long", vec!["k".repeat(65)], false),
            ("eight kinds", (0..8).map(|kind| format!("k{kind}")).collect(), true),
            ("nine", (0..9).map(|kind| format!("k{kind}")).collect(), false),
        ] {
            let entries: Vec<_> =
                names.iter().map(|kind| json!({"rank": "0-65535", "children": {kind.as_str(): ""}})).collect();
            let read = serde_json::from_value::<ResourceSet>(json!({"execution": {"R_lite": entries}}));
            assert_eq!(read.is_ok(), expected, "{what}");
        }
    }

    #[test]
    fn folded_and_unsorted_entries_are_expanded_to_the_ids_on_each_rank() {
        let r: ResourceSet = serde_json::from_value(json!({"version": 1, "execution": {
            "R_lite": [
                {"rank": "3", "children": {"core": "2-7", "gpu": "0-1"}},
                {"rank": "1-2", "children": {"core": "0,7"}},
                {"rank": "2", "children": {"core": "5"}},
            ],
            "nodelist": ["n[1-3]"], "starttime": 1_795_402_747, "expiration": 9_223_372_036_i64,
        }}))
        .unwrap();
        let by_rank = r.by_rank();
        let shown: Vec<_> = by_rank
            .iter()
            .flat_map(|(rank, kinds)| kinds.iter().map(move |(kind, ids)| format!("{rank} {kind} {ids}")))
            .collect();
        assert_eq!(shown, ["1 core 0,7", "2 core 0,5,7", "3 core 2-7", "3 gpu 0-1"]);
        assert!(ResourceSet::default().by_rank().is_empty());
    }
}
