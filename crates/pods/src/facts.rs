//! What pods refer to, as the effect layer has looked it up.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::NodeSelector;

use crate::{
    pod::PodView,
    record::GangKind,
    time::{Millis, Moment, SECOND},
};

/// What pods refer to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Facts {
    /// The Jobs that own bridged pods, and those that the bridge has suspended, by uid.
    pub jobs: BTreeMap<String, KubeJob>,
    /// The number of pods that a PodGroup needs at once (minCount, minMember); None if it has no such number. By kind of
    /// gang, namespace and name.
    pub pod_groups: BTreeMap<(GangKind, String, String), Option<u32>>,
    /// The PodGroups that the bridge may not read.
    pub forbidden_groups: BTreeSet<(GangKind, String, String)>,
    /// The JobSets of all Jobs.
    pub job_sets: BTreeMap<JobSetId, JobSet>,
    /// Volume claims that bridged pods mount, by namespace and name.
    pub claims: BTreeMap<(String, String), VolumeClaim>,
}

impl Facts {
    /// The Job that owns `pod`. A user can write any uid into a pod: a Job of another namespace or name owns nothing of it.
    pub fn job_of(&self, pod: &PodView) -> Option<&KubeJob> {
        let owner = pod.owner.as_ref().filter(|owner| owner.is_job)?;
        self.jobs.get(&owner.uid).filter(|job| job.namespace == pod.namespace && job.name == owner.name)
    }
}

/// A Job of Kubernetes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubeJob {
    /// metadata.namespace
    pub namespace: String,
    /// metadata.name
    pub name: String,
    /// metadata.uid
    pub uid: String,
    /// spec.completionMode is Indexed.
    pub is_indexed: bool,
    /// spec.completions
    pub completions: Option<u32>,
    /// spec.parallelism
    pub parallelism: u32,
    /// status.succeeded
    pub succeeded: u32,
    /// spec.activeDeadlineSeconds
    pub seconds: Option<u64>,
    /// spec.suspend
    pub is_suspended: bool,
    /// [`ANNOTATION_SUSPENDED`].
    pub suspended_for: Option<SuspendReason>,
    /// status.startTime: when the Job was last started or resumed. None while it is suspended.
    pub began: Option<Moment>,
    /// Its pods are for Flux, and belong to no gang by annotations or labels of their own.
    pub joins_job_set: bool,
    /// The JobSet that owns it.
    pub job_set: Option<OfJobSet>,
}

/// What a JobSet (jobset.x-k8s.io) writes into its Jobs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OfJobSet {
    /// Name of the owner.
    pub name: String,
    /// uid of the owner.
    pub uid: String,
    /// Label `restart-attempt`: a JobSet that restarts makes its Jobs again. Empty without the label.
    pub attempt: String,
    /// Label `global-replicas`: the number of its Jobs. 0 without the label: then its Jobs are gangs by themselves.
    pub jobs: u32,
}

/// A JobSet that starts its Jobs at once has begun all of them within this time. One that starts them in some order makes or resumes the next one
/// only when the one before runs, so its Jobs can be no gang.
pub const BEGUN_AT_ONCE: Millis = 10 * SECOND;

/// Namespace, uid and attempt of a JobSet.
pub type JobSetId = (String, String, String);

/// What the Jobs of a JobSet need together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobSet {
    /// How many of its Jobs have begun.
    pub begun: u32,
    /// When the first and the last of these did; None if none has.
    pub between: Option<(Moment, Moment)>,
    /// The number of pods that they still need; None if one of them does not run all its pods at once, so that they are no gang.
    pub needed: Option<u32>,
}

/// The JobSets of `jobs`.
pub fn job_sets<'a>(jobs: impl IntoIterator<Item = &'a KubeJob>) -> BTreeMap<JobSetId, JobSet> {
    let mut sets: BTreeMap<JobSetId, JobSet> = BTreeMap::new();
    for job in jobs {
        let Some(id) = job.job_set_id() else { continue };
        let set = sets.entry(id).or_insert(JobSet { begun: 0, between: None, needed: Some(0) });
        if let Some(began) = job.began {
            set.begun = set.begun.saturating_add(1);
            set.between = Some(set.between.map_or((began, began), |(first, last)| (first.min(began), last.max(began))));
        }
        if job.joins_job_set {
            set.needed = set.needed.zip(job.pods_at_once()).map(|(sum, needed)| sum.saturating_add(needed));
        }
    }
    sets
}

/// Annotation on a Job that the bridge has suspended: [`SuspendReason::word`].
pub const ANNOTATION_SUSPENDED: &str = "distribute.flux-framework.org/suspended";

/// Why the bridge has suspended a Job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SuspendReason {
    /// Its gang could not be completed. It is resumed once its pods are gone.
    Incomplete,
    /// Its gang made way for another one. It is resumed once its pods are gone.
    Preempted,
    /// Somebody has cancelled its Flux job. It stays suspended until somebody resumes it.
    Canceled,
}

impl SuspendReason {
    /// The annotation's value.
    pub fn word(self) -> &'static str {
        match self {
            Self::Incomplete => "Incomplete",
            Self::Preempted => "Preempted",
            Self::Canceled => "Canceled",
        }
    }

    /// Reads the annotation's value.
    pub fn read(word: &str) -> Option<Self> {
        [Self::Incomplete, Self::Preempted, Self::Canceled].into_iter().find(|reason| reason.word() == word)
    }
}

impl KubeJob {
    /// The bridge must remove its annotation: it has suspended the Job and is to resume it, or somebody else has resumed the Job. Otherwise the
    /// bridge would resume the Job when that person suspends it again.
    pub fn has_annotation_to_remove(&self) -> bool {
        match self.suspended_for {
            Some(SuspendReason::Incomplete | SuspendReason::Preempted) => true,
            Some(SuspendReason::Canceled) => !self.is_suspended,
            None => false,
        }
    }

    /// The number of pods that the Job runs at a time by now.
    pub fn pods_at_a_time(&self) -> u32 {
        let left = self.completions.map(|completions| completions.saturating_sub(self.succeeded));
        self.parallelism.min(left.unwrap_or(u32::MAX))
    }

    /// The number of pods that the Job still needs, if they are a gang: an Indexed Job that runs all of them at once.
    pub fn gang_size(&self) -> Option<u32> {
        self.pods_at_once().filter(|_| self.completions > Some(1))
    }

    /// The number of pods that the Job still needs, if it is an Indexed Job that runs all of them at once.
    fn pods_at_once(&self) -> Option<u32> {
        let completions = self.completions?;
        (self.is_indexed && completions == self.parallelism).then(|| completions.saturating_sub(self.succeeded))
    }

    /// Its JobSet.
    pub fn job_set_id(&self) -> Option<JobSetId> {
        let set = self.job_set.as_ref()?;
        Some((self.namespace.clone(), set.uid.clone(), set.attempt.clone()))
    }
}

/// A volume claim.
#[derive(Debug, Clone, PartialEq)]
pub enum VolumeClaim {
    /// It has a volume, which is where `affinity` says; anywhere if that is None.
    Bound {
        /// The volume's spec.nodeAffinity.required
        affinity: Option<NodeSelector>,
    },
    /// It gets a volume when a pod that mounts it has been given a node.
    WaitsForFirstConsumer,
    /// It has no volume yet.
    Unbound,
}
