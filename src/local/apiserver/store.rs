//! The objects and their history, in memory.
//!
//! One lock, one counter: every change gets the next resourceVersion and one entry in a bounded log. Watches hold nothing
//! but a place in that log and read on from there, so a slow one costs no memory: it falls out of the log and is told to
//! list again.

use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{
    admit::{self, Mode, Part, is_held, is_terminating, meta},
    error::{ApiError, ResourceName},
    log::{Change, Event, Log},
    resources::{self, Resource},
};

/// How long Events are kept.
const EVENTS_KEPT_SECONDS: i64 = 3600;

/// Added to the counter by a restore. Versions handed out after the snapshot was written must not come again with other
/// content; a watch that knows one of them is then from the past and lists again.
const RESTORE_GAP: u64 = 1 << 20;

/// The format of snapshots.
const SNAPSHOT_FORMAT: u64 = 1;

/// Where an object is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    group: &'static str,
    plural: &'static str,
    namespace: String,
    name: String,
}

impl Key {
    /// `namespace` is empty for what has none.
    pub fn new(resource: &Resource, namespace: &str, name: &str) -> Self {
        let (group, plural) = (resource.group, resource.plural);
        Self {
            group,
            plural,
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// True for an object of `resource`, in `namespace` where one is named.
    pub fn is_in(&self, resource: &Resource, namespace: Option<&str>) -> bool {
        (self.group, self.plural) == (resource.group, resource.plural)
            && namespace.is_none_or(|namespace| self.namespace == namespace)
    }
}

/// What became of a delete.
#[derive(Debug, Clone)]
pub enum Deleted {
    /// It is gone; this was its last state.
    Gone(Arc<Value>),
    /// Finalizers hold it, or what is in it.
    Going(Arc<Value>),
}

/// What must hold for a delete.
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
    /// Not JSON.
    #[error("the API server's snapshot can't be read; remove it to start with an empty cluster")]
    Json(#[from] serde_json::Error),
    /// Written by another version.
    #[error(
        "the API server's snapshot has format {0}, this version reads {SNAPSHOT_FORMAT}; remove it to start with an empty cluster"
    )]
    Format(Value),
}

/// The objects of one cluster.
#[derive(Debug)]
pub struct Store {
    inner: Mutex<Inner>,
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    objects: BTreeMap<Key, Arc<Value>>,
    log: Log,
}

impl Default for Store {
    fn default() -> Self {
        Self::new()
    }
}

