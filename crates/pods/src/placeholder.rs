//! Placeholder pods: what host jobs use of a node is requested in Kubernetes as well, so that no scheduler gives it to other pods.
//!
//! There is at most one for each node, in a namespace of their own and with the node's name. It only waits: its requests count.

use k8s_openapi::api::core::v1::Pod;

use crate::requests::{Amounts, INFEASIBLE, Size, resize_pending};

/// The namespace of the placeholder pods, which holds nothing else. `deploy/pods.yaml` makes it.
pub const NAMESPACE: &str = "flux-host-jobs";

/// The least that a placeholder pod requests: with nothing at all it would have another QoS class, which a resize may not change.
pub const LEAST: Size = Size { cpu: 1, memory: 4 << 20 };

/// What matters of a placeholder pod beside what does of each pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placeholder {
    /// What the spec requests. [`crate::pod::PodView::requests`] is what kubelet counts: more, while a shrink is under way.
    pub asks: Size,
    /// kubelet says that it can't resize the pod: condition PodResizePending with reason Infeasible.
    pub cant_be_resized: bool,
}

impl Placeholder {
    /// Reads `pod`; None unless it is a placeholder pod.
    pub fn of(pod: &Pod) -> Option<Self> {
        let (meta, spec) = (&pod.metadata, pod.spec.as_ref()?);
        let is_ours = meta.namespace.as_deref() == Some(NAMESPACE) && meta.name == spec.node_name;
        let requests = spec.containers.first().filter(|_| is_ours)?.resources.as_ref()?.requests.as_ref();
        let Amounts(asks) = Amounts::read(requests).ok()?;
        let amount = |name: &str| asks.get(name).copied().unwrap_or_default();
        Some(Self {
            asks: Size { cpu: amount("cpu"), memory: amount("memory") },
            cant_be_resized: resize_pending(pod) == Some(INFEASIBLE),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_pod_with_its_nodes_name_in_the_namespace_is_a_placeholder() {
        let pod = |namespace: &str, name: &str, node: &str, reason: &str| {
            let requests = json!({"cpu": "1500m", "memory": "8Mi"});
            let condition = json!({"type": "PodResizePending", "status": "True", "reason": reason});
            let pod = json!({
                "metadata": {"namespace": namespace, "name": name},
                "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"requests": requests}}]},
                "status": {"conditions": [condition]},
            });
            Placeholder::of(&serde_json::from_value(pod).unwrap())
        };
        let asks = Size { cpu: 1500, memory: 8 << 20 };
        for (found, expected) in [
            (pod(NAMESPACE, "n1", "n1", "Deferred"), Some((asks, false))),
            (pod(NAMESPACE, "n1", "n1", "Infeasible"), Some((asks, true))),
            (pod(NAMESPACE, "n1", "n2", "Deferred"), None),
            (pod("default", "n1", "n1", "Deferred"), None),
        ] {
            assert_eq!(found.map(|found| (found.asks, found.cant_be_resized)), expected);
        }
    }
}
