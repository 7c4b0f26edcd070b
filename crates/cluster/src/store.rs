//! Reads and writes the planner's ConfigMaps. A large value is stored gzipped in `binaryData`, under its key with the
//! suffix `.gz`.

use std::{collections::BTreeMap, io};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use serde::de::DeserializeOwned;

use super::{as_read, call, gone_is_fine};
use crate::ApiError;
use api::{
    CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_EPOCH_KEY, NAMESPACE,
    packed::{LARGE, pack, unpack},
};

const PACKED: &str = ".gz";

/// One value of a ConfigMap, as it was read.
#[derive(Debug, Clone)]
pub struct Document {
    /// The value; empty if the ConfigMap lacks the key.
    pub text: String,
    /// The values of the other keys that the planner writes.
    pub others: BTreeMap<String, String>,
    /// metadata.resourceVersion at which it was read.
    pub version: Option<String>,
}

/// Reads the value of `key` in ConfigMap `name`; None if there is no such ConfigMap.
///
/// # Errors
/// If the call to the API server fails; [`ApiError::Content`] if a value can't be unpacked.
pub async fn read(client: &Client, name: &str, key: &str) -> Result<Option<Document>, ApiError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let found = call(format!("get ConfigMap {name}"), maps.get_opt(name)).await?;
    found.map(|map| document(map, name, key)).transpose().map_err(|error| ApiError::Content {
        object: format!("ConfigMap {name}"),
        reason: format!("can't be unpacked ({error})"),
    })
}

/// The resourceVersion of ConfigMap `name`; None if there is none. Costs a few hundred bytes, while the ConfigMap may have a million.
///
/// # Errors
/// If the call to the API server fails.
pub async fn version(client: &Client, name: &str) -> Result<Option<String>, ApiError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let found = call(format!("get metadata of ConfigMap {name}"), maps.get_metadata_opt(name)).await?;
    Ok(found.and_then(|map| map.metadata.resource_version))
}

/// Keys that the planner does not write are neither unpacked nor kept: they could take the planner's memory, and fill the ConfigMap
/// until nothing fits into it.
fn document(map: ConfigMap, name: &str, key: &str) -> io::Result<Document> {
    let is_second = |found: &str| name == CONFIGMAP_PACKAGES && found == CONFIGMAP_PACKAGES_EPOCH_KEY;
    let is_ours = |found: &str| found == key || is_second(found);
    let mut others = map.data.unwrap_or_default();
    others.retain(|found, _| is_ours(found));
    for (found, packed) in map.binary_data.unwrap_or_default() {
        if let Some(found) = found.strip_suffix(PACKED).filter(|found| is_ours(found)) {
            others.insert(found.to_owned(), unpack(&packed)?);
        }
    }
    Ok(Document { text: others.remove(key).unwrap_or_default(), others, version: map.metadata.resource_version })
}

fn config_map(values: BTreeMap<String, String>) -> io::Result<ConfigMap> {
    let (large, small): (BTreeMap<_, _>, _) = values.into_iter().partition(|(_, text)| text.len() > LARGE);
    let packed = large.into_iter().map(|(key, text): (String, String)| Ok((key + PACKED, pack(&text)?)));
    let packed = packed.collect::<io::Result<BTreeMap<_, _>>>()?;
    Ok(ConfigMap { data: Some(small), binary_data: Some(packed).filter(|p| !p.is_empty()), ..ConfigMap::default() })
}

/// Parses a value of ConfigMap `map`.
///
/// # Errors
/// [`ApiError::Content`] if it can't be parsed: the planner must not treat a malformed value as a missing one.
pub fn parse<T: DeserializeOwned>(map: &str, text: &str) -> Result<T, ApiError> {
    serde_json::from_str(text).map_err(|error| ApiError::Content {
        object: format!("ConfigMap {map}"),
        reason: format!("can't be read by this version ({error})"),
    })
}

/// Writes the value of `key` in ConfigMap `name` with the others of `before`, and nothing else. Creates the ConfigMap if
/// `before` is None, else replaces exactly the version that was read. Returns what was sent, with its new version.
///
/// # Errors
/// If the call to the API server fails; with code 409, and nothing written, if another planner wrote the ConfigMap
/// first, and 404 if somebody has deleted it; [`ApiError::Content`] if a value can't be packed.
pub async fn write(
    client: &Client,
    name: &str,
    key: &str,
    text: String,
    before: Option<&Document>,
) -> Result<Document, ApiError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let others = before.map(|before| before.others.clone()).unwrap_or_default();
    let mut data = others.clone();
    data.insert(key.to_owned(), text.clone());
    let mut map = config_map(data).map_err(|error| ApiError::Content {
        object: format!("ConfigMap {name}"),
        reason: format!("can't be packed ({error})"),
    })?;
    map.metadata = ObjectMeta {
        name: Some(name.to_owned()),
        resource_version: before.and_then(|before| before.version.clone()),
        ..ObjectMeta::default()
    };
    let params = PostParams::default();
    let written = match before {
        None => call(format!("create ConfigMap {name}"), maps.create(&params, &map)).await?,
        Some(_) => call(format!("replace ConfigMap {name}"), maps.replace(name, &params, &map)).await?,
    };
    Ok(Document { text, others, version: written.metadata.resource_version })
}

