//! Removes what the host does not need: environments and archives of package sets that are neither in use nor published, except
//! for `packages.keep` of them, and on the lead old dumps that Flux itself has written.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    time::{Duration, Instant},
};

use tracing::{debug, info, warn};

use crate::{
    error::unexpected,
    inputs::{node_inputs::NodeInputs, sources::Sources},
    node_ops::NodeOps,
};
use base::error_chain;
use hostapi::{Answer, CollectOrder, Order};
use packages::archives;

/// Default of spec.packages.keep.
const DEFAULT_KEEP: u32 = 2;
/// Pause before a new attempt if something stayed only because a broker or a job used it.
const AGAIN: Duration = Duration::from_mins(10);

/// What was done last, and when it must be done again although nothing has changed.
#[derive(Default)]
pub struct Tidied {
    task: Option<Task>,
    again: Option<Instant>,
}

/// What to keep, and what is there.
#[derive(Clone, PartialEq, Eq)]
struct Task {
    prefix: PathBuf,
    keep: u32,
    wanted: BTreeSet<String>,
    published: Vec<String>,
    environments: Vec<String>,
    /// Process ID and start time of the lead's broker once it is up: each stop before that has left a dump.
    lead: Option<(i32, u64)>,
}

impl Tidied {
    /// Removes what is not needed, unless that was done for the same inputs. Nothing depends on it, so a failure is only logged.
    pub async fn tidy(&mut self, ops: &NodeOps, sources: &Sources, inputs: &NodeInputs) {
        let Some(task) = tidying(sources, inputs) else { return };
        if self.task.as_ref() == Some(&task) && self.again.is_none_or(|again| Instant::now() < again) {
            return;
        }
        let Some(order) = collect_order(sources, inputs, &task) else { return };
        *self = Self { task: Some(task), again: Some(Instant::now() + AGAIN) };
        match ops.order(Order::Collect(order)).await {
            Ok(Answer::Collected(collected)) => {
                let used = collected.used.join(", ");
                if collected.used.is_empty() {
                    self.again = None;
                }
                if collected.environments.is_empty() && collected.archives == 0 && collected.dumps == 0 {
                    return debug!(used, "the host keeps nothing that it does not need");
                }
                let environments = collected.environments.join(", ");
                let mebibytes = collected.bytes >> 20;
                info!(
                    environments,
                    archives = collected.archives,
                    dumps = collected.dumps,
                    mebibytes,
                    used,
                    "removed what is not used any more"
                );
            }
            Ok(other) => warn!(error = %unexpected(&other), "can't remove old packages"),
            Err(error) => warn!(error = error_chain(&error), "can't remove old packages"),
        }
    }
}

/// What to keep; None if this agent does not know for certain what the planner wants here.
fn tidying(sources: &Sources, inputs: &NodeInputs) -> Option<Task> {
    let claimed = inputs.host.state.as_ref().filter(|state| state.instance_uid == sources.instance_uid())?;
    let epoch = inputs.roster.as_ref().map(|roster| roster.settings.digest.clone());
    let running = inputs.host.broker.as_ref().map(|broker| broker.record.digest.clone());
    let lead = inputs.host.broker.as_ref().filter(|broker| broker.record.rank == 0 && inputs.is_online());
    (!inputs.published.is_empty()).then(|| Task {
        prefix: claimed.prefix.clone(),
        keep: inputs.spec.packages.keep.unwrap_or(DEFAULT_KEEP),
        wanted: inputs.published.iter().cloned().chain(epoch).chain(running).collect(),
        published: inputs.published.clone(),
        environments: inputs.host.environments.clone(),
        lead: lead.map(|broker| (broker.pid, broker.start_time)),
    })
}

fn collect_order(sources: &Sources, inputs: &NodeInputs, task: &Task) -> Option<CollectOrder> {
    let platform = &inputs.preflight.as_ref()?.platform;
    let named = sources.published.sets().iter().map(|(_, set)| archives(set, platform));
    let named = named.collect::<Result<Vec<_>, _>>().ok()?;
    Some(CollectOrder {
        prefix: task.prefix.clone(),
        keep: task.keep,
        wanted: task.wanted.clone(),
        archives: named.into_iter().flatten().collect(),
        is_queue_up: task.lead.is_some(),
    })
}
