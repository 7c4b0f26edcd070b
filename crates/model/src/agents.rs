//! Which nodes have no agent that runs. An agent whose pod was evicted can't take back its last word, which stands in the
//! node's FluxNode.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

/// The agent's pod on a node, as far as planning needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentPod {
    /// metadata.name
    pub name: String,
    /// spec.nodeName
    pub node: String,
    /// Why its container does not run; None: it runs.
    pub down: Option<String>,
}

impl AgentPod {
    /// None: the pod has no node yet.
    pub fn of(pod: &Pod) -> Option<Self> {
        let node = pod.spec.as_ref()?.node_name.clone().filter(|node| !node.is_empty())?;
        Some(Self { name: pod.metadata.name.clone()?, node, down: down(pod) })
    }
}

fn down(pod: &Pod) -> Option<String> {
    let status = pod.status.clone().unwrap_or_default();
    let phase = status.phase.unwrap_or_default();
    let told = |reason: Option<String>, message: Option<String>| {
        let words: Vec<_> = [reason, message].into_iter().flatten().filter(|word| !word.is_empty()).collect();
        if words.is_empty() { String::new() } else { format!(" ({})", words.join(": ")) }
    };
    match phase.as_str() {
        "Failed" if status.reason.as_deref() == Some("Evicted") => {
            return Some(format!("its pod was evicted{}", told(None, status.message)));
        }
        "Failed" | "Succeeded" => return Some(format!("its pod has ended{}", told(status.reason, status.message))),
        _ => {}
    }
    let states: Vec<_> =
        status.container_statuses.unwrap_or_default().into_iter().filter_map(|container| container.state).collect();
    if states.iter().any(|state| state.running.is_some()) {
        return None;
    }
    let waiting = states.into_iter().find_map(|state| state.waiting);
    Some(match waiting {
        Some(waiting) => format!("its container does not run{}", told(waiting.reason, None)),
        None => "its container does not run".to_owned(),
    })
}

/// A pod that is replaced, or a container that is started again, is back within seconds.
const PATIENCE_SECS: i64 = 10;

/// Remembers since when a node has had no agent.
#[derive(Debug, Default)]
pub struct Agents(BTreeMap<String, i64>);

impl Agents {
    /// Those of `nodes` that have had no agent for longer than it takes to replace one, and why. `now` is in seconds. Where no
    /// pod can be seen at all, nothing is known of any.
    pub fn missing<'a>(
        &mut self,
        pods: &[AgentPod],
        nodes: impl Iterator<Item = &'a str>,
        now: i64,
    ) -> BTreeMap<String, String> {
        if pods.is_empty() {
            self.0.clear();
            return BTreeMap::new();
        }
        let mut by_node = BTreeMap::<&str, Option<&String>>::new();
        for AgentPod { node, down, .. } in pods {
            // One that was evicted stays beside the next one, which runs.
            by_node.entry(node).and_modify(|known| *known = known.and(down.as_ref())).or_insert(down.as_ref());
        }
        let why = |node: &str| match by_node.get(node) {
            None => Some("there is no pod of DaemonSet install-flux on it".to_owned()),
            Some(down) => down.cloned(),
        };
        let down: BTreeMap<_, _> = nodes.filter_map(|node| Some((node.to_owned(), why(node)?))).collect();
        self.0.retain(|node, _| down.contains_key(node));
        down.into_iter().filter(|(node, _)| now - *self.0.entry(node.clone()).or_insert(now) >= PATIENCE_SECS).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: Value) -> AgentPod {
        let pod = json!({"metadata": {"name": "p"}, "spec": {"nodeName": "node1", "containers": []}, "status": status});
        AgentPod::of(&serde_json::from_value(pod).unwrap()).unwrap()
    }

    fn container(state: Value) -> Value {
        json!([{"name": "agent", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state}])
    }

    #[test]
    fn an_agent_runs_where_its_container_does() {
        for (status, down) in [
            (json!({"phase": "Running", "containerStatuses": container(json!({"running": {}}))}), None),
            (
                json!({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}),
                Some("its pod was evicted (The node was low on resource: memory.)"),
            ),
            (
                json!({"phase": "Failed", "reason": "UnexpectedAdmissionError"}),
                Some("its pod has ended (UnexpectedAdmissionError)"),
            ),
            (
                json!({"phase": "Running", "containerStatuses": container(json!({"waiting": {"reason": "CrashLoopBackOff"}}))}),
                Some("its container does not run (CrashLoopBackOff)"),
            ),
            (json!({"phase": "Pending"}), Some("its container does not run")),
        ] {
            assert_eq!(pod(status.clone()).down.as_deref(), down, "{status}");
        }
    }

    #[test]
    fn a_node_is_without_agent_once_nobody_has_come_for_a_while() {
        let of = |node: &str, down: Option<&str>| AgentPod {
            name: format!("install-flux-{node}"),
            node: node.to_owned(),
            down: down.map(str::to_owned),
        };
        let nodes = || ["node1", "node2"].into_iter();
        let mut agents = Agents::default();
        let runs = [of("node1", None), of("node2", None)];
        let evicted = [of("node1", None), of("node2", Some("its pod was evicted"))];
        let replaced = [of("node1", None), of("node2", Some("its pod was evicted")), of("node2", None)];
        let gone = [of("node1", None)];
        for (now, pods, expected) in [
            (0, &runs[..], None),
            (1, &evicted, None),
            (1 + PATIENCE_SECS, &evicted, Some("its pod was evicted")),
            (100, &replaced, None),
            (101, &gone, None),
            (101 + PATIENCE_SECS, &gone, Some("there is no pod of DaemonSet install-flux on it")),
            (200, &[], None),
        ] {
            let missing = agents.missing(pods, nodes(), now);
            assert_eq!(missing.get("node2").map(String::as_str), expected, "{now}");
            assert_eq!(missing.get("node1"), None);
        }
    }
}
