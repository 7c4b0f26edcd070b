//! Asks the lead which ranks' resources host jobs and gangs hold.

use broker::{
    jobs::running,
    rfc3::{Client, RpcError},
    status::InstanceStatus,
};
use pods::{
    held::{Held, held},
    jobs::Jobs,
    jobspec::may_be_name,
};

/// Tells apart what jobs hold. `instance`: the lead's report, asked for just now.
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone.
pub async fn ask_held(client: &Client, instance: &InstanceStatus) -> Result<Held, RpcError> {
    let mut jobs = Jobs::of(client.uid());
    if !instance.allocated.ranks.is_empty() {
        running(client, may_be_name).await?.iter().for_each(|events| jobs.apply(events));
    }
    Ok(held(&instance.held, &jobs))
}
