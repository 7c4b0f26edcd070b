//! Which pods are a gang.
//!
//! The first of these counts: our annotations; a PodGroup; Fluence's labels; a group of a LeaderWorkerSet; a JobSet whose Jobs run all their pods
//! at once; an Indexed Job that does.
//! Every other pod is a gang of one. So is each pod beyond a gang's size: a gang grows by one-slot jobs.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    facts::{BEGUN_AT_ONCE, Facts, KubeJob, VolumeClaim},
    pod::PodView,
    record::{GangId, GangKind, is_label_like},
    time::Moment,
    unsupported::Unsupported,
};

/// A gang: pods that run at the same time, or not at all.
#[derive(Debug, Clone, PartialEq)]
pub struct Gang<'a> {
    /// Its name.
    pub id: GangId,
    /// The number of pods that must be bound at the same time; at least one.
    pub size: u32,
    /// Its pods whose cores are held, and as many of those that can be bound as are missing.
    pub members: Vec<&'a PodView>,
    /// The Job that owns it.
    pub job: Option<&'a KubeJob>,
    /// What keeps those of its pods that are not bound from being so.
    pub problem: Option<Problem>,
}

/// Why a gang's pods are not bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Too few of its pods can be bound.
    #[error("{exist} of {size} pods of gang {gang} exist")]
    Incomplete {
        /// The gang.
        gang: GangId,
        /// How many there are.
        exist: u32,
        /// How many are needed.
        size: u32,
    },
    /// See `spec.pods.maxGang`.
    #[error("gang {gang} has {size} pods, and spec.pods.maxGang of the FluxInstance allows {most}")]
    TooLarge {
        /// The gang.
        gang: GangId,
        /// Its size.
        size: u32,
        /// Most pods that a gang may have.
        most: u32,
    },
    /// The size is no number.
    #[error("the size of gang {gang} is {size:?}: write a number of pods")]
    NoSize {
        /// The gang.
        gang: GangId,
        /// What is written.
        size: String,
    },
    /// The name is none.
    #[error("{0:?} is no name of a gang: write up to 63 letters, digits, dots, dashes and underscores")]
    BadName(String),
    /// The object that has the size is not there, or not yet.
    #[error("{kind} {name} was not found", name = .gang.name)]
    NotFound {
        /// PodGroup or Job.
        kind: &'static str,
        /// The gang.
        gang: GangId,
    },
    /// Whether there is such a PodGroup can't be read.
    #[error("the bridge may not read PodGroup {name}: an administrator has to apply deploy/pods.yaml of this version", name = .0.name)]
    Forbidden(GangId),
    /// Not all Jobs of a JobSet have begun, or not yet.
    #[error("{begun} of {jobs} Jobs of JobSet {name} have begun", name = .gang.name)]
    JobsMissing {
        /// The gang.
        gang: GangId,
        /// How many have.
        begun: u32,
        /// How many there are to be.
        jobs: u32,
        /// Until when they are waited for.
        until: Moment,
    },
    /// A claim is missing or has no volume.
    #[error("the volume claim {0} has no volume yet")]
    NoVolume(String),
    /// A field can't be honoured.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The bridge has no right to write to pods there.
    #[error(
        "namespace {0} has not opted in to scheduler flux: an administrator does that with a RoleBinding to ClusterRole \
         flux-bridge"
    )]
    NotOptedIn(String),
}

impl Problem {
    /// True if it is with the pods themselves, and not with what they refer to, which may only not be known yet.
    pub fn is_of_pods(&self) -> bool {
        !matches!(
            self,
            Self::NotFound { .. }
                | Self::Forbidden(_)
                | Self::JobsMissing { .. }
                | Self::NoVolume(_)
                | Self::NotOptedIn(_)
        )
    }
}

/// What is known beside the pods.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// What the pods refer to.
    pub facts: &'a Facts,
    /// Namespaces in which the bridge may write.
    pub namespaces: &'a BTreeSet<String>,
    /// Those of which that is not known.
    pub doubtful: &'a BTreeSet<String>,
    /// `spec.pods.maxGang`
    pub max_gang: u32,
    /// The pods by uid that an active job lists, with its gang. If there are several such jobs, a gang of one.
    pub listed: &'a BTreeMap<&'a str, &'a GangId>,
}

