//! Which ranks the lead's broker is to drain or undrain: what the planner wants against what the broker says. What people
//! have drained themselves is theirs.

use std::collections::BTreeMap;

use crate::{
    api::IdSet,
    broker::{
        rfc3::{Client, RpcError},
        status::{self, Drained},
    },
};

/// How our reasons begin; what an administrator drains has other ones.
const PREFIX: &str = "flux-distribute: ";

/// What is to change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// Give no new jobs to these, by reason.
    pub drain: BTreeMap<String, IdSet>,
    /// Give jobs to these again.
    pub undrain: IdSet,
}

/// The ranks that are drained for a reason of ours.
pub fn ours(drained: &[Drained]) -> IdSet {
    let ours = drained.iter().filter(|drained| drained.reason.starts_with(PREFIX));
    ours.flat_map(|drained| drained.ranks.0.iter().copied()).collect()
}

/// What is to change; None where all is as it is wanted.
pub fn change(wanted: &BTreeMap<String, IdSet>, drained: &[Drained]) -> Option<Change> {
    let theirs: IdSet = drained
        .iter()
        .filter(|drained| !drained.reason.starts_with(PREFIX))
        .flat_map(|drained| drained.ranks.0.iter().copied())
        .collect();
    let has = |rank: &u32, reason: &str| {
        drained.iter().any(|drained| drained.ranks.contains(*rank) && drained.reason == reason)
    };
    let mut change = Change::default();
    for (reason, ranks) in wanted {
        let reason = format!("{PREFIX}{reason}");
        let missing: IdSet =
            ranks.0.iter().copied().filter(|rank| !theirs.contains(*rank) && !has(rank, &reason)).collect();
        if !missing.is_empty() {
            change.drain.insert(reason, missing);
        }
    }
    let is_wanted = |rank: &u32| wanted.values().any(|ranks| ranks.contains(*rank));
    change.undrain = ours(drained).0.into_iter().filter(|rank| !is_wanted(rank)).collect();
    (change != Change::default()).then_some(change)
}

/// Tells the lead's broker.
///
/// # Errors
/// The broker's.
pub async fn apply(client: &Client, change: &Change) -> Result<(), RpcError> {
    if !change.undrain.is_empty() {
        status::undrain(client, &change.undrain).await?;
    }
    for (reason, ranks) in &change.drain {
        status::drain(client, ranks, reason).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_we_have_drained_is_undrained() {
        let set = |text: &str| text.parse::<IdSet>().unwrap();
        let wanted = |pairs: &[(&str, &str)]| -> BTreeMap<String, IdSet> {
            pairs.iter().map(|(reason, ranks)| ((*reason).to_owned(), set(ranks))).collect()
        };
        let drained = |pairs: &[(&str, &str)]| -> Vec<Drained> {
            pairs.iter().map(|(ranks, reason)| Drained { ranks: set(ranks), reason: (*reason).to_owned() }).collect()
        };
        for (want, there, drain, undrain) in [
            (&[][..], &[][..], &[][..], ""),
            (&[("cordoned", "1-2")], &[], &[("flux-distribute: cordoned", "1-2")], ""),
            (&[("cordoned", "1-2")], &[("1-2", "flux-distribute: cordoned")], &[], ""),
            (&[], &[("1-2", "flux-distribute: cordoned"), ("3", "bad disk")], &[], "1-2"),
            (
                &[("cordoned", "1-3")],
                &[("1", "flux-distribute: cordoned"), ("3", "bad disk")],
                &[("flux-distribute: cordoned", "2")],
                "",
            ),
            (
                &[("size is 1", "1")],
                &[("1-2", "flux-distribute: cordoned")],
                &[("flux-distribute: size is 1", "1")],
                "2",
            ),
        ] {
            let expected = Change { drain: wanted(drain), undrain: set(undrain) };
            let expected = (expected != Change::default()).then_some(expected);
            assert_eq!(change(&wanted(want), &drained(there)), expected, "{want:?} {there:?}");
        }
    }
}
