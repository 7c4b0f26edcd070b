//! What becomes of the actions of the bridge.

use serde_json::json;

use super::bed::{Bed, News};
use crate::{
    action::{Action, KubeJobRef, PlaceholderStep, ShadowStep, Victim},
    allocation::Slot,
    facts::SuspendReason,
    fixture::{bound, pod},
    jobs::OUR_NOTE,
    jobspec::USED_CORES_URGENCY,
    placeholder::{NAMESPACE, Placeholder},
    pod::{Phase, PodView},
    requests::{Requests, Size},
    time::{Millis, SECOND},
    world::Queues,
};

/// How long a pod may take to end.
const GRACE: Millis = 30 * SECOND;

impl Bed {
    /// Does what the bridge wants. What came of it is news.
    pub fn carry_out(&mut self, action: &Action) {
        self.done.push(action.clone());
        let serial = self.next_action;
        self.next_action += 1;
        self.under_way.insert(serial, (action.clone(), 0));
        match action {
            Action::Submit(request) => self.submit(&request.jobspec(), request.urgency, serial),
            Action::Resubmit { job, request } => {
                self.cancel_for(*job, OUR_NOTE, serial);
                self.submit(&request.jobspec(), request.urgency, serial);
            }
            Action::Cancel { job, note, .. } => self.cancel_for(*job, note, serial),
            Action::Finish { job, status, .. } => {
                let finish = json!({"name": "finish", "status": status});
                self.end_job(*job, &[finish], serial);
            }
            Action::Bind(binding) => {
                let Some(pod) = self.pods.get_mut(&binding.pod.uid) else {
                    self.under_way.remove(&serial);
                    return;
                };
                assert_eq!(pod.node, None, "{} is bound twice", pod.name);
                if !pod.is_deleting() {
                    let slots = self.jobs.get(&binding.record.id).and_then(|job| job.slots.as_ref());
                    let slot = Slot { rank: binding.record.rank, cores: binding.record.cores.clone() };
                    assert!(slots.is_some_and(|slots| slots.contains(&slot)), "{} is bound to nothing", pod.name);
                    pod.node = Some(binding.node.clone());
                    pod.record = Some(binding.record.clone());
                    (pod.bound, pod.plan) = (Some(self.now), None);
                }
                let pod = pod.clone();
                self.show_pod(pod, serial);
            }
            Action::Tell(tell) => {
                if let Some(pod) = self.pods.get_mut(&tell.pod.uid).filter(|_| tell.reason.is_condition()) {
                    let told = Some((tell.reason.word().to_owned(), tell.message.clone()));
                    pod.plan.iter_mut().for_each(|plan| plan.told.clone_from(&told));
                    let pod = pod.clone();
                    self.show_pod(pod, serial);
                }
            }
            Action::Evict { pods, .. } => pods.iter().for_each(|pod| self.delete(&pod.uid, serial)),
            Action::SuspendJob { job, reason, .. } => self.suspend(job, *reason, serial),
            Action::Preempt { victims, .. } => self.preempt(victims, serial),
            Action::ResumeJob(job) => {
                let resumed = self.seen.facts.jobs.get_mut(&job.uid).unwrap();
                (resumed.is_suspended, resumed.suspended_for) = (false, None);
            }
            Action::Shadow(ShadowStep { submit, cancel, .. }) => {
                submit.iter().for_each(|request| self.submit(&request.jobspec(), USED_CORES_URGENCY, serial));
                cancel.iter().for_each(|job| self.cancel_for(*job, OUR_NOTE, serial));
            }
            Action::Placeholder(step) => self.change_placeholder(step, serial),
            Action::StopQueues(_) => self.broker().queues = Queues::Stopped,
            Action::StartQueues => {
                let broker = self.broker();
                broker.is_recovered = true;
                if broker.queues.has_stopped_by_us() {
                    broker.queues = Queues::AllStarted;
                }
            }
        }
        self.answered(serial, 0);
    }

