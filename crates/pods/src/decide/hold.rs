//! Which slot of which job each bound pod has.

use std::collections::BTreeMap;

use api::Rank;

use crate::{
    allocation::Slot,
    gangs::Gang,
    jobs::{GangJob, Job},
    pod::PodView,
    time::Moment,
};

/// An active job of a gang.
pub(super) struct Held<'a> {
    pub job: &'a Job,
    pub gang_job: &'a GangJob,
    /// Its slots with the pods that have them; none while it is pending.
    pub slots: Vec<(&'a Slot, Option<&'a PodView>)>,
    /// A pod that it lists is on its rank and has no slot of its own: the rank has fewer cores than its pods ask for.
    is_overfull: bool,
}

impl Held<'_> {
    /// True if a pod that runs needs it.
    pub fn is_used(&self) -> bool {
        self.is_overfull || self.slots.iter().any(|(_, pod)| pod.is_some())
    }

    /// True if it was submitted for a whole gang of `size`, and no pod has any of it yet.
    pub fn is_whole(&self, size: u32) -> bool {
        self.gang_job.record.pinned.is_none() && self.gang_job.shape.slots == size && !self.is_used()
    }
}

/// The active jobs of a gang, and its pods that none of them covers.
pub(super) struct Holdings<'a> {
    pub jobs: Vec<Held<'a>>,
    /// Bound pods on nodes of the instance whose cores nobody holds.
    pub uncovered: Vec<(&'a PodView, Rank)>,
}

/// What jobs of gangs hold of one rank for pods, or will hold: see [`super::gang_cores`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct GangCores {
    /// The cores of the pods' slots.
    pub cores: u32,
    /// What these pods request, and of each no more than its slot has, in thousandths of a hardware thread. The rest of what a resized
    /// pod requests is used like by other pods.
    pub requested: u64,
    /// As `requested`, without what kubelet has not granted yet.
    pub granted: u64,
    /// A pin is still to be submitted for some of these pods.
    pub is_incomplete: bool,
}

/// How good the reason is to believe that a pod has a slot.
#[derive(Clone, Copy)]
enum Reason {
    /// Its record names that very slot.
    Recorded,
    /// The job lists it.
    Listed,
    /// The job is its gang's.
    SameGang,
}

impl<'a> Holdings<'a> {
    /// Gives each bound pod of `gang` a slot on the pod's own rank, of one of the gang's jobs. Only the choice among equal
    /// slots depends on what a pod's record says.
    pub fn of(gang: &Gang<'a>, jobs: &[(&'a Job, &'a GangJob)], ranks: &BTreeMap<&str, Rank>, now: Moment) -> Self {
        let active = jobs.iter().filter(|(job, _)| job.is_active());
        let mut jobs: Vec<Held> = active
            .map(|(job, gang_job)| {
                let slots = job.slots().into_iter().flatten().map(|slot| (slot, None)).collect();
                Held { job, gang_job, slots, is_overfull: false }
            })
            .collect();
        // A node that holds no rank has been forgotten, with its pods.
        let rank = |pod: &PodView| pod.node.as_ref().and_then(|node| ranks.get(node.as_str())).copied();
        let mut left: Vec<_> = gang.holding(now).filter_map(|pod| Some((pod, rank(pod)?))).collect();
        for reason in [Reason::Recorded, Reason::Listed, Reason::SameGang] {
            left.retain(|(pod, rank)| !jobs.iter_mut().any(|held| held.take(pod, *rank, reason)));
        }
        left.retain(|(pod, rank)| {
            if pod.is_gone_before_it_began() {
                return false;
            }
            let pinned = jobs.iter_mut().find(|held| {
                let record = &held.gang_job.record;
                record.pinned == Some(*rank) && record.lists(&pod.uid) && !held.slots.is_empty()
            });
            pinned.map(|held| held.is_overfull = true).is_none()
        });
        Self { jobs, uncovered: left }
    }
}

impl<'a> Held<'a> {
    /// Gives `pod` a free slot on `rank`, if there is one and `reason` holds. Returns true if it did.
    fn take(&mut self, pod: &'a PodView, rank: Rank, reason: Reason) -> bool {
        // Else a forged pod that is gone would keep the slot of one that runs.
        if self.gang_job.record.pinned.is_some() && pod.is_gone_before_it_began() {
            return false;
        }
        let recorded = pod.record.as_ref().filter(|record| record.id == self.job.id);
        let is_meant = |slot: &Slot| match reason {
            Reason::Recorded => recorded.is_some_and(|record| record.cores == slot.cores),
            Reason::Listed => self.gang_job.record.lists(&pod.uid),
            Reason::SameGang => true,
        };
        let free = self.slots.iter_mut().find(|(slot, taken)| taken.is_none() && slot.rank == rank && is_meant(slot));
        free.map(|(_, taken)| *taken = Some(pod)).is_some()
    }
}
