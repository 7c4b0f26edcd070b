use k8s_openapi::{api::core::v1::Toleration, apimachinery::pkg::apis::meta::v1::LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{FluxInstanceStatus, Packages, Resources};
use crate::rules::{
    CPUS, DURATION, EMPTY_SELECTOR, LESS_THAN_ONE, LONGEST_CPUS, LONGEST_PREFIX, MORE_THAN_MAX_SIZE, PREFIX,
    PREFIX_CHARACTERS, PREFIX_PLACE, PREFIX_PLACE_RULE, PREFIX_RULE, SUBDOMAIN, TOPOLOGY, USER, selector_words,
    toleration_words,
};

/// In CEL. has() is true for a field that is null, hence the check of the type.
const SIZE_FITS: &str = "!has(self.size) || type(self.size) != int || !has(self.maxSize) || type(self.maxSize) != int || \
                         self.size <= self.maxSize";
/// In CEL. The API server prunes unknown fields before, so a plain map of labels is empty by then.
const SELECTS: &str = "has(self.matchLabels) || has(self.matchExpressions)";
/// We have never tested more ranks than that.
pub const MOST_RANKS: u32 = 16384;
/// More slots than that in one job were never tried.
const MOST_PODS: u32 = 16384;

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
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.reason"),
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".status.epoch", priority = 1),
    printcolumn(name = "Pending", type_ = "integer", json_path = ".status.pendingNodes", priority = 1),
    printcolumn(name = "Dump", type_ = "date", json_path = ".status.dump.time", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", priority = 1)
)]
#[x_kube(validation = Rule::new(SIZE_FITS).message(MORE_THAN_MAX_SIZE).field_path(".size"))]
#[serde(rename_all = "camelCase")]
pub struct FluxInstanceSpec {
    /// Where the packages come from: conda channels, a lock, or a bundle.
    #[serde(default)]
    pub packages: Packages,
    /// Which nodes take part.
    #[serde(default)]
    pub nodes: Nodes,
    /// How many members the instance has. `kubectl scale fxi/flux --replicas=N` sets it. Default: every eligible node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = MOST_RANKS))]
    #[x_kube(validation = Rule::new("self >= 1").message(LESS_THAN_ONE))]
    pub size: Option<u32>,
    /// How many ranks an epoch declares at its start, so that nodes can join without a restart (RFC 3). `status.maxSize`
    /// shows what the running epoch has. Default: the greater of 64 and twice the eligible nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MOST_RANKS))]
    pub max_size: Option<u32>,
    /// Name of the node that gets rank 0. A running instance keeps its lead. Default: the first eligible node that has
    /// passed preflight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253), regex(pattern = SUBDOMAIN))]
    pub lead: Option<String>,
    /// Shape of the tree of brokers (the TBON): `flat`, or as `tbon.topo` in flux-broker-attributes(7) `kary:K`, `mincrit`,
    /// `mincrit:K` or `binomial`. Default: `flat` up to 1,024 ranks, `mincrit` beyond.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = TOPOLOGY))]
    pub topology: Option<String>,
    /// Settings of the brokers.
    #[serde(default)]
    pub broker: Broker,
    /// Ranks that have no member yet.
    #[serde(default)]
    pub spares: Spares,
    /// Which resources of its members Flux may use, and which Node labels it knows them by. Cores that kubelet reserves are
    /// always left out.
    #[serde(default)]
    pub resources: InstanceResources,
    /// How long a rank is kept for a member that is away.
    #[serde(default)]
    pub ranks: Ranks,
    /// How a member is drained before its broker is stopped.
    #[serde(default)]
    pub drain: Drain,
    /// How autoscalers of the Kubernetes cluster are kept from removing nodes that run jobs.
    #[serde(default)]
    pub autoscaling: Autoscaling,
    /// Pods that Flux schedules: those with `schedulerName: flux`.
    #[serde(default)]
    pub pods: Pods,
    /// When a pending restart happens, and what happens if the next epoch does not start.
    #[serde(default)]
    pub upgrade: Upgrade,
    /// What happens when this object is deleted.
    #[serde(default)]
    pub uninstall: Uninstall,
    /// The queue of jobs, which is on the lead's disk.
    #[serde(default)]
    pub state: State,
    /// Directory on the hosts that holds everything that is installed. It is fixed at the first start and the same on all
    /// hosts. Default: `flux-distribute` below the first of /opt, /var/lib and /home/kubernetes in which the lead's host can
    /// write and execute files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = PREFIX), length(max = LONGEST_PREFIX))]
    #[x_kube(validation = Rule::new(PREFIX_RULE).message(PREFIX_CHARACTERS).optional_old_self(true))]
    #[x_kube(validation = Rule::new(PREFIX_PLACE_RULE).message(PREFIX_PLACE).optional_old_self(true))]
    pub prefix: Option<String>,
}

