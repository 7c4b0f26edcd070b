//! The objects, and the rules for creating and deleting them. Without locking, which [`Store`](super::Store) adds.

use std::{collections::BTreeMap, ops::Bound, sync::Arc};

use serde_json::Value;

use super::{
    admit::{self, is_held, is_terminating, meta},
    error::ApiError,
    key::Key,
    log::{Change, Log},
    pods,
    resources::{self, Resource},
};

/// How long Events are kept.
const EVENTS_KEPT_SECONDS: i64 = 3600;

/// The result of a delete.
#[derive(Debug, Clone)]
pub enum Deleted {
    /// The object is removed; this was its last state.
    Gone(Arc<Value>),
    /// The object is being deleted, but finalizers, its contents or what it runs still hold it.
    Going(Arc<Value>),
}

/// All objects and the log of their changes.
#[derive(Debug, Default)]
pub struct Objects {
    /// All objects.
    pub all: BTreeMap<Key, Arc<Value>>,
    /// The log of their changes.
    pub log: Log,
}

impl Objects {
    /// The object, or [`ApiError::NotFound`].
    pub fn get(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        let found = self.all.get(&Key::new(resource, namespace, name)).cloned();
        found.ok_or_else(|| ApiError::NotFound { resource: resource.name(), name: name.into() })
    }

    /// The objects of a kind, in one namespace if `namespace` is given.
    pub fn range<'a>(
        &'a self,
        resource: &Resource,
        namespace: Option<&str>,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Value>)> {
        let first = Key::new(resource, namespace.unwrap_or_default(), "");
        let (resource, namespace) = (first.resource, namespace.map(str::to_owned));
        self.all.range((Bound::Included(first), Bound::Unbounded)).take_while(move |(key, _)| {
            key.resource == resource && namespace.as_ref().is_none_or(|namespace| key.namespace == *namespace)
        })
    }

    /// The CustomResourceDefinition of a custom kind; `None` for a built-in kind.
    pub fn definition(&self, resource: &Resource) -> Result<Option<Arc<Value>>, ApiError> {
        let (Some(custom), Some(definitions)) =
            (&resource.custom, resources::find("apiextensions.k8s.io", "customresourcedefinitions"))
        else {
            return Ok(None);
        };
        self.get(definitions, "", &custom.definition).map(Some).map_err(|_| ApiError::NoSuchPath)
    }

    /// Refuses an object whose namespace or definition is missing or being deleted, or that exists already.
    pub fn may_create(&self, resource: &Resource, key: &Key) -> Result<(), ApiError> {
        let forbidden = |why: String| {
            let (resource, name) = (resource.name(), key.name.clone());
            Err(ApiError::Forbidden { resource, name, why })
        };
        if self.definition(resource)?.is_some_and(|definition| is_terminating(&definition)) {
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
        if self.all.contains_key(key) {
            return Err(ApiError::AlreadyExists { resource: resource.name(), name: key.name.clone() });
        }
        Ok(())
    }

    /// Applies a change and logs it. All changes go through here.
    pub fn commit(&mut self, change: Change, key: Key, mut object: Value) -> Arc<Value> {
        let revision = self.log.revision() + 1;
        admit::put(&mut object, &["metadata", "resourceVersion"], revision.to_string().into());
        let object = Arc::new(object);
        let before = match change {
            Change::Added | Change::Modified => self.all.insert(key.clone(), object.clone()),
            Change::Deleted => self.all.remove(&key),
        };
        self.log.push(change, key, object.clone(), before);
        object
    }

    /// Removes an object, or marks it as being deleted if finalizers, contents or what it runs hold it. `grace`: see
    /// [`Mode`](admit::Mode).
    pub fn delete(&mut self, resource: &Resource, key: Key, old: &Arc<Value>, grace: Option<i64>) -> Deleted {
        let grace = pods::grace(resource, old, grace);
        let before = old["metadata"]["deletionGracePeriodSeconds"].as_i64();
        let mut object = old.clone();
        // A second delete can only shorten the time.
        if before.is_none_or(|before| grace < before) {
            let marked = admit::terminating(resource, old, grace);
            if !resource.is_container() && !is_held(&marked) {
                return Deleted::Gone(self.remove(key, Value::clone(old)));
            }
            object = self.commit(Change::Modified, key.clone(), marked);
        }
        if resource.is_container() {
            self.continue_deletion(resource, &key.name);
        }
        Deleted::Going(object)
    }

    /// Removes an object that nothing holds, and then its container if that is being deleted and was waiting for it.
    pub fn remove(&mut self, key: Key, last: Value) -> Arc<Value> {
        let removed = self.commit(Change::Deleted, key.clone(), last);
        if let Some(namespaces) = resources::find("", "namespaces") {
            self.continue_deletion(namespaces, &key.namespace);
        }
        let definitions = resources::find("apiextensions.k8s.io", "customresourcedefinitions");
        if let Some(definitions) = definitions {
            self.continue_deletion(definitions, &key.resource.to_string());
        }
        removed
    }

    /// Continues the deletion of a container as far as possible: its contents first, then the container itself.
    pub fn continue_deletion(&mut self, container: &Resource, name: &str) {
        let Ok(object) = self.get(container, "", name) else {
            return;
        };
        // Any finalizer in `spec` except Kubernetes' own delays the deletion of the contents, like pods in a real
        // cluster, which are deleted first.
        let finalizers = object["spec"]["finalizers"].as_array();
        if !is_terminating(&object) || finalizers.is_some_and(|all| all.iter().any(|one| one != "kubernetes")) {
            return;
        }
        let is_content = |key: &Key| match container.kind {
            "Namespace" => key.namespace == name,
            _ => key.resource.to_string() == name,
        };
        let content = |objects: &Self| -> Vec<(Key, Arc<Value>)> {
            let content = objects.all.iter().filter(|(key, _)| is_content(key));
            content.map(|(key, object)| (key.clone(), object.clone())).collect()
        };
        for (key, object) in content(self) {
            match resources::find(key.resource.group, key.resource.plural) {
                Some(resource) if is_held(&object) && !is_terminating(&object) => {
                    self.commit(Change::Modified, key, admit::terminating(resource, &object, 0));
                }
                _ if is_held(&object) => {}
                _ => drop(self.commit(Change::Deleted, key, Value::clone(&object))),
            }
        }
        if content(self).is_empty() && !is_held(&object) {
            self.commit(Change::Deleted, Key::new(container, "", name), Value::clone(&object));
        }
    }

    /// Removes old Events, so that they don't fill the memory.
    pub fn expire_events(&mut self, events: &Resource) {
        let oldest = admit::timestamp(-EVENTS_KEPT_SECONDS);
        let old = |object: &Value| meta(object, "creationTimestamp") < oldest.as_str();
        let gone = self.range(events, None).filter(|(_, object)| old(object));
        let gone: Vec<_> = gone.map(|(key, object)| (key.clone(), object.clone())).collect();
        for (key, object) in gone {
            self.commit(Change::Deleted, key, Value::clone(&object));
        }
    }
}
