//! The agent's rounds: observe, decide, report, act, rest.

use std::time::{Duration, Instant};

use tokio::time::sleep;
use tracing::{info, warn};

use super::{
    act::StepError,
    decide::{Step, decide},
    run::{Agent, RESYNC, SOON},
    tries::Trouble,
    watch::World,
};
use crate::{chance::chance, error_chain, packages::tried_again};

impl Agent {
    /// Climbs the ladder and holds it, for ever.
    pub(super) async fn hold(&mut self) {
        loop {
            // Taken before looking: what changes from here on ends the pause below.
            let mut world_changes = self.world.clone();
            world_changes.mark_unchanged();
            let mut live_changes = self.live.clone();
            live_changes.mark_unchanged();
            let pause = match self.round().await {
                Ok(pause) => {
                    self.blind = 0;
                    pause
                }
                Err(error) => {
                    warn!(error = error_chain(&error), "this round was cut short");
                    self.tell_blindness(&error).await
                }
            };
            tokio::select! {
                _ = world_changes.changed() => {}
                _ = live_changes.changed() => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// Observes, decides, reports, acts; returns how long to rest.
    async fn round(&mut self) -> Result<Duration, StepError> {
        let world = self.world.borrow().clone();
        let step = self.next_step(&world).await?;
        match step {
            // Before it is reported: the planner sends others here once it hears of it.
            Step::Install { .. } | Step::Prepare { .. } => self.serving.expect(true),
            // Leaves the pending flag alone until preflight, spec and package set are known.
            _ if self.preflight.is_none() || world.node_spec().is_none() || self.published.sets().is_empty() => {}
            _ => self.serving.expect(false),
        }
        Ok(match step {
            Step::Hold | Step::Wait(_) | Step::GiveWay(_) => self.stay(&world, &step).await,
            _ => self.go(&world, &step).await,
        })
    }

    /// Observes and decides.
    ///
    /// # Errors
    /// The host can't be looked at; the API server's, for what has to be there first.
    pub(super) async fn next_step(&mut self, world: &World) -> Result<Step, StepError> {
        self.observe(world).await?;
        let uid = world.instance_uid();
        let live = self.live.borrow().clone();
        Ok(decide(&self.seen(world, uid.as_deref(), &live)))
    }

    /// No rung is to be climbed: there is time for what nothing depends on.
    async fn stay(&mut self, world: &World, step: &Step) -> Duration {
        self.tries.succeeded();
        self.report(world, step, None).await;
        if *step == Step::Hold {
            self.open_queues().await;
        }
        if world.instance.here().is_some() {
            self.tidy().await;
            self.dump_if_due(step);
            self.inspect().await;
        }
        // What others do is heard by a watch, but for the packages, which are not watched.
        let on_its_way = self.view.broker.is_some() && !self.is_online();
        if on_its_way || self.published.digest().is_none() { SOON } else { RESYNC }
    }

    /// Does the step, unless it has failed just now.
    async fn go(&mut self, world: &World, step: &Step) -> Duration {
        if let Step::Install { .. } = step
            && let told = world.node_spec().and_then(|spec| spec.fetch_from.clone())
            && self.told != told
        {
            // Another source is tried at once.
            self.told = told;
            self.tries.succeeded();
        }
        // A broker that has died is not kept waiting for an API server that is away.
        let is_urgent = matches!(step, Step::Start(_)) && self.view.died.is_some();
        if !is_urgent {
            self.report(world, step, None).await;
        }
        let (now, generation) = (Instant::now(), self.generation);
        let rest = self.tries.rest(step, generation, now).max(self.starts.rest(step, generation, now));
        if let Some(rest) = rest {
            if is_urgent {
                self.report(world, step, None).await;
            }
            return rest.min(RESYNC);
        }
        match self.act(world, step).await {
            Ok(()) => self.tries.succeeded(),
            Err(error) => {
                let pause = self.tries.failed(step, generation, trouble(step, &error), Instant::now(), chance());
                if let StepError::Fetch(_) = error {
                    let words = format!("{}; {}", error_chain(&error), tried_again(pause));
                    self.tries.reword(step, generation, &words);
                }
                if let Step::Reload(_) = step {
                    // It goes on with the resources that it has.
                    self.open_queues().await;
                }
                self.report(world, step, None).await;
            }
        }
        Duration::ZERO
    }
}

/// What is told of a step that was not done; it is logged here.
fn trouble(step: &Step, error: &StepError) -> Trouble {
    let trouble = Trouble {
        words: error_chain(error),
        waiting: error.is_waiting(),
        lasting: !error.is_transient(),
        by_others: matches!(error, StepError::PortTaken(_)),
    };
    if trouble.waiting {
        info!(step = step.name(), reason = trouble.words, "this step has to wait");
    } else {
        let transient = error.is_transient();
        warn!(step = step.name(), error = trouble.words, transient, "this step failed and will be tried again");
    }
    trouble
}
