//! What a planner costs in a large cluster, in a process of its own, with a real API server: memory, time of a round, a join, failover.
//! Nodes, agents and hosts are played: each node's report is what its agent would write next.
//!
//!     KUBEBUILDER_ASSETS=… cargo bench --bench planner -- NODES
//!
//! Prints a line of JSON.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[allow(dead_code)]
#[path = "../tests/support/crd_server.rs"]
mod crd_server;
#[path = "../tests/support/many/mod.rs"]
mod many;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use api::{
    Adopted, Facts, FluxInstance, FluxInstanceSpec, FluxInstanceStatus, FluxNode, FluxNodeSpec, FluxNodeStatus,
    INSTANCE, IdSet, LEASE_PLANNER, NAMESPACE, NodePhase, PackageSet, ROSTER_FORMAT, Resources, Want,
};
use cluster::lease_rules::Place;
use crd_server::{
    LOOK_AGAIN, WITHOUT_CONTROLLERS, api_server::ApiServer, as_agent, client, config, make_roles_and_priority_level,
};
use futures::{StreamExt, stream};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt, wait::await_condition, watcher},
};
use many::{
    objects::{self, CORES, boot_id, heartbeat, node_name},
    time_join,
};
use metrics::{Format, Metrics};
use model::broker_names::spare_name;
use serde_json::json;
use tokio::{
    sync::{OnceCell, watch},
    time::sleep,
};

/// Requests to the API server at a time.
const AT_ONCE: usize = 32;
/// Nodes that join one after the other once all others are online.
const JOINS: u32 = 11;
/// After a join, until what it has begun is over.
const SETTLES: Duration = Duration::from_secs(2);
/// How long each phase is in which nothing happens.
const IDLE: Duration = Duration::from_secs(20);

fn main() {
    let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench").collect::<Vec<_>>();
    let arguments = arguments.iter().map(String::as_str).collect::<Vec<_>>();
    // As the agent's own.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    match arguments[..] {
        ["planner", kubeconfig, name, rank] => runtime.block_on(plan(kubeconfig, name, rank.parse().unwrap())),
        [nodes] => runtime.block_on(measure(nodes.parse().unwrap())),
        _ => panic!("usage: cargo bench --bench planner -- NODES"),
    }
}

/// Is a candidate for the Lease, and the planner, until stdin ends. Answers each line of it with its metrics.
async fn plan(kubeconfig: &str, name: &str, rank: u32) {
    let metrics = Metrics::default();
    let config = as_agent(config(Path::new(kubeconfig)).await);
    let client = cluster::counted_client(config, &metrics).unwrap();
    let (_place, place) = watch::channel(Place { rank: Some(rank), agents: 0 });
    tokio::spawn(planner::run(client, name.to_owned(), place, metrics.clone()));
    let answering = tokio::task::spawn_blocking(move || {
        for _ in std::io::stdin().lines() {
            print!("{}", metrics.text(Format::OpenMetrics));
            std::io::stdout().flush().unwrap();
        }
    });
    answering.await.unwrap();
}

/// A planner, or a candidate, in a process of its own; killed when dropped.
struct Planner {
    process: Child,
    answers: BufReader<ChildStdout>,
}

impl Planner {
    fn start(kubeconfig: &Path, name: &str, rank: u32) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("planner").arg(kubeconfig).args([name, &rank.to_string()]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        Self { process, answers }
    }

    /// Sum of these series of its metrics.
    fn metric(&mut self, name: &str) -> f64 {
        writeln!(self.process.stdin.as_ref().unwrap()).unwrap();
        let lines = (&mut self.answers).lines().map(|line| line.unwrap()).take_while(|line| line != "# EOF");
        let lines: Vec<_> = lines.collect();
        let of =
            |line: &String| line.strip_prefix("flux_distribute_")?.strip_prefix(name)?.rsplit(' ').next()?.parse().ok();
        lines.iter().filter_map(|line: &String| -> Option<f64> { of(line) }).sum()
    }

    fn rounds(&mut self) -> (f64, f64) {
        (self.metric("planner_round_seconds_count"), self.metric("planner_round_seconds_sum"))
    }

    fn requests(&mut self) -> f64 {
        self.metric("api_requests_total")
    }

    /// A value of its /proc/PID/status, in MiB, rounded down.
    fn mebibytes(&self, what: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(what)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
    }

    /// Seconds of a processor so far. Linux counts hundredths.
    fn cpu_secs(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
    }
}

impl Drop for Planner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What the agents of these nodes write.
struct Agents {
    client: Client,
    digest: String,
    instance_uid: String,
    instance_id: OnceCell<String>,
}

