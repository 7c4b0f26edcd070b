//! What the bridge wants done. The result of each action comes back in the next world, and nowhere else.

use std::collections::BTreeSet;

use api::{IdSet, Rank};
use broker::job_id::JobId;

use crate::{
    facts::{KubeJob, SuspendReason},
    jobspec::JobRequest,
    pod::PodView,
    record::{GangId, PodRecord},
    requests::Size,
    shadow::ShadowRequest,
};

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Submit a job. The journal shows it.
    Submit(Box<JobRequest>),
    /// Cancel a job with a note that begins with [`crate::jobs::OUR_NOTE`], and submit another one for the same pods. The journal
    /// shows both.
    Resubmit {
        /// The job.
        job: JobId,
        /// The other one.
        request: Box<JobRequest>,
    },
    /// Cancel a job. The journal shows its end.
    Cancel {
        /// The job.
        job: JobId,
        /// Its gang.
        gang: GangId,
        /// Note of the cancel. It begins with [`crate::jobs::OUR_NOTE`].
        note: String,
    },
    /// End a job that holds resources. The journal shows its end.
    Finish {
        /// The job.
        job: JobId,
        /// Its gang.
        gang: GangId,
        /// Wait status (wait(2)).
        status: i32,
    },
    /// Bind a pod and record its job, in one request with the uid as its precondition. The pod shows it. An answer 409 says
    /// nothing: the pod has to be read.
    Bind(Box<Binding>),
    /// Tell people who look at a pod. The condition shows in the pod.
    Tell(Box<Tell>),
    /// Evict pods (subresource eviction). The pods show it.
    Evict {
        /// Their gang.
        gang: GangId,
        /// The pods.
        pods: Vec<PodRef>,
    },
    /// Make gangs begin again, so that another one gets their cores: nothing of them goes unless the API server says first that all may
    /// (PodDisruptionBudget). The pods show it, or [`crate::world::World::protected`] does.
    Preempt {
        /// The gang that gets their cores.
        gang: GangId,
        /// Those that go.
        victims: Vec<Victim>,
    },
    /// Suspend a Job of Kubernetes, and annotate it with the reason. The Job shows it.
    SuspendJob {
        /// The gang.
        gang: GangId,
        /// The Job.
        job: KubeJobRef,
        /// Why.
        reason: SuspendReason,
    },
    /// Resume a Job for which [`KubeJob::has_annotation_to_remove`], and remove the annotation. The Job shows it.
    ResumeJob(KubeJobRef),
    /// Change shadow jobs. The journal shows it.
    Shadow(ShadowStep),
    /// Change the placeholder pod of a node. The pod shows it.
    Placeholder(PlaceholderStep),
    /// Stop the queues, with this reason.
    StopQueues(String),
    /// Write the broker's name into Lease `flux-bridge`, then start the queues for whose reason [`crate::world::Queues::is_ours`].
    StartQueues,
}

/// What is to be done with shadow jobs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShadowStep {
    /// The jobs to submit: before others are cancelled, so that no other job gets the cores in between.
    pub submit: Vec<ShadowRequest>,
    /// The jobs to cancel, each with a note that begins with [`crate::jobs::OUR_NOTE`].
    pub cancel: Vec<JobId>,
    /// Why, for that note.
    pub why: &'static str,
    /// The ranks of all these jobs.
    pub ranks: BTreeSet<Rank>,
}

impl ShadowStep {
    /// It asks for cores of several ranks by one job: what one of them can't give keeps the others from giving theirs.
    pub fn asks_for_many(&self) -> bool {
        self.for_many().next().is_some()
    }

    /// Cores of other ranks come free for a job that one rank which gets no jobs would keep waiting: others would get them.
    pub fn needs_all_ranks(&self) -> bool {
        !self.cancel.is_empty() && self.asks_for_many()
    }

    /// The ranks for which it asks by one job with others, and that are not `available`.
    pub fn unavailable(&self, available: &IdSet) -> Vec<Rank> {
        let ranks = self.for_many().flat_map(|request| request.nodes.keys());
        ranks.copied().filter(|rank| !available.contains(*rank)).collect()
    }

    fn for_many(&self) -> impl Iterator<Item = &ShadowRequest> {
        self.submit.iter().filter(|request| request.nodes.len() > 1)
    }
}

/// What is to be done with the placeholder pod of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlaceholderStep {
    /// Create it.
    Make {
        /// The Node, whose name the pod gets.
        node: String,
        /// Its uid: the Node owns the pod.
        node_uid: String,
        /// What it asks for.
        size: Size,
    },
    /// Change what it asks for (subresource resize).
    Resize {
        /// The pod.
        pod: PodRef,
        /// What it is to ask for.
        size: Size,
    },
    /// Delete it.
    Remove {
        /// The pod.
        pod: PodRef,
    },
}

