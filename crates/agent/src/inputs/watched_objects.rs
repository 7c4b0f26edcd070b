//! The objects that the agent watches from its start: its FluxNode, the FluxInstance and its Namespace. At a teardown the agent's
//! rights are gone within half a second, while open watches still deliver. The DaemonSet is none of them: its end proves nothing, and
//! its status changes with each pod that becomes ready, which every agent would be sent.

use std::{fmt::Debug, pin::pin, time::Duration};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, Resource, ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tracing::debug;

use api::{
    CONDITION_CERTIFICATE_MISSING, CONDITION_RESTART_PENDING, FetchFrom, FluxInstance, FluxInstanceStatus, FluxNode,
    FluxNodeSpec, FluxNodeStatus, INSTANCE, NAMESPACE, Uninstall, Want,
};
use base::chance::jittered;

/// Pause before the same GET again.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Time limit of one GET, since the API server may not answer.
const LOOK: Duration = Duration::from_secs(10);

/// What is known of one watched object.
#[derive(Debug, Clone, Default)]
pub enum Presence<K> {
    /// The API server has not answered yet.
    #[default]
    Unknown,
    /// It exists.
    Here(Box<K>),
    /// It does not exist: the watch delivered DELETED, or the API server's own 404 names it.
    Gone,
}

impl<K: Resource> Presence<K> {
    /// The object, if it exists.
    pub fn here(&self) -> Option<&K> {
        match self {
            Self::Here(object) => Some(object),
            _ => None,
        }
    }

    /// It is gone, or has a deletionTimestamp.
    pub fn is_ending(&self) -> bool {
        match self {
            Self::Unknown => false,
            Self::Here(object) => object.meta().deletion_timestamp.is_some(),
            Self::Gone => true,
        }
    }
}

/// All watched objects.
#[derive(Debug, Clone, Default)]
pub struct WatchedObjects {
    /// FluxInstance `flux`.
    pub instance: Presence<FluxInstance>,
    /// Our FluxNode.
    pub flux_node: Presence<FluxNode>,
    /// Our Namespace.
    pub namespace: Presence<Namespace>,
    /// uid and spec.uninstall of the FluxInstance as they were last seen: people may change spec.uninstall right before they
    /// delete the FluxInstance, and the change counts.
    uninstall: Option<(String, Uninstall)>,
}

impl WatchedObjects {
    fn set<K: Watched>(&mut self, presence: Presence<K>) {
        *K::place(self) = presence;
        let uninstall =
            self.instance.here().and_then(|instance| Some((instance.uid()?, instance.spec.uninstall.clone())));
        self.uninstall = uninstall.or(self.uninstall.take());
    }

    /// Takes in `after`, the API server's answer to a write of this agent to its FluxNode, which was `before`. The watch's event about that
    /// write then is no news. Returns true if somebody else has changed more than the status meanwhile. If the watch has delivered
    /// another state since, that may be the newer one, and the event is still to come.
    fn wrote(&mut self, before: &FluxNode, after: FluxNode) -> bool {
        let known = self.flux_node.here();
        if known.and_then(ResourceExt::resource_version) != before.resource_version() {
            return false;
        }
        let is_news = has_other_metadata(&after, before) || after.spec != before.spec;
        self.set(Presence::Here(Box::new(after)));
        is_news
    }

    /// There is positive evidence that the FluxInstance is over.
    pub fn is_over(&self) -> bool {
        self.instance.is_ending() || self.namespace.is_ending()
    }

    /// spec.uninstall of FluxInstance `uid`, also when it is gone; None if this agent never saw it.
    pub fn uninstall_of(&self, uid: &str) -> Option<Uninstall> {
        self.uninstall.as_ref().filter(|(of, _)| of == uid).map(|(_, uninstall)| uninstall.clone())
    }

    /// metadata.uid of the FluxInstance.
    pub fn instance_uid(&self) -> Option<String> {
        self.instance.here().and_then(ResourceExt::uid)
    }

    /// Status of the FluxInstance, which the planner writes.
    pub fn instance_status(&self) -> Option<&FluxInstanceStatus> {
        self.instance.here()?.status.as_ref()
    }

