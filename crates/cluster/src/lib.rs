//! Calls to an API server: each has a time limit, its errors name the object, and its writes are conditional if another writer may
//! be at work. Also the documents that planner and agents share, as they are stored.
//!
//! It knows the objects' types, and nothing about what they should hold: it makes no decision about the roster, and knows nothing
//! of hosts or packages.

pub mod access;
mod answers;
mod asked;
pub mod certificate;
pub mod clock;
mod events;
pub mod lease;
pub mod lease_rules;
mod managers;
mod merge_patch;
pub mod published;
pub mod store;
mod times;
pub mod version;

use std::time::Duration;

use api::{CONFIGMAP_ROSTER, RosterError};
use hyper::Response;
use kube::{
    Client, Config, Resource,
    api::{DeleteParams, ObjectMeta, PatchParams, Preconditions},
    client::ClientBuilder,
};

use asked::Counted;
use metrics::Metrics;

pub use events::{Announcer, publish};
pub use merge_patch::merge_patch;

/// Why the planner, or an agent that reads what it wrote, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// A call to the API server failed.
    #[error("{what}")]
    Api {
        /// Which call, on which object.
        what: String,
        /// The error of the Kubernetes client.
        #[source]
        source: Box<kube::Error>,
    },
    /// The API server did not answer the named call within 10 s.
    #[error("{0}: no answer from the API server in time")]
    Timeout(String),
    /// A newer version of this program wrote the roster.
    #[error("ConfigMap {CONFIGMAP_ROSTER}")]
    NewerRoster(#[source] RosterError),
    /// The next roster could not be read by anybody, so it is not written.
    #[error(
        "nobody could read the next roster, so the planner does not write it, and no node joins or leaves: {reason}"
    )]
    UnreadableRoster {
        /// What is wrong with it, and the remedy.
        reason: String,
    },
    /// An object has content that this program can't read or use.
    #[error("{object}: {reason}")]
    Content {
        /// Kind and name.
        object: String,
        /// What is wrong with it, and the remedy if there is one.
        reason: String,
    },
}

/// The name under which the API server records which fields this program writes (`managedFields`). The admission policies permit
/// fields of ours under this name alone.
const FIELD_MANAGER: &str = "flux-distribute";

/// A client for the API server. It hears the API server's clock ([`clock::heard`]), and reads objects without what others may have
/// written there and it can't read: their managers are empty, and no time is later than those that it can represent.
///
/// # Errors
/// The configuration can't be used.
pub fn client(config: Config) -> Result<Client, kube::Error> {
    counted_client(config, &Metrics::default())
}

/// As [`client`], and counts each request by verb and code in `metrics`.
///
/// # Errors
/// The configuration can't be used.
pub fn counted_client(config: Config, metrics: &Metrics) -> Result<Client, kube::Error> {
    let answers = tower::util::MapResponseLayer::new(|answer: Response<_>| {
        clock::heard(answer.headers());
        answers::readable(answer)
    });
    let counts = tower::layer::layer_fn(|inner| Counted::new(inner, metrics.clone()));
    Ok(ClientBuilder::try_from(config)?.with_layer(&answers).with_layer(&counts).build())
}

/// How every patch is sent.
pub fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// Time limit of one API call. kube sets no read timeout, so on a half-open connection a call would hang while this
/// planner keeps the Lease.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// A busy API server is left alone for at least this long, even if it asks for less.
const LEAST_BUSY: Duration = Duration::from_secs(1);
/// And for at most this long, even if it asks for more.
const MOST_BUSY: Duration = Duration::from_mins(1);

/// Awaits one API call for at most [`CALL_TIMEOUT`], and names it in the error.
///
/// # Errors
/// The API server's, or that it did not answer in time.
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

/// Parameters to delete exactly the object that was read. If it has changed or another has taken its place, the API
/// server answers 409 and deletes nothing.
pub fn as_read<K: Resource>(object: &K) -> DeleteParams {
    of_version(object.meta())
}

