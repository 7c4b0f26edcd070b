//! Asks the broker of this host whether jobs may be running, for the rules of [`crate::decide::jobs`].

use crate::{
    decide::jobs::{JobsAnswer, ends_with, running_jobs},
    inputs::broker_state,
};
use broker::status::{instance, overlay};
use hostapi::HostView;

/// Asks now.
pub async fn ask() -> JobsAnswer {
    let socket = match broker_state::connect().await {
        Ok(socket) => socket,
        Err(error) => return JobsAnswer { lead: Err(error), may_carry_others: true },
    };
    let lead = instance(&socket).await;
    // A broker without others below it leaves although its lead does not answer, so a tree is cleaned from its leaves.
    let may_carry_others =
        lead.is_ok() || overlay(&socket).await.map_or(true, |overlay| !overlay.connected.0.is_empty());
    JobsAnswer { lead, may_carry_others }
}

/// Why jobs may be running anywhere; None if none can.
pub async fn jobs_may_run(view: &HostView) -> Option<&'static str> {
    running_jobs(view, &ask().await, |_| true)
}

/// Why jobs may be running that end with the broker of this host: those on its rank, and on ranks that hang on it.
pub async fn jobs_may_run_here(view: &HostView) -> Option<&'static str> {
    running_jobs(view, &ask().await, |rank| ends_with(view, rank))
}
