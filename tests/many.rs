//! What an agent costs does not grow with the number of nodes: requests, bytes, events and rounds are counted, of agents of the real code beside
//! a real planner. No assertion depends on how fast this machine is: until all are online, the writes that are allowed grow with the time that took; after
//! that, the test moves the clock itself.
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

#[path = "support/many/mod.rs"]
mod many;

use std::{sync::Arc, time::Duration};

use api::{FluxInstance, FluxNode, INSTANCE, NAMESPACE};
use apiserver::{Store, router};
use axum::{body::Body as ServerBody, http::header::AUTHORIZATION};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    client::Body,
};
use many::{
    Cost, Fleet,
    counts::Counts,
    mean,
    objects::{flip_readiness, heartbeat},
};
use serde_json::json;
use tokio::{
    runtime::Handle,
    time::{Instant, pause, sleep},
};
use tower::ServiceExt;

/// A few and many nodes.
const NODES: [u32; 2] = [20, 200];
/// How much more a plain agent may cost among many.
const FLAT: f64 = 1.3;
/// Twice an agent's longest rest between two rounds: by then, what began at the start is over.
const SETTLES: Duration = Duration::from_mins(1);
/// In this time, a fifteenth of all agents have a round for no other reason than that they have rested for thirty seconds.
const MOMENT: Duration = Duration::from_secs(2);
/// Shorter than a watch, which ends after 290 s: so each ends and begins again once at most, however long the start took.
const IDLE: Duration = Duration::from_secs(285);

/// A client of the embedded API server, which is called without a network.
fn embedded() -> Client {
    let router = router(Arc::new(Store::new()), "token".to_owned());
    let service = tower::service_fn(move |mut request: http::Request<Body>| {
        request.headers_mut().insert(AUTHORIZATION, "Bearer token".parse().unwrap());
        router.clone().oneshot(request.map(ServerBody::new))
    });
    Client::new(service, NAMESPACE)
}

/// What happened to one number of nodes.
struct Counted {
    nodes: u32,
    lead: usize,
    planner: usize,
    start_took: Duration,
    start: Vec<Cost>,
    idle: Vec<Cost>,
    heartbeats: Vec<Cost>,
    rollout: Vec<Cost>,
    one_node: Vec<Cost>,
    each_node: Vec<Cost>,
    instance: Vec<Cost>,
}

impl Counted {
    /// Of these, the agents that are neither the lead's nor the planner, nor watch the planner's Lease, as those of the lowest ranks do.
    fn plain<'a>(&self, costs: &'a [Cost]) -> Vec<&'a Cost> {
        let all = costs.iter().zip(&self.idle).enumerate();
        let is_plain = |(number, (_, idle)): &(usize, (&Cost, &Cost))| {
            *number != self.lead && *number != self.planner && !idle.watches_lease()
        };
        all.filter(is_plain).map(|(_, (cost, _))| cost).collect()
    }

    async fn count(nodes: u32) -> Self {
        let server = embedded();
        let mut fleet = Fleet::make(server.clone(), move || server.clone(), Handle::current(), nodes).await;
        let begin = Instant::now();
        fleet.start(0..nodes as usize);
        fleet.online(nodes as usize).await;
        let (start, start_took) = (fleet.costs(), begin.elapsed());
        pause();
        sleep(SETTLES).await;
        let names: Vec<_> = fleet.agents.iter().map(|agent| agent.node.clone()).collect();
        let admin = fleet.admin.clone();
        let beats = async { assert_eq!(heartbeat(&admin, names.iter().map(String::as_str)).await, nodes) };
        let heartbeats = during(&fleet, beats).await;
        let rollout = during(&fleet, flip_readiness(&admin, &names)).await;
        let one_node = during(&fleet, change_reports(&admin, &names[7..8])).await;
        sleep(SETTLES).await;
        let each_node = during(&fleet, change_reports(&admin, &names)).await;
        sleep(SETTLES).await;
        let instance = during(&fleet, change_count(&admin)).await;
        sleep(SETTLES).await;
        let before = fleet.costs();
        sleep(IDLE).await;
        let idle = fleet.since(&before);
        let (lead, planner) = (fleet.lead(), fleet.planner().await);
        Self { nodes, lead, planner, start_took, start, idle, heartbeats, rollout, one_node, each_node, instance }
    }
}

/// What each agent costs while `this` happens, and in the moment after it.
async fn during(fleet: &Fleet, this: impl Future<Output = ()>) -> Vec<Cost> {
    let before = fleet.costs();
    this.await;
    sleep(MOMENT).await;
    fleet.since(&before)
}

/// Somebody edits the reports of these nodes' agents, who write them anew.
async fn change_reports(client: &Client, nodes: &[String]) {
    let api = Api::<FluxNode>::namespaced(client.clone(), NAMESPACE);
    for node in nodes {
        let edited = Patch::Merge(json!({"status": {"message": "edited"}}));
        api.patch_status(node, &PatchParams::default(), &edited).await.unwrap();
    }
}

/// Somebody edits a count in the FluxInstance's status, and the planner writes it anew: two events for each agent.
async fn change_count(client: &Client) {
    let api = Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE);
    let edited = Patch::Merge(json!({"status": {"online": 3}}));
    api.patch_status(INSTANCE, &PatchParams::default(), &edited).await.unwrap();
}