impl Known<'_> {
    /// True if another scheduler, or somebody, has bound `pod`, or is to do so: it is counted, and gets no cores of Flux's. What the
    /// bridge binds, it records with the binding, and it binds in namespaces that have opted in.
    pub fn is_foreign(&self, pod: &PodView) -> bool {
        let is_ours = || self.listed.contains_key(pod.uid.as_str()) || self.may_have_bound(pod);
        !pod.is_bridged || (pod.node.is_some() && !is_ours())
    }

    fn may_have_bound(&self, pod: &PodView) -> bool {
        let may_have_opted_in = self.namespaces.contains(&pod.namespace) || self.doubtful.contains(&pod.namespace);
        pod.record.is_some() && may_have_opted_in
    }
}

/// The gangs of the bridged pods whose cores are held or that can be bound, the oldest first: in this order, their jobs are
/// submitted.
pub fn gangs<'a>(pods: impl IntoIterator<Item = &'a PodView>, known: Known<'a>, now: Moment) -> Vec<Gang<'a>> {
    let mut groups: BTreeMap<GangId, Group<'a>> = BTreeMap::new();
    let pods = pods.into_iter().filter(|pod| !known.is_foreign(pod) && (pod.holds(now) || pod.is_ready_to_bind()));
    let pods: Vec<_> = pods.collect();
    let running_as = running_as(&pods, known);
    let slots = slots(known);
    let size_of = |gang: &GangId| Ok(slots.get(gang).copied().unwrap_or(1));
    for pod in pods {
        let job = known.facts.job_of(pod);
        let (mut id, mut size) = of_pod(pod, job, known.facts, now);
        // What a pod runs as does not change when its Job or its labels do. Nor does a pod by itself join a gang.
        let listed = known.listed.get(pod.uid.as_str()).copied().filter(|listed| **listed != id);
        if let Some(listed) = listed.filter(|listed| pod.node.is_some() || listed.kind == GangKind::Pod) {
            (id, size) = (listed.clone(), size_of(listed));
        }
        // What its siblings run as, too, so a pod that replaces one does not wait for them to become another gang.
        let of_siblings = job.and_then(|job| running_as.get(job.uid.as_str())).filter(|_| is_of_job(&id));
        if let Some(gang) = of_siblings.filter(|gang| pod.node.is_none() && ***gang != id) {
            (id, size) = ((*gang).clone(), size_of(gang));
        }
        // A JobSet resumes its Jobs by itself, so the bridge suspends none of them.
        let job = job.filter(|_| id.kind != GangKind::JobSet);
        let group = groups.entry(id).or_insert_with(|| Group { size: Ok(1), members: Vec::new(), job });
        // Pods that disagree about their number are a gang of the largest.
        match (&group.size, size) {
            (Ok(largest), Ok(size)) => group.size = Ok(size.max(*largest)),
            (Ok(_), error) => group.size = error,
            (Err(_), _) => {}
        }
        group.members.push(pod);
    }
    let mut all: Vec<_> = groups.into_iter().flat_map(|(id, group)| group.split(id, known)).collect();
    all.sort_by(|one, other| (one.since(), &one.id).cmp(&(other.since(), &other.id)));
    all
}

fn is_of_job(gang: &GangId) -> bool {
    matches!(gang.kind, GangKind::Job | GangKind::JobSet)
}

/// By the uid of a Job: the gang that pods of it run as. A user can write the uid of another namespace's Job into a pod: that pod's gang
/// must not become the gang of that Job's pods.
fn running_as<'a>(pods: &[&'a PodView], known: Known<'a>) -> BTreeMap<&'a str, &'a GangId> {
    let running = pods.iter().filter(|pod| pod.node.is_some() && pod.stays());
    let of_pod = |pod: &&'a PodView| {
        let job = known.facts.job_of(pod)?;
        let gang = *known.listed.get(pod.uid.as_str())?;
        (is_of_job(gang) && gang.namespace == pod.namespace).then_some((job.uid.as_str(), gang))
    };
    running.filter_map(of_pod).collect()
}

/// How many pods jobs list for each gang: a pod that replaces one of them takes its slot.
fn slots(known: Known<'_>) -> BTreeMap<&GangId, u32> {
    let mut slots = BTreeMap::new();
    known.listed.values().for_each(|gang| *slots.entry(*gang).or_default() += 1);
    slots
}

struct Group<'a> {
    size: Result<u32, Problem>,
    members: Vec<&'a PodView>,
    job: Option<&'a KubeJob>,
}

