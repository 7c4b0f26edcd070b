//! How many nodes the pending jobs wait for.

use serde::Deserialize;
use serde_json::json;

use super::{
    message::LEAD,
    rfc3::{Client, RpcError},
    status::{InstanceStatus, LEAD_TIMEOUT, parse},
};

/// The first ones are those that the scheduler looks at first, and a queue may hold a hundred thousand.
const MAX_JOBS: u32 = 1000;

/// A job in state SCHED, as `job-list.list` tells it.
#[derive(Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Job {
    /// 0: held (RFC 30).
    #[serde(default)]
    priority: i64,
    /// Of those that ask for nodes only.
    #[serde(default)]
    nnodes: Option<usize>,
    /// Not of those that ask for whole nodes.
    #[serde(default)]
    ncores: Option<usize>,
    #[serde(default)]
    ntasks: Option<usize>,
}

/// How many more nodes the largest of the jobs needs that wait for nodes which are down; 0 where none does. `instance`: what
/// the lead says of its resources.
///
/// # Errors
/// [`RpcError`]; a time-out where the lead is gone.
pub async fn pending_nodes(client: &Client, instance: &InstanceStatus) -> Result<u32, RpcError> {
    #[derive(Deserialize)]
    struct Jobs {
        jobs: Vec<Job>,
    }
    let topic = "job-list.list";
    let query = json!({
        "max_entries": MAX_JOBS,
        "attrs": ["priority", "nnodes", "ncores", "ntasks"],
        "constraint": { "states": ["sched"] },
    });
    let answer = client.rpc_within(LEAD_TIMEOUT, topic, LEAD, query).await?;
    Ok(missing_nodes(&parse::<Jobs>(topic, answer)?.jobs, instance))
}

/// What is drained counts as down: no job gets it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::status::Amount;

    #[test]
    fn a_job_waits_for_the_nodes_that_are_not_up() {
        let amount = |ranks: u32, cores: usize| Amount { ranks: (0..ranks).collect(), cores, gpus: 0 };
        // Six nodes of four cores, two of them up.
        let instance = InstanceStatus { all: amount(6, 24), down: amount(4, 16), ..InstanceStatus::default() };
        let job = |nnodes, ncores| Job { priority: 16, nnodes, ncores, ntasks: None };
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
    fn what_flux_says_of_a_job_is_read() {
        // As flux-core 0.88 answers for `flux submit -N1 -x`, `-N1` and `-n400`.
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
