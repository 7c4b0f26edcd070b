//! Sets of ids as Flux writes them (RFC 22), of ranks or of cores: `0-3,7`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::resources::MOST_CORES_OR_GPUS;

/// Largest id; any rank or core is smaller.
const MAX_ID: u32 = 1 << 20;
/// Most ids in a set: a node has no more cores, and an instance fewer ranks. A longer set is a mistake, or meant to fill our memory.
const MOST_IDS: usize = MOST_CORES_OR_GPUS as usize;

/// A set of ranks, or of other ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct IdSet(pub BTreeSet<u32>);

/// What is not a set of ids.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a set such as 0-3,7")]
pub struct NotAnIdSet(String);

impl IdSet {
    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// None at all.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `id` is in it.
    pub fn contains(&self, id: u32) -> bool {
        self.0.contains(&id)
    }
}

impl FromIterator<u32> for IdSet {
    fn from_iter<T: IntoIterator<Item = u32>>(ranks: T) -> Self {
        Self(ranks.into_iter().collect())
    }
}

impl FromStr for IdSet {
    type Err = NotAnIdSet;

    fn from_str(text: &str) -> Result<Self, NotAnIdSet> {
        let wrong = || NotAnIdSet(text.chars().take(80).collect());
        let inner = match (text.strip_prefix('['), text.ends_with(']')) {
            (Some(rest), true) => &rest[..rest.len() - 1],
            (None, false) => text,
            _ => return Err(wrong()),
        };
        let (mut ranges, mut count) = (Vec::new(), 0);
        for part in inner.split(',').filter(|_| !inner.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |digits: &str| {
                let digits_only = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
                digits.parse::<u32>().ok().filter(|number| digits_only && *number <= MAX_ID).ok_or_else(wrong)
            };
            let (first, last) = (number(first)?, number(last)?);
            // Ids that are repeated count each time: whoever writes a set must not choose how long it takes to read.
            count += last as usize + 1 - first.min(last) as usize;
            if first > last || count > MOST_IDS {
                return Err(wrong());
            }
            ranges.push(first..=last);
        }
        // Only now, so that a wrong set costs no more than its text.
        Ok(Self(ranges.into_iter().flatten().collect()))
    }
}

impl fmt::Display for IdSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranks = self.0.iter().copied().peekable();
        let mut comma = "";
        while let Some(first) = ranks.next() {
            let mut last = first;
            while let Some(next) = ranks.next_if(|next| *next == last + 1) {
                last = next;
            }
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

impl Serialize for IdSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for IdSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// Reads sets by name, for a field that another node's agent may have written. A text that is no set is read as an empty set, so that
/// it does not make the whole object unreadable. If the sets have more than [`MOST_IDS`] ids together, all are read as empty, so that
/// they take little memory. The planner then finds a difference, and writes the field again.
///
/// # Errors
/// If it is not a map of texts, which the API server does not admit.
pub(crate) fn bounded_sets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, IdSet>, D::Error> {
    let texts = BTreeMap::<String, String>::deserialize(deserializer)?;
    let (mut sets, mut count) = (BTreeMap::new(), 0);
    for (name, text) in &texts {
        let set: IdSet = text.parse().unwrap_or_default();
        count += set.len();
        if count > MOST_IDS {
            return Ok(texts.into_keys().map(|name| (name, IdSet::default())).collect());
        }
        sets.insert(name.clone(), set);
    }
    Ok(sets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_read_and_written_as_flux_does() {
        for (text, ranks, written) in [
            ("", vec![], ""),
            ("[]", vec![], ""),
            ("0", vec![0], "0"),
            ("0-3", vec![0, 1, 2, 3], "0-3"),
            ("[0-1,3]", vec![0, 1, 3], "0-1,3"),
            ("5,3,4", vec![3, 4, 5], "3-5"),
            ("0,2,4-4", vec![0, 2, 4], "0,2,4"),
            ("1-2,2-3", vec![1, 2, 3], "1-3"),
        ] {
            let set: IdSet = text.parse().unwrap();
            assert_eq!(set, ranks.into_iter().collect(), "{text}");
            assert_eq!(set.to_string(), written, "{text}");
        }
    }

    #[test]
    fn what_is_no_set_is_refused() {
        for text in ["a", "-", "1-", "-1", "3-1", "1,,2", "1,", "[1", "1]", "+1", " 1", "0-4294967295", "99999999999"] {
            assert!(text.parse::<IdSet>().is_err(), "{text}");
        }
        let last = MOST_IDS - 1;
        assert!(format!("0-{last},0").parse::<IdSet>().is_err(), "it would take as long as its writer likes");
        assert!(format!("0-{last}").parse::<IdSet>().is_ok());
        assert!(MAX_ID.to_string().parse::<IdSet>().is_ok());
    }

    #[test]
    fn many_sets_take_no_more_memory_than_one_and_a_wrong_one_hides_no_other() {
        let read = |sets: serde_json::Value| bounded_sets(sets).unwrap();
        let few = read(serde_json::json!({"a": "0-3", "b": "no set"}));
        assert_eq!(few, [("a".to_owned(), (0..4).collect()), ("b".to_owned(), IdSet::default())].into());
        let all = format!("0-{}", MOST_IDS - 1);
        let many = read(serde_json::json!({"a": all, "b": "7"}));
        assert_eq!(many, ["a", "b"].map(|name| (name.to_owned(), IdSet::default())).into());
    }
}
