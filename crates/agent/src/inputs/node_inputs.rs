//! What one round observed of this node.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    applied::Applied,
    assignment::{Assignment, agreed},
    broker_log::Rejected,
    broker_state::BrokerState,
    watched_objects::{Wish, own_spec},
};
use api::{FluxInstanceSpec, FluxNode, FluxNodeSpec, IdSet, PodCounts, Roster, Uninstall};
use hostapi::{HostView, Preflight};

/// What is known of the FluxInstance. Only positive answers are evidence that it is over: no answer, 401, 403, 429, 5xx, or a
/// 404 that isn't the API server's own leave everything as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instance {
    /// The API server has not answered yet.
    Unknown,
    /// It exists.
    Here {
        /// metadata.uid
        uid: String,
    },
    /// It has a deletionTimestamp, was DELETED, is answered by a 404 that names it, or its Namespace is being deleted.
    Over,
}

/// Everything that one round observed on and about this node.
#[derive(Debug, Clone)]
pub struct NodeInputs {
    /// When the round began.
    pub at: Instant,
    /// The same as this host's clock shows it, in seconds since 1970.
    pub unix_time: f64,
    /// How long this agent has been running.
    pub agent_age: Duration,
    /// Our Node's name.
    pub node: String,
    /// Our Node's metadata.uid; None if it could not be read yet.
    pub node_uid: Option<String>,
    /// The FluxNode of our name describes another machine, see [`names_another_machine`](super::local_roster::names_another_machine).
    pub is_replaced: bool,
    /// The FluxInstance.
    pub instance: Instance,
    /// True if there certainly is no FluxInstance and none is about to be created, so that nothing is wanted of this node.
    pub nothing_wanted: bool,
    /// The FluxInstance's spec as it was last read; the default one before that.
    pub spec: FluxInstanceSpec,
    /// metadata.generation of that spec.
    pub generation: i64,
    /// How the instance that claimed this host is to end: as its FluxInstance said last, else as this host remembers it.
    pub uninstall: Uninstall,
    /// Our FluxNode: what the planner wants of this node, and the status that this agent wrote last.
    pub flux_node: Option<FluxNode>,
    /// What an installation depends on.
    pub wish: Wish,
    /// The newest roster that this version could read: at least as new as our FluxNode's spec, unless `newer_roster` is set.
    pub roster: Option<Arc<Roster>>,
    /// Why this version can't read the published roster.
    pub newer_roster: Option<String>,
    /// The API server has no roster any more.
    pub roster_is_gone: bool,
    /// Digests of the published package sets, first of the one that the spec asks for. Empty if there is none, or they were not read yet.
    pub published: Vec<String>,
    /// Another round has to read something again: it could not be read, the certificate is gone, or this process was suspended and the API server
    /// has not confirmed since what it said before.
    pub is_behind: bool,
    /// This agent could not read yet which package sets are published, and has tried for less than a minute.
    pub packages_expected: bool,
    /// Digests of the published package sets whose archives are on this host.
    pub held_archives: Vec<String>,
    /// The host.
    pub host: HostView,
    /// The roster that this host was configured by last, if it belongs to the instance that claimed the host.
    pub local_roster: Option<Arc<Roster>>,
    /// What preflight found, once it has passed.
    pub preflight: Option<Preflight>,
    /// Lead only: the roster's revision that the running broker has loaded.
    pub applied: Option<Applied>,
    /// What the broker says over its socket.
    pub broker: BrokerState,
    /// Brokers that the lead's broker refused, and why.
    pub rejected: Rejected,
    /// Why the broker does not come up, if another node's agent reports it.
    pub refusal: Option<String>,
    /// Where this node serves archives to others.
    pub peer: Option<String>,
    /// Why the agent can't bind ports of its own, for people.
    pub port_problems: Vec<String>,
    /// Installed files that are damaged or were repaired, for people.
    pub damage: Option<String>,
    /// Lead only: what the bridge between pods and jobs counts, if it runs.
    pub pods: Option<PodCounts>,
    /// Lead only: the ranks where host jobs have cores that pods use. None: not known.
    pub overlapping_on: Option<IdSet>,
}

impl NodeInputs {
    /// What the planner wants of this node. None if somebody edited the FluxNode so that its spec names another node.
    pub fn own_spec(&self) -> Option<&FluxNodeSpec> {
        self.flux_node.as_ref().and_then(own_spec)
    }

    /// What the planner wants of this node in the FluxInstance of this uid; None if it has not said that yet.
    pub fn spec_for(&self, instance_uid: &str) -> Option<&FluxNodeSpec> {
        self.own_spec().filter(|spec| spec.instance_uid.as_deref() == Some(instance_uid))
    }

    /// The rank that FluxNode and roster both give to this node.
    pub fn assignment(&self) -> Option<Assignment> {
        agreed(self.own_spec()?, self.roster.as_ref()?)
    }

    /// Digest of the package set that the spec asks for.
    pub fn wanted_digest(&self) -> Option<&str> {
        self.published.first().map(String::as_str)
    }

    /// The nodes that the planner names as sources of package set `digest`.
    pub fn peers_for(&self, digest: &str) -> Vec<String> {
        let source = self.own_spec().and_then(|spec| spec.fetch_from.as_ref());
        source.filter(|source| source.digest == digest).map(|source| source.peers.clone()).unwrap_or_default()
    }

    /// The broker that runs on this host says that it is in state `run`. One that is cut off says so for minutes.
    pub fn is_online(&self) -> bool {
        self.broker.is_online(&self.host)
    }

    /// The broker of this host is the lead's, and runs.
    pub fn runs_lead(&self) -> bool {
        self.host.broker.as_ref().is_some_and(|broker| broker.record.rank == 0)
    }
}
