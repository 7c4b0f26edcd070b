//! Why a broker doesn't come up, where it can't know that itself.

use std::time::{Duration, Instant};

use super::{
    live::Live,
    run::{Agent, RESYNC},
};

/// A broker that takes longer than this to come up is worth a look into the lead's words.
const LATE: Duration = Duration::from_secs(5);

impl Agent {
    /// A broker that doesn't come up: the lead knows whom it refuses, the refused one is told nothing.
    pub(super) async fn look_for_a_hint(&mut self, live: &Live) -> Option<String> {
        let late = self.starts.age(Instant::now()).is_some_and(|age| age > LATE);
        let down = self.view.broker.is_none() && self.view.died.is_some();
        if self.is_online() || !(down || (late && self.view.broker.is_some())) {
            return None;
        }
        let roster = self.published.roster.as_ref()?;
        let (lead, port) = (roster.lead()?.node.clone(), roster.settings.port);
        let own = self.view.broker.as_ref().map(|broker| broker.record.broker_name.clone());
        let own = own.or_else(|| self.own_broker_name())?;
        // All of a big instance look into the same words while its lead is away.
        if self.refusal.as_ref().is_none_or(|(asked, _)| asked.elapsed() >= RESYNC) {
            let lead = self.reporter.of(&lead).await.ok().flatten();
            let reason = lead.and_then(|lead| lead.status?.rejected.get(&own).cloned());
            self.refusal = Some((Instant::now(), reason));
        }
        if let Some((_, Some(reason))) = &self.refusal {
            return Some(format!("the lead refuses this broker: {reason}"));
        }
        (live.state == "join").then(|| {
            format!(
                "the broker waits in state join: its parent can't be reached at port {}, or has another certificate",
                port
            )
        })
    }

    fn own_broker_name(&self) -> Option<String> {
        let roster = self.published.roster.as_ref()?;
        let rank = self.world.borrow().node_spec()?.rank?;
        roster.ranks.get(&rank).map(|entry| entry.broker_name.clone())
    }
}
