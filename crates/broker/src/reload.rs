//! Changes the resources that a running instance declares (flux-config(1), flux-module(1)).

use std::{collections::BTreeMap, time::Duration};

use futures::{FutureExt, Stream, StreamExt};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

pub use super::queues::SCHEDULER_IS_OFFLINE;
use super::{
    job_id::JobId,
    journal::{self, JournalItem},
    message::{ANY, ENOENT},
    queues::is_scheduler_offline,
    rfc3::{Client, RpcError},
    status::{held_names, parse},
};
use model::broker_toml::RenderError;

/// Limit for one step.
const TIMEOUT: Duration = Duration::from_mins(1);
/// Limit for a scheduler to come online. It first hears of all running jobs: Fluxion takes 4 ms for each of them.
const ONLINE_TIMEOUT: Duration = Duration::from_mins(15);
/// The job manager does not announce that a scheduler is online, so it has to be polled.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How often to load a scheduler until no job ends while it loads.
const MAX_LOADS: usize = 8;
/// Fluxion's modules in the order of loading.
const FLUXION: [&str; 3] = ["sched-fluxion-resource", "sched-fluxion-feasibility", "sched-fluxion-qmanager"];
const SIMPLE: &str = "sched-simple";
const RESOURCE: &str = "resource";

/// Builds a configuration, loads it into the lead's broker (flux-config(1) `load`), and restarts the resource and
/// scheduler modules with it. `configuration` gets the names of the ranks that jobs hold. The scheduler is absent for a
/// moment; running jobs continue. If this is interrupted, the next run repeats all of it, so it ends with a scheduler
/// that works.
///
/// # Errors
/// The step that failed; [`ReloadError::Configuration`] if `configuration` fails.
pub async fn reload(
    client: &Client,
    configuration: impl FnOnce(&BTreeMap<u32, String>) -> Result<Value, RenderError>,
) -> Result<(), ReloadError> {
    let loaded = modules(client).await?;
    let is_loaded = |module: &&str| loaded.iter().any(|loaded| loaded == module);
    // Determines which scheduler to load. If none is loaded because an earlier run was interrupted, it is Fluxion if
    // the package set has it (its modprobe priority says so, flux-sched etc/modprobe/modprobe.d/fluxion.toml).
    let simple = is_loaded(&SIMPLE);
    for module in [SIMPLE].iter().chain(FLUXION.iter().rev()).filter(|module| is_loaded(module)) {
        remove(client, module).await?;
    }
    // Even if this fails, the instance gets its scheduler back.
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

/// Builds and loads the configuration; returns true if it has housekeeping after jobs.
async fn take_in(
    client: &Client,
    configuration: impl FnOnce(&BTreeMap<u32, String>) -> Result<Value, RenderError>,
) -> Result<bool, ReloadError> {
    // No scheduler is loaded, so no further job can start on a rank whose name is about to change.
    let held = held_names(client).await?;
    let configuration = configuration(&held)?;
    let has_housekeeping = configuration["job-manager"].get("housekeeping").is_some();
    ask(client, "config.load", configuration).await?;
    Ok(has_housekeeping)
}

/// Loads the scheduler, flux-core's own if `simple`, and ensures that it holds no cores of jobs that have ended. If
/// `ends_free_cores`, the cores of a job are free when it ends; otherwise its housekeeping may still use them.
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
        // The scheduler may hold cores of jobs that have ended. If it is loaded again, it hears only of those that run.
        for module in scheduler.iter().rev() {
            remove(client, module).await?;
        }
        missing = scheduler;
    }
    load_all(client, missing).await?;
    if ended.so_far().is_empty() { Ok(()) } else { Err(ReloadError::JobsKeptEnding) }
}

/// Loads the other modules of a scheduler, and waits until the job manager has accepted it.
async fn load_all(client: &Client, modules: &[&str]) -> Result<(), ReloadError> {
    for module in modules {
        load(client, module).await?;
    }
    until_online(client).await
}

