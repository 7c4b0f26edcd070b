//! Writes this node's FluxNode, and Events on it.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ListParams, Patch, PostParams},
};
use serde_json::json;
use tokio::time::Instant;
use tracing::{debug, warn};

use api::{FluxNode, FluxNodeSpec, FluxNodeStatus, NAMESPACE, NodePhase};
use base::{chance::jittered, error_chain};
use cluster::{Announcer, ApiError, as_read, call, gone_is_fine, merge_patch, patch_params};

/// How often a FluxNode that changes while it is deleted is read again.
const DELETE_TRIES: u32 = 5;
/// First pause before the agent writes a status again that the API server has refused or cut. It doubles each time, up to [`LONGEST_PAUSE`]: all
/// agents may have such a status, for example while the CustomResourceDefinition is an older one.
const FIRST_PAUSE: Duration = Duration::from_secs(6);
/// The longest such pause, before up to half of it is added at random.
const LONGEST_PAUSE: Duration = Duration::from_mins(2);

/// Writes the FluxNode of one node.
pub struct Reporter {
    nodes: Api<FluxNode>,
    client: Client,
    name: String,
    announcer: Announcer,
    /// The refusal of a status that was logged last.
    refused: Option<String>,
    /// The status that is not written again for a while.
    held_back: Option<HeldBack>,
}

/// A status that the API server has refused, or did not keep whole.
struct HeldBack {
    status: FluxNodeStatus,
    /// uid of the FluxNode that did not take it: a new one may.
    uid: Option<String>,
    /// Its resourceVersion: once somebody has changed the FluxNode, it may take the status.
    resource_version: Option<String>,
    pause: Duration,
    until: Instant,
}

impl Reporter {
    /// The node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// For node `name`; Events name pod `pod` as their source.
    pub fn new(client: Client, name: String, pod: &str) -> Self {
        Self {
            nodes: Api::namespaced(client.clone(), NAMESPACE),
            client: client.clone(),
            name,
            announcer: Announcer::new(client, pod),
            refused: None,
            held_back: None,
        }
    }

    /// Creates the FluxNode, which claims the node before the first write on the host. An existing one is fine.
    ///
    /// # Errors
    /// The API call failed.
    pub async fn create(&self) -> Result<(), ApiError> {
        let spec = FluxNodeSpec { node_name: self.name.clone(), ..FluxNodeSpec::default() };
        let (params, node) = (PostParams::default(), FluxNode::new(&self.name, spec));
        match call(format!("create FluxNode {}", self.name), self.nodes.create(&params, &node)).await {
            Err(error) if error.code() == Some(409) => Ok(()),
            other => other.map(drop),
        }
    }

    /// metadata.uid of the Node; None if there is none. Lists Nodes of this name, because a role that lets agents get any Node by name
    /// would be no narrower.
    ///
    /// # Errors
    /// The API call failed.
    pub async fn node_uid(&self) -> Result<Option<String>, ApiError> {
        let nodes = Api::<Node>::all(self.client.clone());
        let own = ListParams::default().fields(&format!("metadata.name={}", self.name));
        let found = call(format!("list Node {}", self.name), nodes.list_metadata(&own)).await?;
        Ok(found.items.into_iter().next().and_then(|node| node.metadata.uid))
    }

    /// Writes the status if it differs from that of `node`, and an Event if the phase changed, or the message of a node that failed or
    /// is being cleaned. `wrote` gets the FluxNode as it is after the write. Returns true if the FluxNode shows all of `next` afterwards: an
    /// older CustomResourceDefinition drops fields that it does not know.
    ///
    /// # Errors
    /// The API call failed.
    pub async fn write(
        &mut self,
        node: &FluxNode,
        next: &FluxNodeStatus,
        wrote: impl FnOnce(FluxNode),
    ) -> Result<bool, ApiError> {
        let before = node.status.clone().unwrap_or_default();
        if node.status.as_ref() == Some(next) {
            return Ok(true);
        }
        let change = merge_patch(&json!(before), &json!(next));
        let (params, patch) = (patch_params(), Patch::Merge(json!({"status": change})));
        let written = self.nodes.patch_status(&self.name, &params, &patch);
        let written = call(format!("status of FluxNode {}", self.name), written).await?;
        let is_reported = written.status.as_ref() == Some(next);
        if is_reported {
            self.held_back = None;
        } else {
            self.hold_back(next, &written);
        }
        wrote(written);
        let failed = next.phase == NodePhase::Failed;
        let waits = failed || next.phase == NodePhase::Removing;
        if before.phase != next.phase || (waits && next.message.is_some() && before.message != next.message) {
            let note = next.message.clone().unwrap_or_else(|| format!("{:?}", next.phase));
            self.announcer.say(&node.object_ref(&()), failed, &format!("{:?}", next.phase), &note).await;
        }
        Ok(is_reported)
    }

