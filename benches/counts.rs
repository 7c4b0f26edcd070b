//! What many agents cost a real API server: requests, bytes, events and rounds of each, from their start and afterwards, and how long another agent
//! takes to become the planner. The agents are of the real code and run in this process; their hosts, Flux and kubelets are played. On each host
//! the packages are there from the beginning, so installing them is not counted.
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
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use api::NAMESPACE;
use crd_server::{
    LOOK_AGAIN, WITHOUT_CONTROLLERS, api_server::ApiServer, as_agent, client, config, make_roles_and_priority_level,
};
use http::StatusCode;
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client, Config,
    client::{Body, ConfigExt},
};
use many::{Cost, Fleet, mean, objects::heartbeat, time_join};
use serde_json::{Value, json};
use tokio::{
    runtime::{Builder, Handle},
    time::{interval, sleep},
};
use tower::{BoxError, Layer, ServiceExt, util::option_layer};

/// How often a kubelet writes its Node's status, on clouds that set it so.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// The played kubelets write in at most this many groups, one after the other: real ones don't all write in the same moment.
const GROUPS: usize = 100;
/// The statuses by which the API server turns a request away that it has no time for.
const TURNED_AWAY: [StatusCode; 3] =
    [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE, StatusCode::GATEWAY_TIMEOUT];
/// At most this many Nodes join one after the other once all others are online. Medians of five varied from 131 to 234 ms between runs.
const JOINS: u32 = 15;
/// Pause after a join, so that the next one is not timed while this node's broker starts.
const JOIN_SETTLES: Duration = Duration::from_secs(2);
/// After the last node is online, until what it has begun is over.
const SETTLES: Duration = Duration::from_secs(30);

fn main() {
    let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench").collect::<Vec<_>>();
    let numbers = arguments.iter().map(|number| number.parse().unwrap()).collect::<Vec<u32>>();
    let [seconds, nodes @ ..] = &numbers[..] else { panic!("usage: cargo bench --bench counts -- SECONDS NODES…") };
    for nodes in nodes {
        // A new API server and new runtimes for each number, so that nothing of the number before goes on.
        let runtime = || Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        // Dropped in reverse order: the agents first, because each waits for its planner.
        let (planners, agents) = (runtime(), runtime());
        let counted = agents.block_on(count(*nodes, Duration::from_secs((*seconds).into()), planners.handle()));
        println!("{counted}");
    }
}

