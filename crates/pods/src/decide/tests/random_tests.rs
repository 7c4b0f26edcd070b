//! Plays thousands of random events, shown late and done in part, and checks after each what must always hold.

use super::bed::{Bed, FluxJob};
use crate::{
    action::Action,
    decide::Standing,
    fixture::{annotated, foreign, kube_job, of_job, pod},
    jobs::OUR_NOTE,
    pod::{FORCED_HOLD, Phase, PodView},
    shadow::used_cores,
    time::SECOND,
    world::Queues,
};
use model::fixture::Random;

struct Play {
    random: Random,
    bed: Bed,
    count: u32,
    steps: Vec<&'static str>,
}

impl Play {
    fn new(seed: u64) -> Self {
        let mut bed = Bed::new(&[4, 4, 3, 2]);
        // Nothing may be evicted for being slow.
        bed.seen.settings.complete_after = 1 << 50;
        bed.seen.settings.preempt_after = seed.is_multiple_of(2).then_some(5 * SECOND);
        bed.seen.targets.get_mut(&2).unwrap().allocatable.cpu = 2900;
        Self { random: Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1), bed, count: 0, steps: Vec::new() }
    }

    fn new_name(&mut self, prefix: &str) -> String {
        self.count += 1;
        format!("{prefix}{}", self.count)
    }

    fn number(&mut self, limit: usize) -> u32 {
        u32::try_from(self.random.below(limit)).unwrap()
    }

    /// The name of some pod.
    fn any(&mut self, is_meant: impl Fn(&PodView) -> bool) -> Option<String> {
        let names: Vec<_> = self.bed.pods.values().filter(|pod| is_meant(pod)).map(|pod| pod.name.clone()).collect();
        (!names.is_empty()).then(|| names[self.random.below(names.len())].clone())
    }

    /// A Job makes another pod in the place of one that did not succeed.
    fn replace(&mut self, name: &str) {
        let Some(pod) = self.bed.pods.get(&format!("uid-{name}")).cloned() else { return };
        let Some(index) = pod.index.filter(|_| self.random.below(4) > 0) else { return };
        let name = self.new_name(&format!("{name}-"));
        let job = pod.owner.unwrap().name;
        self.bed.create([PodView { uid: format!("uid-{name}"), name, ..of_job(&job, index) }]);
    }

    fn step(&mut self) -> &'static str {
        let size = self.number(5) + 1;
        let is_bound = |pod: &PodView| pod.node.is_some() && !pod.is_terminal();
        match self.random.below(100) {
            0..8 => {
                let name = self.new_name("p");
                let cores = 1 + self.random.below(3) as u64;
                let priority = i32::try_from(self.number(3)).unwrap();
                self.bed.create([PodView { priority, ..pod(&name, cores) }]);
                "a pod"
            }
            8..13 => {
                let name = self.new_name("g");
                let exist = if self.random.below(5) == 0 { size - 1 } else { size };
                let pods: Vec<_> = (0..exist).map(|n| annotated(&format!("{name}-{n}"), &name, size)).collect();
                self.bed.create(pods);
                "a gang"
            }
            13..19 => {
                let name = self.new_name("j");
                let job = kube_job(&name, size.max(2));
                self.bed.seen.facts.jobs.insert(job.uid.clone(), job);
                self.bed.create((0..size.max(2)).map(|index| of_job(&name, index)));
                "an Indexed Job"
            }
            19..31 => {
                self.bed.run_all();
                "kubelet starts pods"
            }
            31..43 => {
                if let Some(name) = self.any(|pod| pod.phase == Phase::Running) {
                    let phase = if self.random.below(3) == 0 { Phase::Failed } else { Phase::Succeeded };
                    self.bed.end(&name, phase);
                    if phase == Phase::Failed {
                        self.replace(&name);
                    }
                }
                "a pod ends"
            }
            43..47 => {
                if let Some(name) = self.any(|pod| is_bound(pod) && pod.phase == Phase::Pending) {
                    self.bed.change(&name, |pod| (pod.phase, pod.is_refused) = (Phase::Failed, true));
                    self.replace(&name);
                }
                "kubelet refuses a pod"
            }
            47..52 => {
                if let Some(name) = self.any(|pod| !pod.is_terminal()) {
                    self.bed.delete(&format!("uid-{name}"), 0);
                    self.replace(&name);
                }
                "a pod is deleted"
            }
            52..56 => {
                if let Some(name) = self.any(|_| true) {
                    self.bed.vanish(&name);
                }
                "a pod is gone"
            }
            56..60 => {
                self.bed.submit_host_job(1 + size / 3, 1 + size / 4);
                "a host job"
            }
            60..65 => {
                let host = self.bed.jobs.iter().find(|(_, job)| job.is_host_job()).map(|(id, _)| *id);
                if let Some(id) = host.filter(|_| self.bed.broker().queues != Queues::Offline) {
                    self.bed.cancel(id, "");
                }
                "a host job ends"
            }
            65..70 => {
                let (name, rank) = (self.new_name("other"), self.number(4));
                let milli = 300 * (1 + self.random.below(6) as u64);
                if self.bed.requested(rank) + milli <= self.bed.seen.targets[&rank].allocatable.cpu {
                    let node = Some(format!("node{rank}"));
                    self.bed.create([PodView { node, ..foreign(&name, milli) }]);
                }
                "a pod of another scheduler"
            }
            _ => self.step_of_machines(),
        }
    }

    fn step_of_machines(&mut self) -> &'static str {
        match self.random.below(30) {
            0..14 => {
                let time = self.number(4000);
                self.bed.set_time(self.bed.now + i64::from(time));
                "time passes"
            }
            14..16 => {
                self.bed.restart_agent();
                "the agent restarts"
            }
            16..19 => {
                let (modulo, cancels) = (1 + self.random.below(3) as u64, self.random.below(2) == 0);
                self.bed.restart_broker(|id| id.0 % modulo == 0, cancels);
                "the broker restarts"
            }
            19..23 => {
                let broker = self.bed.broker();
                broker.queues = match broker.queues {
                    Queues::AllStarted => Queues::Offline,
                    // After a restart the queues are stopped when the scheduler is back.
                    Queues::Offline if !broker.is_recovered => Queues::Stopped,
                    Queues::Offline => Queues::AllStarted,
                    queues => queues,
                };
                "the scheduler goes or comes"
            }
            23..27 => {
                let rank = self.number(4);
                if !self.bed.down.remove(&rank) {
                    self.bed.down.insert(rank);
                }
                "a rank goes or comes"
            }
            27..30 => {
                let rank = self.number(4);
                let target = self.bed.seen.targets.get_mut(&rank).unwrap();
                target.is_ready = !target.is_ready;
                "a node is Ready or not"
            }
            30..32 => {
                // A bridge that has forgotten something ends a job too early.
                let id = self.bed.jobs.iter().find(|(_, job)| job.gang_job().is_some()).map(|(id, _)| *id);
                if let Some(id) =
                    id.filter(|_| self.bed.broker().queues != Queues::Offline && self.random.below(20) == 0)
                {
                    self.bed.broker().queues = Queues::Stopped;
                    self.bed.broker().is_recovered = false;
                    self.bed.cancel(id, OUR_NOTE);
                    self.bed.forget_unknown();
                }
                "a job is lost"
            }
            _ => "nothing",
        }
    }

    /// Some of the news arrives, and some of what the bridge wants is done.
    fn act(&mut self) -> Standing {
        self.bed.schedule();
        let (jobs, pods) = (self.random.below(6), self.random.below(10));
        self.bed.deliver(jobs, pods);
        let decision = self.bed.decide();
        let done = match self.random.below(3) {
            0 => self.random.below(4),
            _ => usize::MAX,
        };
        decision.actions.iter().take(done).for_each(|action| self.bed.carry_out(action));
        decision.report.standing
    }

    fn check(&self) {
        let bed = &self.bed;
        let broker = bed.seen.broker.as_ref().unwrap();
        for (rank, target) in &bed.seen.targets {
            let (of_gangs, all) = bed.held(*rank);
            assert!(all <= target.cores, "cores of rank {rank} are held twice");
            let cores: Vec<u32> = bed
                .jobs
                .values()
                .filter_map(|job| job.slots.as_ref())
                .flatten()
                .filter(|slot| slot.rank == *rank)
                .flat_map(|slot| slot.cores.0.iter().copied())
                .collect();
            assert_eq!(cores.len(), cores.iter().collect::<std::collections::BTreeSet<_>>().len());
            // What runs on a rank that was down during recovery waits for its cores, and so does what runs until then.
            let waits = bed.jobs.values().filter_map(|job| Some((job, job.gang_job()?.record.pinned?)));
            let waits = waits.filter(|(job, pinned)| job.slots.is_none() && pinned == rank).count();
            let is_open = broker.is_recovered && broker.queues == Queues::AllStarted;
            if is_open && waits == 0 {
                assert!(
                    bed.used(*rank) <= of_gangs,
                    "rank {rank}: pods use {} cores and jobs hold {of_gangs}",
                    bed.used(*rank)
                );
            }
            let hosts = all - of_gangs;
            if is_open && !bed.down.contains(rank) {
                assert!(
                    bed.used(*rank) + hosts <= target.cores,
                    "rank {rank}: pods use {}, processes {hosts}",
                    bed.used(*rank)
                );
            }
        }
        let touched = bed.done.iter().find(|action| matches!(action, Action::Evict { .. } | Action::SuspendJob { .. }));
        assert_eq!(touched, None, "nothing here may touch a pod");
    }

    /// Everything ends; then nothing is held.
    fn end(mut self) {
        self.bed.down.clear();
        self.bed.seen.targets.values_mut().for_each(|target| target.is_ready = true);
        if self.bed.broker().queues == Queues::Offline {
            let is_recovered = self.bed.broker().is_recovered;
            self.bed.broker().queues = if is_recovered { Queues::AllStarted } else { Queues::Stopped };
        }
        self.steps.push("settles");
        self.bed.settle();
        self.check();
        // The bridge counts a pod that is gone for as long from when it sees that.
        self.bed.pass(FORCED_HOLD);
        for (rank, target) in &self.bed.seen.targets {
            let (requested, used) = (self.bed.requested(*rank), self.bed.used(*rank));
            let (held, waits) = self.bed.shadows(*rank);
            // All pods of gangs request whole cores here.
            let by_others = requested - 1000 * u64::from(used);
            let used_by_others = used_cores(target, by_others, self.bed.seen.settings.tolerance);
            let expected = used_by_others.min(target.cores.saturating_sub(used));
            assert_eq!(
                held + waits,
                expected,
                "rank {rank}: {requested} is requested, {used} cores are gangs'; {held} held, {waits} waited for"
            );
        }
        let hosts: Vec<_> = self.bed.jobs.iter().filter(|(_, job)| job.is_host_job()).map(|(id, _)| *id).collect();
        hosts.into_iter().for_each(|id| self.bed.cancel(id, ""));
        self.bed.pass(100 * SECOND);
        // A gang that is complete and fits has been bound by now, or waits for another one.
        let waiting = self.bed.pods.values().filter(|pod| pod.waits()).count();
        let running = self.bed.bound().len();
        assert!(
            running > 0
                || waiting == 0
                || self.bed.pods.values().all(|pod| !pod.waits() || !self.bed.told(&pod.name).is_empty())
        );
        for _ in 0..200 {
            let names: Vec<_> =
                self.bed.pods.values().filter(|pod| pod.node.is_some()).map(|pod| pod.name.clone()).collect();
            if names.is_empty() {
                break;
            }
            for name in names {
                self.bed.end(&name, Phase::Succeeded);
                self.bed.vanish(&name);
            }
            self.bed.settle();
            self.check();
        }
        let names: Vec<_> = self.bed.pods.values().map(|pod| pod.name.clone()).collect();
        names.iter().for_each(|name| self.bed.vanish(name));
        self.bed.pass(2 * FORCED_HOLD);
        let left: Vec<_> = self.bed.jobs.values().filter_map(FluxJob::gang_job).map(|job| job.record.gang).collect();
        assert_eq!(left, [], "held for nobody");
        assert!((0..4).all(|rank| self.bed.shadows(rank) == (0, 0)), "held for other pods that are gone");
    }
}

