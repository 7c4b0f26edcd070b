//! `local remove-node`: what becomes of the rank of the node that is removed.

use std::time::Duration;

use kube::{Api, core::DeserializeGuard};
use tokio::time::timeout;

use super::{layout::Layout, objects};
use api::{FluxInstance, FluxNode, Rank};

/// How long to wait for the API server, which may be one that a test has made slow.
const LIMIT: Duration = Duration::from_secs(5);

/// The rank of a node, and for how long it is kept if it is not the lead's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    rank: Rank,
    retain: String,
}

/// What the API says about the node's rank. None if the node has none, or if the API does not answer.
pub(crate) async fn rank_of(layout: &Layout, node: &str) -> Option<Held> {
    let cluster = layout.load().ok()?;
    let client = objects::client(layout, &cluster).ok()?;
    let nodes: Api<DeserializeGuard<FluxNode>> = Api::default_namespaced(client.clone());
    let instances: Api<DeserializeGuard<FluxInstance>> = Api::default_namespaced(client);
    let name = layout.kind(node).ok()?.node_of(node).to_owned();
    let asked = async { tokio::try_join!(nodes.get_opt(&name), instances.get_opt(api::INSTANCE)) };
    let (node, instance) = timeout(LIMIT, asked).await.ok()?.ok()?;
    let retain = instance.and_then(|instance| instance.0.ok()).and_then(|instance| instance.spec.ranks.retain);
    Some(Held { rank: node?.0.ok()?.spec.rank?, retain: retain.unwrap_or_else(|| "10m".to_owned()) })
}

/// What the command prints.
pub(crate) fn describe(node: &str, held: Option<Held>) -> String {
    match held {
        None => format!("{node} is removed"),
        Some(Held { rank: 0, .. }) => format!(
            "{node} is removed; it was the lead, and the queue of jobs is gone with it. Make another node the lead: \
             `flux-distribute local exec NODE --agent -- recover --lead NODE --from DUMP` with a dump of the queue, or \
             `… -- reset --lead NODE` without one. Both wait until the members have lost the lead, two to three minutes, \
             unless --force is given: it is certainly gone"
        ),
        Some(Held { retain, .. }) => {
            format!(
                "{node} is removed; its rank is kept for {retain} (spec.ranks.retain), and no new node gets it before, not even one of the same name"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_lead_is_named_as_such_with_the_remedy() {
        let held = |rank| Some(Held { rank, retain: "1h".to_owned() });
        let lead = describe("node1", held(0));
        assert!(lead.contains("it was the lead") && lead.contains("recover --lead NODE --from DUMP"), "{lead}");
        assert_eq!(
            describe("node5", held(4)),
            "node5 is removed; its rank is kept for 1h (spec.ranks.retain), and no new node gets it before, not even one of the same name"
        );
        assert_eq!(describe("node5", None), "node5 is removed");
    }
}
