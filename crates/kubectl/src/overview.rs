//! The instance and its nodes as a person wants to see them. Pure.

use kube::ResourceExt;
use serde::Serialize;

use crate::observed::Observed;
use api::{
    Account, FluxInstanceStatus, FluxNode, FluxNodeStatus, InstancePhase, JobCounts, NodePhase, PodCounts, Rank,
};
use model::conditions::needs_action;

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

/// Whether somebody has to do something. Each command shows it in its own way.
#[derive(Serialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Attention {
    /// As it is wanted.
    Nothing,
    /// Not as it is wanted; it may pass by itself, or matters little.
    Look,
    /// Somebody has to do something.
    Act,
}

/// The instance as a whole.
#[derive(Serialize, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Instance {
    pub phase: InstancePhase,
    pub attention: Attention,
    pub message: Option<String>,
    /// The node of rank 0.
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
    pub attention: Attention,
    pub message: String,
}

/// One node.
#[derive(Serialize, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Node {
    pub name: String,
    pub rank: Option<Rank>,
    pub phase: NodePhase,
    pub state: ResourceState,
    pub attention: Attention,
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
pub(crate) enum ResourceState {
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
    /// The lead's broker doesn't answer, so it is not known.
    Unknown,
    /// It has no rank.
    #[serde(rename = "none")]
    NoRank,
}

