//! The job manager's queues (RFC 33): whether they are started, and whether a restart stops them.

use std::time::Duration;

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{
    job_id::JobId,
    message::{ANY, ENOENT, LEAD, parse_inner},
    rfc3::{Client, RpcError},
    status::{LEAD_TIMEOUT, attribute, parse, state},
};

/// Why a queue is stopped if no scheduler is online (job-manager queues.c).
pub const SCHEDULER_IS_OFFLINE: &str = "Scheduler is offline";
/// What to say once no scheduler has been online for longer than a moment.
pub const SCHEDULER_STAYS_OFFLINE: &str =
    "Flux's scheduler is offline: `flux-distribute reload` in the pod of the lead's node loads it again";
/// Why a queue is stopped after a restart with `job-manager.stop-queues-on-restart` (job-manager queue.c).
pub const STOPPED_BY_RESTART: &str = "Automatically stopped due to restart";
/// Limit for one request. The job manager may be busy with the jobs of a queue that starts or stops.
const TIMEOUT: Duration = Duration::from_mins(1);
/// Most queues that an instance may have: each costs a request.
const MOST_QUEUES: usize = 1000;
/// How each reason begins for which this program stops a queue.
const OURS: &str = "flux-distribute";
/// Characters of a reason that are shown.
const REASON_SHOWN: usize = 200;
/// Longest reason that is kept, in characters: there may be many queues.
const REASON_KEPT: usize = 4096;
/// Where the job manager keeps the state of its queues (job-manager restart.c).
const CHECKPOINT: &str = "checkpoint.job-manager";
const CHECKPOINT_VERSION: u32 = 1;
/// Where it is noted which queues a restart has stopped.
const NOTE: &str = "flux-distribute.stopped-by-restart";
/// Writes to disk whatever the KVS holds, and answers then (`FLUX_KVS_SYNC`, flux_kvs_commit(3)).
const SYNC: u32 = 4;

/// A queue.
#[derive(Deserialize, Debug, Clone, Default, PartialEq, Eq)]
pub struct Queue {
    /// Its name; None for the only queue of an instance without named ones.
    #[serde(skip)]
    pub name: Option<String>,
    /// True if it accepts jobs.
    pub enable: bool,
    /// True if its jobs go to the scheduler. False for any queue while no scheduler is online.
    pub start: bool,
    /// Why it accepts no jobs.
    #[serde(default)]
    pub disable_reason: Option<String>,
    /// Why it is stopped: text that an administrator gave, [`STOPPED_BY_RESTART`], or [`SCHEDULER_IS_OFFLINE`], which
    /// hides any other.
    #[serde(default)]
    pub stop_reason: Option<String>,
}

impl Queue {
    /// True if no scheduler is online: then nothing shows whether the queue is stopped, and why.
    pub fn is_scheduler_offline(&self) -> bool {
        self.stop_reason.as_deref() == Some(SCHEDULER_IS_OFFLINE)
    }

    /// What to say of a queue that does not start its jobs: why, and how to start it, unless we do that ourselves. None if
    /// it starts them, and if no scheduler is online.
    pub fn stopped(&self) -> Option<String> {
        if self.start || self.is_scheduler_offline() {
            return None;
        }
        let (queue, start) = match &self.name {
            Some(name) => (format!("queue {name}"), format!("flux queue start {name}")),
            None => ("the queue".to_owned(), "flux queue start".to_owned()),
        };
        let why = self.stop_reason.as_deref().filter(|why| !why.is_empty());
        Some(match why.map(|why| why.chars().take(REASON_SHOWN).collect::<String>()) {
            Some(why) if why.starts_with(OURS) => format!("{queue} is stopped: {why}"),
            Some(why) if why == STOPPED_BY_RESTART => format!(
                "{queue} is stopped: {why}; it starts by itself if spec.pods.enabled is true, else `{start}` starts it"
            ),
            Some(why) => format!("{queue} is stopped: {why}; `{start}` starts it"),
            None => format!("{queue} is stopped; `{start}` starts it"),
        })
    }

    /// True if this program has stopped it.
    pub fn is_stopped_by_us(&self) -> bool {
        !self.start && self.stop_reason.as_deref().is_some_and(|why| why.starts_with(OURS))
    }

    fn is_stopped_without_reason(&self) -> bool {
        !self.start && self.stop_reason.is_none()
    }
}

