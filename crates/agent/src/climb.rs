//! Climbing: what the loop does for each step, and taking everything off again.

use std::{
    fs::OpenOptions,
    io::{ErrorKind, Write},
    path::Path,
};

use futures::FutureExt;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::{
    act::{Content, StepError, removal_grace},
    copied::host_roster,
    decide::Step,
    drain, live,
    published::Published,
    queues,
    run::{Agent, SOON},
    uninstall,
    watch::{Presence, World},
};
use api::{Closing, FluxInstanceSpec, Rank, Roster, RunningJobs, Want};
use base::error_chain;
use broker::{
    reload::reload,
    rfc3::RpcError,
    status::{InstanceStatus, instance as ask_instance, overlay},
};
use hostapi::{HostView, Preflight};
use model::{
    names::{are_settled, live_configuration},
    roster::topology,
};

impl Agent {
    /// Carries out a step. It is dropped when the end of the instance overtakes it, an installation also when something else
    /// is wanted by now: a source that does not answer can take a minute to be given up.
    pub(super) async fn act(&mut self, world: &World, step: &Step) -> Result<(), StepError> {
        if *step == Step::Remove {
            return self.remove(false).await;
        }
        // Cut off between two of its steps, a live change would leave the instance without a scheduler.
        if let Step::Reload(_) = step {
            return self.climb(step).await;
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
            Step::Start(decided) => self.start(step, &preflight, decided).await,
            Step::Reload(assignment) => {
                let roster = self.published.roster()?;
                let live_change = self.live_change.clone();
                let _finished = live_change.lock().await;
                let Content { roster, revision, .. } =
                    self.actor.configure(&preflight, &roster, assignment, true).await?;
                let mut settled = true;
                reload(&live::connect().await?, |held| {
                    settled = are_settled(&roster, held);
                    live_configuration(&roster, held)
                })
                .await?;
                info!(revision, "the lead has taken in the roster's resources");
                // Asked without a scheduler, the broker has not told what is drained.
                self.ask.notify_one();
                self.actor.remember(&preflight, &roster, &self.view, revision, settled).await
            }
            Step::Drain(change) => {
                info!(?change, "draining");
                let mut live = self.live.clone();
                live.mark_unchanged();
                drain::apply(&live::connect().await?, change).await?;
                self.ask.notify_one();
                // Ordered again before the broker has told of it, each time would be one more event in Flux's log for ever.
                let _ = timeout(2 * live::ASK_EVERY, live.changed()).await;
                Ok(())
            }
            Step::Close(closing) => self.close(&preflight, *closing).await,
            Step::Stop { reason, waits_for_jobs } => self.stop(reason, *waits_for_jobs).await,
            Step::Hold | Step::Wait(_) | Step::GiveWay(_) | Step::Preflight | Step::Remove => Ok(()),
        }
    }

    async fn close(&mut self, preflight: &Preflight, closing: Closing) -> Result<(), StepError> {
        let roster = self.published.roster()?;
        info!(epoch = roster.epoch, ?closing, "stopping the instance for the next epoch");
        if closing == Closing::WhenIdle {
            self.wait_for_jobs(preflight, &roster).await?;
        }
        self.starts.forget();
        self.view = self.actor.close().await?;
        Ok(())
    }

    async fn stop(&mut self, reason: &str, waits_for_jobs: bool) -> Result<(), StepError> {
        if self.view.job_shells > 0 && waits_for_jobs {
            return Err(StepError::NotYet(format!("{reason}; it is stopped when the jobs here have ended")));
        }
        info!(reason, "stopping the broker");
        self.starts.forget();
        let rank = self.view.broker.as_ref().map_or(0, |broker| broker.record.rank);
        self.view = self.actor.stop(rank).await?;
        Ok(())
    }