impl PlaceholderStep {
    /// The name of its node.
    pub fn node(&self) -> &str {
        match self {
            Self::Make { node, .. } => node,
            Self::Resize { pod, .. } | Self::Remove { pod } => &pod.name,
        }
    }
}

/// A gang that makes way for another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Victim {
    /// The gang.
    pub gang: GangId,
    /// Its pods.
    pub pods: Vec<PodRef>,
    /// The Job that is all of the gang: it is suspended for a while. Without it, the pods are evicted.
    pub job: Option<KubeJobRef>,
}

/// A pod to bind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// Its gang.
    pub gang: GangId,
    /// The pod.
    pub pod: PodRef,
    /// The Node.
    pub node: String,
    /// What its annotation is to say.
    pub record: PodRecord,
}

/// A pod by name, and by uid as precondition.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

impl From<&PodView> for PodRef {
    fn from(pod: &PodView) -> Self {
        Self { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() }
    }
}

/// A Job of Kubernetes by name, and by uid as precondition.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct KubeJobRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

impl From<&KubeJob> for KubeJobRef {
    fn from(job: &KubeJob) -> Self {
        Self { namespace: job.namespace.clone(), name: job.name.clone(), uid: job.uid.clone() }
    }
}

/// Words for people who look at a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tell {
    /// The pod.
    pub pod: PodRef,
    /// What about.
    pub reason: Reason,
    /// A sentence.
    pub message: String,
}

/// What a [`Tell`] is about: the reason of condition and Event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// No node of the instance could ever take it, or it has waited for [`crate::decide::AUTOSCALE_AFTER`]. Autoscalers act on
    /// this word.
    Unschedulable,
    /// It waits in Flux's queue.
    Queued,
    /// Its gang is not complete.
    Incomplete,
    /// Something about it has to be changed.
    Refused,
    /// Its namespace has not opted in.
    NotOptedIn,
    /// It holds more cores than it asks for, because its gang's slots are equal.
    Padded,
    /// kubelet has refused it, or does not take it up.
    NotStarted,
    /// Its gang makes way for another one.
    Preempted,
}

impl Reason {
    /// True if the bridge also writes condition PodScheduled=False with this reason; an Event it always publishes. A bound pod keeps
    /// PodScheduled=True, and in a namespace that has not opted in, the bridge can write no condition.
    pub fn is_condition(self) -> bool {
        !matches!(self, Self::NotOptedIn | Self::Padded | Self::NotStarted | Self::Preempted)
    }

    /// The word in Kubernetes.
    pub fn word(self) -> &'static str {
        match self {
            Self::Unschedulable => "Unschedulable",
            Self::Queued => "Queued",
            Self::Incomplete => "Incomplete",
            Self::Refused => "Refused",
            Self::NotOptedIn => "NotOptedIn",
            Self::Padded => "Padded",
            Self::NotStarted => "NotStarted",
            Self::Preempted => "Preempted",
        }
    }
}

impl Action {
    /// The gang that is left alone for a while if this is refused. None for what ends a job or tells people: that is tried again
    /// soon.
    pub fn paused_by_refusal(&self) -> Option<&GangId> {
        match self {
            Self::Submit(request) | Self::Resubmit { request, .. } => Some(&request.record.gang),
            Self::Bind(binding) => Some(&binding.gang),
            Self::Evict { gang, .. } | Self::SuspendJob { gang, .. } => Some(gang),
            Self::Cancel { .. }
            | Self::Finish { .. }
            | Self::Preempt { .. }
            | Self::Tell(_)
            | Self::ResumeJob(_)
            | Self::Shadow(_)
            | Self::StopQueues(_)
            | Self::Placeholder(_)
            | Self::StartQueues => None,
        }
    }

    /// The gangs whose jobs or pods it changes. Binding one pod and telling one do not keep the rest of the gang from acting.
    pub fn occupies(&self) -> Vec<&GangId> {
        match self {
            Self::Submit(request) | Self::Resubmit { request, .. } => vec![&request.record.gang],
            Self::Cancel { gang, .. }
            | Self::Finish { gang, .. }
            | Self::Evict { gang, .. }
            | Self::SuspendJob { gang, .. } => vec![gang],
            Self::Preempt { victims, .. } => victims.iter().map(|victim| &victim.gang).collect(),
            Self::Bind(_)
            | Self::Tell(_)
            | Self::ResumeJob(_)
            | Self::Shadow(_)
            | Self::StopQueues(_)
            | Self::Placeholder(_)
            | Self::StartQueues => Vec::new(),
        }
    }
}
