//! One round: what is known, arranged for the rules, and what they want done.

use std::collections::{BTreeMap, BTreeSet};

use api::Rank;

use super::hold::{GangCores, Holdings};
use crate::{
    action::Action,
    gangs::{Gang, Known, gangs},
    jobs::{GangJob, HeldCores, Job, JobState, Jobs, OUR_NOTE},
    jobspec::JobRequest,
    placeholder::Placeholder,
    pod::{FORCED_HOLD, Phase, PodView},
    record::{GangId, GangKind, JobRecord},
    target::Target,
    time::Moment,
    usage::UsageByNode,
    world::{Broker, Pods, Queues, World},
};

pub(super) struct Round<'a> {
    pub world: &'a World,
    pub broker: &'a Broker,
    pub jobs: &'a Jobs,
    pods: &'a Pods,
    pub now: Moment,
    /// The gangs of all pods that run or wait, with what the jobs of each hold for its pods.
    pub gangs: Vec<(Gang<'a>, Holdings<'a>)>,
    /// What is on the nodes, and what this round adds.
    pub usage: UsageByNode<'a>,
    /// Filled in by [`super::gang_cores`] once it is known which gangs can be pinned.
    pub gang_cores: BTreeMap<Rank, GangCores>,
    /// See [`Round::held_cores`].
    held_cores: BTreeMap<Rank, HeldCores>,
    /// The placeholder pod of each node that has one.
    pub placeholders: BTreeMap<&'a str, (&'a PodView, &'a Placeholder)>,
    /// The rank of each member's node.
    pub ranks: BTreeMap<&'a str, Rank>,
    /// The ranks of all targets.
    pub members: BTreeSet<Rank>,
    by_gang: BTreeMap<&'a GangId, Vec<(&'a Job, &'a GangJob)>>,
    /// See [`super::Memory::first_queued`].
    pub first_queued: BTreeMap<GangId, Moment>,
    busy: BTreeSet<&'a GangId>,
    pub actions: Vec<Action>,
    /// How many of the actions are messages.
    pub messages: usize,
    /// The next moment at which something changes by itself.
    pub wake: Option<Moment>,
    /// See [`super::Memory::started_since`].
    pub started_since: Option<Moment>,
}

/// The pods that are being bound, as they will be.
pub(super) fn being_bound(world: &World, pods: &Pods, now: Moment) -> Vec<PodView> {
    let binding = |action: &Action| match action {
        Action::Bind(binding) => {
            let pod = pods.by_uid.get(&binding.pod.uid).filter(|pod| pod.node.is_none())?;
            let (node, record) = (Some(binding.node.clone()), Some(binding.record.clone()));
            Some(PodView { node, record, bound: Some(now), plan: None, ..pod.clone() })
        }
        _ => None,
    };
    world.under_way.iter().filter_map(binding).collect()
}

/// See [`Known::listed`].
pub(super) fn listed(jobs: &Jobs) -> BTreeMap<&str, &GangId> {
    let mut listed = BTreeMap::new();
    for (_, gang_job) in jobs.of_gangs().filter(|(job, _)| job.is_active()) {
        let JobRecord { gang, members, .. } = &gang_job.record;
        for member in members {
            let listed = listed.entry(member.uid.as_str()).or_insert(gang);
            if gang.kind == GangKind::Pod {
                *listed = gang;
            }
        }
    }
    listed
}

fn placeholder(pod: &PodView) -> Option<(&str, (&PodView, &Placeholder))> {
    let (node, placeholder) = (pod.node.as_deref()?, pod.placeholder.as_ref()?);
    pod.gone.is_none().then_some((node, (pod, placeholder)))
}

impl<'a> Round<'a> {
    pub fn new(
        (world, broker, jobs, pods): (&'a World, &'a Broker, &'a Jobs, &'a Pods),
        bound: &'a [PodView],
        listed: &'a BTreeMap<&'a str, &'a GangId>,
        mut first_queued: BTreeMap<GangId, Moment>,
        now: Moment,
    ) -> Self {
        let overlaid: BTreeMap<&str, &PodView> = bound.iter().map(|pod| (pod.uid.as_str(), pod)).collect();
        let shown: Vec<&PodView> =
            pods.by_uid.iter().map(|(uid, pod)| overlaid.get(uid.as_str()).copied().unwrap_or(pod)).collect();
        let known = Known {
            facts: &world.facts,
            namespaces: &world.namespaces,
            doubtful: &world.doubtful,
            max_gang: world.settings.max_gang,
            listed,
        };
        let mut by_gang: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (job, gang_job) in jobs.of_gangs() {
            let record = &gang_job.record;
            by_gang.entry(&record.gang).or_default().push((job, gang_job));
            if job.is_active() {
                // Most gangs are known: none of their names is copied in each decision.
                match first_queued.get_mut(&record.gang) {
                    Some(first) => *first = record.queued.min(*first),
                    None => drop(first_queued.insert(record.gang.clone(), record.queued)),
                }
            }
        }
        let ranks = world.ranks.iter().map(|(node, rank)| (node.as_str(), *rank)).collect();
        // Placeholder pods stand for host jobs, whose cores count as held.
        let there = shown.iter().copied().filter(|pod| pod.may_be_there() && pod.placeholder.is_none());
        let gangs = gangs(shown.iter().copied(), known, now).into_iter().map(|gang| {
            let jobs = by_gang.get(&gang.id).map_or(&[][..], Vec::as_slice);
            let holdings = Holdings::of(&gang, jobs, &ranks, now);
            (gang, holdings)
        });
        let gangs = gangs.collect();
        Self {
            world,
            broker,
            jobs,
            pods,
            now,
            gangs,
            usage: UsageByNode::of(there, |pod| known.is_foreign(pod), now),
            gang_cores: BTreeMap::new(),
            placeholders: shown.iter().copied().filter_map(placeholder).collect(),
            held_cores: jobs.held_cores(),
            ranks,
            members: world.targets.keys().copied().collect(),
            by_gang,
            first_queued,
            busy: world.under_way.iter().flat_map(Action::occupies).collect(),
            actions: Vec::new(),
            messages: 0,
            wake: None,
            started_since: None,
        }
    }

