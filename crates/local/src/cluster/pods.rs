//! `local pods`: shows the pods, and where they run.

use std::io::Write;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams, core::DeserializeGuard};

use super::{io, layout::Layout, objects};
use crate::error::{Context, LocalError};
use api::{FluxInstance, SCHEDULER};

/// Prints the table.
pub(crate) async fn run(layout: &Layout) -> Result<(), LocalError> {
    let client = objects::client(layout, &layout.load()?)?;
    let instances: Api<DeserializeGuard<FluxInstance>> = Api::default_namespaced(client.clone());
    let instance = instances.get_opt(api::INSTANCE).await.context(|| "can't read the FluxInstance".to_owned())?;
    let is_on = instance.and_then(|instance| instance.0.ok()).is_some_and(|instance| instance.spec.pods.enabled);
    let pods =
        Api::<Pod>::all(client).list(&ListParams::default()).await.context(|| "can't list the pods".to_owned())?;
    let head = ["NAMESPACE", "NAME", "STATUS", "NODE", "MESSAGE"].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(head).chain(pods.items.iter().map(|pod| row(pod, is_on))).collect();
    std::io::stdout().write_all(io::table(&rows).as_bytes()).context(|| "can't write to stdout".to_owned())
}

/// `is_on`: Flux schedules pods.
fn row(pod: &Pod, is_on: bool) -> [String; 5] {
    let (spec, status) = (pod.spec.clone().unwrap_or_default(), pod.status.clone().unwrap_or_default());
    let is_deleting = pod.metadata.deletion_timestamp.is_some();
    let has_ended = matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"));
    let phase = if is_deleting { Some("Terminating".to_owned()) } else { status.phase };
    // Why it waits, or how it ended.
    let waits =
        status.conditions.into_iter().flatten().find(|one| one.type_ == "PodScheduled" && one.status == "False");
    let mut states =
        status.container_statuses.into_iter().flatten().filter_map(|container| container.state?.terminated);
    let ended = states.find_map(|terminated| terminated.message);
    let nobody = match spec.scheduler_name.as_deref() {
        _ if spec.node_name.is_some() || has_ended => None,
        Some(SCHEDULER) if is_on => None,
        Some(SCHEDULER) => Some("Flux schedules no pods here: that takes Flux, and a cluster of `local up --pods`"),
        _ => Some("local mode has no scheduler but flux: set spec.schedulerName"),
    };
    [
        pod.namespace().unwrap_or_default(),
        pod.name_any(),
        phase.unwrap_or_default(),
        spec.node_name.unwrap_or_else(|| "-".to_owned()),
        ended.or(waits.and_then(|waits| waits.message)).or(nobody.map(str::to_owned)).unwrap_or_default(),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_row_says_where_a_pod_runs_or_why_it_does_not() {
        let scheduled =
            |status: &str, message: &str| json!([{"type": "PodScheduled", "status": status, "message": message}]);
        let terminated = json!([{"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                                 "state": {"terminated": {"exitCode": 128, "message": "no such program"}}}]);
        for (node, status, expected) in [
            (
                Value::Null,
                json!({"phase": "Pending", "conditions": scheduled("False", "2 of 3 exist")}),
                "Pending - 2 of 3 exist",
            ),
            (json!("node1"), json!({"phase": "Running", "conditions": scheduled("True", "")}), "Running node1 "),
            (
                json!("node1"),
                json!({"phase": "Failed", "containerStatuses": terminated}),
                "Failed node1 no such program",
            ),
        ] {
            let spec = json!({"nodeName": node, "containers": [], "schedulerName": "flux"});
            let pod = json!({"metadata": {"name": "a"}, "spec": spec, "status": status});
            assert_eq!(row(&serde_json::from_value(pod).unwrap(), true)[2..].join(" "), expected);
        }
    }
    #[test]
    fn a_row_says_if_nobody_schedules_the_pod() {
        for (scheduler, words) in [("flux", "local up --pods"), ("default-scheduler", "set spec.schedulerName")] {
            let spec = json!({"containers": [], "schedulerName": scheduler});
            let pod = json!({"metadata": {"name": "a"}, "spec": spec, "status": {"phase": "Pending"}});
            let row = row(&serde_json::from_value(pod).unwrap(), false);
            assert!(row[4].contains(words), "{row:?}");
        }
    }
}
