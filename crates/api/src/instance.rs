use k8s_openapi::{
    api::core::v1::Toleration,
    apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector},
};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Dump, Packages, Resources};
use crate::rules::{
    DURATION, EMPTY_SELECTOR, LESS_THAN_ONE, LONGEST_PREFIX, MORE_THAN_MAX_SIZE, PREFIX, PREFIX_CHARACTERS,
    PREFIX_RULE, SUBDOMAIN, TOPOLOGY, USER, selector_words, toleration_words,
};

/// In CEL. A field that is null is there, and is no number.
const SIZE_FITS: &str = "!has(self.size) || type(self.size) != int || !has(self.maxSize) || type(self.maxSize) != int || \
                         self.size <= self.maxSize";
/// In CEL. Fields that the schema doesn't know are gone by then: the API server prunes a plain map of labels to nothing.
const SELECTS: &str = "has(self.matchLabels) || has(self.matchExpressions)";
/// More ranks than that have never been tried.
const MOST_RANKS: u32 = 16384;

/// One Flux instance over the nodes of the Kubernetes cluster.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, KubeSchema)]
#[kube(
    group = "distribute.flux-framework.org",
    version = "v1alpha1",
    kind = "FluxInstance",
    plural = "fluxinstances",
    shortname = "fxi",
    namespaced,
    status = "FluxInstanceStatus",
    derive = "PartialEq",
    doc = "One Flux instance over the nodes of the Kubernetes cluster.",
    scale(spec_replicas_path = ".spec.size", status_replicas_path = ".status.size"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Online", type_ = "integer", json_path = ".status.online"),
    printcolumn(name = "Size", type_ = "integer", json_path = ".status.size"),
    printcolumn(name = "Max", type_ = "integer", json_path = ".status.maxSize"),
    printcolumn(name = "Lead", type_ = "string", json_path = ".status.lead"),
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".status.epoch"),
    printcolumn(name = "Pending", type_ = "integer", json_path = ".status.pendingNodes", priority = 1),
    printcolumn(name = "Dump", type_ = "date", json_path = ".status.dump.time", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message")
)]
#[x_kube(validation = Rule::new(SIZE_FITS).message(MORE_THAN_MAX_SIZE).field_path(".size"))]
#[serde(rename_all = "camelCase")]
pub struct FluxInstanceSpec {
    /// Where the packages come from.
    #[serde(default)]
    pub packages: Packages,
    /// Which nodes take part.
    #[serde(default)]
    pub nodes: Nodes,
    /// How many members the instance has. Default: every eligible node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MOST_RANKS))]
    #[x_kube(validation = Rule::new("self >= 1").message(LESS_THAN_ONE))]
    pub size: Option<u32>,
    /// How many ranks are declared at each epoch's start; fixed within it (RFC 3). Default: max(64, 2 × nodes), which
    /// `status.maxSize` tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MOST_RANKS))]
    pub max_size: Option<u32>,
    /// Name of the node that gets rank 0. Default: the first eligible one that has passed preflight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253), regex(pattern = SUBDOMAIN))]
    pub lead: Option<String>,
    /// Shape of the TBON: `flat`, or as `tbon.topo` of flux-broker-attributes(7): `kary:K`, `mincrit[:K]`, `binomial`.
    /// Default: flat up to 1,024 ranks, `mincrit` beyond.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = TOPOLOGY))]
    pub topology: Option<String>,
    /// The brokers.
    #[serde(default)]
    pub broker: Broker,
    /// Ranks without a member.
    #[serde(default)]
    pub spares: Spares,
    /// What of its members Flux may use, and what it calls them by. Cores that kubelet reserves are left out always.
    #[serde(default)]
    pub resources: InstanceResources,
    /// How ranks are kept for members that are away.
    #[serde(default)]
    pub ranks: Ranks,
    /// How a member is drained before it is stopped.
    #[serde(default)]
    pub drain: Drain,
    /// What autoscalers of the Kubernetes cluster are told.
    #[serde(default)]
    pub autoscaling: Autoscaling,
    /// How an upgrade to the next epoch goes.
    #[serde(default)]
    pub upgrade: Upgrade,
    /// What happens when this object is deleted.
    #[serde(default)]
    pub uninstall: Uninstall,
    /// The queue.
    #[serde(default)]
    pub state: State,
    /// Directory on the hosts that holds everything. Default: the first of /opt, /var/lib, /home/kubernetes that can be
    /// written and executed, with `flux-distribute` appended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = PREFIX), length(max = LONGEST_PREFIX))]
    #[x_kube(validation = Rule::new(PREFIX_RULE).message(PREFIX_CHARACTERS).optional_old_self(true))]
    pub prefix: Option<String>,
}

