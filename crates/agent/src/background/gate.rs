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
                // It may have been written: if the answer is lost, an API server under load writes it seconds later.
                written = None;
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

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use http::{Request, Response, StatusCode};
    use kube::client::Body;
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_write_whose_answer_is_lost_is_not_taken_for_one_that_was_not_made() {
        let (sender, mut asked) = mpsc::unbounded_channel();
        let count = Arc::new(AtomicUsize::new(0));
        let service = tower::service_fn(move |_: Request<Body>| {
            let number = count.fetch_add(1, Ordering::Relaxed);
            sender.send(number).unwrap();
            // The second write is made, and its answer is lost.
            let status = if number == 1 { StatusCode::GATEWAY_TIMEOUT } else { StatusCode::OK };
            let pod = json!({"metadata": {"name": "agent"}}).to_string();
            async move {
                Ok::<_, std::convert::Infallible>(
                    Response::builder().status(status).body(Body::from(pod.into_bytes())).unwrap(),
                )
            }
        });
        let (ready, receiver) = watch::channel(Some(true));
        let following = tokio::spawn(follow(Client::new(service, NAMESPACE), "agent".to_owned(), receiver));
        assert_eq!(asked.recv().await, Some(0));
        ready.send(Some(false)).unwrap();
        assert_eq!(asked.recv().await, Some(1));
        ready.send(Some(true)).unwrap();
        assert_eq!(asked.recv().await, Some(2), "the condition says True again");
        following.abort();
    }
}
