//! A gang of which no pod is bound: all of it, or nothing.

use std::collections::{BTreeMap, BTreeSet};

use api::Rank;
use broker::job_id::JobId;

use super::{
    hold::{Held, Holdings},
    memory::Memory,
    pause::reason_to_pause,
    placeholders::must_shrink,
    queue::{QueuePlace, WaitingJob, may_change_at},
    request::{is_as_wanted, is_large_enough, request},
    round::Round,
    words::Words,
};
use crate::{
    action::{Action, Binding, PodRef},
    allocation::Slot,
    check::{check, check_pod},
    gangs::Gang,
    jobs::JobState,
    jobspec::JobRequest,
    place::{Limits, NoPlace, place},
    pod::PodView,
    record::PodRecord,
    requests::cores,
    world::World,
};

/// What became of pods that wait.
#[derive(Default)]
pub(super) struct Progress {
    /// The jobs that they need.
    pub needed: BTreeSet<JobId>,
    /// What to tell them.
    pub words: Option<Words>,
}

/// Submits a gang that is complete, or binds all its pods to what it was given.
pub(super) fn start<'a>(
    round: &mut Round<'a>,
    memory: &mut Memory,
    gang: &Gang<'a>,
    holdings: &Holdings<'a>,
    queue: &mut Vec<WaitingJob<'a>>,
) -> Progress {
    let pods: Vec<&PodView> = gang.waiting().collect();
    let made_way = &memory.preempt.made_way;
    let fits = |held: &&Held| {
        held.is_whole(gang.size)
            && !made_way.contains(&held.job.id)
            && pods.iter().all(|pod| is_large_enough((held.job, held.gang_job), pod))
    };
    let whole: Vec<_> = holdings.jobs.iter().filter(fits).collect();
    let deals_out = deals_out(memory, gang, holdings);
    let avoided = avoided(round, memory, gang, &pods, deals_out);
    if let Some(held) = whole.iter().find(|held| !held.slots.is_empty()) {
        return bind_all(round, memory, gang, &pods, held, (avoided, deals_out));
    }
    let newest = whole.last().copied();
    let threads = newest.map(|held| held.gang_job.record.threads);
    let request = request(round, gang, &pods, &avoided, (threads, deals_out));
    ask(round, gang, request, newest.filter(|held| held.job.state == JobState::Pending), queue)
}

/// Asks Flux for what pods of `gang` need, unless `pending` waits for it already.
pub(super) fn ask<'a>(
    round: &mut Round<'a>,
    gang: &Gang<'a>,
    request: Result<JobRequest, NoPlace>,
    pending: Option<&Held<'a>>,
    queue: &mut Vec<WaitingJob<'a>>,
) -> Progress {
    let request = match request {
        Ok(request) => request,
        Err(no_place) => {
            // Else a pod of anybody that comes and goes would have the job cancelled and submitted each time.
            let young = pending.filter(|held| round.now < may_change_at(held.job));
            young.iter().for_each(|held| round.wake_at(may_change_at(held.job)));
            let needed = young.map(|held| held.job.id).into_iter().collect();
            return Progress { needed, words: Some(Words::no_place(&no_place)) };
        }
    };
    if let Some(held) = pending {
        let words = wait(round, gang, held, request, queue);
        return Progress { needed: [held.job.id].into(), words };
    }
    if let Some(words) = reason_to_pause(round, &gang.id) {
        return Progress { words: Some(words), ..Progress::default() };
    }
    round.actions.push(Action::Submit(Box::new(request)));
    Progress::default()
}

/// Keeps a job waiting, or submits it again if its gang may run on other ranks by now.
fn wait<'a>(
    round: &mut Round<'a>,
    gang: &Gang,
    held: &Held<'a>,
    request: JobRequest,
    queue: &mut Vec<WaitingJob<'a>>,
) -> Option<Words> {
    let (may_change, queued) = (may_change_at(held.job), request.record.queued);
    if is_as_wanted(round, held.gang_job, &request) {
        let place = QueuePlace::of(gang, &request.record);
        queue.push(WaitingJob { job: held.job, request, place });
    } else if round.now >= may_change {
        round.resubmit(held.job, request);
    } else {
        round.wake_at(may_change);
    }
    Words::queued(round, held.job, queued)
}

