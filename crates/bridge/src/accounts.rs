//! Shows people the account of each node, in the status of its FluxNode.

use std::{collections::BTreeMap, time::Duration};

use kube::{Api, Client, api::Patch};
use serde_json::json;
use tokio::{sync::watch, time::sleep};
use tracing::warn;

use api::{Account, FluxNode, NAMESPACE};
use base::error_chain;
use cluster::{ApiError, call, patch_params};

/// Pause after all that changed was written, and twice as long after each time that nothing could be: an account is for people, and
/// host jobs may begin and end many times a second.
const PAUSE: Duration = Duration::from_secs(5);
/// Pause between two writes, so that a change on every node of a large cluster is no burst for the API server.
const BETWEEN: Duration = Duration::from_millis(20);

/// Writes the accounts that have changed, by the name of the node, while the future is polled. Removes none: the agent of a node that
/// has lost its rank does.
pub(crate) async fn show(client: Client, accounts: watch::Receiver<BTreeMap<String, Account>>) {
    let nodes: Api<FluxNode> = Api::namespaced(client, NAMESPACE);
    let mut written: BTreeMap<String, Account> = BTreeMap::new();
    let mut failures = 0;
    loop {
        // The agent of a node that has left removes its account: it must be written again if the node comes back. The map is empty while
        // the Lease or the broker is away.
        if !accounts.borrow().is_empty() {
            written.retain(|node, _| accounts.borrow().contains_key(node));
        }
        let differs = |(node, account): &(&String, &Account)| written.get(*node) != Some(*account);
        let changed: Vec<_> = accounts.borrow().iter().filter(differs).map(|(node, _)| node.clone()).collect();
        let (mut any_written, mut failed) = (false, None);
        for node in changed {
            let Some(account) = accounts.borrow().get(&node).copied() else { continue };
            match write(&nodes, &node, account).await {
                Ok(()) => {
                    any_written = true;
                    written.insert(node, account);
                }
                // Its agent makes the FluxNode again.
                Err(error) if error.code() == Some(404) => {}
                Err(error) => failed = Some((node, error)),
            }
            sleep(BETWEEN).await;
        }
        failures = if failed.is_none() || any_written { 0 } else { failures + 1 };
        if let Some((node, error)) = failed.filter(|_| failures == 1) {
            warn!(
                node,
                error = error_chain(&error),
                "can't write accounts of nodes: trying again, less and less often"
            );
        }
        sleep(PAUSE * 2_u32.pow(failures.min(6))).await;
    }
}

async fn write(nodes: &Api<FluxNode>, node: &str, account: Account) -> Result<(), ApiError> {
    let mut next = json!(account);
    // A merge patch removes what is null.
    next["requestedMilliCpu"] = json!(account.requested_milli_cpu);
    let patch = Patch::Merge(json!({"status": {"account": next}}));
    call(format!("account of FluxNode {node}"), nodes.patch_status(node, &patch_params(), &patch)).await.map(drop)
}
