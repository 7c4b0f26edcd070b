//! The rounds of the bridge: wait for a change, look at both sides, decide, begin what is wanted. Nothing is decided if nothing has changed
//! that decisions depend on.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use futures::{FutureExt, Stream, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use k8s_openapi::{
    api::core::v1::{Node, Pod},
    jiff::Timestamp,
};
use kube::Api;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::{debug, info, warn};

use api::{Account, Nodes, PodCounts, Rank, RosterEntry};
use base::error_chain;
use broker::{queues::ensure_recorded, rfc3::RpcError};
use cluster::call;
use pods::{
    action::{Action, PodRef},
    decide::{Decision, Memory, Report, Standing, decide},
    facts::{Facts, KubeJob},
    jobs::Jobs,
    pod::PodView,
    target::Target,
    time::{Moment, SECOND},
    world::{Broker, World},
};

use crate::{
    Bridge, Reported, accounts,
    begin::Tools,
    facts::Lookups,
    flux::Flux,
    lease::{BridgeLease, RENEW_EVERY},
    opted_in::OptedIn,
    under_way::{Outcome, UnderWay},
    watched::{Change, Watched, changes},
};

/// How long changes are gathered: a gang's pods appear one after the other. Lasts twice as long as the last decision took, so that the
/// bridge also has time to act.
const GATHER: std::ops::RangeInclusive<Duration> = Duration::from_millis(20)..=Duration::from_millis(200);
/// The broker is asked for its state and its queues at least this often: these change without an event here.
const TICK: Duration = Duration::from_secs(1);
/// Pause before the broker is tried again.
const CONNECT_AGAIN: Duration = Duration::from_millis(500);
/// What keeps the bridge from serving pods is reported after this long: most restarts take less.
const REPORT_AFTER: Duration = Duration::from_secs(10);

/// Serves pods until the future is dropped.
pub async fn run(bridge: Bridge) {
    info!("the bridge between pods and jobs begins");
    let (show, shown) = watch::channel(BTreeMap::new());
    let showing = accounts::show(bridge.client.clone(), shown);
    let mut kubernetes = Kubernetes {
        watched: Watched::default(),
        changes: Box::pin(changes(&bridge.client)),
        lease: BridgeLease::new(bridge.client.clone(), bridge.identity.clone()),
        renewed: None,
        lookups: Lookups::default(),
        opted_in: OptedIn::default(),
        waits_since: None,
        show,
        bridge,
    };
    tokio::join!(showing, kubernetes.serve_each_life());
}

/// The side of Kubernetes.
struct Kubernetes {
    bridge: Bridge,
    watched: Watched,
    changes: Pin<Box<dyn Stream<Item = Change> + Send>>,
    lease: BridgeLease,
    /// When the Lease was looked at last.
    renewed: Option<Instant>,
    lookups: Lookups,
    opted_in: OptedIn,
    /// Since when something keeps the bridge from serving pods.
    waits_since: Option<Instant>,
    /// What is shown of each node.
    show: watch::Sender<BTreeMap<String, Account>>,
}

/// What goes on with one life of the broker.
struct Life {
    flux: Flux,
    tools: Tools,
    under_way: UnderWay,
    answers: FuturesUnordered<BoxFuture<'static, (u64, Outcome)>>,
    /// What was decided last and waits for room.
    decided: Vec<Action>,
    /// How long the last decision took.
    took: Duration,
    /// What the last decision reported.
    report: Report,
    /// What it was made by, beside what [`Life::has_changed`] stands for.
    basis: Option<Basis>,
    /// The agent, the API server or Flux has sent something since that matters, or an action was answered.
    has_changed: bool,
    /// When to decide again though nothing has changed.
    wake: Option<Instant>,
}

/// What is looked at in every round, because it changes without an event.
#[derive(Clone, PartialEq)]
struct Basis {
    broker: Broker,
    lease_is_ours: bool,
}

