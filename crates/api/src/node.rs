use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Finding, IdSet, Resources};

/// The API server's words for a FluxNode that names another Node than its own name does, by a rule of the CRD.
const ANOTHER_NODE: &str = "is not the name of this FluxNode";

/// What no schema can say of a FluxNode.
///
/// # Errors
/// Why it can't be read.
pub fn node_rules(object: &Value) -> Result<Vec<Finding>, String> {
    let node = FluxNode::deserialize(object).map_err(|error| error.to_string())?;
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
    printcolumn(name = "Missed", type_ = "boolean", json_path = ".spec.missed"),
    printcolumn(name = "Rank", type_ = "integer", json_path = ".spec.rank"),
    printcolumn(name = "Cores", type_ = "integer", json_path = ".status.facts.resources.cores"),
    printcolumn(name = "GPUs", type_ = "integer", json_path = ".status.facts.resources.gpus", priority = 1),
    printcolumn(name = "Flux", type_ = "string", json_path = ".status.flux", priority = 1),
    printcolumn(name = "Packages", type_ = "string", json_path = ".status.digest", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".spec.reason"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message")
)]
#[serde(rename_all = "camelCase")]
pub struct FluxNodeSpec {
    /// The Node this belongs to: the name of this object, and of no other Node.
    pub node_name: String,
    /// What the planner wants of this node: `Nothing`, `Install`, `Run` or `Leave`.
    #[serde(default)]
    #[schemars(with = "String")]
    pub want: Want,
    /// uid of the FluxInstance this belongs to.
    #[serde(default, rename = "instanceUID", skip_serializing_if = "Option::is_none")]
    pub instance_uid: Option<String>,
    /// uid of the Node: an agent acts on a rank only when it is this Node's.
    #[serde(default, rename = "nodeUID", skip_serializing_if = "Option::is_none")]
    pub node_uid: Option<String>,
    /// Broker rank, where this node is a member, or was one and its broker still runs under that rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The epoch that the rank belongs to.
    #[serde(default)]
    pub epoch: u64,
    /// The roster's revision that concerned this node last; the lead applies it live.
    #[serde(default)]
    pub revision: u64,
    /// Lead only: ranks that get no new jobs, by reason (RFC 22).
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    #[schemars(with = "std::collections::BTreeMap<String, String>")]
    pub drain: std::collections::BTreeMap<String, IdSet>,
    /// Why this node gets no new jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining: Option<String>,
    /// With `Leave`: jobs that still run here are not waited for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overdue: bool,
    /// The lead does not hear from this node's broker (or, for the lead's node, the others don't), although its agent reports it
    /// online; or the broker does not answer its agent, and the lead has given it up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub missed: bool,
    /// The prefix that the lead's host has, and all others must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// Where this node fetches the package set; without it, it waits until another node holds the archives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch_from: Option<FetchFrom>,
    /// Why this node gets no rank, or starts no broker: it is not eligible, its prefix is another one, there is no room for it,
    /// its Node is gone, or the broker that it had a rank for must not end yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Where a node fetches a package set: from these peers in this order, then from the set's own source. The archives' sha256
/// are checked whoever sends them.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FetchFrom {
    /// Digest of the package set.
    pub digest: String,
    /// `address:port` of other nodes' agents, the first is this node's parent in the tree of downloads. Empty: this node is
    /// the one that asks the source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<String>,
    /// When this was told, seconds since the Unix epoch: a node that takes too long is not waited for.
    #[serde(default)]
    pub since: i64,
}

/// What the planner wants of a node.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub enum Want {
    /// Nothing: it is not eligible, or was a member whose broker must not end yet. What runs there is left alone.
    #[default]
    Nothing,
    /// Have the packages ready.
    Install,
    /// Run the broker of `spec.rank`.
    Run,
    /// Stop the broker: the member is drained and leaves.
    Leave,
    /// Another version's word, kept as it was read: to be left alone, as with `Nothing`.
    #[serde(untagged)]
    Other(String),
}

/// Where a node stands on the way to a broker that is online.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePhase {
    /// For something that others do: the message says for what.
    #[default]
    Waiting,
    /// The host is being looked at.
    Preflight,
    /// Packages are fetched and linked.
    Installing,
    /// The broker is on its way up.
    Starting,
    /// The broker is in the overlay and in state `run`.
    Online,
    /// No new jobs; running ones may end.
    Draining,
    /// The broker was online and is not.
    Offline,
    /// The host is being cleaned.
    Removing,
    /// The last step failed; the message says why, and it is tried again where time can heal it.
    Failed,
    /// Another version's word, kept as it was read: this version only knows that it is none of the above.
    #[serde(untagged)]
    Other(String),
}

/// What the host is.
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
    /// /proc/sys/kernel/random/boot_id.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// systemd supervises the broker (else the agent does).
    pub systemd: bool,
    /// Where everything of ours lives on this host.
    pub prefix: String,
}

/// A broker that an agent found running, and what it was started with. From these a planner that has lost the roster
/// makes it again.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Adopted {
    /// Rank it was started for.
    pub rank: u32,
    /// Its `hostname` attribute.
    pub broker_name: String,
    /// uid of the Node it was started for.
    #[serde(rename = "nodeUID")]
    pub node_uid: String,
    /// uid of the FluxInstance it was started for. None: an older agent's word.
    #[serde(default, rename = "instanceUID", skip_serializing_if = "Option::is_none")]
    pub instance_uid: Option<String>,
    /// The instance it belongs to.
    #[serde(rename = "instanceID")]
    pub instance_id: String,
    /// Epoch it was started in.
    pub epoch: u64,
    /// Process id on the host.
    pub pid: i32,
    /// Digest of its environment.
    pub digest: String,
}