impl ResourceState {
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
fn state(rank: Option<Rank>, lead: Option<&FluxNodeStatus>) -> ResourceState {
    let Some(rank) = rank else { return ResourceState::NoRank };
    // A lead whose broker does not answer knows nothing of the others.
    let Some((lead, allocated)) = lead.and_then(|lead| Some((lead, lead.allocated.as_ref()?))) else {
        return ResourceState::Unknown;
    };
    let by_us = lead.drained.as_ref().is_some_and(|drained| drained.contains(rank));
    let is_drained = by_us || lead.drained_by_others.contains(rank);
    match (lead.offline.contains(&rank), is_drained, allocated.contains(rank)) {
        (true, _, _) => ResourceState::Down,
        (false, true, true) => ResourceState::Draining,
        (false, true, false) => ResourceState::Drained,
        (false, false, true) => ResourceState::Allocated,
        (false, false, false) => ResourceState::Free,
    }
}

/// The FluxNode of the lead, which is the node of rank 0; None if no node leads yet.
pub(crate) fn lead_of(observed: &Observed) -> Option<&FluxNode> {
    observed.nodes.iter().find(|node| node.spec.rank == Some(0))
}

/// Whether somebody has to do something about an instance in that phase.
fn attention_of_instance(phase: &InstancePhase) -> Attention {
    match phase {
        InstancePhase::Running => Attention::Nothing,
        InstancePhase::Degraded | InstancePhase::Failed | InstancePhase::Ignored => Attention::Act,
        InstancePhase::Pending | InstancePhase::Starting | InstancePhase::Restarting | InstancePhase::Other(_) => {
            Attention::Look
        }
    }
}

/// Whether somebody has to do something about a node. Its agent may say so in its status (`is_stuck`), and the planner or the agent
/// what the node waits for (`says_why`).
fn attention_of_node(phase: &NodePhase, state: ResourceState, is_stuck: bool, says_why: bool) -> Attention {
    match (phase, state) {
        _ if is_stuck => Attention::Act,
        (NodePhase::Failed | NodePhase::Offline, _) | (_, ResourceState::Down) => Attention::Act,
        (NodePhase::Online, ResourceState::Free | ResourceState::Allocated) => Attention::Nothing,
        // It is not to run a broker, or not yet.
        (_, ResourceState::NoRank) if !says_why => Attention::Nothing,
        _ => Attention::Look,
    }
}

/// What was observed, as a person wants to see it.
pub(crate) fn overview(observed: &Observed) -> Overview {
    let default = FluxInstanceStatus::default();
    let status = observed.instance.status.as_ref().unwrap_or(&default);
    let lead_node = lead_of(observed);
    let lead = lead_node.and_then(|lead| lead.status.as_ref());
    let mut nodes: Vec<Node> = observed.nodes.iter().map(|found| node(found, lead)).collect();
    nodes.sort_by(|a, b| (a.rank.is_none(), a.rank, &a.name).cmp(&(b.rank.is_none(), b.rank, &b.name)));
    let message = status.message.as_deref().unwrap_or_default();
    // What the status's own message says needs no line of its own.
    let (told, notices): (Vec<_>, Vec<_>) =
        notices(status, lead).into_iter().partition(|notice| message.contains(&notice.message));
    let attention = told.iter().map(|notice| notice.attention).chain([attention_of_instance(&status.phase)]).max();
    let instance = Instance {
        phase: status.phase.clone(),
        attention: attention.unwrap_or(Attention::Nothing),
        message: status.message.clone(),
        lead: lead_node.map(ResourceExt::name_any),
        epoch: status.epoch,
        flux_version: lead.and_then(|lead| lead.flux_version.clone()),
        size: status.size,
        online: status.online,
        max_size: status.max_size,
        jobs: lead.and_then(|lead| lead.jobs),
        pods: status.pods.clone(),
        notices,
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
    let state = state(spec.rank, lead);
    let attention = attention_of_node(&status.phase, state, status.needs_attention, !message.is_empty());
    Node {
        name: node.name_any(),
        rank: spec.rank,
        state,
        attention,
        phase: status.phase,
        cores: resources.map(|resources| resources.cores),
        gpus: resources.map(|resources| resources.gpus),
        message: (!message.is_empty()).then(|| message.join("; ")),
        account: status.account,
        flux_version: status.flux_version,
        digest: status.digest,
    }
}

/// What holds.
fn notices(status: &FluxInstanceStatus, lead: Option<&FluxNodeStatus>) -> Vec<Notice> {
    // The message of these two is the status's.
    let usual = ["Ready", "Progressing"];
    let holding = status.conditions.iter().filter(|condition| condition.status == "True");
    let news = holding.filter(|condition| !usual.contains(&condition.type_.as_str()));
    let conditions = news.map(|condition| {
        let attention = if needs_action(condition) { Attention::Act } else { Attention::Look };
        (condition.type_.as_str(), attention, Some(condition.message.clone()))
    });
    let pods = status.pods.as_ref();
    let others = [
        ("queues", Attention::Act, lead.and_then(|lead| lead.stopped_queues.clone())),
        ("held back", Attention::Look, lead.and_then(|lead| lead.held_back_job.clone())),
        ("pods wait", Attention::Look, pods.and_then(|pods| pods.waits_for.clone())),
        ("host jobs", Attention::Act, pods.and_then(|pods| pods.placeholder_refused.clone())),
    ];
    let said = conditions.chain(others).filter_map(|(subject, attention, message)| {
        let message = message.filter(|message| !message.is_empty())?;
        Some(Notice { subject: subject.to_owned(), attention, message })
    });
    said.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        Attention::{Act, Look, Nothing},
        *,
    };

    #[test]
    fn an_instance_needs_somebody_in_some_phases() {
        for (phase, expected) in [
            (InstancePhase::Running, Nothing),
            (InstancePhase::Pending, Look),
            (InstancePhase::Starting, Look),
            (InstancePhase::Restarting, Look),
            (InstancePhase::Other("Dreaming".into()), Look),
            (InstancePhase::Degraded, Act),
            (InstancePhase::Failed, Act),
            (InstancePhase::Ignored, Act),
        ] {
            assert_eq!(attention_of_instance(&phase), expected, "{phase:?}");
        }
    }

    #[test]
    fn a_node_needs_somebody_if_its_agent_says_so_or_its_broker_is_gone() {
        use NodePhase::{Failed, Installing, Offline, Online, Waiting};
        use ResourceState::{Allocated, Down, Drained, Draining, Free, NoRank, Unknown};
        for (phase, state, is_stuck, says_why, expected) in [
            (Online, Free, false, false, Nothing),
            (Online, Allocated, false, true, Nothing),
            (Online, Free, true, true, Act),
            (Online, Drained, false, true, Look),
            (Online, Draining, false, true, Look),
            (Online, Unknown, false, false, Look),
            (Online, Down, false, false, Act),
            (Offline, Down, false, false, Act),
            (Failed, NoRank, false, true, Act),
            (Installing, Free, false, true, Look),
            (Waiting, NoRank, false, false, Nothing),
            (Waiting, NoRank, false, true, Look),
            (Waiting, NoRank, true, true, Act),
        ] {
            assert_eq!(attention_of_node(&phase, state, is_stuck, says_why), expected, "{phase:?} {state:?}");
        }
    }

    #[test]
    fn an_instance_that_runs_needs_somebody_if_its_message_says_so() {
        for (type_, reason, expected) in [("AgentsMissing", "AgentNotRunning", Act), ("RestartPending", "Waits", Look)]
        {
            let condition = json!({"type": type_, "status": "True", "reason": reason, "message": "so it is", "lastTransitionTime": "2026-01-01T00:00:00Z"});
            let status = json!({"message": "n2: so it is", "conditions": [condition]});
            let instance = overview(&crate::fixture::observed(1, &status, &json!({}))).instance;
            assert_eq!((instance.attention, instance.notices), (expected, vec![]), "{type_}");
        }
    }

    #[test]
    fn a_notice_says_whether_somebody_has_to_act() {
        let condition = |type_: &str, reason: &str| json!({"type": type_, "status": "True", "reason": reason, "message": type_, "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let of = |status: serde_json::Value, lead: serde_json::Value| {
            let found = overview(&crate::fixture::observed(1, &status, &lead)).instance.notices;
            found.into_iter().map(|notice| (notice.subject, notice.attention)).collect::<Vec<_>>()
        };
        for (type_, reason, expected) in [
            ("Degraded", "LeadNotOnline", Act),
            ("CertificateMissing", "SecretGone", Act),
            ("RestartPending", "Waits", Look),
            ("RestartPending", "TakenBack", Act),
            ("Unheard", "Of", Look),
        ] {
            let found = of(json!({"conditions": [condition(type_, reason)]}), json!({}));
            assert_eq!(found, [(type_.to_owned(), expected)], "{reason}");
        }
        let pods = json!({"running": 0, "queued": 0, "refused": 0, "waitsFor": "no room", "placeholderRefused": "by a policy"});
        let found = of(json!({"pods": pods}), json!({"stoppedQueues": "by X", "heldBackJob": "job 3"}));
        let expected = [("queues", Act), ("held back", Look), ("pods wait", Look), ("host jobs", Act)];
        assert_eq!(found, expected.map(|(subject, attention)| (subject.to_owned(), attention)));
    }
}
