//! Which ranks the lead's broker must drain or undrain: the difference between what the planner wants and what the broker reports.
//! Ranks that people have drained stay as they are.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use api::{IdSet, LONGEST_DRAIN_REASON, MOST_DRAIN_REASONS};
use broker::{
    rfc3::{Client, RpcError},
    status::{self, DrainMode, Drained, InstanceStatus},
};

/// Prefix of our drain reasons; reasons of administrators have another one.
const PREFIX: &str = "flux-distribute: ";

/// Reason by which `flux-distribute uninstall` drains a follower's rank until its broker has ended. The command undrains the rank if
/// it does not go on; if the command was killed, the lead's agent does. The reason lacks [`PREFIX`], because the lead's agent of an
/// older version undrains every rank whose reason begins with that.
pub(super) const THIS_HOST_UNINSTALLED: &str = "flux-distribute uninstall: this host is being uninstalled by hand";
/// Seconds after which the command that drained a rank must have been killed: it only observes the host once more and stops the
/// broker.
const LONGEST_BY_HAND: f64 = 300.0;

/// What the broker must drain and undrain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DrainChange {
    /// Ranks to drain, by reason.
    pub drain: BTreeMap<String, IdSet>,
    /// Ranks that are drained for another reason of ours, or by their own broker, by the reason that they get.
    pub new_reason: BTreeMap<String, IdSet>,
    /// Ranks to undrain.
    pub undrain: IdSet,
}

impl DrainChange {
    /// The part that takes ranks away from the scheduler, if there is one.
    pub fn only_drains(&self) -> Option<Self> {
        (!self.drain.is_empty()).then(|| Self { drain: self.drain.clone(), ..Self::default() })
    }
}

/// Reason by which ranks are drained for the bridge.
const PODS_USE_CORES: &str = "pods of other schedulers use cores that jobs have there";

/// What the planner and the bridge want drained, by reason. A rank that both want has the planner's reason. `overlapping_on`: the ranks
/// where host jobs have cores that pods use; None if that is not known: then those that are drained for it stay drained.
pub fn wanted(
    by_planner: &BTreeMap<String, IdSet>,
    overlapping_on: Option<IdSet>,
    drained: &[Drained],
) -> BTreeMap<String, IdSet> {
    let is_for_bridge = |reason: &str| reason.strip_prefix(PREFIX) == Some(PODS_USE_CORES);
    let overlapping = overlapping_on.unwrap_or_else(|| ranks(drained, is_for_bridge));
    let is_planners = |rank: &u32| by_planner.values().any(|ranks| ranks.contains(*rank));
    let by_bridge: BTreeSet<_> = overlapping.0.into_iter().filter(|rank| !is_planners(rank)).collect();
    let mut all = by_planner.clone();
    if !by_bridge.is_empty() {
        all.insert(PODS_USE_CORES.to_owned(), IdSet(by_bridge));
    }
    all
}

/// Ranks that are drained for a reason of ours, and wanted ones that people had drained before.
pub fn in_effect(wanted: &BTreeMap<String, IdSet>, drained: &[Drained]) -> IdSet {
    let is_wanted = |rank: &u32| wanted.values().any(|ranks| ranks.contains(*rank));
    let theirs = ranks(drained, is_theirs).0.into_iter().filter(is_wanted);
    ranks(drained, is_ours).0.into_iter().chain(theirs).collect()
}

/// Ranks that people have drained.
pub fn by_others(drained: &[Drained]) -> IdSet {
    ranks(drained, is_theirs)
}

/// Why people have drained ranks: the reasons with the most ranks, each up to a limit. A reason that nobody gave is none.
pub fn reasons_of_others(drained: &[Drained]) -> BTreeMap<String, IdSet> {
    let mut reasons = BTreeMap::<String, IdSet>::new();
    for drained in drained.iter().filter(|drained| is_theirs(&drained.reason) && !drained.reason.is_empty()) {
        let reason = drained.reason.chars().take(LONGEST_DRAIN_REASON).collect();
        reasons.entry(reason).or_default().0.extend(&drained.ranks.0);
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, ranks)| Reverse(ranks.len()));
    reasons.into_iter().take(MOST_DRAIN_REASONS).collect()
}

fn is_ours(reason: &str) -> bool {
    reason.starts_with(PREFIX) || reason == THIS_HOST_UNINSTALLED
}