    /// metadata.generation of the spec that the planner acted on last.
    pub fn followed_generation(&self) -> i64 {
        self.instance_status().map_or(0, |status| status.observed_generation)
    }

    /// What the planner says about the next epoch's packages: [`Self::followed_generation`], and the reason of condition RestartPending.
    /// Its message names the jobs that the restart waits for.
    pub fn packages_followed(&self) -> (i64, Option<String>) {
        let pending = self.instance_status().and_then(|status| status.holding(CONDITION_RESTART_PENDING));
        (self.followed_generation(), pending.map(|pending| pending.reason.clone()))
    }

    /// The planner reports that Secret `flux-curve` is gone.
    pub fn lacks_certificate(&self) -> bool {
        self.instance_status().is_some_and(|status| status.holding(CONDITION_CERTIFICATE_MISSING).is_some())
    }

    /// What the planner wants of this node.
    pub fn own_spec(&self) -> Option<&FluxNodeSpec> {
        self.flux_node.here().and_then(own_spec)
    }

    /// What an installation depends on.
    pub fn wish(&self) -> Wish {
        Wish {
            instance_uid: self.instance_uid(),
            generation: self.instance.here().and_then(|instance| instance.metadata.generation),
            followed_generation: self.followed_generation(),
            source: self.own_spec().map(|spec| (spec.want == Want::Nothing, spec.fetch_from.clone())),
        }
    }
}

/// What an installation depends on: which package set, and from where. A new rank, or a lead that has taken this node in, is no
/// reason to begin an installation again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wish {
    instance_uid: Option<String>,
    generation: Option<i64>,
    followed_generation: i64,
    source: Option<(bool, Option<FetchFrom>)>,
}

/// Spec of a FluxNode. None if somebody edited it so that it names another node.
pub fn own_spec(node: &FluxNode) -> Option<&FluxNodeSpec> {
    (node.spec.node_name == node.name_any()).then_some(&node.spec)
}

/// An object that the agent watches.
trait Watched: Resource + Clone + Debug + DeserializeOwned + Send + 'static {
    /// Where it is kept.
    fn place(watched: &mut WatchedObjects) -> &mut Presence<Self>;

    /// True if an agent may act differently than on `before`. What all agents write together, such as how many of them are
    /// ready, begins no round: each round would begin one on every other node.
    fn is_news(&self, before: &Self) -> bool;
}

impl Watched for FluxInstance {
    fn place(watched: &mut WatchedObjects) -> &mut Presence<Self> {
        &mut watched.instance
    }

    fn is_news(&self, before: &Self) -> bool {
        let followed = |instance: &Self| {
            let status = instance.status.as_ref()?;
            // Not the messages: that of a restart which waits for jobs changes with each job.
            let condition = |type_| status.holding(type_).map(|condition| condition.reason.clone());
            let conditions = [CONDITION_CERTIFICATE_MISSING, CONDITION_RESTART_PENDING].map(condition);
            Some((status.observed_generation, status.instance_id.clone(), conditions))
        };
        has_other_metadata(self, before) || self.spec != before.spec || followed(self) != followed(before)
    }
}

impl Watched for FluxNode {
    fn place(watched: &mut WatchedObjects) -> &mut Presence<Self> {
        &mut watched.flux_node
    }

    fn is_news(&self, before: &Self) -> bool {
        // Its status too: a report may have been computed before the watch delivered the one before it. The account in it is the lead's.
        let ours = |node: &Self| node.status.clone().map(|status| FluxNodeStatus { account: None, ..status });
        has_other_metadata(self, before) || self.spec != before.spec || ours(self) != ours(before)
    }
}

impl Watched for Namespace {
    fn place(watched: &mut WatchedObjects) -> &mut Presence<Self> {
        &mut watched.namespace
    }

    fn is_news(&self, before: &Self) -> bool {
        has_other_metadata(self, before)
    }
}

