mod bounds;

pub use bounds::MOST_DECLARED;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use serde::{Deserialize, Serialize};

use super::{Declared, Resources, numbers};

/// The format in which this version begins an epoch; an agent that is older than the roster does nothing and says so. An epoch
/// keeps the format that it began with, because the format also says under which names Flux knows the members: see
/// [`Roster::declares_nodes`].
pub const ROSTER_FORMAT: u32 = 2;
/// The first format whose epochs declare members under their nodes' names.
const DECLARES_NODES: u32 = 2;

/// A broker rank, 0..maxSize-1.
pub type Rank = u32;

/// rank → member, broker name, resources. One object, one writer: the planner, by replace with resourceVersion.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Roster {
    /// At most [`ROSTER_FORMAT`].
    pub format: u32,
    /// uid of the FluxInstance.
    #[serde(rename = "instanceUID")]
    pub instance_uid: String,
    /// Names the Flux instance for its whole life; the lead's statedir holds it.
    #[serde(rename = "instanceID")]
    pub instance_id: String,
    /// The lead was online once: nothing of this roster may be thrown away any more.
    pub established: bool,
    /// Counts the coordinated starts.
    #[serde(deserialize_with = "numbers::epoch_or_revision")]
    pub epoch: u64,
    /// Counts every change of this object.
    #[serde(deserialize_with = "numbers::epoch_or_revision")]
    pub revision: u64,
    /// What Flux reads only at start, fixed within the epoch.
    pub settings: EpochSettings,
    /// The running epoch is to end: the lead's agent stops its broker, and then the next one begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closing: Option<Closing>,
    /// The settings of the epoch before, until this one's lead was online: what to go back to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<EpochSettings>,
    /// Settings of an epoch that did not come up: not tried again before the spec changes or an administrator asks for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Refused>,
    /// The last value of [`ANNOTATION_RESTART`](super::ANNOTATION_RESTART) that the planner acted on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<String>,
    /// Another lead took over in this epoch, or an empty queue began: what brokers of earlier ones still run is lost, and
    /// is not waited for.
    #[serde(default, rename = "jobsLostBefore", skip_serializing_if = "super::is_zero")]
    pub jobs_lost_before: u64,
    /// Which nodes have failed as the lead. Empty once one was online.
    #[serde(default, rename = "failedLeads", skip_serializing_if = "FailedLeads::is_empty")]
    pub failed_leads: FailedLeads,
    /// Ranks that have or had a member in this epoch. All others are spares.
    #[serde(deserialize_with = "bounds::ranks")]
    pub ranks: BTreeMap<Rank, RosterEntry>,
}

impl Roster {
    /// Parses a roster. Checks the format first: a roster in an unknown format may have another shape, so a failure to parse
    /// it does not mean that it is malformed.
    ///
    /// # Errors
    /// A newer version wrote it, or it is not a roster.
    pub fn parse(text: &str) -> Result<Self, RosterError> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let Format { format } = serde_json::from_str(text)?;
        if format > ROSTER_FORMAT {
            return Err(RosterError::Newer(format));
        }
        let roster: Self = serde_json::from_str(text)?;
        match roster.declared_ids() > MOST_DECLARED {
            true => Err(RosterError::TooLarge),
            false => Ok(roster),
        }
    }

    /// The resources that a rank without facts declares: those of `spec.spares.shape`, else the commonest resources among
    /// the members (the larger of two equally common ones, so that every planner gets the same result), else one core.
    pub fn spare_shape(&self) -> Declared {
        if let Some(shape) = self.settings.spare_shape {
            return shape.into();
        }
        let mut counts: BTreeMap<Declared, usize> = BTreeMap::new();
        // A node that invents cores must not make the roster too large by the spares.
        let most = MOST_DECLARED / u64::from(self.settings.max_size.max(1));
        let known = self.ranks.values().filter_map(|entry| entry.resources.clone());
        for declared in known.filter(|declared| declared.ids() <= most) {
            *counts.entry(Declared { excluded: false, ..declared }).or_default() += 1;
        }
        let commonest = counts.into_iter().max_by_key(|(declared, count)| (*count, declared.clone()));
        commonest.map_or(Declared { cores: 1, ..Declared::default() }, |(declared, _)| declared)
    }

    /// How many ids of cores and GPUs all ranks declare, spares among them: what broker.toml costs in memory.
    pub fn declared_ids(&self) -> u64 {
        let declared = self.ranks.values().map(RosterEntry::declared_ids).sum::<u64>();
        let max_size = self.settings.max_size;
        let known = self.ranks.range(..max_size).filter(|(_, entry)| entry.resources.is_some()).count();
        declared + u64::from(max_size).saturating_sub(known as u64) * self.spare_shape().ids()
    }

    /// Flux knows each member by its node's name, whatever its broker is called (see `model::names`). In an epoch that an older
    /// version began, Flux knows a member by the name of its broker: renaming it now would end its jobs, since Fluxion (0.54)
    /// finds a running job's resources by name when it is loaded again.
    pub fn declares_nodes(&self) -> bool {
        self.format >= DECLARES_NODES
    }

    /// The member that holds `rank`.
    pub fn member(&self, rank: Rank) -> Option<&Member> {
        self.ranks.get(&rank)?.member.as_ref()
    }

    /// The members by rank.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.ranks.values().filter_map(|entry| entry.member.as_ref())
    }

    /// The member with rank 0.
    pub fn lead(&self) -> Option<&Member> {
        self.member(0)
    }
}

