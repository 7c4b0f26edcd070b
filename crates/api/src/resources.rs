use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::IdSet;

/// What a node has for Flux: counts of hwloc's logical ids, which begin at 0.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    /// Physical cores as hwloc counts them, not the hardware threads of the Node's `capacity.cpu`.
    #[schemars(range(max = u32::MAX))]
    pub cores: u32,
    /// Number of GPUs.
    #[serde(default, skip_serializing_if = "super::is_zero")]
    #[schemars(range(max = u32::MAX))]
    pub gpus: u32,
}

/// What one rank declares to Flux (RFC 20 `children`): of what its node has, all but what is left out.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct Declared {
    /// Cores of the node.
    pub cores: u32,
    /// GPUs that are declared, with ids from 0.
    #[serde(default, skip_serializing_if = "super::is_zero")]
    pub gpus: u32,
    /// Cores among them that are not declared.
    #[serde(default, skip_serializing_if = "IdSet::is_empty")]
    pub left_out: IdSet,
    /// No job ever runs there: `[resource] exclude` of flux-config-resource(5).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub excluded: bool,
}

impl From<Resources> for Declared {
    fn from(Resources { cores, gpus }: Resources) -> Self {
        Self { cores, gpus, ..Self::default() }
    }
}

impl Declared {
    /// The cores that are declared, never none: flux-core takes no node without.
    pub fn core_ids(&self) -> IdSet {
        let ids: IdSet = (0..self.cores).filter(|id| !self.left_out.contains(*id)).collect();
        if ids.is_empty() { (0..self.cores.max(1)).collect() } else { ids }
    }

    /// Whatever a job can hold of `other` is declared here too.
    pub fn covers(&self, other: &Self) -> bool {
        let has_all = || other.core_ids().0.is_subset(&self.core_ids().0) && other.gpus <= self.gpus;
        other.excluded || (!self.excluded && has_all())
    }
}