impl<'a> Group<'a> {
    /// The gang, and a gang of one for each pod beyond its size.
    fn split(mut self, id: GangId, known: Known<'a>) -> Vec<Gang<'a>> {
        self.members.sort_by(|one, other| {
            let rank = |pod: &PodView| (pod.node.is_none(), !known.listed.contains_key(pod.uid.as_str()), pod.index);
            rank(one).cmp(&rank(other)).then_with(|| (one.created, &one.name).cmp(&(other.created, &other.name)))
        });
        let size = self.size.as_ref().map_or(u32::MAX, |size| *size);
        let (mut members, mut beyond, mut staying) = (Vec::new(), Vec::new(), 0);
        for pod in self.members {
            match pod.node.is_none() && staying >= size {
                true => beyond.push(pod),
                false => {
                    staying += u32::from(pod.stays());
                    members.push(pod);
                }
            }
        }
        let gang = Gang { id, size, members, job: self.job, problem: self.size.err() };
        let beyond = beyond.into_iter().map(|pod| Gang {
            id: single(pod),
            size: 1,
            members: vec![pod],
            job: self.job,
            problem: None,
        });
        std::iter::once(gang).chain(beyond).map(|gang| gang.examined(known)).collect()
    }
}

impl<'a> Gang<'a> {
    /// Its pods that can be bound, in order.
    pub fn waiting(&self) -> impl Iterator<Item = &'a PodView> + '_ {
        self.members.iter().copied().filter(|pod| pod.waits())
    }

    /// Its pods whose cores must be held.
    pub fn holding(&self, now: Moment) -> impl Iterator<Item = &'a PodView> + '_ {
        self.members.iter().copied().filter(move |pod| pod.holds(now))
    }

    /// True if one of its pods is bound and is to stay. If all that are bound are about to end, the others are a gang of
    /// their own.
    pub fn is_started(&self) -> bool {
        self.members.iter().any(|pod| pod.node.is_some() && pod.stays())
    }

    /// True if its pods must be on different nodes: they say so, or they take ports of the node.
    pub fn spreads(&self) -> bool {
        self.is_apart() || (self.size > 1 && self.waiting().any(|pod| !pod.requests.ports.is_empty()))
    }

    fn is_apart(&self) -> bool {
        self.waiting().any(|pod| pod.plan.as_ref().is_some_and(|plan| plan.spreads == Ok(true)))
    }

    /// When the last of its pods was created: the gang is as old as that.
    pub fn since(&self) -> Moment {
        self.members.iter().map(|pod| pod.created).max().unwrap_or(0)
    }

    /// Finds what keeps its pods from being bound.
    fn examined(mut self, known: Known<'a>) -> Self {
        if self.waiting().next().is_some() {
            // Nothing else is known of a namespace that has not opted in, and nothing can be written there.
            if !known.namespaces.contains(&self.id.namespace) {
                self.problem = Some(Problem::NotOptedIn(self.id.namespace.clone()));
            } else if self.problem.is_none() {
                self.problem = self.find_problem(known);
            }
        }
        self
    }

