//! The pods, Nodes and Jobs of the whole cluster, as the API server last sent them.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::Hash,
};

use futures::{Stream, StreamExt, stream::select_all};
use k8s_openapi::api::{
    batch::v1::Job,
    core::v1::{Node, Pod},
};
use kube::{
    Api, Client, ResourceExt,
    runtime::{WatchStreamExt, watcher, watcher::Event},
};
use tracing::debug;

use base::error_chain;
use pods::{
    facts::{ANNOTATION_SUSPENDED, KubeJob, SuspendReason},
    pod::{FORCED_HOLD, PodView},
    time::Millis,
    world::Pods,
};

/// A change of what is watched.
pub(crate) enum Change {
    Pod(Box<Event<Pod>>),
    Node(Box<Event<Node>>),
    Job(Box<Event<Job>>),
    /// A list or a watch has failed, and is tried again. With the reason.
    Failed(String),
}

/// All changes, without an end. A watch that fails begins again after a pause that grows.
pub(crate) fn changes(client: &Client) -> impl Stream<Item = Change> + Send + use<> {
    select_all([
        watch(Api::<Pod>::all(client.clone()), "pods", Change::Pod).boxed(),
        watch(Api::<Node>::all(client.clone()), "Nodes", Change::Node).boxed(),
        watch(Api::<Job>::all(client.clone()), "Jobs", Change::Job).boxed(),
    ])
}

fn watch<K>(api: Api<K>, what: &'static str, change: fn(Box<Event<K>>) -> Change) -> impl Stream<Item = Change> + Send
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + Sync + 'static,
    K::DynamicType: Default + Eq + Hash + Clone,
{
    let events = watcher(api, watcher::Config::default()).default_backoff();
    events.map(move |event| match event {
        Ok(event) => change(Box::new(event)),
        Err(error) => Change::Failed(format!("can't watch {what}: {}", error_chain(&error))),
    })
}

/// What was watched so far.
#[derive(Default)]
pub(crate) struct Watched {
    /// Of no use until they have been listed.
    pub(crate) pods: Pods,
    /// The pods have been listed.
    pub(crate) is_listed: bool,
    /// Why the last watch or list that failed did.
    failure: Option<String>,
    nodes: Option<BTreeMap<String, Node>>,
    jobs: Option<BTreeMap<String, KubeJob>>,
    /// A list that is being read, which replaces what is there only at its end.
    new_pods: BTreeSet<String>,
    new_nodes: BTreeMap<String, Node>,
    new_jobs: BTreeMap<String, KubeJob>,
}

impl Watched {
    /// Takes in a change.
    pub(crate) fn take(&mut self, change: Change, now: Millis) {
        match change {
            Change::Pod(event) => self.take_pod(*event, now),
            Change::Node(event) => self.take_node(*event),
            Change::Job(event) => self.take_job(*event),
            Change::Failed(reason) => {
                debug!(reason, "a watch begins again");
                self.failure = Some(reason);
            }
        }
    }

    /// Why it is not known which pods, Nodes and Jobs there are; None if all have been listed.
    pub(crate) fn waits_for(&self) -> Option<String> {
        let is_complete = self.is_listed && self.nodes.is_some() && self.jobs.is_some();
        (!is_complete)
            .then(|| self.failure.clone().unwrap_or_else(|| "pods, Nodes and Jobs are being listed".to_owned()))
    }

    /// The Nodes by name; None until they have been listed.
    pub(crate) fn nodes(&self) -> Option<&BTreeMap<String, Node>> {
        self.nodes.as_ref()
    }

    /// The Jobs by uid; None until they have been listed.
    pub(crate) fn jobs(&self) -> Option<&BTreeMap<String, KubeJob>> {
        self.jobs.as_ref()
    }

    /// Forgets the pods whose cores need not be held any longer.
    pub(crate) fn forget(&mut self, now: Millis) {
        self.pods.by_uid.retain(|_, pod| pod.gone.is_none_or(|gone| now < gone.saturating_add(FORCED_HOLD)));
    }

    /// Takes in a pod that was read in answer to a conflict.
    pub(crate) fn read(&mut self, pod: Option<&Pod>, uid: &str, now: Millis) {
        match pod.filter(|pod| pod.uid().as_deref() == Some(uid)) {
            Some(pod) => self.keep_pod(pod),
            None => self.lose(uid, now),
        }
    }

    fn take_pod(&mut self, event: Event<Pod>, now: Millis) {
        match event {
            Event::Init => self.new_pods.clear(),
            Event::InitApply(pod) => {
                self.new_pods.extend(pod.uid());
                self.keep_pod(&pod);
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.new_pods);
                let lost: Vec<_> = self.pods.by_uid.keys().filter(|uid| !listed.contains(*uid)).cloned().collect();
                for uid in &lost {
                    self.lose(uid, now);
                }
                if !std::mem::replace(&mut self.is_listed, true) {
                    self.pods.listed = now;
                }
            }
            Event::Apply(pod) => self.keep_pod(&pod),
            Event::Delete(pod) => {
                // Its last state tells whether its containers had ended.
                self.keep_pod(&pod);
                self.lose(&pod.uid().unwrap_or_default(), now);
            }
        }
    }

    /// Only pods that matter are kept: those that are bridged, and those that take room on a node.
    fn keep_pod(&mut self, pod: &Pod) {
        let view = PodView::of(pod, None);
        match view.is_bridged || (view.node.is_some() && !view.is_terminal()) {
            true => drop(self.pods.by_uid.insert(view.uid.clone(), view)),
            false => drop(self.pods.by_uid.remove(&view.uid)),
        }
    }

    fn lose(&mut self, uid: &str, now: Millis) {
        let Some(pod) = self.pods.by_uid.get_mut(uid) else { return };
        if pod.node.is_none() || pod.is_terminal() {
            self.pods.by_uid.remove(uid);
        } else {
            pod.gone.get_or_insert(now);
        }
    }

    fn take_node(&mut self, event: Event<Node>) {
        match event {
            Event::Init => self.new_nodes.clear(),
            Event::InitApply(node) => drop(self.new_nodes.insert(node.name_any(), slim(node))),
            Event::InitDone => self.nodes = Some(std::mem::take(&mut self.new_nodes)),
            Event::Apply(node) => drop(self.nodes.get_or_insert_default().insert(node.name_any(), slim(node))),
            Event::Delete(node) => drop(self.nodes.get_or_insert_default().remove(&node.name_any())),
        }
    }

    fn take_job(&mut self, event: Event<Job>) {
        let uid = |job: &Job| job.uid().unwrap_or_default();
        match event {
            Event::Init => self.new_jobs.clear(),
            Event::InitApply(job) => drop(self.new_jobs.insert(uid(&job), kube_job(&job))),
            Event::InitDone => self.jobs = Some(std::mem::take(&mut self.new_jobs)),
            Event::Apply(job) => drop(self.jobs.get_or_insert_default().insert(uid(&job), kube_job(&job))),
            Event::Delete(job) => drop(self.jobs.get_or_insert_default().remove(&uid(&job))),
        }
    }
}

