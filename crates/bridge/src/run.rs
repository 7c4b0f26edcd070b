//! The rounds of the bridge: wait for a change, look at both sides, decide, begin what is wanted.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
    time::Duration,
};

use futures::{FutureExt, Stream, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::Api;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tracing::{debug, info, warn};

use api::{Rank, Roster};
use base::error_chain;
use broker::{queues::ensure_recorded, rfc3::RpcError};
use cluster::{Announcer, call};
use pods::{
    action::{Action, PodRef},
    decide::{Decision, Memory, Report, decide},
    facts::Facts,
    target::Target,
    time::Millis,
    world::World,
};

use crate::{
    Bridge,
    begin::Tools,
    facts::Lookups,
    flux::Flux,
    lease::{Held, RENEW_EVERY},
    opted_in::OptedIn,
    tell,
    under_way::{Answer, UnderWay},
    watched::{Change, Watched, changes},
};

/// How long changes are gathered: a gang's pods appear one after the other.
const GATHER: Duration = Duration::from_millis(20);
/// A round at least this often: a broker's state and its queues change without an event here.
const TICK: Duration = Duration::from_secs(1);
/// Pause before the broker is tried again.
const CONNECT_AGAIN: Duration = Duration::from_millis(500);

/// Serves pods until the future is dropped.
pub async fn run(bridge: Bridge) {
    info!("the bridge between pods and jobs begins");
    let mut kubernetes = Kubernetes {
        watched: Watched::default(),
        changes: Box::pin(changes(&bridge.client)),
        held: Held::new(bridge.client.clone(), bridge.identity.clone()),
        renewed: None,
        announcer: Announcer::new(bridge.client.clone(), &bridge.identity),
        lookups: Lookups::default(),
        opted_in: OptedIn::default(),
        bridge,
    };
    let mut memory = Memory::default();
    loop {
        let Err(error) = kubernetes.serve(&mut memory).await;
        debug!(
            error = error_chain(&error),
            "the bridge has lost the broker, or an answer of it: it looks at all jobs again"
        );
        sleep(CONNECT_AGAIN).await;
    }
}

/// The side of Kubernetes.
struct Kubernetes {
    bridge: Bridge,
    watched: Watched,
    changes: Pin<Box<dyn Stream<Item = Change> + Send>>,
    held: Held,
    /// When the Lease was looked at last.
    renewed: Option<Instant>,
    announcer: Announcer,
    lookups: Lookups,
    opted_in: OptedIn,
}

/// What goes on with one life of the broker.
struct Life {
    flux: Flux,
    tools: Tools,
    under_way: UnderWay,
    answers: FuturesUnordered<BoxFuture<'static, (u64, Answer)>>,
    report: Report,
}

impl Kubernetes {
    /// Serves pods until the connection to the broker is of no use any more.
    async fn serve(&mut self, memory: &mut Memory) -> Result<std::convert::Infallible, RpcError> {
        let instance_id = self.bridge.told.borrow().roster.instance_id.clone();
        let flux = Flux::follow((self.bridge.connect)().await?, &instance_id).await?;
        // A broker that crashes must come back with its queues stopped.
        if let Err(error) = ensure_recorded(&flux.client).await {
            warn!(error = error_chain(&error), "can't record the state of the queues");
        }
        let tools = Tools { client: self.bridge.client.clone(), broker: flux.client.clone() };
        let (under_way, answers) = (UnderWay::default(), FuturesUnordered::new());
        let mut life = Life { flux, tools, under_way, answers, report: Report::default() };
        let mut wake = Instant::now();
        loop {
            self.wait(&mut life, wake).await?;
            self.renew().await;
            let now = now();
            self.watched.forget(now);
            let decision = self.decide(&mut life, memory, now).await?;
            if decision.report != life.report {
                info!(?decision.report, "pods as jobs");
                life.report = decision.report;
            }
            for action in decision.actions {
                self.begin(&mut life, action).await;
            }
            let until = |at: Millis| Duration::from_millis(at.saturating_sub(now).max(1).unsigned_abs());
            wake = Instant::now() + decision.wake.map_or(TICK, |at| until(at).min(TICK));
        }
    }

    /// Waits for a change, and takes in all that follow within a moment.
    async fn wait(&mut self, life: &mut Life, wake: Instant) -> Result<(), RpcError> {
        tokio::select! {
            heard = life.flux.hear() => heard?,
            Some(change) = self.changes.next() => drop(self.watched.take(change, now())),
            Some((number, answer)) = life.answers.next(), if !life.answers.is_empty() => {
                self.take_answer(life, number, answer).await?;
            }
            () = sleep_until(wake) => {}
        }
        let gathered = Instant::now() + GATHER;
        while let Ok(Some(change)) = timeout_at(gathered, self.changes.next()).await {
            self.watched.take(change, now());
        }
        while let Some(heard) = life.flux.hear().now_or_never() {
            heard?;
        }
        while let Some(Some((number, answer))) = life.answers.next().now_or_never() {
            self.take_answer(life, number, answer).await?;
        }
        Ok(())
    }

    /// Takes in how an action was answered. If it may have been done and nothing tells, a pod is read; for a job the journal is read
    /// from its beginning, which is why that is an error.
    async fn take_answer(&mut self, life: &mut Life, number: u64, answer: Answer) -> Result<(), RpcError> {
        match life.under_way.answer(number, answer) {
            Some(Action::Bind(binding)) => {
                let PodRef { namespace, name, uid } = &binding.pod;
                let pods: Api<Pod> = Api::namespaced(self.bridge.client.clone(), namespace);
                if let Ok(found) = call(format!("get pod {namespace}/{name}"), pods.get_opt(name)).await {
                    self.watched.read(found.as_ref(), uid, now());
                }
                Ok(())
            }
            Some(Action::Submit(_) | Action::Resubmit { .. }) => Err(RpcError::Closed),
            _ => Ok(()),
        }
    }

    async fn renew(&mut self) {
        if self.renewed.is_some_and(|renewed| renewed.elapsed() < RENEW_EVERY) {
            return;
        }
        match self.held.renew(None).await {
            Ok(()) => self.renewed = Some(Instant::now()),
            Err(error) => info!(error = error_chain(&error), "can't hold Lease flux-bridge"),
        }
    }

    /// Decides by all that is known; nothing, if the Lease is not ours or something is not known yet.
    async fn decide(&mut self, life: &mut Life, memory: &mut Memory, now: Millis) -> Result<Decision, RpcError> {
        let broker = life.flux.broker(self.held.broker(), now).await?;
        let told = self.bridge.told.borrow().clone();
        let (Some(nodes), Some(kube_jobs)) = (self.watched.nodes(), self.watched.jobs()) else {
            return Ok(Decision::default());
        };
        let known = self.watched.pods.by_uid.values();
        let facts: Facts = self.lookups.facts(&self.bridge.client, known.clone(), kube_jobs).await;
        let namespaces: BTreeSet<_> = known.filter(|pod| pod.is_bridged).map(|pod| pod.namespace.clone()).collect();
        let namespaces = self.opted_in.among(&self.bridge.client, namespaces).await;
        let targets = targets(&told.roster, nodes);
        let (pods, mut jobs) = (std::mem::take(&mut self.watched.pods), std::mem::take(&mut life.flux.jobs));
        jobs.forget(now, |uid| pods.by_uid.contains_key(uid));
        life.under_way.settle(&jobs, &pods, &facts);
        let mut world = World {
            settings: told.settings,
            broker: Some(broker),
            jobs: Some(jobs),
            pods: Some(pods),
            targets,
            facts,
            namespaces,
            under_way: life.under_way.actions(),
        };
        let may_decide = life.flux.is_whole && self.watched.is_listed && self.held.is_ours();
        let decision = if may_decide { decide(&world, memory, now) } else { Decision::default() };
        life.flux.jobs = world.jobs.take().unwrap_or_default();
        self.watched.pods = world.pods.take().unwrap_or_default();
        Ok(decision)
    }

    /// Begins an action, if there is room for it and the Lease is still ours.
    async fn begin(&mut self, life: &mut Life, action: Action) {
        if !life.under_way.has_room_for(&action) || !self.held.is_ours() {
            return;
        }
        if let Action::Tell(tell) = &action {
            tell::event(&mut self.announcer, tell).await;
        }
        if action == Action::StartQueues
            && let Err(error) = self.held.renew(Some(&life.flux.name)).await
        {
            info!(error = error_chain(&error), "can't name the broker in Lease flux-bridge");
            return;
        }
        let (number, tools) = (life.under_way.begin(action.clone()), life.tools.clone());
        life.answers.push(async move { (number, tools.carry_out(action).await) }.boxed());
    }
}

/// The present, by the wall clock: the times in the journal and in objects are by it.
fn now() -> Millis {
    Timestamp::now().as_millisecond()
}

/// The nodes that pods may be bound to.
fn targets(roster: &Roster, nodes: &BTreeMap<String, k8s_openapi::api::core::v1::Node>) -> BTreeMap<Rank, Target> {
    let target = |rank: Rank| {
        let entry = roster.ranks.get(&rank)?;
        let member = entry.member.as_ref()?;
        let node = nodes.get(&member.node).filter(|node| node.metadata.uid.as_deref() == Some(&member.uid))?;
        let found = Target::of(node, rank, entry.resources.as_ref()?);
        let found =
            found.inspect_err(|error| debug!(%error, node = member.node, "can't read a Node's resources")).ok()?;
        Some((rank, found?))
    };
    roster.ranks.keys().filter_map(|rank| target(*rank)).collect()
}
