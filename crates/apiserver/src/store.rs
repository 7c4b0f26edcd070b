//! The objects and their history, in memory.
//!
//! There is one lock and one counter: every change gets the next resourceVersion and one entry in a bounded log. A
//! watch only keeps its position in that log, so a slow one costs no memory: once its position has been dropped from
//! the log, the client must list again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    admit::{self, Mode, Part, is_held, is_terminating, meta},
    error::ApiError,
    key::Key,
    log::{Change, Event, Log},
    objects::{Deleted, Objects},
    resources::{self, Resource},
};

/// A restore adds this to the counter, so that versions issued after the snapshot are not issued again with other
/// content; a watch at such a version is then too old and lists again.
const RESTORE_GAP: u64 = 1 << 20;

/// The version of the snapshot format.
const SNAPSHOT_FORMAT: u64 = 1;

/// Conditions for a delete.
#[derive(Debug, Clone, Default)]
pub struct Preconditions {
    /// `metadata.uid`.
    pub uid: Option<String>,
    /// `metadata.resourceVersion`.
    pub resource_version: Option<String>,
}

/// Why a snapshot could not be restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The snapshot is not valid JSON.
    #[error("the API server's snapshot can't be read; remove it to start with an empty cluster")]
    Json(#[from] serde_json::Error),
    /// Another version of this program wrote it.
    #[error(
        "the API server's snapshot has format {0}, but this version reads {SNAPSHOT_FORMAT}; remove it to start with an empty cluster"
    )]
    Format(Value),
}

/// The objects of one cluster. Events are passed in and out in the form of core/v1.
#[derive(Debug)]
pub struct Store {
    objects: Mutex<Objects>,
    changed: watch::Sender<u64>,
}

impl Default for Store {
    fn default() -> Self {
        Self::new()
    }
}

