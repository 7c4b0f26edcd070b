//! The jobs that gangs ask for.

use std::collections::BTreeSet;

use api::Rank;

use super::{queue::priority, round::Round};
use crate::{
    constraint::Constraint,
    gangs::Gang,
    jobs::{GangJob, Job},
    jobspec::{JobRequest, USED_CORES_URGENCY, urgency},
    place::{Limits, NoPlace, place},
    pod::PodView,
    record::{JobRecord, MemberPod},
    requests::cores,
    world::World,
};

/// The job for `pods` of `gang`, anywhere but on `avoided`. `threads` and `deals_out`: see [`Limits`].
pub(super) fn request(
    round: &Round,
    gang: &Gang,
    pods: &[&PodView],
    avoided: &BTreeSet<Rank>,
    (threads, deals_out): (Option<u32>, bool),
) -> Result<JobRequest, NoPlace> {
    let World { targets, facts, .. } = round.world;
    let place = place(gang, pods, Limits { targets, usage: &round.usage, facts, avoided, threads, deals_out })?;
    Ok(JobRequest {
        record: record(round, gang, pods, place.threads, None),
        slots: u32::try_from(pods.len()).unwrap_or(u32::MAX),
        cores: place.cores,
        per_node: place.per_node,
        duration: duration(round, gang, pods),
        constraint: Constraint::of(&place.ranks, &round.members),
        urgency: urgency(priority(pods.iter().copied())),
    })
}

/// The job that holds the cores of `pods` of `gang`, which are on `rank` or have been given cores there. If the rank has too
/// few, all it has: Flux would refuse more, and what runs there runs anyway.
pub(super) fn pin(round: &Round, gang: &Gang, pods: &[&PodView], rank: Rank) -> Option<JobRequest> {
    let target = round.world.targets.get(&rank)?;
    let largest = pods.iter().map(|pod| cores(pod.requests.cpu, target.threads)).max()?.min(target.cores);
    let slots = u32::try_from(pods.len()).unwrap_or(u32::MAX).min(target.cores.checked_div(largest)?);
    Some(JobRequest {
        record: record(round, gang, pods, target.threads, Some(rank)),
        slots,
        cores: largest,
        per_node: None,
        duration: duration(round, gang, pods),
        constraint: Constraint::Ranks([rank].into_iter().collect()),
        urgency: USED_CORES_URGENCY,
    })
}

/// True if `job` is what `request` asks for.
pub(super) fn is_as_wanted(round: &Round, job: &GangJob, request: &JobRequest) -> bool {
    let shape = &job.shape;
    let permits = |constraint: &Constraint, rank: &Rank| constraint.permits(*rank);
    (shape.slots, shape.cores, shape.per_node) == (request.slots, request.cores, request.per_node)
        && round.members.iter().all(|rank| permits(&shape.constraint, rank) == permits(&request.constraint, rank))
}

/// True if a slot of `job` is large enough for `pod`.
pub(super) fn is_large_enough((_, gang_job): (&Job, &GangJob), pod: &PodView) -> bool {
    cores(pod.requests.cpu, gang_job.record.threads) <= gang_job.shape.cores
}

fn record(round: &Round, gang: &Gang, pods: &[&PodView], threads: u32, pinned: Option<Rank>) -> JobRecord {
    let member_pod = |pod: &&PodView| MemberPod { name: pod.name.clone(), uid: pod.uid.clone(), index: pod.index };
    JobRecord {
        gang: gang.id.clone(),
        members: pods.iter().map(member_pod).collect(),
        threads,
        queued: round.queued_since(gang),
        pinned,
    }
}

/// The longest of the pods' durations, in seconds.
fn duration(round: &Round, gang: &Gang, pods: &[&PodView]) -> u64 {
    let otherwise = gang.job.and_then(|job| job.seconds).unwrap_or(round.world.settings.default_duration);
    let own = |pod: &&PodView| pod.plan.as_ref().and_then(|plan| plan.seconds).unwrap_or(otherwise);
    pods.iter().map(own).max().unwrap_or(otherwise)
}