/// Why a live change is incomplete. The next one repeats all of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// A request to the broker failed.
    #[error(transparent)]
    Broker(#[from] RpcError),
    /// The configuration could not be built.
    #[error("can't make a configuration for the running instance")]
    Configuration(#[from] RenderError),
    /// Jobs ended each time while the scheduler was loading, so it may hold their cores.
    #[error(
        "the scheduler was loaded {MAX_LOADS} times, and jobs ended each time before it was ready, so it may hold their cores"
    )]
    JobsKeptEnding,
    /// A scheduler is loaded, but the job manager has not accepted it.
    #[error("the scheduler is loaded but still offline after {} s", ONLINE_TIMEOUT.as_secs())]
    Offline,
}

/// The jobs that end after a certain moment. The job manager tells a scheduler which jobs hold resources when it says
/// hello, and which jobs have freed theirs once it is ready. A job that ends in between is in neither (flux-core 0.88,
/// job-manager alloc.c: `hello_cb`, `ready_cb`, `alloc_send_free_request`), so the scheduler would hold its cores for
/// ever.
struct EndedJobs<S>(S);

impl EndedJobs<()> {
    /// Watches from now on.
    async fn watch(
        client: &Client,
    ) -> Result<EndedJobs<impl Stream<Item = Result<JournalItem, RpcError>> + Send + Unpin + use<>>, RpcError> {
        let mut journal = journal::journal(client, &["free"])?;
        let backlog = async {
            while let Some(item) = journal.next().await {
                if item? == JournalItem::BacklogEnd {
                    return Ok(());
                }
            }
            Err(RpcError::Closed)
        };
        let late = |_| RpcError::Timeout { topic: journal::TOPIC.to_owned(), seconds: TIMEOUT.as_secs() };
        timeout(TIMEOUT, backlog).await.map_err(late)??;
        Ok(EndedJobs(journal))
    }
}

impl<S: Stream<Item = Result<JournalItem, RpcError>> + Unpin> EndedJobs<S> {
    /// Jobs that ended since the last call. The job manager sends these events before it answers a later request.
    fn so_far(&mut self) -> Vec<JobId> {
        let mut ended = Vec::new();
        while let Some(Some(item)) = self.0.next().now_or_never() {
            if let Ok(JournalItem::Job(job)) = item
                && !job.events.is_empty()
            {
                ended.push(job.id);
            }
        }
        ended
    }
}

/// Waits until the job manager has accepted the scheduler. A ping is no test, because the scheduler answers it earlier.
async fn until_online(client: &Client) -> Result<(), ReloadError> {
    let look = async {
        while is_scheduler_offline(client).await? {
            sleep(LOOK_EVERY).await;
        }
        Ok(())
    };
    timeout(ONLINE_TIMEOUT, look).await.map_err(|_| ReloadError::Offline)?
}

/// Tells Fluxion which jobs have ended, as the job manager would have done. Fluxion finds a job by its ID, and only
/// logs an error for a job that it does not hold (0.54, qmanager `jobmanager_free_cb`, `queue_policy_base_t::remove`).
async fn free_again(client: &Client, ended: &[JobId]) -> Result<(), RpcError> {
    for id in ended {
        client.notify("sched.free", ANY, &json!({ "id": id, "R": {}, "final": true }))?;
    }
    if ended.is_empty() {
        return Ok(());
    }
    // The answer shows that it has received all of them.
    ask(client, &format!("{}.ping", FLUXION[2]), json!({})).await.map(drop)
}

/// False only if there is no such module. After any other error, Fluxion must not be replaced by another scheduler.
fn has_fluxion(loaded: Result<(), RpcError>) -> Result<bool, RpcError> {
    match loaded {
        Err(error) if error.is(ENOENT) => Ok(false),
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
    fn fluxion_is_not_replaced_by_another_scheduler_if_it_fails_or_is_slow() {
        let topic = || "module.load".to_owned();
        let refused = |errnum| RpcError::Service { topic: topic(), errnum, text: String::new() };
        assert!(has_fluxion(Ok(())).unwrap());
        assert!(!has_fluxion(Err(refused(ENOENT))).unwrap());
        assert!(has_fluxion(Err(refused(22))).is_err());
        assert!(has_fluxion(Err(RpcError::Timeout { topic: topic(), seconds: 60 })).is_err());
    }
}
