//! What the planner watches, and remembers of it.

use std::time::Duration;

use futures::{Stream, StreamExt, stream::select_all};
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::{
    Api, Client, Resource, ResourceExt,
    runtime::{WatchStreamExt, reflector, reflector::Store, watcher},
};
use tokio::time::timeout;
use tracing::debug;

use crate::api::{FluxInstance, FluxNode, INSTANCE, NAMESPACE};

/// What the planner watches, as the API server told it last.
pub(super) struct Caches {
    pub(super) nodes: Store<Node>,
    pub(super) flux_nodes: Store<FluxNode>,
    pub(super) instances: Store<FluxInstance>,
    /// Ours alone.
    namespaces: Store<Namespace>,
}

impl Caches {
    /// Empty ones, and a stream that fills them while it is driven: an item for each change.
    pub(super) fn watch(client: &Client) -> (Self, impl Stream<Item = ()> + Send + use<>) {
        let all = watcher::Config::default;
        let (nodes, node_changes) = watch(Api::<Node>::all(client.clone()), all());
        let (flux_nodes, flux_node_changes) = watch(Api::<FluxNode>::namespaced(client.clone(), NAMESPACE), all());
        let (instances, instance_changes) = watch(Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE), all());
        let ours = all().fields(&format!("metadata.name={NAMESPACE}"));
        let (namespaces, namespace_changes) = watch(Api::<Namespace>::all(client.clone()), ours);
        let changes =
            [node_changes.boxed(), flux_node_changes.boxed(), instance_changes.boxed(), namespace_changes.boxed()];
        (Self { nodes, flux_nodes, instances, namespaces }, select_all(changes))
    }

    /// There is no instance, or soon there will be none.
    pub(super) fn is_over(&self) -> bool {
        let is_ending = self.namespaces.state().iter().any(|ours| ours.metadata.deletion_timestamp.is_some());
        let stays = |flux: &FluxInstance| flux.name_any() == INSTANCE && flux.metadata.deletion_timestamp.is_none();
        is_ending || !self.instances.state().iter().any(|flux| stays(flux))
    }

    /// All three lists have been read once: before, what is missing proves nothing.
    pub(super) async fn are_complete(&self) -> bool {
        let ready = async {
            let _ = tokio::join!(
                self.nodes.wait_until_ready(),
                self.flux_nodes.wait_until_ready(),
                self.instances.wait_until_ready()
            );
        };
        timeout(Duration::from_millis(1), ready).await.is_ok()
    }
}

fn watch<K>(api: Api<K>, config: watcher::Config) -> (Store<K>, impl Stream<Item = ()> + Send)
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + Sync + 'static,
{
    let (store, writer) = reflector::store();
    let changes = watcher(api, config).default_backoff().reflect(writer).filter_map(|event| async move {
        if let Err(error) = &event {
            debug!(%error, "a watch was interrupted");
        }
        event.is_ok().then_some(())
    });
    (store, changes)
}
