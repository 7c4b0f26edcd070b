//! How long the bridge leaves a gang alone after Flux or the API server has refused something for it.

use super::{round::Round, words::Words};
use crate::{jobs::Cause, record::GangId, time::Moment, world::PAUSE};

/// The reason to submit nothing for `gang` now: its last request was refused, or Flux has ended its job.
pub(super) fn reason_to_pause(round: &mut Round, gang: &GangId) -> Option<Words> {
    let (until, words) = pause(round, gang)?;
    round.wake_at(until);
    Some(words)
}

/// True if there is such a reason. For a caller that does not wait for its end.
pub(super) fn is_paused(round: &Round, gang: &GangId) -> bool {
    pause(round, gang).is_some()
}

/// Until when nothing is submitted for `gang`, and why. A refusal is taken out of the world in time.
fn pause(round: &Round, gang: &GangId) -> Option<(Moment, Words)> {
    if let Some(words) = round.world.refused.get(gang) {
        return Some((Moment::MAX, Words::refused(words)));
    }
    let jobs = round.jobs_of(gang);
    let ends = jobs.iter().filter_map(|(job, _)| job.ended_by.as_ref());
    let by_flux = ends.filter_map(|(cause, at)| match cause {
        Cause::Denied(words) | Cause::Other(words) => Some((at.saturating_add(PAUSE), words)),
        Cause::Canceled | Cause::Ours => None,
    });
    let (until, words) = by_flux.max_by_key(|(until, _)| *until).filter(|(until, _)| *until > round.now)?;
    Some((until, Words::ended_by_flux(words)))
}
