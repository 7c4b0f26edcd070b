//! The certificate in Secret `flux-curve`. The planner creates it once per instance and never overwrites it.

use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client, ResourceExt,
    api::{ObjectMeta, PostParams},
};

use super::{call, gone_is_fine, of_version};
use crate::ApiError;
use api::{
    ANNOTATION_INSTANCE, INSTANCE, NAMESPACE, SECRET_CURVE, SECRET_CURVE_KEY,
    certificate::{Certificate, CertificateError},
};

/// Marks a Secret that the planner made. Without this label an administrator created it, and the planner never deletes
/// it.
const LABEL_MADE_BY: &str = "app.kubernetes.io/managed-by";
const MADE_BY: &str = "flux-distribute";

/// The certificate, with the metadata of its Secret.
pub struct Published {
    /// The certificate in the Secret.
    pub certificate: Certificate,
    /// The planner made the Secret, not an administrator.
    made_here: bool,
    made_for: Option<String>,
    /// metadata of the Secret.
    metadata: ObjectMeta,
}

impl Published {
    /// uid of the FluxInstance that the certificate was made for; None if unknown. An administrator's certificate is
    /// for the FluxInstance that exists now: `present`.
    pub fn made_for<'a>(&'a self, present: &'a str) -> Option<&'a str> {
        if self.made_here { self.made_for.as_deref() } else { Some(present) }
    }
}

/// Reads the certificate; None if there is no Secret.
///
/// # Errors
/// If the call to the API server fails; [`ApiError::Content`] if the Secret has no valid certificate.
pub async fn read(client: &Client) -> Result<Option<Certificate>, ApiError> {
    Ok(read_published(client).await?.map(|published| published.certificate))
}

/// As [`read`], with the Secret's metadata.
///
/// # Errors
/// Those of [`read`].
pub async fn read_published(client: &Client) -> Result<Option<Published>, ApiError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let Some(secret) = call("get Secret flux-curve", secrets.get_opt(SECRET_CURVE)).await? else { return Ok(None) };
    let malformed = |reason: String| ApiError::Content {
        object: format!("Secret {SECRET_CURVE}"),
        reason: format!("{reason}; if no broker runs yet, delete it, and the planner makes a new one"),
    };
    let (made_here, metadata) = (is_made_here(&secret), secret.metadata.clone());
    let made_for = secret.annotations().get(ANNOTATION_INSTANCE).cloned();
    let bytes = secret.data.and_then(|mut data| data.remove(SECRET_CURVE_KEY));
    let bytes = bytes.ok_or_else(|| malformed(format!("has no key {SECRET_CURVE_KEY}")))?;
    let text = String::from_utf8(bytes.0).map_err(|_| malformed(format!("{SECRET_CURVE_KEY} is not text")))?;
    let parsed = Certificate::parse(&text);
    let certificate =
        parsed.map_err(|error: CertificateError| malformed(format!("{SECRET_CURVE_KEY} is malformed: {error}")))?;
    Ok(Some(Published { certificate, made_here, made_for, metadata }))
}

/// Creates the Secret for the FluxInstance with `instance_uid`. An existing Secret stays as it is.
///
/// # Errors
/// If the call to the API server fails. That the Secret exists is no error.
pub async fn create(client: &Client, certificate: &Certificate, instance_uid: &str) -> Result<(), ApiError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let secret = Secret {
        metadata: ObjectMeta {
            name: Some(SECRET_CURVE.to_owned()),
            labels: Some([(LABEL_MADE_BY.to_owned(), MADE_BY.to_owned())].into()),
            annotations: Some([(ANNOTATION_INSTANCE.to_owned(), instance_uid.to_owned())].into()),
            ..ObjectMeta::default()
        },
        data: Some([(SECRET_CURVE_KEY.to_owned(), ByteString(certificate.text().as_bytes().to_vec()))].into()),
        type_: Some("Opaque".to_owned()),
        ..Secret::default()
    };
    match call("create Secret flux-curve", secrets.create(&PostParams::default(), &secret)).await {
        Err(error) if error.code() == Some(409) => Ok(()),
        other => other.map(drop),
    }
}

/// Deletes the Secret if the planner made it.
///
/// # Errors
/// If a call to the API server fails; with code 409 if the Secret has changed meanwhile.
pub async fn forget(client: &Client) -> Result<(), ApiError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let found = call("get Secret flux-curve", secrets.get_opt(SECRET_CURVE)).await?;
    let Some(secret) = found.filter(is_made_here) else { return Ok(()) };
    delete(client, &secret.metadata).await
}

/// Deletes exactly the Secret that was read, because a user may have replaced it meanwhile.
///
/// # Errors
/// If the call to the API server fails; with code 409 if the Secret has changed meanwhile.
pub async fn discard(client: &Client, published: &Published) -> Result<(), ApiError> {
    delete(client, &published.metadata).await
}

async fn delete(client: &Client, read: &ObjectMeta) -> Result<(), ApiError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    gone_is_fine(call("delete Secret flux-curve", secrets.delete(SECRET_CURVE, &of_version(read))).await)
}

fn is_made_here(secret: &Secret) -> bool {
    secret.labels().get(LABEL_MADE_BY).is_some_and(|by| by == MADE_BY)
}

/// Generates a new certificate.
///
/// # Errors
/// If the kernel provides no randomness.
pub fn generate() -> Result<Certificate, getrandom::Error> {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret)?;
    Ok(Certificate::from_secret(INSTANCE, secret))
}
