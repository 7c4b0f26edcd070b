//! A cluster and a Flux that do what the bridge wants, and show it after a while.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use api::Rank;
use broker::{job_id::JobId, journal::JobEvents};
use serde_json::{Value, json};

use crate::{
    action::Action,
    allocation::Slot,
    constraint::Constraint,
    decide::{Decision, Memory, decide},
    fixture::{job_events, targets},
    jobs::{GangJob, JobClass, Jobs, REMEMBERED, classify},
    jobspec::Shape,
    pod::{FORCED_HOLD, Phase, PodView},
    record::GangId,
    requests::cores,
    shadow::Shadow,
    time::{Millis, Moment},
    world::{Broker, Pods, Queues, World},
};

/// When a test begins.
pub(super) const BEGIN: Moment = 1_800_000_000_000;

/// A job that Flux has.
pub(super) struct FluxJob {
    pub jobspec: Value,
    pub urgency: u8,
    pub slots: Option<Vec<Slot>>,
}

impl FluxJob {
    pub fn gang_job(&self) -> Option<Box<GangJob>> {
        match classify(&self.jobspec, true) {
            JobClass::Gang(job) => Some(job),
            JobClass::Host | JobClass::Shadow(_) => None,
        }
    }

    pub fn is_host_job(&self) -> bool {
        classify(&self.jobspec, true) == JobClass::Host
    }
}

pub(super) enum News {
    Job(JobEvents),
    Pod(Box<PodView>),
    Gone(String),
}

pub(super) struct Bed {
    /// What the bridge knows.
    pub seen: World,
    pub memory: Memory,
    pub now: Moment,
    /// The pods as they are.
    pub pods: BTreeMap<String, PodView>,
    /// Pods that were deleted by force while they ran, and until when they run on.
    pub ghosts: BTreeMap<String, (PodView, Moment)>,
    /// The jobs as they are.
    pub jobs: BTreeMap<JobId, FluxJob>,
    pub down: BTreeSet<Rank>,
    /// Flux gives none of their cores to anybody, and does not say so.
    pub closed: BTreeSet<Rank>,
    /// A pod that shrinks keeps what it had.
    pub kubelet_is_slow: bool,
    /// Flux has stored an R for these jobs, and no event.
    pub spoiled: BTreeSet<JobId>,
    /// Gangs that a PodDisruptionBudget protects.
    pub protects: BTreeSet<GangId>,
    /// A controller makes a pod again as soon as it is being deleted.
    pub remakes: bool,
    /// All that was done.
    pub done: Vec<Action>,
    pub next_id: u64,
    pub next_action: u64,
    /// What has not been shown yet, in order, each with the action that it belongs to.
    pub journal: VecDeque<(News, u64)>,
    pub watch: VecDeque<(News, u64)>,
    pub under_way: BTreeMap<u64, (Action, usize)>,
}

impl Bed {
    /// An instance with nodes of this many cores.
    pub fn new(nodes: &[u32]) -> Self {
        let seen = World {
            broker: Some(Broker {
                life: "the first".to_owned(),
                in_run_since: Some(BEGIN),
                queues: Queues::AllStarted,
                accepts_jobs: true,
                is_recovered: true,
            }),
            jobs: Some(Jobs::of(0)),
            pods: Some(Pods { by_uid: BTreeMap::new(), listed: BEGIN - FORCED_HOLD }),
            ranks: targets(nodes).into_values().map(|target| (target.node, target.rank)).collect(),
            targets: targets(nodes),
            namespaces: ["default".to_owned()].into(),
            ..World::default()
        };
        Self {
            seen,
            memory: Memory::default(),
            now: BEGIN,
            pods: BTreeMap::new(),
            ghosts: BTreeMap::new(),
            jobs: BTreeMap::new(),
            down: BTreeSet::new(),
            closed: BTreeSet::new(),
            kubelet_is_slow: false,
            spoiled: BTreeSet::new(),
            protects: BTreeSet::new(),
            remakes: false,
            done: Vec::new(),
            next_id: 1,
            next_action: 1,
            journal: VecDeque::new(),
            watch: VecDeque::new(),
            under_way: BTreeMap::new(),
        }
    }

    /// An instance whose nodes have this many cores each, all of which a host job has.
    pub fn busy(nodes: &[u32]) -> Self {
        let mut bed = Self::new(nodes);
        bed.submit_host_job(u32::try_from(nodes.len()).unwrap(), nodes[0]);
        bed.settle();
        bed
    }

