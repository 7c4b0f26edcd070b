//! What must hold after every fault, whatever it was.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    thread::sleep,
    time::{Duration, Instant},
};

use api::{FluxNode, IdSet, NodePhase};
use k8s_openapi::{
    api::coordination::v1::Lease,
    jiff::{SignedDuration, Timestamp},
};
use kube::{ResourceExt, api::ListParams};

use crate::{
    harness::Broker,
    processes::{Kind, Process, is_there},
    rows::Row,
    scene::{Hit, Scene},
};

/// How often is looked.
const EVERY: Duration = Duration::from_millis(250);

/// The brokers before a fault.
pub type Before = BTreeMap<String, Broker>;

/// What a fault has cost.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    pub healed: Duration,
    pub jobs_lost: usize,
    pub brokers_restarted: usize,
}

/// Waits until everything is well again.
///
/// # Errors
/// What is lost that must not be, or what is not well in time.
pub fn judge(scene: &mut Scene, row: &Row, before: &Before, hit: &Hit) -> Result<Outcome, String> {
    let limit = Duration::from_secs(row.heals_in);
    let since = Timestamp::now() - SignedDuration::try_from(hit.since.elapsed()).unwrap_or_default();
    let healed = loop {
        keeps_brokers(scene, before, hit)?;
        match look(scene, since).and_then(|()| runs_jobs(scene)).and_then(|()| scene.look_at_gang()) {
            Ok(()) => break hit.since.elapsed(),
            Err(why) if hit.since.elapsed() > limit => {
                return Err(format!("not well after {} s: {why}", limit.as_secs()));
            }
            Err(_) => sleep(EVERY),
        }
    };
    let lost = scene.job_is_lost();
    if let Some(why) = lost.as_ref().filter(|_| !row.job_dies) {
        return Err(format!("the job is lost: {why}"));
    }
    scene.renew(lost.is_some());
    shells_end(scene)?;
    let wrong = scene.rosters.wrong();
    if !wrong.is_empty() {
        return Err(wrong.join("; "));
    }
    keeps_brokers(scene, before, hit)?;
    let after = scene.brokers();
    let restarted = before.iter().filter(|(node, broker)| after.get(*node).is_none_or(|now| now.pid != broker.pid));
    Ok(Outcome { healed, jobs_lost: usize::from(lost.is_some()), brokers_restarted: restarted.count() })
}

/// Runs a job on all nodes; if the job and the pods leave no core free, runs a command by flux-exec(1) instead.
fn runs_jobs(scene: &Scene) -> Result<(), String> {
    let nodes = scene.nodes.to_string();
    let ranks: BTreeSet<u32> = scene.brokers().values().map(|broker| broker.rank).collect();
    let ranks = IdSet(ranks).to_string();
    let said = scene.ask(&if scene.has_free_core {
        ["flux", "run", "-N", &nodes, "-n", &nodes, "hostname"].to_vec()
    } else {
        ["flux", "exec", "-r", &ranks, "hostname"].to_vec()
    })?;
    let ran = said.lines().collect::<BTreeSet<_>>().len();
    if ran == scene.nodes as usize { Ok(()) } else { Err(format!("what was to run on all nodes ran on {said:?}")) }
}

/// A broker that the fault did not hit is the same process.
fn keeps_brokers(scene: &Scene, before: &Before, hit: &Hit) -> Result<(), String> {
    for (node, broker) in before.iter().filter(|(node, _)| !hit.restarted.contains(*node)) {
        if !is_there(broker.pid) {
            return Err(format!("the broker of {node} (pid {}) is gone; now: {:?}", broker.pid, scene.brokers()));
        }
    }
    Ok(())
}

