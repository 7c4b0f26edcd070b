//! The agent: what it knows between two rounds, and what it sees and tells in one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use kube::{Api, Client, ResourceExt};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{Mutex, Notify, watch},
    task::JoinHandle,
    time::timeout,
};
use tracing::{debug, info, warn};

use super::{
    AgentArguments, AgentError,
    act::{Actor, StepError},
    applied::Applied,
    client,
    copied::names_another_machine,
    decide::{Instance, Seen, Step},
    dump::Dumping,
    frozen::Memory,
    health::{self, Health},
    live::{self, Live},
    log::{self, Rejected},
    published::Published,
    report::Reporter,
    serve::Serving,
    teardown,
    tell::{self, Known, facts},
    tidy::Tidied,
    tries::{Starts, Tries},
    watch::{Presence, World, world},
};
use crate::{
    api::{CONFIGMAP_DEFAULT, FetchFrom, FluxInstanceSpec, NAMESPACE, Uninstall},
    error_chain,
    host::{Host, HostView, NsHost, Preflight},
    planner,
};

/// Look again at least this often, even where nothing was heard.
pub(super) const RESYNC: Duration = Duration::from_secs(10);
/// While something is on its way.
pub(super) const SOON: Duration = Duration::from_secs(1);
/// So long a new agent may take to hear the broker that it has found.
const NEW: Duration = Duration::from_secs(10);
/// So long an agent that has just begun waits for the API's first word.
const ALONE: Duration = Duration::from_secs(5);
/// The longest that a live change may take.
const LIVE_CHANGE: Duration = Duration::from_secs(60);

/// Runs the agent until SIGTERM.
///
/// # Errors
/// What keeps it from beginning at all.
pub async fn run(arguments: AgentArguments) -> Result<std::process::ExitCode, AgentError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(AgentError::Signals)?;
    let health = Health::default();
    health::serve(arguments.health_address, health.clone())
        .await
        .map_err(|source| AgentError::Health { address: arguments.health_address, source })?;
    let client = client().await?;
    let host: Arc<dyn Host> = Arc::new(NsHost::open()?);
    info!(node = arguments.node_name, version = env!("CARGO_PKG_VERSION"), "the agent begins");
    let world = world(&client, &arguments.node_name);
    let members = Arc::new(AtomicU32::new(0));
    let planner = tokio::spawn(planner::run(client.clone(), arguments.pod_name.clone(), members.clone()));
    let serving = Serving::begin(arguments.host_ip).await;
    let mut agent = Agent::new(&client, host, &arguments, world.clone(), health, members, serving);
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
pub(super) struct LogTask(std::path::PathBuf, JoinHandle<()>);

impl Drop for LogTask {
    fn drop(&mut self) {
        self.1.abort();
    }
}

/// The agent of one node.
pub(super) struct Agent {
    pub(super) client: Client,
    /// Held while the lead takes in new resources.
    pub(super) live_change: Arc<Mutex<()>>,
    /// Members of the instance, for the planner's candidates.
    pub(super) members: Arc<AtomicU32>,
    pub(super) began: Instant,
    pub(super) actor: Actor,
    pub(super) reporter: Reporter,
    pub(super) health: Health,
    pub(super) serving: Serving,
    pub(super) world: watch::Receiver<World>,
    pub(super) live: watch::Receiver<Live>,
    /// Has the broker asked at once.
    pub(super) ask: Arc<Notify>,
    pub(super) rejected: watch::Sender<Rejected>,
    pub(super) log: Option<LogTask>,
    // What is remembered between two rounds; all of it can be lost.
    pub(super) view: HostView,
    pub(super) preflight: Option<Preflight>,
    pub(super) spec: FluxInstanceSpec,
    /// metadata.generation of the FluxInstance: counts the changes of its spec.
    pub(super) generation: i64,
    /// metadata.uid of our Node, read when the planner names another one.
    pub(super) node_uid: Option<String>,
    /// metadata.uid of the Node of our name that is another machine.
    replaced_as: Option<String>,
    pub(super) published: Published,
    /// Of what the API has said: that of an agent that stood still is none to start a broker by.
    pub(super) memory: Memory,
    /// Where the last installation was to fetch from.
    pub(super) told: Option<FetchFrom>,
    pub(super) tries: Tries,
    pub(super) starts: Starts,
    pub(super) tidied: Tidied,
    /// Queues may be stopped by us, or by the agent before.
    pub(super) queues_are_ours: bool,
    /// They are stopped for the end of the instance.
    pub(super) queues_have_ended: bool,
    pub(super) dumping: Dumping,
    /// So many times in a row the host could not be looked at.
    pub(super) blind: u32,
}