fn shown(action: &Action) -> String {
    let request = |request: &crate::jobspec::JobRequest| {
        let members: Vec<_> = request.record.members.iter().map(|member| member.name.as_str()).collect();
        format!(
            "{} {}x{} pinned {:?} {members:?}",
            request.record.gang, request.slots, request.cores, request.record.pinned
        )
    };
    match action {
        Action::Submit(submitted) => format!("submit {}", request(submitted)),
        Action::Resubmit { job, request: submitted } => format!("resubmit {job} as {}", request(submitted)),
        Action::Cancel { job, gang, .. } => format!("cancel {job} {gang}"),
        Action::Finish { job, gang, .. } => format!("finish {job} {gang}"),
        Action::Bind(binding) => format!("bind {} to {}", binding.pod.name, binding.record.text()),
        Action::Tell(tell) => format!("tell {} {:?}", tell.pod.name, tell.reason),
        other => format!("{other:?}"),
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let last = &self.steps[self.steps.len().saturating_sub(12)..];
            eprintln!("failed at step {}, after {last:?}", self.steps.len());
            self.bed.done.iter().rev().take(25).rev().for_each(|action| eprintln!("did {}", shown(action)));
            for (id, job) in &self.bed.jobs {
                eprintln!("job {id} {} {:?}", job.urgency, job.slots);
            }
            eprintln!("jobs {:?}\nbound {:?}", self.bed.shown_jobs(), self.bed.bound());
        }
    }
}

#[test]
fn cores_are_held_for_all_that_runs_and_for_nothing_else() {
    let mut served = 0;
    let seeds = std::env::var("PODS_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(20);
    for seed in 1..=seeds {
        eprintln!("seed {seed}");
        let mut play = Play::new(seed);
        for _ in 0..250 {
            let step = play.step();
            play.steps.push(step);
            served += usize::from(play.act() == Standing::Serving);
            play.check();
        }
        play.end();
    }
    assert!(served > 100 * usize::try_from(seeds).unwrap(), "{served}");
}
