//! The agent's rounds: observe, decide, report, carry out, rest.

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::BoxFuture;
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Namespace};
use kube::{Api, Client, Resource};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{sleep, timeout},
};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info, warn};

use super::{
    AgentArguments, AgentError,
    agent::Agent,
    background::{
        Background, agents, gate,
        health::{self, Health},
        scrape,
        serve::Serving,
    },
    counted_client,
    decide::{
        Decision, RESYNC, SOON, decide, expects_archives, must_start_queues,
        teardown::{Evidence, Verdict, at_sigterm},
    },
    error::StepError,
    execute::{self, Outcome},
    inputs::{
        node_inputs::NodeInputs,
        sources::Sources,
        watched_objects::{Presence, WatchedObjects, read_presence},
    },
    memory::{Memory, Trouble},
    node_ops::NodeOps,
    reporter::Reporter,
    status::node_status::unobserved,
    step::Step,
};
use api::{FluxInstance, INSTANCE, NAMESPACE};
use base::{chance::chance, error_chain};
use cluster::{lease, lease_rules::Place};
use host::NsHost;
use hostapi::Host;
use metrics::{Metrics, NodeFacts};
use packages::tried_again;

/// The longest that a live change may take.
const LIVE_CHANGE: Duration = Duration::from_mins(1);
/// Time limit of one API call at SIGTERM: at a teardown the agent's rights are soon gone.
const LAST_CALL: Duration = Duration::from_secs(1);

/// Plans for the whole cluster while this agent holds the Lease, as long as the future is polled. Gets a client, the pod's name,
/// this agent's place among the candidates, and where to tell what it observes.
pub type Plan = fn(Client, String, watch::Receiver<Place>, Metrics) -> BoxFuture<'static, ()>;

