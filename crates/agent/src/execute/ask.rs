//! Asks the broker of this host whether jobs may be running, for the rules of [`crate::decide::jobs`].

use crate::{
    decide::jobs::{JobsAnswer, ends_with, running_jobs},
    inputs::broker_state,
};
use api::IdSet;
use bridge::Occupancy;
use broker::{
    rfc3::{Client, RpcError},
    status::{instance, overlay},
};
use hostapi::HostView;

/// Asks now.
pub async fn ask() -> JobsAnswer {
    let socket = match broker_state::connect().await {
        Ok(socket) => socket,
        Err(error) => return JobsAnswer { lead: Err(error), may_have_others_below: true },
    };
    let lead = ranks_of_host_jobs(&socket).await;
    // A broker without others below it leaves although its lead does not answer, so a tree is cleaned from its leaves.
    let may_have_others_below =
        lead.is_ok() || overlay(&socket).await.map_or(true, |overlay| !overlay.connected.0.is_empty());
    JobsAnswer { lead, may_have_others_below }
}

/// The ranks on which host jobs hold resources, as the lead says.
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone.
pub async fn ranks_of_host_jobs(socket: &Client) -> Result<IdSet, RpcError> {
    let instance = instance(socket).await?;
    Occupancy::of(socket).ask(&instance).await.map(|occupied| occupied.by_host_jobs)
}

/// Why jobs may be running anywhere; None if none can.
pub async fn jobs_may_run(view: &HostView) -> Option<&'static str> {
    running_jobs(view, &ask().await, |_| true)
}

/// Why jobs may be running that end with the broker of this host: those on its rank, and on ranks below it.
pub async fn jobs_may_run_here(view: &HostView) -> Option<&'static str> {
    running_jobs(view, &ask().await, |rank| ends_with(view, rank))
}
