//! Secret `flux-packages-access`: what channels, mirrors and bundles demand of those who ask. Read each time that it is
//! needed, so that a changed token is used at once and none is kept.

use api::{
    NAMESPACE, SECRET_PACKAGES, SECRET_PACKAGES_CA_KEY, SECRET_PACKAGES_CREDENTIALS_KEY, SECRET_PACKAGES_TOKEN_KEY,
};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{Api, Client};

use super::{ApiError, call};

/// The values of the Secret's keys. No part of it is shown by anything.
#[derive(Clone, Default)]
pub struct PackagesAccess {
    /// Of `ca.crt`.
    pub authorities: Option<Vec<u8>>,
    /// Of `token`.
    pub token: Option<Vec<u8>>,
    /// Of `credentials.json`.
    pub credentials: Option<Vec<u8>>,
}

/// Reads the Secret. That there is none is the usual case.
///
/// # Errors
/// The API server's.
pub async fn read(client: &Client) -> Result<PackagesAccess, ApiError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let found = call(format!("get Secret {SECRET_PACKAGES}"), secrets.get_opt(SECRET_PACKAGES)).await?;
    let mut data = found.and_then(|secret| secret.data).unwrap_or_default();
    let mut value = |key: &str| data.remove(key).map(|ByteString(value)| value);
    Ok(PackagesAccess {
        authorities: value(SECRET_PACKAGES_CA_KEY),
        token: value(SECRET_PACKAGES_TOKEN_KEY),
        credentials: value(SECRET_PACKAGES_CREDENTIALS_KEY),
    })
}
