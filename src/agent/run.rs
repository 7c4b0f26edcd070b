//! The agent's loop.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use kube::{Api, Client, ResourceExt};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use super::{
    AgentArguments, AgentError,
    act::{Actor, Applied, StepError, read_host_file},
    client,
    decide::{Instance, Seen, Step, agreed, decide},
    health::{self, Readiness},
    live::{self, Live},
    log::{self, Rejected},
    report::Reporter,
    teardown::{self, Verdict, Word},
    tell::{self, Known},
    tries::{Starts, Tries, Trouble},
    watch::{Presence, World, look, world},
};
use crate::{
    api::{
        CONFIGMAP_DEFAULT, CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_KEY, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY,
        DAEMONSET, Facts, FluxInstance, FluxInstanceSpec, FluxNodeSpec, INSTANCE, NAMESPACE, PackageSet, Roster,
        RunningJobs,
    },
    broker::status::instance as ask_instance,
    error_chain,
    host::{Host, HostView, NsHost, Preflight, Progress},
    plan::certificate::Certificate,
    planner::{self, PlannerError, certificate, store},
};

/// Look again at least this often, even where nothing was heard.
const RESYNC: Duration = Duration::from_secs(10);
/// While something is on its way.
const SOON: Duration = Duration::from_secs(1);
/// A broker that takes longer than this to come up is worth a look into the lead's words.
const LATE: Duration = Duration::from_secs(5);
/// One question to the API server at SIGTERM: at a teardown the right to ask is soon gone.
const LAST_QUESTION: Duration = Duration::from_secs(1);

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
    let planner = tokio::spawn(planner::run(client.clone(), arguments.pod_name.clone()));
    let world = world(&client, &arguments.node_name);
    let mut agent = Agent::new(&client, host, &arguments, world.clone(), readiness);
    tokio::select! {
        () = agent.hold() => {}
        _ = terminate.recv() => info!("SIGTERM: an end of the pod is no end of what runs on the host"),
    }
    planner.abort();
    let released = planner::release(client.clone(), &arguments.pod_name);
    let _ = timeout(LAST_QUESTION, released).await;
    if evidence_at_the_end(&client, world).await {
        info!("the instance is over: cleaning this host");
        agent.clean().await;
    }
    Ok(std::process::ExitCode::SUCCESS)
}

/// True where there is a positive word that the instance is over.
async fn evidence_at_the_end(client: &Client, mut world: watch::Receiver<World>) -> bool {
    let instances = Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE);
    let daemonsets = Api::<k8s_openapi::api::apps::v1::DaemonSet>::namespaced(client.clone(), NAMESPACE);
    let namespaces = Api::<k8s_openapi::api::core::v1::Namespace>::all(client.clone());
    let (instance, daemonset, namespace) = tokio::join!(
        timeout(LAST_QUESTION, look(&instances, INSTANCE)),
        timeout(LAST_QUESTION, look(&daemonsets, DAEMONSET)),
        timeout(LAST_QUESTION, look(&namespaces, NAMESPACE)),
    );
    let seen = world.borrow().clone();
    let verdict = teardown::decide(
        word(namespace.ok(), &seen.namespace),
        word(instance.ok(), &seen.instance),
        word(daemonset.ok(), &seen.daemonset),
    );
    debug!(?verdict, "what SIGTERM means");
    match verdict {
        Verdict::Leave => false,
        Verdict::Clean => true,
        Verdict::WaitFor(patience) => timeout(patience, world.wait_for(is_over)).await.is_ok_and(|found| found.is_ok()),
    }
}

/// The last answer, or else what an open watch has told.
fn word<K: kube::Resource>(asked: Option<Presence<K>>, watched: &Presence<K>) -> Word {
    if watched.is_ending() {
        return Word::Ends;
    }
    match asked.unwrap_or_default() {
        Presence::Unknown => Word::None,
        presence if presence.is_ending() => Word::Ends,
        _ => Word::Stays,
    }
}

