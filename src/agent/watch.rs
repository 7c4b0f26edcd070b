//! What the agent watches, from its start: its FluxNode, the FluxInstance, its DaemonSet and its Namespace. At a teardown
//! the right to ask is gone within half a second, while open watches still deliver.

use std::{fmt::Debug, pin::pin};

use futures::StreamExt;
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Namespace};
use kube::{
    Api, Client, Resource, ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tracing::debug;

use crate::api::{
    CONDITION_CERTIFICATE_MISSING, DAEMONSET, FluxInstance, FluxInstanceStatus, FluxNode, FluxNodeSpec, INSTANCE,
    NAMESPACE, Uninstall,
};

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
        self.end.as_ref().filter(|(of, _)| of == uid).map(|(_, end)| *end)
    }

    /// uid of the FluxInstance.
    pub fn instance_uid(&self) -> Option<String> {
        self.instance.here().and_then(ResourceExt::uid)
    }

    /// What the planner says of the FluxInstance.
    pub fn instance_status(&self) -> Option<&FluxInstanceStatus> {
        self.instance.here()?.status.as_ref()
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

/// Watches until the receiver is dropped.
pub fn world(client: &Client, node_name: &str) -> watch::Receiver<World> {
    let (sender, receiver) = watch::channel(World::default());
    tokio::spawn(follow(
        Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE),
        INSTANCE.to_owned(),
        sender.clone(),
        |world, presence| {
            let end = presence.here().and_then(|instance| Some((instance.uid()?, instance.spec.uninstall)));
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
        DAEMONSET.to_owned(),
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
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Init) => listed = false,
            Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object)) => {
                listed = true;
                sender.send_modify(|world| set(world, Presence::Here(Box::new(object))));
            }
            // Its last state may never have been seen.
            Ok(watcher::Event::Delete(object)) => sender.send_modify(|world| {
                set(world, Presence::Here(Box::new(object)));
                set(world, Presence::Gone);
            }),
            // An empty list proves little; a 404 that names the object proves it.
            Ok(watcher::Event::InitDone) if !listed => {
                let presence = look(&api, &name).await;
                sender.send_modify(|world| set(world, presence));
            }
            Ok(watcher::Event::InitDone) => {}
            Err(error) => debug!(name, error = crate::error_chain(&error), "a watch was interrupted"),
        }
        if sender.is_closed() {
            return;
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
