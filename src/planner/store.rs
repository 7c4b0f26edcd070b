//! The ConfigMaps that the planner writes.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    api::{DeleteParams, ObjectMeta, PostParams},
};
use serde::de::DeserializeOwned;

use super::{PlannerError, call, gone_is_fine};
use crate::api::NAMESPACE;

/// One key of a ConfigMap, as it was read.
#[derive(Debug, Clone)]
pub struct Document {
    /// The key's value.
    pub text: String,
    /// All other keys.
    pub others: BTreeMap<String, String>,
    /// metadata.resourceVersion it was read at.
    pub version: Option<String>,
}

/// Reads the `key` of ConfigMap `name`.
pub async fn read(client: &Client, name: &str, key: &str) -> Result<Option<Document>, PlannerError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let found = call(format!("get ConfigMap {name}"), maps.get_opt(name)).await?;
    Ok(found.map(|map| {
        let mut others = map.data.unwrap_or_default();
        Document { text: others.remove(key).unwrap_or_default(), others, version: map.metadata.resource_version }
    }))
}

/// What can't be read is not the same as what isn't there.
///
/// # Errors
/// [`PlannerError::Content`]
pub fn parse<T: DeserializeOwned>(map: &str, text: &str) -> Result<T, PlannerError> {
    serde_json::from_str(text).map_err(|error| PlannerError::Content {
        object: format!("ConfigMap {map}"),
        reason: format!("can't be read by this version ({error})"),
    })
}

/// Writes the `key` of ConfigMap `name` and leaves its other keys as `before` has them: creates it where `before` is None, else replaces the very version that was read.
/// A planner that is no longer the only one gets 409 here, and nothing is written.
pub async fn write(
    client: &Client,
    name: &str,
    key: &str,
    text: String,
    before: Option<&Document>,
) -> Result<(), PlannerError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let mut data = before.map(|before| before.others.clone()).unwrap_or_default();
    data.insert(key.to_owned(), text);
    let map = ConfigMap {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            resource_version: before.and_then(|before| before.version.clone()),
            ..ObjectMeta::default()
        },
        data: Some(data),
        ..ConfigMap::default()
    };
    let params = PostParams::default();
    match before {
        None => call(format!("create ConfigMap {name}"), maps.create(&params, &map)).await.map(drop),
        Some(_) => call(format!("replace ConfigMap {name}"), maps.replace(name, &params, &map)).await.map(drop),
    }
}

/// Deletes ConfigMap `name`; that it is not there is fine.
pub async fn delete(client: &Client, name: &str) -> Result<(), PlannerError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    gone_is_fine(call(format!("delete ConfigMap {name}"), maps.delete(name, &DeleteParams::default())).await)
}