impl Kubernetes {
    /// Serves pods, by one connection to the broker after the other.
    async fn serve_each_life(&mut self) {
        let mut memory = Memory::default();
        loop {
            let Err(error) = self.serve(&mut memory).await;
            self.report(&Report::default(), None);
            debug!(
                error = error_chain(&error),
                "the bridge has lost the broker, or an answer of it: it looks at all jobs again"
            );
            sleep(CONNECT_AGAIN).await;
        }
    }

    /// Serves pods until the connection to the broker is of no use any more.
    async fn serve(&mut self, memory: &mut Memory) -> Result<std::convert::Infallible, RpcError> {
        let instance_id = self.bridge.told.borrow().roster.instance_id.clone();
        let flux = Flux::follow((self.bridge.connect)().await?, &instance_id).await?;
        // A broker that crashes must come back with its queues stopped.
        if let Err(error) = ensure_recorded(&flux.client).await {
            warn!(error = error_chain(&error), "can't record the state of the queues");
        }
        let identity = self.bridge.identity.as_str().into();
        let (client, broker) = (self.bridge.client.clone(), flux.client.clone());
        let tools = Tools { client, broker, identity, image: Arc::default() };
        let mut life = Life {
            flux,
            tools,
            under_way: UnderWay::default(),
            answers: FuturesUnordered::new(),
            decided: Vec::new(),
            took: Duration::ZERO,
            report: Report::default(),
            basis: None,
            has_changed: true,
            wake: None,
        };
        loop {
            self.wait(&mut life).await?;
            self.renew().await;
            let now = now();
            life.has_changed |= self.watched.forget(now) | self.opted_in.renew(&self.bridge.client).await;
            let broker = life.flux.broker(self.lease.recovered(), now).await?;
            let basis = Basis { broker, lease_is_ours: self.lease.is_ours() };
            let is_due = life.wake.is_some_and(|wake| wake <= Instant::now());
            if life.has_changed || is_due || life.basis.as_ref() != Some(&basis) {
                self.decide_and_begin(&mut life, memory, basis, now).await;
            }
            self.report(&life.report, life.under_way.refused_placeholder());
        }
    }

    /// Makes a decision, and begins what it wants.
    async fn decide_and_begin(&mut self, life: &mut Life, memory: &mut Memory, basis: Basis, now: Moment) {
        life.has_changed = false;
        let decision = self.decide(life, memory, &basis, now).await;
        let tick = Instant::now() + TICK;
        let is_settled = decision.report.standing == Standing::Serving && decision.actions.is_empty();
        let at = |at: Moment| Instant::now() + Duration::from_millis(at.saturating_sub(now).max(1).unsigned_abs());
        let known_until = [life.under_way.due(), self.lookups.due()].into_iter().flatten().min();
        // What could not begin is decided again, and so is what waits for something else.
        let again = if is_settled { known_until.map(|until| until.max(tick)) } else { Some(tick) };
        let wake = [decision.wake.map(at), again].into_iter().flatten().min();
        (life.wake, life.report, life.decided, life.basis) = (wake, decision.report, decision.actions, Some(basis));
        self.begin(life).await;
    }

    /// Reports what people want to know. `report`: that of a decision; the default one if there was none.
    fn report(&mut self, report: &Report, placeholder_refused: Option<&str>) {
        let waits_for =
            self.lease.waits_for().or_else(|| self.watched.waits_for()).or_else(|| report.standing.waits_for());
        let since = waits_for.is_some().then(|| self.waits_since.unwrap_or_else(Instant::now));
        self.waits_since = since;
        let count = |gangs: usize| u32::try_from(gangs).unwrap_or(u32::MAX);
        let accounts = &report.accounts;
        // No account while the Lease is not ours: then nothing may be written.
        self.show.send_if_modified(|before| {
            let has_changed = *before != accounts.nodes;
            if has_changed {
                before.clone_from(&accounts.nodes);
            }
            has_changed
        });
        let (other_pods_cores, overlapping_cores) = accounts.of_other_pods();
        self.bridge.report.send_if_modified(|before| {
            let mut reported = match report.standing {
                Standing::Serving => Reported {
                    counts: PodCounts {
                        running: count(report.running),
                        queued: count(report.queued),
                        refused: count(report.refused),
                        uncovered: count(report.uncovered),
                        other_pods_cores,
                        overlapping_cores,
                        overlaps: accounts.overlaps,
                        longest_overlap_seconds: count(usize::try_from(accounts.longest_overlap / SECOND).unwrap_or(0)),
                        placeholder_refused: placeholder_refused.map(str::to_owned),
                        waits_for: None,
                    },
                    overlapping_on: accounts.overlapping_on.clone(),
                },
                // Pods run on, though nobody counts them now.
                _ => Reported { overlapping_on: None, ..before.clone() },
            };
            reported.counts.waits_for =
                waits_for.clone().filter(|_| since.is_some_and(|since| since.elapsed() >= REPORT_AFTER));
            let has_changed = *before != reported;
            if has_changed {
                debug!(?reported, "pods as jobs");
            }
            *before = reported;
            has_changed
        });
    }

