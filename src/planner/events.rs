//! Events, one per transition.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tracing::debug;

/// Says things about one object, each only when it has changed.
pub struct Announcer {
    recorder: Recorder,
    last: Option<(String, String)>,
}

impl Announcer {
    /// Speaks as `flux-distribute`, from pod `instance`.
    pub fn new(client: Client, instance: &str) -> Self {
        let reporter = Reporter { controller: "flux-distribute".into(), instance: Some(instance.to_owned()) };
        Self { recorder: Recorder::new(client, reporter), last: None }
    }

    /// Publishes an Event unless it is the one that was published last. Events are a courtesy: a failure is only logged.
    pub async fn say(&mut self, about: &ObjectReference, warning: bool, reason: &str, note: &str) {
        let said = (reason.to_owned(), note.to_owned());
        if self.last.as_ref() == Some(&said) {
            return;
        }
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            // events.k8s.io refuses notes of more than 1 kB.
            note: Some(note.chars().take(1000).collect()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        match super::call("publish an Event", self.recorder.publish(&event, about)).await {
            Ok(()) => self.last = Some(said),
            Err(error) => debug!(%error, "no Event"),
        }
    }
}