/// Deletes ConfigMap `name` if it exists.
///
/// # Errors
/// If a call to the API server fails; with code 409 if the ConfigMap has changed meanwhile.
pub async fn delete(client: &Client, name: &str) -> Result<(), ApiError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let Some(map) = call(format!("get ConfigMap {name}"), maps.get_metadata_opt(name)).await? else { return Ok(()) };
    gone_is_fine(call(format!("delete ConfigMap {name}"), maps.delete(name, &as_read(&map))).await)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use uuid::Uuid;

    use super::*;
    use api::{
        CONFIGMAP_BROKER_KEY, CONFIGMAP_PACKAGES_KEY, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, Member, Roster,
        RosterEntry,
    };
    use model::fixture::roster;

    /// The size of a ConfigMap as the API server limits it (k8s.io/kubernetes, ValidateConfigMap).
    fn size(map: &ConfigMap) -> usize {
        let text = map.data.iter().flatten().map(|(_, text)| text.len());
        text.chain(map.binary_data.iter().flatten().map(|(_, bytes)| bytes.0.len())).sum()
    }

    /// A roster with names and uids as clouds make them: partly random, so that they don't compress.
    fn of_members(count: u32) -> Roster {
        let mut roster = roster(count, &[("node1", 64)]);
        let entry = roster.ranks[&0].clone();
        roster.ranks = (0..count)
            .map(|rank| {
                let (uid, random) = (Uuid::new_v4().to_string(), Uuid::new_v4().to_string());
                let name = format!("gke-production-pool-{}.europe-west3-a.c.our-own-project.internal", &random[..13]);
                let address = Ipv4Addr::from_bits(0x0a00_0000 + rank).into();
                let member = Member { node: name.clone(), uid: uid.clone(), address, gone_since: None };
                let (broker_name, reserved_for, member) = (name, Some(uid), Some(member));
                (rank, RosterEntry { broker_name, reserved_for, member, ..entry.clone() })
            })
            .collect();
        roster
    }

    #[test]
    fn the_roster_of_the_largest_instance_fits_into_its_config_map() {
        let roster = of_members(16_384);
        let text = serde_json::to_string(&roster).unwrap();
        let map = config_map([(CONFIGMAP_ROSTER_KEY.to_owned(), text.clone())].into()).unwrap();
        assert!(text.len() > 4 << 20 && size(&map) < 1 << 20, "{} of {}", size(&map), text.len());
        assert_eq!(document(map, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY).unwrap().text, text);
    }

    #[test]
    fn only_large_values_are_packed_and_they_are_read_back_unchanged() {
        let (large, small) = (CONFIGMAP_PACKAGES_KEY, CONFIGMAP_PACKAGES_EPOCH_KEY);
        let long = "x".repeat(LARGE + 1);
        let values: BTreeMap<String, String> =
            [(small, "small"), (large, &long)].map(|(key, text)| (key.to_owned(), text.to_owned())).into();
        let map = config_map(values.clone()).unwrap();
        assert_eq!(map.data.as_ref().unwrap().keys().collect::<Vec<_>>(), [small]);
        assert_eq!(map.binary_data.as_ref().unwrap().keys().collect::<Vec<_>>(), [&format!("{large}.gz")]);
        let read = document(map.clone(), CONFIGMAP_PACKAGES, large).unwrap();
        assert_eq!((read.text == long, &read.others[small]), (true, &values[small]));
        assert_eq!(config_map([(small.to_owned(), "small".to_owned())].into()).unwrap().binary_data, None);

        let mut cut = map;
        cut.binary_data.as_mut().unwrap().values_mut().for_each(|packed| packed.0.truncate(20));
        assert!(document(cut, CONFIGMAP_PACKAGES, large).is_err());
    }

    #[test]
    fn keys_that_the_planner_does_not_write_are_neither_unpacked_nor_kept() {
        let values: BTreeMap<String, String> = [(CONFIGMAP_ROSTER_KEY, "{}"), (CONFIGMAP_BROKER_KEY, "text")]
            .map(|(key, text)| (key.to_owned(), text.to_owned()))
            .into();
        let mut map = config_map(values).unwrap();
        map.binary_data =
            Some([(format!("{CONFIGMAP_PACKAGES_KEY}.gz"), k8s_openapi::ByteString(b"no gzip".to_vec()))].into());
        let read = document(map, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY).unwrap();
        assert_eq!((read.text.as_str(), read.others), ("{}", BTreeMap::new()));
    }
}
