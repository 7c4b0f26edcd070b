//! How a person's change gets into the FluxInstance.

use kube::api::{Patch, PatchParams};
use serde_json::Value;

use crate::{error::KubectlError, observed::Cluster};
use api::{FluxInstance, INSTANCE};
use cluster::call;

/// The owner of the fields that people change: the planner's name would hide who has changed them.
const FIELD_MANAGER: &str = "kubectl-flux";

/// Merges `patch` into the FluxInstance, and returns the new one. `what` names the part that changes.
///
/// # Errors
/// There is no instance, or the API server refuses the change.
pub(crate) async fn change(cluster: &Cluster, what: &str, patch: &Value) -> Result<FluxInstance, KubectlError> {
    // A patch of an instance that is not there is refused in words that name no remedy.
    cluster.instance().await?;
    let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let what = format!("change {what} of FluxInstance {INSTANCE}");
    Ok(call(what, cluster.instances().patch(INSTANCE, &parameters, &Patch::Merge(patch))).await?)
}
