//! `local restart`: a coordinated restart at once, also of an instance that was shut down.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::{
    Api,
    api::{Patch, PatchParams},
    runtime::wait::await_condition,
};
use serde_json::json;
use tokio::time::timeout;

use super::{layout::Layout, objects};
use crate::error::{Context, LocalError};
use api::{ANNOTATION_RESTART, FluxInstance, InstancePhase};

/// The planner begins a restart within seconds, if there is nothing else to do first.
const BEGINS_WITHIN: Duration = Duration::from_secs(10);

/// Asks for a restart by the annotation of which each new value begins the next epoch, and waits up to [`BEGINS_WITHIN`] until it begins.
pub(crate) async fn run(layout: &Layout) -> Result<(), LocalError> {
    let client = objects::client(layout, &layout.load()?)?;
    let instances: Api<FluxInstance> = Api::default_namespaced(client);
    let patch = json!({ "metadata": { "annotations": { ANNOTATION_RESTART: Timestamp::now().to_string() } } });
    let patched = match instances.patch(api::INSTANCE, &PatchParams::default(), &Patch::Merge(patch)).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => return Err(LocalError::NoInstance),
        patched => patched.context(|| "can't annotate the FluxInstance".to_owned())?,
    };
    let before = patched.status.unwrap_or_default().epoch;
    // Waits, so that `local status` right after this does not show the old epoch as the result.
    let has_begun = |instance: Option<&FluxInstance>| {
        let status = instance.and_then(|instance| instance.status.as_ref());
        status.is_some_and(|status| status.epoch > before || status.phase == InstancePhase::Restarting)
    };
    // The annotation stays, whatever comes of this.
    let _ = timeout(BEGINS_WITHIN, await_condition(instances, api::INSTANCE, has_begun)).await;
    Ok(())
}
