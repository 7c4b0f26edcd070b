//! Many agents of the real code in one process. Played are their hosts, Flux, and kubelets; planner and API server are real. What each agent
//! asks of the API server and gets from it is counted.
//!
//! All nodes have just been rebooted: the packages are there, no broker runs, and no FluxNode says anything yet.
#![allow(dead_code, reason = "each program takes what it needs")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

pub mod counts;
mod host;
pub mod objects;

use std::{collections::BTreeSet, sync::Arc};

use agent::AgentArguments;
use api::{FluxInstance, FluxNode, INSTANCE, NAMESPACE, NodePhase};
use clap::Parser;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{
    Api, Client, ResourceExt,
    runtime::{WatchStreamExt, wait::await_condition, watcher},
};
use metrics::Metrics;
use tokio::{
    runtime::Handle,
    task::{JoinHandle, JoinSet},
};

use counts::{Counter, Counts};
use host::{PlayedFlux, PlayedHost};

/// One agent.
pub struct Agent {
    /// Name of its node.
    pub node: String,
    /// What its own client has asked and got.
    pub own: Counter,
    /// What the planner in it has.
    pub planner: Counter,
    host: Arc<PlayedHost>,
    task: Option<JoinHandle<()>>,
}

/// What one agent has cost.
#[derive(Debug, Clone, Default)]
pub struct Cost {
    /// Of the agent itself.
    pub own: Counts,
    /// Of the planner in it.
    pub planner: Counts,
    /// How many rounds it had: each observes its host once.
    pub rounds: u64,
    /// How many of them began for no other reason than that the one before was ten seconds ago.
    pub resyncs: u64,
}

impl Cost {
    /// What was added after `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            own: self.own.since(&before.own),
            planner: self.planner.since(&before.planner),
            rounds: self.rounds - before.rounds,
            resyncs: self.resyncs - before.resyncs,
        }
    }

    /// Requests of both.
    pub fn requests(&self) -> u64 {
        self.own.all_requests() + self.planner.all_requests()
    }

    /// Bytes that both were sent.
    pub fn bytes(&self) -> u64 {
        self.own.all_bytes() + self.planner.all_bytes()
    }

    /// Watch events that both were sent.
    pub fn events(&self) -> u64 {
        self.own.all_events() + self.planner.all_events()
    }

    /// It watches the planner's Lease, as those of the lowest ranks do.
    pub fn watches_lease(&self) -> bool {
        self.planner.requests.contains_key("watch leases")
    }
}

/// All agents of a cluster.
pub struct Fleet {
    /// Does what kubelets and administrators do.
    pub admin: Client,
    /// Makes the client of an agent that begins.
    of_agent: Box<dyn Fn() -> Client + Send>,
    /// The runtime of the planners. Each has a client, and so a connection, of its own here; a real one shares its agent's. If thousands of agents share
    /// a runtime, they would hold up the planner, which has a machine of its own in reality.
    pub planners: Handle,
    /// The agents, by the number of their node.
    pub agents: Vec<Agent>,
    _sockets: tempfile::TempDir,
}

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    agent: AgentArguments,
}

impl Fleet {
    /// Makes `nodes` nodes and their pods at the API server that `admin` leads to, and the FluxInstance. No agent runs yet. Each agent will have a
    /// client that `of_agent` makes.
    pub async fn make(admin: Client, of_agent: impl Fn() -> Client + Send + 'static, nodes: u32) -> Self {
        let sockets = tempfile::tempdir().unwrap();
        let instance_uid = objects::make(&admin, nodes).await;
        let flux = Arc::new(PlayedFlux::new(sockets.path(), &instance_uid));
        let agents = (0..nodes).map(|number| Agent {
            node: objects::node_name(number),
            own: Counter::default(),
            planner: Counter::default(),
            host: Arc::new(PlayedHost::new(number, Arc::clone(&flux))),
            task: None,
        });
        let (of_agent, agents) = (Box::new(of_agent), agents.collect());
        Self { admin, of_agent, planners: Handle::current(), agents, _sockets: sockets }
    }