    /// What is counted for a rank.
    pub fn gang_cores(&self, rank: Rank) -> GangCores {
        self.gang_cores.get(&rank).copied().unwrap_or_default()
    }

    /// How many cores of a rank jobs hold.
    pub fn held_cores(&self, rank: Rank) -> HeldCores {
        self.held_cores.get(&rank).copied().unwrap_or_default()
    }

    /// The most cores of a rank that Flux may still give to pods: all but those of bound pods, and of jobs that are for no gang.
    pub fn may_be_free(&self, target: &Target) -> u32 {
        let HeldCores { hosts, shadows, .. } = self.held_cores(target.rank);
        target.cores.saturating_sub(hosts.saturating_add(shadows)).saturating_sub(self.gang_cores(target.rank).cores)
    }

    /// The jobs of a gang, those that ended a short while ago among them.
    pub fn jobs_of(&self, gang: &GangId) -> Vec<(&'a Job, &'a GangJob)> {
        self.by_gang.get(gang).cloned().unwrap_or_default()
    }

    /// Since when `gang` has been in the queue; now if it has not been. Never before its last pod was created, and never in the future: the
    /// clock may have been wrong when it was written.
    pub fn queued_since(&self, gang: &Gang) -> Moment {
        self.first_queued.get(&gang.id).map_or(self.now, |first| self.now.min(*first)).max(gang.since())
    }

    /// All gangs that have a job.
    pub fn gangs_with_jobs(&self) -> Vec<&'a GangId> {
        self.by_gang.keys().copied().collect()
    }

    /// An earlier action on the gang has not been answered.
    pub fn is_busy(&self, gang: &GangId) -> bool {
        self.busy.contains(gang)
    }

    /// Sees to it that there is a round at `at`.
    pub fn wake_at(&mut self, at: Moment) {
        if at > self.now && at < Moment::MAX {
            self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
        }
    }

    /// Until when a pod that does not exist may run nevertheless: it may have been deleted by force before the pods were
    /// listed. None if the pod exists, or that is over.
    pub fn runs_unseen_until(&self, uid: &str) -> Option<Moment> {
        let until = self.pods.listed.saturating_add(FORCED_HOLD);
        (self.now < until && !self.pods.by_uid.contains_key(uid)).then_some(until)
    }

    /// True if a pod of `record` may run that does not exist.
    pub fn has_unseen(&mut self, record: &JobRecord) -> bool {
        let until = record.members.iter().find_map(|pod| self.runs_unseen_until(&pod.uid));
        until.inspect(|until| self.wake_at(*until)).is_some()
    }

    /// Ends a job that no pod needs, if that may be done now.
    pub fn end(&mut self, job: &Job, record: &JobRecord, why: &str) {
        // What ends while the scheduler is offline keeps its cores for ever.
        if self.broker.queues == Queues::Offline {
            return;
        }
        let gang = record.gang.clone();
        self.actions.push(match job.state {
            JobState::Pending => Action::Cancel { job: job.id, gang, note: format!("{OUR_NOTE}{why}") },
            _ => Action::Finish { job: job.id, gang, status: self.status(record) },
        });
    }

    /// Submits another job in the place of one, if that may be ended now. An administrator may have changed the urgency, so it stays.
    pub fn resubmit(&mut self, job: &Job, request: JobRequest) {
        if self.broker.queues != Queues::Offline {
            let request = JobRequest { urgency: job.urgency, ..request };
            self.actions.push(Action::Resubmit { job: job.id, request: Box::new(request) });
        }
    }

    /// The wait status of a job: 0 if all its pods succeeded, exit code 1 if one failed, else SIGTERM: they were deleted.
    fn status(&self, record: &JobRecord) -> i32 {
        let phases: Vec<_> =
            record.members.iter().map(|pod| self.pods.by_uid.get(&pod.uid).map(|pod| pod.phase)).collect();
        match phases {
            phases if phases.iter().all(|phase| *phase == Some(Phase::Succeeded)) => 0,
            phases if phases.contains(&Some(Phase::Failed)) => 256,
            _ => 15,
        }
    }
}