    /// Waits for a change that matters, and takes in all that follow within a moment. Returns after [`TICK`] at the latest.
    async fn wait(&mut self, life: &mut Life) -> Result<(), RpcError> {
        let tick = Instant::now() + TICK;
        let until = life.wake.map_or(tick, |wake| wake.min(tick));
        while !life.has_changed && self.take_in(life, until).await? {}
        if life.has_changed {
            let gathered = Instant::now() + (life.took * 2).clamp(*GATHER.start(), *GATHER.end());
            while self.take_in(life, gathered).await? {}
        }
        Ok(())
    }

    /// Waits for one change, and takes it in. Returns false if none came before `until`.
    async fn take_in(&mut self, life: &mut Life, until: Instant) -> Result<bool, RpcError> {
        tokio::select! {
            heard = life.flux.hear() => {
                heard?;
                life.has_changed = true;
            }
            Some(change) = self.changes.next() => life.has_changed |= self.watched.take(change, now()),
            Ok(()) = self.bridge.told.changed() => life.has_changed = true,
            Some((number, answer)) = life.answers.next(), if !life.answers.is_empty() => {
                life.has_changed = true;
                self.take_answer(life, number, answer).await?;
                self.begin(life).await;
            }
            () = sleep_until(until) => return Ok(false),
        }
        Ok(true)
    }

    /// Takes in how an action was answered. If it may have been done and nothing tells, a pod is read; for a job the journal is read
    /// from its beginning, which is why that is an error.
    async fn take_answer(&mut self, life: &mut Life, number: u64, answer: Outcome) -> Result<(), RpcError> {
        match life.under_way.note_outcome(number, answer, Instant::now()) {
            Some(Action::Bind(binding)) => {
                let PodRef { namespace, name, uid } = &binding.pod;
                let pods: Api<Pod> = Api::namespaced(self.bridge.client.clone(), namespace);
                if let Ok(found) = call(format!("get pod {namespace}/{name}"), pods.get_opt(name)).await {
                    self.watched.read(found.as_ref(), uid, now());
                }
                Ok(())
            }
            Some(Action::Submit(_) | Action::Resubmit { .. }) => Err(RpcError::Closed),
            Some(Action::Shadow(step)) if !step.submit.is_empty() => Err(RpcError::Closed),
            _ => Ok(()),
        }
    }

    async fn renew(&mut self) {
        if self.renewed.is_some_and(|renewed| renewed.elapsed() < RENEW_EVERY) {
            return;
        }
        match self.lease.renew(None).await {
            Ok(()) => self.renewed = Some(Instant::now()),
            // Once: the API server may be away for long.
            Err(error) if self.renewed.take().is_some() => {
                info!(error = error_chain(&error), "can't hold Lease flux-bridge");
            }
            Err(error) => debug!(error = error_chain(&error), "can't hold Lease flux-bridge"),
        }
    }