    /// Sees to it that no job runs and none will begin. A job that has slipped in between wins.
    async fn wait_for_jobs(&mut self, preflight: &Preflight, roster: &Roster) -> Result<(), StepError> {
        let runs = || StepError::NotYet("jobs run: the next epoch begins when they have ended".to_owned());
        if jobs_may_run(&self.view).await.is_some() {
            return Err(runs());
        }
        self.queues_are_ours = true;
        queues::stop(&*self.actor.host, &preflight.prefix, roster, queues::EPOCH_ENDS).await?;
        if jobs_may_run(&self.view).await.is_some() {
            queues::start(&*self.actor.host, &preflight.prefix, roster, &[queues::EPOCH_ENDS]).await?;
            self.queues_are_ours = false;
            return Err(runs());
        }
        Ok(())
    }

    /// Lead: the epoch goes on, so its queues do. Once, unless it fails, or `flux-distribute uninstall` is at work on this host:
    /// if that is killed, its queues would stay stopped.
    pub(super) async fn open_queues(&mut self) {
        let (Some(preflight), Some(roster)) = (&self.preflight, &self.published.roster) else { return };
        let is_lead = self.view.broker.as_ref().is_some_and(|broker| broker.record.rank == 0);
        if !(self.queues_are_ours && is_lead && self.is_online() && roster.closing.is_none()) {
            return;
        }
        let is_uninstalled = uninstall::is_under_way();
        let messages: &[&str] =
            if is_uninstalled { &[queues::EPOCH_ENDS] } else { &[queues::EPOCH_ENDS, queues::UNINSTALLED_BY_HAND] };
        match queues::start(&*self.actor.host, &preflight.prefix, roster, messages).await {
            Ok(()) => self.queues_are_ours = is_uninstalled,
            Err(error) => warn!(error = error_chain(&error), "can't look at the queues"),
        }
    }

    /// The spec, with the port that the running epoch has (another one is for the next) and the prefix of the instance.
    pub(super) fn running_spec(&self) -> FluxInstanceSpec {
        let mut spec = self.spec.clone();
        if self.told_prefix.is_some() {
            spec.prefix.clone_from(&self.told_prefix);
        }
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

    /// What the broker is to be started by while the API has said nothing at all.
    fn unheard_roster(&self) -> Option<Roster> {
        let is_silent = matches!(self.world.borrow().instance, Presence::Unknown);
        (is_silent && self.published.roster.is_none()).then(|| host_roster(&self.view)).flatten()
    }

    /// Removal, unless jobs run and the instance's word was that they win. `pod_ends`: the time is the pod's.
    pub(super) async fn remove(&mut self, pod_ends: bool) -> Result<(), StepError> {
        let remembered = self.view.state.as_ref();
        let told = remembered.and_then(|state| self.world.borrow().end_of(&state.instance_uid));
        let end = told.or(remembered.map(|state| state.uninstall.clone())).unwrap_or_default();
        if end.running_jobs != RunningJobs::Cancel
            && let Some(reason) = self.last_jobs().await
        {
            return Err(StepError::NotYet(waits_for_jobs(reason, self.queues_have_ended, end.keep_state)));
        }
        self.log = None;
        self.inspecting.stop_mending().await;
        let rank = self.view.broker.as_ref().map(|broker| broker.record.rank);
        self.actor.remove(end.keep_state, removal_grace(rank, end.keep_state, pod_ends)).await?;
        self.view = HostView::default();
        (self.published, self.preflight) = (Published::default(), None);
        self.queues_have_ended = false;
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

    /// Sees to it that no further job begins, where that is possible, and looks whether one runs. Every agent does, so that none
    /// stops its broker at an idle moment between two jobs because the lead's was slower; the first one finds queues to stop.
    async fn last_jobs(&mut self) -> Option<&'static str> {
        let answer = ask().await;
        let reason = may_run(&self.view, &answer, |_| true);
        let is_known = reason.is_some() && self.queues_have_ended;
        let (Some(state), Some(roster), true) =
            (&self.view.state, host_roster(&self.view), answer.lead.is_ok() && !is_known)
        else {
            return reason;
        };
        match queues::stop(&*self.actor.host, &state.prefix, &roster, queues::INSTANCE_ENDS).await {
            Ok(()) => self.queues_have_ended = true,
            Err(error) => warn!(error = error_chain(&error), "can't stop the queues"),
        }
        may_run(&self.view, &ask().await, |_| true)
    }

    /// Cleans at the end of the pod, as long as its grace lasts; needs no API. Why it takes long can be told by the pod alone then:
    /// at a teardown nobody may write to the API any more.
    pub(super) async fn clean(&mut self) {
        let mut told = String::new();
        loop {
            // By what was seen before, or by nothing, it can't be told whether jobs run.
            let words = match self.actor.observe().await {
                Err(error) => format!("can't look at the host: {}", error_chain(&error)),
                Ok(view) => {
                    self.view = view;
                    match self.remove(true).await {
                        Ok(()) => return last_words(&self.termination_log, "this host is clean"),
                        Err(error) => error_chain(&error),
                    }
                }
            };
            if words != told {
                warn!(reason = words, "the host is not clean yet");
                last_words(&self.termination_log, &format!("this host is not clean: {words}. {AFTERWARDS}"));
                told = words;
            }
            sleep(SOON).await;
        }
    }
}

/// What to do about a host that is not clean when the pod's grace is over.
const AFTERWARDS: &str = "The pod ends within 120 s, and the host stays as it is. Afterwards: apply the manifest again, which \
                          cleans the host once its jobs have ended, then run `make undeploy`.";

/// What `kubectl describe pod` shows of this container when it has ended. Only a container has such a file.
fn last_words(termination_log: &Path, words: &str) {
    let written = OpenOptions::new().write(true).truncate(true).open(termination_log);
    if let Err(error) = written.and_then(|mut file| file.write_all(words.as_bytes())) {
        debug!(%error, "no last words");
    }
}

/// Why jobs may be running, anywhere.
pub(super) async fn jobs_may_run(view: &HostView) -> Option<&'static str> {
    may_run(view, &ask().await, |_| true)
}

