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

/// Sets the annotation of which each new value begins the next epoch.
pub(crate) async fn run(layout: &Layout) -> Result<(), LocalError> {
    let client = objects::client(layout, &layout.load()?)?;
    let instances: Api<FluxInstance> = Api::default_namespaced(client);
    let before = instances.get_opt(api::INSTANCE).await.context(|| "can't read the FluxInstance".to_owned())?;
    let before = before.ok_or(LocalError::NoInstance)?.status.unwrap_or_default().epoch;
    let patch = json!({ "metadata": { "annotations": { ANNOTATION_RESTART: Timestamp::now().to_string() } } });
    let patched = instances.patch(api::INSTANCE, &PatchParams::default(), &Patch::Merge(patch)).await;
    match patched {
        Err(kube::Error::Api(status)) if status.is_not_found() => return Err(LocalError::NoInstance),
        patched => patched.context(|| "can't annotate the FluxInstance".to_owned())?,
    };
    // Whoever looks at the status next must not take the old epoch for the new one.
    let has_begun = |instance: Option<&FluxInstance>| {
        let status = instance.and_then(|instance| instance.status.as_ref());
        status.is_some_and(|status| status.epoch > before || status.phase == InstancePhase::Restarting)
    };
    let _ = timeout(BEGINS_WITHIN, await_condition(instances, api::INSTANCE, has_begun)).await;
    Ok(())
}
