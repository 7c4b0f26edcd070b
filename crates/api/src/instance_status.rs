use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::{JsonSchema, transform::RecursiveTransform};
use serde::{Deserialize, Serialize};

use super::Dump;

/// Where the instance as a whole stands.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub enum InstancePhase {
    /// No node is eligible yet, or packages or certificate are not there yet.
    #[default]
    Pending,
    /// The first brokers are being installed and started. The lead may be online already and run jobs.
    Starting,
    /// The lead is online, and all nodes were, or one of them is stuck.
    Running,
    /// Between two epochs: the old one is being stopped, or the new one is being started.
    Restarting,
    /// The lead was online and is not.
    Degraded,
    /// The spec cannot be served; the message says why.
    Failed,
    /// Another FluxInstance than `flux`.
    Ignored,
    /// Another version's word, kept as it was read: this version only knows that it is none of the above.
    #[serde(untagged)]
    Other(String),
}

/// Longest text of the status that a planner keeps from the status before, in characters: as long as the name of an object may be. Whoever
/// has an agent's token could otherwise fill the status until nobody can write it.
pub const LONGEST_KEPT: u64 = 253;

/// A dump, and where it is.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeptDump {
    /// The node that has it.
    #[schemars(length(max = LONGEST_KEPT))]
    pub node: String,
    /// The dump.
    #[serde(flatten)]
    pub dump: Dump,
}

/// Type in [`FluxInstanceStatus::conditions`]: a coordinated restart would apply what differs from the spec.
pub const CONDITION_RESTART_PENDING: &str = "RestartPending";
/// More nodes are asked for than the running epoch has ranks.
pub const CONDITION_SCALE_DENIED: &str = "ScaleDenied";
/// The running instance does not apply a part of the spec.
pub const CONDITION_NOT_APPLIED: &str = "NotApplied";
/// Members have no agent.
pub const CONDITION_AGENTS_MISSING: &str = "AgentsMissing";
/// The planner can't read or write some FluxNodes.
pub const CONDITION_FLUX_NODES_UNUSABLE: &str = "FluxNodesUnusable";
/// The certificate's Secret is gone, and brokers may use what was in it.
pub const CONDITION_CERTIFICATE_MISSING: &str = "CertificateMissing";

/// State of the instance. The planner writes it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = RecursiveTransform(crate::times::only_utc))]
#[schemars(transform = RecursiveTransform(crate::numbers::within_type))]
pub struct FluxInstanceStatus {
    /// State of the instance as a whole: `Pending`, `Starting` until all nodes were online or one of them is stuck, `Running`,
    /// `Restarting`, `Degraded`, `Failed`, or `Ignored` for another name than `flux`.
    #[serde(default)]
    #[schemars(with = "String")]
    pub phase: InstancePhase,
    /// The most serious known problem, in one CamelCase word: the reason of the condition that tells of it, or a word of its own such as
    /// `NodesNotOnline` or `PodsWait`; `AsExpected` if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The most serious known problem, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Identity of the Flux instance. Set once the lead was online; from then on the roster is never thrown away.
    #[serde(default, rename = "instanceID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = LONGEST_KEPT))]
    pub instance_id: Option<String>,
    /// The user that owns the brokers. Set once the lead was online; from then on no change of `spec.broker.runAs` takes effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = LONGEST_KEPT))]
    pub run_as: Option<String>,
    /// The current epoch; counts the coordinated starts.
    #[serde(default)]
    pub epoch: u64,
    /// The roster's revision; counts its changes.
    #[serde(default)]
    pub revision: u64,
    /// Name of the node with rank 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = LONGEST_KEPT))]
    pub lead: Option<String>,
    /// Number of members.
    #[serde(default)]
    pub size: u32,
    /// Number of members whose broker is online.
    #[serde(default)]
    pub online: u32,
    /// Number of ranks that the running epoch declares.
    #[serde(default)]
    pub max_size: u32,
    /// How many more nodes the largest of the jobs needs that wait for nodes which are down: the signal to add some. Unset:
    /// not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_nodes: Option<u32>,
    /// Pods through Flux; unset while `spec.pods.enabled` is not in effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pods: Option<PodCounts>,
    /// Digest of the package set of the running epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = LONGEST_KEPT))]
    pub digest: Option<String>,
    /// The newest dump of the queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump: Option<KeptDump>,
    /// The `metadata.generation` of the spec that this status describes.
    #[serde(default)]
    pub observed_generation: i64,
    /// `Ready`, `Progressing`, `Degraded`, `RestartPending` (the next coordinated restart brings what differs from the
    /// spec), `ScaleDenied` (more nodes are asked for than the epoch has ranks), `NotApplied` (the running instance does not
    /// carry out a part of the spec), `AgentsMissing` (members have no agent), `FluxNodesUnusable` (the planner can't read or
    /// write a FluxNode), `CertificateMissing` (Secret `flux-curve` is gone), `Ignored` (another name than `flux`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// Numbers of gangs, pods and cores, and what keeps Flux from scheduling pods. A pod by itself is a gang of one.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodCounts {
    /// Gangs that run; a single pod counts as one.
    #[serde(default)]
    pub running: u32,
    /// Gangs that wait in Flux's queue; a single pod counts as one.
    #[serde(default)]
    pub queued: u32,
    /// Gangs that can't wait in the queue as they are; the condition `PodScheduled` of their pods says why.
    #[serde(default)]
    pub refused: u32,
    /// Pods that run on cores which no job holds: Flux may give these to another job.
    #[serde(default)]
    pub uncovered: u32,
    /// Cores that pods of other schedulers use (see `spec.pods.tolerance`), or will use once kubelet has resized them.
    #[serde(default)]
    pub other_pods_cores: u32,
    /// Cores that pods of other schedulers use and another job has: they are used twice until one of them ends.
    #[serde(default)]
    pub overlapping_cores: u32,
    /// How often host jobs and pods of other schedulers have had cores of a node in common for at least two seconds, since the lead's agent
    /// or its broker was started last.
    #[serde(default)]
    pub overlaps: u32,
    /// How long the longest of `overlaps` has lasted, in seconds.
    #[serde(default)]
    pub longest_overlap_seconds: u32,
    /// Why the API server has refused, within the past minute, to make, resize or delete a placeholder pod (namespace `flux-host-jobs`). Until
    /// that works, other schedulers don't know what host jobs use of that node. Unset: it has refused nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placeholder_refused: Option<String>,
    /// What has kept Flux from scheduling pods for at least ten seconds. Unset: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

impl FluxInstanceStatus {
    /// The condition of that type, if it is true.
    pub fn holding(&self, type_: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.type_ == type_ && condition.status == "True")
    }
}
