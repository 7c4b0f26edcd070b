//! Takes away what the host keeps for nothing: environments and archives of package sets that are neither in use nor
//! published, up to `packages.keep`, and on the lead old dumps that Flux itself has written.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    time::{Duration, Instant},
};

use tracing::{debug, info, warn};

use super::{act::unexpected, run::Agent};
use hostapi::{Answer, CollectOrder, Order};
use packages::archives;

/// spec.packages.keep where it is not said.
const DEFAULT_KEEP: u32 = 2;
/// What stays only because the broker or a job uses it is looked at again after this long.
const AGAIN: Duration = Duration::from_secs(600);

/// When it was done last: for what, beside which environments, and whether it has to be done again without anything new.
#[derive(Default)]
pub(super) struct Tidied {
    task: Option<Task>,
    again: Option<Instant>,
}

/// What is to be kept, beside which environments.
#[derive(Clone, PartialEq, Eq)]
struct Task {
    prefix: PathBuf,
    keep: u32,
    wanted: BTreeSet<String>,
    published: Vec<String>,
    environments: Vec<String>,
    /// Pid and start time of the lead's broker once it is up: each stop before that has left a dump.
    lead: Option<(i32, u64)>,
}

impl Agent {
    /// To be called when nothing else is to be done. Nothing depends on it, so that it failed is only said.
    pub(super) async fn tidy(&mut self) {
        let Some(task) = self.tidying() else { return };
        if self.tidied.task.as_ref() == Some(&task) && self.tidied.again.is_none_or(|again| Instant::now() < again) {
            return;
        }
        let Some(order) = self.collect_order(&task) else { return };
        self.tidied = Tidied { task: Some(task), again: Some(Instant::now() + AGAIN) };
        match self.actor.order(Order::Collect(order)).await {
            Ok(Answer::Collected(collected)) => {
                let used = collected.used.join(", ");
                if collected.used.is_empty() {
                    self.tidied.again = None;
                }
                if collected.environments.is_empty() && collected.archives == 0 && collected.dumps == 0 {
                    return debug!(used, "nothing is kept in vain");
                }
                let environments = collected.environments.join(", ");
                let mebibytes = collected.bytes >> 20;
                info!(
                    environments,
                    archives = collected.archives,
                    dumps = collected.dumps,
                    mebibytes,
                    used,
                    "removed what nobody uses"
                );
            }
            Ok(other) => warn!(error = %unexpected(&other), "can't remove old packages"),
            Err(error) => warn!(error = base::error_chain(&error), "can't remove old packages"),
        }
    }

    /// None while it is not known for certain what is wanted here.
    fn tidying(&self) -> Option<Task> {
        let claimed = self.view.state.as_ref().filter(|state| state.instance_uid == self.actor.instance_uid)?;
        let published: Vec<_> = self.published.sets().iter().map(|(digest, _)| digest.clone()).collect();
        let epoch = self.published.roster.as_ref().map(|roster| roster.settings.digest.clone());
        let running = self.view.broker.as_ref().map(|broker| broker.record.digest.clone());
        let lead = self.view.broker.as_ref().filter(|broker| broker.record.rank == 0 && self.is_online());
        (!published.is_empty()).then(|| Task {
            prefix: claimed.prefix.clone(),
            keep: self.spec.packages.keep.unwrap_or(DEFAULT_KEEP),
            wanted: published.iter().cloned().chain(epoch).chain(running).collect(),
            published,
            environments: self.view.environments.clone(),
            lead: lead.map(|broker| (broker.pid, broker.start_time)),
        })
    }

    fn collect_order(&self, task: &Task) -> Option<CollectOrder> {
        let platform = &self.preflight.as_ref()?.platform;
        let named = self.published.sets().iter().map(|(_, set)| archives(set, platform));
        let named = named.collect::<Result<Vec<_>, _>>().ok()?;
        Some(CollectOrder {
            prefix: task.prefix.clone(),
            keep: task.keep,
            wanted: task.wanted.clone(),
            archives: named.into_iter().flatten().collect(),
            is_queue_up: task.lead.is_some(),
        })
    }
}
