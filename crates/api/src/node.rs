use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::{JsonSchema, transform::RecursiveTransform};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Finding, IdSet, PodCounts, Resources, idset};

/// The CRD's message if `spec.nodeName` differs from the FluxNode's name.
const ANOTHER_NODE: &str = "is not the name of this FluxNode";

/// Checks what the schema of a FluxNode can't express.
///
/// # Errors
/// Why it can't be read.
pub fn node_rules(object: &Value) -> serde_json::Result<Vec<Finding>> {
    let node = FluxNode::deserialize(object)?;
    let is_another = node.metadata.name.as_ref() != Some(&node.spec.node_name);
    Ok(is_another.then(|| Finding::new("spec.nodeName", ANOTHER_NODE)).into_iter().collect())
}

/// One node as a part of the instance. Its status is the node's status page; the agent on the node makes it before its
/// first write on the host and deletes it when the host is clean.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[kube(
    group = "distribute.flux-framework.org",
    version = "v1alpha1",
    kind = "FluxNode",
    plural = "fluxnodes",
    shortname = "fxn",
    namespaced,
    status = "FluxNodeStatus",
    derive = "PartialEq",
    doc = "One node as a part of the Flux instance: the node's status page.",
    validation = Rule::new("self.spec.nodeName == self.metadata.name").message(ANOTHER_NODE).field_path(".spec.nodeName"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Lost", type_ = "boolean", json_path = ".spec.lostByLead"),
    printcolumn(name = "Rank", type_ = "integer", json_path = ".spec.rank"),
    printcolumn(name = "Cores", type_ = "integer", json_path = ".status.facts.resources.cores"),
    printcolumn(name = "GPUs", type_ = "integer", json_path = ".status.facts.resources.gpus", priority = 1),
    printcolumn(name = "Host-Jobs", type_ = "integer", json_path = ".status.account.hostJobs", priority = 1),
    printcolumn(name = "Gangs", type_ = "integer", json_path = ".status.account.gangs", priority = 1),
    printcolumn(name = "Other-Pods", type_ = "integer", json_path = ".status.account.otherPods", priority = 1),
    printcolumn(name = "Overlapping", type_ = "integer", json_path = ".status.account.overlapping", priority = 1),
    printcolumn(name = "Flux", type_ = "string", json_path = ".status.fluxVersion", priority = 1),
    printcolumn(name = "Packages", type_ = "string", json_path = ".status.digest", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".spec.reason", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", priority = 1)
)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = RecursiveTransform(crate::numbers::within_type))]
pub struct FluxNodeSpec {
    /// Name of the Node that this object is about; the same as the name of this object.
    pub node_name: String,
    /// What the planner wants of this node: `Nothing`, `Install` (have the packages ready), `Run` (run the broker of `rank`)
    /// or `Leave` (stop the broker).
    #[serde(default)]
    #[schemars(with = "String")]
    pub want: Want,
    /// uid of the FluxInstance that this node belongs to.
    #[serde(default, rename = "instanceUID", skip_serializing_if = "Option::is_none")]
    pub instance_uid: Option<String>,
    /// uid of the Node. An agent acts on a rank only if this is its own Node's uid.
    #[serde(default, rename = "nodeUID", skip_serializing_if = "Option::is_none")]
    pub node_uid: Option<String>,
    /// Broker rank, if this node is a member, or was one and its broker still runs under that rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The epoch that the rank belongs to.
    #[serde(default)]
    pub epoch: u64,
    /// The last revision of the roster that concerned this node. The lead's agent applies it live.
    #[serde(default)]
    pub revision: u64,
    /// Lead only: ranks that get no new jobs, by reason (idsets as in RFC 22).
    #[serde(
        default,
        skip_serializing_if = "std::collections::BTreeMap::is_empty",
        deserialize_with = "idset::bounded_sets"
    )]
    #[schemars(with = "std::collections::BTreeMap<String, String>")]
    pub drain: std::collections::BTreeMap<String, IdSet>,
    /// Why this node gets no new jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_reason: Option<String>,
    /// With `Leave`: the broker is stopped even if jobs still run here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stop_despite_jobs: bool,
    /// The lead does not hear from this node's broker (for the lead's node: the others do not), although its agent reports
    /// it online; or the broker does not answer its agent, and the lead has given it up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost_by_lead: bool,
    /// The prefix of the lead's host, which all others must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// Where this node fetches the package set. If unset, it waits until another node has the archives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch_from: Option<FetchFrom>,
    /// Why this node gets no rank, starts no broker, or gets no jobs: it is not eligible, its prefix differs, there is no room for it,
    /// its Node is gone, the broker that it had a rank for must not end yet, the other brokers don't hear from it, or somebody has
    /// drained it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Where a node fetches a package set: from these peers in this order, then from the set's own source. The node checks the
