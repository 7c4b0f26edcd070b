//! The instance and its nodes as a person wants to see them. Pure.

use serde::Serialize;

use crate::observed::Observed;
use api::{
    Account, FluxInstanceStatus, FluxNode, FluxNodeStatus, InstancePhase, JobCounts, NodePhase, PodCounts, Rank,
};
use kube::ResourceExt;

/// What there is to see.
#[derive(Serialize, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Overview {
    pub instance: Instance,
    /// By rank; then those without a rank, by name.
    pub nodes: Vec<Node>,
    /// FluxNodes that this version can't read, by name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<String>,
}

/// The instance as a whole.
#[derive(Serialize, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Instance {
    pub phase: InstancePhase,
    pub message: Option<String>,
    pub lead: Option<String>,
    pub epoch: u64,
    pub flux_version: Option<String>,
    pub size: u32,
    pub online: u32,
    pub max_size: u32,
    /// None: not known.
    pub jobs: Option<JobCounts>,
    /// None: pods through Flux are off.
    pub pods: Option<PodCounts>,
    /// What needs attention, each with its remedy.
    pub notices: Vec<Notice>,
}

/// Something that somebody should know.
#[derive(Serialize, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    /// The type of the condition, or the subject.
    pub subject: String,
    pub message: String,
}

/// One node.
#[derive(Serialize, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Node {
    pub name: String,
    pub rank: Option<Rank>,
    pub phase: NodePhase,
    pub state: State,
    pub needs_attention: bool,
    /// None: preflight has not passed.
    pub cores: Option<u32>,
    pub gpus: Option<u32>,
    /// What the node does, waits for, or lacks; and why it gets no jobs.
    pub message: Option<String>,
    pub account: Option<Account>,
    pub flux_version: Option<String>,
    /// The package set's digest.
    pub digest: Option<String>,
}

/// What Flux does with a node, in the words of flux-resource(1).
#[derive(Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub(crate) enum State {
    /// No job has any of it.
    Free,
    /// A job has some of it.
    Allocated,
    /// It gets no new jobs, and a job still has some of it.
    Draining,
    /// It gets no new jobs, and has none.
    Drained,
    /// Its broker is not in the overlay.
    Down,
    /// The lead does not say.
    Unknown,
    /// It has no rank.
    #[serde(rename = "none")]
    NoRank,
}

impl State {
    /// In a table.
    pub fn word(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Allocated => "allocated",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::Down => "down",
            Self::Unknown => "unknown",
            Self::NoRank => "-",
        }
    }
}

/// What Flux does with the node of that rank, as the lead's agent last reported.
fn state(rank: Option<Rank>, lead: Option<&FluxNodeStatus>) -> State {
    let Some(rank) = rank else { return State::NoRank };
    // A lead whose broker does not answer knows nothing of the others.
    let Some((lead, allocated)) = lead.and_then(|lead| Some((lead, lead.allocated.as_ref()?))) else {
        return State::Unknown;
    };
    let by_us = lead.drained.as_ref().is_some_and(|drained| drained.contains(rank));
    let is_drained = by_us || lead.drained_by_others.contains(rank);
    match (lead.offline.contains(&rank), is_drained, allocated.contains(rank)) {
        (true, _, _) => State::Down,
        (false, true, true) => State::Draining,
        (false, true, false) => State::Drained,
        (false, false, true) => State::Allocated,
        (false, false, false) => State::Free,
    }
}

/// The FluxNode of the lead, once there is one.
pub(crate) fn lead_of(observed: &Observed) -> Option<&FluxNode> {
    observed.nodes.iter().find(|node| node.spec.rank == Some(0))
}

/// What was observed, as a person wants to see it.
pub(crate) fn overview(observed: &Observed) -> Overview {
    let default = FluxInstanceStatus::default();
    let status = observed.instance.status.as_ref().unwrap_or(&default);
    let lead = lead_of(observed).and_then(|lead| lead.status.as_ref());
    let mut nodes: Vec<Node> = observed.nodes.iter().map(|found| node(found, lead)).collect();
    nodes.sort_by(|a, b| (a.rank.is_none(), a.rank, &a.name).cmp(&(b.rank.is_none(), b.rank, &b.name)));
    let instance = Instance {
        phase: status.phase.clone(),
        message: status.message.clone(),
        lead: status.lead.clone(),
        epoch: status.epoch,
        flux_version: lead.and_then(|lead| lead.flux_version.clone()),
        size: status.size,
        online: status.online,
        max_size: status.max_size,
        jobs: lead.and_then(|lead| lead.jobs),
        pods: status.pods.clone(),
        notices: notices(status, lead),
    };
    Overview { instance, nodes, unreadable: observed.unreadable.clone() }
}

fn node(node: &FluxNode, lead: Option<&FluxNodeStatus>) -> Node {
    let (spec, status) = (&node.spec, node.status.clone().unwrap_or_default());
    let slow = spec.rank.filter(|rank| lead.is_some_and(|lead| lead.torpid.contains(*rank)));
    let mut message: Vec<String> = Vec::new();
    let slow = slow.map(|_| "its broker is slow to answer".to_owned());
    for said in [&spec.drain_reason, &spec.reason, &status.message, &slow].into_iter().flatten() {
        if !message.iter().any(|before| before.contains(said.as_str())) {
            message.push(said.clone());
        }
    }
    let resources = status.facts.map(|facts| facts.resources);
    Node {
        name: node.name_any(),
        rank: spec.rank,
        state: state(spec.rank, lead),
        phase: status.phase,
        needs_attention: status.needs_attention,
        cores: resources.map(|resources| resources.cores),
        gpus: resources.map(|resources| resources.gpus),
        message: (!message.is_empty()).then(|| message.join("; ")),
        account: status.account,
        flux_version: status.flux_version,
        digest: status.digest,
    }
}

/// What holds and says more than the status's own message does.
fn notices(status: &FluxInstanceStatus, lead: Option<&FluxNodeStatus>) -> Vec<Notice> {
    let message = status.message.as_deref().unwrap_or_default();
    // The message of these two is the status's.
    let usual = ["Ready", "Progressing"];
    let holding = status.conditions.iter().filter(|condition| condition.status == "True");
    let news = holding.filter(|condition| !usual.contains(&condition.type_.as_str()));
    let conditions = news.map(|condition| (condition.type_.as_str(), Some(condition.message.clone())));
    let pods = status.pods.as_ref();
    let others = [
        ("queues", lead.and_then(|lead| lead.stopped_queues.clone())),
        ("held back", lead.and_then(|lead| lead.held_back_job.clone())),
        ("pods wait", pods.and_then(|pods| pods.waits_for.clone())),
        ("host jobs", pods.and_then(|pods| pods.placeholder_refused.clone())),
    ];
    let said = conditions.chain(others).filter_map(|(subject, message)| {
        let message = message.filter(|message| !message.is_empty())?;
        Some(Notice { subject: subject.to_owned(), message })
    });
    said.filter(|notice| !message.contains(&notice.message)).collect()
}