/// As [`as_read`], from an object's metadata.
pub fn of_version(metadata: &ObjectMeta) -> DeleteParams {
    let ObjectMeta { uid, resource_version, .. } = metadata.clone();
    DeleteParams::default().preconditions(Preconditions { uid, resource_version })
}

/// Turns a 404 into success, for a change or deletion of an object that may be gone already.
///
/// # Errors
/// All others of `result`.
pub fn gone_is_fine<T>(result: Result<T, ApiError>) -> Result<(), ApiError> {
    match result {
        Err(error) if error.code() == Some(404) => Ok(()),
        other => other.map(drop),
    }
}

impl ApiError {
    /// The HTTP status code of the API server's answer; None if it did not answer.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Api { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => Some(status.code),
                _ => None,
            },
            _ => None,
        }
    }

    /// True if the API server refuses this object for what is in it: it is invalid, or too large for the API server or for etcd, whose
    /// refusal comes as 500, in etcd's words or in those of gRPC.
    pub fn is_about_the_object(&self) -> bool {
        let Self::Api { source, .. } = self else { return false };
        let kube::Error::Api(status) = source.as_ref() else { return false };
        let is_too_large =
            || ["request is too large", "message larger than max"].iter().any(|words| status.message.contains(words));
        matches!(status.code, 413 | 422) || (status.code == 500 && is_too_large())
    }

    /// How long the API server wants to be left alone, if it is too busy for the call. None if a PodDisruptionBudget forbids an eviction,
    /// although the code (429) is the same.
    pub fn busy_for(&self) -> Option<Duration> {
        let Self::Api { source, .. } = self else { return None };
        let kube::Error::Api(status) = source.as_ref() else { return None };
        let details = status.details.as_ref();
        let is_budget =
            details.is_some_and(|details| details.causes.iter().any(|cause| cause.reason == "DisruptionBudget"));
        let seconds = details.map_or(0, |details| details.retry_after_seconds);
        (status.code == 429 && !is_budget).then(|| Duration::from_secs(seconds.into()).clamp(LEAST_BUSY, MOST_BUSY))
    }

    /// True if a user has to fix it: an object that can't be read, or a write that the API server refuses as invalid.
    /// All other errors are temporary failures of the API server.
    pub fn is_lasting(&self) -> bool {
        matches!(self, Self::Content { .. } | Self::UnreadableRoster { .. } | Self::NewerRoster(_))
            || matches!(self.code(), Some(422))
    }

    /// Reason of the condition and the Event if this error keeps the planner from planning.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Content { object, .. } if object.ends_with(CONFIGMAP_ROSTER) => "MalformedRoster",
            Self::NewerRoster(_) => "NewerRoster",
            Self::UnreadableRoster { .. } => "UnreadableRoster",
            _ => "Unusable",
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn only_what_the_api_server_says_of_one_object_is_about_that_object() {
        let with = |code: u16, message: &str| {
            let status = Status { code, message: message.to_owned(), ..Status::default() };
            ApiError::Api { what: "spec of FluxNode a".to_owned(), source: Box::new(kube::Error::Api(status.boxed())) }
        };
        for (code, message, expected) in [
            (422, "spec.reason: Too long", true),
            (413, "", true),
            (500, "etcdserver: request is too large", true),
            (500, "rpc error: code = ResourceExhausted desc = trying to send message larger than max (3 vs. 2)", true),
            (500, "failed calling webhook", false),
            (403, "", false),
            (409, "", false),
            (429, "", false),
        ] {
            assert_eq!(with(code, message).is_about_the_object(), expected, "{code} {message}");
        }
        let unanswered = kube::Error::Service("connection refused".into());
        assert!(!ApiError::Api { what: String::new(), source: Box::new(unanswered) }.is_about_the_object());
    }
}