impl Store {
    /// A new cluster with the namespaces that every cluster has and the definitions of our kinds.
    pub fn new() -> Self {
        let store = Self::with(Objects::default());
        let namespaces = ["default", "kube-system"]
            .map(|name| json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }));
        for object in namespaces.into_iter().chain(resources::definitions()) {
            if let Some(resource) = resources::of(&object)
                && let Err(error) = store.create(resource, "", object, Mode::default())
            {
                tracing::error!(%error, "can't create an object of the new cluster");
            }
        }
        store
    }

    fn with(objects: Objects) -> Self {
        let (changed, _) = watch::channel(objects.log.revision());
        Self { objects: Mutex::new(objects), changed }
    }

    fn lock(&self) -> MutexGuard<'_, Objects> {
        // A poisoned lock is safe: every change is complete before the next statement that could panic.
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write<T>(&self, work: impl FnOnce(&mut Objects) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let (done, revision) = {
            let mut objects = self.lock();
            (work(&mut objects), objects.log.revision())
        };
        self.changed.send_if_modified(|seen| std::mem::replace(seen, revision.max(*seen)) < revision);
        done
    }

    /// Returns an object.
    ///
    /// # Errors
    /// [`ApiError::NotFound`]
    pub fn get(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        self.lock().get(resource, namespace, name)
    }

    /// All objects of a kind, in one namespace if `namespace` is given, and the revision of that state.
    pub fn list(&self, resource: &Resource, namespace: Option<&str>) -> (Vec<Arc<Value>>, u64) {
        let objects = self.lock();
        let found = objects.range(resource, namespace);
        (found.map(|(_, object)| object.clone()).collect(), objects.log.revision())
    }

    /// True if the kind is served: a custom kind needs its definition.
    pub fn serves(&self, resource: &Resource) -> bool {
        self.lock().definition(resource).is_ok()
    }

    /// Stores a new object.
    ///
    /// # Errors
    /// [`ApiError::BadRequest`] or [`ApiError::Invalid`] if the object is wrong, [`ApiError::AlreadyExists`],
    /// [`ApiError::NotFound`] if the namespace doesn't exist, [`ApiError::Forbidden`] if it is being deleted.
    pub fn create(
        &self,
        resource: &Resource,
        namespace: &str,
        object: Value,
        mode: Mode,
    ) -> Result<Arc<Value>, ApiError> {
        let object = admit::create(resource, namespace, object, mode.strict)?;
        let key = Key::new(resource, namespace, meta(&object, "name"));
        self.write(|objects| {
            objects.may_create(resource, &key)?;
            if mode.dry_run {
                return Ok(Arc::new(object));
            }
            let object = objects.commit(Change::Added, key, object);
            if resource.kind == "Event" {
                objects.expire_events(resource);
            }
            Ok(object)
        })
    }

    /// Replaces `part` of an object by the result of `change`. `change` runs under the lock, so a patch never gets a
    /// conflict unless it contains a resourceVersion.
    ///
    /// # Errors
    /// That of `change`, [`ApiError::NotFound`], [`ApiError::Conflict`], [`ApiError::BadRequest`],
    /// [`ApiError::Invalid`].
    pub fn update(
        &self,
        resource: &Resource,
        (namespace, name): (&str, &str),
        part: Part,
        mode: Mode,
        change: impl FnOnce(&Value) -> Result<Value, ApiError>,
    ) -> Result<Arc<Value>, ApiError> {
        self.write(|objects| {
            let old = objects.get(resource, namespace, name)?;
            let new = admit::update(resource, part, &old, change(&old)?, mode.strict)?;
            // If nothing changes, there is no new version and no event.
            if new == *old {
                return Ok(old);
            }
            if mode.dry_run {
                return Ok(Arc::new(new));
            }
            let key = Key::new(resource, namespace, name);
            if !resource.is_container() && is_terminating(&new) && !is_held(&new) {
                return Ok(objects.remove(key, new));
            }
            let new = objects.commit(Change::Modified, key, new);
            if resource.is_container() {
                objects.continue_deletion(resource, name);
            }
            Ok(new)
        })
    }

    /// Removes an object, or marks it as being deleted if finalizers, contents or what it runs hold it.
    ///
    /// # Errors
    /// [`ApiError::NotFound`], [`ApiError::Conflict`] if a precondition is not met.
    pub fn delete(
        &self,
        resource: &Resource,
        (namespace, name): (&str, &str),
        only_if: &Preconditions,
        mode: Mode,
    ) -> Result<Deleted, ApiError> {
        self.write(|objects| {
            let old = objects.get(resource, namespace, name)?;
            for (field, want) in [("uid", &only_if.uid), ("resourceVersion", &only_if.resource_version)] {
                if let Some(want) = want.as_deref().filter(|want| *want != meta(&old, field)) {
                    let why = format!("precondition failed: {field} is {}, not {want}", meta(&old, field));
                    return Err(ApiError::Conflict { resource: resource.name(), name: name.into(), why });
                }
            }
            if mode.dry_run {
                return Ok(Deleted::Gone(old));
            }
            let key = Key::new(resource, namespace, name);
            Ok(objects.delete(resource, key, &old, mode.grace))
        })
    }

    /// The changes after `revision`, oldest first, at most `limit`.
    ///
    /// # Errors
    /// [`ApiError::Expired`] if some of them are no longer kept.
    pub fn events_after(&self, revision: u64, limit: usize) -> Result<Vec<Arc<Event>>, ApiError> {
        self.lock().log.after(revision, limit)
    }

    /// A channel with the latest revision.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// All objects as JSON for [`Store::restore`]. Contains Secrets: write it to a file that only its owner can read.
    ///
    /// # Errors
    /// None in practice, since stored objects come from JSON.
    pub fn snapshot(&self) -> Result<Vec<u8>, serde_json::Error> {
        #[derive(Serialize)]
        struct Snapshot<'a> {
            format: u64,
            revision: u64,
            objects: Vec<&'a Value>,
        }
        let (objects, revision) = {
            let objects = self.lock();
            (objects.all.values().cloned().collect::<Vec<_>>(), objects.log.revision())
        };
        let objects = objects.iter().map(AsRef::as_ref).collect();
        serde_json::to_vec(&Snapshot { format: SNAPSHOT_FORMAT, revision, objects })
    }

    /// Restores the cluster of a [`Store::snapshot`]. Watches from before must list again.
    ///
    /// # Errors
    /// [`RestoreError`]
    pub fn restore(snapshot: &[u8]) -> Result<Self, RestoreError> {
        let mut snapshot: Value = serde_json::from_slice(snapshot)?;
        if snapshot["format"] != SNAPSHOT_FORMAT {
            return Err(RestoreError::Format(snapshot["format"].take()));
        }
        let revision = snapshot["revision"].as_u64().unwrap_or_default();
        let objects: Vec<Value> = serde_json::from_value(snapshot["objects"].take())?;
        let keyed = objects.into_iter().filter_map(|object| {
            // Skip kinds that this version doesn't serve any more.
            let resource = resources::of(&object)?;
            Some((Key::new(resource, meta(&object, "namespace"), meta(&object, "name")), Arc::new(object)))
        });
        Ok(Self::with(Objects { all: keyed.collect(), log: Log::starting_at(revision.saturating_add(RESTORE_GAP)) }))
    }
}