fn bind_all(
    round: &mut Round,
    memory: &mut Memory,
    gang: &Gang,
    pods: &[&PodView],
    held: &Held,
    (mut avoided, deals_out): (BTreeSet<Rank>, bool),
) -> Progress {
    let dealt: Vec<_> = pods.iter().zip(&held.slots).map(|(pod, (slot, _))| (*pod, *slot)).collect();
    let ranks: Vec<_> = dealt.iter().map(|(pod, slot)| (*pod, slot.rank)).collect();
    let failing = check(&ranks, &round.world.targets, &round.usage);
    let needed = [held.job.id].into();
    if round.has_unseen(&held.gang_job.record) {
        return Progress { needed, words: None };
    }
    let owed = owed(round, held);
    if failing.is_empty() && owed.is_empty() {
        // All of them, or none: half a gang would wait for the others.
        if take_room(round, &ranks) {
            dealt.into_iter().for_each(|(pod, slot)| bind(round, gang, held, pod, slot));
        }
        return Progress { needed, words: None };
    }
    avoided.extend(owed);
    let threads = Some(held.gang_job.record.threads);
    let dealt = (!deals_out && !failing.is_empty()).then(|| request(round, gang, pods, &avoided, (threads, true)).ok());
    let next = if let Some(dealt) = dealt.flatten().filter(|dealt| dealt.per_node.is_some()) {
        memory.dealt_out.insert(gang.id.clone());
        Ok(dealt)
    } else {
        avoided.extend(failing.keys());
        request(round, gang, pods, &avoided, (threads, deals_out))
    };
    if !avoided.is_empty() {
        memory.avoided.insert(gang.id.clone(), avoided);
    }
    match next {
        Ok(request) => {
            round.resubmit(held.job, request);
            Progress { needed, words: None }
        }
        Err(no_place) => Progress { words: Some(Words::no_place(&no_place)), ..Progress::default() },
    }
}

/// The ranks of a job that has cores there which pins of other gangs wait for: their pods run. While brokers join a lead that has restarted,
/// Flux may give such a core to a gang that only waits, and where kubelet has more room than Flux declares, its pods would fit beside them.
fn owed(round: &Round, held: &Held) -> BTreeSet<Rank> {
    let mut given: BTreeMap<Rank, u32> = BTreeMap::new();
    for (slot, _) in &held.slots {
        *given.entry(slot.rank).or_default() += held.gang_job.shape.cores;
    }
    let is_owed = |(rank, given): (Rank, u32)| {
        let cores = round.world.targets.get(&rank)?.cores;
        (round.gang_cores(rank).cores.saturating_add(given) > cores).then_some(rank)
    };
    given.into_iter().filter_map(is_owed).collect()
}

/// Counts `pods` on their nodes, and returns true if they may be bound now. They are counted in either case: that makes the nodes'
/// placeholder pods shrink.
pub(super) fn take_room(round: &mut Round, pods: &[(&PodView, Rank)]) -> bool {
    let world = round.world;
    let placed: Vec<_> = pods.iter().filter_map(|(pod, rank)| Some((pod, world.targets.get(rank)?))).collect();
    placed.iter().for_each(|(pod, target)| round.usage.add(&target.node, &pod.requests));
    !placed.iter().any(|(_, target)| must_shrink(round, target))
}

/// Binds `pod` to `slot`, whose room was taken ([`take_room`]).
pub(super) fn bind(round: &mut Round, gang: &Gang, held: &Held, pod: &PodView, slot: &Slot) {
    let Some(target) = round.world.targets.get(&slot.rank) else { return };
    round.actions.push(Action::Bind(Box::new(Binding {
        gang: gang.id.clone(),
        pod: PodRef::from(pod),
        node: target.node.clone(),
        record: PodRecord { id: held.job.id, rank: slot.rank, cores: slot.cores.clone() },
    })));
}

/// True if Flux is not to choose how many slots of the gang each node has: what it gave by cores alone did not fit.
pub(super) fn deals_out(memory: &Memory, gang: &Gang, holdings: &Holdings) -> bool {
    // The second also tells an agent that has restarted.
    memory.dealt_out.contains(&gang.id) || holdings.jobs.iter().any(|held| held.gang_job.shape.per_node.is_some())
}

/// The ranks that the gang must avoid still: those on which as many of its pods as Flux may give it slots there would not
/// fit beside all that is there today.
pub(super) fn avoided(
    round: &Round,
    memory: &mut Memory,
    gang: &Gang,
    pods: &[&PodView],
    deals_out: bool,
) -> BTreeSet<Rank> {
    let Some(mut avoided) = memory.avoided.remove(&gang.id) else { return BTreeSet::new() };
    let per_node = if gang.spreads() {
        Some(1)
    } else {
        let World { targets, facts, .. } = round.world;
        let (none, usage) = (BTreeSet::new(), &round.usage);
        let limits = Limits { targets, usage, facts, avoided: &none, threads: None, deals_out };
        deals_out.then(|| place(gang, pods, limits).ok()?.per_node).flatten()
    };
    avoided.retain(|rank| {
        let Some(target) = round.world.targets.get(rank) else { return false };
        let slots = pods.iter().map(|pod| cores(pod.requests.cpu, target.threads)).max().unwrap_or(1);
        // Else Flux could give the gang again what pins wait for, and so on for as long as they do.
        if round.gang_cores(target.rank).cores.saturating_add(slots) > target.cores {
            return true;
        }
        let most = usize::try_from(round.may_be_free(target) / slots).unwrap_or(usize::MAX);
        let mut usage = round.usage.all(&target.node).clone();
        let most = per_node.map_or(most, |each| most.min(each as usize));
        pods.iter().take(most.max(1)).any(|pod| {
            let fails = check_pod(target, &usage, pod).is_some();
            usage.add(&pod.requests);
            fails
        })
    });
    if !avoided.is_empty() {
        memory.avoided.insert(gang.id.clone(), avoided.clone());
    }
    avoided
}
