//! The way back after a start of the lead's broker.
//!
//! Flux takes back the jobs of before, but gives them new cores or ends them, while the pods run on where they are. So the
//! queues are stopped, and every gang that had resources gets jobs for the very cores that its pods have. Only then are the
//! old jobs cancelled: wherever this is interrupted, it is known what to hold. Then the queues are started, and the new jobs
//! are first.
//!
//! Nothing waits for a rank that is down or drained: its jobs stay pending, and are the first there when it returns.
//! Nothing waits for a gang whose new jobs Flux refuses: its old jobs stay, and hold what they can. One refusal counts until
//! the recovery ends, so that each gang is asked for once, however many are refused. Nothing waits for a gang that came after
//! the recovery began, either. But if Flux takes no jobs at all
//! (`flux queue disable`), the queues stay stopped while any pod runs on cores that no job holds.
//!
//! What pods of other schedulers use is asked for in the same way ([`shadows`]), after the gangs.

use std::collections::BTreeSet;

use broker::job_id::JobId;

use super::{
    gang_cores,
    hold::Holdings,
    memory::{Asked, Memory, RecoveryMemory},
    pause::is_refused,
    pins::{Again, submit_pins},
    request::request,
    round::Round,
    shadows,
    start::{avoided, deals_out},
};
use crate::{
    action::Action,
    check::check_pod,
    gangs::Gang,
    jobs::{JobState, OUR_NOTE},
    jobspec::{FIRST_URGENCY, JobRequest},
    pod::PodView,
    record::GangId,
    world::Queues,
};

/// A recovery goes on asking for a gang until its pods have changed this often: they may end one after another meanwhile.
pub(super) const MOST_CHANGES: u32 = 50;

/// What recovery waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Recovery {
    /// The scheduler.
    #[error("waits until the scheduler is online")]
    Scheduler,
    /// The queues.
    #[error("stops the queues")]
    Queues,
    /// New jobs.
    #[error("submits a job for each gang and rank")]
    Submit,
    /// Old jobs.
    #[error("cancels the jobs of the broker's earlier life")]
    Cancel,
    /// An administrator.
    #[error(
        "waits until a queue accepts jobs (`flux queue enable`): without jobs, the cores of pods that run would be given out again"
    )]
    Disabled,
    /// Nothing any more.
    #[error("starts the queues")]
    Start,
}

/// Adds the actions of the next step to the round, and returns what recovery waits for.
pub(super) fn recover(round: &mut Round, memory: &mut Memory) -> Recovery {
    match round.broker.queues {
        Queues::Offline => return Recovery::Scheduler,
        queues if queues.are_all_stopped() => {}
        _ if is_stopping(round) => return Recovery::Queues,
        _ => {
            round.actions.push(Action::StopQueues(format!("{OUR_NOTE}gives pods that run their cores again")));
            return Recovery::Queues;
        }
    }
    if memory.recovery.life != round.broker.life {
        let known = round.gangs.iter().map(|(gang, _)| (gang.id.clone(), Asked::default())).collect();
        memory.recovery = RecoveryMemory { life: round.broker.life.clone(), gangs: known, ..RecoveryMemory::default() };
    }
    // A refusal counts only if this broker takes jobs at all.
    if !round.broker.accepts_jobs {
        memory.recovery.given_up.clear();
        memory.recovery.given_up_ranks.clear();
    }
    if cancel_spoiled(round, &mut memory.recovery.spoiled) {
        return Recovery::Cancel;
    }
    note_refusals(round, memory);
    round.gang_cores = gang_cores::count(round, |gang| may_wait_for(memory, gang));
    let (mut is_submitting, mut paused, mut needed) = (false, BTreeSet::new(), BTreeSet::new());
    let mut is_disabled = false;
    // Taken out while the loop changes the round.
    let gangs = std::mem::take(&mut round.gangs);
    for (gang, holdings) in &gangs {
        if round.is_busy(&gang.id) {
            is_submitting = true;
            continue;
        }
        match give_again(round, memory, gang, holdings, &mut needed) {
            Again::Asked => {}
            Again::Submitting => {
                is_submitting = true;
                note_asked(memory, gang);
            }
            Again::Paused => drop(paused.insert(&gang.id)),
            Again::Disabled => {
                is_disabled = true;
                paused.insert(&gang.id);
            }
        }
    }
    // Not before the jobs of gangs show: until then, what these hold would count as used by other pods.
    if !is_submitting {
        match shadows::ask_for_all(round, &mut memory.recovery.given_up_ranks) {
            Again::Submitting => is_submitting = true,
            Again::Disabled => is_disabled = true,
            Again::Asked | Again::Paused => {}
        }
    }
    let is_canceling = !is_submitting && cancel_old(round, &gangs, &needed, &paused);
    round.gangs = gangs;
    match (is_submitting, is_canceling) {
        (true, _) => Recovery::Submit,
        (_, true) => Recovery::Cancel,
        _ if is_disabled => Recovery::Disabled,
        _ => {
            if !round.world.under_way.contains(&Action::StartQueues) {
                round.actions.push(Action::StartQueues);
            }
            Recovery::Start
        }
    }
}

