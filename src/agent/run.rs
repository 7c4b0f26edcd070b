//! The agent's loop.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use futures::FutureExt;
use kube::{Api, Client, ResourceExt};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{Mutex, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use super::{
    AgentArguments, AgentError,
    act::{Actor, Applied, StepError},
    client,
    decide::{Instance, Seen, Step, decide},
    health::{self, Readiness},
    live::{self, Live},
    log::{self, Rejected},
    published::Published,
    report::Reporter,
    teardown,
    tell::{self, Known, facts},
    tries::{Starts, Tries, Trouble},
    watch::{Presence, World, world},
};
use crate::{
    api::{CONFIGMAP_DEFAULT, FluxInstanceSpec, FluxNodeSpec, NAMESPACE, RunningJobs, Uninstall},
    broker::status::instance as ask_instance,
    error_chain,
    host::{Host, HostView, NsHost, Preflight, Progress},
    planner,
};

/// Look again at least this often, even where nothing was heard.
const RESYNC: Duration = Duration::from_secs(10);
/// While something is on its way.
const SOON: Duration = Duration::from_secs(1);
/// A broker that takes longer than this to come up is worth a look into the lead's words.
const LATE: Duration = Duration::from_secs(5);

/// So long a new agent may take to hear the broker that it has found.
const NEW: Duration = Duration::from_secs(10);
/// The longest that a live change may take.
const LIVE_CHANGE: Duration = Duration::from_secs(60);

/// Runs the agent until SIGTERM.
///
/// # Errors
/// What keeps it from beginning at all.
pub async fn run(arguments: AgentArguments) -> Result<std::process::ExitCode, AgentError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(AgentError::Signals)?;
    let readiness = Readiness::default();
    health::serve(arguments.health_address, readiness.clone())
        .await
        .map_err(|source| AgentError::Health { address: arguments.health_address, source })?;
    let client = client().await?;
    let host: Arc<dyn Host> = Arc::new(NsHost::open()?);
    info!(node = arguments.node_name, version = env!("CARGO_PKG_VERSION"), "the agent begins");
    let world = world(&client, &arguments.node_name);
    let members = Arc::new(AtomicU32::new(0));
    let planner = tokio::spawn(planner::run(client.clone(), arguments.pod_name.clone(), members.clone()));
    let mut agent = Agent::new(&client, host, &arguments, world.clone(), readiness, members);
    let live_change = agent.live_change.clone();
    tokio::select! {
        () = agent.hold() => {}
        () = async {
            terminate.recv().await;
            info!("SIGTERM: an end of the pod is no end of what runs on the host");
            // Cut off between two of its steps, a live change would leave the instance without a scheduler.
            let _ = timeout(LIVE_CHANGE, live_change.lock()).await;
        } => {}
    }
    planner.abort();
    let released = planner::release(client.clone(), &arguments.pod_name);
    let _ = timeout(teardown::LAST_QUESTION, released).await;
    if teardown::evidence(&client, world).await {
        info!("the instance is over: cleaning this host");
        agent.clean().await;
    }
    Ok(std::process::ExitCode::SUCCESS)
}

/// What follows the broker's log, and below which prefix.
struct LogTask(std::path::PathBuf, JoinHandle<()>);

impl Drop for LogTask {
    fn drop(&mut self) {
        self.1.abort();
    }
}

struct Agent {
    client: Client,
    /// Held while the lead takes in new resources.
    live_change: Arc<Mutex<()>>,
    /// Members of the instance, for the planner's candidates.
    members: Arc<AtomicU32>,
    began: Instant,
    actor: Actor,
    reporter: Reporter,
    readiness: Readiness,
    world: watch::Receiver<World>,
    live: watch::Receiver<Live>,
    rejected: watch::Sender<Rejected>,
    log: Option<LogTask>,
    // What is remembered between two rounds; all of it can be lost.
    view: HostView,
    preflight: Option<Preflight>,
    spec: FluxInstanceSpec,
    /// metadata.generation of the FluxInstance: counts the changes of its spec.
    generation: i64,
    published: Published,
    tries: Tries,
    starts: Starts,
    hint: Option<String>,
}