/// Which queues a restart has stopped and nobody has started since.
///
/// The job manager records such a queue as stopped, and forgets why: at a clean end, rc1 stops all queues without a reason. If
/// the instance ends before those queues are started, they would stay stopped in its next life, and nobody could tell them from
/// queues that an administrator has stopped. So this is noted in the KVS, which has the job manager's record too.
#[derive(Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
pub struct StoppedByRestart {
    /// The attribute `broker.starttime` of the lead's broker that noted it.
    life: String,
    /// Names of the queues; None is the only queue of an instance without named ones.
    queues: Vec<Option<String>>,
}

/// Why queues were not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// A request to the broker failed.
    #[error(transparent)]
    Broker(#[from] RpcError),
    /// See [`Queue::is_scheduler_offline`].
    #[error(
        "the scheduler is offline, so neither stopped queues nor free cores can be seen: try again once it is loaded"
    )]
    SchedulerIsOffline,
}

/// All queues.
///
/// # Errors
/// [`RpcError`].
pub async fn queues(client: &Client) -> Result<Vec<Queue>, RpcError> {
    let names = names(client).await?;
    if names.is_empty() {
        return Ok(vec![queue(client, None).await?]);
    }
    futures::future::try_join_all(names.iter().map(|name| queue(client, Some(name)))).await
}

/// All queues, for a report; None if the lead does not answer in the time that it has for other questions too.
pub async fn queues_in_time(client: &Client) -> Option<Vec<Queue>> {
    timeout(LEAD_TIMEOUT, queues(client)).await.ok()?.ok()
}

/// The queue of that name; None is the one of an instance without named queues.
///
/// # Errors
/// [`RpcError::Service`] if there is none; other [`RpcError`]s.
pub async fn queue(client: &Client, name: Option<&str>) -> Result<Queue, RpcError> {
    let topic = "job-manager.queue-status";
    let which = name.map_or_else(|| json!({}), |name| json!({ "name": name }));
    let queue: Queue = parse(topic, ask(client, topic, which).await?)?;
    let kept = |reason: Option<String>| reason.map(|reason| reason.chars().take(REASON_KEPT).collect());
    let (stop_reason, disable_reason) = (kept(queue.stop_reason), kept(queue.disable_reason));
    Ok(Queue { name: name.map(str::to_owned), stop_reason, disable_reason, ..queue })
}

/// True if no scheduler is online. A job that ends then may keep its cores for ever (see [`super::reload`]). The job
/// manager does not announce that a scheduler is online.
///
/// # Errors
/// [`RpcError`].
pub async fn is_scheduler_offline(client: &Client) -> Result<bool, RpcError> {
    let names = names(client).await?;
    Ok(queue(client, names.first().map(String::as_str)).await?.is_scheduler_offline())
}

/// Stops those queues that are started: their jobs get no resources, not even free ones; running jobs continue. The
/// reason shows in `flux queue status`. A restart forgets that they were stopped. Returns them as they were.
///
/// # Errors
/// [`QueueError`]; some queues may be stopped.
pub async fn stop(client: &Client, reason: &str) -> Result<Vec<Queue>, QueueError> {
    let stopped = visible(client).await?.into_iter().filter(|queue| queue.start).collect::<Vec<_>>();
    switch(client, &stopped, &json!({ "start": false, "nocheckpoint": true, "reason": reason })).await?;
    Ok(stopped)
}

/// Starts those queues that are stopped for one of these reasons, so that any other stays as its administrator wants.
/// Returns them as they were.
///
/// # Errors
/// [`QueueError`]; some queues may be started.
pub async fn start(client: &Client, reasons: &[&str]) -> Result<Vec<Queue>, QueueError> {
    let is_meant = |queue: &Queue| queue.stop_reason.as_deref().is_some_and(|reason| reasons.contains(&reason));
    let started = visible(client).await?.into_iter().filter(is_meant).collect::<Vec<_>>();
    // STOPPED_BY_RESTART is in the job manager's record, and has to leave it.
    switch(client, &started, &json!({ "start": true, "nocheckpoint": false })).await?;
    Ok(started)
}