/// sha256 of each archive, whoever sent it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FetchFrom {
    /// Digest of the package set.
    pub digest: String,
    /// `address:port` of other nodes' agents. The first is this node's parent in the tree of downloads. Empty: this node
    /// asks the source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<String>,
    /// When the planner wrote this, in seconds since the Unix epoch. A node that takes too long is not waited for.
    #[serde(default)]
    pub since: i64,
}

/// What the planner wants of a node.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub enum Want {
    /// Nothing: the node is not eligible, or was a member whose broker must not be stopped yet. What runs there stays.
    #[default]
    Nothing,
    /// Have the packages ready.
    Install,
    /// Run the broker of `spec.rank`.
    Run,
    /// Stop the broker: the member is drained and leaves.
    Leave,
    /// A value of another version, kept unchanged; the agent treats it like `Nothing`.
    #[serde(untagged)]
    Other(String),
}

/// Where a node stands on the way to a broker that is online.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePhase {
    /// It waits for something outside of the node; the message says for what.
    #[default]
    Waiting,
    /// Preflight examines the host.
    Preflight,
    /// The agent fetches and links packages.
    Installing,
    /// The broker is starting.
    Starting,
    /// The broker is in the overlay and in state `run`.
    Online,
    /// No new jobs; running ones may end.
    Draining,
    /// The broker was online and is not.
    Offline,
    /// The host is being cleaned.
    Removing,
    /// The last step failed; the message says why. The agent tries again if that can help.
    Failed,
    /// A value of another version, kept unchanged.
    #[serde(untagged)]
    Other(String),
}

/// What preflight found out about the host.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Facts {
    /// What Flux may use.
    pub resources: Resources,
    /// Memory in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Conda platform, `linux-64` or `linux-aarch64`.
    pub platform: String,
    /// Version of the host's glibc, such as `2.36`.
    pub glibc: String,
    /// The content of /proc/sys/kernel/random/boot_id.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// True if systemd supervises the broker, false if the agent does.
    pub systemd: bool,
    /// True if kubelet's CPU manager has policy `static`, so that it gives whole CPUs to single pods alone. Unset: it has another one,
    /// or `/var/lib/kubelet/cpu_manager_state` can't be read.
    #[serde(default, rename = "staticCPUs", skip_serializing_if = "std::ops::Not::not")]
    pub static_cpus: bool,
    /// Directory of everything that is installed on this host.
    pub prefix: String,
}

/// A running broker that the agent found, and what it was started with. A planner that has lost the roster rebuilds it from
/// this.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Adopted {
    /// Rank that the broker was started for.
    pub rank: u32,
    /// The broker's `hostname` attribute.
    pub broker_name: String,
    /// uid of the Node that it was started for.
    #[serde(rename = "nodeUID")]
    pub node_uid: String,
    /// uid of the FluxInstance that it was started for. Unset: an older agent started it.
    #[serde(default, rename = "instanceUID", skip_serializing_if = "Option::is_none")]
    pub instance_uid: Option<String>,
    /// Identity of the Flux instance that it belongs to.
    #[serde(rename = "instanceID")]
    pub instance_id: String,
    /// Epoch that it was started in.
    pub epoch: u64,
    /// Process id on the host.
    pub pid: i32,
    /// Digest of its environment.
    pub digest: String,
}

/// A dump of the queue (flux-dump(1)) that is kept on a host.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Dump {
    /// Name of the file in `<prefix>/dump`.
    pub name: String,
    /// When the dump was begun. It holds nothing newer.
    pub time: Time,
    /// Size in bytes.
    pub bytes: u64,
}

