//! Calls to an API server: bounded in time, named in errors, conditional where somebody else may write too; and what is read of
//! the objects that planner and agents share.
//!
//! It knows the objects' types and nothing of what they should hold: no roster is decided here, and nothing of hosts or packages is
//! known.

pub mod access;
pub mod certificate;
pub mod clock;
mod events;
pub mod lease;
mod lease_rules;
mod merge_patch;
pub mod published;
pub mod store;

use std::time::Duration;

use api::{CONFIGMAP_ROSTER, RosterError};
use kube::{
    Resource,
    api::{DeleteParams, ObjectMeta, Preconditions},
};

pub use events::Announcer;
pub use merge_patch::merge_patch;

/// Why something could not be read from the API server, or written to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// A call to the API server failed.
    #[error("{what}")]
    Api {
        /// Which call, on which object.
        what: String,
        /// Cause.
        #[source]
        source: Box<kube::Error>,
    },
    /// A call to the API server took too long.
    #[error("{0}: no answer from the API server in time")]
    Timeout(String),
    /// A newer version has written the roster.
    #[error("ConfigMap {CONFIGMAP_ROSTER}")]
    NewerRoster(#[source] RosterError),
    /// An object holds what can't be read.
    #[error("{object}: {reason}")]
    Content {
        /// Kind and name.
        object: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// No call to the API server may hang: kube itself sets no read time-out, and a half-open connection would hold the Lease.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Awaits one API call, bounded, and names it in the error.
pub async fn call<T>(
    what: impl Into<String>,
    future: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, ApiError> {
    let what = what.into();
    match tokio::time::timeout(CALL_TIMEOUT, future).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(ApiError::Api { what, source: Box::new(source) }),
        Err(_) => Err(ApiError::Timeout(what)),
    }
}

/// For the deletion of an object as it was read, and of no other: what has taken its place, or has changed meanwhile, stays, and
/// the API server answers 409.
pub fn as_read<K: Resource>(object: &K) -> DeleteParams {
    of_version(object.meta())
}

/// As [`as_read`], of an object's metadata alone.
pub fn of_version(metadata: &ObjectMeta) -> DeleteParams {
    let ObjectMeta { uid, resource_version, .. } = metadata.clone();
    DeleteParams::default().preconditions(Preconditions { uid, resource_version })
}

/// For a change or deletion of what may be gone already: that it isn't there is as good.
pub fn gone_is_fine<T>(result: Result<T, ApiError>) -> Result<(), ApiError> {
    match result {
        Err(error) if error.code() == Some(404) => Ok(()),
        other => other.map(drop),
    }
}

impl ApiError {
    /// The API server's status code, where it answered.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Api { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => Some(status.code),
                _ => None,
            },
            _ => None,
        }
    }

    /// Somebody has to mend it: an object that can't be read, or what the API server refuses as wrong in itself. All else is the
    /// API server's for now, and passes.
    pub fn is_lasting(&self) -> bool {
        matches!(self, Self::Content { .. } | Self::NewerRoster(_)) || matches!(self.code(), Some(422))
    }

    /// The reason of the condition and the Event where nothing can be planned because of it.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Content { object, .. } if object.ends_with(CONFIGMAP_ROSTER) => "MalformedRoster",
            Self::NewerRoster(_) => "NewerRoster",
            _ => "Unusable",
        }
    }
}