    /// Decides by all that is known; nothing, if the Lease is not ours or something is not known yet.
    async fn decide(&mut self, life: &mut Life, memory: &mut Memory, basis: &Basis, now: Moment) -> Decision {
        let told = self.bridge.told.borrow().clone();
        let (Some(nodes), Some(kube_jobs)) = (self.watched.nodes(), self.watched.jobs()) else {
            return Decision::loading();
        };
        let bridged = self.watched.pods.by_uid.values().filter(|pod| pod.is_bridged);
        let namespaces = namespaces(bridged.clone(), kube_jobs.values());
        let Some((namespaces, doubtful)) = self.opted_in.among(&self.bridge.client, namespaces).await else {
            return Decision::loading();
        };
        let theirs = bridged.filter(|pod| namespaces.contains(&pod.namespace));
        let facts: Facts = self.lookups.facts(&self.bridge.client, theirs, kube_jobs).await;
        let targets = targets(&told.roster.ranks, nodes, &told.nodes);
        // Lent to the world, without a copy.
        let none = Jobs::of(life.flux.client.uid());
        let (pods, mut jobs) = (std::mem::take(&mut self.watched.pods), std::mem::replace(&mut life.flux.jobs, none));
        jobs.forget(now, |uid| pods.by_uid.contains_key(uid));
        life.under_way.settle(&jobs, &pods, &facts, Instant::now());
        let mut world = World {
            settings: told.settings,
            broker: Some(basis.broker.clone()),
            is_closing: told.is_closing,
            jobs: Some(jobs),
            pods: Some(pods),
            ranks: ranks(&told.roster.ranks, &targets),
            targets,
            available: told.available,
            drained: told.drained,
            facts,
            namespaces,
            doubtful,
            refused: life.under_way.refused(),
            refused_ranks: life.under_way.refused_ranks(),
            refused_together: life.under_way.refused_together(),
            protected: life.under_way.protected(Instant::now()),
            under_way: life.under_way.actions(),
        };
        let may_decide = life.flux.is_whole && self.watched.is_listed && basis.lease_is_ours;
        let began = Instant::now();
        let decision = if may_decide { decide(&world, memory, now) } else { Decision::loading() };
        life.took = began.elapsed();
        if let Some(jobs) = world.jobs.take() {
            life.flux.jobs = jobs;
        }
        self.watched.pods = world.pods.take().unwrap_or_default();
        decision
    }

    /// Begins as much of what was decided as there is room for, while the Lease is ours.
    async fn begin(&mut self, life: &mut Life) {
        for action in std::mem::take(&mut life.decided) {
            if !self.lease.is_ours() {
                return;
            }
            if !life.under_way.has_room_for(&action) {
                life.decided.push(action);
                continue;
            }
            if action == Action::StartQueues {
                if let Err(error) = self.lease.renew(Some(&life.flux.name)).await {
                    info!(error = error_chain(&error), "can't name the broker in Lease flux-bridge");
                    continue;
                }
                // Somebody else may have written the Lease meanwhile. The API server may have taken long to answer, and the agent may be about
                // to stop the broker now.
                let is_named = self.lease.is_ours() && self.lease.recovered() == Some(life.flux.name.as_str());
                if !is_named || self.bridge.told.borrow().is_closing || !(self.bridge.may_start_queues)() {
                    continue;
                }
            }
            let (number, tools) = (life.under_way.begin(action.clone()), life.tools.clone());
            life.answers.push(async move { (number, tools.carry_out(action).await) }.boxed());
        }
    }
}

/// The present, by the wall clock: the times in the journal and in objects are by it.
fn now() -> Moment {
    Timestamp::now().as_millisecond()
}

/// The namespaces in which there may be something to do: those with `bridged` pods, and those with Jobs to resume, which have no pods.
fn namespaces<'a>(
    bridged: impl Iterator<Item = &'a PodView>,
    jobs: impl Iterator<Item = &'a KubeJob>,
) -> BTreeSet<String> {
    let suspended = jobs.filter(|job| job.has_annotation_to_remove()).map(|job| &job.namespace);
    bridged.map(|pod| &pod.namespace).chain(suspended).cloned().collect()
}

