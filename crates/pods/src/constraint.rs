//! On which ranks a job may run: the part of RFC 31 that the bridge uses.

use std::collections::BTreeSet;

use api::{IdSet, Rank};
use serde_json::{Value, json};

/// On which ranks a job may run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Constraint {
    /// On all.
    #[default]
    Anywhere,
    /// On these.
    Ranks(IdSet),
    /// On all but these.
    NotRanks(IdSet),
    /// A constraint that the bridge does not write.
    Other,
}

impl Constraint {
    /// The shortest constraint that permits those of `members`, the ranks with a member, that are in `permitted`. What it
    /// says about other ranks doesn't matter, because nothing runs there.
    pub fn of(permitted: &BTreeSet<Rank>, members: &BTreeSet<Rank>) -> Self {
        let refused: BTreeSet<Rank> = members.difference(permitted).copied().collect();
        if refused.is_empty() {
            return Self::Anywhere;
        }
        let (permitted, refused) = (IdSet(permitted.clone()), IdSet(refused));
        match permitted.to_string().len() < refused.to_string().len() {
            true => Self::Ranks(permitted),
            false => Self::NotRanks(refused),
        }
    }

    /// True if it permits `rank`.
    pub fn permits(&self, rank: Rank) -> bool {
        match self {
            Self::Anywhere => true,
            Self::Ranks(ranks) => ranks.contains(rank),
            Self::NotRanks(ranks) => !ranks.contains(rank),
            Self::Other => false,
        }
    }

    /// The jobspec's `attributes.system.constraints`; None if there is no constraint.
    pub fn json(&self) -> Option<Value> {
        match self {
            Self::Anywhere | Self::Other => None,
            Self::Ranks(ranks) => Some(json!({ "ranks": [ranks] })),
            Self::NotRanks(ranks) => Some(json!({ "not": [{ "ranks": [ranks] }] })),
        }
    }

    /// Reads what [`Self::json`] has written.
    pub fn read(constraints: Option<&Value>) -> Self {
        let Some(constraints) = constraints else { return Self::Anywhere };
        let ranks = |constraint: &Value| match constraint["ranks"].as_array()?.as_slice() {
            [ranks] => ranks.as_str()?.parse::<IdSet>().ok(),
            _ => None,
        };
        let negated = || constraints["not"].as_array().and_then(|inner| ranks(inner.first()?));
        ranks(constraints).map(Self::Ranks).or_else(|| negated().map(Self::NotRanks)).unwrap_or(Self::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shorter_of_ranks_and_not_ranks_is_written_and_read_back() {
        let set = |text: &str| text.parse::<IdSet>().unwrap().0;
        for (permitted, members, expected) in [
            ("0-3", "0-3", Value::Null),
            ("0-9", "0-3", Value::Null),
            ("1", "0-3", json!({"ranks": ["1"]})),
            ("0-2", "0-3", json!({"not": [{"ranks": ["3"]}]})),
            ("0,2,4,6", "0-6", json!({"not": [{"ranks": ["1,3,5"]}]})),
            ("", "0-3", json!({"ranks": [""]})),
        ] {
            let constraint = Constraint::of(&set(permitted), &set(members));
            let json = constraint.json();
            assert_eq!(json.clone().unwrap_or_default(), expected, "{permitted} of {members}");
            let read = Constraint::read(json.as_ref());
            assert_eq!(read, constraint);
            for rank in set(members) {
                assert_eq!(read.permits(rank), set(permitted).contains(&rank), "{permitted} of {members}: {rank}");
            }
        }
    }

    #[test]
    fn a_constraint_of_another_form_permits_nothing_of_ours() {
        for constraints in [
            json!({"hostlist": ["n1"]}),
            json!({"and": []}),
            json!({"ranks": ["x"]}),
            json!({"not": []}),
            json!({"ranks": ["1", "2"]}),
            json!(3),
        ] {
            assert_eq!(Constraint::read(Some(&constraints)), Constraint::Other, "{constraints}");
        }
    }
}