/// Bytes of all but these.
fn bytes_without(counts: &Counts, without: &[&str]) -> u64 {
    counts.bytes.iter().filter(|(what, _)| !without.contains(&what.as_str())).map(|(_, bytes)| bytes).sum()
}

/// What a broker reads of all others at its start, and what all agents are sent while nodes come up.
const OF_ALL: [&str; 3] = ["get configmaps/flux-roster", "get configmaps/flux-broker", "watch fluxinstances"];

/// Runs this number of nodes in a runtime of its own, which ends with all agents.
fn run(nodes: u32) -> Counted {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(Counted::count(nodes))
}

#[test]
fn what_an_agent_costs_does_not_grow_with_the_number_of_nodes() {
    let [few, many] = NODES.map(run);
    for (what, of, most) in [
        ("requests at the start", (|counted| (&counted.start, Cost::requests)) as Part, 40.0),
        ("rounds at the start", |counted| (&counted.start, |cost| cost.rounds), 15.0),
        ("bytes at the start", |counted| (&counted.start, |cost| bytes_without(&cost.own, &OF_ALL)), 30_000.0),
        ("requests while idle", |counted| (&counted.idle, Cost::requests), 5.0),
        ("rounds while idle", |counted| (&counted.idle, |cost| cost.rounds), 11.0),
        ("bytes while idle", |counted| (&counted.idle, Cost::bytes), 2000.0),
    ] {
        let [few, many] = [&few, &many].map(|counted| {
            let (costs, of) = of(counted);
            mean(&counted.plain(costs), of)
        });
        assert!(many <= most && many <= FLAT * few, "{what}: {few} of few, {many} of many, at most {most}");
    }
    // Sent to each node, as it must be, so it is small.
    let of_all = |cost: &Cost| cost.own.all_bytes() - bytes_without(&cost.own, &OF_ALL[..2]);
    let more = mean(&many.plain(&many.start), of_all) - mean(&few.plain(&few.start), of_all);
    assert!(more <= f64::from(300 * (NODES[1] - NODES[0])), "{more} bytes of roster and broker.toml");
    for counted in [&few, &many] {
        counts_are_gathered(counted);
        only_those_concerned_wake(counted);
    }
}

/// Writes of the FluxInstance's status at the start that change more than counts: phases, conditions, the lead.
const OTHER_WRITES: u128 = 10;

/// Every agent receives each write of the FluxInstance's status. So while only counts and words change, the planner waits 20 ms for each Node
/// between two writes (`COUNT_PAUSE` in crate `planner`; at most 20 s, from 1,000 Nodes on).
fn counts_are_gathered(counted: &Counted) {
    let writes_of = |cost: &Cost| cost.planner.requests.get("replace fluxinstances/flux/status").copied();
    let writes: u64 = counted.start.iter().filter_map(writes_of).sum();
    assert!(writes > 0, "no write of the status was counted");
    let due = counted.start_took.as_millis() / u128::from(20 * counted.nodes);
    assert!(
        u128::from(writes) <= OTHER_WRITES + due,
        "{writes} writes in {:?} among {}",
        counted.start_took,
        counted.nodes
    );
}

/// What is counted of each agent, in one part of the run.
type Part = for<'a> fn(&'a Counted) -> (&'a Vec<Cost>, fn(&Cost) -> u64);

fn only_those_concerned_wake(counted: &Counted) {
    let nodes = counted.nodes;
    let sum = |costs: &[Cost], of: fn(&Cost) -> u64| counted.plain(costs).into_iter().map(of).sum::<u64>();
    for (what, costs, concerned, events) in [
        ("heartbeats of all Nodes", &counted.heartbeats, 0, 0),
        ("a rollout", &counted.rollout, 0, 0),
        ("an edited report", &counted.one_node, 1, 2),
        // The FluxInstance as it was edited, and as the planner wrote it then.
        ("a count of the instance", &counted.instance, 0, 2 * counted.plain(&counted.instance).len() as u64),
    ] {
        let cost = [sum(costs, Cost::requests), sum(costs, Cost::events), sum(costs, |cost| cost.rounds)];
        assert!(cost[0] <= concerned && cost[1] <= events, "{what} among {nodes}: {cost:?}");
        assert!(cost[2] <= u64::from(nodes / 4), "{what} among {nodes} wakes others: {cost:?}");
    }
    for cost in counted.plain(&counted.each_node) {
        assert_eq!((cost.requests(), cost.events()), (1, 2), "each writes its own report: {cost:?}");
        assert!(cost.rounds <= 2, "{cost:?}");
    }
    // The lead's agent looks after the whole instance at the cost of one more watch, and looks at the Lease or watches it.
    let lead = &counted.idle[counted.lead];
    assert!(lead.own.all_requests() <= 6, "{lead:?}");
    let of_planner = &counted.idle[counted.planner].planner;
    let renews = of_planner.requests["replace leases/flux-planner"];
    assert!(of_planner.all_requests() - renews <= 20, "an idle planner asks for nothing but its Lease: {of_planner:?}");
}
