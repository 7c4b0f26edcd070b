//! What jobs of gangs hold of each rank for pods, or will hold.

use std::collections::{BTreeMap, HashMap};

use api::Rank;
use broker::job_id::JobId;

use super::{
    hold::{GangCores, Holdings},
    round::Round,
};
use crate::{jobs::JobState, pod::PodView, record::GangId, requests};

/// Counts each pod with its slot or, if a pin that waits lists it, with a slot of that pin. A pod with neither counts only if a pin can be
/// submitted for it, which `may_be_asked_for` says of its gang: else it uses cores like a pod of another scheduler.
pub(super) fn count(round: &Round, may_be_asked_for: impl Fn(&GangId) -> bool) -> BTreeMap<Rank, GangCores> {
    let mut by_rank: BTreeMap<Rank, GangCores> = BTreeMap::new();
    for (gang, holdings) in &round.gangs {
        let can_be_pinned = round.broker.accepts_jobs && may_be_asked_for(&gang.id);
        let covered = holdings.jobs.iter().flat_map(|held| {
            let users = held.slots.iter().filter_map(|(slot, user)| Some(((*user)?, slot.rank)));
            users.map(|(pod, rank)| (pod, rank, Some(held.gang_job.shape.cores)))
        });
        let uncovered = holdings.uncovered.iter().map(|(pod, rank)| (*pod, *rank, None));
        let mut waiting = WaitingPins::of(holdings);
        for (pod, rank, slot) in covered.chain(uncovered).filter(|(pod, ..)| pod.may_be_there()) {
            let Some(target) = round.world.targets.get(&rank) else { continue };
            let of_rank = by_rank.entry(rank).or_default();
            // In this order: what a restarted broker had given before is replaced by the pin.
            let slot = waiting.take(pod).or(slot);
            of_rank.is_incomplete |= slot.is_none() && can_be_pinned;
            let to_be_pinned = || can_be_pinned.then(|| requests::cores(pod.requests.cpu, target.threads));
            let cores = slot.or_else(to_be_pinned).unwrap_or(0);
            of_rank.cores = of_rank.cores.saturating_add(cores);
            let slot = u64::from(cores).saturating_mul(target.core());
            let granted = pod.requests.cpu.saturating_sub(pod.deferred.cpu);
            of_rank.requested = of_rank.requested.saturating_add(pod.requests.cpu.min(slot));
            of_rank.granted = of_rank.granted.saturating_add(granted.min(slot));
        }
    }
    by_rank
}

/// The pins of a gang that wait for their cores.
struct WaitingPins<'a> {
    /// By uid of the pods that they list.
    of_pods: HashMap<&'a str, JobId>,
    left: HashMap<JobId, Slots>,
}

/// The slots of a pin that no pod has been counted with.
struct Slots {
    number: u32,
    /// Of each.
    cores: u32,
}

impl<'a> WaitingPins<'a> {
    fn of(holdings: &Holdings<'a>) -> Self {
        let (mut of_pods, mut left) = (HashMap::new(), HashMap::new());
        for held in &holdings.jobs {
            let (record, shape) = (&held.gang_job.record, &held.gang_job.shape);
            if held.job.state == JobState::Pending && record.pinned.is_some() {
                of_pods.extend(record.members.iter().map(|member| (member.uid.as_str(), held.job.id)));
                left.insert(held.job.id, Slots { number: shape.slots, cores: shape.cores });
            }
        }
        Self { of_pods, left }
    }

    /// The cores of the slot that a pin is to hold for `pod`; 0 if its pin has too few slots; None if it has no pin.
    fn take(&mut self, pod: &PodView) -> Option<u32> {
        let slots = self.left.get_mut(self.of_pods.get(pod.uid.as_str())?)?;
        let had_slot = slots.number > 0;
        slots.number = slots.number.saturating_sub(1);
        Some(if had_slot { slots.cores } else { 0 })
    }
}