/// Runs the agent until SIGTERM, and `plan` beside it.
///
/// # Errors
/// What keeps the agent from beginning at all: signals, the way to the API server, or the host's namespaces.
pub async fn run(arguments: AgentArguments, plan: Plan) -> Result<ExitCode, AgentError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(AgentError::Signals)?;
    let (health, metrics) = (Health::default(), Metrics::default());
    health::serve(&arguments.probe.socket, health.clone(), metrics.clone());
    let client = counted_client(&metrics).await?;
    let host = Arc::new(NsHost::open()?);
    info!(node = arguments.node_name, version = env!("CARGO_PKG_VERSION"), "the agent begins");
    let serving = Serving::begin(arguments.host_ip).await;
    let scraped = scrape::serve(arguments.host_ip, &metrics, client.clone()).await;
    let background = Background::new(health, serving, scraped, &arguments.pod_name, &arguments.node_name);
    let (mut agent, _beside) = begin(&arguments, &client, host, background, metrics.clone());
    let (watched, place) = (agent.sources.watched.clone(), agent.sources.place.subscribe());
    let planner = tokio::spawn(plan(client.clone(), arguments.pod_name.clone(), place, metrics.clone()));
    let live_change = agent.live_change.clone();
    tokio::select! {
        () = rounds(&mut agent) => {}
        () = async {
            terminate.recv().await;
            info!("SIGTERM: the pod ends, and what runs on the host goes on");
            // Cut off between two of its parts, a live change would leave the instance without a scheduler.
            let _ = timeout(LIVE_CHANGE, live_change.lock()).await;
        } => {}
    }
    planner.abort();
    let released = lease::release(client.clone(), &arguments.pod_name);
    let _ = timeout(LAST_CALL, released).await;
    if is_over(&client, &arguments.daemonset, watched).await {
        info!("the instance is over: cleaning this host");
        execute::remove::clean(&mut agent).await;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs an agent on `host` with everything but its ports and what SIGTERM means, and `plan` beside it, until it is dropped. For tests that
/// count what many agents cost.
#[cfg(feature = "test-support")]
pub async fn simulate(
    arguments: AgentArguments,
    client: Client,
    host: Arc<dyn Host>,
    plan: impl FnOnce(watch::Receiver<Place>) -> BoxFuture<'static, ()>,
) {
    let serving = Serving::begin(None).await;
    let background = Background::new(Health::default(), serving, None, &arguments.pod_name, &arguments.node_name);
    let (mut agent, _beside) = begin(&arguments, &client, host, background, Metrics::default());
    let place = agent.sources.place.subscribe();
    tokio::join!(rounds(&mut agent), plan(place));
}

/// Puts an agent together, and begins what goes on beside its rounds, until the handles are dropped.
fn begin(
    arguments: &AgentArguments,
    client: &Client,
    host: Arc<dyn Host>,
    background: Background,
    metrics: Metrics,
) -> (Agent, [AbortOnDropHandle<()>; 2]) {
    let sources = Sources::begin(client, &arguments.node_name, Arc::clone(&host));
    let counting = agents::count(client.clone(), arguments.daemonset.clone(), sources.place.clone());
    let following = gate::follow(client.clone(), arguments.pod_name.clone(), background.health.ready());
    let agent = Agent {
        ops: NodeOps { host, client: client.clone(), address: arguments.host_ip },
        reporter: Reporter::new(client.clone(), arguments.node_name.clone(), &arguments.pod_name),
        sources,
        memory: Memory::default(),
        background,
        metrics,
        termination_log: arguments.termination_log.clone(),
        live_change: Arc::default(),
    };
    (agent, [tokio::spawn(counting), tokio::spawn(following)].map(AbortOnDropHandle::new))
}

/// Rounds without end. A change of a watched object, or of the broker's state, begins the next one at once.
async fn rounds(agent: &mut Agent) {
    loop {
        let rest = round(agent).await;
        let (watched, broker) = (&mut agent.sources.watched, &mut agent.sources.broker);
        tokio::select! {
            _ = watched.changed() => {}
            _ = broker.changed() => {}
            () = sleep(rest) => {}
        }
    }
}

/// One round. Returns how long to rest.
async fn round(agent: &mut Agent) -> Duration {
    let observed = agent.observe().await;
    create_flux_node(agent, !is_clean(&observed, agent.memory.failed_observations)).await;
    let mut inputs = match observed {
        Ok(inputs) => inputs,
        Err(error) => {
            warn!(error = error_chain(&error), "can't observe the host; this round ends");
            return report_unobserved(agent, &error).await;
        }
    };
    agent.background.serve_pods(&agent.ops, &inputs);
    agent.remember_uninstall(&inputs).await;
    let decision = decide(&inputs, &agent.memory);
    // Before the report: once the planner reads it, it sends other nodes here.
    if let Some(expects) = expects_archives(&inputs, &decision.step) {
        agent.background.serving.expect(expects);
    }
    if decision.rest.is_none() && decision.is_urgent(&inputs) {
        carry_out(agent, &inputs, &decision.step).await;
        return Duration::ZERO;
    }
    let started = agent.memory.starts.started_at();
    inputs.refusal = agent.sources.find_refusal(&agent.reporter, &inputs, started).await;
    let decision = decide(&inputs, &agent.memory);
    let is_reported = agent.report(&inputs, decision.status.as_ref(), decision.readiness).await;
    match decision.rest {
        Some(rest) if decision.step.is_rest() => {
            finish_idle_round(agent, &inputs, &decision).await;
            // Only the next round writes the report again, and takes in what upkeep finds.
            if is_reported && !agent.background.needs_round_soon(&inputs) { rest } else { rest.min(RESYNC) }
        }
        // The report may have taken a part of the pause.
        Some(rest) => rest.saturating_sub(inputs.at.elapsed()),
        None => {
            carry_out(agent, &inputs, &decision.step).await;
            Duration::ZERO
        }
    }
}

/// Carries out `step`, and learns from the outcome. The next round follows at once.
async fn carry_out(agent: &mut Agent, inputs: &NodeInputs, step: &Step) {
    let outcome = execute::execute(agent, inputs, step).await;
    let error = match outcome {
        Ok(outcome) => {
            agent.memory.attempts.succeeded();
            match outcome {
                Outcome::Stopped => agent.memory.starts.forget(),
                Outcome::Removed => agent.memory.forget_instance(),
                Outcome::Done | Outcome::Overtaken => {}
            }
            return;
        }
        Err(error) => error,
    };
    let (generation, trouble) = (inputs.generation, trouble(step, &error));
    let pause = agent.memory.attempts.failed(step, generation, trouble, Instant::now(), chance());
    if let StepError::Fetch(_) = error {
        let words = format!("{}; {}", error_chain(&error), tried_again(pause));
        agent.memory.attempts.reword(step, generation, &words);
    }
    if let Step::Reload(_) = step {
        // The instance goes on with the resources that it has.
        start_queues(agent, inputs).await;
    }
    agent.report_step(inputs, step, None).await;
}

/// Ends a round that rests: forgets failed attempts, starts queues that may be stopped, and does the upkeep that is due. No step depends on upkeep.
async fn finish_idle_round(agent: &mut Agent, inputs: &NodeInputs, decision: &Decision) {
    agent.memory.attempts.succeeded();
    if decision.step == Step::Hold {
        start_queues(agent, inputs).await;
    }
    if agent.sources.watched.borrow().instance.here().is_some() {
        agent.background.upkeep(&agent.ops, &agent.sources, inputs, &decision.step).await;
    }
}

async fn start_queues(agent: &mut Agent, inputs: &NodeInputs) {
    if must_start_queues(inputs, &agent.memory) {
        execute::close::start_queues(&agent.ops, &mut agent.memory, inputs).await;
    }
}

/// True if nothing of ours is on the host. A host that can't be observed may have anything, unless this is the first
/// observation in a row that fails, as if its stage was killed.
fn is_clean(observed: &Result<NodeInputs, StepError>, failed_before: u32) -> bool {
    observed.as_ref().map_or(failed_before == 0, |inputs| inputs.host.state.is_none())
}

/// Makes this node's FluxNode if it is missing while there is an instance, or something of ours may be on the host: whoever
/// deletes the object must not make a host look clean. Without one nothing starts, but the agent keeps observing.
async fn create_flux_node(agent: &Agent, may_be_claimed: bool) {
    let is_missing = {
        let watched = agent.sources.watched.borrow();
        let is_wanted = may_be_claimed || watched.instance.here().is_some();
        is_wanted && matches!(watched.flux_node, Presence::Gone)
    };
    if is_missing && let Err(error) = agent.reporter.create().await {
        warn!(error = error_chain(&error), "this node has no FluxNode, and the agent can't create one");
    }
}

/// If the host can't be observed, its state is unknown: the agent changes nothing there and reports that. Returns how long to rest.
async fn report_unobserved(agent: &mut Agent, error: &StepError) -> Duration {
    if error.is_waiting() {
        return SOON;
    }
    agent.memory.failed_observations = agent.memory.failed_observations.saturating_add(1);
    if agent.memory.failed_observations == 1 {
        // A single killed host stage is not worth a report.
        return SOON;
    }
    agent.background.health.set_ready(false);
    agent.metrics.set_node(NodeFacts::default(), None);
    let watched = agent.sources.watched.borrow().clone();
    if let Some(node) = watched.flux_node.here().filter(|_| !agent.sources.is_replaced(&watched)) {
        let status = unobserved(error_chain(error), node.status.as_ref());
        agent.reporter.try_write(node, &status, |written| agent.sources.own_writes.wrote(node, written)).await;
    }
    RESYNC
}

/// Logs why `step` was not carried out, and puts it into words for people.
fn trouble(step: &Step, error: &StepError) -> Trouble {
    let trouble = Trouble {
        words: error_chain(error),
        waiting: error.is_waiting(),
        lasting: !error.is_transient(),
        by_others: matches!(error, StepError::PortTaken(_)),
    };
    if trouble.waiting {
        info!(step = step.name(), reason = trouble.words, "this step has to wait");
    } else {
        let transient = error.is_transient();
        warn!(step = step.name(), error = trouble.words, transient, "this step failed; the agent will try again");
    }
    trouble
}

/// True if there is positive evidence that the instance is over. `daemonset`: the DaemonSet that this agent's pod belongs to.
async fn is_over(client: &Client, daemonset: &str, mut watched: watch::Receiver<WatchedObjects>) -> bool {
    let instances = Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE);
    let daemonsets = Api::<DaemonSet>::namespaced(client.clone(), NAMESPACE);
    let namespaces = Api::<Namespace>::all(client.clone());
    let (instance, daemonset, namespace) = tokio::join!(
        timeout(LAST_CALL, read_presence(&instances, INSTANCE)),
        timeout(LAST_CALL, read_presence(&daemonsets, daemonset)),
        timeout(LAST_CALL, read_presence(&namespaces, NAMESPACE)),
    );
    let known = watched.borrow().clone();
    let verdict = at_sigterm(
        evidence(namespace.ok(), &known.namespace),
        evidence(instance.ok(), &known.instance),
        // It only says how long to wait for the other two, so it is not watched.
        evidence(daemonset.ok(), &Presence::Unknown),
    );
    debug!(?verdict, "what SIGTERM means");
    match verdict {
        Verdict::Leave => false,
        Verdict::Clean => true,
        Verdict::WaitFor(patience) => {
            timeout(patience, watched.wait_for(WatchedObjects::is_over)).await.is_ok_and(|found| found.is_ok())
        }
    }
}

/// What the open watch delivered if the object ends, else what the API server answered last.
fn evidence<K: Resource>(answer: Option<Presence<K>>, watched: &Presence<K>) -> Evidence {
    if watched.is_ending() {
        return Evidence::Ends;
    }
    match answer.unwrap_or_default() {
        Presence::Unknown => Evidence::None,
        presence if presence.is_ending() => Evidence::Ends,
        _ => Evidence::Stays,
    }
}

#[cfg(test)]
mod tests {
    use hostapi::{HostError, Refusal};

    use super::*;
    use crate::fixture;

    #[test]
    fn only_a_host_that_was_observed_without_a_claim_is_clean() {
        let mut inputs = fixture::inputs();
        assert!(!is_clean(&Ok(inputs.clone()), 0));
        inputs.host.state = None;
        assert!(is_clean(&Ok(inputs), 0));
        let failed = Err(StepError::Host(HostError::Refused(Refusal::new("a user's mount"))));
        assert_eq!([0, 1].map(|before| is_clean(&failed, before)), [true, false]);
    }
}