/// Keeps the note about queues that a restart has stopped as they are: `all` are the queues, just asked for, and `noted` is what the
/// last call left, in this life of the lead's broker. Queues that a restart has stopped in an earlier life get that reason
/// again, also in `all`. Does nothing while the scheduler is offline, and while the
/// broker ends, when rc1 has stopped all queues.
///
/// # Errors
/// [`QueueError`]. To be called again.
pub async fn keep_note(
    client: &Client,
    all: &mut [Queue],
    noted: &mut Option<StoppedByRestart>,
) -> Result<(), QueueError> {
    // The state is asked for after the queues: whoever has stopped one without a reason was an administrator then.
    if all.iter().any(Queue::is_scheduler_offline) || state(client).await?.state != "run" {
        return Ok(());
    }
    let (before, life) = match noted.take() {
        Some(before) => (before.clone(), before.life),
        None => (note(client).await?, attribute(client, "broker.starttime").await?),
    };
    let was_stopped = |queue: &Queue| before.queues.contains(&queue.name);
    if before.life != life {
        for queue in all.iter_mut().filter(|queue| queue.is_stopped_without_reason() && was_stopped(queue)) {
            queue.stop_reason = Some(STOPPED_BY_RESTART.to_owned());
            let stop = json!({ "start": false, "nocheckpoint": true, "reason": STOPPED_BY_RESTART });
            switch(client, std::slice::from_ref(queue), &stop).await?;
        }
    }
    // What we have stopped since is recorded as it was before.
    let is_stopped = |queue: &&Queue| {
        queue.stop_reason.as_deref() == Some(STOPPED_BY_RESTART) || queue.is_stopped_by_us() && was_stopped(queue)
    };
    let queues: Vec<_> = all.iter().filter(is_stopped).map(|queue| queue.name.clone()).collect();
    let after = StoppedByRestart { life, queues };
    if after.queues != before.queues || after.life != before.life && !after.queues.is_empty() {
        // The record of an earlier life may say that they are stopped, which a crash would bring back.
        if all.iter().any(|queue| queue.start && was_stopped(queue)) {
            write_record(client, all).await?;
        }
        ask(client, "kvs.commit", put(NOTE, &json!(after))).await?;
    }
    *noted = Some(after);
    Ok(())
}

/// What an earlier life has noted; nothing if it can't be read.
async fn note(client: &Client) -> Result<StoppedByRestart, RpcError> {
    let answer = lookup(client, NOTE).await?;
    Ok(answer.as_ref().and_then(value).unwrap_or_default())
}

