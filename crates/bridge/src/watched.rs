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
    facts::{ANNOTATION_SUSPENDED, KubeJob, OfJobSet, SuspendReason},
    pod::{FORCED_HOLD, Hints, PodView},
    time::Moment,
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
    nodes: Listed<Node>,
    jobs: Listed<KubeJob>,
    /// A list that is being read, which replaces what is there only at its end.
    new_pods: BTreeSet<String>,
    /// Those of the pods that are gone, and hold their cores still.
    gone: BTreeSet<String>,
}

/// The objects of a kind as they were last; None until they have been listed.
struct Listed<T> {
    known: Option<BTreeMap<String, T>>,
    /// A list that is being read.
    new: BTreeMap<String, T>,
}

impl<T> Default for Listed<T> {
    fn default() -> Self {
        Self { known: None, new: BTreeMap::new() }
    }
}

impl<T: PartialEq> Listed<T> {
    /// Takes in an event. `keep`: what is kept of an object, and under which key. Returns true if anything that is kept has changed.
    fn take<K>(&mut self, event: Event<K>, keep: impl Fn(K) -> (String, T)) -> bool {
        match event {
            Event::Init => {
                self.new.clear();
                false
            }
            Event::InitApply(object) => {
                self.new.extend([keep(object)]);
                false
            }
            Event::InitDone => {
                let new = Some(std::mem::take(&mut self.new));
                let has_changed = self.known != new;
                self.known = new;
                has_changed
            }
            Event::Apply(object) => put(self.known.get_or_insert_default(), keep(object)),
            Event::Delete(object) => self.known.get_or_insert_default().remove(&keep(object).0).is_some(),
        }
    }
}

/// Returns true if `map` was another one before.
fn put<T: PartialEq>(map: &mut BTreeMap<String, T>, (key, value): (String, T)) -> bool {
    let has_changed = map.get(&key) != Some(&value);
    if has_changed {
        map.insert(key, value);
    }
    has_changed
}

impl Watched {
    /// Takes in a change. Returns true if it matters: most of what is written to pods and Nodes does not.
    pub(crate) fn take(&mut self, change: Change, now: Moment) -> bool {
        match change {
            Change::Pod(event) => self.take_pod(*event, now),
            Change::Node(event) => self.nodes.take(*event, |node| (node.name_any(), slim(node))),
            Change::Job(event) => self.jobs.take(*event, |job| (job.uid().unwrap_or_default(), kube_job(&job))),
            Change::Failed(reason) => {
                debug!(reason, "a watch begins again");
                self.failure = Some(reason);
                false
            }
        }
    }

    /// Why it is not known which pods, Nodes and Jobs there are; None if all have been listed.
    pub(crate) fn waits_for(&self) -> Option<String> {
        let is_complete = self.is_listed && self.nodes().is_some() && self.jobs().is_some();
        (!is_complete)
            .then(|| self.failure.clone().unwrap_or_else(|| "pods, Nodes and Jobs are being listed".to_owned()))
    }

    /// The Nodes by name; None until they have been listed.
    pub(crate) fn nodes(&self) -> Option<&BTreeMap<String, Node>> {
        self.nodes.known.as_ref()
    }

    /// The Jobs by uid; None until they have been listed.
    pub(crate) fn jobs(&self) -> Option<&BTreeMap<String, KubeJob>> {
        self.jobs.known.as_ref()
    }

    /// Forgets the pods whose cores need not be held any longer. Returns true if there was one.
    pub(crate) fn forget(&mut self, now: Moment) -> bool {
        let pods = &mut self.pods.by_uid;
        let before = pods.len();
        self.gone.retain(|uid| match pods.get(uid).and_then(|pod| pod.gone) {
            Some(gone) if now < gone.saturating_add(FORCED_HOLD) => true,
            Some(_) => {
                pods.remove(uid);
                false
            }
            // It is back: only a list had left it out.
            None => false,
        });
        pods.len() < before
    }

