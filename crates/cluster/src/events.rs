//! Publishes Kubernetes Events, one per transition.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tracing::debug;

/// Publishes Events, and skips one that repeats the last.
pub struct Announcer {
    client: Client,
    reporter: Reporter,
    /// One recorder for each note: a recorder counts a second Event with the same reason as a repetition of the first,
    /// and keeps the first note.
    recorders: HashMap<String, Recorder>,
    last: Option<(String, String)>,
}

/// The recorders are dropped when there are more: with that many different notes, counting repetitions is pointless.
const MAX_RECORDERS: usize = 16;

impl Announcer {
    /// Creates an announcer that reports as `flux-distribute`, from pod `instance`.
    pub fn new(client: Client, instance: &str) -> Self {
        let reporter = Reporter { controller: "flux-distribute".into(), instance: Some(instance.to_owned()) };
        Self { client, reporter, recorders: HashMap::new(), last: None }
    }

    /// Publishes an Event unless it equals the last one. A failure is only logged, because nothing depends on Events.
    pub async fn say(&mut self, about: &ObjectReference, warning: bool, reason: &str, note: &str) {
        let event_id = (reason.to_owned(), note.to_owned());
        if self.last.as_ref() == Some(&event_id) {
            return;
        }
        if self.recorders.len() >= MAX_RECORDERS {
            self.recorders.clear();
        }
        let fresh = || Recorder::new(self.client.clone(), self.reporter.clone());
        let recorder = self.recorders.entry(note.to_owned()).or_insert_with(fresh);
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            // events.k8s.io refuses a note of more than 1 kB.
            note: Some(note.chars().take(1000).collect()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        match super::call("publish an Event", recorder.publish(&event, about)).await {
            Ok(()) => self.last = Some(event_id),
            Err(error) => debug!(%error, "can't publish an Event"),
        }
    }
}