/// The answer to `kvs.lookup`; None if there is no such key.
async fn lookup(client: &Client, key: &str) -> Result<Option<Value>, RpcError> {
    match ask(client, "kvs.lookup", json!({ "key": key, "namespace": "primary", "flags": 0 })).await {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is(ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The value in an answer to `kvs.lookup` (RFC 11).
fn value<T: DeserializeOwned>(answer: &Value) -> Option<T> {
    let data = BASE64_STANDARD.decode(answer.pointer("/val/data")?.as_str()?).ok()?;
    parse_inner(&data)
}

/// Ensures that the job manager stops its queues when it restarts, if `job-manager.stop-queues-on-restart` says so. That
/// acts only on queues of an earlier record, which the job manager writes for the first time when it ends cleanly: if
/// it crashes before, it starts with open queues. So this writes such a record unless there is one: the queues as they
/// are. It is on disk when this returns. Returns true if it wrote one.
///
/// # Errors
/// [`QueueError`].
pub async fn ensure_recorded(client: &Client) -> Result<bool, QueueError> {
    if lookup(client, CHECKPOINT).await?.is_some() {
        return Ok(false);
    }
    write_record(client, &visible(client).await?).await?;
    Ok(true)
}

/// Writes the job manager's record of these queues.
async fn write_record(client: &Client, queues: &[Queue]) -> Result<(), QueueError> {
    #[derive(Deserialize)]
    struct Info {
        max_jobid: JobId,
    }
    let topic = "job-manager.getinfo";
    let Info { max_jobid } = parse(topic, ask(client, topic, Value::Null).await?)?;
    let queues: Vec<Value> = queues.iter().map(record).collect();
    let record = json!({ "version": CHECKPOINT_VERSION, "max_jobid": max_jobid, "queue": queues });
    ask(client, "kvs.commit", put(CHECKPOINT, &record)).await?;
    Ok(())
}

/// A queue in the job manager's record (queues.c `save_one`). Keys without a value are left out.
fn record(queue: &Queue) -> Value {
    // The job manager does not record that a queue was stopped with `nocheckpoint`, as we stop queues.
    let start = queue.start || queue.is_stopped_by_us();
    let mut record = json!({ "enable": queue.enable, "start": start });
    let stop_reason = queue.stop_reason.clone().filter(|_| !start);
    let texts = [("name", &queue.name), ("disable_reason", &queue.disable_reason), ("stop_reason", &stop_reason)];
    for (key, text) in texts {
        if let Some(text) = text {
            record[key] = json!(text);
        }
    }
    record
}

/// The payload of `kvs.commit` that sets `key` to `value` (RFC 11).
fn put(key: &str, value: &Value) -> Value {
    let data = BASE64_STANDARD.encode(value.to_string());
    let put = json!({ "key": key, "flags": 0, "dirent": { "ver": 1, "type": "val", "data": data } });
    json!({ "namespace": "primary", "flags": SYNC, "ops": [put] })
}

/// All queues, with their own state.
async fn visible(client: &Client) -> Result<Vec<Queue>, QueueError> {
    let queues = queues(client).await?;
    if queues.iter().any(Queue::is_scheduler_offline) {
        return Err(QueueError::SchedulerIsOffline);
    }
    Ok(queues)
}

async fn switch(client: &Client, queues: &[Queue], order: &Value) -> Result<(), RpcError> {
    for queue in queues {
        let mut order = order.clone();
        order["all"] = json!(queue.name.is_none());
        if let Some(name) = &queue.name {
            order["name"] = json!(name);
        }
        ask(client, "job-manager.queue-start", order).await?;
    }
    Ok(())
}

/// The names of the named queues.
async fn names(client: &Client) -> Result<Vec<String>, RpcError> {
    #[derive(Deserialize)]
    struct Queues {
        queues: Vec<String>,
    }
    let topic = "job-manager.queue-list";
    let names = parse::<Queues>(topic, ask(client, topic, Value::Null).await?)?.queues;
    if names.len() > MOST_QUEUES { Err(RpcError::TooManyQueues(names.len())) } else { Ok(names) }
}

async fn ask(client: &Client, topic: &str, payload: Value) -> Result<Value, RpcError> {
    let nodeid = if topic.starts_with("job-manager.") { LEAD } else { ANY };
    client.rpc_within(TIMEOUT, topic, nodeid, payload).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_recorded_as_the_job_manager_does_it() {
        let started = Queue { enable: true, start: true, ..Queue::default() };
        let text = |text: &str| Some(text.to_owned());
        for (queue, expected) in [
            (started.clone(), json!({"enable": true, "start": true})),
            (
                Queue { name: text("debug"), start: false, stop_reason: text("repair"), ..started.clone() },
                json!({"name": "debug", "enable": true, "start": false, "stop_reason": "repair"}),
            ),
            (
                Queue { enable: false, disable_reason: text("moved"), ..started },
                json!({"enable": false, "start": true, "disable_reason": "moved"}),
            ),
        ] {
            assert_eq!(record(&queue), expected);
        }
    }

    #[test]
    fn a_stopped_queue_says_why_and_who_starts_it() {
        let text = |text: &str| Some(text.to_owned());
        let stopped = |name: Option<String>, why: Option<String>| Queue { name, stop_reason: why, ..Queue::default() };
        for (queue, said) in [
            (Queue { start: true, ..Queue::default() }, None),
            (stopped(None, text(SCHEDULER_IS_OFFLINE)), None),
            (stopped(text("batch"), None), text("queue batch is stopped; `flux queue start batch` starts it")),
            (stopped(None, text("repair")), text("the queue is stopped: repair; `flux queue start` starts it")),
            (
                stopped(None, text(STOPPED_BY_RESTART)),
                text(
                    "the queue is stopped: Automatically stopped due to restart; it starts by itself if spec.pods.enabled is true, else `flux queue start` starts it",
                ),
            ),
            (
                stopped(None, text("flux-distribute: the epoch ends")),
                text("the queue is stopped: flux-distribute: the epoch ends"),
            ),
        ] {
            assert_eq!(queue.stopped(), said);
        }
    }

    #[test]
    fn only_flux_words_mean_that_the_scheduler_is_offline() {
        // The answers of flux-core 0.88.
        for (answer, offline) in [
            (json!({"enable": true, "start": true}), false),
            (json!({"enable": true, "start": false, "stop_reason": "Scheduler is offline"}), true),
            (json!({"enable": true, "start": false, "stop_reason": "Automatically stopped due to restart"}), false),
            (json!({"enable": false, "disable_reason": "Scheduler is offline", "start": false}), false),
        ] {
            let queue: Queue = serde_json::from_value(answer.clone()).unwrap();
            assert_eq!(queue.is_scheduler_offline(), offline, "{answer}");
        }
    }
}
