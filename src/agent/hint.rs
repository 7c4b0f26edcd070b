//! Why a broker doesn't come up, where it can't know that itself.

use std::time::{Duration, Instant};

use super::{live::Live, run::Agent};

/// A broker that takes longer than this to come up is worth a look into the lead's words.
const LATE: Duration = Duration::from_secs(5);

impl Agent {
    /// A broker that doesn't come up: the lead knows whom it refuses, the refused one is told nothing.
    pub(super) async fn look_for_a_hint(&self, live: &Live) -> Option<String> {
        let late = self.starts.age(Instant::now()).is_some_and(|age| age > LATE);
        let down = self.view.broker.is_none() && self.view.died.is_some();
        if self.is_online() || !(down || (late && self.view.broker.is_some())) {
            return None;
        }
        let roster = self.published.roster.as_ref()?;
        let lead = roster.lead()?;
        let own = self.view.broker.as_ref().map(|broker| broker.record.broker_name.clone());
        let own = own.or_else(|| self.own_broker_name())?;
        let lead_node = self.reporter.of(&lead.node).await.ok()??;
        let refused = lead_node.status.unwrap_or_default().rejected.get(&own).cloned();
        if let Some(reason) = refused {
            return Some(format!("the lead refuses this broker: {reason}"));
        }
        (live.state == "join").then(|| {
            format!(
                "the broker waits in state join: its parent can't be reached at port {}, or has another certificate",
                roster.settings.port
            )
        })
    }

    fn own_broker_name(&self) -> Option<String> {
        let roster = self.published.roster.as_ref()?;
        let rank = self.world.borrow().node_spec()?.rank?;
        roster.ranks.get(&rank).map(|entry| entry.broker_name.clone())
    }
}