/// A Node without what changes all the time.
fn slim(mut node: Node) -> Node {
    node.metadata.managed_fields = None;
    node.metadata.annotations = None;
    node.metadata.resource_version = None;
    if let Some(status) = &mut node.status {
        status.images = None;
        for condition in status.conditions.iter_mut().flatten() {
            condition.last_heartbeat_time = None;
        }
    }
    node
}

fn kube_job(job: &Job) -> KubeJob {
    let (spec, status) = (job.spec.as_ref(), job.status.as_ref());
    let count = |number: Option<i32>| number.and_then(|number| u32::try_from(number).ok());
    let annotation = job.annotations().get(ANNOTATION_SUSPENDED);
    KubeJob {
        namespace: job.namespace().unwrap_or_default(),
        name: job.name_any(),
        uid: job.uid().unwrap_or_default(),
        is_indexed: spec.and_then(|spec| spec.completion_mode.as_deref()) == Some("Indexed"),
        completions: count(spec.and_then(|spec| spec.completions)),
        // The API server's defaults.
        parallelism: count(spec.and_then(|spec| spec.parallelism)).unwrap_or(1),
        succeeded: count(status.and_then(|status| status.succeeded)).unwrap_or(0),
        seconds: spec.and_then(|spec| spec.active_deadline_seconds).and_then(|seconds| u64::try_from(seconds).ok()),
        is_suspended: spec.and_then(|spec| spec.suspend) == Some(true),
        suspended_for: annotation.and_then(|word| SuspendReason::read(word)),
    }
}
