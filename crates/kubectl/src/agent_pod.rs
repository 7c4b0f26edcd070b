//! Which pod to speak to.

use crate::{
    error::KubectlError,
    observed::{Cluster, Observed},
    overview::lead_of,
};
use api::NAMESPACE;
use base::words::visible;
use kube::ResourceExt;
use model::agents::{AgentPod, by_node};

/// A node, and the name of the agent's pod on it.
pub(crate) struct OnNode {
    pub node: String,
    pub pod: String,
}

/// The agent's pod on `node`, or on the lead's node.
///
/// # Errors
/// No node leads yet, no agent runs on the node, or the API server fails.
pub(crate) async fn agent_pod(cluster: &Cluster, node: Option<&str>) -> Result<OnNode, KubectlError> {
    let node = match node {
        Some(node) => node.to_owned(),
        None => leading(&cluster.observe().await?)?,
    };
    let pod = running_on(&node, &cluster.agents(Some(&node)).await?)?.to_owned();
    Ok(OnNode { node, pod })
}

/// The name of the lead's node. Pure.
///
/// # Errors
/// No node leads yet; or the planner's status names another node, so that one of the two is out of date or forged.
fn leading(observed: &Observed) -> Result<String, KubectlError> {
    let state = |message: String| KubectlError::State(message);
    let Some(lead) = lead_of(observed).map(ResourceExt::name_any) else {
        return Err(state("no node leads yet: `kubectl flux status` shows what the nodes wait for".to_owned()));
    };
    match observed.instance.status.as_ref().and_then(|status| status.lead.as_ref()) {
        Some(other) if *other != lead => Err(state(visible(&format!(
            "node {lead} has rank 0, but the FluxInstance names {other} as the lead: try again, or name a node"
        )))),
        _ => Ok(lead),
    }
}

/// The name of the pod that runs on `node`. Pure.
///
/// # Errors
/// None runs there.
fn running_on<'a>(node: &str, pods: &'a [AgentPod]) -> Result<&'a str, KubectlError> {
    match by_node(pods).get(node) {
        Some(AgentPod { name, down: None, .. }) => Ok(name),
        Some(AgentPod { name, down: Some(why), .. }) => Err(KubectlError::State(visible(&format!(
            "the agent of node {node} does not run: {why}; `kubectl -n {NAMESPACE} describe pod {name}` shows more"
        )))),
        None => Err(KubectlError::NoAgent(node.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::{change, observed};

    #[test]
    fn a_lead_that_two_objects_name_differently_is_not_spoken_to() {
        let of =
            |status: &Value, count| leading(&observed(count, status, &Value::Null)).map_err(|error| error.to_string());
        assert_eq!(of(&Value::Null, 2), Ok("n1".to_owned()));
        assert_eq!(of(&json!({"lead": null}), 2), Ok("n1".to_owned()));
        assert!(of(&json!({"lead": "n2"}), 2).unwrap_err().starts_with("node n1 has rank 0, but"));
        let mut none = observed(1, &Value::Null, &Value::Null);
        change(&mut none, 0, &json!({"rank": null}), &Value::Null);
        assert!(leading(&none).unwrap_err().to_string().starts_with("no node leads yet"));
    }

    #[test]
    fn only_a_running_pod_is_spoken_to() {
        let pod = |name: &str, node: &str, down: Option<&str>| AgentPod {
            name: name.to_owned(),
            node: node.to_owned(),
            down: down.map(str::to_owned),
            has_ended: false,
        };
        let pods = [pod("a", "n1", Some("evicted")), pod("b", "n1", None), pod("c", "n2", Some("crashes"))];
        assert_eq!(running_on("n1", &pods).unwrap(), "b");
        let why = |node: &str| running_on(node, &pods).unwrap_err().to_string();
        assert!(why("n2").starts_with("the agent of node n2 does not run: crashes"), "{}", why("n2"));
        assert!(why("n3").starts_with("no agent runs on node n3"), "{}", why("n3"));
    }
}
