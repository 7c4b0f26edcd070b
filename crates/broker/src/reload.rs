//! The live change of what a running instance declares (flux-config(1), flux-module(1)).

use std::{collections::BTreeMap, time::Duration};

use futures::{FutureExt, Stream, StreamExt};
use nix::errno::Errno;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::{
    message::ANY,
    rfc3::{Client, RpcError},
    status::{held_names, parse},
};

/// For one step.
const TIMEOUT: Duration = Duration::from_secs(60);
/// A scheduler that is loaded hears of all running jobs first: Fluxion takes 4 ms for each of them.
const ONLINE_TIMEOUT: Duration = Duration::from_secs(900);
/// The job manager tells nobody that a scheduler is online.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How often a scheduler is loaded at most until no job has ended meanwhile.
const MAX_LOADS: usize = 8;
/// In the order in which they are loaded.
const FLUXION: [&str; 3] = ["sched-fluxion-resource", "sched-fluxion-feasibility", "sched-fluxion-qmanager"];
const SIMPLE: &str = "sched-simple";
const RESOURCE: &str = "resource";
/// Why no queue is started while no scheduler is (job-manager queues.c).
pub const SCHEDULER_IS_OFFLINE: &str = "Scheduler is offline";

/// Loads what `configuration` makes (flux-config(1) `load`) and has the lead take it in; `configuration` gets the names of the
/// ranks that jobs hold. The scheduler is away for a moment, and running jobs stay. If this is killed in between, the next run
/// does all of it again, so it ends with a scheduler that schedules.
///
/// # Errors
/// The step that failed; [`ReloadError::Configuration`] if `configuration` makes none.
pub async fn reload(
    client: &Client,
    configuration: impl FnOnce(&BTreeMap<u32, String>) -> Result<Value, String>,
) -> Result<(), ReloadError> {
    let loaded = modules(client).await?;
    let is_loaded = |module: &&str| loaded.iter().any(|loaded| loaded == module);
    // Which scheduler this instance has, if it is off right now because an earlier run was killed: Fluxion where the
    // package set brings it (its modprobe priority says so, flux-sched etc/modprobe/modprobe.d/fluxion.toml).
    let simple = is_loaded(&SIMPLE);
    for module in [SIMPLE].iter().chain(FLUXION.iter().rev()).filter(|module| is_loaded(module)) {
        remove(client, module).await?;
    }
    // Whatever comes of it, the instance gets its scheduler back.
    let taken_in = take_in(client, configuration).await;
    if taken_in.is_ok() && is_loaded(&RESOURCE) {
        remove(client, RESOURCE).await?;
    }
    if taken_in.is_ok() || !is_loaded(&RESOURCE) {
        load(client, RESOURCE).await?;
    }
    load_scheduler(client, simple, taken_in.as_ref().is_ok_and(|has_housekeeping| !has_housekeeping)).await?;
    taken_in.map(drop)
}

/// Loads what `configuration` makes; true if it has housekeeping after jobs.
async fn take_in(
    client: &Client,
    configuration: impl FnOnce(&BTreeMap<u32, String>) -> Result<Value, String>,
) -> Result<bool, ReloadError> {
    // Without a scheduler, no further job can begin on a rank whose name is about to change.
    let held = held_names(client).await?;
    let configuration = configuration(&held).map_err(ReloadError::Configuration)?;
    let has_housekeeping = configuration["job-manager"].get("housekeeping").is_some();
    ask(client, "config.load", configuration).await?;
    Ok(has_housekeeping)
}