/// Why jobs may be running that end with the broker of this host: those on its rank, and on ranks that hang on it.
pub(super) async fn jobs_may_run_here(view: &HostView) -> Option<&'static str> {
    may_run(view, &ask().await, |rank| ends_with(view, rank))
}

/// The broker of `rank` ends with the one of this host. If it isn't known which that is, each may.
pub(super) fn ends_with(view: &HostView, rank: Rank) -> bool {
    let (Some(broker), Some(roster)) = (&view.broker, host_roster(view)) else { return true };
    let own = broker.record.rank;
    own == 0
        || own == rank
        || topology(&roster).is_none_or(|topology| topology.ancestors(rank).any(|above| above == own))
}

/// What is heard over the socket of this host's broker.
pub(super) struct Heard {
    /// The lead's word.
    pub(super) lead: Result<InstanceStatus, RpcError>,
    /// Others may hang on this broker: it says so, or nothing at all.
    may_carry_others: bool,
}

pub(super) async fn ask() -> Heard {
    let socket = match live::connect().await {
        Ok(socket) => socket,
        Err(error) => return Heard { lead: Err(error), may_carry_others: true },
    };
    let lead = ask_instance(&socket).await;
    // Those below that carry no jobs leave by themselves, and so a tree is cleaned from its leaves though its lead is dead.
    let may_carry_others =
        lead.is_ok() || overlay(&socket).await.map_or(true, |overlay| !overlay.connected.0.is_empty());
    Heard { lead, may_carry_others }
}

/// The lead's word counts. Where it can't be had, the job shells of this host tell; and a broker that lives, of the lead or one
/// that has others below it, is no proof that nothing runs elsewhere: with it would end all that hang on it. `counts`: of which
/// ranks the jobs matter.
fn may_run(view: &HostView, heard: &Heard, counts: impl Fn(Rank) -> bool) -> Option<&'static str> {
    // A broker that has no socket has not been up yet: it has given no job to anybody.
    let nobody_listens = !view.rundir_lost
        && matches!(&heard.lead, Err(RpcError::Connect { source, .. })
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused));
    let rank = view.broker.as_ref().map(|broker| broker.record.rank);
    let has_others_below = |rank| {
        let Some(roster) = host_roster(view).filter(|_| heard.may_carry_others) else { return false };
        topology(&roster).is_some_and(|topology| topology.is_interior(rank, roster.settings.max_size))
    };
    match &heard.lead {
        Ok(instance) if instance.allocated.ranks.0.iter().any(|rank| counts(*rank)) => Some("jobs are running"),
        _ if view.job_shells > 0 => Some("jobs are running here"),
        Err(_) if rank == Some(0) && !nobody_listens => {
            Some("the lead's broker lives but does not answer, so jobs may be running")
        }
        Err(_) if !nobody_listens && rank.is_some_and(has_others_below) => Some(
            "the lead does not answer, and jobs may be running on ranks that hang on this node's broker (if you know better: \
                 `flux-distribute uninstall --force` in this node's pod)",
        ),
        _ => None,
    }
}

