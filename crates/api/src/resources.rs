use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use super::IdSet;

/// Most cores, and most GPUs, that count of one node: a larger number is read as this one. Linux has at most 8192 processors (NR_CPUS); a
/// captured node may report any number, and each core costs the planner memory.
pub const MOST_CORES_OR_GPUS: u32 = 1 << 16;

fn at_most_of_a_node<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    u32::deserialize(deserializer).map(|count| count.min(MOST_CORES_OR_GPUS))
}

/// What a node has for Flux: counts of hwloc's logical ids, which begin at 0.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    /// Physical cores as hwloc counts them, not the hardware threads of the Node's `capacity.cpu`.
    #[serde(deserialize_with = "at_most_of_a_node")]
    #[schemars(range(max = MOST_CORES_OR_GPUS))]
    pub cores: u32,
    /// Number of GPUs.
    #[serde(default, deserialize_with = "at_most_of_a_node", skip_serializing_if = "super::is_zero")]
    #[schemars(range(max = MOST_CORES_OR_GPUS))]
    pub gpus: u32,
}

/// What one rank declares to Flux (RFC 20 `children`): of what its node has, all but what is left out.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct Declared {
    /// Cores of the node.
    #[serde(deserialize_with = "at_most_of_a_node")]
    pub cores: u32,
    /// GPUs that are declared, with ids from 0.
    #[serde(default, deserialize_with = "at_most_of_a_node", skip_serializing_if = "super::is_zero")]
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
    /// How many ids of cores and GPUs it stands for, those that are left out counted again: what it costs in memory.
    pub fn ids(&self) -> u64 {
        u64::from(self.cores) + u64::from(self.gpus) + self.left_out.len() as u64
    }

    /// The cores that are declared, never none: flux-core takes no node without.
    pub fn core_ids(&self) -> IdSet {
        let ids: IdSet = (0..self.cores).filter(|id| !self.left_out.contains(*id)).collect();
        if ids.is_empty() { (0..self.cores.max(1)).collect() } else { ids }
    }

    /// Whatever a job can hold of `other` is declared here too.
    pub fn covers(&self, other: &Self) -> bool {
        // The planner asks this for each member in each round. Making the sets took a quarter of a round.
        let has_same_cores = || (self.cores, &self.left_out) == (other.cores, &other.left_out);
        let leaves_none_out = || self.left_out.is_empty() && self.cores >= other.cores;
        let has_cores = || has_same_cores() || leaves_none_out() || other.core_ids().0.is_subset(&self.core_ids().0);
        other.excluded || (!self.excluded && other.gpus <= self.gpus && has_cores())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_covers_has_each_core_and_each_gpu_of_the_other_unless_a_job_can_hold_none_of_them() {
        let left_out = ["", "0", "0-1", "0-2", "1", "2-3"].map(|ids| ids.parse::<IdSet>().unwrap());
        let of = |cores, left_out: &IdSet, gpus| Declared { cores, gpus, left_out: left_out.clone(), excluded: false };
        let all: Vec<_> = (0..4).flat_map(|cores| left_out.iter().map(move |ids| of(cores, ids, cores % 2))).collect();
        for one in &all {
            for other in &all {
                let has_all = other.core_ids().0.is_subset(&one.core_ids().0) && other.gpus <= one.gpus;
                assert_eq!(one.covers(other), has_all, "{one:?} {other:?}");
                let [out, other_out] = [one, other].map(|each| Declared { excluded: true, ..each.clone() });
                assert!(one.covers(&other_out) && out.covers(&other_out) && !out.covers(other));
            }
        }
    }

    #[test]
    fn more_cores_than_a_node_can_have_are_not_counted() {
        let found: Resources = serde_json::from_str(r#"{"cores": 4294967295, "gpus": 4294967295}"#).unwrap();
        assert_eq!((found.cores, found.gpus), (MOST_CORES_OR_GPUS, MOST_CORES_OR_GPUS));
        let declared: Declared = serde_json::from_str(r#"{"cores": 4294967295}"#).unwrap();
        assert_eq!(declared.cores, MOST_CORES_OR_GPUS);
    }
}
