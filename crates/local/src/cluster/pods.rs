//! `local pods`: shows the pods, and where they run.

use std::io::Write;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams};

use super::{io, layout::Layout, objects};
use crate::error::{Context, LocalError};

/// Prints the table.
pub(crate) async fn run(layout: &Layout) -> Result<(), LocalError> {
    let client = objects::client(layout, &layout.load()?)?;
    let pods =
        Api::<Pod>::all(client).list(&ListParams::default()).await.context(|| "can't list the pods".to_owned())?;
    let head = ["NAMESPACE", "NAME", "STATUS", "NODE", "MESSAGE"].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(head).chain(pods.items.iter().map(row)).collect();
    std::io::stdout().write_all(io::table(&rows).as_bytes()).context(|| "can't write to stdout".to_owned())
}

fn row(pod: &Pod) -> [String; 5] {
    let (spec, status) = (pod.spec.clone().unwrap_or_default(), pod.status.clone().unwrap_or_default());
    let is_deleting = pod.metadata.deletion_timestamp.is_some();
    let phase = if is_deleting { Some("Terminating".to_owned()) } else { status.phase };
    // Why it waits, or how it ended.
    let waits =
        status.conditions.into_iter().flatten().find(|one| one.type_ == "PodScheduled" && one.status == "False");
    let mut states =
        status.container_statuses.into_iter().flatten().filter_map(|container| container.state?.terminated);
    let ended = states.find_map(|terminated| terminated.message);
    [
        pod.namespace().unwrap_or_default(),
        pod.name_any(),
        phase.unwrap_or_default(),
        spec.node_name.unwrap_or_else(|| "-".to_owned()),
        ended.or(waits.and_then(|waits| waits.message)).unwrap_or_default(),
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
            let pod =
                json!({"metadata": {"name": "a"}, "spec": {"nodeName": node, "containers": []}, "status": status});
            assert_eq!(row(&serde_json::from_value(pod).unwrap())[2..].join(" "), expected);
        }
    }
}
