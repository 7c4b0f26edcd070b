//! What the lead's broker has loaded by live changes ([`broker::reload`]).

use serde::{Deserialize, Serialize};

use hostapi::HostView;

/// The roster's revision that the lead's broker has loaded, `etc/applied.json`. It describes one process: a broker that was started
/// later has read the files as they were then.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
pub struct Applied {
    /// The broker's process ID.
    pub pid: i32,
    /// Its start time, in clock ticks since boot (proc(5), /proc/PID/stat).
    pub start_time: u64,
    /// The roster's revision.
    pub revision: u64,
    /// Flux uses the roster's name for each rank. False for a broker that was just started, and while a job holds a rank under
    /// another name ([`model::names`]).
    #[serde(default)]
    pub settled: bool,
}

impl Applied {
    /// What the running broker of this host has loaded; None if unknown.
    pub fn of(view: &HostView) -> Option<Self> {
        let applied: Self = serde_json::from_str(view.applied.as_deref()?).ok()?;
        let broker = view.broker.as_ref()?;
        ((applied.pid, applied.start_time) == (broker.pid, broker.start_time)).then_some(applied)
    }
}
