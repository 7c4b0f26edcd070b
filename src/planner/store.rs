//! The ConfigMaps that the planner writes: one key each.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    api::{DeleteParams, ObjectMeta, PostParams},
};

use super::{PlannerError, call};
use crate::api::NAMESPACE;

/// One ConfigMap with one key, as it was read.
#[derive(Debug, Clone)]
pub struct Document {
    /// The key's value.
    pub text: String,
    /// metadata.resourceVersion it was read at.
    pub version: Option<String>,
}

/// Reads the `key` of ConfigMap `name`.
pub async fn read(client: &Client, name: &str, key: &str) -> Result<Option<Document>, PlannerError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let found = call(format!("get ConfigMap {name}"), maps.get_opt(name)).await?;
    Ok(found.map(|map| Document {
        version: map.metadata.resource_version.clone(),
        text: map.data.and_then(|mut data| data.remove(key)).unwrap_or_default(),
    }))
}

/// Writes the `key` of ConfigMap `name`: creates it where `before` is None, else replaces the very version that was read.
/// A planner that is no longer the only one gets 409 here, and nothing is written.
pub async fn write(
    client: &Client,
    name: &str,
    key: &str,
    text: String,
    before: Option<&Document>,
) -> Result<Document, PlannerError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let map = ConfigMap {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            resource_version: before.and_then(|before| before.version.clone()),
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from([(key.to_owned(), text.clone())])),
        ..ConfigMap::default()
    };
    let params = PostParams::default();
    let written = match before {
        None => call(format!("create ConfigMap {name}"), maps.create(&params, &map)).await?,
        Some(_) => call(format!("replace ConfigMap {name}"), maps.replace(name, &params, &map)).await?,
    };
    Ok(Document { text, version: written.metadata.resource_version })
}

/// Deletes ConfigMap `name`; that it is not there is fine.
pub async fn delete(client: &Client, name: &str) -> Result<(), PlannerError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    match call(format!("delete ConfigMap {name}"), maps.delete(name, &DeleteParams::default())).await {
        Err(error) if error.code() == Some(404) => Ok(()),
        other => other.map(drop),
    }
}
