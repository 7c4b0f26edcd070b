//! The jobspecs of the bridge (RFC 14, RFC 25): equal slots in which Flux starts nothing.

use serde_json::{Value, json};

use crate::{constraint::Constraint, record::JobRecord};

/// The urgency of a gang whose pods have priority 0 (RFC 30's default).
const NORMAL_URGENCY: u8 = 16;
/// The highest urgency that a pod's priority can give. Above it are only gangs that run, or ran, in part.
const HIGHEST_URGENCY: u8 = 29;
/// The urgency of jobs for the missing part of a gang that runs, and of one for a gang that had resources before the broker
/// restarted but none of whose pods was bound.
pub const FIRST_URGENCY: u8 = 30;
/// The urgency of pins and shadow jobs: they hold cores that pods use already. No other job has it, because a job of the same urgency
/// could get these cores first. Each asks for no more cores than its rank has; together they may for a moment, while pods change.
pub const USED_CORES_URGENCY: u8 = 31;
/// Longest duration, in seconds: 100 years. The scheduler adds it to the present time, and a much longer one would overflow that.
const LONGEST: u64 = 100 * 365 * 86_400;

/// A job to submit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobRequest {
    /// Its record.
    pub record: JobRecord,
    /// Number of slots.
    pub slots: u32,
    /// Cores of each slot.
    pub cores: u32,
    /// How many of the slots each node has; None if Flux may choose. It divides their number.
    pub per_node: Option<u32>,
    /// Seconds. An estimate for backfill that nothing enforces, and never infinite: no reservation would be possible on a
    /// node where a job has no end.
    pub duration: u64,
    /// Where it may run.
    pub constraint: Constraint,
    /// 1 to 31; 0 if an administrator holds the job (RFC 30).
    pub urgency: u8,
}

impl JobRequest {
    /// The jobspec.
    pub fn jobspec(&self) -> Value {
        let resources = match self.per_node {
            None => slots(self.slots, self.cores),
            Some(each) => {
                let nodes = self.slots / each.max(1);
                json!({ "type": "node", "count": nodes, "with": [slots(each, self.cores)] })
            }
        };
        job(resources, &self.record.gang.to_string(), self.duration, &self.constraint, json!(self.record))
    }
}

/// So many equal slots.
pub(crate) fn slots(count: u32, cores: u32) -> Value {
    json!({ "type": "slot", "count": count, "label": "task", "with": [{ "type": "core", "count": cores }] })
}

/// How many slots a resource of a jobspec is, and how many cores each has; None if it is anything but what [`slots`] has written.
pub(crate) fn read_slots(resource: &Value) -> Option<(u32, u32)> {
    let core = resource.pointer("/with/0")?;
    let is_ours = resource["type"] == "slot" && core["type"] == "core";
    is_ours.then_some((number(&resource["count"])?, number(&core["count"])?))
}

fn number(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok())
}

/// The jobspec of a job in which Flux starts nothing. `duration`: seconds. `record`: what the job says about itself.
pub(crate) fn job(resources: Value, name: &str, duration: u64, constraint: &Constraint, record: Value) -> Value {
    let mut system = json!({
        "duration": duration.clamp(1, LONGEST),
        "job": { "name": name },
        // With `override`, job-exec waits for an RPC before it starts anything, and nobody sends that. The job keeps its cores until
        // it is cancelled.
        "exec": { "test": { "override": 1, "run_duration": "3650d" } },
    });
    if let Some(constraints) = constraint.json() {
        system["constraints"] = constraints;
    }
    json!({
        "version": 1,
        "resources": [resources],
        "tasks": [{ "command": ["pod"], "slot": "task", "count": { "per_slot": 1 } }],
        "attributes": { "system": system, "user": { "k8s": record } },
    })
}

/// The form of a gang's job, read from its jobspec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Number of slots.
    pub slots: u32,
    /// Cores of each slot.
    pub cores: u32,
    /// How many of the slots each node has; None if Flux may choose.
    pub per_node: Option<u32>,
    /// Where it may run.
    pub constraint: Constraint,
}

impl Shape {
    /// Reads what [`JobRequest::jobspec`] has written; None for any other jobspec.
    pub fn read(jobspec: &Value) -> Option<Self> {
        let top = jobspec.pointer("/resources/0")?;
        let (slots, per_node, cores) = if top["type"] == "node" {
            let (each, cores) = read_slots(top.pointer("/with/0")?)?;
            (number(&top["count"])?.checked_mul(each)?, Some(each), cores)
        } else {
            let (slots, cores) = read_slots(top)?;
            (slots, None, cores)
        };
        let constraint = Constraint::read(jobspec.pointer("/attributes/system/constraints"));
        Some(Self { slots, cores, per_node, constraint })
    }
}

/// True if a job of the bridge may have this name: `NAMESPACE/NAME`, or that of a shadow job.
pub fn could_be_ours(name: &str) -> bool {
    name.contains('/')
}

