//! How long the bridge leaves a gang alone after Flux or the API server has refused something for it.

use super::{round::Round, words::Words};
use crate::{
    jobs::Cause,
    record::GangId,
    time::{Moment, SECOND},
    world::PAUSE,
};

/// The reason to submit nothing for `gang` now: its last request was refused, or Flux has ended its job.
pub(super) fn reason_to_pause(round: &mut Round, gang: &GangId) -> Option<Words> {
    if let Some(words) = round.world.refused.get(gang) {
        return Some(Words::refused(words));
    }
    let (until, words) = ended_by_flux(round, gang)?;
    round.wake_at(until);
    Some(Words::ended_by_flux(words))
}

/// True if there is such a reason.
pub(super) fn is_paused(round: &Round, gang: &GangId) -> bool {
    round.world.refused.contains_key(gang) || ended_by_flux(round, gang).is_some()
}

/// True if Flux or the API server has refused something for `gang` a short while ago.
pub(super) fn is_refused(round: &Round, gang: &GangId) -> bool {
    let is_denied =
        |cause: &Cause, at: &Moment| matches!(cause, Cause::Denied(_)) && at.saturating_add(PAUSE) > round.now;
    let jobs = round.jobs_of(gang);
    let mut ends = jobs.iter().filter_map(|(job, _)| job.ended_by.as_ref());
    round.world.refused.contains_key(gang) || ends.any(|(cause, at)| is_denied(cause, at))
}

/// Until when `gang` is left alone because Flux has ended its job, and Flux's words.
fn ended_by_flux<'a>(round: &Round<'a>, gang: &GangId) -> Option<(Moment, &'a str)> {
    let jobs = round.jobs_of(gang);
    let ends = jobs.iter().filter_map(|(job, _)| job.ended_by.as_ref());
    let by_flux = ends.filter_map(|(cause, at)| match cause {
        Cause::Denied(words) => Some((at.saturating_add(PAUSE), words.as_str())),
        // A scheduler that is reloaded, or starts with the broker, ends what holds cores that are not declared any more. That is no
        // refusal, and pods run on these cores.
        Cause::Other(words) => Some((at.saturating_add(SECOND), words.as_str())),
        Cause::Canceled | Cause::Ours => None,
    });
    by_flux.max_by_key(|(until, _)| *until).filter(|(until, _)| *until > round.now)
}