    pub fn broker(&mut self) -> &mut Broker {
        self.seen.broker.as_mut().unwrap()
    }

    /// Creates or changes a pod.
    pub fn set(&mut self, pod: PodView) {
        self.watch.push_back((News::Pod(Box::new(pod.clone())), 0));
        self.pods.insert(pod.uid.clone(), pod);
    }

    pub fn create(&mut self, pods: impl IntoIterator<Item = PodView>) {
        for pod in pods {
            self.set(PodView { created: self.now, ..pod });
        }
    }

    pub fn change(&mut self, name: &str, change: impl FnOnce(&mut PodView)) {
        let mut pod = self.pods[&format!("uid-{name}")].clone();
        change(&mut pod);
        self.set(pod);
    }

    /// kubelet starts all pods that are bound.
    pub fn run_all(&mut self) {
        let starting = self.pods.values().filter(|pod| pod.node.is_some() && pod.phase == Phase::Pending);
        for name in starting.map(|pod| pod.name.clone()).collect::<Vec<_>>() {
            self.change(&name, |pod| {
                pod.phase = Phase::Running;
                pod.is_taken_up = true;
            });
        }
    }

    pub fn end(&mut self, name: &str, phase: Phase) {
        self.change(name, |pod| pod.phase = phase);
    }

    /// The pod is gone, by force if it has not ended. kubelet reports that it has taken a pod up when it begins to start it.
    pub fn vanish(&mut self, name: &str) {
        let Some(pod) = self.pods.remove(&format!("uid-{name}")) else { return };
        if pod.is_taken_up && !pod.is_terminal() {
            self.ghosts.insert(pod.uid.clone(), (pod.clone(), self.now + FORCED_HOLD));
        }
        self.watch.push_back((News::Gone(pod.uid), 0));
    }

    /// Submits a job of processes.
    pub fn submit_host_job(&mut self, slots: u32, cores: u32) {
        let slot = json!({"type": "slot", "count": slots, "label": "task", "with": [{"type": "core", "count": cores}]});
        self.submit(&json!({"resources": [slot]}), 16, 0);
    }

    /// Somebody cancels a job, or it ends.
    pub fn cancel(&mut self, id: JobId, note: &str) {
        self.cancel_for(id, note, 0);
    }

    pub fn cancel_for(&mut self, id: JobId, note: &str, serial: u64) {
        let cancel = json!({"name": "exception", "type": "cancel", "severity": 0, "note": note, "userid": 0});
        self.end_job(id, &[cancel], serial);
    }

    /// Flux denies a job its resources.
    pub fn refuse(&mut self, id: JobId, note: &str) {
        let refused = json!({"name": "exception", "type": "alloc", "severity": 0, "note": note});
        self.end_job(id, &[refused], 0);
    }

    /// The starting scheduler ends the job, because its cores are another job's now.
    pub fn fail_to_take_back(&mut self, id: JobId) {
        let ended =
            json!({"name": "exception", "type": "scheduler-restart", "severity": 0, "note": "failed to reallocate R"});
        self.end_job(id, &[ended], 0);
    }

    /// Everything that has happened is shown, and what follows from it is done, until nothing follows.
    pub fn settle(&mut self) {
        for _ in 0..100 {
            self.schedule();
            self.deliver(usize::MAX, usize::MAX);
            let decision = self.decide();
            if decision.actions.is_empty() {
                return;
            }
            decision.actions.iter().for_each(|action| self.carry_out(action));
        }
        let last: Vec<_> = self.done.iter().rev().take(6).collect();
        panic!("no end: {last:#?}");
    }

    /// One decision, and what it wants is done and shown. Flux gives out nothing meanwhile.
    pub fn step(&mut self) {
        let decision = self.decide();
        decision.actions.iter().for_each(|action| self.carry_out(action));
        self.deliver(usize::MAX, usize::MAX);
    }

    /// Time passes, with a decision whenever one was asked for.
    pub fn pass(&mut self, time: Millis) {
        let end = self.now + time;
        self.settle();
        while let Some(wake) = self.decide().wake.filter(|wake| *wake <= end) {
            assert!(wake > self.now, "a wake in the past");
            self.set_time(wake);
            self.settle();
        }
        self.set_time(end);
        self.settle();
    }