/// The FluxInstance is over, by a positive word.
fn is_over(world: &World) -> bool {
    world.instance.is_ending() || world.namespace.is_ending()
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
    roster: Option<Roster>,
    roster_is_gone: bool,
    /// The published package set and its digest.
    packages: Option<(String, PackageSet)>,
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
    ) -> Self {
        Self {
            client: client.clone(),
            actor: Actor { host, client: client.clone(), instance_uid: String::new() },
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
            roster: None,
            roster_is_gone: false,
            packages: None,
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
        let (uid, spec) = (instance_uid(&world), node_spec(&world));
        let step = decide(&self.seen(&world, uid.as_deref(), spec.as_ref()));
        self.report(&world, &step, None).await;
        if let Step::Hold | Step::Wait(_) = step {
            self.tries.succeeded();
            let on_its_way = self.view.broker.is_some() && !self.is_online();
            return Ok(if on_its_way || matches!(step, Step::Wait(_)) { SOON } else { RESYNC });
        }
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
                    info!(?step, reason = trouble.words, "this step has to wait");
                } else {
                    let transient = error.is_transient();
                    warn!(?step, error = trouble.words, transient, "this step failed and will be tried again");
                }
                self.tries.failed(&step, generation, trouble, Instant::now());
                self.report(&world, &step, None).await;
                Ok(Duration::ZERO)
            }
        }
    }

    fn seen<'a>(&'a self, world: &'a World, uid: Option<&'a str>, spec: Option<&'a FluxNodeSpec>) -> Seen<'a> {
        let instance = match uid {
            _ if is_over(world) => Instance::Over,
            Some(uid) => Instance::Here { uid },
            None => Instance::Unknown,
        };
        Seen {
            instance,
            spec,
            roster: self.roster.as_ref(),
            published: self.packages.as_ref().map(|(digest, _)| digest.as_str()),
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
            let uid = instance.uid().unwrap_or_default();
            if self.actor.instance_uid != uid {
                self.actor.instance_uid = uid;
                (self.roster, self.packages, self.preflight) = (None, None, None);
            }
            if let Presence::Gone = world.node {
                self.reporter.create().await?;
            }
        }
        self.view = self.actor.observe().await?;
        let online = self.is_online();
        self.starts.seen(self.view.broker.is_some(), online, self.view.died.as_deref(), Instant::now());
        self.follow_log();
        self.fetch_published(world).await
    }

    async fn fetch_published(&mut self, world: &World) -> Result<(), StepError> {
        if world.instance.here().is_none() || is_over(world) {
            return Ok(());
        }
        let spec = node_spec(world).unwrap_or_default();
        let known = self.roster.as_ref().map(|roster| (roster.epoch, roster.revision));
        let stale = spec.rank.is_some() && known < Some((spec.epoch, spec.revision));
        if stale || self.view.broker.is_some() {
            self.fetch_roster().await?;
        }
        // What was read for another roster, or another instance, is none.
        let wanted = self.roster.as_ref().map(|roster| roster.settings.digest.as_str());
        let known = self.packages.as_ref().map(|(digest, _)| digest.as_str());
        let installed = |digest: &str| self.view.environments.iter().any(|ready| ready == digest);
        let missing = wanted.is_some_and(|wanted| known != Some(wanted) && !installed(wanted));
        if known.is_none() || missing || spec.want != crate::api::Want::Run {
            self.packages = published_packages(&self.client).await?.map(|set| (set.digest(), set));
        }
        self.bring_back_certificate(world).await
    }

    async fn fetch_roster(&mut self) -> Result<(), PlannerError> {
        let found = published_roster(&self.client).await?;
        self.roster_is_gone = found.is_none();
        if found.is_some() {
            self.roster = found;
        }
        Ok(())
    }

    /// The certificate comes back from the nodes, never a new one while brokers run.
    async fn bring_back_certificate(&self, world: &World) -> Result<(), StepError> {
        let (Some(roster), Some(state)) = (&self.roster, &self.view.state) else { return Ok(()) };
        // The lead's broker need not run for it: it may be waiting for just this.
        let rank = node_spec(world).and_then(|spec| agreed(&spec, roster)).map(|assignment| assignment.rank);
        if rank != Some(0) || state.instance_uid != roster.instance_uid {
            return Ok(());
        }
        if !matches!(certificate::read(&self.client).await, Ok(None)) {
            return Ok(());
        }
        // A host on which no broker was ever configured has none.
        let Ok(text) = read_host_file(&state.prefix.join("etc/curve.cert")) else { return Ok(()) };
        match Certificate::parse(&text) {
            Ok(own) if own.fingerprint() == roster.settings.certificate => {
                info!("bringing the certificate back from this host");
                Ok(certificate::create(&self.client, &own).await?)
            }
            _ => Ok(()),
        }
    }

    fn follow_log(&mut self) {
        let prefix = self.view.state.as_ref().map(|state| state.prefix.clone());
        if self.log.as_ref().map(|task| &task.0) != prefix.as_ref() {
            self.log = prefix.map(|prefix| LogTask(prefix.clone(), log::follow(prefix, self.rejected.clone())));
        }
    }

    fn is_online(&self) -> bool {
        let live = self.live.borrow();
        self.view.broker.as_ref().is_some_and(|broker| live.pid == Some(broker.pid) && live.state == "run")
    }

    async fn report(&mut self, world: &World, step: &Step, progress: Option<&str>) {
        let (uid, spec) = (instance_uid(world), node_spec(world));
        let live = self.live.borrow().clone();
        let rejected = self.rejected.borrow().clone();
        self.hint = self.look_for_a_hint(&live).await;
        let facts = self.preflight.as_ref().map(facts);
        let seen = self.seen(world, uid.as_deref(), spec.as_ref());
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
                roster_is_gone: self.roster_is_gone,
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
        let roster = self.roster.as_ref()?;
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
        let roster = self.roster.as_ref()?;
        let spec = node_spec(&self.world.borrow())?;
        roster.ranks.get(&spec.rank?).map(|entry| entry.broker_name.clone())
    }

    /// Carries out a step. It is dropped when the end of the instance overtakes it, an installation also when something else
    /// is wanted by now: a source that does not answer can take a minute to be given up.
    async fn act(&mut self, world: &World, step: &Step) -> Result<(), StepError> {
        if *step == Step::Remove {
            return self.remove().await;
        }
        let mut watched = self.world.clone();
        let (long, begun) = (matches!(step, Step::Install { .. }), wish(world));
        let overtaken = watched.wait_for(|world| is_over(world) || (long && wish(world) != begun)).map(drop);
        tokio::select! {
            outcome = self.climb(world, step) => outcome,
            () = overtaken => Ok(()),
        }
    }

    async fn climb(&mut self, world: &World, step: &Step) -> Result<(), StepError> {
        let preflight = self.preflight.clone();
        let Some(preflight) = preflight else {
            let passed = self.actor.preflight(&self.spec, self.packages.as_ref().map(|(_, set)| set)).await?;
            passed.warnings.iter().for_each(|warning| warn!("{warning}"));
            self.preflight = Some(passed);
            return Ok(());
        };
        match step {
            Step::Install { digest } => {
                let set = self.package_set(digest)?;
                // Only now is it known how much room is needed.
                let preflight = self.actor.preflight(&self.spec, Some(&set)).await?;
                self.preflight = Some(preflight.clone());
                let (sender, mut progress) = tokio::sync::mpsc::unbounded_channel::<Progress>();
                let actor = Actor {
                    host: self.actor.host.clone(),
                    client: self.client.clone(),
                    instance_uid: self.actor.instance_uid.clone(),
                };
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
                let roster = self.agreed_roster()?;
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
                let roster = self.agreed_roster()?;
                let revision = self.actor.configure(&preflight, &roster, assignment, true).await?;
                self.actor.reload(&preflight, &roster).await?;
                self.actor.remember(&preflight, &roster, &self.view, revision).await
            }
            Step::Stop { reason } => {
                info!(reason, "stopping the broker");
                self.starts.forget();
                self.view = self.actor.stop().await?;
                Ok(())
            }
            Step::Hold | Step::Wait(_) | Step::Preflight | Step::Remove => Ok(()),
        }
    }

    fn agreed_roster(&self) -> Result<Roster, StepError> {
        self.roster.clone().ok_or_else(|| StepError::NotYet("waiting for the roster".to_owned()))
    }

    fn package_set(&self, digest: &str) -> Result<PackageSet, StepError> {
        let set = self.packages.as_ref().filter(|(published, _)| published == digest).map(|(_, set)| set.clone());
        set.ok_or_else(|| StepError::NotYet(format!("waiting for package set {digest} to be published")))
    }

    /// Removal, unless jobs run and the spec says that they win.
    async fn remove(&mut self) -> Result<(), StepError> {
        if self.view.broker.is_some() && self.spec.uninstall.running_jobs == RunningJobs::Wait && self.jobs_run().await
        {
            let words =
                "jobs are running: this host is kept until they have ended (spec.uninstall.runningJobs is Wait)";
            return Err(StepError::NotYet(words.to_owned()));
        }
        self.log = None;
        self.actor.remove(self.spec.uninstall.keep_state).await?;
        self.view = HostView::default();
        (self.preflight, self.roster, self.packages) = (None, None, None);
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

    async fn jobs_run(&self) -> bool {
        let Ok(client) = live::connect().await else { return false };
        // Without an answer from the lead nothing of this instance runs any more.
        ask_instance(&client).await.is_ok_and(|instance| instance.allocated.cores > 0)
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

/// What the planner has published in ConfigMap flux-packages.
pub async fn published_packages(client: &Client) -> Result<Option<PackageSet>, PlannerError> {
    let document = store::read(client, CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_KEY).await?;
    Ok(document.and_then(|document| serde_json::from_str(&document.text).ok()))
}

/// The roster as it is published.
pub async fn published_roster(client: &Client) -> Result<Option<Roster>, PlannerError> {
    let document = store::read(client, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY).await?;
    Ok(document.and_then(|document| serde_json::from_str(&document.text).ok()))
}

fn instance_uid(world: &World) -> Option<String> {
    world.instance.here().and_then(ResourceExt::uid)
}

/// What is wanted of this node, as far as an installation depends on it: not the roster's revision, which joins of others
/// change.
fn wish(world: &World) -> impl PartialEq + use<> {
    let generation = world.instance.here().and_then(|instance| instance.metadata.generation);
    let spec = node_spec(world).map(|spec| FluxNodeSpec { revision: 0, ..spec });
    (instance_uid(world), generation, spec)
}

fn node_spec(world: &World) -> Option<FluxNodeSpec> {
    world.node.here().map(|node| node.spec.clone())
}

/// The part of preflight that the planner wants to know.
pub fn facts(preflight: &Preflight) -> Facts {
    Facts {
        resources: preflight.resources,
        memory_mib: preflight.memory_mib,
        platform: preflight.platform.clone(),
        glibc: preflight.glibc.clone(),
        boot_id: preflight.boot_id.clone(),
        systemd: preflight.systemd,
        prefix: preflight.prefix.display().to_string(),
    }
}

/// A status that changes with each percent is a load on the API server that grows with the nodes.
fn in_quarters(now: &Progress) -> String {
    match (now.done.min(now.total) * 4).checked_div(now.total) {
        Some(quarters) => format!("{} {} %", now.what, quarters * 25),
        None => now.what.clone(),
    }
}