/// True if `object` is another one than `before`, begins to be deleted, or has another generation or other annotations.
fn has_other_metadata<K: Resource>(object: &K, before: &K) -> bool {
    let acted_on = |object: &K| {
        let metadata = object.meta();
        let is_ending = metadata.deletion_timestamp.is_some();
        (metadata.uid.clone(), is_ending, metadata.generation, metadata.annotations.clone())
    };
    acted_on(object) != acted_on(before)
}

/// Watches until the receiver is dropped. The receiver always has the latest state, and is notified of what [may change what the agent
/// does](Watched::is_news), and when a watch goes on after an interruption: then the API server answers again.
pub fn watch_objects(client: &Client, node_name: &str) -> (OwnWrites, watch::Receiver<WatchedObjects>) {
    let (sender, receiver) = watch::channel(WatchedObjects::default());
    let namespaces = Api::<Namespace>::all(client.clone());
    let instances = Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE);
    let nodes = Api::<FluxNode>::namespaced(client.clone(), NAMESPACE);
    tokio::spawn(follow(instances, INSTANCE.to_owned(), sender.clone()));
    tokio::spawn(follow(nodes, node_name.to_owned(), sender.clone()));
    tokio::spawn(follow(namespaces, NAMESPACE.to_owned(), sender.clone()));
    (OwnWrites(sender), receiver)
}

/// Where an agent's own writes become known before the watch delivers them.
pub struct OwnWrites(watch::Sender<WatchedObjects>);

impl OwnWrites {
    /// This agent's FluxNode was `before`, and is `after` by a write of this agent.
    pub fn wrote(&self, before: &FluxNode, after: FluxNode) {
        self.0.send_if_modified(|watched| watched.wrote(before, after));
    }
}

async fn follow<K: Watched>(api: Api<K>, name: String, sender: watch::Sender<WatchedObjects>) {
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let events = watcher(api.clone(), config).default_backoff();
    take_in(events, &api, &name, &sender).await;
}

/// Takes in the `events` of the watch on the object `name`, until they or the receivers end.
async fn take_in<K: Watched>(
    events: impl Stream<Item = Result<watcher::Event<K>, watcher::Error>>,
    api: &Api<K>,
    name: &str,
    sender: &watch::Sender<WatchedObjects>,
) {
    let mut events = pin!(events);
    let mut listed = false;
    let mut is_unclear = false;
    let mut was_interrupted = false;
    while !sender.is_closed() {
        // An empty list proves little; a 404 that names the object proves that it does not exist. A watch goes on after its
        // list and never reports what does not exist, so this asks until there is an answer.
        if is_unclear {
            match timeout(LOOK, read_presence(api, name)).await.unwrap_or_default() {
                Presence::Unknown => {}
                known => {
                    is_unclear = false;
                    sender.send_modify(|watched| watched.set(known));
                }
            }
        }
        let event = tokio::select! {
            () = sender.closed() => return,
            event = events.next() => event,
            () = sleep(jittered(ASK_AGAIN)), if is_unclear => continue,
        };
        match event {
            None => return,
            Some(Ok(watcher::Event::Init)) => (listed, is_unclear) = (false, false),
            Some(Ok(watcher::Event::InitApply(object))) => {
                (listed, is_unclear, was_interrupted) = (true, false, false);
                sender.send_modify(|watched| watched.set(Presence::Here(Box::new(object))));
            }
            Some(Ok(watcher::Event::Apply(object))) => {
                (listed, is_unclear) = (true, false);
                sender.send_if_modified(|watched| {
                    let is_news = K::place(watched).here().is_none_or(|before| object.is_news(before));
                    watched.set(Presence::Here(Box::new(object)));
                    is_news || was_interrupted
                });
                was_interrupted = false;
            }
            // Its last state may never have been seen.
            Some(Ok(watcher::Event::Delete(object))) => {
                is_unclear = false;
                sender.send_modify(|watched| {
                    watched.set(Presence::Here(Box::new(object)));
                    watched.set(Presence::<K>::Gone);
                });
            }
            Some(Ok(watcher::Event::InitDone)) => is_unclear = !listed,
            Some(Err(error)) => {
                was_interrupted = true;
                debug!(name, error = base::error_chain(&error), "a watch was interrupted");
            }
        }
    }
}