impl Agent {
    fn new(
        client: &Client,
        host: Arc<dyn Host>,
        arguments: &AgentArguments,
        world: watch::Receiver<World>,
        health: Health,
        members: Arc<AtomicU32>,
        serving: Serving,
    ) -> Self {
        let ask = Arc::<Notify>::default();
        Self {
            client: client.clone(),
            live_change: Arc::default(),
            members,
            began: Instant::now(),
            actor: Actor { host, client: client.clone(), instance_uid: String::new(), uninstall: Uninstall::default() },
            reporter: Reporter::new(client.clone(), arguments.node_name.clone(), &arguments.pod_name),
            health,
            serving,
            world,
            live: live::follow(ask.clone()),
            ask,
            rejected: watch::channel(Rejected::new()).0,
            log: None,
            view: HostView::default(),
            preflight: None,
            spec: FluxInstanceSpec::default(),
            generation: 0,
            node_uid: None,
            replaced_as: None,
            published: Published::default(),
            memory: Memory::begin(),
            told: None,
            tries: Tries::default(),
            starts: Starts::default(),
            tidied: Tidied::default(),
            queues_are_ours: true,
            queues_have_ended: false,
            dumping: Dumping::default(),
            blind: 0,
        }
    }

    /// A host that can't be looked at may do well or not: nothing is done there, and that is said. Returns how long to rest.
    pub(super) async fn tell_blindness(&mut self, error: &StepError) -> Duration {
        if error.is_waiting() {
            return SOON;
        }
        self.blind = self.blind.saturating_add(1);
        if self.blind == 1 {
            // A stage that was killed is no news.
            return SOON;
        }
        self.health.set_ready(false);
        let world = self.world.borrow().clone();
        if let Some(node) = world.node.here().filter(|_| !self.is_replaced(&world)) {
            let told = tell::blind(error_chain(error), node.status.as_ref());
            self.reporter.try_write(node, &told).await;
        }
        RESYNC
    }

    pub(super) fn seen<'a>(&'a self, world: &'a World, uid: Option<&'a str>, live: &'a Live) -> Seen<'a> {
        let instance = match uid {
            _ if world.is_over() => Instance::Over,
            Some(uid) => Instance::Here { uid },
            None => Instance::Unknown,
        };
        Seen {
            instance,
            node: self.reporter.name(),
            node_uid: self.node_uid.as_deref(),
            alone: self.began.elapsed() > ALONE,
            replaced: self.is_replaced(world),
            spec: world.node_spec(),
            roster: self.published.roster.as_ref(),
            published: self.published.digest(),
            host: &self.view,
            preflight: self.preflight.as_ref(),
            applied: Applied::of(&self.view),
            unheard: live.unheard_since.map_or(Duration::ZERO, |since| since.elapsed()),
            is_up: tell::is_online(&self.view, live),
            leaving: live.leaving_since.map_or(Duration::ZERO, |since| since.elapsed()),
            holds: self.serving.holds(),
            told: live.instance.as_ref(),
        }
    }

    /// The host, and what the planner has published as far as it concerns this node: read by name, and only when our own
    /// FluxNode says that there is something new.
    pub(super) async fn observe(&mut self, world: &World) -> Result<(), StepError> {
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
        if self.memory.stood_still()
            && let Ok(node) = self.reporter.of(self.reporter.name()).await
            && node.as_ref().map(|node| &node.spec) == world.node_spec()
        {
            self.memory.refreshed();
        }
        let before = std::mem::replace(&mut self.view, self.actor.observe().await?).resources;
        // What can't be read has not gone, and what one look alone has seen may have been about to change.
        let is_sure = self.view.resources.cores > 0 && self.view.resources == before;
        if let Some(preflight) = self.preflight.as_mut().filter(|_| is_sure) {
            preflight.resources = self.view.resources;
        }
        self.remember_the_end(world).await;
        self.look_for_another_machine(world);
        let online = self.is_online();
        self.starts.seen(self.view.broker.is_some(), online, self.view.died.as_deref(), Instant::now());
        self.follow_log();
        if world.instance.here().is_some() && !world.is_over() {
            let spec = world.node_spec().cloned().unwrap_or_default();
            if spec.node_uid.is_some() && spec.node_uid != self.node_uid {
                match self.reporter.node_uid().await {
                    Ok(uid) => self.node_uid = uid,
                    Err(error) => debug!(error = error_chain(&error), "can't read our own Node"),
                }
            }
            if let Err(error) = self.published.refresh(&self.client, &spec, world, &self.view).await {
                // What runs goes on with what is known.
                debug!(error = error_chain(&error), "can't read what the planner has published");
            }
        }
        self.look_at_packages();
        Ok(())
    }

