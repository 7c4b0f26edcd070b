//! The pod's readiness gate. For each readiness probe that fails, kubelet writes a Warning Event, also while all goes well: an
//! installation takes a minute, a planned restart seconds. So there is no readiness probe, and the agent sets a condition of its own
//! pod instead, which kubelet counts into Ready.

use std::time::Duration;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Time};
use kube::{Api, Client, api::Patch};
use serde_json::json;
use tokio::{sync::watch, time::timeout};
use tracing::debug;

use api::{CONDITION_POD_READY, NAMESPACE};
use base::chance::jittered;
use cluster::{ApiError, call, clock, patch_params};

/// Pause between two tries while the API server does not answer; many agents lose it at once.
const AGAIN: Duration = Duration::from_secs(5);
/// The same while the role does not permit it.
const FORBIDDEN_AGAIN: Duration = Duration::from_mins(5);

/// Sets the condition on pod `name` whenever `ready` changes, until its sender is gone. While it is None, the condition that an
/// earlier agent set stands.
pub async fn follow(client: Client, name: String, mut ready: watch::Receiver<Option<bool>>) {
    let pods = Api::<Pod>::namespaced(client, NAMESPACE);
    let mut written = None;
    loop {
        let now = *ready.borrow_and_update();
        let outcome = match now {
            Some(ready) if written != now => write(&pods, &name, ready).await,
            _ => Ok(()),
        };
        let changed = match outcome {
            Ok(()) => {
                written = now;
                ready.changed().await
            }
            Err(error) => {
                debug!(error = base::error_chain(&error), "the pod's readiness could not be written");
                // An older manifest does not permit it, and has no readiness gate either.
                let pause = if error.code() == Some(403) { FORBIDDEN_AGAIN } else { AGAIN };
                timeout(jittered(pause), ready.changed()).await.unwrap_or(Ok(()))
            }
        };
        if changed.is_err() {
            return;
        }
    }
}

async fn write(pods: &Api<Pod>, name: &str, ready: bool) -> Result<(), ApiError> {
    let (status, reason) = if ready { ("True", "AsWanted") } else { ("False", "NotAsWanted") };
    let condition = json!({"type": CONDITION_POD_READY, "status": status, "reason": reason, "lastTransitionTime": Time(clock::now())});
    // The list is merged by type, so other conditions stay.
    let patch =
        json!({"status": {"conditions": [condition], "$setElementOrder/conditions": [{"type": CONDITION_POD_READY}]}});
    let (params, patch) = (patch_params(), Patch::Strategic(patch));
    match call(format!("status of Pod {name}"), pods.patch_status(name, &params, &patch)).await {
        // This agent runs in no pod.
        Err(error) if error.code() == Some(404) => Ok(()),
        written => written.map(drop),
    }
}
