//! The rung install, told as it goes on: lines in the log every few seconds, quarters in the status.

use std::{collections::BTreeSet, pin::pin, time::Instant};

use tokio::{
    sync::mpsc::UnboundedReceiver,
    time::{Interval, MissedTickBehavior, interval},
};
use tracing::info;

use super::{act::StepError, decide::Step, run::Agent};
use crate::{
    host::Progress,
    packages::{LINE_EVERY, Meter, Reading, quarters},
};

/// Tells of one installation.
pub(super) struct Teller {
    /// Of the lines in the log.
    title: &'static str,
    meter: Meter,
    reported: BTreeSet<String>,
    every: Interval,
}

impl Teller {
    pub(super) fn new(title: &'static str) -> Self {
        let mut every = interval(LINE_EVERY);
        // A slow API server must not have the same line written twice.
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { title, meter: Meter::default(), reported: BTreeSet::new(), every }
    }

    /// Takes in what has happened. Gives the words for the status, each once: phases may overlap, and a part that has to
    /// come again takes a phase back.
    pub(super) fn see(&mut self, event: Progress) -> Option<String> {
        let words = quarters(&event);
        let ended = self.meter.see(event, Instant::now());
        self.say(ended);
        self.reported.insert(words.clone()).then_some(words)
    }

    /// Writes a line, as soon as it is time for one. Never ends.
    pub(super) async fn lines(&mut self) {
        loop {
            self.every.tick().await;
            self.say(self.meter.read(Instant::now()));
        }
    }

    /// The work has ended well.
    pub(super) fn end(mut self, mut events: UnboundedReceiver<Progress>) {
        while let Ok(event) = events.try_recv() {
            let _ = self.see(event);
        }
        let ended = self.meter.end(Instant::now());
        self.say(ended);
    }

    fn say(&self, reading: Option<Reading>) {
        if let Some(reading) = reading {
            info!(progress = %reading, "{}", self.title);
        }
    }
}

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
        let mut teller = Teller::new("installing");
        loop {
            tokio::select! {
                outcome = &mut work => {
                    if outcome.is_ok() {
                        teller.end(events);
                    }
                    return outcome;
                }
                Some(event) = events.recv() => {
                    if let Some(words) = teller.see(event) {
                        let world = self.world.borrow().clone();
                        self.report(&world, step, Some(&words)).await;
                    }
                }
                () = teller.lines() => {}
            }
        }
    }
}