impl Store {
    /// A new cluster: the namespaces that every cluster has, and the definitions of our kinds.
    pub fn new() -> Self {
        let store = Self::with(Inner::default());
        let namespaces = ["default", "kube-system"]
            .map(|name| json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }));
        for object in namespaces.into_iter().chain(resources::definitions()) {
            if let Some(resource) = resources::of(&object)
                && let Err(error) = store.create(resource, "", object, Mode::default())
            {
                tracing::error!(%error, "a new cluster lacks an object");
            }
        }
        store
    }

    fn with(inner: Inner) -> Self {
        let (changed, _) = watch::channel(inner.log.revision());
        Self {
            inner: Mutex::new(inner),
            changed,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every change is complete before the next statement that could panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write<T>(&self, work: impl FnOnce(&mut Inner) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let (done, revision) = {
            let mut inner = self.lock();
            (work(&mut inner), inner.log.revision())
        };
        self.changed
            .send_if_modified(|seen| std::mem::replace(seen, revision.max(*seen)) < revision);
        done
    }

    /// The object.
    ///
    /// # Errors
    /// [`ApiError::NotFound`]
    pub fn get(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        self.lock().get(resource, namespace, name)
    }

    /// All objects of a kind, in `namespace` where one is named, and the revision at which they were so.
    pub fn list(&self, resource: &Resource, namespace: Option<&str>) -> (Vec<Arc<Value>>, u64) {
        let inner = self.lock();
        let objects = inner
            .range(resource, namespace)
            .map(|(_, object)| object.clone())
            .collect();
        (objects, inner.log.revision())
    }

    /// True where requests for this kind are answered: the definition of a custom one is there.
    pub fn serves(&self, resource: &Resource) -> bool {
        self.lock().definition(resource).is_ok()
    }

    /// Stores a new object.
    ///
    /// # Errors
    /// [`ApiError`] of [`admit::create`], [`ApiError::AlreadyExists`], [`ApiError::NotFound`] where there is no such
    /// namespace, [`ApiError::Forbidden`] where it is being deleted.
    pub fn create(
        &self,
        resource: &Resource,
        namespace: &str,
        object: Value,
        mode: Mode,
    ) -> Result<Arc<Value>, ApiError> {
        let object = admit::create(resource, namespace, object, mode.strict)?;
        let key = Key::new(resource, namespace, meta(&object, "name"));
        self.write(|inner| {
            inner.may_create(resource, &key)?;
            if mode.dry_run {
                return Ok(Arc::new(object));
            }
            let object = inner.commit(Change::Added, key, object);
            if resource.kind == "Event" {
                inner.expire_events(resource);
            }
            Ok(object)
        })
    }

    /// Changes `part` of an object to what `change` makes of it. `change` runs under the lock, so a patch never meets a
    /// conflict that it did not ask for.
    ///
    /// # Errors
    /// That of `change`, [`ApiError`] of [`admit::update`], [`ApiError::NotFound`].
    pub fn update(
        &self,
        resource: &Resource,
        (namespace, name): (&str, &str),
        part: Part,
        mode: Mode,
        change: impl FnOnce(&Value) -> Result<Value, ApiError>,
    ) -> Result<Arc<Value>, ApiError> {
        self.write(|inner| {
            let old = inner.get(resource, namespace, name)?;
            let new = admit::update(resource, part, &old, change(&old)?, mode.strict)?;
            // Writing what is there already is no change: no new version, no event.
            if new == *old {
                return Ok(old);
            }
            if mode.dry_run {
                return Ok(Arc::new(new));
            }
            let key = Key::new(resource, namespace, name);
            if !resource.is_container() && is_terminating(&new) && !is_held(&new) {
                return Ok(inner.remove(key, new));
            }
            let new = inner.commit(Change::Modified, key, new);
            if resource.is_container() {
                inner.settle(resource, name);
            }
            Ok(new)
        })
    }

    /// Deletes an object, or asks for it where finalizers hold it or something is in it.
    ///
    /// # Errors
    /// [`ApiError::NotFound`], [`ApiError::Conflict`] where a precondition does not hold.
    pub fn delete(
        &self,
        resource: &Resource,
        (namespace, name): (&str, &str),
        only_if: &Preconditions,
        mode: Mode,
    ) -> Result<Deleted, ApiError> {
        self.write(|inner| {
            let old = inner.get(resource, namespace, name)?;
            for (field, want) in [("uid", &only_if.uid), ("resourceVersion", &only_if.resource_version)] {
                if let Some(want) = want.as_deref().filter(|want| *want != meta(&old, field)) {
                    let why = format!("precondition failed: {field} is {}, not {want}", meta(&old, field));
                    return Err(ApiError::Conflict {
                        resource: resource.name(),
                        name: name.into(),
                        why,
                    });
                }
            }
            if mode.dry_run {
                return Ok(Deleted::Gone(old));
            }
            let key = Key::new(resource, namespace, name);
            Ok(inner.delete(resource, key, &old))
        })
    }

    /// The changes after `revision`, oldest first, at most `limit`.
    ///
    /// # Errors
    /// [`ApiError::Expired`] where some of them are no longer known.
    pub fn events_after(&self, revision: u64, limit: usize) -> Result<Vec<Arc<Event>>, ApiError> {
        self.lock().log.after(revision, limit)
    }

    /// Tells of each new revision.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Everything as JSON, for [`Store::restore`]. Secrets are in it: write it to a file that only its owner can read.
    ///
    /// # Errors
    /// Never in practice: what is stored was JSON.
    pub fn snapshot(&self) -> Result<Vec<u8>, serde_json::Error> {
        #[derive(Serialize)]
        struct Snapshot<'a> {
            format: u64,
            revision: u64,
            objects: Vec<&'a Value>,
        }
        let (objects, revision) = {
            let inner = self.lock();
            (
                inner.objects.values().cloned().collect::<Vec<_>>(),
                inner.log.revision(),
            )
        };
        let objects = objects.iter().map(AsRef::as_ref).collect();
        serde_json::to_vec(&Snapshot {
            format: SNAPSHOT_FORMAT,
            revision,
            objects,
        })
    }

    /// The cluster of a [`Store::snapshot`]. Watches from before are told to list again.
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
            // A kind that this version does not serve any more is of no use to anybody.
            let resource = resources::of(&object)?;
            Some((
                Key::new(resource, meta(&object, "namespace"), meta(&object, "name")),
                Arc::new(object),
            ))
        });
        Ok(Self::with(Inner {
            objects: keyed.collect(),
            log: Log::starting_at(revision + RESTORE_GAP),
        }))
    }
}

impl Inner {
    fn get(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        let found = self.objects.get(&Key::new(resource, namespace, name)).cloned();
        found.ok_or_else(|| ApiError::NotFound {
            resource: resource.name(),
            name: name.into(),
        })
    }

