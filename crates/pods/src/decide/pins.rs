//! Pods that run, and whose cores nobody holds, get a job that is pinned to their rank.

use std::collections::{BTreeMap, BTreeSet};

use api::Rank;
use broker::job_id::JobId;

use super::{hold::Holdings, request::pin, round::Round};
use crate::{action::Action, gangs::Gang, jobs::JobState, pod::PodView};

/// How far Flux has been asked for the cores of a gang that no job holds.
#[derive(Default)]
pub(super) enum Again {
    /// Nothing is to be submitted: all is asked for, or Flux can give the gang nothing.
    #[default]
    Asked,
    /// Jobs are being submitted.
    Submitting,
    /// Jobs are missing, and the gang is left alone for a while.
    Paused,
    /// Flux takes no jobs at all, and a pod runs on cores that no job holds.
    Disabled,
}

/// What becomes of the pods of a gang that are to be pinned.
#[derive(Default)]
pub(super) struct Pins {
    /// The jobs that are pending for them.
    pub pending: BTreeSet<JobId>,
    pub again: Again,
}

/// Submits one job for each rank of `pods`, unless one that lists them is pending, or the gang `is_paused`.
pub(super) fn submit_pins<'a>(
    round: &mut Round<'a>,
    gang: &Gang<'a>,
    holdings: &Holdings<'a>,
    pods: impl IntoIterator<Item = (&'a PodView, Rank)>,
    is_paused: bool,
) -> Pins {
    let mut by_rank: BTreeMap<Rank, Vec<&PodView>> = BTreeMap::new();
    for (pod, rank) in pods {
        by_rank.entry(rank).or_default().push(pod);
    }
    let waiting: Vec<&PodView> = gang.waiting().collect();
    let mut pins = Pins::default();
    for (rank, pods) in by_rank {
        // A job that lists a pod which has ended would take more than is needed, from what others on the rank need.
        let is_there = |uid: &str| pods.iter().chain(&waiting).any(|pod| pod.uid == uid);
        let is_here = |uid: &str| is_there(uid) || round.runs_unseen_until(uid).is_some();
        let pinned = holdings.jobs.iter().filter(|held| {
            let record = &held.gang_job.record;
            let is_right = record.pinned == Some(rank) && record.members.iter().all(|member| is_here(&member.uid));
            held.job.state == JobState::Pending && is_right
        });
        let mut missing = Vec::new();
        for pod in &pods {
            let pending = pinned.clone().find(|held| held.gang_job.record.lists(&pod.uid));
            match pending {
                Some(held) => drop(pins.pending.insert(held.job.id)),
                None => missing.push(*pod),
            }
        }
        if missing.is_empty() {
            continue;
        }
        if !round.broker.accepts_jobs && !holdings.uncovered.is_empty() {
            pins.again = Again::Disabled;
        } else if !round.broker.accepts_jobs || is_paused {
            pins.again = Again::Paused;
        } else if let Some(request) = pin(round, gang, &missing, rank) {
            round.actions.push(Action::Submit(Box::new(request)));
            pins.again = Again::Submitting;
        } else if !matches!(pins.again, Again::Submitting) {
            // Its Node is deleted or unreadable. A job of the gang that holds the cores must stay.
            pins.again = Again::Paused;
        }
    }
    pins
}
