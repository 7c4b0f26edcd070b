//! Asks the lead about bridged jobs without a bridge.

use broker::{
    jobs::{JobStates, cancel, own_jobs},
    rfc3::{Client, RpcError},
    status::InstanceStatus,
};
use pods::{
    jobs::{Jobs, NOTE},
    jobspec::could_be_bridged,
    occupied::{Occupied, occupied},
};

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

/// Cancels the jobs that a bridge has left, which nobody would ever end. Pods that run stay. Returns how many there were.
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone.
pub async fn cancel_left(client: &Client) -> Result<usize, RpcError> {
    let jobs = jobs(client, JobStates::Active).await?;
    let mut count = 0;
    for (job, _) in jobs.bridged().filter(|(job, _)| job.is_active()) {
        count += usize::from(cancel(client, job.id, &format!("{NOTE}they are off; its pods run on")).await?);
    }
    Ok(count)
}

async fn jobs(client: &Client, states: JobStates) -> Result<Jobs, RpcError> {
    let mut jobs = Jobs::of(client.uid());
    own_jobs(client, states, could_be_bridged).await?.iter().for_each(|events| jobs.apply(events));
    Ok(jobs)
}
