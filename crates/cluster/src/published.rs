//! What the planner has published, as everybody reads it.

use api::{
    CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_EPOCH_KEY, CONFIGMAP_PACKAGES_KEY, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY,
    PackageSet, Roster, RosterError,
};
use base::error_chain;
use kube::Client;

use super::{
    ApiError,
    store::{self, Document},
};

/// Reads the roster and the version it was read at.
///
/// # Errors
/// The API server's; [`ApiError::Content`] where it can't be read, [`ApiError::NewerRoster`] where another version
/// can: nothing is given out then.
pub async fn read_roster(client: &Client) -> Result<Option<(Roster, Document)>, ApiError> {
    let Some(document) = store::read(client, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY).await? else { return Ok(None) };
    let roster = Roster::parse(&document.text).map_err(|error| match error {
        newer @ RosterError::Newer(_) => ApiError::NewerRoster(newer),
        error => ApiError::Content {
            object: format!("ConfigMap {CONFIGMAP_ROSTER}"),
            reason: format!("{}; delete it, and the planner makes it again from the nodes", error_chain(&error)),
        },
    })?;
    Ok(Some((roster, document)))
}

/// What is published in ConfigMap flux-packages: first what the spec asks for.
///
/// # Errors
/// The API server's.
pub async fn read_packages(client: &Client) -> Result<Vec<PackageSet>, ApiError> {
    let Some(document) = store::read(client, CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_KEY).await? else {
        return Ok(Vec::new());
    };
    let epoch = document.others.get(CONFIGMAP_PACKAGES_EPOCH_KEY);
    std::iter::once(&document.text).chain(epoch).map(|text| store::parse(CONFIGMAP_PACKAGES, text)).collect()
}
