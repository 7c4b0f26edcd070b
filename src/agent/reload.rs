//! The live change: the lead takes in what the roster declares now, and remembers that it has.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tracing::{debug, info};

use super::act::{Actor, StepError, unexpected};
use crate::{
    api::Roster,
    host::{Answer, ConfigureOrder, FluxOrder, HostFile, HostView, Order, Preflight},
};

/// For one `flux` command of the live change.
const FLUX_TIMEOUT_SECS: u64 = 60;

/// In the order in which they are loaded.
const FLUXION: [&str; 3] = ["sched-fluxion-resource", "sched-fluxion-feasibility", "sched-fluxion-qmanager"];

/// What the lead's broker has taken in, `etc/applied.json`. It is about one process: a broker that was started since has
/// read the file as it was then.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Applied {
    /// The broker.
    pub pid: i32,
    /// Its start time.
    pub start_time: u64,
    /// The roster's revision.
    pub revision: u64,
}

impl Applied {
    /// The revision that the broker which runs has taken in.
    pub fn of(view: &HostView) -> Option<u64> {
        let applied: Self = serde_json::from_str(view.applied.as_deref()?).ok()?;
        let broker = view.broker.as_ref()?;
        ((applied.pid, applied.start_time) == (broker.pid, broker.start_time)).then_some(applied.revision)
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
    ) -> Result<(), StepError> {
        let Some(broker) = &view.broker else { return Ok(()) };
        let applied = Applied { pid: broker.pid, start_time: broker.start_time, revision };
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

    /// Lead: takes in what the roster declares now. The scheduler is off for a moment and running jobs stay; killed in
    /// between, the next run does all of it again, so it ends with a scheduler that schedules.
    ///
    /// # Errors
    /// The step that failed.
    pub async fn reload(&self, preflight: &Preflight, roster: &Roster) -> Result<(), StepError> {
        self.flux(preflight, roster, &["config", "reload"]).await?;
        let loaded = self.flux(preflight, roster, &["module", "list"]).await?;
        let is_loaded = |module: &str| loaded.lines().any(|line| line.split_whitespace().next() == Some(module));
        // Which scheduler this instance has, if it is off right now because an earlier run was killed: Fluxion where the
        // package set brings it (its modprobe priority says so, flux-sched etc/modprobe/modprobe.d/fluxion.toml).
        let simple = is_loaded("sched-simple");
        let scheduler: &[&str] = if simple { &["sched-simple"] } else { &FLUXION };
        for module in scheduler.iter().rev().filter(|module| is_loaded(module)) {
            self.flux(preflight, roster, &["module", "remove", module]).await?;
        }
        self.flux(preflight, roster, &["module", "reload", "resource"]).await?;
        for module in scheduler {
            if let Err(error) = self.flux(preflight, roster, &["module", "load", module]).await {
                if simple || *module != FLUXION[0] {
                    return Err(error);
                }
                debug!(%error, "no Fluxion in this package set");
                self.flux(preflight, roster, &["module", "load", "sched-simple"]).await?;
                break;
            }
        }
        // `flux resource list` looks healthy without a scheduler; this does not.
        let queue = self.flux(preflight, roster, &["queue", "status"]).await?;
        if queue.contains("Scheduler is offline") {
            return Err(StepError::Flux { command: "queue status".to_owned(), output: queue.trim().to_owned() });
        }
        info!(revision = roster.revision, "the lead has taken in the roster's resources");
        Ok(())
    }

    pub(super) async fn flux(
        &self,
        preflight: &Preflight,
        roster: &Roster,
        args: &[&str],
    ) -> Result<String, StepError> {
        let order = FluxOrder {
            prefix: preflight.prefix.clone(),
            digest: roster.settings.digest.clone(),
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            run_as: roster.settings.run_as.clone(),
            timeout_secs: FLUX_TIMEOUT_SECS,
        };
        match self.order(Order::Flux(order)).await? {
            Answer::Ran(ran) if ran.code == 0 => Ok(ran.stdout + &ran.stderr),
            Answer::Ran(ran) => {
                let output = ran.stderr.trim().lines().last().unwrap_or("no output").to_owned();
                Err(StepError::Flux { command: args.join(" "), output })
            }
            other => Err(unexpected(&other)),
        }
    }
}