/// A dump of the instance's KVS (flux-dump(1)) that is kept on a host.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Dump {
    /// Name of the file below `<prefix>/dump`.
    pub name: String,
    /// When it was begun: it holds nothing that is younger.
    pub time: Time,
    /// Its size.
    pub bytes: u64,
}

/// An administrator's word, left on a host by `flux-distribute recover` or `reset`: this node shall lead. It is about one
/// epoch, so that it is acted on once.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Takeover {
    /// The instance that lacks a lead.
    #[serde(rename = "instanceID")]
    pub instance_id: String,
    /// The epoch that ends with it.
    pub epoch: u64,
    /// When it was said, seconds since the Unix epoch: the last word counts.
    pub at: i64,
    /// The dump that this host's statedir was made from. None: the queue is given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump: Option<String>,
    /// The instance that begins with an empty queue. None: the one that was.
    #[serde(default, rename = "newInstanceID", skip_serializing_if = "Option::is_none")]
    pub new_instance_id: Option<String>,
    /// Neither running jobs nor brokers that are connected to the lead are a reason to wait.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// A lead on whose host no broker came up.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LeadFailed {
    /// `instanceID` of the roster that it led: each attempt has its own.
    #[serde(rename = "instanceID")]
    pub instance_id: String,
    /// The words of its broker, or why it could not be started. None: it did not get so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_words: Option<String>,
}

/// What the agent says of its node.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FluxNodeStatus {
    /// Where the node stands: `Waiting`, `Preflight`, `Installing`, `Starting`, `Online`, `Draining`, `Offline`, `Removing` or
    /// `Failed`.
    #[serde(default)]
    #[schemars(with = "String")]
    pub phase: NodePhase,
    /// The last thing worth telling a person, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// `phase` is `Failed`, and time alone does not heal it: somebody has to change something.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lasting: bool,
    /// What the host is; there once preflight has passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<Facts>,
    /// Digest of the newest environment that is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Digests of the published package sets whose archives this node holds and serves to others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<String>,
    /// `address:port` at which this node's agent serves archives to others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Version of Flux, by the word of the broker that runs here or ran here last. `stand-in, no Flux`: local mode's stand-in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flux: Option<String>,
    /// The broker that runs here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopted: Option<Adopted>,
    /// A broker runs here, and nothing on the host tells of which instance it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unknown_broker: bool,
    /// Lead only: the roster's revision whose resources the running instance has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied_revision: Option<u64>,
    /// Lead only: ranks whose brokers are slow to answer (`flux overlay status`: torpid).
    #[serde(default, skip_serializing_if = "IdSet::is_empty")]
    #[schemars(with = "String")]
    pub torpid: IdSet,
    /// Lead only: ranks that have or had a member and are not in the overlay, by its broker's word. A broker that is cut
    /// off from its parent believes for minutes that it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub offline: Vec<u32>,
    /// Lead only: ranks on which jobs run, by its broker's word (RFC 22); empty: the instance is idle. None: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub allocated: Option<IdSet>,
    /// Lead only: how many more nodes the largest of the jobs needs that wait for nodes which are down. None: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending_nodes: Option<u32>,
    /// Lead only: a job waits for cores that Flux calls free, and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_back: Option<String>,
    /// Lead only: ranks of [`FluxNodeSpec::drain`] that its broker gives no jobs to (RFC 22), and those that are still drained
    /// for a reason of ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub drained: Option<IdSet>,
    /// Lead only: ranks that somebody else has drained, by its broker's last word. Flux keeps that by the brokers' names.
    #[serde(default, skip_serializing_if = "IdSet::is_empty")]
    #[schemars(with = "String")]
    pub drained_by_others: IdSet,
    /// Lead only: the epoch whose broker was stopped here for the next one to begin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closed: Option<u64>,
    /// Lead only: the epoch that an administrator has ended by flux-shutdown(1). It stays ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shut_down: Option<u64>,
    /// Lead only, and only while ConfigMap `flux-roster` is gone: the roster as this host has it, as JSON; as
    /// base64 of its gzip where it is large.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roster: Option<String>,
    /// The newest dump of the instance that is kept here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump: Option<Dump>,
    /// This node shall lead, by an administrator's word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takeover: Option<Takeover>,
    /// In which way a broker started now would differ from the one that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_pending: Option<String>,
    /// Why the published package set could not be fetched or installed here at the last try. None: it was not tried yet, or it
    /// is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lacks_packages: Option<String>,
    /// Installed files that were found damaged, and whether they were mended. Unset: no check has found damage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
    /// `spec.want` is `Leave`, and no broker runs here nor will be started.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left: bool,
    /// The epoch whose broker doesn't come up here, however often it is tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeps_dying: Option<u64>,
    /// Lead only, and only until the instance was online once: no broker came up here, or none could be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead_failed: Option<LeadFailed>,
    /// The lead's broker doesn't answer this one, or doesn't count it in.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unheard: bool,
    /// Lead only: whom the lead's broker has refused lately, by broker name, and why. The refused broker itself is not told.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    pub rejected: std::collections::BTreeMap<String, String>,
    /// The newest format of the roster that the agent reads. 0: an older agent, which reads the first one.
    #[serde(default)]
    pub roster_format: u32,
    /// Version of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
}
