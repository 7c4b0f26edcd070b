//! Why the lead refuses this node's broker. A refused broker is not told the reason; the lead's log has it, and the lead's agent
//! reports it in its FluxNode.

use std::time::{Duration, Instant};

use super::broker_state::BrokerState;
use crate::reporter::Reporter;
use api::{Rank, Roster};
use hostapi::HostView;

/// A broker that takes longer than this to come up may have been refused.
const LATE: Duration = Duration::from_secs(5);
/// Pause between two reads of the lead's FluxNode: while the lead is away, all nodes of a big instance read it.
const READ_AGAIN: Duration = Duration::from_secs(10);

/// The lead's answer about this node's broker, and when this agent read it.
#[derive(Default)]
pub struct RefusalCache(Option<(Instant, Option<String>)>);

impl RefusalCache {
    /// Why the broker of this host does not come up, for people. None if it is up, still young, or nothing is known. `age`: the
    /// time since this agent started the broker.
    pub async fn find(
        &mut self,
        reporter: &Reporter,
        host: &HostView,
        broker: &BrokerState,
        roster: &Roster,
        rank: Option<Rank>,
        age: Option<Duration>,
    ) -> Option<String> {
        let is_late = age.is_some_and(|age| age > LATE) && host.broker.is_some();
        let is_down = host.broker.is_none() && host.died.is_some();
        if broker.is_online(host) || !(is_down || is_late) {
            return None;
        }
        let lead = &roster.lead()?.node;
        let own_name = match &host.broker {
            Some(broker) => &broker.record.broker_name,
            None => &roster.ranks.get(&rank?)?.broker_name,
        };
        if self.0.as_ref().is_none_or(|(read, _)| read.elapsed() >= READ_AGAIN) {
            let lead = reporter.of(lead).await.ok().flatten();
            let reason = lead.and_then(|lead| lead.status?.rejected.get(own_name).cloned());
            self.0 = Some((Instant::now(), reason));
        }
        if let Some((_, Some(reason))) = &self.0 {
            return Some(format!("the lead refuses this broker: {reason}"));
        }
        (broker.state == "join").then(|| {
            format!(
                "the broker waits in state join: its parent can't be reached at port {}, or has another certificate",
                roster.settings.port
            )
        })
    }
}
