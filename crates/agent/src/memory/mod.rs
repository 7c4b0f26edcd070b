//! What the agent remembers between two rounds besides what it observes. All of it can be lost: a new agent begins with none.

mod attempts;

use std::time::{Duration, Instant};

pub(super) use attempts::{Attempts, Starts, Trouble};

use super::{inputs::node_inputs::NodeInputs, step::Step};
use api::FetchFrom;

/// What the agent remembers.
pub struct Memory {
    /// Failures of the last step.
    pub attempts: Attempts,
    /// Starts of the broker.
    pub starts: Starts,
    /// What this agent did to the queues of the instance.
    pub queues: Queues,
    /// Where the last installation was to fetch from.
    source: Option<FetchFrom>,
    /// Rounds in a row in which the host could not be observed.
    pub failed_observations: u32,
}

/// The queues of the instance, as far as the agents stop them.
pub struct Queues {
    /// They may be stopped by this agent, or by the one before it.
    pub may_be_stopped: bool,
    /// This agent stopped them for the end of the instance.
    pub were_stopped: bool,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            attempts: Attempts::default(),
            starts: Starts::default(),
            queues: Queues { may_be_stopped: true, were_stopped: false },
            source: None,
            failed_observations: 0,
        }
    }
}

impl Memory {
    /// Records what a round observed.
    pub fn observed(&mut self, inputs: &NodeInputs) {
        self.failed_observations = 0;
        let host = &inputs.host;
        self.starts.seen(host.broker.is_some(), inputs.is_online(), host.died.as_deref(), inputs.at);
        let source = inputs.own_spec().and_then(|spec| spec.fetch_from.as_ref());
        if source.is_some() && source != self.source.as_ref() {
            self.source = source.cloned();
            if self.attempts.is_about_an_installation() {
                // Another source may be the cure.
                self.attempts.succeeded();
            }
        }
    }

    /// The pause before `step`, if it failed just now.
    pub fn pause(&self, step: &Step, generation: i64, now: Instant) -> Option<Duration> {
        self.attempts.rest(step, generation, now).max(self.starts.rest(step, generation, now))
    }

    /// Forgets the instance: this host is clean.
    pub fn forget_instance(&mut self) {
        self.starts.forget();
        self.queues.were_stopped = false;
    }
}
