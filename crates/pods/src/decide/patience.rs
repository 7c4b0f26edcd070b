//! If a gang can't be completed for too long, it begins again: the bridge suspends its Job, and resumes it once the pods are gone.
//!
//! Pods are never deleted one by one, because each counts on the Job's backoffLimit.

use super::{memory::Memory, round::Round, words::is_not_taken_up};
use crate::{
    action::{Action, JobRef},
    facts::SuspendReason,
    gangs::Gang,
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
    let job = gang.job.filter(|job| may_write && gang.size > 1 && !job.is_suspended);
    if let Some(job) = job {
        let reason = SuspendReason::Incomplete;
        round.actions.push(Action::SuspendJob { gang: gang.id.clone(), job: JobRef::from(job), reason });
        // If it does not help, not again at once.
        memory.incomplete.insert(gang.id.clone(), round.now);
    }
}

/// Resumes the Jobs that were suspended for that, and have no pods any more.
pub(super) fn resume(round: &mut Round) {
    let is_under_way = |job: &JobRef| {
        round.world.under_way.iter().any(|action| matches!(action, Action::ResumeJob(other) if other == job))
    };
    let is_gone = |uid: &str| !round.gangs.iter().any(|gang| gang.job.is_some_and(|job| job.uid == uid));
    let jobs =
        round.world.facts.jobs.values().filter(|job| {
            job.is_to_be_resumed() && is_gone(&job.uid) && round.world.namespaces.contains(&job.namespace)
        });
    let jobs: Vec<_> = jobs.map(JobRef::from).filter(|job| !is_under_way(job)).map(Action::ResumeJob).collect();
    round.actions.extend(jobs);
}