/// The urgency for pods of this priority (PriorityClass): 16 for 0, and one step more or less for each factor of five, from 2 to 29.
pub fn urgency(priority: i32) -> u8 {
    let powers = std::iter::successors(Some(1_u32), |power| power.checked_mul(5));
    let steps = powers.take_while(|power| *power <= priority.unsigned_abs()).count();
    let steps = u8::try_from(steps).unwrap_or(u8::MAX);
    match priority {
        0.. => NORMAL_URGENCY.saturating_add(steps).min(HIGHEST_URGENCY),
        _ => NORMAL_URGENCY.saturating_sub(steps),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{GangId, GangKind, MemberPod};

    fn request() -> JobRequest {
        let gang =
            GangId { kind: GangKind::Job, namespace: "default".into(), name: "train".into(), uid: "uid-j".into() };
        let member =
            |index: u32| MemberPod { name: format!("train-{index}"), uid: format!("u{index}"), index: Some(index) };
        JobRequest {
            record: JobRecord { gang, members: vec![member(0), member(1)], threads: 2, queued: 1500, pinned: None },
            slots: 2,
            cores: 4,
            per_node: None,
            duration: 86_400,
            constraint: Constraint::NotRanks([3].into_iter().collect()),
            urgency: 16,
        }
    }

    #[test]
    fn a_gang_is_one_job_of_equal_slots_that_flux_starts_nothing_in() {
        assert_eq!(
            request().jobspec(),
            json!({
                "version": 1,
                "resources": [{"type": "slot", "count": 2, "label": "task", "with": [{"type": "core", "count": 4}]}],
                "tasks": [{"command": ["pod"], "slot": "task", "count": {"per_slot": 1}}],
                "attributes": {
                    "system": {
                        "duration": 86_400,
                        "job": {"name": "default/train"},
                        "exec": {"test": {"override": 1, "run_duration": "3650d"}},
                        "constraints": {"not": [{"ranks": ["3"]}]},
                    },
                    "user": {"k8s": {
                        "gang": {"kind": "Job", "namespace": "default", "name": "train", "uid": "uid-j"},
                        "members": [{"name": "train-0", "uid": "u0", "index": 0}, {"name": "train-1", "uid": "u1", "index": 1}],
                        "threads": 2,
                        "queued": 1500,
                    }},
                },
            })
        );
    }

    #[test]
    fn a_gang_may_ask_for_nodes_with_so_many_slots_each() {
        for (per_node, nodes, slots) in [(1, 6, 1), (3, 2, 3)] {
            let anywhere = JobRequest { slots: 6, constraint: Constraint::Anywhere, ..request() };
            let jobspec = JobRequest { per_node: Some(per_node), ..anywhere }.jobspec();
            let slot = json!({"type": "slot", "count": slots, "label": "task", "with": [{"type": "core", "count": 4}]});
            assert_eq!(jobspec["resources"], json!([{"type": "node", "count": nodes, "with": [slot]}]));
            assert_eq!(jobspec["attributes"]["system"].get("constraints"), None);
        }
    }

    #[test]
    fn a_job_is_read_as_it_was_written() {
        for request in [
            request(),
            JobRequest { per_node: Some(1), ..request() },
            JobRequest { per_node: Some(2), slots: 8, ..request() },
            JobRequest { constraint: Constraint::Anywhere, ..request() },
        ] {
            let jobspec = request.jobspec();
            let JobRequest { slots, cores, per_node, constraint, record, .. } = request;
            assert_eq!(Shape::read(&jobspec), Some(Shape { slots, cores, per_node, constraint }));
            assert_eq!(JobRecord::read(&jobspec), Some(record));
        }
        assert_eq!(Shape::read(&json!({"resources": [{"type": "node", "count": 1}]})), None);
    }

    #[test]
    fn a_duration_is_finite_and_never_zero() {
        for (seconds, expected) in [(0, 1), (60, 60), (u64::MAX, LONGEST)] {
            let jobspec = JobRequest { duration: seconds, ..request() }.jobspec();
            assert_eq!(jobspec["attributes"]["system"]["duration"], expected);
        }
    }

    #[test]
    fn urgency_rises_with_priority_and_leaves_the_ends_free() {
        let known = [
            (0, 16),
            (1, 17),
            (4, 17),
            (5, 18),
            (1000, 21),
            (1_000_000, 25),
            (1_000_000_000, 29),
            (-1, 15),
            (-5, 14),
            (i32::MIN, 2),
        ];
        for (priority, expected) in known {
            assert_eq!(urgency(priority), expected, "{priority}");
        }
        let all: Vec<u8> = [i32::MIN, -1000, -10, -1, 0, 1, 10, 1000, 1_000_000, i32::MAX].map(urgency).into();
        assert!(all.is_sorted() && all[0] >= 1 && all[9] < FIRST_URGENCY, "{all:?}");
    }
}
