//! Climbing: what the loop does for each step, and taking everything off again.

use std::{io::ErrorKind, time::Instant};

use futures::FutureExt;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::{
    act::StepError,
    decide::{Assignment, Step, confirmed, host_roster},
    drain, live,
    published::{Published, read_roster},
    run::{Agent, SOON},
    watch::{Presence, World},
};
use crate::{
    api::{Closing, FluxInstanceSpec, Roster, RunningJobs, Want},
    broker::{rfc3::RpcError, status::instance as ask_instance},
    error_chain,
    host::{HostView, Preflight},
};

/// A broker that may be started.
struct Startable {
    assignment: Assignment,
    roster: Roster,
    /// What its files were made from.
    revision: u64,
}

impl Agent {
    /// Carries out a step. It is dropped when the end of the instance overtakes it, an installation also when something else
    /// is wanted by now: a source that does not answer can take a minute to be given up.
    pub(super) async fn act(&mut self, world: &World, step: &Step) -> Result<(), StepError> {
        if *step == Step::Remove {
            return self.remove().await;
        }
        let mut watched = self.world.clone();
        let (long, begun) = (matches!(step, Step::Install { .. }), wish(world));
        let overtaken = watched.wait_for(|world| world.is_over() || (long && wish(world) != begun)).map(drop);
        tokio::select! {
            outcome = self.climb(step) => outcome,
            () = overtaken => Ok(()),
        }
    }

    async fn climb(&mut self, step: &Step) -> Result<(), StepError> {
        let preflight = self.preflight.clone();
        let Some(preflight) = preflight else {
            let passed = self.actor.preflight(&self.running_spec(), None).await?;
            passed.warnings.iter().for_each(|warning| warn!("{warning}"));
            self.preflight = Some(passed);
            return Ok(());
        };
        match step {
            Step::Install { digest } | Step::Prepare { digest } => self.install(step, digest).await,
            Step::Start(decided) => {
                let Startable { assignment, roster, revision } = self.make_ready(&preflight, decided).await?;
                self.starts.started(step, self.generation, Instant::now());
                self.view = self.actor.start(&preflight, &roster, &assignment).await?;
                if assignment.rank == 0 {
                    self.actor.remember(&preflight, &roster, &self.view, revision).await?;
                }
                Ok(())
            }
            Step::Reload(assignment) => {
                let roster = self.published.roster()?;
                let live_change = self.live_change.clone();
                let _finished = live_change.lock().await;
                let revision = self.actor.configure(&preflight, &roster, assignment, true).await?;
                self.actor.reload(&preflight, &roster).await?;
                self.actor.remember(&preflight, &roster, &self.view, revision).await
            }
            Step::Drain(change) => {
                info!(?change, "draining");
                let mut live = self.live.clone();
                live.mark_unchanged();
                drain::apply(&live::connect().await?, change).await?;
                // Ordered again before the broker is asked anew, each time would be one more event in Flux's log for ever.
                let _ = timeout(2 * live::ASK_EVERY, live.changed()).await;
                Ok(())
            }
            Step::Close(closing) => {
                let roster = self.published.roster()?;
                info!(epoch = roster.epoch, ?closing, "stopping the instance for the next epoch");
                if *closing == Closing::WhenIdle {
                    self.wait_for_jobs(&preflight, &roster).await?;
                }
                self.starts.forget();
                self.view = self.actor.stop(0).await?;
                Ok(())
            }
            Step::Stop { reason, waits_for_jobs } => {
                if self.view.job_shells > 0 && *waits_for_jobs {
                    return Err(StepError::NotYet(format!("{reason}; it is stopped when the jobs here have ended")));
                }
                info!(reason, "stopping the broker");
                self.starts.forget();
                let rank = self.view.broker.as_ref().map_or(0, |broker| broker.record.rank);
                self.view = self.actor.stop(rank).await?;
                Ok(())
            }
            Step::Hold | Step::Wait(_) | Step::Preflight | Step::Remove => Ok(()),
        }
    }

    /// Everything that a broker reads at its start, by what the API says right now.
    async fn make_ready(&mut self, preflight: &Preflight, decided: &Assignment) -> Result<Startable, StepError> {
        // Without API the files of the last start are still there.
        let roster = match self.unheard_roster() {
            Some(roster) => roster,
            None => match self.configure_by_api(preflight, decided).await {
                Err(StepError::Api(error)) if self.view.died.is_some() => {
                    debug!(error = error_chain(&error), "the API server has no answer");
                    self.published.roster()?
                }
                other => return other,
            },
        };
        if self.memory.is_stale() {
            let words = "this agent stood still, and its rank may be another node's by now: waiting for the API server";
            return Err(StepError::NotYet(words.to_owned()));
        }
        warn!("no word from the API server: starting the broker with the files that are there");
        Ok(Startable { assignment: decided.clone(), revision: roster.revision, roster })
    }

    async fn configure_by_api(&mut self, preflight: &Preflight, decided: &Assignment) -> Result<Startable, StepError> {
        let (node, roster) = futures::try_join!(self.reporter.of(self.reporter.name()), read_roster(&self.client))?;
        // One that was deleted contradicts nobody.
        self.published.roster = roster.or_else(|| self.published.roster.take());
        let roster = self.published.roster()?;
        let now = node.and_then(|node| confirmed(decided, &self.actor.instance_uid, &node.spec, &roster));
        let assignment = now.ok_or_else(|| {
            let words =
                format!("waiting for the planner's word on rank {}: it is not this node's as it was", decided.rank);
            StepError::NotYet(words)
        })?;
        let revision = self.actor.configure(preflight, &roster, &assignment, false).await?;
        Ok(Startable { assignment, roster, revision })
    }