/// Loads the scheduler, flux-core's own if it is `simple`, and sees to it that it holds no core of a job that has ended.
/// `ends_free_cores`: the cores of a job are free as soon as it has ended; after it, housekeeping may go on on its cores.
async fn load_scheduler(client: &Client, simple: bool, ends_free_cores: bool) -> Result<(), ReloadError> {
    let mut ended = EndedJobs::watch(client).await?;
    let is_fluxion = !simple && has_fluxion(load(client, FLUXION[0]).await)?;
    let scheduler: &[&str] = if is_fluxion { &FLUXION } else { &[SIMPLE] };
    let mut missing = &scheduler[usize::from(is_fluxion)..];
    for _ in 1..MAX_LOADS {
        load_all(client, missing).await?;
        let ended = ended.so_far();
        if is_fluxion && ends_free_cores {
            return Ok(free_again(client, &ended).await?);
        }
        if ended.is_empty() {
            return Ok(());
        }
        // It may hold cores of jobs that have ended; loaded again, it hears of those that run.
        for module in scheduler.iter().rev() {
            remove(client, module).await?;
        }
        missing = scheduler;
    }
    load_all(client, missing).await?;
    if ended.so_far().is_empty() { Ok(()) } else { Err(ReloadError::JobsKeptEnding) }
}

/// Loads the rest of a scheduler, and waits until the job manager has taken it.
async fn load_all(client: &Client, modules: &[&str]) -> Result<(), ReloadError> {
    for module in modules {
        load(client, module).await?;
    }
    until_online(client).await
}

/// Why a live change was not made in whole. The next one does all of it again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The broker.
    #[error(transparent)]
    Broker(#[from] RpcError),
    /// There is no configuration to load.
    #[error("no configuration can be made for the running instance: {0}")]
    Configuration(String),
    /// However often the scheduler was loaded, jobs ended meanwhile: it may hold their cores.
    #[error(
        "the scheduler was loaded {MAX_LOADS} times, and jobs ended each time before it was ready, so it may hold their cores"
    )]
    JobsKeptEnding,
    /// A scheduler is loaded, and the job manager has not taken it.
    #[error("the scheduler is loaded but still offline after {} s", ONLINE_TIMEOUT.as_secs())]
    Offline,
}

/// The jobs that end from a moment on. The job manager tells a scheduler which jobs hold resources when it says hello, and which
/// jobs have given theirs back once it is ready. Nobody hears of a job that ends in between (flux-core 0.88, job-manager
/// alloc.c: `hello_cb`, `ready_cb`, `alloc_send_free_request`), so the scheduler would hold its cores for ever.
struct EndedJobs<S>(S);

impl EndedJobs<()> {
    /// Watches from now on.
    async fn watch(
        client: &Client,
    ) -> Result<EndedJobs<impl Stream<Item = Result<Value, RpcError>> + Send + Unpin + use<>>, RpcError> {
        let topic = "job-manager.events-journal";
        let mut journal = client.stream(topic, ANY, &json!({ "full": false, "allow": { "free": 1 } }))?;
        let sentinel = async {
            while let Some(told) = journal.next().await {
                let told: Told = parse(topic, told?)?;
                if told.id == SENTINEL {
                    return Ok(());
                }
            }
            Err(RpcError::Closed)
        };
        let late = |_| RpcError::Timeout { topic: topic.to_owned(), seconds: TIMEOUT.as_secs() };
        timeout(TIMEOUT, sentinel).await.map_err(late)??;
        Ok(EndedJobs(journal))
    }
}

impl<S: Stream<Item = Result<Value, RpcError>> + Unpin> EndedJobs<S> {
    /// Jobs that ended since the last call. What the job manager says before it answers a request comes before that answer.
    fn so_far(&mut self) -> Vec<i64> {
        let mut ended = Vec::new();
        while let Some(Some(Ok(told))) = self.0.next().now_or_never() {
            ended.extend(
                serde_json::from_value::<Told>(told).ok().filter(|told| !told.events.is_empty()).map(|told| told.id),
            );
        }
        ended
    }
}

/// One response of the job manager's journal.
#[derive(Deserialize)]
struct Told {
    id: i64,
    #[serde(default)]
    events: Vec<Value>,
}

/// Ends the backlog: from here on the journal tells what happens (job-manager journal.c).
const SENTINEL: i64 = -1;