/// Why a text can't be read as a roster.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RosterError {
    /// Its format is newer than this version knows.
    #[error("format {0}, which a newer flux-distribute made; this one knows {ROSTER_FORMAT}: finish the upgrade")]
    Newer(u32),
    /// It is not a roster.
    #[error("can't be read")]
    Malformed(#[from] serde_json::Error),
    /// See [`MOST_DECLARED`].
    #[error("its ranks, spares among them, declare more than {MOST_DECLARED} ids of cores and GPUs")]
    TooLarge,
}

/// What Flux reads only at start. A difference to what the spec now asks for never restarts a broker: it is
/// `RestartPending` until the next epoch.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EpochSettings {
    /// Declared ranks.
    #[serde(deserialize_with = "bounds::max_size")]
    pub max_size: u32,
    /// `tbon.topo`.
    pub topology: String,
    /// TCP port of the TBON.
    pub port: u16,
    /// Digest of the package set.
    pub digest: String,
    /// sha256 over the certificate's public key, hex.
    pub certificate: String,
    /// Owner of the brokers.
    pub run_as: String,
    /// Extra tables of broker.toml, TOML text.
    #[serde(deserialize_with = "bounds::config")]
    pub config: String,
    /// systemd's CPUWeight, 1..10000.
    pub cpu_weight: u32,
    /// `[kvs] checkpoint-period`.
    pub checkpoint_period: String,
    /// What a spare declares, if the spec sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spare_shape: Option<Resources>,
    /// Pods get their nodes from Flux (`spec.pods.enabled`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pods: bool,
    /// Nodes declare only cores that a pod can have as a whole. As `pods`, but false in an epoch that an older version began: it
    /// declared all cores, and to declare fewer would drain every node.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_whole_cores: bool,
}

/// How an epoch ends.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// Once no job runs.
    WhenIdle,
    /// Even if jobs run: an administrator asked for it, or the deadline has passed.
    AtOnce,
}

/// Settings that no lead came online with.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Refused {
    /// The settings.
    pub settings: EpochSettings,
    /// What the lead's log says.
    pub reason: String,
}

/// Nodes that were to lead an instance which was never online, and on which no broker came up. Each counts as failed until
/// something changes.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FailedLeads {
    /// metadata.generation of the FluxInstance under which they failed: another spec may be the cure.
    pub generation: i64,
    /// The first message of a broker, or of a host that refused to start it: later failures may have another reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<FirstFailure>,
    /// By the Node's uid.
    pub nodes: BTreeMap<String, FailedLead>,
}

impl FailedLeads {
    /// True if no node has failed.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// How often the Node with `uid` has failed.
    pub fn times(&self, uid: &str) -> u32 {
        self.nodes.get(uid).map_or(0, |failed| failed.times)
    }

