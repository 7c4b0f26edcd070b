//! Submits jobs without processes, cancels and ends them.
//!
//! Such a job (RFC 14, with `attributes.system.exec.test.override`) holds resources for work that Flux does not start. It
//! is in state RUN as soon as it has its resources. It ends with [`finish`]; nothing else may start it, because a
//! started one fails if the lead's broker is killed, and ends when its time is over.

use std::{fmt, time::Duration};

use api::{IdSet, MOST_DECLARED};
use base64::{Engine, prelude::BASE64_STANDARD};
use futures::{Stream, StreamExt, future::ready, join, stream};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, SeqAccess, Visitor},
};
use serde_json::{Value, json};

use super::{
    job_id::JobId,
    journal::JobEvents,
    message::{ANY, EINVAL, ENOENT, EPERM, LEAD},
    rfc3::{Client, RpcError},
    status::{LEAD_TIMEOUT, parse},
};

/// The urgency of a job by default (RFC 30).
pub const DEFAULT_URGENCY: u8 = 16;
/// The highest urgency (RFC 30). 0 holds a job.
pub const MAX_URGENCY: u8 = 31;
/// Flag of a job that is not validated (`FLUX_JOB_NOVALIDATE`, flux_job_submit(3)).
const NOVALIDATE: u32 = 8;
/// The errors of a refusal: the second one is that of the job manager, the first one of Flux's own validator.
const REFUSALS: [u32; 2] = [EPERM, EINVAL];
/// Number of jobs that are asked about at once.
const AT_ONCE: usize = 64;
/// Limit for a submission: a thousand at once take five seconds to validate.
const SUBMIT_TIMEOUT: Duration = Duration::from_mins(1);

/// Why there is no job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Flux refuses the jobspec, the queue accepts no jobs ([`super::queues::Queue::enable`]), or the user of this
    /// connection is not the owner of the instance.
    #[error("Flux refuses the job: {reason}")]
    Refused {
        /// Flux's message.
        reason: String,
    },
    /// The request failed. After [`RpcError::Timeout`] or [`RpcError::Closed`] there may be a job nevertheless; the
    /// journal shows it.
    #[error(transparent)]
    Broker(#[from] RpcError),
}

/// Submits a job as the owner of the instance, who must be the user of this connection, and returns its id. `urgency` is
/// at most [`MAX_URGENCY`]. With `novalidate` Flux does not check the jobspec, which takes half the time.
///
/// An answer does not mean that the request can be satisfied: if no resources of the instance could, the job gets an
/// exception of type `alloc`.
///
/// # Errors
/// [`SubmitError`].
pub async fn submit(client: &Client, jobspec: &Value, urgency: u8, novalidate: bool) -> Result<JobId, SubmitError> {
    #[derive(Deserialize)]
    struct Submitted {
        id: JobId,
    }
    let topic = "job-ingest.submit";
    let flags = if novalidate { NOVALIDATE } else { 0 };
    let order = json!({ "J": unsigned(client.uid(), jobspec), "urgency": urgency, "flags": flags });
    match client.rpc_within(SUBMIT_TIMEOUT, topic, ANY, order).await {
        Ok(answer) => Ok(parse::<Submitted>(topic, answer)?.id),
        Err(RpcError::Service { errnum, text, .. }) if REFUSALS.contains(&errnum) => {
            Err(SubmitError::Refused { reason: text })
        }
        Err(error) => Err(error.into()),
    }
}

/// A jobspec in the form J without a signature, which Flux accepts from the owner of the instance (flux-core
/// src/common/libutil/sign_none.c): a header of keys and typed values that NULs end, the payload, and the mechanism.
fn unsigned(uid: u32, jobspec: &Value) -> String {
    let header = format!("version\0i1\0userid\0i{uid}\0mechanism\0snone\0");
    format!("{}.{}.none", BASE64_STANDARD.encode(header), BASE64_STANDARD.encode(jobspec.to_string()))
}

