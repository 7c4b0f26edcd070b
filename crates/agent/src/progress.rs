//! The rung install, told as it goes on: lines in the log every few seconds, quarters in the status.

use std::{collections::BTreeSet, path::Path};

use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::JoinSet,
    time::{Instant, Interval, MissedTickBehavior, interval_at},
};
use tracing::info;

use super::{
    act::StepError,
    climb::peers_for,
    decide::Step,
    install::{Installing, Wanted},
    run::{Agent, RESYNC},
};
use hostapi::Progress;
use packages::{LINE_EVERY, Meter, Reading, quarters};

/// Tells of one installation.
pub(super) struct Teller {
    /// Of the lines in the log.
    title: &'static str,
    meter: Meter,
    reported: BTreeSet<String>,
    /// What was reported last was in the way of the work.
    is_in_trouble: bool,
    every: Interval,
}

impl Teller {
    pub(super) fn new(title: &'static str) -> Self {
        let mut every = interval_at(Instant::now() + LINE_EVERY, LINE_EVERY);
        // A slow API server must not have the same line written twice.
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { title, meter: Meter::default(), reported: BTreeSet::new(), is_in_trouble: false, every }
    }

    /// Takes in what has happened. Gives the words for the status, each once: phases may overlap, and a part that has to
    /// come again takes a phase back.
    pub(super) fn see(&mut self, event: Progress) -> Option<String> {
        let words = quarters(&event);
        // Once it goes on, that is to be read in place of what was in the way.
        let is_over = std::mem::replace(&mut self.is_in_trouble, event.trouble.is_some()) && event.trouble.is_none();
        let ended = self.meter.see(event, Instant::now().into_std());
        self.say(ended);
        (self.reported.insert(words.clone()) || is_over).then_some(words)
    }

    /// Writes a line, as soon as it is time for one. Never ends.
    pub(super) async fn lines(&mut self) {
        loop {
            self.every.tick().await;
            self.say(self.meter.read(Instant::now().into_std()));
        }
    }

    /// The work has ended well.
    pub(super) fn end(mut self, mut events: UnboundedReceiver<Installing>) {
        while let Ok(event) = events.try_recv() {
            if let Installing::Fetching(now) | Installing::Linking(now) = event {
                let _ = self.see(now);
            }
        }
        let ended = self.meter.end(Instant::now().into_std());
        self.say(ended);
    }

    fn say(&self, reading: Option<Reading>) {
        if let Some(reading) = reading {
            info!(progress = %reading, "{}", self.title);
        }
    }
}

fn is_beside_a_broker(step: &Step) -> bool {
    matches!(step, Step::Prepare { .. })
}

impl Agent {
    /// Fetches and links the package set `digest`. Beside a broker that runs ([`Step::Prepare`]) it is let go where something
    /// more urgent turns up: what was fetched stays, and a link that is cut off costs nothing but its time.
    ///
    /// # Errors
    /// The first thing that failed; what is live is untouched.
    pub(super) async fn install(&mut self, step: &Step, digest: &str) -> Result<(), StepError> {
        let set = self.published.packages(digest)?;
        self.inspecting.stop_mending().await;
        // Once more, now that it is known how much room they need.
        let preflight = self.actor.preflight(&self.running_spec(), Some(&set)).await?;
        self.preflight = Some(preflight.clone());
        let peers = peers_for(&self.world.borrow(), digest);
        // From its first archive on; a host that was not claimed until now has offered nothing.
        self.serving.look_anew(&preflight.prefix, self.published.sets(), &self.view.environments);
        let (sender, events) = unbounded_channel();
        let beside = is_beside_a_broker(step);
        let (actor, packages, mut arrived) = (self.actor.clone(), self.spec.packages.clone(), self.serving.watch());
        let prefix = preflight.prefix.clone();
        let work = async move {
            let wanted = Wanted { set: &set, packages: &packages, peers, beside_a_broker: beside };
            let tell = |event| {
                if let Installing::Fetching(now) = &event {
                    arrived(now);
                }
                drop(sender.send(event));
            };
            actor.install(&preflight, wanted, tell).await
        };
        let installed = self.follow(step, &prefix, work, events).await;
        // Also where that was over before it could be told.
        self.serving.look_anew(&prefix, self.published.sets(), &self.view.environments);
        installed
    }

    /// Sees `work` to its end, or until something more urgent than `step` has turned up, and tells how far it is.
    async fn follow(
        &mut self,
        step: &Step,
        prefix: &Path,
        work: impl Future<Output = Result<(), StepError>> + Send + 'static,
        mut events: UnboundedReceiver<Installing>,
    ) -> Result<(), StepError> {
        let beside = is_beside_a_broker(step);
        let mut teller = Teller::new(if beside { "preparing the packages" } else { "installing" });
        // A task of its own: while a slow API server takes our words, the peers' bytes must not wait. It ends with us.
        let mut work = JoinSet::from_iter([work]);
        let (mut world_changes, mut live_changes) = (self.world.clone(), self.live.clone());
        let mut clock = interval_at(Instant::now() + RESYNC, RESYNC);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(outcome) = work.join_next() => {
                    let outcome = outcome.unwrap_or_else(|error| Err(StepError::Wrong(error.to_string())));
                    if outcome.is_ok() {
                        teller.end(events);
                    }
                    return outcome;
                }
                Some(event) = events.recv() => {
                    let words = match event {
                        Installing::Fetching(now) | Installing::Linking(now) => teller.see(now),
                        Installing::Fetched => {
                            // Others wait for this.
                            self.serving.look_anew(prefix, self.published.sets(), &self.view.environments);
                            Some("the packages are fetched".to_owned())
                        }
                    };
                    if let Some(words) = words {
                        // By now there may be another reason than that of the try before.
                        if teller.is_in_trouble {
                            self.tries.reword(step, self.generation, &words);
                        }
                        let words = if beside { format!("for the next start: {words}") } else { words };
                        let world = self.world.borrow().clone();
                        self.report(&world, step, Some(&words)).await;
                    }
                    continue;
                }
                () = teller.lines() => continue,
                _ = world_changes.changed(), if beside => {}
                _ = live_changes.changed(), if beside => {}
                _ = clock.tick(), if beside => {}
            }
            let world = self.world.borrow().clone();
            let next = self.next_step(&world).await?;
            if next != *step && next != Step::Hold {
                info!(step = next.name(), "something else comes before the packages of the next start");
                return Ok(());
            }
        }
    }
}
