use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What one rank declares to Flux (RFC 20 `children`): counts of hwloc's logical ids, each counted from 0.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    /// Physical cores as hwloc counts them (not the hardware threads of the Node's `capacity.cpu`).
    pub cores: u32,
    /// GPUs.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpus: u32,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's skip_serializing_if hands out a reference")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}
