//! What the planner watches, and remembers of it.

use std::{collections::HashMap, future::ready, time::Duration};

use futures::{Stream, StreamExt, stream::select_all};
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::{
    Api, Client, Resource, ResourceExt,
    runtime::{WatchStreamExt, reflector, reflector::Store, watcher},
};
use tokio::time::timeout;
use tracing::debug;

use crate::{
    api::{FluxInstance, FluxNode, INSTANCE, NAMESPACE},
    plan::eligibility::NodeView,
};

/// What the planner watches, as the API server told it last.
pub(super) struct Caches {
    pub(super) nodes: Store<Node>,
    pub(super) flux_nodes: Store<FluxNode>,
    pub(super) instances: Store<FluxInstance>,
    /// Ours alone.
    namespaces: Store<Namespace>,
}

impl Caches {
    /// Empty ones, and a stream that fills them while it is driven: an item for each change that may be one for planning.
    pub(super) fn watch(client: &Client) -> (Self, impl Stream<Item = ()> + Send + use<>) {
        let all = watcher::Config::default;
        let (nodes, node_changes) = watch(Api::<Node>::all(client.clone()), all());
        let (flux_nodes, flux_node_changes) = watch(Api::<FluxNode>::namespaced(client.clone(), NAMESPACE), all());
        let (instances, instance_changes) = watch(Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE), all());
        let ours = all().fields(&format!("metadata.name={NAMESPACE}"));
        let (namespaces, namespace_changes) = watch(Api::<Namespace>::all(client.clone()), ours);
        let mut known = HashMap::new();
        let node_changes = node_changes.filter(move |event| ready(is_news(&mut known, event)));
        let changes = [
            node_changes.map(drop).boxed(),
            flux_node_changes.map(drop).boxed(),
            instance_changes.map(drop).boxed(),
            namespace_changes.map(drop).boxed(),
        ];
        (Self { nodes, flux_nodes, instances, namespaces }, select_all(changes))
    }

    /// There is no instance, or soon there will be none.
    pub(super) fn is_over(&self) -> bool {
        let is_ending = self.namespaces.state().iter().any(|ours| ours.metadata.deletion_timestamp.is_some());
        let stays = |flux: &FluxInstance| flux.name_any() == INSTANCE && flux.metadata.deletion_timestamp.is_none();
        is_ending || !self.instances.state().iter().any(|flux| stays(flux))
    }

    /// Nodes, FluxNodes and FluxInstances have been read once: before, what is missing proves nothing. The Namespace is not
    /// waited for: only what it says counts, that it is being deleted, and nothing is planned because it is missing.
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

/// What a kubelet says again and again is none: its heartbeat, and its images.
fn is_news(known: &mut HashMap<String, NodeView>, event: &watcher::Event<Node>) -> bool {
    match event {
        watcher::Event::Apply(node) | watcher::Event::InitApply(node) => {
            let view = NodeView::from(node);
            known.insert(view.name.clone(), view.clone()) != Some(view)
        }
        watcher::Event::Delete(node) => known.remove(&node.name_any()).is_some(),
        watcher::Event::Init | watcher::Event::InitDone => true,
    }
}

fn watch<K>(api: Api<K>, config: watcher::Config) -> (Store<K>, impl Stream<Item = watcher::Event<K>> + Send)
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + Sync + 'static,
{
    let (store, writer) = reflector::store();
    let changes = watcher(api, config).default_backoff().reflect(writer).filter_map(|event| async move {
        if let Err(error) = &event {
            debug!(%error, "a watch was interrupted");
        }
        event.ok()
    });
    (store, changes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_heartbeat_is_no_news_of_a_node() {
        let node = |uid: &str, ready: &str, heartbeat: &str| -> Node {
            let condition = json!({"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat});
            let node = json!({"metadata": {"name": "node1", "uid": uid}, "status": {"conditions": [condition]}});
            serde_json::from_value(node).unwrap()
        };
        let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z");
        let mut known = HashMap::new();
        for (event, expected) in [
            (watcher::Event::InitApply(node("a", "False", early)), true),
            (watcher::Event::InitDone, true),
            (watcher::Event::Apply(node("a", "False", late)), false),
            (watcher::Event::Apply(node("a", "True", late)), true),
            (watcher::Event::Delete(node("a", "True", late)), true),
            (watcher::Event::Apply(node("a", "True", late)), true),
            (watcher::Event::Apply(node("b", "True", late)), true),
        ] {
            assert_eq!(is_news(&mut known, &event), expected, "{event:?}");
        }
    }
}
