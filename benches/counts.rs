//! What many agents cost a real API server: requests, bytes, events and rounds of each, in a cold start and afterwards, and how the planner's end is
//! followed. The agents are of the real code and run in this process; their hosts, Flux and kubelets are played.
//!
//!     KUBEBUILDER_ASSETS=… cargo bench --bench counts -- SECONDS NODES…
//!
//! SECONDS: how long to count once all nodes are online. Prints a line of JSON for each number of nodes.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[allow(dead_code)]
#[path = "../tests/support/crd_server.rs"]
mod crd_server;
#[path = "../tests/support/many/mod.rs"]
mod many;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use api::{CONFIGMAP_ROSTER, FluxNode, NAMESPACE};
use crd_server::{LOOK_AGAIN, WITHOUT_CONTROLLERS, api_server::ApiServer, client, config};
use futures::FutureExt;
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client, Config, ResourceExt,
    client::{Body, ConfigExt},
    runtime::wait::await_condition,
};
use many::{Cost, Fleet, mean, objects::heartbeat};
use serde_json::{Value, json};
use tokio::{
    runtime::{Builder, Handle},
    time::{interval, sleep},
};
use tower::{BoxError, Layer, ServiceExt, util::option_layer};

/// kubelets write the status of each Node this often, of clouds that have them do so.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// After the last node is online, until what it has begun is over.
const SETTLES: Duration = Duration::from_secs(30);

fn main() {
    let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench").collect::<Vec<_>>();
    let numbers = arguments.iter().map(|number| number.parse().unwrap()).collect::<Vec<u32>>();
    let [seconds, nodes @ ..] = &numbers[..] else { panic!("usage: cargo bench --bench counts -- SECONDS NODES…") };
    for nodes in nodes {
        // Each with an API server, and runtimes that end with all their agents.
        let runtime = || Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        // Agents end before the planners that they wait for.
        let (planners, agents) = (runtime(), runtime());
        let counted = agents.block_on(count(*nodes, Duration::from_secs((*seconds).into()), planners.handle()));
        println!("{counted}");
    }
}

async fn count(nodes: u32, steady: Duration, planners: &Handle) -> Value {
    let server = ApiServer::up_with(&[WITHOUT_CONTROLLERS]);
    let client = client(&server).await;
    // One node more, which joins later.
    let config = config(&server.kubeconfig()).await;
    let mut fleet = Fleet::make(client.clone(), move || multiplexed(&config), nodes + 1).await;
    fleet.planners = planners.clone();
    let names: Vec<_> = fleet.agents.iter().map(|agent| agent.node.clone()).collect();
    let kubelets = tokio::spawn(async move {
        let mut beats = interval(HEARTBEAT);
        loop {
            beats.tick().await;
            heartbeat(&client, names.iter().map(String::as_str)).await;
        }
    });
    let before = memory();
    let begin = Instant::now();
    fleet.start(0..nodes as usize);
    fleet.online(nodes as usize).await;
    let online = begin.elapsed();
    eprintln!("{nodes} online after {online:?}");
    let start = fleet.costs();
    sleep(SETTLES).await;
    let each = memory().saturating_sub(before) * 1024 / u64::from(nodes);
    let settled = fleet.costs();
    sleep(steady).await;
    let steady_costs = fleet.since(&settled);
    let (lead, planner) = (fleet.lead(), fleet.planner().await);
    let join = join(&mut fleet, nodes as usize).await;
    let before_failover = fleet.costs();
    let begin = Instant::now();
    fleet.kill(planner).await;
    let successor = loop {
        let now = fleet.planner().await;
        if now != planner {
            break now;
        }
        sleep(LOOK_AGAIN).await;
    };
    let failover = begin.elapsed();
    let failover_costs = fleet.since(&before_failover);
    kubelets.abort();
    let is_plain = |number: &usize| ![lead, planner, successor].contains(number) && !settled[*number].watches_lease();
    let plain: Vec<_> = (0..nodes as usize).filter(is_plain).collect();
    let part = |costs: &[Cost]| {
        let plain: Vec<_> = plain.iter().map(|number| &costs[*number]).collect();
        json!({"plain": means(&plain), "lead": whole(&costs[lead].own, costs[lead].rounds),
               "planner": whole(&costs[planner].planner, 0)})
    };
    json!({
        "nodes": nodes, "online_secs": online.as_secs_f64(), "bytes_of_memory_per_agent": each,
        "start": part(&start), "steady_secs": steady.as_secs_f64(), "steady": part(&steady_costs),
        "join_secs": join.as_secs_f64(), "failover_secs": failover.as_secs_f64(), "failover": part(&failover_costs),
    })
}