    /// Sees to it that no job runs and none will begin. A job that has slipped in between wins.
    async fn wait_for_jobs(&mut self, preflight: &Preflight, roster: &Roster) -> Result<(), StepError> {
        let runs = || StepError::NotYet("jobs run: the next epoch begins when they have ended".to_owned());
        if jobs_may_run(&self.view).await.is_some() {
            return Err(runs());
        }
        self.queues_are_ours = true;
        self.actor.stop_queues(preflight, roster).await?;
        if jobs_may_run(&self.view).await.is_some() {
            self.actor.start_queues(preflight, roster).await?;
            self.queues_are_ours = false;
            return Err(runs());
        }
        Ok(())
    }

    /// Lead: the epoch goes on, so its queues do. Once, unless it fails.
    pub(super) async fn open_queues(&mut self) {
        let (Some(preflight), Some(roster)) = (&self.preflight, &self.published.roster) else { return };
        let is_lead = self.view.broker.as_ref().is_some_and(|broker| broker.record.rank == 0);
        if !(self.queues_are_ours && is_lead && self.is_online() && roster.closing.is_none()) {
            return;
        }
        match self.actor.start_queues(preflight, roster).await {
            Ok(()) => self.queues_are_ours = false,
            Err(error) => warn!(error = error_chain(&error), "can't look at the queues"),
        }
    }

    /// The spec, with the port that the running epoch has: another one is for the next.
    pub(super) fn running_spec(&self) -> FluxInstanceSpec {
        let mut spec = self.spec.clone();
        let rank = self.world.borrow().node_spec().and_then(|own| own.rank);
        if let (Some(roster), Some(_)) = (&self.published.roster, rank) {
            spec.broker.port = Some(roster.settings.port);
        }
        if let Some(roster) = self.unheard_roster() {
            spec.broker.port = Some(roster.settings.port);
            spec.prefix = self.view.state.as_ref().map(|state| state.prefix.display().to_string());
        }
        spec
    }

    /// What there is to go by while the API has said nothing at all: the roster that this host was configured by last.
    fn unheard_roster(&self) -> Option<Roster> {
        let unheard = matches!(self.world.borrow().instance, Presence::Unknown) && self.published.roster.is_none();
        unheard.then(|| host_roster(&self.view)).flatten()
    }

    /// Removal, unless jobs run and the instance's word was that they win.
    pub(super) async fn remove(&mut self) -> Result<(), StepError> {
        let end = self.view.state.as_ref().map(|state| state.uninstall).unwrap_or_default();
        if end.running_jobs == RunningJobs::Wait
            && let Some(reason) = jobs_may_run(&self.view).await
        {
            let words =
                format!("{reason}: this host is kept until they have ended (spec.uninstall.runningJobs is Wait)");
            return Err(StepError::NotYet(words));
        }
        self.log = None;
        self.actor.remove(end.keep_state).await?;
        self.view = HostView::default();
        (self.published, self.preflight) = (Published::default(), None);
        self.starts.forget();
        match self.reporter.delete().await {
            // At a teardown the right to ask goes first; the host is clean all the same.
            Err(error) if error.code() != Some(403) && error.code() != Some(401) => {
                debug!(error = error_chain(&error), "the FluxNode stays")
            }
            _ => {}
        }
        Ok(())
    }

    /// Cleans at the end of the pod, as long as its grace lasts; needs no API.
    pub(super) async fn clean(&mut self) {
        loop {
            match self.actor.observe().await {
                Ok(view) => self.view = view,
                Err(error) => warn!(error = error_chain(&error), "can't look at the host"),
            }
            match self.remove().await {
                Ok(()) => return,
                Err(error) => warn!(error = error_chain(&error), "the host is not clean yet"),
            }
            sleep(SOON).await;
        }
    }
}

/// Why jobs may be running. The lead's word counts; where it can't be had, the job shells of this host tell, and on the
/// lead's own host a broker that lives but is silent is no proof that nothing runs elsewhere.
pub(super) async fn jobs_may_run(view: &HostView) -> Option<&'static str> {
    let answer = match live::connect().await {
        Ok(client) => ask_instance(&client).await,
        Err(error) => Err(error),
    };
    // A broker that has no socket has not been up yet: it has given no job to anybody.
    let nobody_listens = !view.rundir_lost
        && matches!(&answer, Err(RpcError::Connect { source, .. })
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused));
    let is_lead = view.broker.as_ref().is_some_and(|broker| broker.record.rank == 0);
    match answer {
        Ok(instance) if instance.allocated.cores > 0 => Some("jobs are running"),
        _ if view.job_shells > 0 => Some("jobs are running here"),
        Err(_) if is_lead && !nobody_listens => {
            Some("the lead's broker lives but does not answer, so jobs may be running")
        }
        _ => None,
    }
}

/// The peers that the planner has named for package set `digest`.
pub(super) fn peers_for(world: &World, digest: &str) -> Vec<String> {
    let told = world.node_spec().and_then(|spec| spec.fetch_from.as_ref());
    told.filter(|told| told.digest == digest).map(|told| told.peers.clone()).unwrap_or_default()
}

/// What is wanted of this node, as far as an installation depends on it: which package set, and from where. A rank that is
/// given, or a lead that has taken this node in, is no reason to begin again.
fn wish(world: &World) -> impl PartialEq + use<> {
    let generation = world.instance.here().and_then(|instance| instance.metadata.generation);
    let spec = world.node_spec().map(|spec| (spec.want == Want::Nothing, spec.fetch_from.clone()));
    (world.instance_uid(), generation, spec)
}
