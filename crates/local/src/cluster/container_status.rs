//! What a kubelet reports of a pod, as the status that is merged into it. Pure.

use std::net::Ipv4Addr;

use k8s_openapi::{
    api::core::v1::{Container, Pod},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use serde_json::{Value, json};

/// The exit code of a process that SIGKILL ended.
const KILLED: i32 = 137;
/// The exit code that container runtimes report if a container can't be started.
const NOT_STARTED: i32 = 128;

/// How a container ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    code: i32,
    reason: &'static str,
    message: Option<String>,
    /// None if it never ran.
    started: Option<Timestamp>,
}

impl End {
    /// Its process ended. `code`: None if it was killed.
    pub(crate) fn exited(code: Option<i32>, started: Timestamp) -> Self {
        let code = code.unwrap_or(KILLED);
        Self { code, reason: if code == 0 { "Completed" } else { "Error" }, message: None, started: Some(started) }
    }

    /// It could not be started.
    pub(crate) fn not_started(why: String) -> Self {
        Self { code: NOT_STARTED, reason: "StartError", message: Some(why), started: None }
    }

    /// It ran before the node went down.
    pub(crate) fn lost(started: Timestamp) -> Self {
        let message = "the node went down while it ran".to_owned();
        Self { code: KILLED, reason: "ContainerStatusUnknown", message: Some(message), started: Some(started) }
    }
}

/// The container that runs.
pub(crate) fn container(pod: &Pod) -> Option<&Container> {
    pod.spec.as_ref()?.containers.first()
}

/// The status of a pod whose container runs on the node at `address`.
pub(crate) fn running(pod: &Pod, address: Ipv4Addr, since: Timestamp) -> Value {
    let since = Time(since);
    json!({
        "phase": "Running",
        "hostIP": address,
        // Its process has the node's network.
        "podIP": address,
        "startTime": since,
        "conditions": [ready("True", None, &since)],
        "containerStatuses": [container_status(pod, true, json!({ "running": { "startedAt": since } }))],
    })
}

/// The status of a pod whose container has ended at `now`; nothing starts it again.
pub(crate) fn ended(pod: &Pod, end: &End, now: Timestamp) -> Value {
    let (started, now) = (Time(end.started.unwrap_or(now)), Time(now));
    let terminated = json!({
        "exitCode": end.code, "reason": end.reason, "message": end.message, "startedAt": started, "finishedAt": now,
    });
    let (phase, reason) = if end.code == 0 { ("Succeeded", "PodCompleted") } else { ("Failed", "PodFailed") };
    json!({
        "phase": phase,
        "startTime": started,
        "conditions": [ready("False", Some(reason), &now)],
        "containerStatuses": [container_status(pod, false, json!({ "terminated": terminated }))],
    })
}

fn ready(status: &str, reason: Option<&str>, since: &Time) -> Value {
    json!({ "type": "Ready", "status": status, "reason": reason, "lastTransitionTime": since })
}

fn container_status(pod: &Pod, is_running: bool, state: Value) -> Value {
    let container = container(pod);
    json!({
        "name": container.map_or("", |container| &container.name),
        "image": container.and_then(|container| container.image.as_deref()).unwrap_or_default(),
        "imageID": "",
        "ready": is_running,
        "started": is_running,
        "restartCount": 0,
        "state": state,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Pod {
        serde_json::from_value(json!({"spec": {"containers": [{"name": "c", "image": "any"}, {"name": "d"}]}})).unwrap()
    }

    #[test]
    fn a_pod_ends_as_its_first_container_does() {
        let started = Timestamp::UNIX_EPOCH;
        for (end, phase, code, reason) in [
            (End::exited(Some(0), started), "Succeeded", 0, "Completed"),
            (End::exited(Some(3), started), "Failed", 3, "Error"),
            (End::exited(None, started), "Failed", 137, "Error"),
            (End::not_started("no".to_owned()), "Failed", 128, "StartError"),
            (End::lost(started), "Failed", 137, "ContainerStatusUnknown"),
        ] {
            let status = ended(&pod(), &end, started);
            let terminated = &status["containerStatuses"][0]["state"]["terminated"];
            assert_eq!((&status["phase"], &terminated["exitCode"]), (&json!(phase), &json!(code)), "{end:?}");
            assert_eq!(terminated["reason"], reason, "{end:?}");
            assert_eq!(status["conditions"][0]["status"], "False", "{end:?}");
        }
    }

    #[test]
    fn a_status_has_the_shape_that_an_api_server_accepts() {
        let running = running(&pod(), Ipv4Addr::LOCALHOST, Timestamp::UNIX_EPOCH);
        let ended = ended(&pod(), &End::exited(Some(0), Timestamp::UNIX_EPOCH), Timestamp::UNIX_EPOCH);
        for status in [running, ended] {
            let status: k8s_openapi::api::core::v1::PodStatus = serde_json::from_value(status).unwrap();
            assert!(status.start_time.is_some());
            assert_eq!(status.container_statuses.unwrap()[0].name, "c");
        }
    }
}