    fn range<'a>(
        &'a self,
        resource: &Resource,
        namespace: Option<&str>,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Value>)> {
        let first = Key::new(resource, namespace.unwrap_or_default(), "");
        let (group, plural, namespace) = (first.group, first.plural, namespace.map(str::to_owned));
        self.objects
            .range((Bound::Included(first), Bound::Unbounded))
            .take_while(move |(key, _)| {
                (key.group, key.plural) == (group, plural)
                    && namespace.as_ref().is_none_or(|namespace| key.namespace == *namespace)
            })
    }

    /// The definition a custom kind stands on, `None` for what is built in.
    fn definition(&self, resource: &Resource) -> Result<Option<Arc<Value>>, ApiError> {
        let (Some(custom), Some(definitions)) = (
            &resource.custom,
            resources::find("apiextensions.k8s.io", "customresourcedefinitions"),
        ) else {
            return Ok(None);
        };
        self.get(definitions, "", &custom.definition)
            .map(Some)
            .map_err(|_| ApiError::NoSuchPath)
    }

    fn may_create(&self, resource: &Resource, key: &Key) -> Result<(), ApiError> {
        let forbidden = |why: String| {
            let (resource, name) = (resource.name(), key.name.clone());
            Err(ApiError::Forbidden { resource, name, why })
        };
        if self
            .definition(resource)?
            .is_some_and(|definition| is_terminating(&definition))
        {
            return forbidden("its CustomResourceDefinition is being deleted".into());
        }
        if let (true, Some(namespaces)) = (resource.namespaced, resources::find("", "namespaces"))
            && is_terminating(&*self.get(namespaces, "", &key.namespace)?)
        {
            let namespace = &key.namespace;
            return forbidden(format!(
                "unable to create new content in namespace {namespace} because it is being terminated"
            ));
        }
        if self.objects.contains_key(key) {
            return Err(ApiError::AlreadyExists {
                resource: resource.name(),
                name: key.name.clone(),
            });
        }
        Ok(())
    }

    /// The only place where something changes.
    fn commit(&mut self, change: Change, key: Key, mut object: Value) -> Arc<Value> {
        let revision = self.log.revision() + 1;
        admit::put(
            &mut object,
            &["metadata", "resourceVersion"],
            revision.to_string().into(),
        );
        let object = Arc::new(object);
        let before = match change {
            Change::Added | Change::Modified => self.objects.insert(key.clone(), object.clone()),
            Change::Deleted => self.objects.remove(&key),
        };
        self.log.push(change, key, object.clone(), before);
        object
    }

    fn delete(&mut self, resource: &Resource, key: Key, old: &Arc<Value>) -> Deleted {
        if !resource.is_container() && !is_held(old) {
            return Deleted::Gone(self.remove(key, Value::clone(old)));
        }
        let mut object = old.clone();
        if !is_terminating(old) {
            object = self.commit(Change::Modified, key.clone(), admit::terminating(resource, old));
        }
        if resource.is_container() {
            self.settle(resource, &key.name);
        }
        Deleted::Going(object)
    }

    /// Removes an object that nothing holds any more, and then perhaps the container that waited for it.
    fn remove(&mut self, key: Key, last: Value) -> Arc<Value> {
        let removed = self.commit(Change::Deleted, key.clone(), last);
        if let Some(namespaces) = resources::find("", "namespaces") {
            self.settle(namespaces, &key.namespace);
        }
        let definitions = resources::find("apiextensions.k8s.io", "customresourcedefinitions");
        if let (Some(definitions), false) = (definitions, key.group.is_empty()) {
            self.settle(
                definitions,
                &ResourceName {
                    group: key.group,
                    plural: key.plural,
                }
                .to_string(),
            );
        }
        removed
    }

    /// Takes a container that is being deleted as far as it goes: first what is in it, then itself.
    fn settle(&mut self, container: &Resource, name: &str) {
        let Ok(object) = self.get(container, "", name) else {
            return;
        };
        // A finalizer of `spec` other than Kubernetes' own stands for pods: a real cluster deletes those first, and the
        // rest only when they are gone.
        let finalizers = object["spec"]["finalizers"].as_array();
        if !is_terminating(&object) || finalizers.is_some_and(|all| all.iter().any(|one| one != "kubernetes")) {
            return;
        }
        let is_content = |key: &Key| match container.kind {
            "Namespace" => key.namespace == name,
            _ => {
                ResourceName {
                    group: key.group,
                    plural: key.plural,
                }
                .to_string()
                    == name
            }
        };
        let content = |inner: &Self| -> Vec<(Key, Arc<Value>)> {
            let content = inner.objects.iter().filter(|(key, _)| is_content(key));
            content.map(|(key, object)| (key.clone(), object.clone())).collect()
        };
        for (key, object) in content(self) {
            match resources::find(key.group, key.plural) {
                Some(resource) if is_held(&object) && !is_terminating(&object) => {
                    self.commit(Change::Modified, key, admit::terminating(resource, &object));
                }
                _ if is_held(&object) => {}
                _ => drop(self.commit(Change::Deleted, key, Value::clone(&object))),
            }
        }
        if content(self).is_empty() && !is_held(&object) {
            self.commit(Change::Deleted, Key::new(container, "", name), Value::clone(&object));
        }
    }

    fn expire_events(&mut self, events: &Resource) {
        let oldest = admit::timestamp(-EVENTS_KEPT_SECONDS);
        let old = |object: &Value| meta(object, "creationTimestamp") < oldest.as_str();
        let gone: Vec<_> = self.range(events, None).filter(|(_, object)| old(object)).collect();
        let gone: Vec<_> = gone
            .into_iter()
            .map(|(key, object)| (key.clone(), object.clone()))
            .collect();
        for (key, object) in gone {
            self.commit(Change::Deleted, key, Value::clone(&object));
        }
    }
}
