//! The planner: the one agent that holds the Lease. It alone reads all nodes, and it writes the roster, the packages, the
//! certificate, `broker.toml`, each FluxNode's spec and the FluxInstance's status. What to write is decided in
//! [`crate::plan`]; here are the effects.

pub(crate) mod access;
mod caches;
pub(crate) mod certificate;
mod events;
mod instance;
mod lease;
mod merge_patch;
mod packages;
mod protect;
mod publish;
mod reconcile;
pub(crate) mod store;

use std::{
    sync::{Arc, atomic::AtomicU32},
    time::Duration,
};

use kube::{
    Client, Resource,
    api::{DeleteParams, ObjectMeta, Preconditions},
};
use tracing::{info, warn};

use crate::api::{CONFIGMAP_ROSTER, RosterError};

pub use events::Announcer;
pub use lease::release;
pub(crate) use merge_patch::merge_patch;
pub use publish::{read_packages, read_roster};

/// What happened in the API while the planner worked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlannerError {
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
pub(crate) async fn call<T>(
    what: impl Into<String>,
    future: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, PlannerError> {
    let what = what.into();
    match tokio::time::timeout(CALL_TIMEOUT, future).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(PlannerError::Api { what, source: Box::new(source) }),
        Err(_) => Err(PlannerError::Timeout(what)),
    }
}

/// For the deletion of an object as it was read, and of no other: what has taken its place, or has changed meanwhile, stays, and
/// the API server answers 409.
pub(crate) fn as_read<K: Resource>(object: &K) -> DeleteParams {
    of_version(object.meta())
}

/// As [`as_read`], of an object's metadata alone.
pub(crate) fn of_version(metadata: &ObjectMeta) -> DeleteParams {
    let ObjectMeta { uid, resource_version, .. } = metadata.clone();
    DeleteParams::default().preconditions(Preconditions { uid, resource_version })
}

/// For a change or deletion of what may be gone already: that it isn't there is as good.
pub(crate) fn gone_is_fine<T>(result: Result<T, PlannerError>) -> Result<(), PlannerError> {
    match result {
        Err(error) if error.code() == Some(404) => Ok(()),
        other => other.map(drop),
    }
}

impl PlannerError {
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

/// Candidate and planner by turns, for as long as the agent lives. `identity` is the pod's name.
/// `members` is the size of the instance as this agent knows it: the more candidates, the more rarely each asks.
pub async fn run(client: Client, identity: String, members: Arc<AtomicU32>) {
    let mut lease = lease::Candidate::new(client.clone(), identity.clone(), members);
    loop {
        let predecessor_time = lease.acquire().await;
        let has_limits = lease.has_limits();
        info!(identity, "this agent is the planner now");
        // Whatever is under way when the Lease is lost is dropped; a write that is already out is fenced by its
        // resourceVersion.
        tokio::select! {
            () = lease.keep() => warn!("the Lease is lost: another agent plans from here on"),
            () = reconcile::run(client.clone(), &identity, predecessor_time, &has_limits) => {}
        }
    }
}