/// The request that `flux-distribute recover` or `reset` left on a host: this node shall lead. It names one epoch, so that
/// the planner acts on it once.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Takeover {
    /// The instance that lacks a lead.
    #[serde(rename = "instanceID")]
    pub instance_id: String,
    /// The epoch that ends with it.
    pub epoch: u64,
    /// When it was requested, in seconds since the Unix epoch. The latest request counts.
    pub at: i64,
    /// The dump that this host's statedir was made from. Unset: the queue is given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump: Option<String>,
    /// The new instance, which begins with an empty queue. Unset: the instance stays the same.
    #[serde(default, rename = "newInstanceID", skip_serializing_if = "Option::is_none")]
    pub new_instance_id: Option<String>,
    /// Do not wait for running jobs, or for brokers that are connected to the lead.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// A node that was to lead, and whose broker did not come up.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LeadFailed {
    /// `instanceID` of the roster in which this node led. Each attempt has its own.
    #[serde(rename = "instanceID")]
    pub instance_id: String,
    /// The last words in the log of its broker, or why it could not be started. Unset: it did not get so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_words: Option<String>,
}

/// How many cores of a node jobs and pods have, as Flux counts cores.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Account {
    /// Cores that host jobs have.
    #[serde(default)]
    pub host_jobs: u32,
    /// Cores that the jobs of gangs have.
    #[serde(default)]
    pub gangs: u32,
    /// Cores that pods of other schedulers use (see `spec.pods.tolerance`), or will use once kubelet has resized them.
    #[serde(default)]
    pub other_pods: u32,
    /// Of these, cores that a job has, too.
    #[serde(default)]
    pub overlapping: u32,
    /// What the pod in namespace `flux-host-jobs` requests for the host jobs, in thousandths of a CPU. Unset: there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_milli_cpu: Option<u64>,
}

/// How many jobs there are.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobCounts {
    /// Jobs that run, of users and of gangs.
    #[serde(default)]
    pub running: u32,
    /// Jobs in the queue, without those of the highest urgency; at most the first 1,000 are counted.
    #[serde(default)]
    pub pending: u32,
}

/// Most reasons in [`FluxNodeStatus::drain_reasons`].
pub const MOST_DRAIN_REASONS: usize = 16;
/// Most characters of such a reason.
pub const LONGEST_DRAIN_REASON: usize = 100;