    /// The clock, and what depends on nothing else.
    pub fn set_time(&mut self, now: Moment) {
        self.now = now;
        self.ghosts.retain(|_, (_, until)| *until > now);
        let pods = self.seen.pods.as_mut().unwrap();
        pods.by_uid.retain(|_, pod| pod.gone.is_none_or(|gone| gone + FORCED_HOLD > now));
        let there: BTreeSet<_> = pods.by_uid.keys().cloned().collect();
        self.seen.jobs.as_mut().unwrap().forget(now, |uid| there.contains(uid));
    }

    pub fn decide(&mut self) -> Decision {
        self.seen.under_way = self.under_way.values().map(|(action, _)| action.clone()).collect();
        self.seen.available = self.seen.targets.keys().filter(|rank| !self.down.contains(rank)).copied().collect();
        let decision = decide(&self.seen, &mut self.memory, self.now);
        assert!(decision.wake.is_none_or(|wake| wake > self.now));
        decision
    }

    pub fn show_pod(&mut self, pod: PodView, serial: u64) {
        self.under_way.entry(serial).and_modify(|(_, outstanding)| *outstanding += 1);
        self.watch.push_back((News::Pod(Box::new(pod)), serial));
    }

    pub fn show_job(&mut self, id: JobId, events: Value, jobspec: Option<Value>, slots: Option<&[Slot]>, serial: u64) {
        let mut item = job_events(id.0, events, jobspec);
        let entry = |slot: &Slot| json!({"rank": slot.rank.to_string(), "children": {"core": slot.cores}});
        let r = |slots: &[Slot]| json!({"version": 1, "execution": {"R_lite": slots.iter().map(entry).collect::<Vec<_>>()}});
        item.r = slots.map(r).or_else(|| self.spoiled.contains(&id).then(|| r(&[])));
        item.events.iter_mut().for_each(|event| event.timestamp = self.now as f64 / 1000.0);
        self.under_way.entry(serial).and_modify(|(_, outstanding)| *outstanding += 1);
        self.journal.push_back((News::Job(item), serial));
    }

    pub fn submit(&mut self, jobspec: &Value, urgency: u8, serial: u64) {
        let id = JobId(self.next_id);
        self.next_id += 1;
        self.jobs.insert(id, FluxJob { jobspec: jobspec.clone(), urgency, slots: None });
        let submit = json!([{"name": "submit", "userid": 0, "urgency": urgency}, {"name": "depend"}]);
        self.show_job(id, submit, Some(jobspec.clone()), None, serial);
    }

    pub fn end_job(&mut self, id: JobId, events: &[Value], serial: u64) {
        let Some(job) = self.jobs.remove(&id) else { return };
        assert_ne!(self.broker().queues, Queues::Offline, "a job ends while the scheduler is offline");
        let mut events = events.to_vec();
        if job.slots.is_some() {
            events.push(json!({"name": "free"}));
        }
        events.push(json!({"name": "clean"}));
        self.show_job(id, Value::Array(events), None, None, serial);
    }

    /// The bridge sees the next news.
    pub fn deliver(&mut self, jobs: usize, pods: usize) {
        for _ in 0..jobs.min(self.journal.len()) {
            let Some((News::Job(item), serial)) = self.journal.pop_front() else { break };
            self.seen.jobs.as_mut().unwrap().apply(&item);
            self.answered(serial, 1);
        }
        for _ in 0..pods.min(self.watch.len()) {
            let Some((news, serial)) = self.watch.pop_front() else { break };
            let seen = &mut self.seen.pods.as_mut().unwrap().by_uid;
            match news {
                News::Pod(pod) => drop(seen.insert(pod.uid.clone(), *pod)),
                News::Gone(uid) => match seen.get_mut(&uid) {
                    Some(pod) if pod.node.is_some() => pod.gone = Some(self.now),
                    _ => drop(seen.remove(&uid)),
                },
                News::Job(_) => {}
            }
            self.answered(serial, 1);
        }
    }

    /// `news` of an action have been shown; if there is no more, it is not under way any longer.
    pub fn answered(&mut self, serial: u64, news: usize) {
        self.under_way.entry(serial).and_modify(|(_, outstanding)| *outstanding -= news);
        if self.under_way.get(&serial).is_some_and(|(_, outstanding)| *outstanding == 0) {
            self.under_way.remove(&serial);
        }
    }

