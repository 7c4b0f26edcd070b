//! Asks the lead about bridged jobs without a bridge.

use broker::{
    jobs::{Which, cancel, own},
    rfc3::{Client, RpcError},
    status::InstanceStatus,
};
use pods::{
    held::{Held, held},
    jobs::{Jobs, NOTE},
    jobspec::may_be_name,
};

/// Tells apart what jobs hold. `instance`: the lead's report, asked for just now.
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone.
pub async fn ask_held(client: &Client, instance: &InstanceStatus) -> Result<Held, RpcError> {
    let jobs = match instance.allocated.ranks.is_empty() {
        true => Jobs::of(client.uid()),
        false => jobs(client, Which::Running).await?,
    };
    Ok(held(&instance.held, &jobs))
}

/// Cancels the jobs that a bridge has left, which nobody would ever end. Pods that run stay. Returns how many there were.
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone.
pub async fn cancel_left(client: &Client) -> Result<usize, RpcError> {
    let jobs = jobs(client, Which::Active).await?;
    let mut count = 0;
    for (job, _) in jobs.bridged().filter(|(job, _)| job.is_active()) {
        count += usize::from(cancel(client, job.id, &format!("{NOTE}they are off; its pods run on")).await?);
    }
    Ok(count)
}

async fn jobs(client: &Client, which: Which) -> Result<Jobs, RpcError> {
    let mut jobs = Jobs::of(client.uid());
    own(client, which, may_be_name).await?.iter().for_each(|events| jobs.apply(events));
    Ok(jobs)
}
