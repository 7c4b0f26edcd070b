//! Bounds on a roster that is read: an agent's token can write one of any size, and reading it must not exhaust memory.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};

use super::{Rank, RosterEntry};
use crate::{instance::MOST_RANKS, numbers};

/// Most ids of cores and GPUs that all ranks of a roster declare together: 1024 for each rank of the largest instance.
pub const MOST_DECLARED: u64 = 1 << 24;

/// Most properties that all ranks of a roster have together: 64 for each rank of the largest instance.
const MOST_PROPERTIES: usize = 1 << 20;

/// Longest extra tables of broker.toml, in bytes. etcd takes no object of that size.
const LONGEST_CONFIG: usize = 2 << 20;

/// Reads a maxSize that an instance may have: each rank costs memory.
pub(super) fn max_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    numbers::at_most("maxSize", MOST_RANKS, deserializer)
}

/// Reads the extra tables of broker.toml, no longer than a FluxInstance can be: once they are parsed, they take many times that.
pub(super) fn config<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let config = String::deserialize(deserializer)?;
    match config.len() > LONGEST_CONFIG {
        true => Err(D::Error::custom(format!("config has {} bytes, more than {LONGEST_CONFIG}", config.len()))),
        false => Ok(config),
    }
}

/// Reads ranks one by one, and fails at the first that no instance can have, or once there are more than [`MOST_RANKS`] (repeated ones
/// counted), or all declare more than [`MOST_DECLARED`] ids or have more than [`MOST_PROPERTIES`].
pub(super) fn ranks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<Rank, RosterEntry>, D::Error> {
    struct Ranks;
    impl<'de> Visitor<'de> for Ranks {
        type Value = BTreeMap<Rank, RosterEntry>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("ranks")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let (mut ranks, mut declared, mut properties) = (Vec::new(), 0, 0);
            while let Some((rank, entry)) = map.next_entry::<Rank, RosterEntry>()? {
                if ranks.len() >= MOST_RANKS as usize {
                    return Err(A::Error::custom(format!("there are more than {MOST_RANKS} ranks")));
                }
                if rank >= MOST_RANKS {
                    return Err(A::Error::custom(format!("rank {rank} is not below {MOST_RANKS}")));
                }
                declared += entry.declared_ids();
                if declared > MOST_DECLARED {
                    return Err(A::Error::custom(format!(
                        "the ranks declare more than {MOST_DECLARED} ids of cores and GPUs"
                    )));
                }
                properties += entry.properties.len();
                if properties > MOST_PROPERTIES {
                    return Err(A::Error::custom(format!("the ranks have more than {MOST_PROPERTIES} properties")));
                }
                ranks.push((rank, entry));
            }
            // A map built from all ranks at once has full B-tree nodes. One grown rank by rank takes half as much memory again.
            Ok(ranks.into_iter().collect())
        }
    }
    deserializer.deserialize_map(Ranks)
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use serde_json::{Value, json};

    use crate::{Roster, RosterError};

    #[test]
    fn what_would_take_a_readers_memory_is_no_roster() {
        let settings = json!({
            "maxSize": 16384, "topology": "", "port": 8050, "digest": "", "certificate": "", "runAs": "", "config": "",
            "cpuWeight": 100, "checkpointPeriod": "",
        });
        let largest = json!({
            "format": 2, "instanceUID": "", "instanceID": "", "established": true, "epoch": 1, "revision": 1,
            "settings": settings, "ranks": {"16383": {"brokerName": "", "revision": 1}},
        });
        let with = |pointer: &str, value: Value| {
            let mut roster = largest.clone();
            *roster.pointer_mut(pointer).unwrap() = value;
            Roster::parse(&roster.to_string()).map_err(|error| error.source().unwrap().to_string())
        };
        assert!(with("/epoch", json!(1)).is_ok());
        let entry = |cores: u32, left_out: &str| json!({"brokerName": "", "revision": 1, "resources": {"cores": cores, "leftOut": left_out}});
        let many = |entry: Value| Value::Object((0..300).map(|rank: u32| (rank.to_string(), entry.clone())).collect());
        for (pointer, value, said) in [
            ("/settings/maxSize", json!(u32::MAX), "maxSize is 4294967295, more than 16384"),
            ("/epoch", json!(i64::MAX), "an epoch or revision is 9223372036854775807, more than 9007199254740992"),
            ("/revision", json!(u64::MAX), "more than"),
            ("/settings/config", json!("#".repeat(3 << 20)), "config has 3145728 bytes, more than 2097152"),
            ("/ranks", json!({"16384": entry(1, "")}), "rank 16384 is not below 16384"),
            ("/ranks", many(entry(65536, "")), "the ranks declare more than 16777216 ids"),
            (
                "/ranks",
                many(
                    json!({"brokerName": "", "revision": 1, "properties": (0..4000).collect::<Vec<u32>>().iter().map(u32::to_string).collect::<Vec<_>>()}),
                ),
                "the ranks have more than 1048576 properties",
            ),
            ("/ranks", many(entry(1, "0-65535")), "the ranks declare more than 16777216 ids"),
        ] {
            let refused = with(pointer, value).unwrap_err();
            assert!(refused.contains(said), "{pointer}: {refused}");
        }
        // The same rank, again and again.
        let again = vec![r#""1":{"brokerName":"","revision":1}"#; 16385].join(",");
        let text = largest.to_string().replace(r#""ranks":{"#, &format!(r#""ranks":{{{again},"#));
        let refused = Roster::parse(&text).unwrap_err().source().unwrap().to_string();
        assert!(refused.contains("there are more than 16384 ranks"), "{refused}");
        // Ranks that no member has cost as much.
        let mut spares = largest.clone();
        spares["settings"]["spareShape"] = json!({"cores": 1025});
        assert!(matches!(Roster::parse(&spares.to_string()), Err(RosterError::TooLarge)));
        // Nor do ranks beyond maxSize stand for them.
        let mut beyond = spares.clone();
        beyond["settings"]["maxSize"] = json!(8192);
        beyond["settings"]["spareShape"] = json!({"cores": 65536});
        beyond["ranks"] = Value::Object((8192..16384).map(|rank: u32| (rank.to_string(), entry(1, ""))).collect());
        assert!(matches!(Roster::parse(&beyond.to_string()), Err(RosterError::TooLarge)));
        // One node's invention is not taken for the commonest shape.
        let invented = with("/ranks", json!({"0": entry(65536, "")}));
        assert!(invented.is_ok(), "{invented:?}");
    }
}