    /// Starts the agents of these nodes.
    pub fn start(&mut self, nodes: impl IntoIterator<Item = usize>) {
        for number in nodes {
            let (client, agent, planners) = ((self.of_agent)(), &mut self.agents[number], self.planners.clone());
            let pod = objects::pod_name(&agent.node);
            let words = ["agent", "--node-name", &agent.node, "--pod-name", &pod];
            let Arguments { agent: arguments } = Arguments::parse_from(words);
            let planner = {
                let _entered = planners.enter();
                agent.planner.client(&(self.of_agent)())
            };
            let plan = move |place| {
                let mut planning = JoinSet::new();
                planning.spawn_on(planner::run(planner, pod, place, Metrics::default()), &planners);
                planning.join_all().map(drop).boxed()
            };
            let simulated = agent::simulate(arguments, agent.own.client(&client), agent.host.clone(), plan);
            agent.task = Some(tokio::spawn(simulated));
        }
    }

    /// Kills the agent of node `number`: nothing of it goes on, and it releases nothing. Its broker runs on.
    pub async fn kill(&mut self, number: usize) {
        let Some(task) = self.agents[number].task.take() else { return };
        task.abort();
        let _ = task.await;
    }

    /// Waits until `all` nodes are online, as the planner and each agent say, and each of their pods is ready.
    pub async fn online(&self, all: usize) {
        let instances = Api::<FluxInstance>::namespaced(self.admin.clone(), NAMESPACE);
        let is_online = |instance: Option<&FluxInstance>| {
            let status = instance.and_then(|instance| instance.status.as_ref());
            status.is_some_and(|status| status.online as usize == all)
        };
        await_condition(instances, INSTANCE, is_online).await.unwrap();
        let nodes = Api::<FluxNode>::namespaced(self.admin.clone(), NAMESPACE);
        let phase = |node: &FluxNode| node.status.as_ref().map(|status| status.phase.clone());
        until_all(nodes, all, |node| phase(node) == Some(NodePhase::Online)).await;
        let pods = Api::<Pod>::namespaced(self.admin.clone(), NAMESPACE);
        until_all(pods, all, objects::is_ready).await;
    }

    /// What each agent has cost up to now.
    pub fn costs(&self) -> Vec<Cost> {
        let cost = |agent: &Agent| Cost {
            own: agent.own.counts(),
            planner: agent.planner.counts(),
            rounds: agent.host.observations(),
            resyncs: agent.host.resyncs(),
        };
        self.agents.iter().map(cost).collect()
    }

    /// What each agent has cost since it had cost `before`.
    pub fn since(&self, before: &[Cost]) -> Vec<Cost> {
        self.costs().iter().zip(before).map(|(now, then)| now.since(then)).collect()
    }

    /// The number of the node whose agent is the planner.
    pub async fn planner(&self) -> usize {
        let leases = Api::<Lease>::namespaced(self.admin.clone(), NAMESPACE);
        let lease = leases.get(api::LEASE_PLANNER).await.unwrap();
        let holder = lease.spec.and_then(|spec| spec.holder_identity);
        let is_holder = |agent: &Agent| Some(objects::pod_name(&agent.node)) == holder;
        self.agents.iter().position(is_holder).unwrap()
    }

    /// The number of the node with the lead's broker.
    pub fn lead(&self) -> usize {
        self.agents.iter().position(|agent| agent.host.rank() == Some(0)).unwrap()
    }
}

/// Waits until `count` objects are as `is_so` says.
async fn until_all<K>(api: Api<K>, count: usize, is_so: impl Fn(&K) -> bool)
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
    K::DynamicType: Default,
{
    let mut found = BTreeSet::new();
    let mut events = watcher(api, watcher::Config::default()).default_backoff().applied_objects().boxed();
    while found.len() < count {
        let Some(Ok(object)) = events.next().await else { continue };
        match is_so(&object) {
            true => found.insert(object.name_any()),
            false => found.remove(&object.name_any()),
        };
    }
}

/// Mean of all.
pub fn mean(costs: &[&Cost], of: impl Fn(&Cost) -> u64) -> f64 {
    costs.iter().map(|cost| of(cost) as f64).sum::<f64>() / costs.len() as f64
}