    fn find_problem(&self, known: Known<'a>) -> Option<Problem> {
        if self.size > known.max_gang {
            return Some(Problem::TooLarge { gang: self.id.clone(), size: self.size, most: known.max_gang });
        }
        let plans = || self.waiting().filter_map(|pod| Some((pod, pod.plan.as_deref()?)));
        if let Some(unsupported) = plans().find_map(|(_, plan)| plan.spreads.as_ref().err()) {
            return Some(unsupported.clone().into());
        }
        if self.is_apart() && self.id.kind == GangKind::Pod {
            return Some(Unsupported::PodAntiAffinity.into());
        }
        for claim in plans().flat_map(|(_, plan)| &plan.claims) {
            match known.facts.claims.get(&(self.id.namespace.clone(), claim.clone())) {
                Some(VolumeClaim::Bound { .. }) => {}
                Some(VolumeClaim::WaitsForFirstConsumer) => {
                    return Some(Unsupported::WaitForFirstConsumer(claim.clone()).into());
                }
                Some(VolumeClaim::Unbound) | None => return Some(Problem::NoVolume(claim.clone())),
            }
        }
        let staying = self.members.iter().filter(|pod| pod.stays()).count();
        let exist = u32::try_from(staying).unwrap_or(u32::MAX);
        let is_whole = exist >= self.size || self.is_started();
        (!is_whole).then(|| Problem::Incomplete { gang: self.id.clone(), exist, size: self.size })
    }
}

/// The gang of one that `pod` is.
fn single(pod: &PodView) -> GangId {
    GangId { kind: GangKind::Pod, namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() }
}

/// The gang that `pod` belongs to, and its size. `job` is the Job that owns the pod.
fn of_pod(pod: &PodView, job: Option<&KubeJob>, facts: &Facts, now: Moment) -> (GangId, Result<u32, Problem>) {
    let id =
        |kind, name: &str| GangId { kind, namespace: pod.namespace.clone(), name: name.to_owned(), uid: String::new() };
    let sized = |kind, (name, size): &(String, String)| {
        if !is_label_like(name) {
            return (single(pod), Err(Problem::BadName(name.clone())));
        }
        let gang = id(kind, name);
        match size.parse() {
            Ok(0) | Err(_) => (gang.clone(), Err(Problem::NoSize { gang, size: size.clone() })),
            Ok(1) => (single(pod), Ok(1)),
            Ok(size) => (gang, Ok(size)),
        }
    };
    if let Some(annotated) = &pod.hints.annotated {
        return sized(GangKind::Annotated, annotated);
    }
    for (kind, name) in pod.hints.pod_groups() {
        let group = (kind, pod.namespace.clone(), name.clone());
        match facts.pod_groups.get(&group) {
            Some(Some(size)) if *size > 1 => return (id(kind, name), Ok(*size)),
            Some(_) => return (single(pod), Ok(1)),
            // Fluence names its groups with coscheduling's label, and needs no PodGroup.
            None if kind == GangKind::Coscheduling && pod.hints.fluence.is_some() => {}
            None if facts.forbidden_groups.contains(&group) => {
                return (id(kind, name), Err(Problem::Forbidden(id(kind, name))));
            }
            None => return (id(kind, name), Err(Problem::NotFound { kind: "PodGroup", gang: id(kind, name) })),
        }
    }
    if let Some(fluence) = &pod.hints.fluence {
        return sized(GangKind::Fluence, fluence);
    }
    if let Some(group) = &pod.hints.leader_worker_set {
        return sized(GangKind::LeaderWorkerSet, group);
    }
    let Some(owner) = pod.owner.as_ref().filter(|owner| owner.is_job) else { return (single(pod), Ok(1)) };
    if let Some(of_set) = job.and_then(|job| of_job_set(job, facts, now, id)) {
        return of_set;
    }
    let gang = GangId { uid: owner.uid.clone(), ..id(GangKind::Job, &owner.name) };
    match job.map(KubeJob::gang_size) {
        Some(Some(size)) => (gang, Ok(size.max(1))),
        Some(None) => (single(pod), Ok(1)),
        // A Job's first pods may be seen before the Job itself.
        None => (gang.clone(), Err(Problem::NotFound { kind: "Job", gang })),
    }
}

/// The gang that all Jobs of a JobSet are, if `job` is one of them, they began at once, and each runs all its pods at once. One pod alone is
/// none.
fn of_job_set(
    job: &KubeJob,
    facts: &Facts,
    now: Moment,
    id: impl Fn(GangKind, &str) -> GangId,
) -> Option<(GangId, Result<u32, Problem>)> {
    let (of, set) = (job.job_set.as_ref().filter(|_| job.joins_job_set)?, facts.job_sets.get(&job.job_set_id()?)?);
    let needed = set.needed.filter(|_| of.jobs > 0)?;
    let is_whole = set.begun >= of.jobs;
    // A pod may be seen before its Job says when it began.
    let (first, last) = set.between.unwrap_or((now, now));
    let last = if is_whole { last } else { now };
    if last.saturating_sub(first) > BEGUN_AT_ONCE {
        return None;
    }
    if !is_label_like(&of.name) || !is_label_like(&of.uid) || !is_label_like(&of.attempt) || (of.jobs, needed) == (1, 1)
    {
        return None;
    }
    // A JobSet that restarts is another gang: nothing of it runs on.
    let gang = GangId { uid: format!("{}.{}", of.uid, of.attempt), ..id(GangKind::JobSet, &of.name) };
    let size = match is_whole {
        false => Err(Problem::JobsMissing {
            gang: gang.clone(),
            begun: set.begun,
            jobs: of.jobs,
            until: first.saturating_add(BEGUN_AT_ONCE + 1),
        }),
        true => Ok(needed.max(1)),
    };
    Some((gang, size))
}