/// A broker whose host has less than its rank declares drains itself (`rank 3 (node4) missing resources: core[2-7]`, flux-core's
/// topo.c). The planner then drains the rank for its own reason, and undrains it later.
fn is_its_own(reason: &str) -> bool {
    reason.starts_with("rank ") && reason.contains(" missing resources: ")
}

/// Drained by people.
fn is_theirs(reason: &str) -> bool {
    !is_ours(reason) && !is_its_own(reason)
}

fn ranks(drained: &[Drained], by: fn(&str) -> bool) -> IdSet {
    let drained = drained.iter().filter(|drained| by(&drained.reason));
    drained.flat_map(|drained| drained.ranks.0.iter().copied()).collect()
}

/// What to change; None if nothing. Ranks that the broker excludes stay as they are for now: it would refuse the whole request.
/// `now`: seconds since 1970.
pub fn change(wanted: &BTreeMap<String, IdSet>, instance: &InstanceStatus, now: f64) -> Option<DrainChange> {
    let drained = instance.drained.as_slice();
    let theirs = ranks(drained, is_theirs);
    let has = |rank: &u32, reason: &str| {
        drained.iter().any(|drained| drained.ranks.contains(*rank) && drained.reason == reason)
    };
    let is_missing =
        |rank: &u32, reason: &str| !theirs.contains(*rank) && !instance.excluded.contains(*rank) && !has(rank, reason);
    let is_drained = |rank: u32| drained.iter().any(|drained| drained.ranks.contains(rank));
    let mut change = DrainChange::default();
    for (reason, ranks) in wanted {
        let reason = format!("{PREFIX}{reason}");
        let missing = ranks.0.iter().copied().filter(|rank| is_missing(rank, &reason));
        let (new_reason, drain): (BTreeSet<_>, BTreeSet<_>) = missing.partition(|rank| is_drained(*rank));
        let add = |changes: &mut BTreeMap<_, _>, ranks: BTreeSet<_>| {
            if !ranks.is_empty() {
                changes.insert(reason.clone(), IdSet(ranks));
            }
        };
        add(&mut change.drain, drain);
        add(&mut change.new_reason, new_reason);
    }
    let is_wanted = |rank: &u32| wanted.values().any(|ranks| ranks.contains(*rank));
    // A rank that is offline gets no jobs, and its next broker should get some.
    let is_by_hand = |drained: &Drained, rank: u32| {
        let is_recent = now - drained.since < LONGEST_BY_HAND;
        drained.reason == THIS_HOST_UNINSTALLED && is_recent && instance.online.contains(rank)
    };
    for drained in drained.iter().filter(|drained| is_ours(&drained.reason)) {
        let ranks = drained.ranks.0.iter().copied();
        change.undrain.0.extend(ranks.filter(|rank| !is_wanted(rank) && !is_by_hand(drained, *rank)));
    }
    (change != DrainChange::default()).then_some(change)
}

/// Of `ranks`, those that are drained for `reason`.
pub(super) fn drained_for(reason: &str, ranks: &IdSet, instance: &InstanceStatus) -> IdSet {
    let drained = instance.drained.iter().filter(|drained| drained.reason == reason);
    drained.flat_map(|drained| drained.ranks.0.iter().copied()).filter(|rank| ranks.contains(*rank)).collect()
}