    /// [`Reporter::write`] for callers that go on without it. Returns true if the FluxNode shows all of `next`. A refusal that repeating can't change
    /// (by a policy, a role, the schema of another version, or for its size) is logged once, since the status can't show it; all other errors pass
    /// by themselves. A status that was refused or cut is not sent again before [`HeldBack::until`], unless it or the FluxNode changes.
    pub async fn try_write(&mut self, node: &FluxNode, next: &FluxNodeStatus, wrote: impl FnOnce(FluxNode)) -> bool {
        let is_held_back = |held: &HeldBack| {
            let is_the_same =
                (&held.uid, &held.resource_version) == (&node.metadata.uid, &node.metadata.resource_version);
            is_the_same && held.status == *next && Instant::now() < held.until
        };
        if node.status.as_ref() != Some(next) && self.held_back.as_ref().is_some_and(is_held_back) {
            return false;
        }
        let error = match self.write(node, next, wrote).await {
            Ok(is_reported) => {
                self.refused = None;
                return is_reported;
            }
            Err(error) => error,
        };
        let passes = !error.is_about_the_object() && !matches!(error.code(), Some(400..=403));
        if !passes {
            self.hold_back(next, node);
        }
        let error = error_chain(&error);
        if passes || self.refused.as_ref() == Some(&error) {
            debug!(error, "the status could not be written");
        } else {
            warn!(error, "the API server refuses this node's status: what it shows is old");
            self.refused = Some(error);
        }
        false
    }

    /// Lets [`Reporter::try_write`] wait before it sends `status` again, for as long as the FluxNode is `node`.
    fn hold_back(&mut self, status: &FluxNodeStatus, node: &FluxNode) {
        let (uid, resource_version) = (node.uid(), node.resource_version());
        let before = self.held_back.as_ref().filter(|held| held.status == *status && held.uid == uid);
        let pause = before.map_or(FIRST_PAUSE, |before| (2 * before.pause).min(LONGEST_PAUSE));
        let until = Instant::now() + jittered(pause);
        self.held_back = Some(HeldBack { status: status.clone(), uid, resource_version, pause, until });
    }

    /// Deletes the FluxNode, because the host is clean. The planner may write to it at the same moment.
    ///
    /// # Errors
    /// The API call failed; with code 409 if the FluxNode keeps changing.
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

    /// Reads the FluxNode of node `name`.
    ///
    /// # Errors
    /// The API call failed.
    pub async fn of(&self, name: &str) -> Result<Option<FluxNode>, ApiError> {
        call(format!("get FluxNode {name}"), self.nodes.get_opt(name)).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    use http::{Request, Response};
    use kube::client::Body;

    use super::*;

    #[tokio::test]
    async fn a_status_is_reported_only_if_the_fluxnode_shows_all_of_it() {
        let next = FluxNodeStatus { message: Some("a word".to_owned()), ..FluxNodeStatus::default() };
        let node = |status: Option<&FluxNodeStatus>| FluxNode {
            status: status.cloned(),
            ..FluxNode::new("node1", FluxNodeSpec::default())
        };
        for (what, code, answer, expected) in [
            ("it was written", 200, json!(node(Some(&next))), true),
            ("an older definition has dropped a field", 200, json!(node(Some(&FluxNodeStatus::default()))), false),
            ("the API server failed", 500, json!({"code": 500, "reason": "InternalError", "message": "no"}), false),
        ] {
            let service = tower::service_fn(move |_: Request<Body>| {
                let answer = answer.to_string().into_bytes();
                async move { Response::builder().status(code).body(Body::from(answer)) }
            });
            let mut reporter = Reporter::new(Client::new(service, NAMESPACE), "node1".to_owned(), "pod");
            assert_eq!(reporter.try_write(&node(None), &next, drop).await, expected, "{what}");
            assert!(reporter.try_write(&node(Some(&next)), &next, drop).await, "there is nothing to write");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_status_that_the_api_server_refuses_or_cuts_is_written_ever_more_seldom() {
        let status = |word: &str| FluxNodeStatus { message: Some(word.to_owned()), ..FluxNodeStatus::default() };
        let node = |uid: &str, version: &str| {
            let mut node = FluxNode::new("node1", FluxNodeSpec::default());
            (node.metadata.uid, node.metadata.resource_version) = (Some(uid.to_owned()), Some(version.to_owned()));
            node
        };
        let refusal = json!({"code": 403, "reason": "Forbidden", "message": "no"});
        let failure = json!({"code": 500, "reason": "InternalError", "message": "no"});
        let cut = json!(node("a", "1"));
        // In an hour of rounds that are 10 s apart.
        for (what, code, answer, expected) in [
            ("a policy refuses it", 403, refusal, 26..=39),
            ("an older definition cuts it", 200, cut, 26..=39),
            ("the API server fails", 500, failure, 360..=360),
        ] {
            let asked = Arc::new(AtomicU32::new(0));
            let counted = asked.clone();
            let service = tower::service_fn(move |_: Request<Body>| {
                counted.fetch_add(1, Ordering::Relaxed);
                let answer = answer.to_string().into_bytes();
                async move { Response::builder().status(code).body(Body::from(answer)) }
            });
            let mut reporter = Reporter::new(Client::new(service, NAMESPACE), "node1".to_owned(), "pod");
            for _ in 0..360 {
                assert!(!reporter.try_write(&node("a", "1"), &status("one"), drop).await);
                tokio::time::advance(Duration::from_secs(10)).await;
            }
            let in_an_hour = asked.swap(0, Ordering::Relaxed);
            assert!(expected.contains(&in_an_hour), "{what}: {in_an_hour}");
            for (node, word, written) in [
                (node("a", "1"), "two", "another status"),
                (node("a", "2"), "two", "into a FluxNode that was changed"),
                (node("b", "2"), "two", "into a new one"),
            ] {
                reporter.try_write(&node, &status(word), drop).await;
                assert_eq!(asked.swap(0, Ordering::Relaxed), 1, "{what}: {written} is written at once");
            }
        }
    }
}
