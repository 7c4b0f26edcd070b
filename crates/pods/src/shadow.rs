//! Shadow jobs: what pods of other schedulers use of nodes is held in Flux as well, so that Flux gives it to no other job.

use std::collections::BTreeMap;

use api::Rank;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    constraint::Constraint,
    jobspec::{job, read_slots, slots},
    target::Target,
};

/// Before the name of a node, the name of its shadow jobs. It has a `/`, as [`crate::jobspec::could_be_ours`] expects.
const NAME: &str = "other-pods/";

/// What a shadow job says about itself: attribute `user.k8s.shadow` of its jobspec.
#[derive(Serialize, Deserialize)]
struct Record {
    rank: Rank,
    node: String,
    /// If it is for more ranks than one: the others.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    others: BTreeMap<Rank, String>,
    /// Empty for a job of an older version.
    #[serde(default)]
    life: String,
}

/// A shadow job, as its jobspec says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shadow {
    /// The ranks to which it is pinned, each with the node whose pods it is for. Another node may get the rank later.
    pub nodes: BTreeMap<Rank, String>,
    /// The broker that was asked for it: [`crate::world::Broker::life`].
    pub life: String,
    /// How many cores of each rank it asked for.
    pub cores: u32,
}

impl Shadow {
    /// Reads what [`ShadowRequest::jobspec`] has written; None for any other jobspec.
    pub fn read(jobspec: &Value) -> Option<Self> {
        let Record { rank, node, others, life } =
            Record::deserialize(jobspec.pointer("/attributes/user/k8s/shadow")?).ok()?;
        let mut nodes = others;
        nodes.insert(rank, node);
        let top = jobspec.pointer("/resources/0")?;
        let (cores, of_each) = match nodes.len() {
            1 => read_slots(top)?,
            ranks if top["type"] == "node" && top["count"] == ranks => read_slots(top.pointer("/with/0")?)?,
            _ => return None,
        };
        (of_each == 1).then_some(Self { nodes, life, cores })
    }
}

/// A shadow job to submit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShadowRequest {
    /// See [`Shadow::nodes`]. Flux gives it the cores of all these ranks at once, or none.
    pub nodes: BTreeMap<Rank, String>,
    /// See [`Shadow::life`].
    pub life: String,
    /// How many cores of each rank, each a slot of its own.
    pub cores: u32,
    /// Seconds. See [`crate::jobspec::JobRequest::duration`].
    pub duration: u64,
}

impl ShadowRequest {
    /// The jobspec.
    pub fn jobspec(&self) -> Value {
        let mut others = self.nodes.clone();
        let (rank, node) = others.pop_first().unwrap_or_default();
        let of_each = slots(self.cores, 1);
        let (resources, name) = match others.len() {
            0 => (of_each, format!("{NAME}{node}")),
            more => {
                let ranks = more + 1;
                (json!({ "type": "node", "count": ranks, "with": [of_each] }), format!("{NAME}{ranks}-nodes"))
            }
        };
        let constraint = Constraint::Ranks(self.nodes.keys().copied().collect());
        let record = Record { rank, node, others, life: self.life.clone() };
        job(resources, &name, self.duration, &constraint, json!({ "shadow": record }))
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

    fn request(nodes: &[(Rank, &str)]) -> ShadowRequest {
        let nodes = nodes.iter().map(|(rank, node)| (*rank, (*node).to_owned())).collect();
        ShadowRequest { nodes, life: "first".into(), cores: 2, duration: 60 }
    }

    #[test]
    fn a_shadow_job_has_slots_of_one_core_and_is_read_as_it_was_written() {
        let core = json!([{"type": "core", "count": 1}]);
        let slot = json!({"type": "slot", "count": 2, "label": "task", "with": core});
        let of_three = json!({"type": "node", "count": 3, "with": [slot]});
        for (nodes, resources, ranks, name) in [
            (&[(3, "n3")][..], json!([slot]), "3", "other-pods/n3"),
            (&[(3, "n3"), (4, "n4"), (11, "b")], json!([of_three]), "3-4,11", "other-pods/3-nodes"),
        ] {
            let request = request(nodes);
            let jobspec = request.jobspec();
            assert_eq!(jobspec["resources"], resources);
            let system = &jobspec["attributes"]["system"];
            assert_eq!(system["constraints"], json!({"ranks": [ranks]}));
            assert_eq!((&system["duration"], &system["job"]["name"]), (&json!(60), &json!(name)));
            let ShadowRequest { nodes, life, cores, .. } = request;
            assert_eq!(Shadow::read(&jobspec), Some(Shadow { nodes, life, cores }));
        }
    }

    #[test]
    fn a_job_that_has_not_one_node_for_each_of_its_ranks_is_no_shadow_job() {
        let mut jobspec = request(&[(3, "n3"), (4, "n4")]).jobspec();
        jobspec["resources"][0]["count"] = json!(3);
        assert_eq!(Shadow::read(&jobspec), None);
        jobspec["resources"] = request(&[(3, "n3")]).jobspec()["resources"].clone();
        assert_eq!(Shadow::read(&jobspec), None);
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
