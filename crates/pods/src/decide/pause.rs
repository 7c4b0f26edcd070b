//! How long the bridge leaves a gang alone after Flux or the API server has refused something for it.

use super::{round::Round, words::Words};
use crate::{
    jobs::{Cause, Job},
    record::GangId,
    time::Millis,
    world::PAUSE,
};

/// The reason to submit nothing for `gang` now: its last request was refused, or Flux has ended its job.
pub(super) fn reason_to_pause(round: &mut Round, gang: &GangId) -> Option<Words> {
    if let Some(words) = round.world.refused.get(gang) {
        return Some(Words::refused(words));
    }
    let jobs = round.jobs_of(gang);
    let by_flux = jobs.iter().filter_map(|(job, _)| paused_by(job));
    let (until, words) = by_flux.max_by_key(|(until, _)| *until).filter(|(until, _)| *until > round.now)?;
    round.wake_at(until);
    Some(Words::ended_by_flux(words))
}

/// Until when no other job is submitted in the place of `job`, with Flux's words; None unless Flux has ended it.
fn paused_by(job: &Job) -> Option<(Millis, &str)> {
    match job.ended_by.as_ref()? {
        (Cause::Denied(words) | Cause::Other(words), at) => Some((at.saturating_add(PAUSE), words)),
        (Cause::Canceled | Cause::Ours, _) => None,
    }
}
