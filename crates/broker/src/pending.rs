//! Finds out what pending jobs wait for.

use std::{cmp::Reverse, collections::BTreeMap};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    message::{LEAD, parse_inner},
    queues,
    rfc3::{Client, RpcError},
    status::{InstanceStatus, LEAD_TIMEOUT, parse},
};

/// Most jobs to examine. The scheduler considers the first ones first, and a queue may hold a hundred thousand.
pub const MAX_JOBS: u32 = 1000;

/// The priority that Flux gives to a job of urgency 31 (RFC 30), such as those that hold cores for pods.
const HIGHEST_PRIORITY: i64 = 4_294_967_295;

/// How many jobs wait, and for what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pending {
    /// Number of jobs in the queue, without those of the highest urgency; at most [`MAX_JOBS`].
    pub jobs: u32,
    /// Of the jobs that wait for nodes which are down: how many more nodes the largest one needs. 0 if there is none.
    pub missing_nodes: u32,
    /// When the oldest of these jobs was submitted, in seconds since 1970 by the lead's clock, without held ones. None if there is none.
    pub oldest_submit: Option<u64>,
    /// ID of the first job in the queue, if the resources that it requests are free: the scheduler will start it in a
    /// moment, or has lost those resources.
    pub fits: Option<u64>,
}

/// A job in state SCHED, from `job-list.list`.
#[derive(Deserialize, Debug, Clone, Default, PartialEq)]
struct Job {
    #[serde(default)]
    id: u64,
    /// 0 for a held job (RFC 30).
    #[serde(default)]
    priority: i64,
    /// Only present if the job requests nodes.
    #[serde(default)]
    nnodes: Option<usize>,
    /// Missing if the job requests whole nodes.
    #[serde(default)]
    ncores: Option<usize>,
    #[serde(default)]
    ntasks: Option<usize>,
    /// Missing in an instance without named queues.
    #[serde(default)]
    queue: Option<String>,
    /// Seconds since 1970.
    #[serde(default)]
    t_submit: f64,
}

/// Finds out what the pending jobs wait for. `instance` is the lead's report about its resources.
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone.
pub async fn pending(client: &Client, instance: &InstanceStatus) -> Result<Pending, RpcError> {
    #[derive(Deserialize)]
    struct Jobs {
        jobs: Vec<Job>,
    }
    let topic = "job-list.list";
    let query = json!({
        "max_entries": MAX_JOBS,
        "attrs": ["priority", "nnodes", "ncores", "ntasks", "queue", "t_submit"],
        "constraint": { "states": ["sched"] },
    });
    let Jobs { jobs } = parse(topic, client.rpc_within(LEAD_TIMEOUT, topic, LEAD, query).await?)?;
    let (urgent, jobs): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(|job| job.priority >= HIGHEST_PRIORITY);
    let free = but_for(urgent.len(), &instance.free);
    let fits = match jobs.first().filter(|job| fits(job, &free)) {
        Some(job) if may_begin(client, job.id).await? => Some(job.id),
        _ => None,
    };
    let count = u32::try_from(jobs.len()).unwrap_or(u32::MAX);
    let (missing_nodes, oldest_submit) = (missing_nodes(&jobs, instance), oldest_submit(&jobs));
    Ok(Pending { jobs: count, missing_nodes, oldest_submit, fits })
}

/// In whole seconds. A job that somebody holds waits for that person.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time before 1970 or after all is none")]
fn oldest_submit(jobs: &[Job]) -> Option<u64> {
    jobs.iter().filter(|job| job.priority > 0).map(|job| job.t_submit as u64).min()
}

/// What is free without the `count` nodes with most of it: a job of the highest urgency wants cores of one node, which pods use already,
/// and the scheduler may keep what is free there for it.
fn but_for(count: usize, free: &BTreeMap<u32, usize>) -> BTreeMap<u32, usize> {
    let mut ranks: Vec<_> = free.iter().map(|(rank, cores)| (*rank, *cores)).collect();
    ranks.sort_by_key(|(_, cores)| Reverse(*cores));
    ranks.into_iter().skip(count).collect()
}

