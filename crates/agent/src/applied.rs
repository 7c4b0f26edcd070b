//! What the lead remembers of its live changes ([`broker::reload`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::act::{Actor, StepError};
use api::Roster;
use hostapi::{ConfigureOrder, HostFile, HostView, Order, Preflight};

/// What the lead's broker has taken in, `etc/applied.json`. It is about one process: a broker that was started since has
/// read the file as it was then.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
pub struct Applied {
    /// The broker.
    pub pid: i32,
    /// Its start time.
    pub start_time: u64,
    /// The roster's revision.
    pub revision: u64,
    /// Flux knows each rank by its name in that roster. Not known of a broker that has just been started, and not so while a job
    /// holds a rank under another name ([`model::names`]).
    #[serde(default)]
    pub settled: bool,
}

impl Applied {
    /// What the broker that runs has taken in.
    pub fn of(view: &HostView) -> Option<Self> {
        let applied: Self = serde_json::from_str(view.applied.as_deref()?).ok()?;
        let broker = view.broker.as_ref()?;
        ((applied.pid, applied.start_time) == (broker.pid, broker.start_time)).then_some(applied)
    }
}

impl Actor {
    /// Remembers what the lead's broker has taken in.
    ///
    /// # Errors
    /// The stage's.
    pub async fn remember(
        &self,
        preflight: &Preflight,
        roster: &Roster,
        view: &HostView,
        revision: u64,
        settled: bool,
    ) -> Result<(), StepError> {
        let Some(broker) = &view.broker else { return Ok(()) };
        let applied = Applied { pid: broker.pid, start_time: broker.start_time, revision, settled };
        let content = serde_json::to_string(&applied).map_err(|error| StepError::Wrong(error.to_string()))?;
        let order = ConfigureOrder {
            prefix: preflight.prefix.clone(),
            digest: roster.settings.digest.clone(),
            files: vec![HostFile { path: "etc/applied.json".into(), content, mode: 0o644, broker_owned: false }],
            run_as: roster.settings.run_as.clone(),
            statedir: None,
            sysctls: BTreeMap::new(),
            live: true,
        };
        self.order(Order::Configure(order)).await.map(drop)
    }
}
