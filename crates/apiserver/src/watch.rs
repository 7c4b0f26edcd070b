//! Watches: a position in the store's log that moves on as fast as the client reads.

use std::{convert::Infallible, sync::Arc, time::Duration, vec::IntoIter};

use axum::body::{Body, Bytes};
use futures::stream;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    admit,
    error::ApiError,
    log::{Change, Event},
    request::{Form, Query},
    resources::Resource,
    selector::Filter,
    store::Store,
    table::{metadata_only, table},
};

/// The duration of a watch if the client sets none.
const DEFAULT_TIMEOUT: Duration = Duration::from_mins(30);

/// How often an idle watch gets a bookmark with the latest resourceVersion, so that a reconnect doesn't start from an
/// expired one.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(30);

/// The number of changes rendered at once, which limits the memory of a watch.
const BATCH: usize = 64;

/// One watch.
pub struct Watch {
    store: Arc<Store>,
    resource: &'static Resource,
    namespace: Option<String>,
    filter: Filter,
    form: Form,
    bookmarks: bool,
    deadline: Instant,
    closing: CancellationToken,
    changed: tokio::sync::watch::Receiver<u64>,
    /// The initial state, if the client asked for it.
    initial: IntoIter<Arc<Value>>,
    initial_end: bool,
    cursor: u64,
    sent_columns: bool,
    ended: bool,
}

impl Watch {
    /// A watch on the objects of `resource` that `filter` selects.
    ///
    /// # Errors
    /// [`ApiError::BadRequest`] for a malformed resourceVersion. One that is too old is reported in the stream.
    pub fn new(
        store: Arc<Store>,
        (resource, namespace): (&'static Resource, Option<String>),
        filter: Filter,
        form: Form,
        query: &Query,
        closing: CancellationToken,
    ) -> Result<Self, ApiError> {
        let changed = store.subscribe();
        let from_now = query.initial_events || matches!(query.resource_version.as_str(), "" | "0");
        let (initial, cursor) = if from_now {
            store.list(resource.stored(), namespace.as_deref())
        } else {
            let asked = &query.resource_version;
            let bad = |_| ApiError::BadRequest(format!("invalid resourceVersion {asked:?}"));
            (Vec::new(), asked.parse().map_err(bad)?)
        };
        Ok(Self {
            store,
            resource,
            namespace,
            filter,
            form,
            bookmarks: query.bookmarks,
            deadline: Instant::now() + query.timeout.unwrap_or(DEFAULT_TIMEOUT),
            closing,
            changed,
            initial: initial.into_iter(),
            initial_end: query.initial_events,
            cursor,
            sent_columns: false,
            ended: false,
        })
    }

    /// The body of the response: one JSON document per line.
    pub fn into_body(self) -> Body {
        Body::from_stream(stream::unfold(self, |mut watch| async move {
            let lines = watch.next().await?;
            Some((Ok::<_, Infallible>(lines), watch))
        }))
    }

    async fn next(&mut self) -> Option<Bytes> {
        while !self.ended {
            let lines = self.step().await;
            if !lines.is_empty() {
                return Some(lines.into());
            }
        }
        None
    }

    async fn step(&mut self) -> Vec<u8> {
        let mut lines = Vec::new();
        if self.initial.len() > 0 {
            let batch: Vec<_> = self.initial.by_ref().take(BATCH).collect();
            for object in batch {
                self.send(&mut lines, "ADDED", &object);
            }
            return lines;
        }
        if std::mem::take(&mut self.initial_end) {
            self.bookmark(&mut lines, json!({ "k8s.io/initial-events-end": "true" }));
            return lines;
        }
        // Mark as seen before reading the log, so that a change in between wakes the wait below.
        self.changed.borrow_and_update();
        match self.store.events_after(self.cursor, BATCH) {
            Err(expired) => {
                self.ended = true;
                push_line(&mut lines, "ERROR", &expired.status());
            }
            Ok(events) if events.is_empty() => self.wait(&mut lines).await,
            Ok(events) => {
                for event in events {
                    self.cursor = event.revision;
                    self.event(&mut lines, &event);
                }
            }
        }
        lines
    }

    async fn wait(&mut self, lines: &mut Vec<u8>) {
        tokio::select! {
            _ = self.changed.changed() => return,
            () = self.closing.cancelled() => self.ended = true,
            () = tokio::time::sleep_until(self.deadline) => self.ended = true,
            () = tokio::time::sleep(BOOKMARK_INTERVAL) => {}
        }
        if self.bookmarks {
            self.bookmark(lines, json!({}));
        }
    }

    fn event(&mut self, lines: &mut Vec<u8>, event: &Event) {
        if !event.key.is_in(self.resource.stored(), self.namespace.as_deref()) {
            return;
        }
        let selected = |object: &Value| self.filter.matches(&self.resource.to_served(object));
        let was = event.before.as_deref().is_some_and(selected);
        let is = event.change != Change::Deleted && selected(&event.object);
        match (was, is) {
            (false, false) => {}
            (false, true) => self.send(lines, "ADDED", &event.object),
            (true, true) => self.send(lines, "MODIFIED", &event.object),
            (true, false) if event.change == Change::Deleted => self.send(lines, "DELETED", &event.object),
            // The object has left the selection: send its last selected state with the version of this change.
            (true, false) => {
                let mut last = event.before.as_deref().cloned().unwrap_or_default();
                admit::put(&mut last, &["metadata", "resourceVersion"], event.revision.to_string().into());
                self.send(lines, "DELETED", &last);
            }
        }
    }

    fn send(&mut self, lines: &mut Vec<u8>, type_: &str, object: &Value) {
        let object = self.resource.to_served(object);
        if type_ == "ADDED" && !self.filter.matches(&object) {
            return;
        }
        match self.form {
            Form::Object => push_line(lines, type_, &object),
            Form::Metadata => push_line(lines, type_, &metadata_only(&object)),
            Form::Table(include) => {
                let metadata = json!({ "resourceVersion": object["metadata"]["resourceVersion"] });
                let mut table = table(self.resource, [&*object], metadata, include, Timestamp::now());
                if std::mem::replace(&mut self.sent_columns, true) {
                    admit::put(&mut table, &["columnDefinitions"], Value::Null);
                }
                push_line(lines, type_, &table);
            }
        }
    }

    fn bookmark(&self, lines: &mut Vec<u8>, annotations: Value) {
        let mut metadata = json!({ "resourceVersion": self.cursor.to_string(), "creationTimestamp": null });
        if annotations.as_object().is_some_and(|annotations| !annotations.is_empty()) {
            admit::put(&mut metadata, &["annotations"], annotations);
        }
        let bookmark = match self.form {
            Form::Table(_) => {
                json!({ "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "rows": [] })
            }
            Form::Metadata => metadata_only(&json!({ "metadata": metadata })),
            Form::Object => {
                json!({ "kind": self.resource.kind, "apiVersion": self.resource.api_version(), "metadata": metadata })
            }
        };
        push_line(lines, "BOOKMARK", &bookmark);
    }
}

fn push_line(lines: &mut Vec<u8>, type_: &str, object: &Value) {
    lines.extend_from_slice(json!({ "type": type_, "object": object }).to_string().as_bytes());
    lines.push(b'\n');
}
