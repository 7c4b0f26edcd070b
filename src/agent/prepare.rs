//! The next epoch's packages, beside a broker that runs: for as long as nothing else is to be done.

use std::pin::pin;

use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};
use tracing::info;

use super::{
    act::StepError,
    climb::peers_for,
    decide::{Step, decide},
    progress::Teller,
    run::{Agent, RESYNC},
};
use crate::host::Progress;

impl Agent {
    /// Fetches and links the package set `digest`. It is let go where something more urgent turns up: what was fetched
    /// stays, and a link that is cut off costs nothing but its time.
    ///
    /// # Errors
    /// As for an installation; what runs is untouched.
    pub(super) async fn prepare(&mut self, step: &Step, digest: &str) -> Result<(), StepError> {
        let set = self.published.packages(digest)?;
        let preflight = self.actor.preflight(&self.running_spec(), Some(&set)).await?;
        let (sender, mut events) = mpsc::unbounded_channel::<Progress>();
        let actor = self.actor.clone();
        let peers = peers_for(&self.world.borrow(), digest);
        let packages = self.spec.packages.clone();
        let mut install = pin!(async {
            let fetched = sender.clone();
            actor.fetch(&preflight, &set, &packages, peers, move |now| drop(fetched.send(now))).await?;
            actor.link(&preflight, &set, move |now| drop(sender.send(now))).await
        });
        let (mut world_changes, mut live_changes) = (self.world.clone(), self.live.clone());
        let mut clock = interval(RESYNC);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut teller = Teller::new("preparing the packages");
        loop {
            tokio::select! {
                outcome = &mut install => {
                    if outcome.is_ok() {
                        teller.end(events);
                    }
                    return outcome;
                }
                Some(now) = events.recv() => {
                    if let Some(words) = teller.see(now) {
                        let world = self.world.borrow().clone();
                        self.report(&world, step, Some(&format!("for the next start: {words}"))).await;
                    }
                    continue;
                }
                () = teller.lines() => continue,
                _ = world_changes.changed() => {}
                _ = live_changes.changed() => {}
                _ = clock.tick() => {}
            }
            let world = self.world.borrow().clone();
            self.observe(&world).await?;
            let uid = world.instance_uid();
            if decide(&self.seen(&world, uid.as_deref())) != *step {
                info!("something else comes before the packages of the next start");
                return Ok(());
            }
        }
    }
}