impl Agents {
    /// Lets the agent of node `number` begin: its host is known, and the packages are there.
    async fn begin(&self, number: u32) {
        let node_name = node_name(number);
        let spec = FluxNodeSpec { node_name: node_name.clone(), ..FluxNodeSpec::default() };
        let nodes = Api::<FluxNode>::namespaced(self.client.clone(), NAMESPACE);
        nodes.create(&PostParams::default(), &FluxNode::new(&node_name, spec)).await.unwrap();
    }

    /// Has each agent follow what the planner wants of its node, until it is dropped.
    async fn follow(&self) {
        let nodes = Api::<FluxNode>::namespaced(self.client.clone(), NAMESPACE);
        let events = watcher(nodes.clone(), watcher::Config::default()).default_backoff().applied_objects();
        let nodes = &nodes;
        let writing = events.for_each_concurrent(AT_ONCE, async |event| {
            let Ok(node) = event else { return };
            let next = self.report(&node.spec).await;
            if node.status.as_ref() != Some(&next) {
                let status = Patch::Merge(json!({"status": next}));
                // What fails, or is overtaken, the next event brings back.
                let _ = nodes.patch_status(&node.name_any(), &PatchParams::default(), &status).await;
            }
        });
        writing.await;
    }

    async fn report(&self, spec: &FluxNodeSpec) -> FluxNodeStatus {
        let number = node_number(&spec.node_name);
        let facts = Facts {
            resources: Resources { cores: CORES, gpus: 0 },
            memory_mib: 64 << 10,
            platform: "linux-64".to_owned(),
            glibc: "2.36".to_owned(),
            boot_id: boot_id(number),
            systemd: true,
            static_cpus: false,
            prefix: "/opt/flux-distribute".to_owned(),
        };
        let adopted = match spec.rank.filter(|_| spec.want == Want::Run) {
            Some(rank) => Some(self.broker(spec, rank).await),
            None => None,
        };
        let is_lead = adopted.as_ref().is_some_and(|adopted| adopted.rank == 0);
        FluxNodeStatus {
            phase: if adopted.is_some() { NodePhase::Online } else { NodePhase::Waiting },
            facts: Some(facts),
            digest: Some(self.digest.clone()),
            flux_version: adopted.as_ref().map(|_| "0.88.0".to_owned()),
            applied_revision: is_lead.then_some(spec.revision),
            allocated: is_lead.then(IdSet::default),
            adopted,
            roster_format: ROSTER_FORMAT,
            agent_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            ..FluxNodeStatus::default()
        }
    }

    async fn broker(&self, spec: &FluxNodeSpec, rank: u32) -> Adopted {
        let published = async || cluster::published::read_roster(&self.client).await.unwrap().unwrap().0.instance_id;
        Adopted {
            rank,
            // Which of its two possible names a broker has does not matter here.
            broker_name: spare_name(rank),
            node_uid: spec.node_uid.clone().unwrap(),
            instance_uid: Some(self.instance_uid.clone()),
            instance_id: self.instance_id.get_or_init(published).await.clone(),
            epoch: spec.epoch,
            pid: 4711,
            digest: self.digest.clone(),
        }
    }
}

/// The number of the node of this name: the inverse of [`node_name`].
fn node_number(name: &str) -> u32 {
    let address = name.strip_prefix("ip-").unwrap().split('.').next().unwrap().replace('-', ".");
    let first = node_name(0).strip_prefix("ip-").unwrap().split('.').next().unwrap().replace('-', ".");
    let bits = |address: &str| address.parse::<std::net::Ipv4Addr>().unwrap().to_bits();
    bits(&address) - bits(&first)
}

