//! What the bridge remembers from one round to the next. It may be lost: then something is tried, or told, once more.

use std::collections::{BTreeMap, BTreeSet};

use api::{IdSet, Rank};
use broker::job_id::JobId;

use crate::{
    action::Reason,
    record::GangId,
    time::{Millis, Moment},
};

/// See the module.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Memory {
    /// Ranks on which the pods of a gang did not fit when it had been given resources there.
    pub(super) avoided: BTreeMap<GangId, BTreeSet<Rank>>,
    /// Gangs of which more pods than fit had been given one node: their slots are dealt out to nodes ([`crate::place::Place::per_node`]).
    pub(super) dealt_out: BTreeSet<GangId>,
    /// When each gang first came into the queue. Remembered here, so that a gang keeps its place while no node can take it and it has no
    /// job. A gang that is not whole any more loses its place.
    pub(super) first_queued: BTreeMap<GangId, Moment>,
    /// Since when a gang has run in part.
    pub(super) incomplete: BTreeMap<GangId, Moment>,
    /// What the bridge said about each pod, and when, by uid.
    pub(super) told: BTreeMap<String, BTreeMap<Reason, (String, Moment)>>,
    /// Since when all queues have given out cores.
    pub(super) started_since: Option<Moment>,
    pub(super) recovery: RecoveryMemory,
    pub(super) preempt: PreemptMemory,
    pub(super) overlaps: OverlapMemory,
    /// By node.
    pub(super) placeholders: BTreeMap<String, PlaceholderMemory>,
}

/// Which gangs were to make way for others.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct PreemptMemory {
    /// How often others were to go for a gang that waits still, and when last.
    pub helped: BTreeMap<GangId, Helped>,
    /// Jobs of gangs that make way. A controller may make their next pods at once, which must not get the cores.
    pub made_way: BTreeSet<JobId>,
}

/// See [`PreemptMemory::helped`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Helped {
    pub times: u32,
    pub at: Moment,
}

/// Where host jobs have cores that pods of other schedulers use.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct OverlapMemory {
    /// When the bridge began to count.
    pub begun: Option<Moment>,
    /// Since when each rank has had an overlap.
    pub since: BTreeMap<Rank, Moment>,
    /// The ranks where that has lasted for long enough to be counted.
    pub counted: IdSet,
    /// How many were counted.
    pub count: u32,
    /// How long the longest of them lasted.
    pub longest: Millis,
}

/// What is remembered of a node's placeholder pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct PlaceholderMemory {
    /// Since when no host job has run there.
    pub idle_since: Option<Moment>,
    /// The pod that was seen last.
    pub uid: String,
    /// When the pod `uid` was created.
    pub created: Moment,
    /// Since when there has been none.
    pub gone_since: Option<Moment>,
    /// How many pods in a row did not last.
    pub replaced: u32,
    /// When the bridge last made or resized it.
    pub changed: Moment,
    /// Cores of host jobs when it last had the size that it was to have, or fewer if they have become fewer since.
    pub host_cores: u32,
    /// Since when it has left other pods too little room.
    pub too_large_since: Option<Moment>,
    /// Since when there has been room to grow into that host jobs did not cause.
    pub room_since: Option<Moment>,
}

/// What holds up a recovery: gangs that were there when it began, until they are asked for. Otherwise somebody who goes on making
/// pods, with the name of a node written in them, could keep all queues stopped.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct RecoveryMemory {
    /// The life of the broker that is recovered from.
    pub life: String,
    /// The gangs that were there.
    pub gangs: BTreeMap<GangId, Asked>,
    /// Those for which a job was refused.
    pub given_up: BTreeSet<GangId>,
    /// Those whose job was spoiled: Flux was giving it resources.
    pub spoiled: BTreeSet<GangId>,
    /// The ranks for which a shadow job was refused.
    pub given_up_ranks: BTreeSet<Rank>,
}

/// What a recovery has asked Flux for.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Asked {
    /// uids of the gang's pods when it was asked for last.
    pub pods: Vec<String>,
    /// How often it was asked for with other pods than before.
    pub times: u32,
}
