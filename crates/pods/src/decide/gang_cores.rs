//! What jobs of gangs hold of each rank for pods, or will hold.

use std::collections::{BTreeMap, HashMap};

use api::Rank;
use broker::job_id::JobId;

use super::{
    hold::{GangCores, Holdings},
    round::Round,
};
use crate::{jobs::JobState, pod::PodView, record::GangId, requests::cores};

/// Counts each pod with the slot that it has, or with that of the pin that is to hold its cores. A pod that no job covers counts if its
/// gang `can_be_pinned`: else it uses cores like a pod of another scheduler.
pub(super) fn gang_cores(round: &Round, can_be_pinned: impl Fn(&GangId) -> bool) -> BTreeMap<Rank, GangCores> {
    let mut by_rank: BTreeMap<Rank, GangCores> = BTreeMap::new();
    for (gang, holdings) in round.gangs.iter().zip(&round.holdings) {
        for (pod, rank, cores) in slots(round, holdings, can_be_pinned(&gang.id)) {
            let Some(target) = round.world.targets.get(&rank) else { continue };
            let held = by_rank.entry(rank).or_default();
            held.cores = held.cores.saturating_add(cores);
            let requested = pod.requests.cpu.min(u64::from(cores).saturating_mul(target.core()));
            held.requested = held.requested.saturating_add(requested);
        }
    }
    by_rank
}

/// The pods of a gang that may be on their nodes, each with its rank and the cores of its slot.
fn slots<'a>(round: &Round, holdings: &Holdings<'a>, can_be_pinned: bool) -> Vec<(&'a PodView, Rank, u32)> {
    let mut pins = Pins::of(holdings);
    let covered = holdings.jobs.iter().flat_map(|held| {
        let users = held.slots.iter().filter_map(|(slot, user)| Some(((*user)?, slot.rank)));
        users.map(|(pod, rank)| (pod, rank, held.gang_job.shape.cores))
    });
    let uncovered = holdings.uncovered.iter().map(|(pod, rank)| {
        let threads = round.world.targets.get(rank).map_or(1, |target| target.threads);
        (*pod, *rank, if can_be_pinned { cores(pod.requests.cpu, threads) } else { 0 })
    });
    let all = covered.chain(uncovered).filter(|(pod, ..)| pod.holds(round.now) && pod.may_be_there());
    all.map(|(pod, rank, cores)| (pod, rank, pins.take(pod).unwrap_or(cores))).collect()
}

/// The pins of a gang that wait for their cores.
struct Pins<'a> {
    /// By uid of the pods that they list.
    of_pods: HashMap<&'a str, JobId>,
    /// How many more pods each can hold, and the cores of each.
    left: HashMap<JobId, (u32, u32)>,
}

impl<'a> Pins<'a> {
    fn of(holdings: &Holdings<'a>) -> Self {
        let (mut of_pods, mut left) = (HashMap::new(), HashMap::new());
        for held in &holdings.jobs {
            let (record, shape) = (&held.gang_job.record, &held.gang_job.shape);
            if held.job.state == JobState::Pending && record.pinned.is_some() {
                of_pods.extend(record.members.iter().map(|member| (member.uid.as_str(), held.job.id)));
                left.insert(held.job.id, (shape.slots, shape.cores));
            }
        }
        Self { of_pods, left }
    }

    /// The cores of the slot that a pin is to hold for `pod`; 0 if its pin has too few slots; None if it has no pin.
    fn take(&mut self, pod: &PodView) -> Option<u32> {
        let (slots, cores) = self.left.get_mut(self.of_pods.get(pod.uid.as_str())?)?;
        let had_slot = *slots > 0;
        *slots = slots.saturating_sub(1);
        Some(if had_slot { *cores } else { 0 })
    }
}