    /// Flux gives resources to the jobs that wait, the most urgent first; smaller ones may pass larger ones.
    pub fn schedule(&mut self) {
        if self.broker().queues != Queues::AllStarted {
            return;
        }
        let mut waiting: Vec<_> = self.jobs.iter().filter(|(_, job)| job.slots.is_none()).map(|(id, _)| *id).collect();
        waiting.sort_by_key(|id| (std::cmp::Reverse(self.jobs[id].urgency), *id));
        let mut taken: BTreeMap<Rank, BTreeSet<u32>> = BTreeMap::new();
        for slot in self.jobs.values().filter_map(|job| job.slots.as_ref()).flatten() {
            taken.entry(slot.rank).or_default().extend(&slot.cores.0);
        }
        for id in waiting {
            if let Some(slots) = self.fit(&self.jobs[&id].jobspec, Some(&taken)) {
                for slot in &slots {
                    taken.entry(slot.rank).or_default().extend(&slot.cores.0);
                }
                self.show_job(id, json!([{"name": "alloc"}]), None, Some(&slots), 0);
                self.jobs.get_mut(&id).unwrap().slots = Some(slots);
            } else if self.fit(&self.jobs[&id].jobspec, None).is_none() {
                self.refuse(id, "unsatisfiable");
            }
        }
    }

    /// Slots for a job beside the cores that are taken; on idle nodes that are up, if that is None.
    fn fit(&self, jobspec: &Value, taken: Option<&BTreeMap<Rank, BTreeSet<u32>>>) -> Option<Vec<Slot>> {
        let shadow = Shadow::read(jobspec).filter(|shadow| shadow.nodes.len() > 1);
        let shape = match shadow {
            // A slot on each of its nodes.
            Some(Shadow { nodes, cores, .. }) => Shape {
                slots: u32::try_from(nodes.len()).unwrap(),
                cores,
                per_node: Some(1),
                constraint: Constraint::Ranks(nodes.into_keys().collect()),
            },
            None => Shape::read(jobspec).unwrap(),
        };
        let wanted = shape.slots as usize;
        let mut found = Vec::new();
        for (rank, target) in self.seen.targets.iter().filter(|(rank, _)| shape.constraint.permits(**rank)) {
            if found.len() >= wanted {
                break;
            }
            let is_free = |core: &u32| match taken {
                Some(_) if self.down.contains(rank) || self.closed.contains(rank) => false,
                Some(taken) => taken.get(rank).is_none_or(|taken| !taken.contains(core)),
                None => true,
            };
            let free: Vec<u32> = (0..target.cores).filter(is_free).collect();
            let most = shape.per_node.map_or(usize::MAX, |each| each as usize);
            let chunks = free.chunks_exact(shape.cores as usize).take(most);
            if shape.per_node.is_some() && chunks.len() < most {
                continue;
            }
            found.extend(chunks.map(|cores| Slot { rank: *rank, cores: cores.iter().copied().collect() }));
        }
        found.truncate(wanted);
        (found.len() == wanted).then_some(found)
    }

    /// The lead's broker ends and starts again. `keeps`: which of its running jobs it still has. `cancels`: it ended cleanly,
    /// which cancels them.
    pub fn restart_broker(&mut self, keeps: impl Fn(JobId) -> bool, cancels: bool) {
        self.deliver(usize::MAX, usize::MAX);
        self.jobs.retain(|id, job| job.slots.is_none() || (keeps(*id) && !cancels));
        // Processes do not survive.
        self.jobs.retain(|_, job| job.slots.is_none() || !job.is_host_job());
        self.forget_unknown();
        let now = self.now;
        let broker = self.broker();
        broker.life.push_str(", and the next");
        (broker.in_run_since, broker.queues, broker.is_recovered) = (Some(now), Queues::Stopped, false);
        self.reread();
    }

    /// The agent starts again beside the same broker.
    pub fn restart_agent(&mut self) {
        self.memory = Memory::default();
        self.deliver(usize::MAX, usize::MAX);
        let there = self.pods.clone();
        self.seen.pods = Some(Pods { by_uid: there, listed: self.now });
        self.forget_unknown();
        self.reread();
    }

    /// Nobody can know of a pod that was deleted by force while no agent ran, if its job is lost as well.
    pub fn forget_unknown(&mut self) {
        let members = self.jobs.values().filter_map(FluxJob::gang_job).flat_map(|job| job.record.members);
        let listed: BTreeSet<_> = members.map(|member| member.uid).collect();
        let seen = &self.seen.pods.as_ref().unwrap().by_uid;
        self.ghosts.retain(|uid, _| seen.contains_key(uid) || listed.contains(uid));
    }