async fn measure(nodes: u32) {
    let server = ApiServer::up_with(&[WITHOUT_CONTROLLERS]);
    let kubeconfig = server.kubeconfig();
    let client = client(&server).await;
    let begin = Instant::now();
    let instance_uid = objects::make(&client, nodes + JOINS).await;
    make_roles_and_priority_level(&client).await;
    let of_agents = cluster::client(as_agent(config(&kubeconfig).await)).unwrap();
    let spec: FluxInstanceSpec = serde_json::from_value(objects::spec(1)).unwrap();
    let digest = PackageSet::Bundle(spec.packages.bundle.unwrap()).digest();
    let agents: &Agents =
        Box::leak(Box::new(Agents { client: of_agents, digest, instance_uid, instance_id: OnceCell::new() }));
    eprintln!("{nodes} nodes made in {:?}", begin.elapsed());

    let mut planner = Planner::start(&kubeconfig, "first", 0);
    holds_lease(&client, "first").await;
    let mut candidate = Planner::start(&kubeconfig, "second", 1);
    let following = tokio::spawn(agents.follow());
    let begin = Instant::now();
    let appeared = async {
        stream::iter(0..nodes).for_each_concurrent(AT_ONCE, |number| agents.begin(number)).await;
        begin.elapsed().as_secs_f64()
    };
    let members = async {
        until(&client, |status| status.size >= nodes).await;
        begin.elapsed().as_secs_f64()
    };
    let online = async {
        until(&client, |status| status.online >= nodes).await;
        begin.elapsed().as_secs_f64()
    };
    let all = async { tokio::join!(appeared, members, online) };
    let ((appeared, members, online), most) = watch_requests(&mut planner, all).await;
    let requests = planner.requests();
    let start = json!({
        "appeared_secs": appeared, "roster_secs": members, "online_secs": online, "cpu_secs": planner.cpu_secs(),
        "requests": requests, "requests_in_busiest_second": most, "rounds": planner.rounds().0,
    });
    eprintln!("{start}");
    sleep(IDLE).await;

    let (cpu, requests) = (planner.cpu_secs(), planner.requests());
    sleep(IDLE).await;
    let minutes = IDLE.as_secs_f64() / 60.0;
    let idle_share = (planner.cpu_secs() - cpu) / IDLE.as_secs_f64();
    let idle = json!({"cpu_share": idle_share,
                      "requests_per_minute": (planner.requests() - requests) / minutes});
    let (cpu, begin) = (planner.cpu_secs(), Instant::now());
    let names: Vec<_> = (0..nodes).map(node_name).collect();
    let written = heartbeat(&client, names.iter().map(String::as_str)).await;
    assert_eq!(written, nodes);
    sleep(SETTLES).await;
    let beside = idle_share * begin.elapsed().as_secs_f64();
    let cpu_of_heartbeat = (planner.cpu_secs() - cpu - beside) / f64::from(nodes);

    let ((rounds, secs), mut joins) = (planner.rounds(), Vec::new());
    for number in nodes..nodes + JOINS {
        let join = time_join(&client, &node_name(number), agents.begin(number)).await;
        joins.push(join.as_secs_f64());
        sleep(SETTLES).await;
    }
    let (rounds_then, secs_then) = planner.rounds();
    let round_secs = (secs_then - secs) / (rounds_then - rounds);
    let memory = json!({"now": planner.mebibytes("VmRSS"), "most": planner.mebibytes("VmHWM")});

    let begin = Instant::now();
    let requests = candidate.requests();
    drop(planner);
    holds_lease(&client, "second").await;
    let taken = begin.elapsed().as_secs_f64();
    while candidate.rounds().0 < 1.0 {
        sleep(LOOK_AGAIN).await;
    }
    let failover = json!({"taken_secs": taken, "planned_secs": begin.elapsed().as_secs_f64(),
                          "requests": candidate.requests() - requests, "most_memory": candidate.mebibytes("VmHWM")});
    following.abort();
    let result = json!({
        "nodes": nodes, "start": start, "idle": idle, "cpu_secs_of_heartbeat": cpu_of_heartbeat,
        "join_secs": joins,
        "round_secs": round_secs, "memory_mib": memory, "failover": failover,
    });
    println!("{result}");
}

/// Waits until this candidate is the planner.
async fn holds_lease(client: &Client, name: &str) {
    let leases = Api::<Lease>::namespaced(client.clone(), NAMESPACE);
    let is_holder = |lease: Option<&Lease>| {
        let holder = lease.and_then(|lease| lease.spec.as_ref()?.holder_identity.as_deref());
        holder == Some(name)
    };
    await_condition(leases, LEASE_PLANNER, is_holder).await.unwrap();
}

/// Waits until the FluxInstance's status is so.
async fn until(client: &Client, is_so: impl Fn(&FluxInstanceStatus) -> bool) {
    let instances = Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE);
    let is_so =
        |instance: Option<&FluxInstance>| instance.and_then(|instance| instance.status.as_ref()).is_some_and(&is_so);
    await_condition(instances, INSTANCE, is_so).await.unwrap();
}

/// Returns what `until` returns, and the most requests that the planner has sent in one second before that.
async fn watch_requests<T>(planner: &mut Planner, until: impl Future<Output = T>) -> (T, f64) {
    let (mut until, mut most, mut before) = (std::pin::pin!(until), 0.0_f64, 0.0);
    loop {
        tokio::select! {
            done = &mut until => return (done, most),
            () = sleep(Duration::from_secs(1)) => {
                let now = planner.requests();
                (most, before) = (most.max(now - before), now);
            }
        }
    }
}
