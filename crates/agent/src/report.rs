//! The agent's words: its FluxNode's status, and Events on it.

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, Resource,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tracing::{debug, warn};

use api::{FluxNode, FluxNodeSpec, FluxNodeStatus, NAMESPACE, NodePhase};
use base::error_chain;
use cluster::{Announcer, ApiError, as_read, call, gone_is_fine, merge_patch};

/// How often a FluxNode that changes while it is deleted is read again.
const DELETE_TRIES: u32 = 5;

/// Writes the status page of one node.
pub struct Reporter {
    nodes: Api<FluxNode>,
    client: Client,
    name: String,
    announcer: Announcer,
    /// What the log has last heard of a status that was refused.
    refused: Option<String>,
}

impl Reporter {
    /// The node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// For node `name`, speaking as pod `pod`.
    pub fn new(client: Client, name: String, pod: &str) -> Self {
        Self {
            nodes: Api::namespaced(client.clone(), NAMESPACE),
            client: client.clone(),
            name,
            announcer: Announcer::new(client, pod),
            refused: None,
        }
    }

    /// Makes the FluxNode: the claim, before the first write on the host. One that is there already is fine.
    ///
    /// # Errors
    /// The API server's.
    pub async fn create(&self) -> Result<(), ApiError> {
        let spec = FluxNodeSpec { node_name: self.name.clone(), ..FluxNodeSpec::default() };
        let (params, node) = (PostParams::default(), FluxNode::new(&self.name, spec));
        match call(format!("create FluxNode {}", self.name), self.nodes.create(&params, &node)).await {
            Err(error) if error.code() == Some(409) => Ok(()),
            other => other.map(drop),
        }
    }

    /// metadata.uid of the Node; None where it is gone. By a list of one: a role that lets agents get any Node by name would be
    /// no narrower.
    ///
    /// # Errors
    /// The API server's.
    pub async fn node_uid(&self) -> Result<Option<String>, ApiError> {
        let nodes = Api::<Node>::all(self.client.clone());
        let own = ListParams::default().fields(&format!("metadata.name={}", self.name));
        let found = call(format!("list Node {}", self.name), nodes.list_metadata(&own)).await?;
        Ok(found.items.into_iter().next().and_then(|node| node.metadata.uid))
    }

    /// Writes the status where it differs from what `node` has, and an Event where the phase changed, or what a failed node or one
    /// that is to be cleaned waits for.
    ///
    /// # Errors
    /// The API server's.
    pub async fn write(&mut self, node: &FluxNode, next: &FluxNodeStatus) -> Result<(), ApiError> {
        let before = node.status.clone().unwrap_or_default();
        if node.status.as_ref() == Some(next) {
            return Ok(());
        }
        let change = merge_patch(&json!(before), &json!(next));
        let (params, patch) = (PatchParams::default(), Patch::Merge(json!({"status": change})));
        call(format!("status of FluxNode {}", self.name), self.nodes.patch_status(&self.name, &params, &patch)).await?;
        let failed = next.phase == NodePhase::Failed;
        let waits = failed || next.phase == NodePhase::Removing;
        if before.phase != next.phase || (waits && next.message.is_some() && before.message != next.message) {
            let note = next.message.clone().unwrap_or_else(|| format!("{:?}", next.phase));
            self.announcer.say(&node.object_ref(&()), failed, &format!("{:?}", next.phase), &note).await;
        }
        Ok(())
    }

    /// [`Reporter::write`] for who goes on without it. What the API server refuses whenever it is asked (by a policy, a role, the
    /// schema of another version) is told once in the log, since the status itself can't tell it; all else passes by itself.
    pub async fn try_write(&mut self, node: &FluxNode, next: &FluxNodeStatus) {
        let Err(error) = self.write(node, next).await else {
            self.refused = None;
            return;
        };
        let passes = !error.is_lasting() && !matches!(error.code(), Some(400..=403));
        let error = error_chain(&error);
        if passes || self.refused.as_ref() == Some(&error) {
            debug!(error, "the status could not be written");
        } else {
            warn!(error, "the API server refuses this node's status: what it shows is old");
            self.refused = Some(error);
        }
    }

    /// Deletes the FluxNode: the host is clean. The planner may write to it at the same moment.
    ///
    /// # Errors
    /// The API server's; code 409 where it changes again and again.
    pub async fn delete(&self) -> Result<(), ApiError> {
        let mut tries = 1..=DELETE_TRIES;
        loop {
            let found = call(format!("get FluxNode {}", self.name), self.nodes.get_metadata_opt(&self.name)).await?;
            let Some(params) = found.as_ref().map(as_read) else { return Ok(()) };
            let deleted = self.nodes.delete(&self.name, &params);
            match gone_is_fine(call(format!("delete FluxNode {}", self.name), deleted).await) {
                Err(error) if error.code() == Some(409) && tries.next().is_some() => {}
                other => return other,
            }
        }
    }

    /// Reads another node's FluxNode.
    ///
    /// # Errors
    /// The API server's.
    pub async fn of(&self, name: &str) -> Result<Option<FluxNode>, ApiError> {
        call(format!("get FluxNode {name}"), self.nodes.get_opt(name)).await
    }
}