/// Makes the lead's broker drain and undrain.
///
/// # Errors
/// The broker refused or did not answer; what it did before stays.
pub async fn apply(client: &Client, change: &DrainChange) -> Result<(), RpcError> {
    if !change.undrain.is_empty() {
        status::undrain(client, &change.undrain).await?;
    }
    for (reason, ranks) in &change.drain {
        // People may have drained them since the broker was asked: a reason of theirs stays, and with it their drain.
        status::drain(client, ranks, reason, DrainMode::Keep).await?;
    }
    for (reason, ranks) in &change.new_reason {
        status::drain(client, ranks, reason, DrainMode::Replace).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reason in flux-core's own form.
    const VERIFIED: &str = "rank 1 (node2) missing resources: core1";

    #[test]
    fn ranks_whose_cores_are_used_twice_are_drained_too() {
        let set = |text: &str| text.parse::<IdSet>().unwrap();
        let by_planner: BTreeMap<_, _> = [("cordoned".to_owned(), set("1"))].into();
        let drained = |reason: &str| [Drained { ranks: set("3"), reason: format!("{PREFIX}{reason}"), since: 1000.0 }];
        for (overlapping_on, before, expected) in [
            (Some(""), PODS_USE_CORES, None),
            (Some("1"), PODS_USE_CORES, None),
            (Some("1-2"), PODS_USE_CORES, Some("2")),
            (None, PODS_USE_CORES, Some("3")),
            (None, "cordoned", None),
        ] {
            let all = wanted(&by_planner, overlapping_on.map(set), &drained(before));
            assert_eq!(
                all.get(PODS_USE_CORES).map(IdSet::to_string).as_deref(),
                expected,
                "{overlapping_on:?} {before}"
            );
            assert_eq!(all["cordoned"], set("1"));
        }
    }

    #[test]
    fn only_ranks_that_we_drained_are_undrained() {
        let set = |text: &str| text.parse::<IdSet>().unwrap();
        let wanted = |pairs: &[(&str, &str)]| -> BTreeMap<String, IdSet> {
            pairs.iter().map(|(reason, ranks)| ((*reason).to_owned(), set(ranks))).collect()
        };
        let drained = |pairs: &[(&str, &str)]| -> Vec<Drained> {
            let drained = |ranks, reason: &str| Drained { ranks: set(ranks), reason: reason.to_owned(), since: 1000.0 };
            pairs.iter().map(|(ranks, reason)| drained(ranks, reason)).collect()
        };
        let told =
            |pairs: &[_]| InstanceStatus { drained: drained(pairs), excluded: set("9"), ..InstanceStatus::default() };
        for (want, there, drain, new_reason, undrain) in [
            (&[][..], &[][..], &[][..], &[][..], ""),
            (&[("cordoned", "1-2")], &[], &[("flux-distribute: cordoned", "1-2")], &[], ""),
            (&[("cordoned", "1-2")], &[("1-2", "flux-distribute: cordoned")], &[], &[], ""),
            (&[], &[("1-2", "flux-distribute: cordoned"), ("3", "bad disk")], &[], &[], "1-2"),
            (
                &[("cordoned", "1-3")],
                &[("1", "flux-distribute: cordoned"), ("3", "bad disk")],
                &[("flux-distribute: cordoned", "2")],
                &[],
                "",
            ),
            (&[("cordoned", "1,9")], &[], &[("flux-distribute: cordoned", "1")], &[], ""),
            (&[], &[("1", VERIFIED)], &[], &[], ""),
            (&[("it has 1 cores", "1")], &[("1", VERIFIED)], &[], &[("flux-distribute: it has 1 cores", "1")], ""),
            (
                &[("size is 1", "1")],
                &[("1-2", "flux-distribute: cordoned")],
                &[],
                &[("flux-distribute: size is 1", "1")],
                "2",
            ),
        ] {
            let expected = DrainChange { drain: wanted(drain), new_reason: wanted(new_reason), undrain: set(undrain) };
            let expected = (expected != DrainChange::default()).then_some(expected);
            assert_eq!(change(&wanted(want), &told(there), 1000.0), expected, "{want:?} {there:?}");
        }
        let there = drained(&[("1", "flux-distribute: cordoned"), ("2-3", "bad disk"), ("4", VERIFIED)]);
        for (want, expected) in [(&[][..], "1"), (&[("cordoned", "2,4-5")], "1-2")] {
            assert_eq!(in_effect(&wanted(want), &there), set(expected), "{want:?}");
        }
    }

    #[test]
    fn a_drain_by_uninstall_ends_with_the_broker_or_with_a_killed_command() {
        let set = |text: &str| text.parse::<IdSet>().unwrap();
        for (online, now, undrained) in [("0-3", 1010.0, ""), ("0-1,3", 1010.0, "2"), ("0-3", 1400.0, "1-2")] {
            let drained = Drained { ranks: set("1-2"), reason: THIS_HOST_UNINSTALLED.to_owned(), since: 1000.0 };
            let told = InstanceStatus { drained: vec![drained], online: set(online), ..InstanceStatus::default() };
            let expected = DrainChange { undrain: set(undrained), ..DrainChange::default() };
            let expected = (expected != DrainChange::default()).then_some(expected);
            assert_eq!(change(&BTreeMap::new(), &told, now), expected, "{online} {now}");
        }
    }
}