/// State of the node. Its own agent writes it; only `account` comes from the lead's agent.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = RecursiveTransform(crate::times::only_utc))]
#[schemars(transform = RecursiveTransform(crate::numbers::within_type))]
pub struct FluxNodeStatus {
    /// State of the node: `Waiting`, `Preflight`, `Installing`, `Starting`, `Online`, `Draining`, `Offline`, `Removing` or
    /// `Failed`.
    #[serde(default)]
    #[schemars(with = "String")]
    pub phase: NodePhase,
    /// What the node does, waits for, or lacks, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// `phase` is `Failed`, and waiting does not help: somebody has to change something.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub needs_attention: bool,
    /// What preflight found out about the host. Unset until preflight has passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<Facts>,
    /// Digest of the newest environment that is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Digests of the published package sets whose archives this node has and serves to other nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cached_package_sets: Vec<String>,
    /// `address:port` at which this node's agent serves archives to other nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Version of Flux that the running broker reported, or the last one that ran here. `stand-in, no Flux` in local mode
    /// without Flux.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flux_version: Option<String>,
    /// The broker that runs here, and what it was started with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopted: Option<Adopted>,
    /// A broker runs here, and nothing on the host shows which instance it belongs to.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unknown_broker: bool,
    /// Lead only: revision of the roster whose resources the running instance has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied_revision: Option<u64>,
    /// Lead only: ranks whose brokers are slow to answer (torpid in `flux overlay status`).
    #[serde(default, skip_serializing_if = "IdSet::is_empty")]
    #[schemars(with = "String")]
    pub torpid: IdSet,
    /// Lead only: ranks that have or had a member and are not in the overlay, as the lead's broker reports. A broker that is
    /// cut off from its parent believes for minutes that it is online.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub offline: Vec<u32>,
    /// Lead only: ranks on which jobs hold resources (idset, RFC 22), as the lead's broker reports, without those where only jobs
    /// `other-pods/…` do. Empty: the instance is idle. Unset: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub allocated: Option<IdSet>,
    /// Lead only: the allocated ranks on which host jobs hold resources. Unset: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub host_jobs: Option<IdSet>,
    /// Lead only: ranks on which gangs of more than one pod hold resources.
    #[serde(default, skip_serializing_if = "IdSet::is_empty")]
    #[schemars(with = "String")]
    pub gangs: IdSet,
    /// Lead only: how many jobs run and wait, without jobs `other-pods/…`. Unset: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jobs: Option<JobCounts>,
    /// Lead only: how many more nodes the largest of the jobs needs that wait for nodes which are down. Unset: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_nodes: Option<u32>,
    /// Lead only: pods through Flux; unset while that is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pods: Option<PodCounts>,
    /// How many cores of this node jobs and pods have. The lead's agent writes it, at most every five seconds. Unset: pods
    /// through Flux are off, or the node holds no rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<Account>,
    /// Lead only: a job waits for cores that Flux calls free; names the job and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_back_job: Option<String>,
    /// Lead only: the queues that start no jobs, with the reason and the command that starts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_queues: Option<String>,
    /// Lead only: ranks of `spec.drain` to which the lead's broker gives no jobs (idset, RFC 22), and ranks that are still
    /// drained for one of our reasons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub drained: Option<IdSet>,
    /// Lead only: ranks that somebody else has drained, as the lead's broker last reported. Flux records drains by broker
    /// name.
    #[serde(default, skip_serializing_if = "IdSet::is_empty")]
    #[schemars(with = "String")]
    pub drained_by_others: IdSet,
    /// Lead only: why somebody else has drained ranks (idset, RFC 22), by reason; the 16 reasons with the most ranks, each up to its first 100 characters.
    #[serde(
        default,
        skip_serializing_if = "std::collections::BTreeMap::is_empty",
        deserialize_with = "idset::bounded_sets"
    )]
    #[schemars(with = "std::collections::BTreeMap<String, String>")]
    pub drain_reasons: std::collections::BTreeMap<String, IdSet>,
    /// Lead only: the epoch whose broker was stopped here so that the next one can begin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closed_epoch: Option<u64>,
    /// Lead only: the epoch that an administrator has ended with flux-shutdown(1). It stays ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shut_down: Option<u64>,
    /// Lead only, and only while ConfigMap `flux-roster` is gone: this host's copy of the roster, as JSON, or as base64 of
    /// its gzip if it is large.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roster: Option<String>,
    /// The newest dump of the queue that is kept here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump: Option<Dump>,
    /// An administrator has asked for this node to lead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takeover: Option<Takeover>,
    /// How a broker started now would differ from the one that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_pending: Option<String>,
    /// Why the last attempt to fetch or install the published package set failed. Unset: no attempt yet, or it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lacks_packages: Option<String>,
    /// Installed files that were found damaged, and whether they were mended. Unset: no check has found damage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
    /// `spec.want` is `Leave`, no broker runs here, and none will be started.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leave_completed: bool,
    /// The epoch whose broker does not come up here, however often it is tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_failing_epoch: Option<u64>,
    /// Lead only, until the instance was online once: no broker came up here, or none could be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead_failed: Option<LeadFailed>,
    /// The lead's broker does not answer this node's broker, or does not count it as online.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lead_unreachable: bool,
    /// Lead only: brokers that the lead's broker has refused lately, by broker name, and why. Flux does not tell the refused
    /// broker.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    pub rejected: std::collections::BTreeMap<String, String>,
    /// The newest format of the roster that this agent reads. 0: an older agent, which reads the first format.
    #[serde(default)]
    pub roster_format: u32,
    /// Version of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
}

impl FluxNodeStatus {
    /// Lead only: ranks on which host jobs hold resources; None if not known. What waits for jobs waits for these: pods outlive a
    /// broker.
    pub fn ranks_of_host_jobs(&self) -> Option<&IdSet> {
        self.allocated.as_ref().map(|allocated| self.host_jobs.as_ref().unwrap_or(allocated))
    }
}
