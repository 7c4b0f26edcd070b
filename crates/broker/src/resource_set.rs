//! How much a resource set has, and on which ranks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use api::IdSet;
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

/// The parts of R (RFC 20) that we count.
#[derive(Deserialize, Clone, Debug, Default, PartialEq)]
pub struct ResourceSet {
    execution: Execution,
}

#[derive(Deserialize, Clone, Debug, Default, PartialEq)]
struct Execution {
    #[serde(rename = "R_lite", default)]
    entries: Vec<Entry>,
    #[serde(default)]
    nodelist: Vec<String>,
}

#[derive(Deserialize, Clone, Debug, PartialEq)]
struct Entry {
    rank: IdSet,
    children: BTreeMap<String, IdSet>,
}

impl ResourceSet {
    /// The names of its ranks. A nodelist is in rank order (RFC 20).
    pub(super) fn names(&self) -> BTreeMap<u32, String> {
        let names = self.execution.nodelist.iter().flat_map(|names| hostlist::decode(names));
        self.amount().ranks.0.into_iter().zip(names).collect()
    }

    /// Number of cores by rank.
    pub(super) fn cores(&self) -> BTreeMap<u32, usize> {
        let mut cores = BTreeMap::new();
        for Entry { rank, children } in &self.execution.entries {
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
        for Entry { rank, children } in &self.execution.entries {
            let ranks = rank.0.iter().copied().filter(|rank| is_meant(*rank)).collect::<IdSet>();
            let count = |kind| ranks.len() * children.get(kind).map_or(0, IdSet::len);
            amount.cores += count("core");
            amount.gpus += count("gpu");
            amount.ranks.0.extend(ranks.0);
        }
        amount
    }
}
