//! The broker's process on the host: starting it out of the pod's reach, finding it again, stopping it.

use super::{LaunchOrder, Refusal, RunningBroker, StopOrder};

/// A broker that is there, or why the last one is not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BrokerView {
    /// The broker that runs, verified by boot id, pid, start time and state.
    pub running: Option<RunningBroker>,
    /// A broker of ours was started in this boot and is gone: the last lines of its log that tell why.
    pub died: Option<String>,
}