    fn preempt(&mut self, victims: &[Victim], serial: u64) {
        if let Some(victim) = victims.iter().find(|victim| self.protects.contains(&victim.gang)) {
            self.seen.protected.extend(victim.pods.iter().map(|pod| pod.uid.clone()));
            return;
        }
        for victim in victims {
            match &victim.job {
                Some(job) => self.suspend(job, SuspendReason::Preempted, serial),
                None => victim.pods.iter().for_each(|pod| self.delete(&pod.uid, serial)),
            }
        }
    }

    fn suspend(&mut self, job: &KubeJobRef, reason: SuspendReason, serial: u64) {
        let suspended = self.seen.facts.jobs.get_mut(&job.uid).unwrap();
        (suspended.is_suspended, suspended.suspended_for) = (true, Some(reason));
        let is_owned = |pod: &&PodView| pod.owner.as_ref().is_some_and(|owner| owner.uid == job.uid);
        let uids: Vec<_> = self.pods.values().filter(is_owned).map(|pod| pod.uid.clone()).collect();
        uids.iter().for_each(|uid| self.delete(uid, serial));
    }

    /// kubelet resizes a pod at once, unless it is slow to shrink one.
    fn change_placeholder(&mut self, step: &PlaceholderStep, serial: u64) {
        let holds = |size: Size| Requests { cpu: size.cpu, memory: size.memory, ..Requests::default() };
        match step {
            PlaceholderStep::Make { node, size, .. } => {
                let number = self.next_id;
                self.next_id += 1;
                let placeholder = Some(Placeholder { asks: *size, cant_be_resized: false });
                let (namespace, name, uid) = (NAMESPACE.to_owned(), node.clone(), format!("uid-{node}-{number}"));
                let (is_bridged, plan, requests) = (false, None, holds(*size));
                let pod =
                    PodView { namespace, name, uid, is_bridged, requests, plan, placeholder, ..bound(pod("", 0)) };
                let pod = PodView { node: Some(node.clone()), record: None, created: self.now, ..pod };
                self.pods.insert(pod.uid.clone(), pod.clone());
                self.show_pod(pod, serial);
            }
            PlaceholderStep::Resize { pod, size } => {
                let slow = self.kubelet_is_slow;
                let Some(pod) = self.pods.get_mut(&pod.uid) else { return };
                pod.placeholder.as_mut().unwrap().asks = *size;
                let before = std::mem::replace(&mut pod.requests, holds(*size));
                if slow {
                    pod.requests = pod.requests.max(&before);
                }
                let pod = pod.clone();
                self.show_pod(pod, serial);
            }
            PlaceholderStep::Remove { pod } => {
                self.pods.remove(&pod.uid);
                self.watch.push_back((News::Gone(pod.uid.clone()), serial));
                self.under_way.entry(serial).and_modify(|(_, outstanding)| *outstanding += 1);
            }
        }
    }

    /// Submits a job of one process with this many cores, for one rank.
    pub fn submit_host_job_on(&mut self, rank: &str, cores: u32) {
        let slot = json!({"type": "slot", "count": 1, "label": "task", "with": [{"type": "core", "count": cores}]});
        let system = json!({"constraints": {"ranks": [rank]}});
        self.submit(&json!({"resources": [slot], "attributes": {"system": system}}), 16, 0);
    }

    /// The pod gets a deletion timestamp, or is gone if it is not bound.
    pub fn delete(&mut self, uid: &str, serial: u64) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
        pod.to_end_by = Some(self.now + GRACE);
        let pod = pod.clone();
        self.show_pod(pod.clone(), serial);
        if pod.node.is_none() {
            self.pods.remove(uid);
            self.watch.push_back((News::Gone(uid.to_owned()), 0));
        }
        if self.remakes {
            let name = format!("{}-next", pod.name);
            let (uid, plan) = (format!("uid-{name}"), Some(Box::default()));
            let next =
                PodView { node: None, record: None, bound: None, phase: Phase::Pending, is_taken_up: false, ..pod };
            self.create([PodView { name, uid, plan, to_end_by: None, ..next }]);
        }
    }
}
