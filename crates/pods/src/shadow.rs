//! Shadow jobs: what pods of other schedulers use of a node is held in Flux as well, so that Flux gives it to no other job.

use api::Rank;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    constraint::Constraint,
    jobspec::{Shape, job, slots},
    target::Target,
};

/// Before the name of a node, the name of its shadow jobs. It has a `/`, as [`crate::jobspec::could_be_ours`] expects.
const NAME: &str = "other-pods/";

/// What a shadow job says about itself: attribute `user.k8s.shadow` of its jobspec.
#[derive(Serialize, Deserialize)]
struct Record {
    rank: Rank,
    node: String,
    /// Empty for a job of an older version.
    #[serde(default)]
    life: String,
}

/// A shadow job, as its jobspec says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shadow {
    /// The rank to which it is pinned.
    pub rank: Rank,
    /// The node whose pods it is for. Another one may get the rank later.
    pub node: String,
    /// The broker that was asked for it: [`crate::world::Broker::life`].
    pub life: String,
    /// How many cores it asked for.
    pub cores: u32,
}

impl Shadow {
    /// Reads what [`ShadowRequest::jobspec`] has written; None for any other jobspec.
    pub fn read(jobspec: &Value) -> Option<Self> {
        let Record { rank, node, life } = Record::deserialize(jobspec.pointer("/attributes/user/k8s/shadow")?).ok()?;
        let shape = Shape::read(jobspec).filter(|shape| shape.cores == 1)?;
        Some(Self { rank, node, life, cores: shape.slots })
    }
}

/// A shadow job to submit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShadowRequest {
    /// The rank.
    pub rank: Rank,
    /// Name of its node.
    pub node: String,
    /// See [`Shadow::life`].
    pub life: String,
    /// How many cores, each a slot of its own.
    pub cores: u32,
    /// Seconds. See [`crate::jobspec::JobRequest::duration`].
    pub duration: u64,
}

impl ShadowRequest {
    /// The jobspec.
    pub fn jobspec(&self) -> Value {
        let constraint = Constraint::Ranks([self.rank].into_iter().collect());
        let name = format!("{NAME}{}", self.node);
        let record = Record { rank: self.rank, node: self.node.clone(), life: self.life.clone() };
        job(slots(self.cores, 1), &name, self.duration, &constraint, json!({ "shadow": record }))
    }
}

/// How many whole cores of `target` a request of `requested` (thousandths of a hardware thread) uses beyond what is exempt: what fits on the
/// CPUs that Flux does not declare, or `tolerance` if that is more.
pub fn used_cores(target: &Target, requested: u64, tolerance: u64) -> u32 {
    let exempt = target.allocatable.cpu.saturating_sub(target.declared_cpu).max(tolerance);
    let cores = requested.saturating_sub(exempt).div_ceil(target.core());
    u32::try_from(cores).unwrap_or(u32::MAX).min(target.cores)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Allocatable;

    #[test]
    fn a_shadow_job_has_slots_of_one_core_and_is_read_as_it_was_written() {
        let request = ShadowRequest { rank: 3, node: "n3".into(), life: "first".into(), cores: 2, duration: 60 };
        let jobspec = request.jobspec();
        let core = json!([{"type": "core", "count": 1}]);
        assert_eq!(jobspec["resources"], json!([{"type": "slot", "count": 2, "label": "task", "with": core}]));
        let system = &jobspec["attributes"]["system"];
        assert_eq!(system["constraints"], json!({"ranks": ["3"]}));
        assert_eq!((&system["duration"], &system["job"]["name"]), (&json!(60), &json!("other-pods/n3")));
        assert_eq!(Shadow::read(&jobspec), Some(Shadow { rank: 3, node: "n3".into(), life: "first".into(), cores: 2 }));
    }

    #[test]
    fn whole_cores_are_used_of_what_pods_request_beyond_what_is_exempt() {
        for (what, requested, threads, expected) in [
            ("nothing", 0, 1, 0),
            ("what is exempt", 500, 1, 0),
            ("a little more", 501, 1, 1),
            ("one core more than what is exempt", 1500, 1, 1),
            ("a part of a core with two threads", 2000, 2, 1),
            ("two cores with two threads", 4500, 2, 2),
            ("more than the rank has", 9000, 1, 4),
            ("more than any node has", u64::MAX, 1, 4),
        ] {
            let cpu = 4000 * u64::from(threads);
            let target = Target {
                cores: 4,
                threads,
                declared_cpu: cpu,
                allocatable: Allocatable { cpu, ..Allocatable::default() },
                ..Target::default()
            };
            assert_eq!(used_cores(&target, requested, 500), expected, "{what}");
        }
    }
}