/// The nodes that pods may be bound to.
fn targets(
    of_roster: &BTreeMap<Rank, RosterEntry>,
    nodes: &BTreeMap<String, Node>,
    spec: &Nodes,
) -> BTreeMap<Rank, Target> {
    let target = |rank: Rank| {
        let entry = of_roster.get(&rank)?;
        let member = entry.member.as_ref()?;
        let node = nodes.get(&member.node).filter(|node| node.metadata.uid.as_deref() == Some(&member.uid))?;
        let found = Target::of(node, rank, entry, spec);
        let found =
            found.inspect_err(|error| debug!(%error, node = member.node, "can't read a Node's resources")).ok()?;
        Some((rank, found?))
    };
    of_roster.keys().filter_map(|rank| target(*rank)).collect()
}

/// See [`World::ranks`]. Of several ranks with one node name, that of the Node wins which exists, or else existed last: a rank is retained
/// for a while for the machine that had the name before.
fn ranks(of_roster: &BTreeMap<Rank, RosterEntry>, targets: &BTreeMap<Rank, Target>) -> BTreeMap<String, Rank> {
    let member = |(rank, entry): (&Rank, &RosterEntry)| {
        let runs_jobs = entry.resources.is_some() && !entry.is_excluded();
        Some((entry.member.as_ref().filter(|_| runs_jobs)?.node.clone(), *rank))
    };
    let gone_since = |(_, entry): &(&Rank, &RosterEntry)| entry.member.as_ref().and_then(|member| member.gone_since);
    let mut last: Vec<_> = of_roster.iter().collect();
    last.sort_by_key(|entry| gone_since(entry).unwrap_or(i64::MAX));
    let of_targets = targets.values().map(|target| (target.node.clone(), target.rank));
    last.into_iter().filter_map(member).chain(of_targets).collect()
}

#[cfg(test)]
mod tests {
    use api::{Declared, Member};
    use pods::facts::SuspendReason;

    use super::*;

    #[test]
    fn of_two_ranks_with_a_nodes_name_it_has_the_one_for_its_own_uid() {
        for (of_node, of_former) in [(3, 4), (4, 3)] {
            let entry = |uid: &str, gone_since| RosterEntry {
                member: Some(Member {
                    node: "b".into(),
                    uid: uid.into(),
                    address: std::net::Ipv4Addr::LOCALHOST.into(),
                    gone_since,
                }),
                resources: Some(Declared { cores: 1, ..Declared::default() }),
                ..RosterEntry::default()
            };
            let of_roster = [(of_node, entry("new", None)), (of_former, entry("former", Some(5)))].into();
            let mut node = Node::default();
            (node.metadata.name, node.metadata.uid) = (Some("b".into()), Some("new".into()));
            let targets = targets(&of_roster, &[("b".to_owned(), node)].into(), &Nodes::default());
            assert_eq!(targets.keys().copied().collect::<Vec<_>>(), [of_node]);
            assert_eq!(ranks(&of_roster, &targets), [("b".to_owned(), of_node)].into(), "{of_former} is retained");
            for gone_since in [None, Some(9)] {
                let of_roster = [(of_node, entry("new", gone_since)), (of_former, entry("former", Some(5)))].into();
                assert_eq!(ranks(&of_roster, &BTreeMap::new()), [("b".to_owned(), of_node)].into(), "no Node");
            }
        }
    }

    #[test]
    fn a_suspended_job_without_pods_is_looked_at_until_it_has_been_resumed() {
        let pod = PodView { namespace: "pods".into(), ..PodView::default() };
        let job = |is_suspended, suspended_for| KubeJob {
            namespace: "jobs".into(),
            is_suspended,
            suspended_for,
            ..KubeJob::default()
        };
        for (job, expected) in [
            (job(true, Some(SuspendReason::Incomplete)), &["jobs", "pods"][..]),
            (job(true, Some(SuspendReason::Preempted)), &["jobs", "pods"]),
            (job(false, Some(SuspendReason::Incomplete)), &["jobs", "pods"]),
            (job(false, Some(SuspendReason::Canceled)), &["jobs", "pods"]),
            (job(true, Some(SuspendReason::Canceled)), &["pods"]),
            (job(true, None), &["pods"]),
        ] {
            let found = namespaces([&pod].into_iter(), [&job].into_iter());
            assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expected, "{job:?}");
        }
    }
}