/// A client with one connection of HTTP/2 for all that it asks. Over HTTP/1.1 each watch takes one, and a process may not have enough files for thousands
/// of agents. What is counted is the same.
fn multiplexed(config: &Config) -> Client {
    let mut tls = config.rustls_client_config().unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    let connector = HttpsConnector::from((tcp, Arc::new(tls)));
    let http = HttpClient::builder(TokioExecutor::new()).http2_only(true).build::<_, Body>(connector);
    let authorized = option_layer(config.auth_layer().unwrap()).layer(http.map_err(BoxError::from));
    Client::new(config.base_uri_layer().layer(authorized), NAMESPACE)
}

/// Starts the agent of node `number`; returns how long the planner takes from its report of the host to the roster that has it.
async fn join(fleet: &mut Fleet, number: usize) -> Duration {
    let (node, client) = (fleet.agents[number].node.clone(), fleet.admin.clone());
    let rosters = Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE);
    let version = rosters.get_metadata(CONFIGMAP_ROSTER).await.unwrap().resource_version();
    let is_another = |roster: Option<&ConfigMap>| roster.is_some_and(|roster| roster.resource_version() != version);
    let has_facts = |node: Option<&FluxNode>| {
        node.and_then(|node| node.status.as_ref()).is_some_and(|status| status.facts.is_some())
    };
    let nodes = Api::<FluxNode>::namespaced(client, NAMESPACE);
    let (reported, published) =
        (await_condition(nodes, &node, has_facts), await_condition(rosters, CONFIGMAP_ROSTER, is_another));
    fleet.start([number]);
    let (first, last) = tokio::join!(
        reported.map(|found| found.map(|_| Instant::now())),
        published.map(|found| found.map(|_| Instant::now()))
    );
    last.unwrap().saturating_duration_since(first.unwrap())
}

/// Sums of one client.
fn whole(counts: &many::counts::Counts, rounds: u64) -> Value {
    json!({"requests": counts.all_requests(), "bytes": counts.all_bytes(), "events": counts.all_events(), "rounds": rounds,
           "by_request": counts.requests, "by_bytes": counts.bytes})
}

/// Means of these agents, with what of the planner is in each.
fn means(costs: &[&Cost]) -> Value {
    let of = |of: &dyn Fn(&Cost) -> u64| mean(costs, of);
    let bytes_of = |what: &str| of(&|cost| cost.own.bytes.get(what).copied().unwrap_or(0));
    json!({
        "agents": costs.len(),
        "requests": of(&Cost::requests),
        "bytes": of(&Cost::bytes),
        "events": of(&Cost::events),
        "rounds": of(&|cost| cost.rounds),
        "resyncs": of(&|cost| cost.resyncs),
        "bytes_of_roster": bytes_of("get configmaps/flux-roster"),
        "bytes_of_broker_toml": bytes_of("get configmaps/flux-broker"),
        "bytes_of_instance": bytes_of("watch fluxinstances"),
        "by_request": by_kind(costs, |cost| &cost.own.requests),
        "by_bytes": by_kind(costs, |cost| &cost.own.bytes),
    })
}

/// Means for each kind of request.
fn by_kind(costs: &[&Cost], counted: fn(&Cost) -> &BTreeMap<String, u64>) -> BTreeMap<String, f64> {
    let all: BTreeSet<_> = costs.iter().flat_map(|cost| counted(cost).keys()).collect();
    let of = |what: &String| mean(costs, |cost| counted(cost).get(what).copied().unwrap_or(0));
    all.into_iter().map(|what| (what.clone(), of(what))).collect()
}

/// Resident memory of this process, in KiB.
fn memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
