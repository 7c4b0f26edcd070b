//! An installation as a step: it reports how far it is, in the log every few seconds and in the status at each quarter.

use std::{collections::BTreeSet, path::Path};

use tokio::{
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::JoinSet,
    time::{Instant, Interval, MissedTickBehavior, interval_at},
};
use tracing::{debug, info};

use super::{
    Outcome,
    install::{Claimant, Installing, Wanted, install},
};
use crate::{
    agent::Agent,
    decide::{RESYNC, next_step::next_step},
    error::StepError,
    inputs::node_inputs::NodeInputs,
    step::Step,
};
use api::{PackageSet, Packages};
use base::error_chain;
use hostapi::Progress;
use metrics::Source;
use packages::{LINE_EVERY, Meter, Reading, quarters};

/// Turns the events of one installation into log lines and messages.
struct Teller {
    /// Begins each line in the log.
    title: &'static str,
    meter: Meter,
    reported: BTreeSet<String>,
    /// The last message named an obstacle.
    is_in_trouble: bool,
    every: Interval,
}

impl Teller {
    fn new(title: &'static str) -> Self {
        let mut every = interval_at(Instant::now() + LINE_EVERY, LINE_EVERY);
        // After a slow report, the same line must not appear twice.
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { title, meter: Meter::default(), reported: BTreeSet::new(), is_in_trouble: false, every }
    }

    /// Takes in an event. Returns the message for the status, each one once: phases may overlap, and a part that must be fetched again
    /// takes a phase back.
    fn see(&mut self, event: Progress) -> Option<String> {
        let words = quarters(&event);
        // Once the work goes on, a message must replace that of the obstacle.
        let is_over = std::mem::replace(&mut self.is_in_trouble, event.trouble.is_some()) && event.trouble.is_none();
        let ended = self.meter.see(event, Instant::now().into_std());
        self.say(ended);
        (self.reported.insert(words.clone()) || is_over).then_some(words)
    }

    /// Writes a line whenever it is time for one. Never ends.
    async fn lines(&mut self) {
        loop {
            self.every.tick().await;
            self.say(self.meter.read(Instant::now().into_std()));
        }
    }

    /// Writes the last line of an installation that succeeded.
    fn end(mut self, mut events: UnboundedReceiver<Installing>) {
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

/// Fetches and links the package set `digest`. Beside a broker that runs ([`Step::Prepare`]), the installation ends early if
/// something more urgent turns up: what was fetched stays, and a link that is cut off costs nothing but its time.
///
/// # Errors
/// The first failure; what is live is untouched.
pub async fn install_package_set(
    agent: &mut Agent,
    inputs: &NodeInputs,
    step: &Step,
    digest: &str,
) -> Result<Outcome, StepError> {
    // The same set may have another source by now. An API server that is away keeps nothing from being installed.
    if let Err(error) = agent.sources.published.read_packages(&agent.ops.client).await {
        debug!(error = error_chain(&error), "can't read the package sets again");
    }
    let set = agent.sources.published.packages(digest)?;
    agent.background.stop_mending().await;
    // Once more, now that it is known how much room the packages need.
    let preflight = agent.ops.preflight(&agent.sources.running_spec(), Some(&set)).await?;
    agent.sources.preflight = Some(preflight.clone());
    let peers = inputs.peers_for(digest);
    // Offers archives from the first one on; a host that was not claimed until now has offered none.
    offer_archives(agent, inputs, &preflight.prefix);
    let (sender, events) = unbounded_channel();
    let (ops, packages, uninstall) = (agent.ops.clone(), inputs.spec.packages.clone(), inputs.spec.uninstall.clone());
    let (instance_uid, mut arrived) = (agent.sources.instance_uid().to_owned(), agent.background.serving.watch());
    let metrics = agent.metrics.clone();
    let (prefix, beside_a_broker) = (preflight.prefix.clone(), is_beside_a_broker(step));
    let work = async move {
        let claimant = Claimant { instance_uid: &instance_uid, uninstall: &uninstall };
        let wanted = Wanted { set: &set, packages: &packages, peers, claimant, beside_a_broker };
        let report = |event| {
            if let Installing::Fetching(now) = &event {
                arrived(now);
            }
            drop(sender.send(event));
        };
        let (begun, origin) = (Instant::now(), origin(wanted.set, wanted.packages));
        let fetched = install(&ops, &preflight, wanted, report).await?;
        let others = fetched.fetched_bytes.saturating_sub(fetched.from_peers);
        metrics.installation(begun.elapsed(), &[(Source::Peer, fetched.from_peers), (origin, others)]);
        Ok(())
    };
    let installed = follow(agent, inputs, step, &prefix, work, events).await;
    // Also if the installation ended before its last event was read.
    offer_archives(agent, inputs, &prefix);
    installed
}

/// Where packages come from that no other node has sent.
fn origin(set: &PackageSet, packages: &Packages) -> Source {
    match set {
        PackageSet::Bundle(_) => Source::Bundle,
        PackageSet::Lock { .. } if packages.mirror.is_some() => Source::Mirror,
        PackageSet::Lock { .. } => Source::Source,
    }
}

fn offer_archives(agent: &mut Agent, inputs: &NodeInputs, prefix: &Path) {
    agent.background.serving.look_anew(prefix, agent.sources.published.sets(), &inputs.host.environments);
}

/// Waits until `work` ends, or something more urgent than `step` turns up, and reports how far it is.
async fn follow(
    agent: &mut Agent,
    inputs: &NodeInputs,
    step: &Step,
    prefix: &Path,
    work: impl Future<Output = Result<(), StepError>> + Send + 'static,
    mut events: UnboundedReceiver<Installing>,
) -> Result<Outcome, StepError> {
    let beside_a_broker = is_beside_a_broker(step);
    let mut latest = inputs.clone();
    let mut teller = Teller::new(if beside_a_broker { "preparing the packages" } else { "installing" });
    // A task of its own: other nodes' archives must not wait while a slow API server takes a report. It ends with this function.
    let mut work = JoinSet::from_iter([work]);
    let (mut watched, mut broker) = (agent.sources.watched.clone(), agent.sources.broker.clone());
    let mut clock = interval_at(Instant::now() + RESYNC, RESYNC);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(outcome) = work.join_next() => {
                outcome.map_err(StepError::Task)??;
                teller.end(events);
                return Ok(Outcome::Done);
            }
            Some(event) = events.recv() => {
                let words = match event {
                    Installing::Fetching(now) | Installing::Linking(now) => teller.see(now),
                    Installing::Fetched => {
                        // Other nodes wait for this.
                        offer_archives(agent, &latest, prefix);
                        Some("the packages are fetched".to_owned())
                    }
                };
                if let Some(words) = words {
                    // The obstacle may be another one than at the attempt before.
                    if teller.is_in_trouble {
                        agent.memory.attempts.reword(step, inputs.generation, &words);
                    }
                    let words = if beside_a_broker { format!("for the next start: {words}") } else { words };
                    agent.report_step(&latest, step, Some(&words)).await;
                }
                continue;
            }
            () = teller.lines() => continue,
            _ = watched.changed(), if beside_a_broker => {}
            _ = broker.changed(), if beside_a_broker => {}
            _ = clock.tick(), if beside_a_broker => {}
        }
        latest = agent.observe().await?;
        agent.remember_uninstall(&latest).await;
        let next = next_step(&latest, &agent.memory);
        if next != *step && next != Step::Hold {
            info!(step = next.name(), "something else comes before the packages of the next start");
            return Ok(Outcome::Overtaken);
        }
    }
}
