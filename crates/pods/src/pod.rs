//! What the bridge keeps of a pod: parsed once, whenever the API server sends it.

use std::collections::BTreeSet;

use k8s_openapi::{
    api::core::v1::{Pod, PodCondition, PodSpec},
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};

use crate::{
    node_rules::NodeRules,
    placeholder::Placeholder,
    record::{ANNOTATION_JOB, GangKind, LONGEST_NAME, PodRecord, is_label_like},
    requests::{Requests, Size},
    time::{Millis, Moment, SECOND},
    unsupported::{Unsupported, check_annotations, check_fields},
};
use api::SCHEDULER;

/// Annotation: the gang's name.
pub const ANNOTATION_GANG: &str = "distribute.flux-framework.org/gang";
/// Annotation: the number of pods in the gang.
pub const ANNOTATION_GANG_SIZE: &str = "distribute.flux-framework.org/gang-size";
/// Label of coscheduling (sigs.k8s.io/scheduler-plugins): the name of a PodGroup.
const LABEL_COSCHEDULING: &str = "scheduling.x-k8s.io/pod-group";
/// Before the labels of a LeaderWorkerSet's pods.
const LEADER_WORKER_SET: &str = "leaderworkerset.sigs.k8s.io/";
/// Annotation of a LeaderWorkerSet's pods: the number of pods in each group.
const ANNOTATION_GROUP_SIZE: &str = "leaderworkerset.sigs.k8s.io/size";
/// Fluence's labels by version: the group's name, and its size. The middle versions take the name from coscheduling's.
const LABELS_FLUENCE: [(&str, &str); 3] = [
    ("fluence.flux-framework.org/pod-group", "fluence.flux-framework.org/group-size"),
    ("fluence.pod-group", "fluence.group-size"),
    (LABEL_COSCHEDULING, "fluence.group-size"),
];
/// A pod's place in an Indexed Job, and in a StatefulSet. An annotation before 1.28.
const INDEXES: [&str; 2] = ["batch.kubernetes.io/job-completion-index", "apps.kubernetes.io/pod-index"];
/// How long a container may run on after its pod is gone without having ended: it was deleted by force, and kubelet
/// hears of that later than we do.
pub const FORCED_HOLD: Millis = 10 * SECOND;

/// A pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodView {
    /// metadata.namespace
    pub namespace: String,
    /// metadata.name
    pub name: String,
    /// metadata.uid
    pub uid: String,
    /// metadata.creationTimestamp
    pub created: Moment,
    /// spec.schedulerName is [`SCHEDULER`].
    pub is_bridged: bool,
    /// spec.nodeName; None if it is not bound.
    pub node: Option<String>,
    /// When it was bound: condition PodScheduled is True since then.
    pub bound: Option<Moment>,
    /// status.phase
    pub phase: Phase,
    /// kubelet refused it: it ended before any of its containers ran.
    pub is_refused: bool,
    /// kubelet has taken it up: status.startTime is set.
    pub is_taken_up: bool,
    /// metadata.deletionTimestamp: it is being deleted, and kubelet kills it at this moment if it has not ended.
    pub to_end_by: Option<Moment>,
    /// When the API server sent its deletion. The effect layer keeps such a pod, as it was last, for [`FORCED_HOLD`].
    pub gone: Option<Moment>,
    /// What it asks of its node.
    pub requests: Requests,
    /// What of this kubelet has not granted yet.
    pub deferred: Size,
    /// spec.priority
    pub priority: i32,
    /// spec.preemptionPolicy is Never: others do not make way for it.
    pub never_preempts: bool,
    /// Only while it can still be bound.
    pub plan: Option<Box<Plan>>,
    /// metadata.ownerReferences, the controller.
    pub owner: Option<Owner>,
    /// Its record. A hint: see [`crate::record`].
    pub record: Option<PodRecord>,
    /// What it says about its gang.
    pub hints: Hints,
    /// Its place in its gang, if its controller gives it one.
    pub index: Option<u32>,
    /// Only of a placeholder pod.
    pub placeholder: Option<Placeholder>,
}

/// status.phase
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Phase {
    /// Its containers have not been started, or kubelet has not reported.
    #[default]
    Pending,
    /// It runs.
    Running,
    /// It ended well.
    Succeeded,
    /// It ended otherwise.
    Failed,
}

/// The controller that owns a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// It is a Job of group batch.
    pub is_job: bool,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// What a pod says about its gang. [`crate::gangs`] decides which of them counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// Our annotations: name, and size as it is written.
    pub annotated: Option<(String, String)>,
    /// spec.schedulingGroup.podGroupName: name of a PodGroup of Kubernetes itself. The API server drops it unless feature gate
    /// GenericWorkload is on (Kubernetes 1.36).
    pub pod_group: Option<String>,
    /// Name of a PodGroup of coscheduling.
    pub coscheduling: Option<String>,
    /// Fluence's labels: name, and size as it is written.
    pub fluence: Option<(String, String)>,
    /// A LeaderWorkerSet's group: its name with the group's index, and its size as it is written.
    pub leader_worker_set: Option<(String, String)>,
}

