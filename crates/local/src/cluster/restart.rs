//! `local restart`: a coordinated restart at once, also of an instance that was shut down.

use k8s_openapi::jiff::Timestamp;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use super::{layout::Layout, objects};
use crate::error::{Context, LocalError};
use api::{ANNOTATION_RESTART, FluxInstance};

/// Sets the annotation of which each new value begins the next epoch.
pub(crate) async fn run(layout: &Layout) -> Result<(), LocalError> {
    let client = objects::client(layout, &layout.load()?)?;
    let instances: Api<FluxInstance> = Api::default_namespaced(client);
    let patch = json!({ "metadata": { "annotations": { ANNOTATION_RESTART: Timestamp::now().to_string() } } });
    let patched = instances.patch(api::INSTANCE, &PatchParams::default(), &Patch::Merge(patch)).await;
    match patched {
        Err(kube::Error::Api(status)) if status.is_not_found() => Err(LocalError::NoInstance),
        patched => patched.map(drop).context(|| "can't annotate the FluxInstance".to_owned()),
    }
}