/// Cancels a job, whatever its state. Returns false if it has ended already, or never was. Its events then are
/// `exception` and `clean`, with `free` between them if it had resources; `finish` may be missing.
///
/// Like [`finish`], it must not be used on a job that holds resources while the scheduler is offline.
///
/// # Errors
/// [`RpcError`].
pub async fn cancel(client: &Client, id: JobId, note: &str) -> Result<bool, RpcError> {
    let order = json!({ "id": id, "type": "cancel", "severity": 0, "note": note });
    match client.rpc("job-manager.raise", LEAD, order).await {
        Ok(_) => Ok(true),
        Err(error) if error.is(ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Ends a job that holds resources, with a wait status (wait(2): 256 for exit code 1). Starts it only to end it at once.
///
/// Returns false if the job's executor does not know the job: it has ended, or it got its resources a few milliseconds
/// ago, which nothing announces. If the journal has no end of the job, ask again.
///
/// While the scheduler is offline, a job that ends may keep its cores for ever: see
/// [`super::queues::is_scheduler_offline`].
///
/// # Errors
/// [`RpcError`]. If the job was started but not ended, the next call ends it.
pub async fn finish(client: &Client, id: JobId, status: i32) -> Result<bool, RpcError> {
    let order = |event: &str| json!({ "event": event, "jobid": id, "status": status });
    let topic = "job-exec.override";
    // Both are sent, in this order, before the first answer is awaited.
    let (start, finish) = join!(client.rpc(topic, LEAD, order("start")), client.rpc(topic, LEAD, order("finish")));
    let is_unknown = |answer: &Result<Value, RpcError>| answer.as_ref().is_err_and(|error| error.is(ENOENT));
    match (start, finish) {
        (_, Ok(_)) => Ok(true),
        // It may have become known, or have ended, between the two.
        (start, finish) if is_unknown(&start) || is_unknown(&finish) => Ok(false),
        (_, Err(error)) => Err(error),
    }
}

/// Which jobs [`listed_jobs`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobStates {
    /// Those that run, or are ending.
    Running,
    /// Those that have not ended.
    Active,
}

/// A job as `job-list` knows it.
#[derive(Deserialize, Debug, Clone, PartialEq)]
pub struct ListedJob {
    /// Its id.
    pub id: JobId,
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// The user who has submitted it.
    pub userid: u32,
    /// The ranks on which it has resources; none before it has.
    #[serde(default)]
    pub ranks: IdSet,
}

/// The jobs of all users in these states. The list may lag behind, so that a job which began a moment ago is missing.
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone.
pub async fn listed_jobs(client: &Client, states: JobStates) -> Result<Vec<ListedJob>, RpcError> {
    #[derive(Deserialize)]
    struct Listed {
        #[serde(deserialize_with = "jobs_within_limit")]
        jobs: Vec<ListedJob>,
    }
    let topic = "job-list.list";
    let state = match states {
        JobStates::Running => "running",
        JobStates::Active => "active",
    };
    let attributes = ["name", "userid", "ranks"];
    let query = json!({ "max_entries": 0, "attrs": attributes, "constraint": { "states": [state] } });
    Ok(parse::<Listed>(topic, client.rpc_within(LEAD_TIMEOUT, topic, LEAD, query).await?)?.jobs)
}

/// Most ranks of all jobs together: a job has at least one core on each of its ranks.
const MOST_RANKS_OF_JOBS: u64 = MOST_DECLARED;

/// Reads jobs one by one, and fails once their ranks are more than [`MOST_RANKS_OF_JOBS`].
fn jobs_within_limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ListedJob>, D::Error> {
    struct Jobs;
    impl<'de> Visitor<'de> for Jobs {
        type Value = Vec<ListedJob>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("jobs")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
            let (mut jobs, mut left) = (Vec::new(), MOST_RANKS_OF_JOBS);
            while let Some(job) = items.next_element::<ListedJob>()? {
                let ranks = job.ranks.len() as u64;
                left = left.checked_sub(ranks).ok_or_else(|| A::Error::custom("the jobs have too many ranks"))?;
                jobs.push(job);
            }
            Ok(jobs)
        }
    }
    deserializer.deserialize_seq(Jobs)
}

/// Asks the job manager about each job: all its events until now, its jobspec, and R if it has resources. The answers are newer than the
/// call. A job that the job manager has forgotten is left out; any other may be an error. The stream parses one answer at a time,
/// because each may take much memory.
pub fn job_events<'a>(
    client: &'a Client,
    ids: impl IntoIterator<Item = JobId, IntoIter: Send> + 'a,
) -> impl Stream<Item = Result<JobEvents, RpcError>> + Send {
    let asked = stream::iter(ids).map(move |id| events_of(client, id));
    asked.buffer_unordered(AT_ONCE).filter_map(|job| ready(job.transpose())).boxed()
}

async fn events_of(client: &Client, id: JobId) -> Result<Option<JobEvents>, RpcError> {
    let ask = async |attributes: &[&str]| {
        let topic = "job-manager.getattr";
        let query = json!({ "id": id, "attrs": attributes });
        let mut answer = client.rpc_within(LEAD_TIMEOUT, topic, LEAD, query).await?;
        let mut take = |key: &str| answer[key].take();
        let job = json!({ "id": id, "events": take("eventlog"), "jobspec": take("jobspec"), "R": take("R") });
        parse::<JobEvents>(topic, job)
    };
    let job = match ask(&["jobspec", "eventlog", "R"]).await {
        // A job without resources has no R. But the same error says that this Flux knows no such attribute.
        Err(error) if error.is(ENOENT) => match ask(&["jobspec", "eventlog"]).await {
            Ok(job) if job.has("alloc") => Err(error),
            other => other,
        },
        other => other,
    };
    match job {
        Err(error) if error.is(EINVAL) => Ok(None),
        job => job.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_jobs_with_more_ranks_than_there_can_be_is_not_read() {
        let read = |count: usize| {
            let job = json!({"id": 1, "userid": 0, "ranks": "0-65535"});
            jobs_within_limit(Value::Array(vec![job; count])).is_ok()
        };
        assert_eq!((read(256), read(257)), (true, false));
    }

    #[test]
    fn a_jobspec_is_wrapped_as_flux_does_it_for_an_owner() {
        // The header that flux-core 0.88 writes for user 0.
        let header = "dmVyc2lvbgBpMQB1c2VyaWQAaTAAbWVjaGFuaXNtAHNub25lAA==";
        assert_eq!(unsigned(0, &json!({"version": 1})), format!("{header}.eyJ2ZXJzaW9uIjoxfQ==.none"));
        let other = unsigned(54321, &Value::Null);
        let header = BASE64_STANDARD.decode(other.split('.').next().unwrap()).unwrap();
        assert_eq!(header, b"version\0i1\0userid\0i54321\0mechanism\0snone\0");
    }
}
