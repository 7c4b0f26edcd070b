//! Takes away what the host keeps for nothing: environments and archives of package sets that are neither in use nor
//! published, up to `packages.keep`.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use tracing::{debug, info, warn};

use super::{act::unexpected, run::Agent};
use crate::{
    host::{Answer, CollectOrder, Order},
    packages::archives,
};

/// spec.packages.keep where it is not said.
const DEFAULT_KEEP: u32 = 2;
/// What stays only because somebody uses it is looked at again after so long: every process of the host is looked at then.
const AGAIN: Duration = Duration::from_secs(600);

/// When it was done last: for what, beside which environments, and whether it has to be done again without anything new.
#[derive(Default)]
pub(super) struct Tidied {
    order: Option<(CollectOrder, Vec<String>)>,
    again: Option<Instant>,
}

impl Agent {
    /// To be called when nothing else is to be done. Nothing depends on it, so that it failed is only said.
    pub(super) async fn tidy(&mut self) {
        let Some(order) = self.collect_order() else { return };
        let done = Some((order.clone(), self.view.environments.clone()));
        if self.tidied.order == done && self.tidied.again.is_none_or(|again| Instant::now() < again) {
            return;
        }
        self.tidied = Tidied { order: done, again: Some(Instant::now() + AGAIN) };
        match self.actor.order(Order::Collect(order)).await {
            Ok(Answer::Collected(collected)) => {
                let used = collected.used.join(", ");
                if collected.used.is_empty() {
                    self.tidied.again = None;
                }
                if collected.environments.is_empty() && collected.archives == 0 {
                    return debug!(used, "nothing is kept in vain");
                }
                let environments = collected.environments.join(", ");
                let mebibytes = collected.bytes >> 20;
                info!(
                    environments,
                    archives = collected.archives,
                    mebibytes,
                    used,
                    "removed packages that nobody uses"
                );
            }
            Ok(other) => warn!(error = %unexpected(&other), "can't remove old packages"),
            Err(error) => warn!(error = crate::error_chain(&error), "can't remove old packages"),
        }
    }

    /// None while it is not known for certain what is wanted here.
    fn collect_order(&self) -> Option<CollectOrder> {
        let preflight = self.preflight.as_ref()?;
        let claimed = self.view.state.as_ref()?;
        let roster = self.published.roster.as_ref();
        let running = self.view.broker.as_ref().map(|broker| broker.record.digest.clone());
        let sets = self.published.all();
        let named = sets.iter().map(|(_, set)| archives(set, &preflight.platform)).collect::<Result<Vec<_>, _>>();
        let epoch = roster.map(|roster| roster.settings.digest.clone());
        let published = sets.iter().map(|(digest, _)| digest.clone());
        (!sets.is_empty() && claimed.instance_uid == self.actor.instance_uid).then_some(())?;
        Some(CollectOrder {
            prefix: claimed.prefix.clone(),
            keep: self.spec.packages.keep.unwrap_or(DEFAULT_KEEP),
            wanted: published.chain(epoch).chain(running).collect(),
            archives: named.ok()?.into_iter().flatten().collect::<BTreeSet<_>>(),
        })
    }
}
