//! Asks the lead about bridged jobs without a bridge.

use broker::{
    jobs::{JobStates, cancel, own_jobs},
    queues::{QueueError, is_scheduler_offline},
    rfc3::{Client, RpcError},
    status::InstanceStatus,
};
use pods::{
    jobs::{Jobs, NOTE},
    jobspec::could_be_bridged,
    occupied::{Occupied, occupied},
};
use tracing::info;

use crate::flux::start_queues;

/// Tells apart what jobs hold. `instance`: the lead's report, asked for just now.
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone.
pub async fn ask_occupied(client: &Client, instance: &InstanceStatus) -> Result<Occupied, RpcError> {
    let jobs = match instance.allocated.ranks.is_empty() {
        true => Jobs::of(client.uid()),
        false => jobs(client, JobStates::Running).await?,
    };
    Ok(occupied(&instance.allocated_resources, &jobs))
}

/// Ends what a bridge has left in an instance that has no bridge any more: cancels its jobs, which nobody would ever end, and, if
/// `starts_queues`, starts the queues that wait for a bridge. Pods that run stay.
///
/// # Errors
/// [`QueueError`]. To be tried again, above all after [`QueueError::SchedulerIsOffline`].
pub async fn clean_up(client: &Client, starts_queues: bool) -> Result<(), QueueError> {
    let jobs = jobs(client, JobStates::Active).await?;
    for (job, _) in jobs.bridged().filter(|(job, _)| job.is_active()) {
        // What ends while the scheduler is offline keeps its cores for ever.
        if is_scheduler_offline(client).await? {
            return Err(QueueError::SchedulerIsOffline);
        }
        if cancel(client, job.id, &format!("{NOTE}they are off; its pods run on")).await? {
            info!(job = %job.id, "cancelled a job of pods: spec.pods.enabled is off");
        }
    }
    // Not before: a job that is pending would get its cores, only to lose them.
    if starts_queues {
        start_queues(client).await?;
    }
    Ok(())
}

async fn jobs(client: &Client, states: JobStates) -> Result<Jobs, RpcError> {
    let mut jobs = Jobs::of(client.uid());
    own_jobs(client, states, could_be_bridged).await?.iter().for_each(|events| jobs.apply(events));
    Ok(jobs)
}