/// One look; what costs much comes last.
pub fn look(scene: &Scene, since: Timestamp) -> Result<(), String> {
    let processes = scene.processes();
    let nodes = scene.nodes as usize;
    for (what, kind) in [("agent", is_agent as fn(&Process) -> bool), ("broker", is_broker)] {
        let found: Vec<_> = processes.iter().filter(|process| kind(process)).collect();
        let on: BTreeSet<_> = found.iter().map(|process| &process.node).collect();
        if found.len() != nodes || on.len() != nodes {
            return Err(format!("not one {what} on each node: {found:?}"));
        }
    }
    let cluster = &scene.cluster;
    let told =
        cluster.wait(cluster.api::<FluxNode>().list(&ListParams::default())).map_err(|error| error.to_string())?;
    for broker in processes.iter().filter(|process| is_broker(process)) {
        let node = told.iter().find(|node| node.spec.node_name == broker.node);
        let node = node.ok_or_else(|| format!("{} has no FluxNode", broker.node))?;
        let status = node.status.clone().unwrap_or_default();
        let message = status.message.unwrap_or_default();
        if status.phase != NodePhase::Online {
            return Err(format!("{} is {:?}: {message}", node.name_any(), status.phase));
        }
        if status.adopted.is_none_or(|adopted| adopted.pid != broker.inner_pid) {
            return Err(format!("{} does not tell of its broker {}", node.name_any(), broker.inner_pid));
        }
    }
    let online = cluster.instance().status.unwrap_or_default().online as usize;
    if online != nodes {
        return Err(format!("the FluxInstance says that {online} are online"));
    }
    one_planner(scene, &processes, since)?;
    stages_end(&processes)?;
    schedules(scene)?;
    let up = scene.ask(&["flux", "resource", "list", "-s", "up", "-no", "{nnodes}"])?;
    if up == nodes.to_string() { Ok(()) } else { Err(format!("the lead says that {up} nodes are up")) }
}

/// By `flux queue status`: `flux resource list` looks healthy without a scheduler.
pub fn schedules(scene: &Scene) -> Result<(), String> {
    let queue = scene.ask(&["flux", "queue", "status"])?;
    let good = queue.contains("Scheduling is started") && !queue.contains("offline");
    if good { Ok(()) } else { Err(queue) }
}

/// A living agent holds the Lease, and it reaches the API server when it renews the Lease.
fn one_planner(scene: &Scene, processes: &[Process], since: Timestamp) -> Result<(), String> {
    let leases = scene.cluster.api::<Lease>();
    let lease = scene.cluster.wait(leases.get_opt("flux-planner")).map_err(|error| error.to_string())?;
    let lease = lease.and_then(|lease| lease.spec).unwrap_or_default();
    if lease.renew_time.is_none_or(|renewed| renewed.0 < since) {
        return Err("no planner has renewed the Lease since".to_owned());
    }
    let holder = lease.holder_identity.unwrap_or_default();
    let name = format!("POD_NAME={holder}\0");
    let named = |pid| fs::read_to_string(format!("/proc/{pid}/environ")).is_ok_and(|text| text.contains(&name));
    let holders = processes.iter().filter(|process| is_agent(process) && named(process.pid)).count();
    if holders == 1 { Ok(()) } else { Err(format!("{holders} agents are the planner {holder:?}")) }
}

fn is_agent(process: &Process) -> bool {
    process.kind == Kind::Agent
}

fn is_broker(process: &Process) -> bool {
    matches!(process.kind, Kind::Broker { .. })
}

/// Host stages end with their agents.
fn stages_end(processes: &[Process]) -> Result<(), String> {
    let parents: BTreeSet<i32> = processes.iter().filter(|process| is_agent(process)).map(|agent| agent.pid).collect();
    let mut stages = processes.iter().filter(|process| process.kind == Kind::Stage);
    let stray = stages.find(|stage| !parents.contains(&stage.parent) || stage.state == 'T');
    stray.map_or(Ok(()), |stray| Err(format!("left over: {stray:?}")))
}

/// Shells of jobs end with their jobs.
fn shells_end(scene: &Scene) -> Result<(), String> {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let shells = scene.processes().into_iter().filter(|process| process.kind == Kind::Shell).count();
        if shells == scene.job_nodes() {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(format!("{shells} shells of jobs"));
        }
        sleep(EVERY);
    }
}