/// Which nodes take part. Linux nodes that are Ready and not cordoned, without other NoSchedule or NoExecute taints than
/// those tolerated here.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Nodes {
    /// Only nodes with these labels: a LabelSelector, such as `{matchLabels: {pool: hpc}}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = selector_words)]
    #[x_kube(validation = Rule::new(SELECTS).message(EMPTY_SELECTOR))]
    pub selector: Option<LabelSelector>,
    /// Taints that do not keep a node out. (On a control plane, DaemonSet
    /// `install-flux-control-planes` must tolerate them too.)
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(transform = toleration_words)]
    pub tolerations: Vec<Toleration>,
}

/// The brokers' settings.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Broker {
    /// TCP port of the TBON. Default: 8050.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub port: Option<u16>,
    /// The user that owns the brokers, and as whom every job runs: a name of the hosts' /etc/passwd or a number.
    /// Default: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = USER))]
    pub run_as: Option<String>,
    /// More tables for broker.toml, as TOML text. Not `access`, `bootstrap`, `kvs`, `resource` and `tbon`, which are ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// CPU weight of the brokers and their jobs against the pods of kubelet (systemd.resource-control(5)). Default: 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10000))]
    pub cpu_weight: Option<u32>,
    /// How often the lead writes its KVS to disk (`[kvs] checkpoint-period`, FSD of RFC 23). Default: 1m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub checkpoint_period: Option<String>,
}

/// Ranks without a member.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Spares {
    /// What a spare declares to the scheduler: a request that fits no declared resources is refused at once instead of
    /// waiting for a node. Default: the commonest member's resources.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Resources>,
}

/// What of its members Flux may use, and what it calls them by. Cores that kubelet reserves for itself and the system
/// (`status.capacity.cpu` of the Node without `status.allocatable.cpu`) are never declared: whole physical cores, the
/// first ones, rounded down, because many a cloud reserves some 60m that must not cost a core. One core stays always.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InstanceResources {
    /// Keys of Node labels that become properties of the members that carry them, such as `topology.kubernetes.io/zone`:
    /// `KEY=VALUE`, and `KEY` where the value is empty. `flux run --requires=topology.kubernetes.io/zone=eu-1a` asks for one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub properties: Vec<String>,
    /// Which GPUs are declared. Default: Auto.
    #[serde(default)]
    #[schemars(with = "String", extend("enum" = ["Auto", "All", "None"]))]
    pub gpus: Gpus,
    /// What no job ever gets.
    #[serde(default)]
    pub exclude: Exclude,
    /// How long cores and GPUs stay declared that have vanished from their host, such as `10m`: a driver may only be loaded
    /// again. The member is drained meanwhile, and jobs that wait for what it has go on waiting. Default: 10m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub retain: Option<String>,
}

/// Which GPUs of a host are declared.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub enum Gpus {
    /// All, but none where a device plugin gives them to pods (the Node names `nvidia.com/gpu`, `nvidia.com/mig-…` or
    /// `amd.com/gpu` among its resources), unless the node is dedicated: it has a taint that `spec.nodes.tolerations` names,
    /// not counting those of conditions (`node.kubernetes.io/…`) and of the GPUs themselves, which pods with GPUs tolerate.
    #[default]
    Auto,
    /// All that the host has.
    All,
    /// None.
    None,
    /// Another version's word, which this one can't serve.
    #[serde(untagged)]
    Other(String),
}

/// What no job ever gets. Jobs that run on it are waited for, and nothing new is started there.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Exclude {
    /// Cores of every member, as hwloc's logical ids (RFC 22), such as `0-1`. A member that has no others is excluded as a
    /// whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<String>,
    /// The lead as a whole. Nobody is excluded where it would leave no rank to run jobs on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lead: bool,
    /// Nodes as a whole, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(length(max = 253), regex(pattern = SUBDOMAIN)))]
    pub nodes: Vec<String>,
}

/// How ranks are kept.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ranks {
    /// How long a rank is kept after its Node object is gone, such as `10m`. Default: 10m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub retain: Option<String>,
}

/// How a member is drained.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Drain {
    /// How long running jobs get before the member is stopped all the same, such as `1h`. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub timeout: Option<String>,
}

/// What autoscalers of the Kubernetes cluster are told.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Autoscaling {
    /// Nodes on which jobs run, those that these jobs depend on, and always the lead's carry the annotations by which
    /// Cluster Autoscaler and Karpenter leave a node alone: Kubernetes sees no pod of a job, and takes the node for idle.
    /// Default: true.
    #[serde(default = "yes")]
    pub protect: bool,
}

