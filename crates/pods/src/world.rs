//! What the bridge decides by. The effect layer provides it.

use std::collections::{BTreeMap, BTreeSet};

use api::{IdSet, Rank};
use broker::queues::{Queue, STOPPED_BY_RESTART};

use crate::{
    action::Action,
    facts::Facts,
    jobs::{Jobs, OUR_NOTE},
    pod::PodView,
    record::GangId,
    target::Target,
    time::{Millis, Moment, SECOND},
};

/// How long a gang is left alone after Flux or the API server has refused an action for it, or after Flux has ended its job.
pub const PAUSE: Millis = 15 * SECOND;

/// All that is known at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct World {
    /// The part of the FluxInstance's spec that matters.
    pub settings: Settings,
    /// The lead's broker; None without a connection to it.
    pub broker: Option<Broker>,
    /// The agent is about to stop the broker, so no queue is started: host jobs that start now would end with it.
    pub is_closing: bool,
    /// The jobs; None until the journal's backlog has been read to its end.
    pub jobs: Option<Jobs>,
    /// The pods; None until they have been listed.
    pub pods: Option<Pods>,
    /// The Nodes that hold a rank on which jobs may run.
    pub targets: BTreeMap<Rank, Target>,
    /// The rank of each member by its Node's name, if jobs may run on it. Unlike in `targets`, the Node may be deleted or unreadable: its
    /// pods run on, perhaps until it is back, and keep their cores until the member loses its rank.
    pub ranks: BTreeMap<String, Rank>,
    /// The ranks that Flux gives jobs now: they are online and not drained. Empty while that is not known.
    pub available: IdSet,
    /// The ranks that are drained. Empty while that is not known.
    pub drained: IdSet,
    /// What the pods refer to.
    pub facts: Facts,
    /// Namespaces in which the bridge may bind, tell, evict and suspend.
    pub namespaces: BTreeSet<String>,
    /// Namespaces of which the API server can't say whether the bridge may write there. What it has bound there keeps its cores, and nothing
    /// else is done.
    pub doubtful: BTreeSet<String>,
    /// By gang: why Flux or the API server refused an action for it less than [`PAUSE`] ago. While a gang is listed, such actions are
    /// not repeated ([`Action::paused_by_refusal`]).
    pub refused: BTreeMap<GangId, String>,
    /// The ranks for which a shadow job was refused less than [`PAUSE`] ago.
    pub refused_ranks: BTreeSet<Rank>,
    /// The ranks of shadow jobs for several ranks of which one was refused less than [`PAUSE`] ago: which rank's part it was is not known.
    pub refused_together: BTreeSet<Rank>,
    /// Pods that the API server did not let go a while ago, by uid: their gangs make way for none.
    pub protected: BTreeSet<String>,
    /// Actions that were begun and whose result is not in this world yet.
    pub under_way: Vec<Action>,
}

/// `spec.pods`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Most pods of a gang.
    pub max_gang: u32,
    /// Duration of a job whose pods have none, in seconds.
    pub default_duration: u64,
    /// How long a gang that runs in part is completed before its Job is suspended and resumed.
    pub complete_after: Millis,
    /// How much of a node its pods of other schedulers may request before they hold a core in Flux, in thousandths of a hardware thread.
    pub tolerance: u64,
    /// How long a gang waits before gangs of lower priority make way for it; None: for ever.
    pub preempt_after: Option<Millis>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_gang: 256,
            default_duration: 86_400,
            complete_after: 60 * SECOND,
            tolerance: 500,
            preempt_after: None,
        }
    }
}

/// The lead's broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broker {
    /// Names this life of the broker, as no other broker is named.
    pub life: String,
    /// Since when it has been in state run; None if it is in any other, such as cleanup.
    pub in_run_since: Option<Moment>,
    /// Its queues.
    pub queues: Queues,
    /// True if one of them accepts jobs.
    pub accepts_jobs: bool,
    /// Lease `flux-bridge` names this broker: what ran when it started has been given its cores again.
    pub is_recovered: bool,
}

/// The state of the queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queues {
    /// The scheduler is offline: nothing is allocated, and nothing that holds resources may end.
    Offline,
    /// All are started.
    AllStarted,
    /// At least one is started. All others are stopped by an administrator.
    Started,
    /// At least one is started, and at least one was stopped by the broker's restart or by the bridge.
    PartlyStarted,
    /// None is started, and at least one was stopped by the broker's restart or by the bridge.
    Stopped,
    /// An administrator has stopped all.
    StoppedByOthers,
}

impl Queues {
    /// What the job manager says of all its queues.
    pub fn of(all: &[Queue]) -> Self {
        let is_ours = |queue: &Queue| queue.stop_reason.as_deref().is_some_and(Self::is_ours);
        match (all.iter().any(|queue| queue.start), all.iter().any(is_ours)) {
            _ if all.iter().any(Queue::is_scheduler_offline) => Self::Offline,
            (true, false) if all.iter().all(|queue| queue.start) => Self::AllStarted,
            (true, false) => Self::Started,
            (true, true) => Self::PartlyStarted,
            (false, true) => Self::Stopped,
            (false, false) => Self::StoppedByOthers,
        }
    }

    /// True if nothing is allocated before somebody starts a queue.
    pub fn are_all_stopped(self) -> bool {
        matches!(self, Self::Stopped | Self::StoppedByOthers)
    }

    /// True if a queue is stopped that the bridge starts once the cores of pods are held again.
    pub fn has_stopped_by_us(self) -> bool {
        matches!(self, Self::Stopped | Self::PartlyStarted)
    }

    /// True for a reason for which the bridge starts a queue again.
    pub fn is_ours(stop_reason: &str) -> bool {
        stop_reason == STOPPED_BY_RESTART || stop_reason.starts_with(OUR_NOTE)
    }
}

/// All pods of the cluster that are bound or bridged, and have not ended.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pods {
    /// By uid. Bridged pods that have ended belong here as long as they exist, and each that was bound when the API server
    /// sent its deletion, for [`crate::pod::FORCED_HOLD`].
    pub by_uid: BTreeMap<String, PodView>,
    /// When they were listed for the first time: nothing is known about pods that were deleted before.
    pub listed: Moment,
}

#[cfg(test)]
mod tests {
    use broker::queues::SCHEDULER_IS_OFFLINE;

    use super::*;

    #[test]
    fn queues_are_told_apart_by_who_stopped_them() {
        let started = Queue { start: true, ..Queue::default() };
        let stopped = |reason: &str| Queue { stop_reason: Some(reason.to_owned()), ..Queue::default() };
        let (ours, theirs) = (stopped(STOPPED_BY_RESTART), stopped("maintenance"));
        for (queues, expected) in [
            (vec![started.clone()], Queues::AllStarted),
            (vec![started.clone(), theirs.clone()], Queues::Started),
            (vec![started.clone(), ours.clone(), theirs.clone()], Queues::PartlyStarted),
            (vec![stopped(&format!("{OUR_NOTE}why")), theirs.clone()], Queues::Stopped),
            (vec![theirs, Queue::default()], Queues::StoppedByOthers),
            (vec![ours, stopped(SCHEDULER_IS_OFFLINE)], Queues::Offline),
        ] {
            assert_eq!(Queues::of(&queues), expected, "{queues:?}");
        }
    }
}
