//! The rounds of the bridge.

use std::{collections::BTreeSet, time::Duration};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::Api;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tracing::{debug, info, warn};

use api::Roster;
use base::error_chain;
use broker::queues::ensure_recorded;
use cluster::{Announcer, call};
use pods::{
    action::{Action, PodRef},
    decide::{Decision, Memory, Report, decide},
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
    watched::{Watched, changes},
};

/// How long changes are gathered: a gang's pods appear one after the other.
const GATHER: Duration = Duration::from_millis(20);
/// A round at least this often: a broker's state and its queues change without an event here.
const TICK: Duration = Duration::from_secs(1);
/// Pause before the broker is tried again.
const CONNECT_AGAIN: Duration = Duration::from_millis(500);

type Answered = (u64, Answer);

/// Serves pods until the future is dropped.
pub async fn run(bridge: Bridge) {
    let mut watched = Watched::default();
    let mut changes = changes(&bridge.client);
    let mut held = Held::new(bridge.client.clone(), bridge.identity.clone());
    let mut memory = Memory::default();
    let mut announcer = Announcer::new(bridge.client.clone(), &bridge.identity);
    let (mut lookups, mut opted_in) = (Lookups::default(), OptedIn::default());
    info!("the bridge between pods and jobs begins");
    loop {
        let instance_id = bridge.told.borrow().roster.instance_id.clone();
        let connected = async { Flux::follow((bridge.connect)().await?, &instance_id).await }.await;
        let mut flux = match connected {
            Ok(flux) => flux,
            Err(error) => {
                debug!(error = error_chain(&error), "the bridge has no broker");
                sleep(CONNECT_AGAIN).await;
                continue;
            }
        };
        // A broker that crashes must come back with its queues stopped.
        if let Err(error) = ensure_recorded(&flux.client).await {
            warn!(error = error_chain(&error), "can't record the state of the queues");
        }
        let tools = Tools { client: bridge.client.clone(), broker: flux.client.clone() };
        let mut under_way = UnderWay::default();
        let mut answers: FuturesUnordered<BoxFuture<'static, Answered>> = FuturesUnordered::new();
        let mut renewed: Option<Instant> = None;
        let mut wake = Instant::now();
        let mut report = Report::default();
        let lost = loop {
            let heard = tokio::select! {
                heard = flux.hear() => heard,
                Some(change) = changes.next() => { watched.take(change, now()); Ok(()) }
                Some((number, answer)) = answers.next(), if !answers.is_empty() => {
                    if let Some(action) = under_way.answer(number, answer) {
                        look_again(&bridge, &mut watched, &action).await
                    } else {
                        Ok(())
                    }
                }
                () = sleep_until(wake) => Ok(()),
            };
            if let Err(error) = heard {
                break error;
            }
            let gathered = Instant::now() + GATHER;
            while let Ok(Some(change)) = timeout_at(gathered, changes.next()).await {
                watched.take(change, now());
            }
            let mut journal_ended = None;
            while let Some(heard) = flux.hear().now_or_never() {
                if let Err(error) = heard {
                    journal_ended = Some(error);
                    break;
                }
            }
            if let Some(error) = journal_ended {
                break error;
            }
            while let Some(Some((number, answer))) = answers.next().now_or_never() {
                if let Some(action) = under_way.answer(number, answer)
                    && let Err(error) = look_again(&bridge, &mut watched, &action).await
                {
                    journal_ended = Some(error);
                }
            }
            if let Some(error) = journal_ended {
                break error;
            }
            if renewed.is_none_or(|renewed| renewed.elapsed() >= RENEW_EVERY) {
                match held.renew(None).await {
                    Ok(()) => renewed = Some(Instant::now()),
                    Err(error) => info!(error = error_chain(&error), "can't hold Lease flux-bridge"),
                }
            }
            let now = now();
            watched.forget(now);
            let broker = match flux.broker(held.broker(), now).await {
                Ok(broker) => broker,
                Err(error) => break error,
            };
            let told = bridge.told.borrow().clone();
            let known = watched.pods.by_uid.values();
            let facts = match watched.jobs() {
                Some(jobs) => lookups.facts(&bridge.client, known.clone(), jobs).await,
                None => Default::default(),
            };
            let wanted: BTreeSet<String> =
                known.filter(|pod| pod.is_bridged).map(|pod| pod.namespace.clone()).collect();
            let namespaces = opted_in.among(&bridge.client, wanted).await;
            let targets = targets(&told.roster, &watched);
            let pods = std::mem::take(&mut watched.pods);
            let mut jobs = std::mem::take(&mut flux.jobs);
            jobs.forget(now, |uid| pods.by_uid.contains_key(uid));
            under_way.settle(&jobs, &pods, &facts);
            let is_known = flux.is_whole && watched.is_listed && watched.nodes().is_some() && watched.jobs().is_some();
            let mut world = World {
                settings: told.settings,
                broker: Some(broker),
                jobs: Some(jobs),
                pods: Some(pods),
                targets,
                facts,
                namespaces,
                under_way: under_way.actions(),
            };
            let decision = match is_known && held.is_ours() {
                true => decide(&world, &mut memory, now),
                false => Decision::default(),
            };
            flux.jobs = world.jobs.take().unwrap_or_default();
            watched.pods = world.pods.take().unwrap_or_default();
            if decision.report != report {
                info!(?decision.report, "pods as jobs");
                report = decision.report;
            }
            for action in decision.actions {
                if !under_way.has_room_for(&action) || !held.is_ours() {
                    continue;
                }
                if let Action::Tell(tell) = &action {
                    tell::event(&mut announcer, tell).await;
                }
                if action == Action::StartQueues
                    && let Err(error) = held.renew(Some(&flux.name)).await
                {
                    info!(error = error_chain(&error), "can't name the broker in Lease flux-bridge");
                    continue;
                }
                let number = under_way.begin(action.clone());
                let tools = tools.clone();
                answers.push(async move { (number, tools.carry_out(action).await) }.boxed());
            }
            let until = |at: Millis| Duration::from_millis(at.saturating_sub(now).max(1).unsigned_abs());
            let wanted = decision.wake.map_or(TICK, |at| until(at).min(TICK));
            wake = Instant::now() + wanted;
        };
        info!(
            error = error_chain(&lost),
            "the bridge has lost the broker, or an answer of it: it looks at all jobs again"
        );
        sleep(CONNECT_AGAIN).await;
    }
}

/// The present, by the wall clock: the times in the journal and in objects are by it.
fn now() -> Millis {
    Millis::try_from(Timestamp::now().as_millisecond()).unwrap_or_default()
}

/// What became of an action that nobody answered for. A pod is read; for a job, the journal is read from its beginning, which
/// is why that ends the connection.
async fn look_again(bridge: &Bridge, watched: &mut Watched, action: &Action) -> Result<(), broker::rfc3::RpcError> {
    match action {
        Action::Bind(binding) => {
            let PodRef { namespace, name, uid } = &binding.pod;
            let pods: Api<Pod> = Api::namespaced(bridge.client.clone(), namespace);
            if let Ok(found) = call(format!("get pod {namespace}/{name}"), pods.get_opt(name)).await {
                watched.read(found.as_ref(), uid, now());
            }
            Ok(())
        }
        Action::Submit(_) | Action::Resubmit { .. } => Err(broker::rfc3::RpcError::Closed),
        _ => Ok(()),
    }
}

/// The nodes that pods may be bound to.
fn targets(roster: &Roster, watched: &Watched) -> std::collections::BTreeMap<api::Rank, Target> {
    let Some(nodes) = watched.nodes() else { return Default::default() };
    let target = |rank: api::Rank| {
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
