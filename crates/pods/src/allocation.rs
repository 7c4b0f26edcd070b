//! The slots that a job was given, from its R (RFC 20).

use std::collections::BTreeMap;

use api::{IdSet, Rank};
use broker::resource_set::ResourceSet;

/// The resources for one pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot {
    /// Where.
    pub rank: Rank,
    /// Which cores.
    pub cores: IdSet,
}

/// R is not what the job asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocationError {
    /// R could not be read.
    #[error("its R can't be read: {0}")]
    Unreadable(String),
    /// A rank's cores are no whole number of slots.
    #[error("its R has {found} cores on rank {rank}, which are no slots of {cores}")]
    OddCores {
        /// The rank.
        rank: Rank,
        /// Number of cores there.
        found: usize,
        /// Cores of a slot.
        cores: u32,
    },
    /// More or fewer slots than the job has.
    #[error("its R has {found} slots, and it asked for {slots}")]
    Count {
        /// Number of slots in R.
        found: usize,
        /// Number of slots of the job.
        slots: u32,
    },
}

/// The slots of a job with `slots` slots of `cores` cores each, in order of ranks and cores.
///
/// # Errors
/// [`AllocationError`].
pub fn slots(r: &ResourceSet, slots: u32, cores: u32) -> Result<Vec<Slot>, AllocationError> {
    let mut dealt = Vec::new();
    for (rank, kinds) in r.by_rank() {
        let ids: Vec<u32> = kinds.get("core").map(|ids| ids.0.iter().copied().collect()).unwrap_or_default();
        let size = usize::try_from(cores.max(1)).unwrap_or(usize::MAX);
        if ids.is_empty() || !ids.len().is_multiple_of(size) {
            return Err(AllocationError::OddCores { rank, found: ids.len(), cores });
        }
        dealt.extend(ids.chunks(size).map(|ids| Slot { rank, cores: ids.iter().copied().collect() }));
    }
    match u32::try_from(dealt.len()) == Ok(slots) {
        true => Ok(dealt),
        false => Err(AllocationError::Count { found: dealt.len(), slots }),
    }
}

/// The cores of a job on each of its ranks.
pub fn one_slot_a_rank(r: &ResourceSet) -> Vec<Slot> {
    let cores = |kinds: BTreeMap<String, IdSet>| kinds.get("core").cloned().unwrap_or_default();
    r.by_rank().into_iter().map(|(rank, kinds)| Slot { rank, cores: cores(kinds) }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn r(entries: Value) -> ResourceSet {
        serde_json::from_value(json!({"version": 1, "execution": {"R_lite": entries, "nodelist": ["n[2-3]"]}})).unwrap()
    }

    #[test]
    fn slots_are_dealt_over_every_rank_of_every_entry() {
        for (what, entries, count, cores, expected) in [
            (
                "entries in any order, and GPUs",
                json!([{"rank": "3", "children": {"core": "2-5", "gpu": "0-1"}}, {"rank": "2", "children": {"core": "5,7"}}]),
                3,
                2,
                vec!["2:5,7", "3:2-3", "3:4-5"],
            ),
            (
                "one entry for several ranks",
                json!([{"rank": "0-1,4", "children": {"core": "0"}}]),
                3,
                1,
                vec!["0:0", "1:0", "4:0"],
            ),
            (
                "a rank in two entries",
                json!([{"rank": "0", "children": {"core": "1"}}, {"rank": "0", "children": {"core": "0"}}]),
                1,
                2,
                vec!["0:0-1"],
            ),
        ] {
            let slots = slots(&r(entries), count, cores).unwrap();
            let shown: Vec<_> = slots.iter().map(|slot| format!("{}:{}", slot.rank, slot.cores)).collect();
            assert_eq!(shown, expected, "{what}");
        }
    }

    #[test]
    fn an_r_that_is_not_what_was_asked_for_is_refused() {
        for (entries, count, cores, expected) in [
            (
                json!([{"rank": "0", "children": {"core": "0-2"}}]),
                1,
                2,
                AllocationError::OddCores { rank: 0, found: 3, cores: 2 },
            ),
            (
                json!([{"rank": "0", "children": {"gpu": "0"}}]),
                1,
                1,
                AllocationError::OddCores { rank: 0, found: 0, cores: 1 },
            ),
            (json!([{"rank": "0-1", "children": {"core": "0"}}]), 1, 1, AllocationError::Count { found: 2, slots: 1 }),
            (json!([]), 1, 1, AllocationError::Count { found: 0, slots: 1 }),
        ] {
            assert_eq!(slots(&r(entries.clone()), count, cores), Err(expected), "{entries}");
        }
    }
}
