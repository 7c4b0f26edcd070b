//! The job manager's journal: the events of all jobs (RFC 21), as they happen.

use futures::{Stream, StreamExt};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    job_id::JobId,
    message::LEAD,
    resource_set::ResourceSet,
    rfc3::{Client, RpcError},
    status::parse,
};

/// Service and method.
pub const TOPIC: &str = "job-manager.events-journal";

/// One response of the journal.
#[derive(Debug, Clone, PartialEq)]
pub enum JournalItem {
    /// Events of one job.
    Job(JobEvents),
    /// The backlog ends: every job that is active has been sent. What follows are events as they happen.
    BacklogEnd,
}

/// Events of one job: all those so far in the backlog, one of them afterwards.
#[derive(Deserialize, Debug, Clone, PartialEq)]
pub struct JobEvents {
    /// The job.
    pub id: JobId,
    /// Its events, oldest first. Empty for a job of the backlog that has none with a requested name.
    pub events: Vec<Event>,
    /// Its jobspec (RFC 25) without the environment: in the backlog, and with event `submit`.
    #[serde(default)]
    pub jobspec: Option<Value>,
    /// Its R (RFC 20) without the scheduler's part: in the backlog if the job has resources, and with event `alloc`.
    #[serde(rename = "R", default)]
    pub r: Option<Value>,
}

impl JobEvents {
    /// The resources of [`JobEvents::r`].
    ///
    /// # Errors
    /// [`RpcError::Payload`] if it is no R.
    pub fn resources(&self) -> Result<Option<ResourceSet>, RpcError> {
        self.r.as_ref().map(|r| parse(TOPIC, r.clone())).transpose()
    }

    /// The user that submitted the job, if event `submit` is among these.
    pub fn submitted_by(&self) -> Option<u32> {
        let submit = self.events.iter().find(|event| event.name == "submit")?;
        submit.context["userid"].as_u64().and_then(|userid| u32::try_from(userid).ok())
    }

    /// True if it has an event of that name.
    pub fn has(&self, name: &str) -> bool {
        self.events.iter().any(|event| event.name == name)
    }

    /// Its exceptions, oldest first.
    pub fn exceptions(&self) -> impl Iterator<Item = Exception> {
        self.events.iter().filter_map(Event::exception)
    }
}

/// An event (RFC 18). RFC 21 has the names and what their contexts hold; later versions of Flux may add some.
#[derive(Deserialize, Debug, Clone, PartialEq)]
pub struct Event {
    /// Seconds since 1970, by the lead's clock.
    pub timestamp: f64,
    /// `submit`, `alloc`, `finish`, `exception`, `free`, `clean`, …
    pub name: String,
    /// Details; `Null` if there are none.
    #[serde(default)]
    pub context: Value,
}

impl Event {
    /// What an event `exception` says; None for any other, and for one that does not follow RFC 21.
    pub fn exception(&self) -> Option<Exception> {
        let is_exception = self.name == "exception";
        is_exception.then(|| Exception::deserialize(&self.context).ok()).flatten()
    }
}

/// An exception (RFC 21).
#[derive(Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Exception {
    /// `cancel`, `timeout`, `exec`, …, and `alloc` if the scheduler denies the request: no resources of the instance
    /// could ever satisfy it.
    #[serde(rename = "type")]
    pub kind: String,
    /// 0 ends the job.
    pub severity: u8,
    /// Text for people.
    #[serde(default)]
    pub note: String,
    /// The user that raised it; None if Flux itself did.
    #[serde(default)]
    pub userid: Option<u32>,
}

/// The events with these names. The backlog comes first, with an entry for each active job even if it has none of these
/// events; then [`JournalItem::BacklogEnd`], then each event as it happens. The job manager sends an event before it
/// answers a later request. An item that can't be decoded is an error, and the stream continues.
///
/// The stream ends if the job manager is unloaded, and with [`RpcError::Closed`] if the broker ends. Nothing resumes
/// it: a new one has the present state as its backlog.
///
/// # Errors
/// [`RpcError::Closed`] if the broker has ended already.
pub fn journal(
    client: &Client,
    names: &[&str],
) -> Result<impl Stream<Item = Result<JournalItem, RpcError>> + Send + Unpin + use<>, RpcError> {
    let allow: Map<String, Value> = names.iter().map(|name| ((*name).to_owned(), json!(1))).collect();
    let responses = client.stream(TOPIC, LEAD, &json!({ "full": false, "allow": allow }))?;
    Ok(responses.map(|response| response.and_then(decode)))
}