/// What matters until the pod is bound.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Which nodes it may be bound to.
    pub rules: NodeRules,
    /// Names of the volume claims it mounts.
    pub claims: BTreeSet<String>,
    /// It has scheduling gates, so it can't be bound yet.
    pub is_gated: bool,
    /// True if the pods of its gang must be on different nodes; or what can't be honoured.
    pub spreads: Result<bool, Unsupported>,
    /// spec.activeDeadlineSeconds
    pub seconds: Option<u64>,
    /// Reason and message of condition PodScheduled, if that is False.
    pub told: Option<(String, String)>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            rules: NodeRules::default(),
            claims: BTreeSet::new(),
            is_gated: false,
            spreads: Ok(false),
            seconds: None,
            told: None,
        }
    }
}

impl PodView {
    /// Parses `pod`.
    pub fn of(pod: &Pod) -> Self {
        let (meta, spec, status) = (&pod.metadata, pod.spec.as_ref(), pod.status.as_ref());
        let labels = meta.labels.clone().unwrap_or_default();
        let annotation = |key: &str| meta.annotations.as_ref().and_then(|annotations| annotations.get(key));
        let owners = meta.owner_references.iter().flatten();
        // A pod's creator chooses the owner's name and uid, which the API server does not check.
        let is_fine = |owner: &&OwnerReference| is_label_like(&owner.name) && is_label_like(&owner.uid);
        let controller = owners.into_iter().find(|owner| owner.controller == Some(true));
        let owner = controller.filter(is_fine).map(|owner| Owner {
            is_job: owner.kind == "Job" && owner.api_version == "batch/v1",
            name: owner.name.clone(),
            uid: owner.uid.clone(),
        });
        let both = |name: &str, size: &str| Some((labels.get(name)?.clone(), labels.get(size)?.clone()));
        // Users choose how long these are, and they stay in memory. One character too many is enough to refuse them.
        let short = |text: &String| text.chars().take(LONGEST_NAME + 1).collect::<String>();
        let group = |label: &str| labels.get(&format!("{LEADER_WORKER_SET}{label}"));
        let size = || annotation(ANNOTATION_GANG_SIZE).map(short).unwrap_or_default();
        let hints = Hints {
            annotated: annotation(ANNOTATION_GANG).map(|name| (short(name), size())),
            pod_group: spec.and_then(|spec| spec.scheduling_group.as_ref()?.pod_group_name.clone()),
            coscheduling: labels.get(LABEL_COSCHEDULING).cloned(),
            fluence: LABELS_FLUENCE.iter().find_map(|(name, size)| both(name, size)),
            leader_worker_set: group("name").zip(group("group-index")).map(|(name, index)| {
                (short(&format!("{name}-{index}")), annotation(ANNOTATION_GROUP_SIZE).map(short).unwrap_or_default())
            }),
        };
        let phase = match status.and_then(|status| status.phase.as_deref()) {
            Some("Running") => Phase::Running,
            Some("Succeeded") => Phase::Succeeded,
            Some("Failed") => Phase::Failed,
            _ => Phase::Pending,
        };
        let node = spec.and_then(|spec| spec.node_name.clone()).filter(|node| !node.is_empty());
        let is_bridged = spec.is_some_and(|spec| spec.scheduler_name.as_deref() == Some(SCHEDULER));
        let scheduled = condition(pod, "PodScheduled");
        let (namespace, name) = (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default());
        let requests = Requests::of(pod);
        let plan = spec.filter(|_| is_bridged && node.is_none()).map(|spec| {
            let mut names: Vec<&str> = owner.iter().flat_map(|owner| [owner.name.as_str(), &owner.uid]).collect();
            names.extend(hints.names());
            let spreads = requests
                .clone()
                .map_err(Unsupported::from)
                .and_then(|_| check_annotations(meta.annotations.as_ref()))
                .and_then(|()| check_fields(spec, &labels, &namespace, &names));
            let is_refused = spreads.is_err();
            Box::new(Plan {
                // They stay in memory, and claims are looked up.
                rules: if is_refused { NodeRules::default() } else { NodeRules::of(spec) },
                claims: if is_refused { BTreeSet::new() } else { claims(spec, &name) },
                is_gated: spec.scheduling_gates.iter().flatten().next().is_some(),
                spreads,
                seconds: spec.active_deadline_seconds.and_then(|seconds| u64::try_from(seconds).ok()),
                told: scheduled.filter(|condition| condition.status == "False").map(|condition| {
                    (condition.reason.clone().unwrap_or_default(), condition.message.clone().unwrap_or_default())
                }),
            })
        });
        let index = INDEXES.iter().find_map(|key| labels.get(*key).or_else(|| annotation(key))?.parse().ok());
        let is_taken_up = status.is_some_and(|status| status.start_time.is_some());
        let bound = scheduled.filter(|condition| condition.status == "True");
        let bound = bound.and_then(|condition| condition.last_transition_time.as_ref());
        Self {
            name,
            uid: meta.uid.clone().unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map_or(0, |time| time.0.as_millisecond()),
            is_bridged,
            bound: bound.map(|time| time.0.as_millisecond()),
            is_refused: phase == Phase::Failed && node.is_some() && !any_container_ran(pod),
            is_taken_up,
            to_end_by: meta.deletion_timestamp.as_ref().map(|time| time.0.as_millisecond()),
            gone: None,
            requests: requests.unwrap_or_default(),
            deferred: Requests::deferred(pod).unwrap_or_default(),
            priority: spec.and_then(|spec| spec.priority).unwrap_or(0),
            never_preempts: spec.and_then(|spec| spec.preemption_policy.as_deref()) == Some("Never"),
            record: annotation(ANNOTATION_JOB)
                .filter(|_| is_bridged && node.is_some())
                .and_then(|text| PodRecord::read(text)),
            namespace,
            node,
            phase,
            plan,
            owner,
            hints,
            index,
            placeholder: Placeholder::of(pod),
        }
    }

