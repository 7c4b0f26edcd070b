//! The pod's readiness gate. A readiness probe that is answered "not yet" is a Warning Event of kubelet's each time, also
//! while all goes well: an installation takes a minute, a planned restart seconds. So the agent sets a condition of its own
//! pod, which kubelet counts into Ready, and there is no readiness probe.

use std::time::Duration;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Time};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::{sync::watch, time::timeout};
use tracing::debug;

use api::{CONDITION_POD_READY, NAMESPACE};
use base::chance::jittered;
use cluster::{ApiError, call, clock};

/// Between two tries while the API server has no answer; many agents lose it at once.
const AGAIN: Duration = Duration::from_secs(5);
/// The same if the API server does not permit it.
const FORBIDDEN_AGAIN: Duration = Duration::from_secs(300);

/// Tells on pod `name` whether its node is as it is wanted, whenever that changes, until the sender is gone. None: it is not
/// known yet, and what an agent before this one has said stands.
pub async fn follow(client: Client, name: String, mut ready: watch::Receiver<Option<bool>>) {
    let pods = Api::<Pod>::namespaced(client, NAMESPACE);
    let mut told = None;
    loop {
        let now = *ready.borrow_and_update();
        let is_told = match now {
            Some(ready) if told != now => tell(&pods, &name, ready).await,
            _ => Ok(()),
        };
        let changed = match is_told {
            Ok(()) => {
                told = now;
                ready.changed().await
            }
            Err(error) => {
                debug!(error = base::error_chain(&error), "the pod's readiness could not be told");
                // An older manifest does not permit it, and nothing asks for it.
                let pause = if error.code() == Some(403) { FORBIDDEN_AGAIN } else { AGAIN };
                timeout(jittered(pause), ready.changed()).await.unwrap_or(Ok(()))
            }
        };
        if changed.is_err() {
            return;
        }
    }
}

async fn tell(pods: &Api<Pod>, name: &str, ready: bool) -> Result<(), ApiError> {
    let (status, reason) = if ready { ("True", "AsWanted") } else { ("False", "NotAsWanted") };
    let condition = json!({"type": CONDITION_POD_READY, "status": status, "reason": reason, "lastTransitionTime": Time(clock::now())});
    // Conditions of others stay: the list is merged by type.
    let patch =
        json!({"status": {"conditions": [condition], "$setElementOrder/conditions": [{"type": CONDITION_POD_READY}]}});
    let (params, patch) = (PatchParams::default(), Patch::Strategic(patch));
    match call(format!("status of Pod {name}"), pods.patch_status(name, &params, &patch)).await {
        // Nobody asks: this agent runs in no pod.
        Err(error) if error.code() == Some(404) => Ok(()),
        told => told.map(drop),
    }
}
