//! Many agents of the real code in one process. Played are their hosts, Flux, and kubelets; planner and API server are real. What each agent
//! asks of the API server and gets from it is counted.
//!
//! All nodes have just been rebooted: the packages are there, no broker runs, and no FluxNode says anything yet.
#![allow(dead_code, reason = "each program takes what it needs")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

pub mod counts;
mod host;
pub mod objects;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use agent::AgentArguments;
use api::{CONFIGMAP_ROSTER, FluxInstance, FluxNode, INSTANCE, NAMESPACE, NodePhase};
use clap::Parser;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Pod},
};
use kube::{
    Api, Client, ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use metrics::Metrics;
use tokio::{
    runtime::Handle,
    task::{JoinHandle, JoinSet},
    time::Instant,
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
    /// How many of them began ten seconds or more after the one before: the agent had rested, the machine was busy, or nothing had happened until
    /// then.
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
    /// Makes the clients of an agent that begins: its own, and its planner's. A real planner shares its agent's.
    new_client: Box<dyn Fn() -> Client + Send>,
    /// The runtime of the planners: in reality each has a machine of its own, and thousands of agents on the same runtime would hold it up.
    planners: Handle,
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
    /// Makes `nodes` nodes and their pods at the API server that `admin` leads to, and the FluxInstance. No agent runs yet. Each agent will have
    /// clients that `new_client` makes; its planner runs on the runtime `planners`.
    pub async fn make(
        admin: Client,
        new_client: impl Fn() -> Client + Send + 'static,
        planners: Handle,
        nodes: u32,
    ) -> Self {
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
        let (new_client, agents) = (Box::new(new_client), agents.collect());
        Self { admin, new_client, planners, agents, _sockets: sockets }
    }

    /// Starts the agents of these nodes.
    pub fn start(&mut self, nodes: impl IntoIterator<Item = usize>) {
        for number in nodes {
            let (client, agent, planners) = ((self.new_client)(), &mut self.agents[number], self.planners.clone());
            let pod = objects::pod_name(&agent.node);
            let words = ["agent", "--node-name", &agent.node, "--pod-name", &pod];
            let Arguments { agent: arguments } = Arguments::parse_from(words);
            let planner = {
                // What a client does beside its requests goes on where it was made.
                let _entered = planners.enter();
                agent.planner.client(&(self.new_client)())
            };
            let plan = move |place| {
                // If the agent is dropped, its planner ends with this set.
                let mut planning = JoinSet::new();
                planning.spawn_on(planner::run(planner, pod, place, Metrics::default()), &planners);
                planning.join_all().map(drop).boxed()
            };
            let simulated = agent::simulate(arguments, agent.own.client(&client), agent.host.clone(), plan);
            agent.task = Some(tokio::spawn(simulated));
        }
    }

    /// Kills the agent of node `number`: it releases nothing. Its planner ends as soon as it waits for anything. The broker runs on.
    pub async fn kill(&mut self, number: usize) {
        let Some(task) = self.agents[number].task.take() else { return };
        task.abort();
        let _ = task.await;
    }

    /// Waits until `all` nodes are online, as the planner and each agent say, and each of their pods is ready.
    pub async fn online(&self, all: usize) {
        let instances = Api::<FluxInstance>::namespaced(self.admin.clone(), NAMESPACE);
        let online = |instance: &FluxInstance| instance.status.as_ref().map(|status| status.online as usize);
        until_so(instances, INSTANCE, |instance| online(instance) == Some(all)).await;
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

/// Waits until the object with this name is as `is_so` says.
async fn until_so<K>(api: Api<K>, name: &str, is_so: impl Fn(&K) -> bool)
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
    K::DynamicType: Default,
{
    let mut seen = watcher::watch_object(api, name).default_backoff().boxed();
    // A busy API server may end the watch meanwhile.
    while !matches!(seen.next().await, Some(Ok(Some(object))) if is_so(&object)) {}
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

/// Has the agent of `node` begin; returns how long the planner takes from the agent's report of the host to the roster that has the node. Nothing else
/// may change the roster meanwhile.
pub async fn time_join(client: &Client, node: &str, begin: impl Future<Output = ()>) -> Duration {
    let rosters = Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE);
    let version = rosters.get_metadata(CONFIGMAP_ROSTER).await.unwrap().resource_version();
    let is_another = |roster: &ConfigMap| roster.resource_version() != version;
    let has_facts = |node: &FluxNode| node.status.as_ref().is_some_and(|status| status.facts.is_some());
    let nodes = Api::<FluxNode>::namespaced(client.clone(), NAMESPACE);
    let reported = async {
        until_so(nodes, node, has_facts).await;
        Instant::now()
    };
    let published = async {
        until_so(rosters, CONFIGMAP_ROSTER, is_another).await;
        Instant::now()
    };
    let (reported, published, ()) = tokio::join!(reported, published, begin);
    let (roster, _) = cluster::published::read_roster(client).await.unwrap().unwrap();
    assert!(roster.members().any(|member| member.node == node), "another change of the roster was timed");
    published.saturating_duration_since(reported)
}

/// Mean of all.
pub fn mean(costs: &[&Cost], of: impl Fn(&Cost) -> u64) -> f64 {
    costs.iter().map(|cost| of(cost) as f64).sum::<f64>() / costs.len() as f64
}