    /// Takes in a pod that was read in answer to a conflict.
    pub(crate) fn read(&mut self, pod: Option<&Pod>, uid: &str, now: Moment) {
        match pod.filter(|pod| pod.uid().as_deref() == Some(uid)) {
            Some(pod) => self.keep_pod(pod),
            None => self.lose(uid, now),
        };
    }

    fn take_pod(&mut self, event: Event<Pod>, now: Moment) -> bool {
        match event {
            Event::Init => {
                self.new_pods.clear();
                false
            }
            Event::InitApply(pod) => {
                self.new_pods.extend(pod.uid());
                self.keep_pod(&pod)
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.new_pods);
                let lost: Vec<_> = self.pods.by_uid.keys().filter(|uid| !listed.contains(*uid)).cloned().collect();
                let has_lost = lost.iter().fold(false, |any, uid| self.lose(uid, now) | any);
                let is_first = !std::mem::replace(&mut self.is_listed, true);
                if is_first {
                    self.pods.listed = now;
                }
                has_lost || is_first
            }
            Event::Apply(pod) => self.keep_pod(&pod),
            Event::Delete(pod) => {
                // Its last state tells whether its containers had ended.
                let has_changed = self.keep_pod(&pod);
                self.lose(&pod.uid().unwrap_or_default(), now) | has_changed
            }
        }
    }

    /// Only pods that matter are kept: those that are bridged, placeholder pods, and those that take room on a node. Returns true if anything has changed.
    fn keep_pod(&mut self, pod: &Pod) -> bool {
        let view = PodView::of(pod);
        match view.is_bridged || view.placeholder.is_some() || (view.node.is_some() && !view.is_terminal()) {
            true => put(&mut self.pods.by_uid, (view.uid.clone(), view)),
            false => self.pods.by_uid.remove(&view.uid).is_some(),
        }
    }

    /// The pod is gone. Returns true if anything has changed.
    fn lose(&mut self, uid: &str, now: Moment) -> bool {
        let Some(pod) = self.pods.by_uid.get_mut(uid) else { return false };
        if pod.node.is_none() || pod.is_terminal() {
            self.pods.by_uid.remove(uid);
        } else if pod.gone.is_none() {
            pod.gone = Some(now);
            self.gone.insert(uid.to_owned());
        } else {
            return false;
        }
        true
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
    let is_suspended = spec.and_then(|spec| spec.suspend) == Some(true);
    // A Job that has been suspended may keep it until it is resumed.
    let began = status.and_then(|status| status.start_time.as_ref()).filter(|_| !is_suspended);
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
        is_suspended,
        suspended_for: annotation.and_then(|word| SuspendReason::read(word)),
        began: began.map(|time| time.0.as_millisecond()),
        joins_job_set: joins_job_set(job),
        job_set: of_job_set(job),
    }
}

fn of_job_set(job: &Job) -> Option<OfJobSet> {
    let label = |name: &str| job.labels().get(&format!("jobset.sigs.k8s.io/{name}"));
    let owner = job.owner_references().iter().find(|owner| owner.controller == Some(true) && owner.kind == "JobSet")?;
    Some(OfJobSet {
        name: owner.name.clone(),
        uid: owner.uid.clone(),
        attempt: label("restart-attempt").cloned().unwrap_or_default(),
        jobs: label("global-replicas").and_then(|jobs| jobs.parse().ok()).unwrap_or(0),
    })
}

