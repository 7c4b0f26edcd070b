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

/// Publishes an Event as `flux-distribute`, from pod `instance`, whatever was published before. A failure is only logged, because
/// nothing depends on Events.
pub async fn publish(
    client: &Client,
    instance: &str,
    about: &ObjectReference,
    warning: bool,
    reason: &str,
    note: &str,
) {
    let recorder = Recorder::new(client.clone(), reporter(instance));
    if let Err(error) = super::call("publish an Event", recorder.publish(&event(warning, reason, note), about)).await {
        debug!(%error, "can't publish an Event");
    }
}

fn reporter(instance: &str) -> Reporter {
    Reporter { controller: "flux-distribute".into(), instance: Some(instance.to_owned()) }
}

fn event(warning: bool, reason: &str, note: &str) -> Event {
    Event {
        type_: if warning { EventType::Warning } else { EventType::Normal },
        reason: reason.to_owned(),
        // events.k8s.io refuses a note of more than 1 kB.
        note: Some(note.chars().take(1000).collect()),
        action: "Reconcile".to_owned(),
        secondary: None,
    }
}

/// The recorders are dropped when there are more: with that many different notes, counting repetitions is pointless.
const MAX_RECORDERS: usize = 16;

impl Announcer {
    /// Creates an announcer that reports as `flux-distribute`, from pod `instance`.
    pub fn new(client: Client, instance: &str) -> Self {
        Self { client, reporter: reporter(instance), recorders: HashMap::new(), last: None }
    }

    /// Publishes an Event unless it has the reason and the note of the last one, whatever that was about. A failure is only logged,
    /// because nothing depends on Events.
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
        match super::call("publish an Event", recorder.publish(&event(warning, reason, note), about)).await {
            Ok(()) => self.last = Some(event_id),
            Err(error) => {
                // The recorder would update its last Event, which may be deleted. A new recorder creates one.
                self.recorders.remove(note);
                debug!(%error, "can't publish an Event");
            }
        }
    }
}
