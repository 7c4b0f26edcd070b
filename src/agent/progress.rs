//! The rung install, told as it goes on: lines in the log every few seconds, quarters in the status.

use std::{collections::BTreeSet, pin::pin, time::Instant};

use tokio::{
    sync::mpsc::UnboundedReceiver,
    time::{MissedTickBehavior, interval},
};
use tracing::info;

use super::{act::StepError, decide::Step, run::Agent};
use crate::{
    host::Progress,
    packages::{LINE_EVERY, Meter, quarters},
};

impl Agent {
    /// Sees `work` to its end, and tells how far it is.
    ///
    /// # Errors
    /// Those of `work`.
    pub(super) async fn follow_progress(
        &mut self,
        step: &Step,
        work: impl Future<Output = Result<(), StepError>>,
        mut events: UnboundedReceiver<Progress>,
    ) -> Result<(), StepError> {
        let mut work = pin!(work);
        let mut meter = Meter::default();
        let mut reported = BTreeSet::new();
        let mut every = interval(LINE_EVERY);
        // A slow API server must not have the same line written twice.
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let outcome = loop {
            tokio::select! {
                outcome = &mut work => break outcome,
                _ = every.tick() => {
                    if let Some(reading) = meter.read(Instant::now()) {
                        info!(progress = %reading, "installing");
                    }
                }
                Some(event) = events.recv() => {
                    let words = quarters(&event);
                    if let Some(ended) = meter.see(event, Instant::now()) {
                        info!(progress = %ended, "installing");
                    }
                    // Each once: phases may overlap, and a part that has to come again takes a phase back.
                    if reported.insert(words.clone()) {
                        let world = self.world.borrow().clone();
                        self.report(&world, step, Some(&words)).await;
                    }
                }
            }
        };
        if outcome.is_ok() {
            while let Ok(event) = events.try_recv() {
                meter.see(event, Instant::now()).iter().for_each(|ended| info!(progress = %ended, "installing"));
            }
            meter.end(Instant::now()).iter().for_each(|ended| info!(progress = %ended, "installing"));
        }
        outcome
    }
}
