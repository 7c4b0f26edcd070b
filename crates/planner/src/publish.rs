//! Reads and writes the planner's objects: the roster, `broker.toml`, the packages and each FluxNode's spec.

use kube::{Api, Client, ResourceExt, api::Patch};
use serde_json::json;
use tracing::{debug, info};

use api::{
    CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, CONFIGMAP_PACKAGES, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, FluxNode,
    FluxNodeSpec, MOST_DECLARED, NAMESPACE, Roster, RosterEntry, RosterError,
};
use base::error_chain;
use cluster::{
    ApiError, as_read, call, certificate, gone_is_fine, merge_patch, patch_params,
    store::{self, Document},
};
use model::broker_toml;

/// Replaces exactly the roster that was read as `before`, or creates it if that is None.
///
/// # Errors
/// If the call to the API server fails; with code 409 if another planner wrote the roster first. [`ApiError::UnreadableRoster`]
/// if it could not be read again: many captured nodes can report more cores than all nodes of an instance may have.
pub async fn write_roster(client: &Client, roster: &Roster, before: Option<&Document>) -> Result<(), ApiError> {
    let text = to_text(roster)?;
    info!(revision = roster.revision, epoch = roster.epoch, ranks = roster.ranks.len(), "writing the roster");
    store::write(client, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, text, before).await
}

/// The roster as it is stored, if it can be read again.
fn to_text(roster: &Roster) -> Result<String, ApiError> {
    let unreadable = |reason: String| ApiError::UnreadableRoster { reason };
    if roster.declared_ids() > MOST_DECLARED {
        return Err(unreadable(format!("{}{}", RosterError::TooLarge, largest(roster))));
    }
    let text = serde_json::to_string(roster).map_err(|error| unreadable(error.to_string()))?;
    match Roster::parse(&text) {
        Ok(_) => Ok(text),
        Err(error) => Err(unreadable(format!(
            "{}. A number that only grows has reached its end, which the planner can't have written: see docs/threat-model.md, after a \
             break-in",
            error_chain(&error)
        ))),
    }
}

/// What declares the most, as the end of a sentence with the remedy: the spares, or a rank.
fn largest(roster: &Roster) -> String {
    let of_ranks = roster.ranks.values().map(RosterEntry::declared_ids).sum::<u64>();
    if of_ranks <= MOST_DECLARED {
        return ". Most of them are those of spares: set a smaller spec.spares.shape or spec.maxSize".to_owned();
    }
    let largest = roster.ranks.iter().max_by_key(|(_, entry)| entry.declared_ids());
    largest.map_or_else(String::new, |(rank, entry)| {
        let node = entry.member.as_ref().map_or_else(String::new, |member| format!(" (node {})", member.node));
        format!(
            ". Rank {rank}{node} declares the most: {}. Remove nodes whose hardware is not what they report",
            entry.declared_ids()
        )
    })
}

/// Renders `broker.toml` from the roster and writes it if it has changed.
///
/// # Errors
/// If a call to the API server fails; [`ApiError::Content`] if the roster can't be rendered.
pub async fn write_broker_toml(client: &Client, roster: &Roster) -> Result<(), ApiError> {
    let text = broker_toml::render(roster).map_err(|error| ApiError::Content {
        object: format!("ConfigMap {CONFIGMAP_BROKER}"),
        reason: error_chain(&error),
    })?;
    let before = store::read(client, CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY).await?;
    // A planner that has just lost its Lease must not overwrite the newer file of its successor.
    let made_from = |document: &Document| broker_toml::made_from(&document.text, &roster.instance_id);
    let is_newer = |document: &Document| made_from(document) > Some((roster.epoch, roster.revision));
    if before.as_ref().is_some_and(|before| before.text == text || is_newer(before)) {
        return Ok(());
    }
    store::write(client, CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, text, before.as_ref()).await
}

/// Writes a FluxNode's spec if it has changed.
///
/// # Errors
/// If the call to the API server fails. That the FluxNode is gone is no error.
pub async fn write_node(client: &Client, node: &FluxNode, spec: &FluxNodeSpec) -> Result<(), ApiError> {
    if node.spec == *spec {
        return Ok(());
    }
    let name = node.name_any();
    debug!(node = name, ?spec, "projecting the roster");
    let nodes: Api<FluxNode> = Api::namespaced(client.clone(), NAMESPACE);
    let change = merge_patch(&json!(node.spec), &json!(spec));
    let (params, patch) = (patch_params(), Patch::Merge(json!({"spec": change})));
    // If the agent or a user has deleted the FluxNode, the agent creates it again if it still needs it.
    gone_is_fine(call(format!("spec of FluxNode {name}"), nodes.patch(&name, &params, &patch)).await)
}

/// Deletes the FluxNode of a Node that is gone.
///
/// # Errors
/// The API server's; code 409 where it has changed since it was read: its agent may be back.
pub async fn delete_node(client: &Client, node: &FluxNode) -> Result<(), ApiError> {
    let nodes: Api<FluxNode> = Api::namespaced(client.clone(), NAMESPACE);
    let name = node.name_any();
    info!(node = name, "the Node is gone for good: deleting its FluxNode");
    gone_is_fine(call(format!("delete FluxNode {name}"), nodes.delete(&name, &as_read(node))).await)
}

/// Deletes the ConfigMaps and the certificate that the planner made for an instance that is gone from every host, so
/// that the next instance gets its own.
///
/// # Errors
/// If a call to the API server fails; with code 409 if one of the objects has changed meanwhile.
pub async fn forget_instance(client: &Client) -> Result<(), ApiError> {
    for map in [CONFIGMAP_ROSTER, CONFIGMAP_BROKER, CONFIGMAP_PACKAGES] {
        store::delete(client, map).await?;
    }
    certificate::forget(client).await
}

#[cfg(test)]
mod tests {
    use model::fixture::roster;

    use super::*;

    #[test]
    fn a_roster_that_could_not_be_read_again_is_not_written_and_names_who_reports_the_most() {
        let names: Vec<String> = (0..260).map(|number| format!("node{number}")).collect();
        let mut nodes: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 65_000)).collect();
        assert!(to_text(&roster(256, &nodes[..256])).is_ok());
        nodes[7].1 = 65_536;
        let error = error_chain(&to_text(&roster(300, &nodes)).unwrap_err());
        assert!(
            error.contains("its ranks, spares among them, declare more than 16777216 ids of cores and GPUs"),
            "{error}"
        );
        let end = Roster { revision: u64::MAX, ..roster(2, &nodes[..2]) };
        let last = error_chain(&to_text(&end).unwrap_err());
        assert!(last.contains("an epoch or revision is 18446744073709551615") && !last.contains("ank "), "{last}");
        assert!(error.contains(". Rank 7 (node node7) declares the most: 65536. Remove nodes"), "{error}");
    }
}
