//! Events, one per transition.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tracing::debug;

/// Says things about one object, each only when it has changed.
pub struct Announcer {
    client: Client,
    reporter: Reporter,
    /// One for each sentence: a recorder counts what is said again under the same reason as a repetition, and keeps the first
    /// sentence.
    recorders: HashMap<String, Recorder>,
    last: Option<(String, String)>,
}

/// More sentences than this at a time are no repetitions.
const MAX_RECORDERS: usize = 16;

impl Announcer {
    /// Speaks as `flux-distribute`, from pod `instance`.
    pub fn new(client: Client, instance: &str) -> Self {
        let reporter = Reporter { controller: "flux-distribute".into(), instance: Some(instance.to_owned()) };
        Self { client, reporter, recorders: HashMap::new(), last: None }
    }

    /// Publishes an Event unless it is the one that was published last. Events are a courtesy: a failure is only logged.
    pub async fn say(&mut self, about: &ObjectReference, warning: bool, reason: &str, note: &str) {
        let said = (reason.to_owned(), note.to_owned());
        if self.last.as_ref() == Some(&said) {
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
            // events.k8s.io refuses notes of more than 1 kB.
            note: Some(note.chars().take(1000).collect()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        match super::call("publish an Event", recorder.publish(&event, about)).await {
            Ok(()) => self.last = Some(said),
            Err(error) => debug!(%error, "no Event"),
        }
    }
}
