//! What the bridge remembers from one round to the next. It may be lost: then something is tried, or told, once more.

use std::collections::{BTreeMap, BTreeSet};

use api::Rank;

use crate::{action::Reason, record::GangId, time::Millis};

/// See the module.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Memory {
    /// Ranks on which the pods of a gang did not fit when it had been given resources there.
    pub(super) avoided: BTreeMap<GangId, BTreeSet<Rank>>,
    /// Since when a gang has run in part.
    pub(super) incomplete: BTreeMap<GangId, Millis>,
    /// What the bridge said about each pod, and when, by uid.
    pub(super) told: BTreeMap<String, BTreeMap<Reason, (String, Millis)>>,
    pub(super) given_up: GivenUp,
}

/// The gangs that hold up a recovery no longer, because a job was refused for them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct GivenUp {
    /// The life of the broker that is recovered from.
    pub life: String,
    pub gangs: BTreeSet<GangId>,
}