/// Which nodes take part: Linux nodes that are Ready and not cordoned, and have no NoSchedule or NoExecute taint except
/// those tolerated here.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Nodes {
    /// Only nodes with these labels take part. This is a LabelSelector: write `{matchLabels: {pool: hpc}}`, not `{pool:
    /// hpc}`. Default: all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = selector_words)]
    #[x_kube(validation = Rule::new(SELECTS).message(EMPTY_SELECTOR))]
    pub selector: Option<LabelSelector>,
    /// Taints that do not keep a node out. On a control plane, DaemonSet `install-flux-control-planes` must tolerate them
    /// too. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(transform = toleration_words)]
    pub tolerations: Vec<Toleration>,
    /// Label the Nodes of members, so that pods can select them: `distribute.flux-framework.org/rank` is the rank,
    /// `distribute.flux-framework.org/online` is `true` or `false`, `distribute.flux-framework.org/lead` is `true` on rank 0's Node alone.
    /// Default: false.
    #[serde(default)]
    pub label: bool,
}

/// Settings of the brokers.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Broker {
    /// TCP port of the brokers. Default: 8050.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub port: Option<u16>,
    /// The user that owns the brokers and runs every job: a name in the hosts' /etc/passwd, or a number. An instance that was online
    /// keeps it. Default: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = USER))]
    pub run_as: Option<String>,
    /// More tables for broker.toml, as TOML text. The tables `access`, `bootstrap`, `kvs`, `resource` and `tbon` are
    /// refused, because flux-distribute writes them. A queue that `[queues.NAME]` makes is stopped, as Flux has it, until
    /// somebody runs `flux queue start NAME`, once. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// CPU weight of the brokers and their jobs against kubelet's pods (systemd.resource-control(5)). Default: 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10000))]
    pub cpu_weight: Option<u32>,
    /// How often the lead writes its state to disk, as a duration such as `1m` (`[kvs] checkpoint-period`; FSD of RFC 23).
    /// Default: 1m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub checkpoint_period: Option<String>,
}

/// Ranks that have no member yet.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Spares {
    /// The resources that a rank without a node declares to the scheduler. A job that fits no declared resources is refused
    /// at once; one that fits a spare waits for a node. Default: the resources that most members have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Resources>,
}

/// Which resources of its members Flux may use, and which Node labels it knows them by. Cores that kubelet reserves for
/// itself and the system (`status.capacity.cpu` of the Node minus `status.allocatable.cpu`) are never declared: whole
/// physical cores, the first ones, rounded down, because many clouds reserve some 60m, which must not cost a core. At least
/// one core is always declared.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InstanceResources {
    /// Keys of Node labels that become properties of the members that carry them, such as `topology.kubernetes.io/zone`. The
    /// property is `KEY=VALUE`, or `KEY` if the value is empty. `flux run --requires=topology.kubernetes.io/zone=eu-1a` asks
    /// for one. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub properties: Vec<String>,
    /// Which GPUs are declared: `All` that the host has, `None`, or `Auto`. `Auto` declares none on a node whose device
    /// plugin gives them to pods, unless the node is dedicated by a taint that `nodes.tolerations` names; otherwise all.
    /// Default: `Auto`.
    #[serde(default)]
    #[schemars(with = "String", extend("enum" = ["Auto", "All", "None"]))]
    pub gpus: Gpus,
    /// Cores and nodes that no job gets.
    #[serde(default)]
    pub exclude: Exclude,
    /// How long cores and GPUs that a host no longer shows stay declared, such as `10m`: the driver of a GPU may only be
    /// reloaded. The member is drained meanwhile, and jobs that need these resources keep waiting. Default: 10m.
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

