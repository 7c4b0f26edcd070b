//! What the agent watches, from its start: its FluxNode, the FluxInstance, its DaemonSet and its Namespace. At a teardown
//! the right to ask is gone within half a second, while open watches still deliver.

use std::{fmt::Debug, pin::pin, time::Duration};

use futures::StreamExt;
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Namespace};
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

use super::run::SOON;
use api::{
    CONDITION_CERTIFICATE_MISSING, FluxInstance, FluxInstanceStatus, FluxNode, FluxNodeSpec, INSTANCE, NAMESPACE,
    Uninstall,
};
use base::chance::jittered;

/// A single question to an API server that may be silent.
const LOOK: Duration = Duration::from_secs(10);

/// One object that is watched.
#[derive(Debug, Clone, Default)]
pub enum Presence<K> {
    /// No word yet.
    #[default]
    Unknown,
    /// It is there.
    Here(Box<K>),
    /// By the API server's positive word it is not there: DELETED, or a 404 of its own that names it.
    Gone,
}

impl<K: Resource> Presence<K> {
    /// It is there.
    pub fn here(&self) -> Option<&K> {
        match self {
            Self::Here(object) => Some(object),
            _ => None,
        }
    }

    /// It is gone or on its way.
    pub fn is_ending(&self) -> bool {
        match self {
            Self::Unknown => false,
            Self::Here(object) => object.meta().deletion_timestamp.is_some(),
            Self::Gone => true,
        }
    }
}

/// Everything watched.
#[derive(Debug, Clone, Default)]
pub struct World {
    /// FluxInstance `flux`.
    pub instance: Presence<FluxInstance>,
    /// Our FluxNode.
    pub node: Presence<FluxNode>,
    /// Our DaemonSet.
    pub daemonset: Presence<DaemonSet>,
    /// Our Namespace.
    pub namespace: Presence<Namespace>,
    /// uid and spec.uninstall of the FluxInstance as they were last seen: how an instance is to end may be said right before it
    /// is deleted, and counts then.
    end: Option<(String, Uninstall)>,
}

impl World {
    /// The FluxInstance is over, by a positive word.
    pub fn is_over(&self) -> bool {
        self.instance.is_ending() || self.namespace.is_ending()
    }

    /// How FluxInstance `uid` is to end, also when it is gone; None: it was not seen.
    pub fn end_of(&self, uid: &str) -> Option<Uninstall> {
        self.end.as_ref().filter(|(of, _)| of == uid).map(|(_, end)| end.clone())
    }

    /// uid of the FluxInstance.
    pub fn instance_uid(&self) -> Option<String> {
        self.instance.here().and_then(ResourceExt::uid)
    }

    /// What the planner says of the FluxInstance.
    pub fn instance_status(&self) -> Option<&FluxInstanceStatus> {
        self.instance.here()?.status.as_ref()
    }

    /// metadata.generation of the spec that the planner has followed.
    pub fn followed_generation(&self) -> i64 {
        self.instance_status().map_or(0, |status| status.observed_generation)
    }

    /// Secret `flux-curve` is gone, by the planner's word.
    pub fn lacks_certificate(&self) -> bool {
        self.instance_status().is_some_and(|status| status.holding(CONDITION_CERTIFICATE_MISSING).is_some())
    }

    /// The planner's words to this node; words to another one, by an edit of somebody else's, are none.
    pub fn node_spec(&self) -> Option<&FluxNodeSpec> {
        self.node.here().filter(|node| node.spec.node_name == node.name_any()).map(|node| &node.spec)
    }
}

