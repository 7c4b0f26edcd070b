//! `kubectl flux scale`: changes `spec.size`, and shows what the planner makes of it.

use std::{process::ExitCode, time::Duration};

use kube::runtime::wait::await_condition;
use serde_json::json;

use crate::{
    arguments::Waiting,
    change::change,
    error::{KubectlError, chain},
    observed::Cluster,
    screen::print,
    wait,
};
use api::{CONDITION_SCALE_DENIED, FluxInstance, FluxInstanceStatus, INSTANCE};
use base::words::visible_lines;

/// How long to wait for the planner. It answers within a second or two, unless another one is just taking over.
const ANSWER: Duration = Duration::from_secs(30);

const GOES_ON: &str =
    "spec.size stays as it is now, and the nodes join or leave; `kubectl flux status --watch` shows how far it is";

/// Changes `spec.size`, and prints what the planner says of it. With `--wait`, waits until the members are online and no others are left.
///
/// # Errors
/// There is no instance, the API server refuses the size, or the answer can't be read. With `--wait`, what [`wait::until`] says, or the
/// planner denies the size.
pub(crate) async fn run(cluster: &Cluster, size: u32, waiting: &Waiting) -> Result<ExitCode, KubectlError> {
    let changed = change(cluster, "size", &json!({"spec": {"size": size}})).await?;
    let generation = changed.metadata.generation.unwrap_or_default();
    wait::unless_interrupted(GOES_ON, follow(cluster, size, generation, waiting)).await
}

async fn follow(cluster: &Cluster, size: u32, generation: i64, waiting: &Waiting) -> Result<ExitCode, KubectlError> {
    let answer = answer(cluster, size, generation).await?;
    print(&visible_lines(&format!("{}{}\n", text(size, answer.as_ref()), cluster.name())))?;
    if waiting.wait {
        if let Some(denied) = answer.as_ref().and_then(|status| status.holding(CONDITION_SCALE_DENIED)) {
            return Err(KubectlError::State(denied.message.clone()));
        }
        let limit = Duration::from_secs(waiting.timeout);
        let look = async || {
            let observed = cluster.observe().await?;
            let has_begun = has_seen(observed.instance.status.as_ref(), generation);
            Ok(wait::step(&observed, has_begun, Some(size)))
        };
        wait::until(limit, look, |text| wait::late(limit, text)).await?;
        print("all members are online\n")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn has_seen(status: Option<&FluxInstanceStatus>, generation: i64) -> bool {
    status.is_some_and(|status| status.observed_generation >= generation)
}

/// The status once the planner has seen that generation of the spec; None if it hasn't in time.
///
/// # Errors
/// The instance can't be watched.
async fn answer(cluster: &Cluster, size: u32, generation: i64) -> Result<Option<FluxInstanceStatus>, KubectlError> {
    let is_seen = move |instance: Option<&FluxInstance>| {
        has_seen(instance.and_then(|instance| instance.status.as_ref()), generation)
    };
    let answered = tokio::time::timeout(ANSWER, await_condition(cluster.instances(), INSTANCE, is_seen)).await;
    let unread = |error| {
        let why = chain(&error);
        KubectlError::State(format!("spec.size is now {size}, but the planner's answer can't be read: {why}"))
    };
    answered.map_or(Ok(None), |answered| Ok(answered.map_err(unread)?.and_then(|instance| instance.status)))
}

/// What became of the size. Pure.
fn text(size: u32, answer: Option<&FluxInstanceStatus>) -> String {
    let Some(status) = answer else {
        return format!("spec.size is now {size}. No planner has answered yet: see `kubectl flux doctor`\n");
    };
    let denied = status.holding(CONDITION_SCALE_DENIED).map(|condition| &condition.message);
    let said = denied.or(status.message.as_ref()).map_or(String::new(), |message| format!(". {message}"));
    format!("spec.size is now {size}{said}\n`kubectl flux status --watch` shows how far it is\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_planners_refusal_comes_before_its_usual_message() {
        let denied = json!({
            "type": "ScaleDenied", "status": "True", "reason": "X", "message": "maxSize is 4",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        for (status, expected) in [
            (None, "spec.size is now 5. No planner has answered yet: see `kubectl flux doctor`"),
            (Some(json!({})), "spec.size is now 5"),
            (Some(json!({"message": "3 of 5 nodes are online"})), "spec.size is now 5. 3 of 5 nodes are online"),
            (Some(json!({"message": "3 of 5", "conditions": [denied]})), "spec.size is now 5. maxSize is 4"),
        ] {
            let status = status.map(|status| serde_json::from_value(status).unwrap());
            assert_eq!(text(5, status.as_ref()).lines().next(), Some(expected));
        }
    }
}
