//! Which nodes have no running agent. An agent whose pod was evicted can't correct its last report, so the status of
//! the node's FluxNode may be out of date.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::core::v1::Pod;

/// The part of an agent's pod that planning depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentPod {
    /// metadata.name
    pub name: String,
    /// spec.nodeName
    pub node: String,
    /// Why its container is not running; None if it is.
    pub down: Option<String>,
    /// It never runs again: it has failed, was evicted, or has succeeded.
    pub has_ended: bool,
}

impl AgentPod {
    /// Returns None if the pod has no node yet.
    pub fn of(pod: &Pod) -> Option<Self> {
        let node = pod.spec.as_ref()?.node_name.clone().filter(|node| !node.is_empty())?;
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let has_ended = matches!(phase, Some("Failed" | "Succeeded"));
        Some(Self { name: pod.metadata.name.clone()?, node, down: down(pod), has_ended })
    }
}

fn down(pod: &Pod) -> Option<String> {
    let status = pod.status.clone().unwrap_or_default();
    let phase = status.phase.unwrap_or_default();
    let details = |reason: Option<String>, message: Option<String>| {
        let parts: Vec<_> = [reason, message].into_iter().flatten().filter(|part| !part.is_empty()).collect();
        if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(": ")) }
    };
    match phase.as_str() {
        "Failed" if status.reason.as_deref() == Some("Evicted") => {
            return Some(format!("its pod was evicted{}", details(None, status.message)));
        }
        "Failed" | "Succeeded" => return Some(format!("its pod has ended{}", details(status.reason, status.message))),
        _ => {}
    }
    let states: Vec<_> =
        status.container_statuses.unwrap_or_default().into_iter().filter_map(|container| container.state).collect();
    if states.iter().any(|state| state.running.is_some()) {
        return None;
    }
    let waiting = states.into_iter().find_map(|state| state.waiting);
    Some(match waiting {
        Some(waiting) => format!("its container is not running{}", details(waiting.reason, None)),
        None => "its container is not running".to_owned(),
    })
}

/// The pod that counts on each node. Of several: one that runs, else one that may run again, and the first of these by name, so that every planner
/// names the same. An evicted pod's object stays beside the pod that replaced it.
pub fn by_node<'a>(pods: impl IntoIterator<Item = &'a AgentPod>) -> HashMap<&'a str, &'a AgentPod> {
    let mut found = HashMap::<&str, &AgentPod>::new();
    for pod in pods {
        let known = found.entry(&pod.node).or_insert(pod);
        if precedence(pod) < precedence(known) {
            *known = pod;
        }
    }
    found
}

fn precedence(pod: &AgentPod) -> impl Ord {
    (pod.down.is_some(), pod.has_ended, &pod.name)
}

/// How long an agent may be missing before it is reported, in seconds: a replaced pod or a restarted container is back
/// sooner.
const PATIENCE_SECS: i64 = 10;

/// Remembers since when each node has had no agent, in seconds since the Unix epoch.
#[derive(Debug, Default)]
pub struct Agents(BTreeMap<String, i64>);

impl Agents {
    /// Returns those of `nodes` that have had no agent for at least 10 s, and why. `now` is in seconds.
    /// Without any pod in `pods` the planner can't tell which agents run, so it reports none missing.
    pub fn agentless<'a>(
        &mut self,
        pods: impl IntoIterator<Item = &'a AgentPod>,
        nodes: impl Iterator<Item = &'a str>,
        now: i64,
    ) -> BTreeMap<String, String> {
        let by_node = by_node(pods);
        if by_node.is_empty() {
            self.0.clear();
            return BTreeMap::new();
        }
        let why = |node: &str| match by_node.get(node) {
            None => Some("there is no pod of DaemonSet install-flux on it".to_owned()),
            Some(pod) => pod.down.clone(),
        };
        let down: BTreeMap<_, _> = nodes.filter_map(|node| why(node).map(|why| (node.to_owned(), why))).collect();
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
    fn an_agent_runs_if_its_container_does() {
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
                Some("its container is not running (CrashLoopBackOff)"),
            ),
            (json!({"phase": "Pending"}), Some("its container is not running")),
        ] {
            assert_eq!(pod(status.clone()).down.as_deref(), down, "{status}");
        }
    }

    #[test]
    fn of_several_pods_on_a_node_the_one_counts_that_runs_or_else_may_run_again() {
        let named = |name: &str, down: Option<&str>, has_ended| AgentPod {
            name: name.to_owned(),
            node: "node1".to_owned(),
            down: down.map(str::to_owned),
            has_ended,
        };
        let evicted = || named("a", Some("its pod was evicted"), true);
        let (crashes, runs) = (named("c", Some("its container is not running"), false), named("d", None, false));
        for (mut pods, expected) in [
            (vec![evicted(), crashes.clone()], "c"),
            (vec![evicted(), crashes, runs], "d"),
            (vec![named("b", Some("its pod has ended"), true), evicted()], "a"),
        ] {
            assert_eq!(by_node(&pods)["node1"].name, expected);
            pods.reverse();
            assert_eq!(by_node(&pods)["node1"].name, expected, "in another order");
        }
    }

    #[test]
    fn a_node_has_no_agent_once_none_has_run_there_for_a_while() {
        let of = |node: &str, down: Option<&str>| AgentPod {
            name: format!("install-flux-{node}"),
            node: node.to_owned(),
            down: down.map(str::to_owned),
            has_ended: down.is_some(),
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
            let missing = agents.agentless(pods, nodes(), now);
            assert_eq!(missing.get("node2").map(String::as_str), expected, "{now}");
            assert_eq!(missing.get("node1"), None);
        }
    }
}