/// Watches until the receiver is dropped. `daemonset`: the name of the one that this agent belongs to.
pub fn world(client: &Client, node_name: &str, daemonset: &str) -> watch::Receiver<World> {
    let (sender, receiver) = watch::channel(World::default());
    tokio::spawn(follow(
        Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE),
        INSTANCE.to_owned(),
        sender.clone(),
        |world, presence| {
            let end = presence.here().and_then(|instance| Some((instance.uid()?, instance.spec.uninstall.clone())));
            world.end = end.or(world.end.take());
            world.instance = presence;
        },
    ));
    tokio::spawn(follow(
        Api::<FluxNode>::namespaced(client.clone(), NAMESPACE),
        node_name.to_owned(),
        sender.clone(),
        |world, presence| world.node = presence,
    ));
    tokio::spawn(follow(
        Api::<DaemonSet>::namespaced(client.clone(), NAMESPACE),
        daemonset.to_owned(),
        sender.clone(),
        |world, presence| world.daemonset = presence,
    ));
    tokio::spawn(follow(Api::<Namespace>::all(client.clone()), NAMESPACE.to_owned(), sender, |world, presence| {
        world.namespace = presence
    }));
    receiver
}

async fn follow<K>(api: Api<K>, name: String, sender: watch::Sender<World>, set: fn(&mut World, Presence<K>))
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut events = pin!(watcher(api.clone(), config).default_backoff());
    let mut listed = false;
    let mut is_unclear = false;
    while !sender.is_closed() {
        // An empty list proves little; a 404 that names the object proves it. Asked until there is an answer: a watch goes on
        // after its last list, and says nothing of what is not there.
        if is_unclear {
            match timeout(LOOK, look(&api, &name)).await.unwrap_or_default() {
                Presence::Unknown => {}
                known => {
                    is_unclear = false;
                    sender.send_modify(|world| set(world, known));
                }
            }
        }
        let event = tokio::select! {
            event = events.next() => event,
            () = sleep(jittered(SOON)), if is_unclear => continue,
        };
        match event {
            None => return,
            Some(Ok(watcher::Event::Init)) => (listed, is_unclear) = (false, false),
            Some(Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object))) => {
                (listed, is_unclear) = (true, false);
                sender.send_modify(|world| set(world, Presence::Here(Box::new(object))));
            }
            // Its last state may never have been seen.
            Some(Ok(watcher::Event::Delete(object))) => {
                is_unclear = false;
                sender.send_modify(|world| {
                    set(world, Presence::Here(Box::new(object)));
                    set(world, Presence::Gone);
                });
            }
            Some(Ok(watcher::Event::InitDone)) => is_unclear = !listed,
            Some(Err(error)) => debug!(name, error = base::error_chain(&error), "a watch was interrupted"),
        }
    }
}

/// Asks once.
pub async fn look<K>(api: &Api<K>, name: &str) -> Presence<K>
where
    K: Clone + Debug + DeserializeOwned,
{
    match api.get(name).await {
        Ok(object) => Presence::Here(Box::new(object)),
        Err(error) if is_named_404(&error, name) => Presence::Gone,
        Err(_) => Presence::Unknown,
    }
}

/// The API server itself says that the object `name` isn't there. A proxy's 404, or that of a CRD which is gone, does not
/// name it.
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
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    /// Lists no FluxInstance, and answers `answers` to those who ask for it by name, one after the other.
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
    async fn what_is_in_no_list_is_asked_for_until_the_api_server_says_whether_it_is_there() {
        let asked = Arc::<AtomicUsize>::default();
        let answers = vec![
            status(500, "InternalError", INSTANCE),
            status(404, "NotFound", "the wrong one"),
            status(404, "NotFound", INSTANCE),
        ];
        let (sender, mut world) = watch::channel(World::default());
        let instances = Api::<FluxInstance>::namespaced(client(answers, asked.clone()), NAMESPACE);
        let set: fn(&mut World, Presence<FluxInstance>) = |world, presence| world.instance = presence;
        let following = tokio::spawn(follow(instances, INSTANCE.to_owned(), sender, set));
        let told =
            timeout(Duration::from_secs(60), world.wait_for(|world| !matches!(world.instance, Presence::Unknown)));
        assert!(matches!(told.await.unwrap().unwrap().instance, Presence::Gone));
        assert_eq!(asked.load(Ordering::SeqCst), 3);
        following.abort();
    }
}