/// Its pods are for Flux, and no annotation or label of theirs makes them another gang.
fn joins_job_set(job: &Job) -> bool {
    let template = job.spec.as_ref().map(|spec| &spec.template);
    let pod = template.map(|template| Pod {
        metadata: template.metadata.clone().unwrap_or_default(),
        spec: template.spec.clone(),
        status: None,
    });
    pod.is_some_and(|pod| {
        let view = PodView::of(&pod);
        view.is_bridged && view.hints == Hints::default()
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PodStatus;
    use serde_json::{Value, json};

    use super::*;

    const NOW: Moment = 1_800_000_000_000;

    fn object<K: serde::de::DeserializeOwned>(value: Value) -> K {
        serde_json::from_value(value).unwrap()
    }

    fn pod(scheduler: &str, node: Option<&str>) -> Pod {
        object(json!({
            "metadata": {"name": "p", "namespace": "default", "uid": "u"},
            "spec": {"schedulerName": scheduler, "nodeName": node, "containers": []},
        }))
    }

    #[test]
    fn only_what_decisions_depend_on_is_a_change() {
        let node = |heartbeat: &str, ready: &str| -> Node {
            let condition = json!({"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat});
            object(json!({"metadata": {"name": "n"}, "status": {"conditions": [condition]}}))
        };
        let (first, second) = ("2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z");
        let nodes = |event| Change::Node(Box::new(event));
        let pods = |event| Change::Pod(Box::new(event));
        let annotated = |mut pod: Pod, key: &str| {
            pod.annotations_mut().insert(key.to_owned(), "new".to_owned());
            pod
        };
        let bound = || pod("flux", Some("n"));
        let ended = |mut pod: Pod| {
            pod.status = Some(PodStatus { phase: Some("Succeeded".to_owned()), ..PodStatus::default() });
            pod
        };
        let mut watched = Watched::default();
        for (what, change, expected) in [
            ("no Node", nodes(Event::InitDone), true),
            ("a Node", nodes(Event::Apply(node(first, "True"))), true),
            ("its heartbeat", nodes(Event::Apply(node(second, "True"))), false),
            ("it is not Ready", nodes(Event::Apply(node(second, "False"))), true),
            ("a list begins", nodes(Event::Init), false),
            ("it is listed", nodes(Event::InitApply(node(first, "False"))), false),
            ("the list is as it was", nodes(Event::InitDone), false),
            ("it is gone", nodes(Event::Delete(node(first, "False"))), true),
            ("no pod", pods(Event::InitDone), true),
            ("a pod that another scheduler may bind", pods(Event::Apply(pod("other", None))), false),
            ("it is bound", pods(Event::Apply(pod("other", Some("n")))), true),
            ("it has ended", pods(Event::Apply(ended(pod("other", Some("n"))))), true),
            ("a bridged pod", pods(Event::Apply(pod("flux", None))), true),
            ("its gang", pods(Event::Apply(annotated(pod("flux", None), pods::pod::ANNOTATION_GANG))), true),
            ("another annotation", pods(Event::Apply(annotated(bound(), "note"))), true),
            ("the same again", pods(Event::Apply(bound())), false),
            ("a list without it begins", pods(Event::Init), false),
            ("it is missing", pods(Event::InitDone), true),
            ("it is missing still", pods(Event::InitDone), false),
            ("a failure", Change::Failed("403".to_owned()), false),
        ] {
            assert_eq!(watched.take(change, NOW), expected, "{what}");
        }
    }

    #[test]
    fn a_job_has_begun_once_it_has_a_start_time_and_is_not_suspended() {
        for (suspend, expected) in [(false, Some(1000)), (true, None)] {
            let job =
                json!({"spec": {"suspend": suspend, "template": {}}, "status": {"startTime": "1970-01-01T00:00:01Z"}});
            assert_eq!(kube_job(&object(job)).began, expected, "suspend: {suspend}");
        }
        assert_eq!(kube_job(&Job::default()).began, None);
    }

    #[test]
    fn a_pod_that_is_gone_is_forgotten_once_its_containers_have_certainly_ended() {
        for (what, comes_back, at, expected) in [
            ("too early", false, NOW + FORCED_HOLD - 1, (false, 1)),
            ("in time", false, NOW + FORCED_HOLD, (true, 0)),
            ("it was only missing in a list", true, NOW + FORCED_HOLD, (false, 1)),
        ] {
            let mut watched = Watched::default();
            watched.take_pod(Event::Apply(pod("flux", Some("n"))), NOW);
            watched.take_pod(Event::Delete(pod("flux", Some("n"))), NOW);
            if comes_back {
                watched.take_pod(Event::Apply(pod("flux", Some("n"))), NOW);
            }
            assert_eq!((watched.forget(at), watched.pods.by_uid.len()), expected, "{what}");
        }
    }
}
