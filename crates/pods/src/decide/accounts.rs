//! How many cores of each node jobs and pods have, and how many of them both have.

use std::collections::BTreeMap;

use api::{Account, IdSet, Rank};

use super::{memory::OverlapMemory, round::Round, shadows};
use crate::{
    jobs::HeldCores,
    target::Target,
    time::{Millis, SECOND},
};

/// An overlap counts once it has lasted this long: before, a pod may be about to end.
const LASTS: Millis = 2 * SECOND;

/// The account of all nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Accounts {
    /// By the name of the node.
    pub nodes: BTreeMap<String, Account>,
    /// The ranks on which host jobs have had cores for a while that pods of other schedulers use. They are to get no more jobs until
    /// that is over. None in the first moments: none of them has lasted for a while.
    pub overlapping_on: Option<IdSet>,
    /// How often that has happened.
    pub overlaps: u32,
    /// How long the longest of these lasted, or lasts.
    pub longest_overlap: Millis,
}

impl Accounts {
    /// How many cores pods of other schedulers use, and how many of them another job has.
    pub fn of_other_pods(&self) -> (u32, u32) {
        let add = |(used, overlapping): (u32, u32), account: &Account| {
            (used.saturating_add(account.other_pods), overlapping.saturating_add(account.overlapping))
        };
        self.nodes.values().fold((0, 0), add)
    }
}

/// The account of each rank.
pub(super) fn by_rank(round: &Round) -> BTreeMap<Rank, Account> {
    let of_target = |(rank, target): (&Rank, &Target)| {
        let HeldCores { hosts: host_jobs, gangs, .. } = round.held_cores(*rank);
        let other_pods = shadows::used_on(round, target);
        let by_jobs = host_jobs.saturating_add(gangs);
        // A resize that kubelet has deferred waits for cores, and uses none.
        let used = shadows::used_now_on(round, target);
        let overlapping = by_jobs.saturating_add(used).saturating_sub(target.cores).min(used);
        let placeholder = round.placeholders.get(target.node.as_str());
        let requested_milli_cpu = placeholder.map(|(_, placeholder)| placeholder.asks.cpu);
        (*rank, Account { host_jobs, gangs, other_pods, overlapping, requested_milli_cpu })
    };
    round.world.targets.iter().map(of_target).collect()
}

/// What is reported of all accounts.
pub(super) fn report(round: &mut Round, accounts: &BTreeMap<Rank, Account>, memory: &mut OverlapMemory) -> Accounts {
    let now = round.now;
    let known = memory.begun.get_or_insert(now).saturating_add(LASTS);
    round.wake_at(known);
    let is_overlap = |account: &Account| account.overlapping > 0 && account.host_jobs > 0;
    for (rank, _) in accounts.iter().filter(|(_, account)| is_overlap(account)) {
        memory.since.entry(*rank).or_insert(now);
    }
    let OverlapMemory { since, counted, count, longest, .. } = memory;
    since.retain(|rank, since| {
        let lasts = accounts.get(rank).is_some_and(is_overlap);
        let counts_at = since.saturating_add(LASTS);
        if lasts && now < counts_at {
            round.wake_at(counts_at);
        } else if lasts && counted.0.insert(*rank) {
            *count = count.saturating_add(1);
        }
        if counted.contains(*rank) {
            *longest = (*longest).max(now.saturating_sub(*since));
        }
        if !lasts {
            counted.0.remove(rank);
        }
        lasts
    });
    let node = |(rank, account): (&Rank, &Account)| Some((round.world.targets.get(rank)?.node.clone(), *account));
    Accounts {
        nodes: accounts.iter().filter_map(node).collect(),
        overlapping_on: (now >= known).then(|| memory.counted.clone()),
        overlaps: memory.count,
        longest_overlap: memory.longest,
    }
}