/// Reads object `name` once.
pub async fn read_presence<K>(api: &Api<K>, name: &str) -> Presence<K>
where
    K: Clone + Debug + DeserializeOwned,
{
    match api.get(name).await {
        Ok(object) => Presence::Here(Box::new(object)),
        Err(error) if is_named_404(&error, name) => Presence::Gone,
        Err(_) => Presence::Unknown,
    }
}

/// The API server itself says that the object `name` does not exist. A proxy's 404, or that of a deleted CRD, does not name it.
fn is_named_404(error: &kube::Error, name: &str) -> bool {
    match error {
        kube::Error::Api(status) => {
            status.code == 404
                && status.reason == "NotFound"
                && status.details.as_ref().is_some_and(|details| details.name == name)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        iter,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use api::Account;
    use futures::stream;
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    /// A client whose API server lists no FluxInstance, and answers GETs of it with `answers`, in this order.
    fn client(answers: Vec<(u16, serde_json::Value)>, asked: Arc<AtomicUsize>) -> Client {
        let service = tower::service_fn(move |request: Request<Body>| {
            let is_watch = request.uri().query().unwrap_or_default().contains("watch=");
            let (code, body) = if request.uri().path().ends_with("/fluxinstances") {
                let list = json!({ "metadata": { "resourceVersion": "1" }, "items": [] });
                (200, list)
            } else {
                answers[asked.fetch_add(1, Ordering::SeqCst)].clone()
            };
            async move {
                if is_watch {
                    std::future::pending::<()>().await;
                }
                let response = Response::builder().status(code).body(Body::from(body.to_string().into_bytes()));
                Ok::<_, std::io::Error>(response.unwrap())
            }
        });
        Client::new(service, NAMESPACE)
    }

    fn status(code: u16, reason: &str, name: &str) -> (u16, serde_json::Value) {
        let body = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": reason,
                           "reason": reason, "code": code, "details": { "name": name } });
        (code, body)
    }

    #[tokio::test(start_paused = true)]
    async fn an_unlisted_object_is_read_until_the_api_server_says_whether_it_exists() {
        let asked = Arc::<AtomicUsize>::default();
        let answers = vec![
            status(500, "InternalError", INSTANCE),
            status(404, "NotFound", "the wrong one"),
            status(404, "NotFound", INSTANCE),
        ];
        let (sender, mut watched) = watch::channel(WatchedObjects::default());
        let instances = Api::<FluxInstance>::namespaced(client(answers, asked.clone()), NAMESPACE);
        let following = tokio::spawn(follow(instances, INSTANCE.to_owned(), sender));
        let told =
            timeout(Duration::from_mins(1), watched.wait_for(|watched| !matches!(watched.instance, Presence::Unknown)));
        assert!(matches!(told.await.unwrap().unwrap().instance, Presence::Gone));
        assert_eq!(asked.load(Ordering::SeqCst), 3);
        following.abort();
    }

    fn instance(online: u32, annotation: &str) -> FluxInstance {
        let metadata = json!({"name": INSTANCE, "uid": "1", "annotations": {"a": annotation},
                              "resourceVersion": online.to_string()});
        serde_json::from_value(json!({"metadata": metadata, "spec": {}, "status": {"online": online}})).unwrap()
    }

    #[tokio::test]
    async fn only_news_and_the_end_of_an_interruption_begin_a_round() {
        use watcher::Event::{Apply, Init, InitApply, InitDone};
        let all = |online| vec![Ok(Init), Ok(InitApply(instance(online, "x"))), Ok(InitDone)];
        let interrupted = || Err(watcher::Error::NoResourceVersion);
        for (what, events, begins) in [
            ("a count of online members", vec![Ok(Apply(instance(2, "x")))], false),
            ("another annotation", vec![Ok(Apply(instance(2, "y")))], true),
            ("the watch goes on", vec![interrupted(), Ok(Apply(instance(2, "x")))], true),
            ("a watch that can't go on begins anew", iter::once(interrupted()).chain(all(2)).collect(), true),
        ] {
            let (sender, mut watched) = watch::channel(WatchedObjects::default());
            let api = Api::<FluxInstance>::namespaced(client(Vec::new(), Arc::default()), NAMESPACE);
            take_in(stream::iter(all(1)), &api, INSTANCE, &sender).await;
            watched.mark_unchanged();
            take_in(stream::iter(events), &api, INSTANCE, &sender).await;
            assert_eq!(watched.has_changed().unwrap(), begins, "{what}");
            let online = watched.borrow_and_update().instance_status().map(|status| status.online);
            assert_eq!(online, Some(2), "{what}: what begins no round is known in the next one");
        }
    }

    #[test]
    fn an_agents_own_write_begins_no_round_unless_somebody_else_has_written_too() {
        let node = |version: u32, rank: u32, phase: &str| -> FluxNode {
            let metadata = json!({"name": "node1", "uid": "1", "resourceVersion": version.to_string()});
            let (spec, status) = (json!({"nodeName": "node1", "rank": rank}), json!({"phase": phase}));
            serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).unwrap()
        };
        let before = node(1, 1, "Starting");
        for (what, known, after, begins, version) in [
            ("its status", &before, node(2, 1, "Online"), false, "2"),
            ("the planner has written in between", &before, node(3, 2, "Online"), true, "3"),
            ("the watch is ahead", &node(4, 2, "Starting"), node(3, 1, "Online"), false, "4"),
        ] {
            let (sender, mut receiver) = watch::channel(WatchedObjects::default());
            sender.send_modify(|watched| watched.set(Presence::Here(Box::new(known.clone()))));
            receiver.mark_unchanged();
            let own_writes = OwnWrites(sender);
            own_writes.wrote(&before, after);
            assert_eq!(receiver.has_changed().unwrap(), begins, "{what}");
            let known = receiver.borrow_and_update().flux_node.here().and_then(ResourceExt::resource_version);
            assert_eq!(known.as_deref(), Some(version), "{what}");
        }
    }

    #[test]
    fn what_all_agents_write_together_is_no_news() {
        assert!(!instance(8, "x").is_news(&instance(7, "x")));
        assert!(instance(8, "y").is_news(&instance(8, "x")));

        let instance = |online: u32, followed: i64, pending: Option<&str>, spec: serde_json::Value| -> FluxInstance {
            let conditions: Vec<_> = pending
                .map(|reason| {
                    json!({"type": CONDITION_RESTART_PENDING, "status": "True", "reason": reason,
                           "message": format!("packages; waits for {online} jobs"),
                           "lastTransitionTime": "2026-01-01T00:00:00Z"})
                })
                .into_iter()
                .collect();
            let status = json!({"online": online, "observedGeneration": followed, "message": online.to_string(),
                                "conditions": conditions});
            let value = json!({"metadata": {"name": INSTANCE, "uid": "1"}, "spec": spec, "status": status});
            serde_json::from_value(value).unwrap()
        };
        let before = instance(7, 1, None, json!({}));
        assert!(!instance(8, 1, None, json!({})).is_news(&before));
        assert!(instance(7, 2, None, json!({})).is_news(&before));
        let pending = instance(7, 1, Some("Waits"), json!({}));
        assert!(pending.is_news(&before));
        assert!(!instance(8, 1, Some("Waits"), json!({})).is_news(&pending), "a job that it waits for has ended");
        assert!(instance(7, 1, Some("Begins"), json!({})).is_news(&pending));
        assert!(instance(7, 1, None, json!({"size": 8})).is_news(&before));

        let node = |rank: u32, phase: &str| -> FluxNode {
            let (spec, status) = (json!({"nodeName": "node1", "rank": rank}), json!({"phase": phase}));
            serde_json::from_value(json!({"metadata": {"name": "node1"}, "spec": spec, "status": status})).unwrap()
        };
        assert!(!node(1, "Online").is_news(&node(1, "Online")));
        assert!(node(1, "Online").is_news(&node(1, "Starting")));
        assert!(node(2, "Online").is_news(&node(1, "Online")));
        let mut counted = node(1, "Online");
        counted.status.as_mut().unwrap().account = Some(Account { host_jobs: 2, ..Account::default() });
        assert!(!counted.is_news(&node(1, "Online")), "the lead has counted again");
    }
}