    /// The journal's backlog has only active jobs.
    fn reread(&mut self) {
        self.journal.clear();
        self.under_way.clear();
        self.seen.jobs = Some(Jobs::of(0));
        let known = self.jobs.iter().map(|(id, job)| (*id, job.jobspec.clone(), job.urgency, job.slots.clone()));
        for (id, jobspec, urgency, slots) in known.collect::<Vec<_>>() {
            let submit = json!({"name": "submit", "userid": 0, "urgency": urgency});
            let alloc = slots.is_some().then(|| json!({"name": "alloc"}));
            let events = [submit, json!({"name": "depend"})].into_iter().chain(alloc).collect();
            self.show_job(id, Value::Array(events), Some(jobspec), slots.as_deref(), 0);
        }
        self.deliver(usize::MAX, usize::MAX);
    }

    /// Cores that bridged pods use on `rank`, those that run after their deletion among them.
    pub fn used(&self, rank: Rank) -> u32 {
        let node = &self.seen.targets[&rank].node;
        let ghosts = self.ghosts.values().map(|(pod, _)| pod);
        let running = self.pods.values().filter(|pod| !pod.is_terminal()).chain(ghosts).filter(|pod| pod.is_bridged);
        running.filter(|pod| pod.node.as_ref() == Some(node)).map(|pod| cores(pod.requests.cpu, 1)).sum()
    }

    /// What all pods on `rank` request, in thousandths of a core, those that run after their deletion among them.
    pub fn requested(&self, rank: Rank) -> u64 {
        let node = &self.seen.targets[&rank].node;
        let ghosts = self.ghosts.values().map(|(pod, _)| pod);
        let running = self.pods.values().filter(|pod| !pod.is_terminal()).chain(ghosts);
        running.filter(|pod| pod.node.as_ref() == Some(node)).map(|pod| pod.requests.cpu).sum()
    }

    /// Cores that jobs hold on `rank`: those of the bridge, and all.
    pub fn held(&self, rank: Rank) -> (u32, u32) {
        let cores = |of: &dyn Fn(&FluxJob) -> bool| -> u32 {
            let slots = self.jobs.values().filter(|job| of(job)).filter_map(|job| job.slots.as_ref()).flatten();
            slots.filter(|slot| slot.rank == rank).map(|slot| u32::try_from(slot.cores.len()).unwrap()).sum()
        };
        (cores(&|job| job.gang_job().is_some()), cores(&|_| true))
    }

    /// Cores of `rank` that shadow jobs hold, and those that they wait for.
    pub fn shadows(&self, rank: Rank) -> (u32, u32) {
        let (mut held, mut waits) = (0, 0);
        for job in self.jobs.values() {
            match Shadow::read(&job.jobspec).filter(|shadow| shadow.nodes.contains_key(&rank)) {
                Some(shadow) if job.slots.is_some() => held += shadow.cores,
                Some(shadow) => waits += shadow.cores,
                None => {}
            }
        }
        (held, waits)
    }

    /// Names of the pods that are bound, with their nodes.
    pub fn bound(&self) -> Vec<String> {
        let bound = self.pods.values().filter(|pod| !pod.is_terminal());
        bound.filter_map(|pod| Some(format!("{}@{}", pod.name, pod.node.as_ref()?))).collect()
    }

    /// The condition that the bridge wrote last.
    pub fn told(&self, name: &str) -> String {
        let told = self.pods[&format!("uid-{name}")].plan.as_ref().and_then(|plan| plan.told.clone());
        told.map(|(reason, message)| format!("{reason}: {message}")).unwrap_or_default()
    }

    /// The bridge's jobs that have not ended, with their slots: `default/g 2x1 @0-1`.
    pub fn shown_jobs(&self) -> Vec<String> {
        let shown = |(_, job): (&JobId, &FluxJob)| {
            let GangJob { record, shape } = *job.gang_job()?;
            let ranks: Option<api::IdSet> =
                job.slots.as_ref().map(|slots| slots.iter().map(|slot| slot.rank).collect());
            let place = ranks.map_or("waits".to_owned(), |ranks| format!("@{ranks}"));
            Some(format!("{} {}x{} {place}", record.gang, shape.slots, shape.cores))
        };
        self.jobs.iter().filter_map(shown).collect()
    }

    /// Long enough for the bridge to forget what has ended.
    pub fn pass_long(&mut self) {
        self.pass(REMEMBERED + FORCED_HOLD);
    }
}
