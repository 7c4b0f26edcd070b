//! What the planner watches, and remembers of it.

use std::{collections::HashMap, future::ready, sync::Arc, time::Duration};

use futures::{Stream, StreamExt, stream::select_all};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::{DeserializeGuard, error_boundary::InvalidObject},
    runtime::{WatchStreamExt, reflector, reflector::Store, watcher},
};
use tokio::time::timeout;
use tracing::{debug, warn};

use api::{DAEMONSET, FluxInstance, FluxNode, INSTANCE, NAMESPACE};
use model::{agents::AgentPod, eligibility::NodeView};

/// What the planner watches, as the API server told it last.
pub(super) struct Caches {
    pub(super) nodes: Store<Node>,
    /// One that this version can't read must not hide the others; see [`readable`].
    pub(super) flux_nodes: Store<DeserializeGuard<FluxNode>>,
    pub(super) instances: Store<FluxInstance>,
    /// The agents'.
    pods: Store<Pod>,
    /// Ours alone.
    namespaces: Store<Namespace>,
}

impl Caches {
    /// Empty ones, and a stream that fills them while it is driven: an item for each change that may be one for planning.
    pub(super) fn watch(client: &Client) -> (Self, impl Stream<Item = ()> + Send + use<>) {
        let all = watcher::Config::default;
        let (nodes, node_changes) = watch(Api::<Node>::all(client.clone()), all());
        let (flux_nodes, flux_node_changes) = watch(Api::namespaced(client.clone(), NAMESPACE), all());
        let flux_node_changes = flux_node_changes.inspect(tell_if_unreadable);
        let (instances, instance_changes) = watch(Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE), all());
        let ours = all().fields(&format!("metadata.name={NAMESPACE}"));
        let (namespaces, namespace_changes) = watch(Api::<Namespace>::all(client.clone()), ours);
        let agents = all().labels(&format!("app={DAEMONSET}"));
        let (pods, pod_changes) = watch(Api::<Pod>::namespaced(client.clone(), NAMESPACE), agents);
        let view = |node: &Node| Some(NodeView::from(node));
        let node_changes = only_news(node_changes, view);
        let pod_changes = only_news(pod_changes, AgentPod::of);
        let changes = [
            node_changes.map(drop).boxed(),
            flux_node_changes.map(drop).boxed(),
            instance_changes.map(drop).boxed(),
            namespace_changes.map(drop).boxed(),
            pod_changes.map(drop).boxed(),
        ];
        (Self { nodes, flux_nodes, instances, pods, namespaces }, select_all(changes))
    }

    /// The agents' pods that have a node. None at all where they can't be read: an older manifest gives no right to.
    pub(super) fn agents(&self) -> Vec<AgentPod> {
        self.pods.state().iter().filter_map(|pod| AgentPod::of(pod)).collect()
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

/// The FluxNodes that this version can read. One of another version that it can't is left alone, as if its agent had said nothing
/// yet: another version may know better.
pub(super) fn readable(nodes: &[Arc<DeserializeGuard<FluxNode>>]) -> impl Iterator<Item = &FluxNode> {
    nodes.iter().filter_map(|node| node.0.as_ref().ok())
}

fn tell_if_unreadable(event: &watcher::Event<DeserializeGuard<FluxNode>>) {
    if let watcher::Event::Apply(node) | watcher::Event::InitApply(node) = event
        && let DeserializeGuard(Err(InvalidObject { error, .. })) = node
    {
        warn!(node = node.name_any(), error, "a FluxNode can't be read by this version: finish the upgrade");
    }
}

/// Without what a kubelet says again and again: its heartbeat, its images, a probe.
fn only_news<K, V>(
    changes: impl Stream<Item = watcher::Event<K>> + Send,
    view: impl Fn(&K) -> Option<V> + Send + 'static,
) -> impl Stream<Item = watcher::Event<K>> + Send
where
    K: Resource<DynamicType = ()> + Send,
    V: PartialEq + Send,
{
    let mut known = HashMap::new();
    changes.filter(move |event| ready(is_news(&mut known, event, &view)))
}

/// `view`: what planning needs to know of an object.
fn is_news<K, V>(
    known: &mut HashMap<String, Option<V>>,
    event: &watcher::Event<K>,
    view: impl Fn(&K) -> Option<V>,
) -> bool
where
    K: Resource<DynamicType = ()>,
    V: PartialEq,
{
    match event {
        watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
            let seen = view(object);
            let before = known.get(&object.name_any());
            let is_news = before != Some(&seen);
            if is_news {
                known.insert(object.name_any(), seen);
            }
            is_news
        }
        watcher::Event::Delete(object) => known.remove(&object.name_any()).is_some(),
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
            assert_eq!(is_news(&mut known, &event, |node| Some(NodeView::from(node))), expected, "{event:?}");
        }
    }
}
