//! If a gang can't be completed for too long, it begins again: the bridge suspends its Job, and resumes it once the pods are gone. A pod
//! on a node that does not answer never ends: it keeps its cores, but the bridge waits for it only for a while.
//!
//! Pods are never deleted one by one, because each counts on the Job's backoffLimit.

use super::{cancels::is_whole_job, memory::Memory, round::Round, words::is_not_taken_up};
use crate::{
    action::{Action, KubeJobRef},
    facts::{KubeJob, SuspendReason},
    gangs::Gang,
    pod::PodView,
    time::Moment,
};

/// Suspends the Job of `gang` if the gang has run in part for too long.
pub(super) fn suspend_if_stuck(round: &mut Round, memory: &mut Memory, gang: &Gang) {
    let waits = gang.waiting().next().is_some();
    let is_stuck = gang.members.iter().any(|pod| is_not_taken_up(pod, round.now));
    if !gang.is_started() || !(waits || is_stuck) {
        memory.incomplete.remove(&gang.id);
        return;
    }
    let since = *memory.incomplete.entry(gang.id.clone()).or_insert(round.now);
    let until = since.saturating_add(round.world.settings.complete_after);
    if round.now < until {
        round.wake_at(until);
        return;
    }
    let may_write = round.world.namespaces.contains(&gang.id.namespace);
    let may_suspend = |job: &&KubeJob| !job.is_suspended && is_whole_job(gang, job);
    let job = gang.job.filter(|job| may_write && gang.size > 1 && may_suspend(job));
    if let Some(job) = job {
        let reason = SuspendReason::Incomplete;
        round.actions.push(Action::SuspendJob { gang: gang.id.clone(), job: KubeJobRef::from(job), reason });
        // If it does not help, not again at once.
        memory.incomplete.insert(gang.id.clone(), round.now);
    }
}

/// Resumes the Jobs that the bridge has suspended so that they begin again, once it waits for none of their pods.
pub(super) fn resume(round: &mut Round) {
    let jobs = round.world.facts.jobs.values().filter(|job| job.has_annotation_to_remove());
    for job in jobs.filter(|job| round.world.namespaces.contains(&job.namespace)) {
        let (until, resume) = (waits_for_pods_until(round, job), Action::ResumeJob(KubeJobRef::from(job)));
        if round.now < until {
            round.wake_at(until);
        } else if !round.world.under_way.contains(&resume) {
            round.actions.push(resume);
        }
    }
}

/// Until when the bridge waits for the pods of `job`; `Moment::MAX` if one is not being deleted yet, 0 if there is none, or somebody has
/// resumed the Job. By default, Kubernetes' Job controller, too, replaces a pod that its node does not end.
fn waits_for_pods_until(round: &Round, job: &KubeJob) -> Moment {
    if !job.is_suspended {
        return 0;
    }
    let gangs =
        round.gangs.iter().map(|(gang, _)| gang).filter(|gang| gang.job.is_some_and(|other| other.uid == job.uid));
    let patience = round.world.settings.complete_after;
    let waits_until = |pod: &&PodView| pod.to_end_by.map_or(Moment::MAX, |end| end.saturating_add(patience));
    gangs.flat_map(|gang| &gang.members).map(waits_until).max().unwrap_or(0)
}
