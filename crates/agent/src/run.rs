//! The agent: what it knows between two rounds, and what it tells in one.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicU32},
    time::{Duration, Instant, UNIX_EPOCH},
};

use futures::future::BoxFuture;
use kube::{Api, Client, ResourceExt};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{Mutex, Notify, watch},
    time::timeout,
};
use tracing::info;

use super::{
    AgentArguments, AgentError,
    act::{Actor, StepError},
    applied::Applied,
    client,
    decide::{Instance, Seen, Step},
    dump::Dumping,
    frozen::Memory,
    gate,
    health::{self, Health},
    inspect::Inspecting,
    live::{self, Live},
    log::Rejected,
    observe::LogTask,
    port::Port,
    published::Published,
    report::Reporter,
    serve::Serving,
    teardown,
    tell::{self, Known, facts},
    tidy::Tidied,
    tries::{Starts, Tries},
    watch::{Presence, World, world},
};
use api::{CONFIGMAP_DEFAULT, FetchFrom, FluxInstanceSpec, NAMESPACE, Uninstall};
use base::error_chain;
use cluster::lease;
use host::NsHost;
use hostapi::{Host, HostView, Preflight};

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

/// Plans for the whole cluster while this agent holds the Lease, for as long as the future is polled: given a client, the pod's name,
/// and the number of the instance's members as this agent knows it.
pub type Plan = fn(Client, String, Arc<AtomicU32>) -> BoxFuture<'static, ()>;

/// Runs the agent until SIGTERM, and `plan` beside it.
///
/// # Errors
/// What keeps it from beginning at all.
pub async fn run(arguments: AgentArguments, plan: Plan) -> Result<std::process::ExitCode, AgentError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(AgentError::Signals)?;
    let health = Health::default();
    let metrics = health::serve(arguments.health_address, &arguments.probe.socket, health.clone()).await;
    let client = client().await?;
    let host: Arc<dyn Host> = Arc::new(NsHost::open()?);
    info!(node = arguments.node_name, version = env!("CARGO_PKG_VERSION"), "the agent begins");
    let world = world(&client, &arguments.node_name, &arguments.daemonset);
    tokio::spawn(gate::follow(client.clone(), arguments.pod_name.clone(), health.ready()));
    let serving = Serving::begin(arguments.host_ip).await;
    let mut agent = Agent::new(&client, host, &arguments, world.clone(), health, serving, metrics);
    let planner = tokio::spawn(plan(client.clone(), arguments.pod_name.clone(), agent.members.clone()));
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
    let released = lease::release(client.clone(), &arguments.pod_name);
    let _ = timeout(teardown::LAST_QUESTION, released).await;
    if teardown::evidence(&client, &arguments.daemonset, world).await {
        info!("the instance is over: cleaning this host");
        agent.clean().await;
    }
    Ok(std::process::ExitCode::SUCCESS)
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
    pub(super) termination_log: PathBuf,
    pub(super) serving: Serving,
    /// Where metrics are told.
    pub(super) metrics: Port,
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
    pub(super) replaced_as: Option<String>,
    pub(super) published: Published,
    /// Tracks whether this process was suspended. Data that the API sent before that must not start a broker.
    pub(super) memory: Memory,
    /// Where the last installation was to fetch from.
    pub(super) told: Option<FetchFrom>,
    pub(super) tries: Tries,
    pub(super) starts: Starts,
    pub(super) tidied: Tidied,
    pub(super) inspecting: Inspecting,
    /// Queues may be stopped by us, or by the agent before.
    pub(super) queues_are_ours: bool,
    /// They are stopped for the end of the instance.
    pub(super) queues_have_ended: bool,
    pub(super) dumping: Dumping,
    /// The instance's prefix, as it was last told.
    pub(super) told_prefix: Option<String>,
    /// When the lead's words on this broker were looked into, and why it refuses it.
    pub(super) refusal: Option<(Instant, Option<String>)>,
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
        serving: Serving,
        metrics: Port,
    ) -> Self {
        let ask = Arc::<Notify>::default();
        Self {
            client: client.clone(),
            live_change: Arc::default(),
            members: Arc::default(),
            began: Instant::now(),
            actor: Actor {
                host,
                client: client.clone(),
                instance_uid: String::new(),
                uninstall: Uninstall::default(),
                address: arguments.host_ip,
            },
            reporter: Reporter::new(client.clone(), arguments.node_name.clone(), &arguments.pod_name),
            health,
            termination_log: arguments.termination_log.clone(),
            serving,
            metrics,
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
            inspecting: Inspecting::default(),
            queues_are_ours: true,
            queues_have_ended: false,
            dumping: Dumping::default(),
            told_prefix: None,
            refusal: None,
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
            newer_roster: self.published.newer_roster(),
            published: self.published.digest(),
            host: &self.view,
            preflight: self.preflight.as_ref(),
            applied: Applied::of(&self.view),
            unheard: live.unheard_since.map_or(Duration::ZERO, |since| since.elapsed()),
            silent: live.silent_since.map_or(Duration::ZERO, |since| since.elapsed()),
            is_up: tell::is_online(&self.view, live),
            was_up: self.starts.was_online(),
            leaving: live.leaving_since.map_or(Duration::ZERO, |since| since.elapsed()),
            holds: self.serving.holds(),
            told: live.instance.as_ref(),
            now: UNIX_EPOCH.elapsed().map_or(0.0, |since| since.as_secs_f64()),
        }
    }

    pub(super) fn is_online(&self) -> bool {
        tell::is_online(&self.view, &self.live.borrow())
    }

    pub(super) async fn report(&mut self, world: &World, step: &Step, progress: Option<&str>) {
        let uid = world.instance_uid();
        let live = self.live.borrow().clone();
        if tell::is_online(&self.view, &live) {
            // A broker that dies between this report and the next look was online all the same.
            self.starts.seen(true, true, None, Instant::now());
        }
        let rejected = self.rejected.borrow().clone();
        let hint = self.look_for_a_hint(&live).await;
        let facts = self.preflight.as_ref().map(facts);
        let seen = self.seen(world, uid.as_deref(), &live);
        if seen.replaced {
            return self.health.set_ready(false);
        }
        let nothing_wanted = matches!(world.instance, Presence::Gone) && !self.first_instance_to_come().await;
        let is_ready = tell::is_ready(&seen, &live) || nothing_wanted;
        // A new agent has not heard the broker yet: what the one before has said of it stands.
        if is_ready || self.began.elapsed() >= NEW || seen.host.broker.is_none() {
            self.health.set_ready(is_ready);
        }
        self.health.set_pending_nodes(live.pending.map(|pending| pending.missing_nodes));
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
                ports: self.serving.trouble().into_iter().chain(self.metrics.trouble()).collect(),
                roster_is_gone: self.published.roster_is_gone,
                damage: self.inspecting.damage(),
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
        let map = cluster::call("get ConfigMap flux-default", maps.get_opt(CONFIGMAP_DEFAULT)).await;
        match map {
            Ok(map) => map.is_some_and(|map| !map.annotations().contains_key(api::ANNOTATION_CONSUMED)),
            Err(_) => true,
        }
    }
}