/// Nodes that the largest waiting job lacks. Drained nodes count as down, because they get no jobs.
fn missing_nodes(jobs: &[Job], instance: &InstanceStatus) -> u32 {
    let (all, down) = (&instance.all, &instance.down);
    let nodes_up = all.ranks.len().saturating_sub(down.ranks.len());
    let cores_up = all.cores.saturating_sub(down.cores);
    let cores_each = all.cores.div_ceil(all.ranks.len().max(1)).max(1);
    let missing = jobs.iter().filter(|job| job.priority > 0).map(|job| match job.nnodes {
        Some(nodes) => nodes.saturating_sub(nodes_up),
        None => job.ncores.or(job.ntasks).unwrap_or(1).saturating_sub(cores_up).div_ceil(cores_each),
    });
    u32::try_from(missing.max().unwrap_or(0)).unwrap_or(u32::MAX)
}

/// True if the cores that `job` requests are free. False for a job in a named queue, which may be limited to some
/// nodes, and for one that requests whole nodes, because it does not name a number of cores.
fn fits(job: &Job, free: &BTreeMap<u32, usize>) -> bool {
    let (Some(cores), None) = (job.ncores, &job.queue) else { return false };
    let slots = job.nnodes.or(job.ntasks).unwrap_or(1).max(1);
    let each = cores.div_ceil(slots).max(1);
    // A job that requests nodes gets that many different ones.
    let on = |free: &usize| if job.nnodes.is_some() { usize::from(*free >= each) } else { free / each };
    job.priority > 0 && free.values().map(on).sum::<usize>() >= slots
}

/// True if only the scheduler keeps the job from its cores: it requests only cores, on any nodes, and its queue is
/// started.
async fn may_begin(client: &Client, id: u64) -> Result<bool, RpcError> {
    #[derive(Deserialize)]
    struct Lookup {
        #[serde(default)]
        jobspec: String,
    }
    let queue = queues::queue(client, None).await?;
    let topic = "job-info.lookup";
    let lookup: Lookup =
        parse(topic, client.rpc(topic, LEAD, json!({ "id": id, "keys": ["jobspec"], "flags": 0 })).await?)?;
    let jobspec = parse_inner(lookup.jobspec.as_bytes()).unwrap_or_default();
    let is_plain = queue.start && asks_for_cores_alone(&jobspec);
    Ok(is_plain && !gives_whole_nodes(&client.rpc("config.get", LEAD, Value::Null).await?))
}

/// True for Fluxion's match policies that give a job whole nodes, whatever it requests
/// (flux-config-sched-fluxion-resource(5)).
fn gives_whole_nodes(configuration: &Value) -> bool {
    configuration["sched-fluxion-resource"]["match-policy"].as_str().is_some_and(|policy| policy.ends_with("nodex"))
}