/// Cancels the jobs of which [`Job::is_spoiled`] tells, before the scheduler gives them anything; what they were for is asked for again. True
/// if there are any.
fn cancel_spoiled(round: &mut Round, gangs: &mut BTreeSet<GangId>) -> bool {
    let jobs = round.jobs;
    let spoiled: Vec<_> = jobs.of_gangs().filter(|(job, _)| job.is_spoiled).collect();
    for (job, gang_job) in &spoiled {
        let gang = &gang_job.record.gang;
        gangs.insert(gang.clone());
        if !round.is_busy(gang) && !round.has_unseen(&gang_job.record) {
            let note = format!("{OUR_NOTE}Flux has stored resources for this job and does not know it");
            round.actions.push(Action::Cancel { job: job.id, gang: gang.clone(), note });
        }
    }
    shadows::cancel_spoiled(round) || !spoiled.is_empty()
}

fn is_stopping(round: &Round) -> bool {
    round.world.under_way.iter().any(|action| matches!(action, Action::StopQueues(_)))
}

/// Submits jobs for the cores that `gang` has been given. Adds the pending jobs that will hold those cores to `needed`.
fn give_again<'a>(
    round: &mut Round<'a>,
    memory: &mut Memory,
    gang: &Gang<'a>,
    holdings: &Holdings<'a>,
    needed: &mut BTreeSet<JobId>,
) -> Again {
    let on_rank = |pod: &'a PodView| Some((pod, *round.ranks.get(pod.node.as_deref()?)?));
    let holding = gang.holding(round.now).filter(|pod| !pod.is_gone_before_it_began());
    let mut pods: Vec<_> = holding.filter_map(on_rank).collect();
    if pods.is_empty() {
        // Its pods may all run on nodes that are members no more: Flux has nothing to give them.
        let is_elsewhere = gang.holding(round.now).next().is_some();
        return if is_elsewhere { Again::Asked } else { ask_again(round, memory, gang, holdings) };
    }
    // A gang that was being bound gets all that it was given.
    if gang.is_started() {
        let slots = holdings.jobs.iter().flat_map(|held| &held.slots);
        let free = slots.filter(|(_, pod)| pod.is_none()).map(|(slot, _)| slot.rank);
        // A pin that also asks for pods which other pods leave no room for would wait for ever.
        let mut usage = round.usage.clone();
        pods.extend(gang.waiting().zip(free).filter(|(pod, rank)| {
            let Some(target) = round.world.targets.get(rank) else { return true };
            let fits = check_pod(target, usage.all(&target.node), pod).is_none();
            if fits {
                usage.add(&target.node, &pod.requests);
            }
            fits
        }));
    }
    let pins = submit_pins(round, gang, holdings, pods, !may_wait_for(memory, &gang.id));
    needed.extend(pins.pending);
    pins.again
}

