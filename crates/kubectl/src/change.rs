//! Changes of the FluxInstance, and what will come of them.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::{Api, api::Patch, runtime::wait::await_condition};
use serde_json::{Value, json};

use crate::{
    error::KubectlError,
    observed::Cluster,
    screen::{print, visible_lines},
};
use api::{
    ANNOTATION_RESTART, CONDITION_RESTART_PENDING, CONDITION_SCALE_DENIED, FluxInstance, FluxInstanceStatus, INSTANCE,
    NAMESPACE,
};
use base::words::many;
use cluster::{call, patch_params};

/// The planner answers within a second or two, unless another one is just taking over.
const ANSWER: Duration = Duration::from_secs(30);

/// Changes `spec.size`, and prints what the planner says of it.
///
/// # Errors
/// There is no instance, or the API server refuses the size.
pub(crate) async fn scale(cluster: &Cluster, nodes: u32) -> Result<(), KubectlError> {
    cluster.observe().await?;
    let changed = patch(cluster, "size", &json!({"spec": {"size": nodes}})).await?;
    let generation = changed.metadata.generation.unwrap_or_default();
    let wanted = many(nodes, "node");
    let text = match answer(cluster, generation).await {
        None => format!("the instance shall have {wanted}; no planner has answered yet: see `kubectl flux doctor`\n"),
        Some(status) => {
            let denied = status.holding(CONDITION_SCALE_DENIED).map(|condition| condition.message.clone());
            let said = denied.or(status.message).map_or(String::new(), |message| format!(": {message}"));
            format!("the instance shall have {wanted}{said}\n`kubectl flux status --watch` shows how far it is\n")
        }
    };
    Ok(print(&visible_lines(&text))?)
}

/// The status once the planner has seen that generation of the spec.
async fn answer(cluster: &Cluster, generation: i64) -> Option<FluxInstanceStatus> {
    let has_seen = move |instance: Option<&FluxInstance>| {
        let status = instance.and_then(|instance| instance.status.as_ref());
        status.is_some_and(|status| status.observed_generation >= generation)
    };
    let answered = await_condition(instances(cluster), INSTANCE, has_seen);
    tokio::time::timeout(ANSWER, answered).await.ok()?.ok()??.status
}

/// Prints what a coordinated restart would bring. With `now`, begins it.
///
/// # Errors
/// There is no instance; or nothing waits for a restart, so that one would only cost jobs.
pub(crate) async fn upgrade(cluster: &Cluster, now: bool) -> Result<(), KubectlError> {
    let instance = cluster.observe().await?.instance;
    let status = instance.status.clone().unwrap_or_default();
    let text = match (why_restart(&status), now) {
        (None, false) => "nothing waits for a coordinated restart\n".to_owned(),
        (None, true) => {
            return Err(KubectlError::State(format!(
                "nothing waits for a coordinated restart. To restart all brokers nevertheless, and lose the jobs that run: \
                 kubectl -n {NAMESPACE} annotate fxi {INSTANCE} {ANNOTATION_RESTART}=\"$(date)\" --overwrite"
            )));
        }
        (Some(why), false) => {
            format!("{why}\n`kubectl flux upgrade --now` restarts at once; the jobs that run are lost then\n")
        }
        (Some(why), true) => {
            let annotations = json!({ANNOTATION_RESTART: Timestamp::now().to_string()});
            patch(cluster, "restart", &json!({"metadata": {"annotations": annotations}})).await?;
            format!("restarting: {why}\n`kubectl flux status --watch` shows how far it is\n")
        }
    };
    Ok(print(&visible_lines(&text))?)
}

/// What a coordinated restart is for: what waits for one, or that the instance was shut down.
fn why_restart(status: &FluxInstanceStatus) -> Option<String> {
    let is_shut_down = |reason: &str| reason == model::conditions::SHUT_DOWN_REASON;
    let shut_down = status.holding("Degraded").filter(|condition| is_shut_down(&condition.reason));
    let why = status.holding(CONDITION_RESTART_PENDING).or(shut_down)?;
    Some(why.message.clone())
}

async fn patch(cluster: &Cluster, what: &str, patch: &Value) -> Result<FluxInstance, KubectlError> {
    let what = format!("change {what} of FluxInstance {INSTANCE}");
    Ok(call(what, instances(cluster).patch(INSTANCE, &patch_params(), &Patch::Merge(patch))).await?)
}

fn instances(cluster: &Cluster) -> Api<FluxInstance> {
    Api::namespaced(cluster.client.clone(), NAMESPACE)
}