    /// How often all of them together have failed.
    pub fn all_times(&self) -> u32 {
        self.nodes.values().fold(0, |sum, failed| sum.saturating_add(failed.times))
    }
}

/// The first failure of a lead.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FirstFailure {
    /// The Node's name.
    pub node: String,
    /// The message of its broker or its agent.
    pub reason: String,
}

/// A node that has failed as the lead.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FailedLead {
    /// How often.
    pub times: u32,
    /// When it failed last, seconds since the Unix epoch.
    pub at: i64,
    /// `instanceID` of the roster in which it failed last.
    #[serde(rename = "instanceID")]
    pub instance_id: String,
    /// sha256 over the node's properties at that time: a node that has changed since does not count as failed.
    pub facts: String,
}

/// One rank.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct RosterEntry {
    /// The broker's `hostname` attribute, fixed within the epoch: the node's name, or `flux-spare-<rank>`.
    pub broker_name: String,
    /// Node UID that a real-named rank waits for; anyone else gets a spare.
    #[serde(default, rename = "reservedFor", skip_serializing_if = "Option::is_none")]
    pub reserved_for: Option<String>,
    /// The member that holds the rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<Member>,
    /// What the rank declares. Missing facts never reduce it; it is reduced only while no job can hold any of it,
    /// and it outlives its member. None if it is not known yet: then the rank declares what a spare does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Declared>,
    /// Since when the member's host has had fewer cores or GPUs than that, seconds since the Unix epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lacks_since: Option<i64>,
    /// kubelet's CPU manager on the member's host has policy `static`.
    #[serde(default, rename = "staticCPUs", skip_serializing_if = "std::ops::Not::not")]
    pub static_cpus: bool,
    /// Properties of the member (RFC 20): the chosen labels of its Node, and its architecture among others.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub properties: BTreeSet<String>,
    /// The member's Node is a property of its rank: it was one in an epoch of an older version, and jobs that have been waiting
    /// since then may require it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_node_property: bool,
    /// The member gets no new jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<Draining>,
    /// The roster's revision at which this entry changed last.
    pub revision: u64,
}

impl RosterEntry {
    /// The rank is declared, and no job may have any of it.
    pub fn is_excluded(&self) -> bool {
        self.resources.as_ref().is_some_and(|declared| declared.excluded)
    }

    /// How many ids of cores and GPUs it holds, those that are left out counted again: what it costs in memory.
    pub fn declared_ids(&self) -> u64 {
        self.resources.as_ref().map_or(0, Declared::ids)
    }

    /// Removes the member and what belongs to it; what the rank declares stays.
    pub fn vacate(&mut self) {
        (self.member, self.drain, self.has_node_property) = (None, None, false);
        (self.lacks_since, self.static_cpus) = (None, false);
        self.properties.clear();
    }
}

/// A member that gets no new jobs.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Draining {
    /// The reason, for people; Flux shows it behind `flux-distribute: `.
    pub reason: String,
    /// True if the member is stopped once it is idle and loses its rank.
    pub leave: bool,
    /// Since when, in seconds since the Unix epoch.
    pub since: i64,
}

impl Draining {
    /// The drain as if it began at `now`, so that a member that leaves gets its full time again.
    pub fn anew(self, now: i64) -> Self {
        Self { since: now, ..self }
    }
}

/// A member of the instance: the Node that holds a rank.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Member {
    /// The Node's name.
    pub node: String,
    /// The Node's uid: a node replaced under the same name is another member.
    pub uid: String,
    /// The Node's InternalIP.
    pub address: IpAddr,
    /// When the Node object was first seen to be gone, seconds since the Unix epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gone_since: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_format_is_told_as_such_whatever_else_is_in_it() {
        let newer = format!(r#"{{"format": {}, "ranks": "all of them"}}"#, ROSTER_FORMAT + 1);
        assert!(matches!(Roster::parse(&newer), Err(RosterError::Newer(format)) if format == ROSTER_FORMAT + 1));
        for text in ["", "{}", "[1]", r#"{"format": "1"}"#, &format!(r#"{{"format": {ROSTER_FORMAT}}}"#)] {
            assert!(matches!(Roster::parse(text), Err(RosterError::Malformed(_))), "{text}");
        }
    }
}