/// One response. Keys and events that are unknown do no harm.
///
/// # Errors
/// [`RpcError::Payload`] if it does not have the journal's form (flux-core src/modules/job-manager/journal.c).
pub fn decode(response: Value) -> Result<JournalItem, RpcError> {
    let job: JobEvents = parse(TOPIC, response)?;
    Ok(if job.id == JobId::ANY { JournalItem::BacklogEnd } else { JournalItem::Job(job) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(response: Value) -> JobEvents {
        match decode(response).unwrap() {
            JournalItem::Job(job) => job,
            JournalItem::BacklogEnd => panic!("the end of the backlog"),
        }
    }

    #[test]
    fn an_item_has_the_events_the_jobspec_and_r() {
        // As flux-core 0.88 sends them, shortened.
        let submitted =
            job(json!({"id": 34_057_748_480_u64, "events": [{"timestamp": 1_795_402_747.570_1, "name": "submit",
            "context": {"userid": 0, "urgency": 16, "flags": 0, "version": 1}}], "jobspec": {"version": 1}}));
        assert_eq!(submitted.id.to_string(), "fttZs51");
        assert_eq!((submitted.events[0].context["urgency"].as_u64(), submitted.has("submit")), (Some(16), true));
        assert_eq!(
            (submitted.jobspec.as_ref().unwrap()["version"].as_u64(), submitted.resources().unwrap()),
            (Some(1), None)
        );

        let r = json!({"version": 1, "execution": {"R_lite": [{"rank": "0", "children": {"core": "1"}}],
            "nodelist": ["node0"], "starttime": 1_795_402_747, "expiration": 9_223_372_036_i64}});
        let allocated = job(json!({"id": 1, "events": [{"timestamp": 2, "name": "alloc"}], "R": r, "later": true}));
        assert_eq!((allocated.events[0].timestamp, &allocated.events[0].context), (2.0, &Value::Null));
        assert_eq!(allocated.resources().unwrap().unwrap().by_rank()[&0]["core"].to_string(), "1");

        // In the backlog, of a job without any requested event.
        assert_eq!(job(json!({"id": 1, "events": [], "jobspec": {}})).events, []);
        assert_eq!(decode(json!({"id": -1, "events": []})).unwrap(), JournalItem::BacklogEnd);
    }

    #[test]
    fn an_unknown_event_keeps_its_name_and_context() {
        let events = json!([{"timestamp": 1.5, "name": "novel", "context": {"a": [1]}, "extra": 0},
            {"timestamp": 2.5, "name": "alloc"}]);
        let job = job(json!({"id": 7, "events": events}));
        assert_eq!((job.events[0].name.as_str(), &job.events[0].context), ("novel", &json!({"a": [1]})));
        assert!(job.has("alloc") && !job.has("free"));
    }

    #[test]
    fn exceptions_say_who_raised_what() {
        let exception = |context: Value| json!({"timestamp": 1.0, "name": "exception", "context": context});
        let events = json!([
            exception(json!({"type": "alloc", "severity": 0, "note": "alloc denied due to type=\"unsatisfiable\""})),
            exception(json!({"type": "cancel", "severity": 0, "note": "", "userid": 1000})),
            exception(json!({"type": 3})),
            {"timestamp": 1.0, "name": "exception"},
            {"timestamp": 1.0, "name": "finish", "context": {"type": "cancel", "severity": 0}},
        ]);
        let found: Vec<_> = job(json!({"id": 7, "events": events}))
            .exceptions()
            .map(|exception| (exception.kind, exception.severity, exception.note.len(), exception.userid))
            .collect();
        assert_eq!(found, [("alloc".to_owned(), 0, 40, None), ("cancel".to_owned(), 0, 0, Some(1000))]);
    }

    #[test]
    fn a_response_of_another_form_is_an_error() {
        let event = |event: Value| json!({"id": 1, "events": [event]});
        for response in [
            Value::Null,
            json!([]),
            json!({}),
            json!({"events": []}),
            json!({"id": "f1", "events": []}),
            json!({"id": 1.5, "events": []}),
            json!({"id": 1}),
            json!({"id": 1, "events": {}}),
            event(json!("alloc")),
            event(json!({"timestamp": 1.0})),
            event(json!({"name": "alloc"})),
            event(json!({"name": 1, "timestamp": 1.0})),
            event(json!({"name": "alloc", "timestamp": "now"})),
        ] {
            assert!(matches!(decode(response.clone()), Err(RpcError::Payload { .. })), "{response}");
        }
        // One job's R does not spoil its events.
        for r in [json!({}), json!("R"), json!({"execution": {"R_lite": [{"rank": "x", "children": {}}]}})] {
            let odd = job(json!({"id": 1, "events": [{"timestamp": 1.0, "name": "alloc"}], "R": r}));
            assert!(odd.has("alloc") && odd.resources().is_err());
        }
    }
}