    /// Remembered: what it says of itself is gone for a moment when it is between two brokers.
    fn look_for_another_machine(&mut self, world: &World) {
        let (Some(spec), false) = (world.node_spec(), self.is_replaced(world)) else { return };
        let told = world.node.here().and_then(|node| node.status.as_ref());
        self.replaced_as = names_another_machine(&self.view, spec, told).then(|| spec.node_uid.clone()).flatten();
        if self.replaced_as.is_some() {
            warn!(
                "another machine has this node's name: nothing is begun or told here until this one has a name of its own"
            );
        }
    }

    /// The FluxNode of our name is another machine's.
    fn is_replaced(&self, world: &World) -> bool {
        self.replaced_as.is_some() && world.node_spec().map(|spec| &spec.node_uid) == Some(&self.replaced_as)
    }

    /// What is to happen at the end is asked for when the FluxInstance is gone: the host has to remember it. Nothing else waits
    /// for that, where the disk is full.
    async fn remember_the_end(&mut self, world: &World) {
        let (Some(state), Some(preflight)) = (&self.view.state, &self.preflight) else { return };
        let Some(end) = world.end_of(&state.instance_uid) else { return };
        if state.instance_uid == self.actor.instance_uid && state.uninstall != end {
            self.actor.uninstall = end;
            if let Err(error) = self.actor.claim(preflight).await {
                warn!(error = error_chain(&error), "this host does not remember yet how the instance is to end");
            }
        }
    }

    /// What this host has for others.
    fn look_at_packages(&mut self) {
        let ours = self.view.state.as_ref().filter(|state| state.instance_uid == self.actor.instance_uid);
        let prefix = ours.map(|state| state.prefix.as_path());
        self.serving.look(prefix, self.published.sets(), &self.view.environments);
    }

    fn follow_log(&mut self) {
        let prefix = self.view.state.as_ref().map(|state| state.prefix.clone());
        if self.log.as_ref().map(|task| &task.0) != prefix.as_ref() {
            self.log = prefix.map(|prefix| LogTask(prefix.clone(), log::follow(prefix, self.rejected.clone())));
        }
    }

    pub(super) fn is_online(&self) -> bool {
        tell::is_online(&self.view, &self.live.borrow())
    }

    pub(super) async fn report(&mut self, world: &World, step: &Step, progress: Option<&str>) {
        let uid = world.instance_uid();
        let live = self.live.borrow().clone();
        let rejected = self.rejected.borrow().clone();
        let hint = self.look_for_a_hint(&live).await;
        let facts = self.preflight.as_ref().map(facts);
        let seen = self.seen(world, uid.as_deref(), &live);
        if seen.replaced {
            return self.health.set_ready(false);
        }
        let nothing_wanted = matches!(world.instance, Presence::Gone) && !self.first_instance_to_come().await;
        self.health.set_ready(tell::is_ready(&seen, &live) || nothing_wanted);
        self.health.set_pending_nodes(live.pending_nodes);
        let Some(node) = world.node.here() else { return };
        let before = node.status.clone().unwrap_or_default();
        let next = tell::status(
            &seen,
            &Known {
                step,
                live: &live,
                trouble: self.tries.trouble(step, self.generation),
                keeps_dying: (seen.roster.and_then(|roster| self.starts.keeps_dying(roster.epoch)))
                    .or(self.tries.keeps_refusing(step, self.generation)),
                hint: hint.as_deref(),
                progress,
                facts: facts.as_ref().or(before.facts.as_ref()),
                rejected: &rejected,
                is_new: self.began.elapsed() < NEW,
                holds: (!self.published.sets().is_empty()).then(|| self.serving.holds()),
                peer: self.serving.peer(),
                roster_is_gone: self.published.roster_is_gone,
            },
            &before,
        );
        let mut lives = self.live.clone();
        let is_gone = |now: &Live| live.pid.is_some() && now.pid != live.pid;
        tokio::select! {
            () = self.reporter.try_write(node, &next) => {}
            // A broker that dies is not kept waiting for an API server that is away.
            Ok(_) = lives.wait_for(is_gone) => {}
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
}
