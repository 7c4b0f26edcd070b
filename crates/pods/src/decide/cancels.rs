//! `flux cancel` of a gang's job evicts its gang, or suspends its Job. Not that of a JobSet, which resumes its Jobs, and
//! counts evicted pods as failures: its pods get their cores again.
//!
//! A broker that stops cancels every running job, and a stop must never touch a pod. So a cancel counts only if the broker
//! was in state run when it came, and is still in that life of state run a moment later.

use super::round::Round;
use crate::{
    action::{Action, KubeJobRef, PodRef},
    facts::{KubeJob, SuspendReason},
    gangs::Gang,
    jobs::{Cause, GangJob, Job},
    pod::PodView,
    record::GangKind,
    time::{Millis, Moment, SECOND},
};

/// How long after a cancel the broker must still be in state run.
const SETTLED_AFTER: Millis = 2 * SECOND;

/// Evicts the pods of `gang` if somebody has cancelled one of its jobs. Returns true while there are pods that are to go: no
/// job is submitted for those.
pub(super) fn evict(round: &mut Round, gang: &Gang, jobs: &[(&Job, &GangJob)]) -> bool {
    if gang.id.kind == GangKind::JobSet || gang.job.is_some_and(|job| job.job_set.is_some()) {
        return false;
    }
    let in_run_since = round.broker.in_run_since.unwrap_or(Moment::MAX);
    // If the gang has begun again, its old job may be left, for a pod that its dead node never ends. Whoever cancels that wants its cores.
    let is_of_a_member = |job: &Job, gang_job: &GangJob| {
        let is_for = |pod: &PodView| {
            gang_job.record.lists(&pod.uid) || pod.record.as_ref().is_some_and(|record| record.id == job.id)
        };
        gang.members.iter().any(|pod| pod.stays() && is_for(pod))
    };
    let cancels = jobs.iter().filter_map(|(job, gang_job)| match job.ended_by {
        Some((Cause::Canceled, at)) if at >= in_run_since && is_of_a_member(job, gang_job) => {
            Some((at, &gang_job.record))
        }
        _ => None,
    });
    let Some((at, record)) = cancels.max_by_key(|(at, _)| *at) else { return false };
    // Pods that were created later are meant to run. A creation time is in whole seconds.
    let was_there = |pod: &PodView| record.lists(&pod.uid) || pod.created.saturating_add(SECOND) <= at;
    let pods: Vec<&PodView> = gang.members.iter().copied().filter(|pod| pod.stays() && was_there(pod)).collect();
    if pods.is_empty() {
        return false;
    }
    let settled = at.saturating_add(SETTLED_AFTER);
    if round.now < settled {
        round.wake_at(settled);
        return true;
    }
    if !round.world.namespaces.contains(&gang.id.namespace) {
        return true;
    }
    match gang.job.filter(|job| is_whole_job(gang, job)) {
        // Its controller would replace evicted pods at once, and count them as failures.
        Some(job) if !job.is_suspended => {
            let reason = SuspendReason::Canceled;
            round.actions.push(Action::SuspendJob { gang: gang.id.clone(), job: KubeJobRef::from(job), reason });
        }
        Some(_) => {}
        None => {
            let pods = pods.into_iter().map(PodRef::from).collect();
            round.actions.push(Action::Evict { gang: gang.id.clone(), pods });
        }
    }
    true
}

/// The gang is all that the Job runs, and the Job owns all of the gang, so that it can be suspended for the gang. A JobSet would resume it at
/// once.
pub(super) fn is_whole_job(gang: &Gang, job: &KubeJob) -> bool {
    let is_owned = |pod: &PodView| pod.owner.as_ref().is_some_and(|owner| owner.uid == job.uid);
    let staying = || gang.members.iter().filter(|pod| pod.stays());
    let owns_all = staying().all(|pod| is_owned(pod));
    // The size of a gang that has a problem is not known, such as after its PodGroup was deleted.
    let size =
        if gang.problem.is_some() { staying().count() } else { usize::try_from(gang.size).unwrap_or(usize::MAX) };
    job.job_set.is_none() && owns_all && size >= usize::try_from(job.pods_at_a_time()).unwrap_or(usize::MAX)
}