async fn count(nodes: u32, steady: Duration, planners: &Handle) -> Value {
    // The first roster names them too: their number must not make that of few nodes much larger.
    let joins = JOINS.min(nodes.div_ceil(10));
    let server = ApiServer::up_with(&[WITHOUT_CONTROLLERS]);
    let client = client(&server).await;
    let config = as_agent(config(&server.kubeconfig()).await);
    let turned_away = Arc::<AtomicU32>::default();
    let counted_away = Arc::clone(&turned_away);
    let new_client = move || multiplexed(&config, Arc::clone(&counted_away));
    let mut fleet = Fleet::make(client.clone(), new_client, planners.clone(), nodes + joins).await;
    make_roles_and_priority_level(&client).await;
    let names: Vec<_> = fleet.agents.iter().map(|agent| agent.node.clone()).collect();
    let (beats, admin) = (Arc::<AtomicU32>::default(), client.clone());
    let counted_beats = Arc::clone(&beats);
    let begin = Instant::now();
    let kubelets = tokio::spawn(async move {
        let groups: Vec<_> = names.chunks(names.len().div_ceil(GROUPS)).collect();
        let mut next = interval(HEARTBEAT / u32::try_from(groups.len()).unwrap());
        for group in groups.iter().cycle() {
            next.tick().await;
            let written = heartbeat(&admin, group.iter().map(String::as_str)).await;
            counted_beats.fetch_add(written, Ordering::Relaxed);
        }
    });
    let before = memory();
    fleet.start(0..nodes as usize);
    fleet.online(nodes as usize).await;
    let online = begin.elapsed();
    eprintln!("{nodes} online after {online:?}");
    let start = fleet.costs();
    sleep(SETTLES).await;
    let bytes_per_agent = memory().saturating_sub(before) * 1024 / u64::from(nodes);
    let settled = fleet.costs();
    sleep(steady).await;
    let steady_costs = fleet.since(&settled);
    let (lead, planner) = (fleet.lead(), fleet.planner().await);
    let between_heartbeats =
        begin.elapsed().as_secs_f64() * f64::from(nodes + joins) / f64::from(beats.load(Ordering::Relaxed));
    let mut join_secs = Vec::new();
    for number in (nodes..nodes + joins).map(|number| number as usize) {
        let joining = fleet.agents[number].node.clone();
        join_secs.push(time_join(&client, &joining, async { fleet.start([number]) }).await.as_secs_f64());
        sleep(JOIN_SETTLES).await;
    }
    fleet.online((nodes + joins) as usize).await;
    let before_failover = fleet.costs();
    let killed = Instant::now();
    fleet.kill(planner).await;
    let successor = loop {
        let now = fleet.planner().await;
        if now != planner {
            break now;
        }
        sleep(LOOK_AGAIN).await;
    };
    let failover = killed.elapsed();
    // The successor lists all objects, and may write what its predecessor could not.
    sleep(SETTLES).await;
    let failover_costs = fleet.since(&before_failover);
    kubelets.abort();
    let is_plain = |number: &usize| ![lead, planner, successor].contains(number) && !settled[*number].watches_lease();
    let plain: Vec<_> = (0..nodes as usize).filter(is_plain).collect();
    let part = |costs: &[Cost]| {
        let plain: Vec<_> = plain.iter().map(|number| &costs[*number]).collect();
        json!({"plain": means(&plain), "lead": whole(&costs[lead].own), "planner": whole(&costs[planner].planner),
               "successor": whole(&costs[successor].planner)})
    };
    json!({
        "nodes": nodes, "online_secs": online.as_secs_f64(), "bytes_of_memory_per_agent": bytes_per_agent,
        "start": part(&start), "steady_secs": steady.as_secs_f64(), "steady": part(&steady_costs),
        "turned_away": turned_away.load(Ordering::Relaxed), "between_heartbeats_secs": between_heartbeats, "join_secs": join_secs,
        "failover_secs": failover.as_secs_f64(), "failover": part(&failover_costs),
    })
}

/// A client with one connection of HTTP/2 for all that it asks. Over HTTP/1.1 each watch takes one, and a process may not have enough files for thousands
/// of agents. What is counted is the same.
fn multiplexed(config: &Config, turned_away: Arc<AtomicU32>) -> Client {
    let mut tls = config.rustls_client_config().unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    let connector = HttpsConnector::from((tcp, Arc::new(tls)));
    let http = HttpClient::builder(TokioExecutor::new()).http2_only(true).build::<_, Body>(connector);
    let http = http.map_err(BoxError::from).map_response(move |answer| {
        turned_away.fetch_add(TURNED_AWAY.contains(&answer.status()).into(), Ordering::Relaxed);
        answer
    });
    let identified = config.extra_headers_layer().unwrap().layer(http);
    let authorized = option_layer(config.auth_layer().unwrap()).layer(identified);
    Client::new(config.base_uri_layer().layer(authorized), NAMESPACE)
}

/// Sums of one client.
fn whole(counts: &many::counts::Counts) -> Value {
    json!({"requests": counts.all_requests(), "bytes": counts.all_bytes(), "events": counts.all_events(),
           "by_request": counts.requests, "by_bytes": counts.bytes})
}

/// Means of these agents. `requests`, `bytes` and `events` include what each asks as a candidate for planner; `by_request` and `by_bytes` do not.
fn means(costs: &[&Cost]) -> Value {
    let mean_of = |part: &dyn Fn(&Cost) -> u64| mean(costs, part);
    json!({
        "agents": costs.len(),
        "requests": mean_of(&Cost::requests),
        "bytes": mean_of(&Cost::bytes),
        "events": mean_of(&Cost::events),
        "rounds": mean_of(&|cost| cost.rounds),
        "resyncs": mean_of(&|cost| cost.resyncs),
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