/// Counts how often a gang has changed. A gang that is decided on again because its turn has not come yet counts once.
fn note_asked(memory: &mut Memory, gang: &Gang) {
    if let Some(asked) = memory.recovery.gangs.get_mut(&gang.id) {
        let pods: Vec<_> = gang.members.iter().map(|pod| pod.uid.clone()).collect();
        if asked.pods != pods {
            asked.times += 1;
            asked.pods = pods;
        }
    }
}

/// Remembers until the end of the recovery for which gangs Flux has refused a job. If such a gang were asked for again after a while, a
/// recovery might never end: before the last of some thousand gangs is refused, the first would be due again.
fn note_refusals(round: &Round, memory: &mut Memory) {
    let refused = round.gangs.iter().map(|(gang, _)| &gang.id).filter(|gang| is_refused(round, gang));
    memory.recovery.given_up.extend(refused.cloned());
}

/// False if a job for `gang` was refused, or if it came after the recovery began, or has changed too often since.
fn may_wait_for(memory: &Memory, gang: &GangId) -> bool {
    let recovery = &memory.recovery;
    let is_there = recovery.gangs.get(gang).is_some_and(|asked| asked.times < MOST_CHANGES);
    is_there && !recovery.given_up.contains(gang)
}

/// A gang of which nothing is bound is asked for as a whole, before all others.
fn ask_again<'a>(round: &mut Round<'a>, memory: &mut Memory, gang: &Gang<'a>, holdings: &Holdings<'a>) -> Again {
    let was_given =
        memory.recovery.spoiled.contains(&gang.id) || holdings.jobs.iter().any(|held| !held.slots.is_empty());
    let is_asked = holdings.jobs.iter().any(|held| held.job.state == JobState::Pending && held.is_whole(gang.size));
    if !was_given || is_asked || gang.problem.is_some() {
        return Again::Asked;
    }
    if !may_wait_for(memory, &gang.id) {
        return Again::Paused;
    }
    let pods: Vec<&PodView> = gang.waiting().collect();
    let deals_out = deals_out(memory, gang, holdings);
    let avoided = avoided(round, memory, gang, &pods, deals_out);
    let Ok(request) = request(round, gang, &pods, &avoided, (None, deals_out)) else { return Again::Asked };
    let request = JobRequest { urgency: FIRST_URGENCY, ..request };
    round.actions.push(Action::Submit(Box::new(request)));
    Again::Submitting
}

/// Cancels what recovery has replaced. An allocated job is of the broker's earlier life, because nothing is allocated while
/// the queues are stopped; that of a `paused` gang stays, because nothing else holds its cores. A pending job for one rank
/// goes if it is not `needed`, and one for a whole gang if the gang has cores. Returns true until all of them have ended.
fn cancel_old(
    round: &mut Round,
    gangs: &[(Gang, Holdings)],
    needed: &BTreeSet<JobId>,
    paused: &BTreeSet<&GangId>,
) -> bool {
    let gangs = gangs.iter().map(|(gang, _)| gang);
    let started: BTreeSet<_> =
        gangs.filter(|gang| gang.holding(round.now).next().is_some()).map(|gang| &gang.id).collect();
    let mut any = false;
    let mut cancels = Vec::new();
    let jobs = round.jobs;
    for (job, gang_job) in jobs.of_gangs() {
        let record = &gang_job.record;
        let is_replaced = match job.state {
            JobState::Pending if record.pinned.is_some() => !needed.contains(&job.id) && !round.has_unseen(record),
            JobState::Pending => started.contains(&record.gang),
            JobState::Allocated(_) => !paused.contains(&record.gang),
            JobState::Ending => {
                any = true;
                false
            }
            JobState::Ended => false,
        };
        if is_replaced {
            any = true;
            if !round.is_busy(&record.gang) && !round.has_unseen(record) {
                let note = format!("{OUR_NOTE}the broker has restarted, and this job is not needed any more");
                cancels.push(Action::Cancel { job: job.id, gang: record.gang.clone(), note });
            }
        }
    }
    round.actions.extend(cancels);
    any | shadows::cancel_old(round)
}