/// Waits until the job manager has taken the scheduler, which answers a ping earlier than that.
async fn until_online(client: &Client) -> Result<(), ReloadError> {
    let look = async {
        while is_scheduler_offline(client).await? {
            sleep(LOOK_EVERY).await;
        }
        Ok(())
    };
    timeout(ONLINE_TIMEOUT, look).await.map_err(|_| ReloadError::Offline)?
}

/// True if no scheduler is online. The job manager gives this reason even for a queue that somebody stopped.
async fn is_scheduler_offline(client: &Client) -> Result<bool, RpcError> {
    #[derive(Deserialize)]
    struct Queues {
        queues: Vec<String>,
    }
    #[derive(Deserialize)]
    struct Queue {
        #[serde(default)]
        stop_reason: String,
    }
    let topic = "job-manager.queue-list";
    let Queues { queues } = parse(topic, ask(client, topic, Value::Null).await?)?;
    let topic = "job-manager.queue-status";
    // An instance without queues has one without a name.
    let which = queues.first().map_or_else(|| json!({}), |name| json!({ "name": name }));
    let queue: Queue = parse(topic, ask(client, topic, which).await?)?;
    Ok(queue.stop_reason == SCHEDULER_IS_OFFLINE)
}

/// Tells Fluxion which jobs have ended, as the job manager would have. Fluxion finds a job by its id, and only complains in its
/// log about a job that it does not hold (0.54, qmanager `jobmanager_free_cb`, `queue_policy_base_t::remove`).
async fn free_again(client: &Client, ended: &[i64]) -> Result<(), RpcError> {
    for id in ended {
        client.notify("sched.free", ANY, &json!({ "id": id, "R": {}, "final": true }))?;
    }
    if ended.is_empty() {
        return Ok(());
    }
    // Its answer says that it has heard all of them.
    ask(client, &format!("{}.ping", FLUXION[2]), json!({})).await.map(drop)
}

/// Only where there is no such module: whatever else is in its way, Fluxion is not exchanged for another scheduler.
fn has_fluxion(loaded: Result<(), RpcError>) -> Result<bool, RpcError> {
    match loaded {
        Err(RpcError::Service { errnum, .. }) if errnum == Errno::ENOENT as u32 => Ok(false),
        other => other.map(|()| true),
    }
}

async fn ask(client: &Client, topic: &str, payload: Value) -> Result<Value, RpcError> {
    client.rpc_within(TIMEOUT, topic, ANY, payload).await
}

async fn remove(client: &Client, module: &str) -> Result<(), RpcError> {
    ask(client, "module.remove", json!({ "name": module })).await.map(drop)
}

async fn load(client: &Client, module: &str) -> Result<(), RpcError> {
    ask(client, "module.load", json!({ "path": module, "args": [] })).await.map(drop)
}

async fn modules(client: &Client) -> Result<Vec<String>, RpcError> {
    #[derive(Deserialize)]
    struct Modules {
        mods: Vec<Module>,
    }
    #[derive(Deserialize)]
    struct Module {
        name: String,
    }
    let topic = "module.list";
    let Modules { mods } = parse(topic, ask(client, topic, Value::Null).await?)?;
    Ok(mods.into_iter().map(|module| module.name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fluxion_is_never_exchanged_for_another_scheduler_because_it_fails_or_is_slow() {
        let topic = || "module.load".to_owned();
        let refused = |errno: Errno| RpcError::Service { topic: topic(), errnum: errno as u32, text: String::new() };
        assert!(has_fluxion(Ok(())).unwrap());
        assert!(!has_fluxion(Err(refused(Errno::ENOENT))).unwrap());
        assert!(has_fluxion(Err(refused(Errno::EINVAL))).is_err());
        assert!(has_fluxion(Err(RpcError::Timeout { topic: topic(), seconds: 60 })).is_err());
    }
}