/// What a host that is to be cleaned waits for, and what its users have to expect.
fn waits_for_jobs(reason: &str, queues_have_ended: bool, keep_state: bool) -> String {
    let pending = match (queues_have_ended, keep_state) {
        (false, _) => "",
        (true, true) => "; pending jobs are not started any more, and stay in the queue that is kept",
        (true, false) => "; pending jobs are not started any more, and end with the instance",
    };
    format!("{reason}: this host is kept until they have ended (spec.uninstall.runningJobs is Wait){pending}")
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
    (world.instance_uid(), generation, world.followed_generation(), spec)
}

#[cfg(test)]
mod tests {
    use std::io::Error;

    use super::*;
    use crate::fixture::tree;
    use broker::status::Amount;

    #[test]
    fn jobs_run_by_the_leads_word_or_by_what_this_host_shows_and_a_silent_lead_proves_nothing() {
        let uses = |ranks: u32| {
            let allocated = Amount { ranks: (7..7 + ranks).collect(), cores: ranks as usize, gpus: 0 };
            Ok(InstanceStatus { allocated, ..InstanceStatus::default() })
        };
        let silent = || Err(RpcError::Connect { path: "/s".into(), source: Error::from(ErrorKind::TimedOut) });
        let no_socket = || Err(RpcError::Connect { path: "/s".into(), source: Error::from(ErrorKind::NotFound) });
        let mut lost = tree(Some(0), 0);
        lost.rundir_lost = true;
        for (view, lead, may) in [
            (tree(Some(0), 0), uses(0), false),
            (tree(Some(1), 0), uses(2), true),
            (tree(Some(1), 0), uses(0), false),
            (tree(Some(1), 1), uses(0), true),
            (tree(Some(1), 0), silent(), true),
            (tree(Some(1), 0), no_socket(), false),
            (tree(Some(5), 0), silent(), false),
            (tree(Some(5), 1), silent(), true),
            (tree(Some(0), 0), silent(), true),
            (tree(Some(0), 0), no_socket(), false),
            (lost, no_socket(), true),
            (tree(None, 0), no_socket(), false),
        ] {
            let heard = Heard { lead, may_carry_others: true };
            assert_eq!(may_run(&view, &heard, |_| true).is_some(), may, "{view:?} {:?}", heard.lead);
        }
        let joins = Heard { lead: silent(), may_carry_others: false };
        assert_eq!(may_run(&tree(Some(1), 0), &joins, |_| true), None);
        // Rank 7 hangs on ranks 3, 1 and 0.
        for (rank, ends) in [(0, true), (1, true), (3, true), (7, true), (2, false), (4, false)] {
            let (view, heard) = (tree(Some(rank), 0), Heard { lead: uses(1), may_carry_others: true });
            assert_eq!(may_run(&view, &heard, |busy| ends_with(&view, busy)).is_some(), ends, "{rank}");
        }
    }

    #[test]
    fn who_waits_for_running_jobs_says_what_becomes_of_the_pending_ones() {
        for (queues_have_ended, keep_state, expected) in
            [(false, false, "is Wait)"), (true, false, "end with the instance"), (true, true, "queue that is kept")]
        {
            let words = waits_for_jobs("jobs are running", queues_have_ended, keep_state);
            assert!(words.starts_with("jobs are running: ") && words.ends_with(expected), "{words}");
        }
    }
}