/// Cores and nodes that no job gets. Jobs that run there may end first; no new ones start there.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Exclude {
    /// Cores of every member, as hwloc's logical ids (RFC 22), such as `0-1`. A member that has no other cores is excluded
    /// as a whole. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<String>,
    /// Exclude the lead as a whole. Nothing is excluded if that would leave no rank to run jobs on. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lead: bool,
    /// Exclude these nodes, by name. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(length(max = 253), regex(pattern = SUBDOMAIN)))]
    pub nodes: Vec<String>,
}

/// How long a rank is kept for a member that is away.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ranks {
    /// How long a rank is kept after its Node object was deleted, such as `10m`. Default: 10m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub retain: Option<String>,
}

/// How a member is drained before its broker is stopped.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Drain {
    /// How long running jobs get on a member that leaves (a smaller `size`, another selector) before its broker is stopped
    /// all the same, such as `1h`. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub timeout: Option<String>,
}

/// How autoscalers of the Kubernetes cluster are kept from removing nodes that run jobs.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Autoscaling {
    /// Annotate the nodes on which jobs run, the nodes that these jobs depend on, and the lead's node, so that Cluster
    /// Autoscaler and Karpenter leave them alone. Kubernetes sees no pod of a Flux job and takes the node for idle. Default:
    /// true.
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

/// Pods that Flux schedules: those with `schedulerName: flux`, in namespaces that a RoleBinding opens for it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pods {
    /// Give each pod with `schedulerName: flux`, and each gang of them, a job in Flux's queue, and bind it to the cores that
    /// Flux allocates. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub enabled: bool,
    /// How long a pod without `activeDeadlineSeconds` is expected to run, such as `24h`. Flux plans with it which smaller jobs
    /// may run before a gang that waits; nothing ends a pod that runs longer. Default: 24h.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub default_duration: Option<String>,
    /// How long a gang may run with a member missing that its node refused, such as `60s`, before its Job is suspended and
    /// resumed. Default: 60s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub complete_after: Option<String>,
    /// How long a gang waits before pods of Flux with a lower priority (PriorityClass) make way for it, such as `10m`: as few gangs as
    /// possible, whole, the lowest priority and the youngest first, and none that a PodDisruptionBudget protects. Default: for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub preempt_after: Option<String>,
    /// How many CPUs pods of other schedulers may request on a node, all together, before they hold a core in Flux, such as `500m`, so
    /// that small system pods cost no core. If the node has more CPUs that Flux does not declare, that number counts instead. A number
    /// that no node has, such as `1000`, switches this off. Default: 500m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = LONGEST_CPUS), regex(pattern = CPUS))]
    pub tolerance: Option<String>,
    /// The most pods that one gang may have: a gang that waits reserves nodes, and anybody who may create pods may ask for
    /// one. Default: 256.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MOST_PODS))]
    pub max_gang: Option<u32>,
}

/// The queue of jobs, which is in the statedir on the lead's disk.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// How often the lead's agent keeps a dump of the queue (flux-dump(1)) with which `flux-distribute recover` can begin,
    /// such as `1h`. The dump is on the lead's own disk: copy it elsewhere. Default: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub dump_every: Option<String>,
}

/// When a pending restart happens, and what happens if the next epoch does not start.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Upgrade {
    /// How long a pending restart waits for the instance to be idle, such as `24h`. After that, running jobs are cancelled.
    /// Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = DURATION))]
    pub deadline: Option<String>,
    /// What happens if the lead does not come up in the next epoch: `GoBack` starts one more epoch with the packages and
    /// settings of the one before; `Stay` keeps trying until somebody intervenes. Default: `GoBack`.
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
    /// The agent keeps trying until an administrator intervenes.
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
    /// What happens to running jobs: with `Wait` the hosts stay as they are until the jobs have ended; `Cancel` cancels the
    /// jobs. Default: `Wait`.
    #[serde(default)]
    #[schemars(with = "String", extend("enum" = ["Wait", "Cancel"]))]
    pub running_jobs: RunningJobs,
    /// Leave the lead's queue on its host, for `flux-distribute reset --kept`. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_state: bool,
}