/// True for a jobspec (RFC 14) without constraints that requests only nodes, slots and cores, none of them exclusively.
fn asks_for_cores_alone(jobspec: &Value) -> bool {
    fn all_plain(resources: &Value) -> bool {
        let Some(resources) = resources.as_array() else { return false };
        resources.iter().all(|resource| {
            matches!(resource["type"].as_str(), Some("node" | "slot" | "core"))
                && resource["exclusive"].as_bool() != Some(true)
                && resource.get("with").is_none_or(all_plain)
        })
    }
    jobspec["attributes"]["system"].get("constraints").is_none() && all_plain(&jobspec["resources"])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource_set::Amount;

    #[test]
    fn missing_nodes_are_those_that_the_largest_job_lacks() {
        let amount = |ranks: u32, cores: usize| Amount { ranks: (0..ranks).collect(), cores, gpus: 0 };
        // Six nodes of four cores, two of them up.
        let instance = InstanceStatus { all: amount(6, 24), down: amount(4, 16), ..InstanceStatus::default() };
        let job = |nnodes, ncores| Job { priority: 16, nnodes, ncores, ..Job::default() };
        for (jobs, expected) in [
            (vec![], 0),
            (vec![job(Some(2), Some(8))], 0),
            (vec![job(Some(5), None)], 3),
            (vec![job(Some(3), Some(3)), job(Some(6), Some(6)), job(Some(4), None)], 4),
            (vec![Job { priority: 0, ..job(Some(6), None) }], 0),
            (vec![job(None, Some(8))], 0),
            (vec![job(None, Some(9))], 1),
            (vec![job(None, Some(24))], 4),
            (vec![Job { priority: 16, ntasks: Some(13), ..Job::default() }], 2),
            (vec![Job { priority: 16, ..Job::default() }], 0),
        ] {
            assert_eq!(missing_nodes(&jobs, &instance), expected, "{jobs:?}");
        }
        assert_eq!(missing_nodes(&[job(None, Some(3))], &InstanceStatus::default()), 3, "no scheduler: nothing is up");
    }

    #[test]
    fn what_the_most_urgent_jobs_may_wait_for_counts_as_taken() {
        let free = BTreeMap::from([(0, 1), (1, 3), (2, 4)]);
        assert_eq!(but_for(0, &free), free);
        assert_eq!(but_for(1, &free), BTreeMap::from([(0, 1), (1, 3)]));
        assert!(but_for(9, &free).is_empty());
    }

    #[test]
    fn a_job_fits_if_each_of_its_slots_finds_cores_on_one_node() {
        let free = BTreeMap::from([(0, 1), (1, 3), (2, 4)]);
        let job = |nnodes, ntasks, ncores| Job { priority: 16, nnodes, ntasks, ncores, ..Job::default() };
        for (job, expected) in [
            (job(None, Some(1), Some(1)), true),
            (job(None, Some(8), Some(8)), true),
            (job(None, Some(9), Some(9)), false),
            (job(None, Some(2), Some(6)), true),
            (job(None, Some(2), Some(8)), false),
            (job(Some(3), Some(3), Some(3)), true),
            (job(Some(3), Some(6), Some(6)), false),
            (job(Some(4), Some(4), Some(4)), false),
            (job(Some(1), Some(1), None), false),
            (Job { priority: 0, ..job(None, Some(1), Some(1)) }, false),
            (Job { queue: Some("debug".to_owned()), ..job(None, Some(1), Some(1)) }, false),
        ] {
            assert_eq!(fits(&job, &free), expected, "{job:?}");
        }
        assert!(!fits(&job(None, Some(1), Some(1)), &BTreeMap::new()));
    }

    #[test]
    fn only_a_job_that_requests_nothing_but_cores_must_get_free_cores() {
        let slot = |with: Value| json!([{"type": "slot", "count": 1, "label": "task", "with": with}]);
        let core = json!([{"type": "core", "count": 1}]);
        let with = |resources: Value, system: Value| json!({"resources": resources, "attributes": {"system": system}});
        for (jobspec, expected) in [
            (with(slot(core.clone()), json!({"duration": 0})), true),
            (with(json!([{"type": "node", "count": 2, "with": slot(core.clone())}]), json!({})), true),
            (
                with(json!([{"type": "node", "count": 1, "exclusive": true, "with": slot(core.clone())}]), json!({})),
                false,
            ),
            (with(slot(json!([{"type": "core", "count": 1}, {"type": "gpu", "count": 1}])), json!({})), false),
            (with(slot(core), json!({"constraints": {"ranks": ["1"]}})), false),
            (Value::Null, false),
        ] {
            assert_eq!(asks_for_cores_alone(&jobspec), expected, "{jobspec}");
        }
    }

    #[test]
    fn free_cores_prove_nothing_if_the_policy_gives_whole_nodes() {
        let with = |policy: &str| json!({"sched-fluxion-resource": {"match-policy": policy}});
        for (configuration, expected) in [(with("lonodex"), true), (with("first"), false), (json!({}), false)] {
            assert_eq!(gives_whole_nodes(&configuration), expected, "{configuration}");
        }
    }

    #[test]
    fn the_oldest_job_is_the_one_that_was_submitted_first_and_is_not_held() {
        let job = |priority, t_submit| Job { priority, t_submit, ..Job::default() };
        for (jobs, expected) in [
            (vec![], None),
            (vec![job(16, 1_700_000_000.9), job(16, 1_700_000_005.0), job(0, 3.0)], Some(1_700_000_000)),
            (vec![job(0, 3.0)], None),
            (vec![job(1, f64::NAN)], Some(0)),
        ] {
            assert_eq!(oldest_submit(&jobs), expected, "{jobs:?}");
        }
    }

    #[test]
    fn jobs_are_parsed_from_fluxs_answer() {
        // The answers of flux-core 0.88 for `flux submit -N1 -x`, `-N1` and `-n400`.
        let jobs: Vec<Job> = serde_json::from_str(
            r#"[{"id": 23924310016, "nnodes": 1, "ntasks": 1, "priority": 16},
                {"id": 16424894464, "nnodes": 1, "ncores": 1, "ntasks": 1, "priority": 0},
                {"id": 16424894465, "ncores": 400, "ntasks": 400, "priority": 4294967295}]"#,
        )
        .unwrap();
        let read: Vec<_> = jobs.iter().map(|job| (job.priority > 0, job.nnodes, job.ncores)).collect();
        assert_eq!(read, [(true, Some(1), None), (false, Some(1), Some(1)), (true, None, Some(400))]);
    }
}