impl Default for Autoscaling {
    fn default() -> Self {
        Self { protect: yes() }
    }
}

fn yes() -> bool {
    true
}

/// The queue, which the lead's statedir holds.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// How often the lead's agent makes a dump (flux-dump(1)) that `flux-distribute recover` can begin with, such as `1h`.
    /// It is kept on the lead's own disk: have it fetched from there. Default: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub dump_every: Option<String>,
}

/// How an upgrade goes.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Upgrade {
    /// How long a pending restart waits for the instance to be idle, such as `24h`; running jobs are cancelled then.
    /// Default: for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub deadline: Option<String>,
    /// What happens when the lead does not come up in the next epoch. Default: GoBack.
    #[serde(default)]
    #[schemars(with = "String", extend("enum" = ["GoBack", "Stay"]))]
    pub on_failure: OnFailure,
}

/// What happens when the lead does not come up in the next epoch.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// One more epoch begins, with the packages and settings of the one before.
    #[default]
    GoBack,
    /// It is tried for ever, and somebody has to see to it.
    Stay,
    /// Another version's word, which this one can't serve.
    #[serde(untagged)]
    Other(String),
}

/// What happens to running jobs when the instance is deleted.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub enum RunningJobs {
    /// The host keeps running until they have ended.
    #[default]
    Wait,
    /// They are cancelled.
    Cancel,
    /// Another version's word, which this one can't serve; jobs are waited for.
    #[serde(untagged)]
    Other(String),
}

/// What happens when the instance is deleted.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Uninstall {
    /// What happens to running jobs. Default: Wait.
    #[serde(default)]
    #[schemars(with = "String", extend("enum" = ["Wait", "Cancel"]))]
    pub running_jobs: RunningJobs,
    /// Leave the lead's statedir on its host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_state: bool,
}

/// Where the instance as a whole stands.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub enum InstancePhase {
    /// No node is eligible yet, or packages or certificate are not there yet.
    #[default]
    Pending,
    /// The first brokers are being installed and started.
    Starting,
    /// The lead is online.
    Running,
    /// From one epoch to the next: the old one is being stopped or the new one started.
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

/// A dump, and where it is.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeptDump {
    /// The node that has it.
    pub node: String,
    /// The dump.
    #[serde(flatten)]
    pub dump: Dump,
}

/// Of [`FluxInstanceStatus::conditions`]: what runs is not what is wanted, and a coordinated restart would bring it.
pub const CONDITION_RESTART_PENDING: &str = "RestartPending";
/// More nodes are asked for than the running epoch has ranks.
pub const CONDITION_SCALE_DENIED: &str = "ScaleDenied";
/// A part of the spec that the running instance does not carry out.
pub const CONDITION_NOT_APPLIED: &str = "NotApplied";
/// Members have no agent.
pub const CONDITION_AGENTS_MISSING: &str = "AgentsMissing";
/// The certificate's Secret is gone, and brokers may use what was in it.
pub const CONDITION_CERTIFICATE_MISSING: &str = "CertificateMissing";

/// What the planner says of the instance.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FluxInstanceStatus {
    /// Where the instance as a whole stands: `Pending`, `Starting`, `Running`, `Restarting`, `Degraded`, `Failed` or `Ignored`.
    #[serde(default)]
    #[schemars(with = "String")]
    pub phase: InstancePhase,
    /// The worst that is known, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Set once the lead was online: from then on the roster is never thrown away.
    #[serde(default, rename = "instanceID", skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// Counts the coordinated starts.
    #[serde(default)]
    pub epoch: u64,
    /// Counts the changes of the roster.
    #[serde(default)]
    pub revision: u64,
    /// Node with rank 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead: Option<String>,
    /// Members.
    #[serde(default)]
    pub size: u32,
    /// Members whose broker is online.
    #[serde(default)]
    pub online: u32,
    /// Declared ranks of the running epoch.
    #[serde(default)]
    pub max_size: u32,
    /// How many more nodes the largest of the jobs needs that wait for nodes which are down: the signal to add some. None:
    /// not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_nodes: Option<u32>,
    /// Digest of the package set of the running epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The newest dump that a node has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump: Option<KeptDump>,
    /// `metadata.generation` that this status speaks of.
    #[serde(default)]
    pub observed_generation: i64,
    /// `Ready`, `Progressing`, `Degraded`, `RestartPending`, `ScaleDenied`, `NotApplied`, `AgentsMissing`,
    /// `CertificateMissing`, `Ignored`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

impl FluxInstanceStatus {
    /// The condition of that type, where it is true.
    pub fn holding(&self, type_: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.type_ == type_ && condition.status == "True")
    }
}