    /// Its containers have ended, and kubelet starts none again.
    pub fn is_terminal(&self) -> bool {
        matches!(self.phase, Phase::Succeeded | Phase::Failed)
    }

    /// A scheduler has bound it, or kubelet has taken it up. Whoever may create a pod can name a node in it that has no room, which kubelet
    /// refuses a moment later.
    pub fn may_be_there(&self) -> bool {
        self.bound.is_some() || self.is_taken_up
    }

    /// It is bound, and a container of it may run: its cores must be held. None if that is over; otherwise until when, or
    /// `Moment::MAX` if only the pod itself can say.
    pub fn holds_until(&self, now: Moment) -> Option<Moment> {
        let until = self.gone.map_or(Moment::MAX, |gone| gone.saturating_add(FORCED_HOLD));
        (self.node.is_some() && !self.is_terminal() && until > now).then_some(until)
    }

    /// See [`Self::holds_until`].
    pub fn holds(&self, now: Moment) -> bool {
        self.holds_until(now).is_some()
    }

    /// It was deleted before kubelet took it up. It keeps cores that Flux has given its gang, because a container may be starting, but
    /// the bridge asks for no new ones: anybody can go on creating such pods and deleting them by force.
    pub fn is_gone_before_it_began(&self) -> bool {
        self.gone.is_some() && !self.is_taken_up
    }

    /// Somebody has deleted it, and it may be there for as long as its grace lasts, or its node does not answer.
    pub fn is_deleting(&self) -> bool {
        self.to_end_by.is_some()
    }

    /// It is not about to end.
    pub fn stays(&self) -> bool {
        !self.is_deleting() && self.gone.is_none() && !self.is_terminal()
    }

    /// It can be bound, now or once its scheduling gates are removed.
    pub fn waits(&self) -> bool {
        self.is_bridged && self.node.is_none() && self.stays()
    }

    /// It can be bound now.
    pub fn is_ready_to_bind(&self) -> bool {
        self.waits() && self.plan.as_ref().is_some_and(|plan| !plan.is_gated)
    }
}

impl Hints {
    /// The PodGroups that it names, with the kind of gang that each makes of its pods. The first counts.
    pub fn pod_groups(&self) -> impl Iterator<Item = (GangKind, &String)> {
        let groups = [(GangKind::PodGroup, &self.pod_group), (GangKind::Coscheduling, &self.coscheduling)];
        groups.into_iter().filter_map(|(kind, name)| Some((kind, name.as_ref()?)))
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        let sized = [&self.annotated, &self.fluence, &self.leader_worker_set]
            .into_iter()
            .flatten()
            .map(|(name, _)| name.as_str());
        sized.chain(self.pod_groups().map(|(_, name)| name.as_str()))
    }
}

fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

/// kubelet refuses a pod by failing it without a container's status, or with containers that never ran.
fn any_container_ran(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let own = status.and_then(|status| status.container_statuses.as_ref());
    let init = status.and_then(|status| status.init_container_statuses.as_ref());
    let mut states = own.into_iter().chain(init).flatten().filter_map(|status| status.state.as_ref());
    states.any(|state| state.running.is_some() || state.terminated.is_some())
}

/// The names of the claims that the pod mounts, generic ephemeral volumes among them. Any number of volumes may be of one claim.
fn claims(spec: &PodSpec, pod: &str) -> BTreeSet<String> {
    let volumes = spec.volumes.iter().flatten();
    let claim = |volume: &k8s_openapi::api::core::v1::Volume| match &volume.persistent_volume_claim {
        Some(claim) => Some(claim.claim_name.clone()),
        None => volume.ephemeral.as_ref().map(|_| format!("{pod}-{}", volume.name)),
    };
    volumes.filter_map(claim).collect()
}
