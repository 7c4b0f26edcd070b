//! Dumps of the queue by the lead's agent, as often as `spec.state.dumpEvery` says.

use std::{sync::Arc, time::Duration};

use k8s_openapi::jiff::Timestamp;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use crate::{inputs::node_inputs::NodeInputs, queue_dump, step::Step};
use api::parse_duration;
use base::error_chain;
use host::dumps::is_of;
use hostapi::Host;

/// What the agent remembers of its dumps; all of it can be lost.
#[derive(Default)]
pub struct Dumping {
    task: Option<JoinHandle<()>>,
    /// When a dump was begun last, in seconds since 1970.
    tried: Option<i64>,
}

/// A dump is due. One that failed is tried again when the next one would be due.
fn is_due(every: Option<Duration>, newest: Option<i64>, tried: Option<i64>, now: i64) -> bool {
    let Some(every) = every.and_then(|every| i64::try_from(every.as_secs()).ok()) else { return false };
    // A clock that went back must not put the next dump off for ever.
    newest.max(tried).is_none_or(|last| now - last >= every || last > now + every)
}

impl Dumping {
    /// Lead only: begins a dump if one is due. A large queue takes minutes, so it goes on beside the rounds.
    pub fn begin_if_due(&mut self, host: &Arc<dyn Host>, inputs: &NodeInputs, step: &Step) {
        let every = inputs.spec.state.dump_every.as_deref().and_then(parse_duration);
        let now = Timestamp::now().as_second();
        let is_running = self.task.as_ref().is_some_and(|task| !task.is_finished());
        let is_wanted = *step == Step::Hold || inputs.host.statedir_lost;
        if !is_wanted || is_running || every.is_none() || !inputs.is_online() {
            return;
        }
        let Ok(order) = queue_dump::order(&inputs.host) else { return };
        let newest = inputs.host.dumps.iter().rev().find(|dump| is_of(dump, &order.instance_id));
        if !is_due(every, newest.map(|dump| dump.time.0.as_second()), self.tried, now) {
            return;
        }
        self.tried = Some(now);
        let host = host.clone();
        self.task = Some(tokio::spawn(async move {
            match queue_dump::make(host.as_ref(), order).await {
                Ok(dumped) => info!(dump = dumped.dump.name, bytes = dumped.dump.bytes, "the queue is dumped"),
                Err(error) => warn!(error = error_chain(&error), "the queue could not be dumped"),
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_is_due_if_the_last_one_is_old_enough() {
        let hour = Some(Duration::from_hours(1));
        for (every, newest, tried, due) in [
            (None, None, None, false),
            (hour, None, None, true),
            (hour, Some(10_000), None, false),
            (hour, Some(6400), None, true),
            (hour, Some(6401), None, false),
            (hour, Some(1), Some(9000), false),
            (hour, Some(1), Some(6000), true),
            (hour, Some(99_999), None, true),
        ] {
            assert_eq!(is_due(every, newest, tried, 10_000), due, "{newest:?} {tried:?}");
        }
    }
}