impl Agent {
    fn new(
        client: &Client,
        host: Arc<dyn Host>,
        arguments: &AgentArguments,
        world: watch::Receiver<World>,
        readiness: Readiness,
        members: Arc<AtomicU32>,
    ) -> Self {
        Self {
            client: client.clone(),
            live_change: Arc::default(),
            members,
            began: Instant::now(),
            actor: Actor { host, client: client.clone(), instance_uid: String::new(), uninstall: Uninstall::default() },
            reporter: Reporter::new(client.clone(), arguments.node_name.clone(), &arguments.pod_name),
            readiness,
            world,
            live: live::follow(),
            rejected: watch::channel(Rejected::new()).0,
            log: None,
            view: HostView::default(),
            preflight: None,
            spec: FluxInstanceSpec::default(),
            generation: 0,
            published: Published::default(),
            tries: Tries::default(),
            starts: Starts::default(),
            hint: None,
        }
    }

    /// Climbs the ladder and holds it, for ever.
    async fn hold(&mut self) {
        loop {
            // Taken before looking: what changes from here on ends the pause below.
            let mut world_changes = self.world.clone();
            world_changes.mark_unchanged();
            let mut live_changes = self.live.clone();
            live_changes.mark_unchanged();
            let pause = match self.round().await {
                Ok(pause) => pause,
                Err(error) => {
                    warn!(error = error_chain(&error), "this round was cut short");
                    SOON
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
        self.observe(&world).await?;
        let uid = world.instance_uid();
        let step = decide(&self.seen(&world, uid.as_deref()));
        if let Step::Hold | Step::Wait(_) = step {
            self.tries.succeeded();
            self.report(&world, &step, None).await;
            // What others do is heard by a watch, but for the packages, which are not watched.
            let on_its_way = self.view.broker.is_some() && !self.is_online();
            return Ok(if on_its_way || self.published.digest().is_none() { SOON } else { RESYNC });
        }
        self.report(&world, &step, None).await;
        let (now, generation) = (Instant::now(), self.generation);
        let rest = self.tries.rest(&step, generation, now).max(self.starts.rest(&step, generation, now));
        if let Some(rest) = rest {
            return Ok(rest.min(RESYNC));
        }
        let outcome = self.act(&world, &step).await;
        match outcome {
            Ok(()) => {
                self.tries.succeeded();
                Ok(Duration::ZERO)
            }
            Err(error) => {
                let trouble = Trouble { words: error_chain(&error), waiting: error.is_waiting() };
                if trouble.waiting {
                    info!(step = step.name(), reason = trouble.words, "this step has to wait");
                } else {
                    let transient = error.is_transient();
                    warn!(
                        step = step.name(),
                        error = trouble.words,
                        transient,
                        "this step failed and will be tried again"
                    );
                }
                self.tries.failed(&step, generation, trouble, Instant::now());
                self.report(&world, &step, None).await;
                Ok(Duration::ZERO)
            }
        }
    }

    fn seen<'a>(&'a self, world: &'a World, uid: Option<&'a str>) -> Seen<'a> {
        let instance = match uid {
            _ if world.is_over() => Instance::Over,
            Some(uid) => Instance::Here { uid },
            None => Instance::Unknown,
        };
        Seen {
            instance,
            spec: world.node_spec(),
            roster: self.published.roster.as_ref(),
            published: self.published.digest(),
            host: &self.view,
            preflight: self.preflight.as_ref(),
            applied: Applied::of(&self.view),
        }
    }

    /// The host, and what the planner has published as far as it concerns this node: read by name, and only when our own
    /// FluxNode says that there is something new.
    async fn observe(&mut self, world: &World) -> Result<(), StepError> {
        if let Some(instance) = world.instance.here() {
            let place = |spec: &FluxInstanceSpec| (spec.prefix.clone(), spec.broker.port);
            if place(&self.spec) != place(&instance.spec) {
                self.preflight = None;
            }
            self.spec = instance.spec.clone();
            self.generation = instance.metadata.generation.unwrap_or_default();
            self.members.store(instance.status.as_ref().map_or(0, |status| status.size), Ordering::Relaxed);
            self.actor.uninstall = self.spec.uninstall;
            let uid = instance.uid().unwrap_or_default();
            if self.actor.instance_uid != uid {
                self.actor.instance_uid = uid;
                (self.published, self.preflight) = (Published::default(), None);
            }
            if let Presence::Gone = world.node {
                self.reporter.create().await?;
            }
        }
        self.view = self.actor.observe().await?;
        self.remember_the_end(world).await?;
        let online = self.is_online();
        self.starts.seen(self.view.broker.is_some(), online, self.view.died.as_deref(), Instant::now());
        self.follow_log();
        if world.instance.here().is_some() && !world.is_over() {
            let spec = world.node_spec().cloned().unwrap_or_default();
            if let Err(error) = self.published.refresh(&self.client, &spec, &self.view).await {
                // What runs goes on with what is known.
                debug!(error = error_chain(&error), "can't read what the planner has published");
            }
        }
        Ok(())
    }

    /// What is to happen at the end is asked for when the FluxInstance is gone: the host has to remember it.
    async fn remember_the_end(&self, world: &World) -> Result<(), StepError> {
        let (Some(state), Some(preflight)) = (&self.view.state, &self.preflight) else { return Ok(()) };
        let ours = state.instance_uid == self.actor.instance_uid && world.instance.here().is_some() && !world.is_over();
        if ours && state.uninstall != self.actor.uninstall { self.actor.claim(preflight).await } else { Ok(()) }
    }

    fn follow_log(&mut self) {
        let prefix = self.view.state.as_ref().map(|state| state.prefix.clone());
        if self.log.as_ref().map(|task| &task.0) != prefix.as_ref() {
            self.log = prefix.map(|prefix| LogTask(prefix.clone(), log::follow(prefix, self.rejected.clone())));
        }
    }

    fn is_online(&self) -> bool {
        tell::is_online(&self.view, &self.live.borrow())
    }

    async fn report(&mut self, world: &World, step: &Step, progress: Option<&str>) {
        let uid = world.instance_uid();
        let live = self.live.borrow().clone();
        let rejected = self.rejected.borrow().clone();
        self.hint = self.look_for_a_hint(&live).await;
        let facts = self.preflight.as_ref().map(facts);
        let seen = self.seen(world, uid.as_deref());
        let nothing_wanted = matches!(world.instance, Presence::Gone) && !self.first_instance_to_come().await;
        self.readiness.set(tell::is_ready(&seen, &live) || nothing_wanted);
        let Some(node) = world.node.here() else { return };
        let before = node.status.clone().unwrap_or_default();
        let next = tell::status(
            &seen,
            &Known {
                step,
                live: &live,
                trouble: self.tries.trouble(step, self.generation),
                keeps_dying: self.starts.keeps_dying(),
                hint: self.hint.as_deref(),
                progress,
                facts: facts.as_ref().or(before.facts.as_ref()),
                rejected: &rejected,
                is_new: self.began.elapsed() < NEW,
                roster_is_gone: self.published.roster_is_gone,
            },
            &before,
        );
        if let Err(error) = self.reporter.write(node, &next).await {
            debug!(error = error_chain(&error), "the status could not be written");
        }
    }

    /// ConfigMap flux-default waits to become the first FluxInstance: then something is wanted soon.
    async fn first_instance_to_come(&self) -> bool {
        let maps = Api::<k8s_openapi::api::core::v1::ConfigMap>::namespaced(self.client.clone(), NAMESPACE);
        let map = planner::call("get ConfigMap flux-default", maps.get_opt(CONFIGMAP_DEFAULT)).await;
        match map {
            Ok(map) => map.is_some_and(|map| !map.annotations().contains_key(crate::api::ANNOTATION_CONSUMED)),
            Err(_) => true,
        }
    }

    /// A broker that doesn't come up: the lead knows whom it refuses, the refused one is told nothing.
    async fn look_for_a_hint(&self, live: &Live) -> Option<String> {
        let late = self.starts.age(Instant::now()).is_some_and(|age| age > LATE);
        let down = self.view.broker.is_none() && self.view.died.is_some();
        if self.is_online() || !(down || (late && self.view.broker.is_some())) {
            return None;
        }
        let roster = self.published.roster.as_ref()?;
        let lead = roster.ranks.get(&0)?.member.as_ref()?;
        let own = self.view.broker.as_ref().map(|broker| broker.record.broker_name.clone());
        let own = own.or_else(|| self.own_broker_name())?;
        let lead_node = self.reporter.of(&lead.node).await.ok()??;
        let refused = lead_node.status.unwrap_or_default().rejected.get(&own).cloned();
        if let Some(reason) = refused {
            return Some(format!("the lead refuses this broker: {reason}"));
        }
        (live.state == "join").then(|| {
            format!(
                "the broker waits in state join: its parent can't be reached at port {}, or has another certificate",
                roster.settings.port
            )
        })
    }

    fn own_broker_name(&self) -> Option<String> {
        let roster = self.published.roster.as_ref()?;
        let rank = self.world.borrow().node_spec()?.rank?;
        roster.ranks.get(&rank).map(|entry| entry.broker_name.clone())
    }

    /// Carries out a step. It is dropped when the end of the instance overtakes it, an installation also when something else
    /// is wanted by now: a source that does not answer can take a minute to be given up.
    async fn act(&mut self, world: &World, step: &Step) -> Result<(), StepError> {
        if *step == Step::Remove {
            return self.remove().await;
        }
        let mut watched = self.world.clone();
        let (long, begun) = (matches!(step, Step::Install { .. }), wish(world));
        let overtaken = watched.wait_for(|world| world.is_over() || (long && wish(world) != begun)).map(drop);
        tokio::select! {
            outcome = self.climb(world, step) => outcome,
            () = overtaken => Ok(()),
        }
    }

    async fn climb(&mut self, world: &World, step: &Step) -> Result<(), StepError> {
        let preflight = self.preflight.clone();
        let Some(preflight) = preflight else {
            let passed = self.actor.preflight(&self.spec, None).await?;
            passed.warnings.iter().for_each(|warning| warn!("{warning}"));
            self.preflight = Some(passed);
            return Ok(());
        };
        match step {
            Step::Install { digest } => {
                let set = self.published.packages(digest)?;
                // Once more, now that it is known how much room they need.
                let preflight = self.actor.preflight(&self.spec, Some(&set)).await?;
                self.preflight = Some(preflight.clone());
                let (sender, mut progress) = tokio::sync::mpsc::unbounded_channel::<Progress>();
                let actor = self.actor.clone();
                let install = actor.install(&preflight, &set, move |now| drop(sender.send(now)));
                let mut install = std::pin::pin!(install);
                let mut said = String::new();
                loop {
                    tokio::select! {
                        outcome = &mut install => return outcome,
                        Some(now) = progress.recv() => {
                            let words = in_quarters(&now);
                            if words != said {
                                info!(progress = words, "installing");
                                self.report(world, step, Some(&words)).await;
                                said = words;
                            }
                        }
                    }
                }
            }
            Step::Start(assignment) => {
                let roster = self.published.roster()?;
                let revision = match self.actor.configure(&preflight, &roster, assignment, false).await {
                    // Without API the files of the last start are still there.
                    Err(StepError::Api(error)) if self.view.died.is_some() => {
                        warn!(error = error_chain(&error), "starting the broker with the files that are there");
                        roster.revision
                    }
                    other => other?,
                };
                self.starts.started(step, self.generation, Instant::now());
                self.view = self.actor.start(&preflight, &roster, assignment).await?;
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
            Step::Stop { reason } => {
                if self.view.job_shells > 0 {
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

    /// Removal, unless jobs run and the instance's word was that they win.
    async fn remove(&mut self) -> Result<(), StepError> {
        let end = self.view.state.as_ref().map(|state| state.uninstall).unwrap_or_default();
        if end.running_jobs == RunningJobs::Wait && self.jobs_run().await {
            let words =
                "jobs are running: this host is kept until they have ended (spec.uninstall.runningJobs is Wait)";
            return Err(StepError::NotYet(words.to_owned()));
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

    /// Jobs run in the instance, by the lead's word; where it can't be had, the job shells of this host tell.
    async fn jobs_run(&self) -> bool {
        let answer = match live::connect().await {
            Ok(client) => ask_instance(&client).await,
            Err(error) => Err(error),
        };
        answer.map_or(self.view.job_shells > 0, |instance| instance.allocated.cores > 0 || self.view.job_shells > 0)
    }

    /// Cleans at the end of the pod, as long as its grace lasts; needs no API.
    async fn clean(&mut self) {
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

/// What is wanted of this node, as far as an installation depends on it: not the roster's revision, which joins of others
/// change.
fn wish(world: &World) -> impl PartialEq + use<> {
    let generation = world.instance.here().and_then(|instance| instance.metadata.generation);
    let spec = world.node_spec().map(|spec| FluxNodeSpec { revision: 0, ..spec.clone() });
    (world.instance_uid(), generation, spec)
}

/// A status that changes with each percent is a load on the API server that grows with the nodes.
fn in_quarters(now: &Progress) -> String {
    match (now.done.min(now.total) * 4).checked_div(now.total) {
        Some(quarters) => format!("{} {} %", now.what, quarters * 25),
        None => now.what.clone(),
    }
}
