//! The objects themselves, and the rules by which they come and go. Not locked: that is [`Store`](super::Store)'s part.

use std::{collections::BTreeMap, ops::Bound, sync::Arc};

use serde_json::Value;

use super::{
    admit::{self, is_held, is_terminating, meta},
    error::{ApiError, ResourceName},
    log::{Change, Log},
    resources::{self, Resource},
};

/// How long Events are kept.
const EVENTS_KEPT_SECONDS: i64 = 3600;

/// Where an object is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    resource: ResourceName,
    namespace: String,
    name: String,
}

impl Key {
    /// `namespace` is empty for what has none.
    pub fn new(resource: &Resource, namespace: &str, name: &str) -> Self {
        Self { resource: resource.name(), namespace: namespace.into(), name: name.into() }
    }

    /// True for an object of `resource`, in `namespace` where one is named.
    pub fn is_in(&self, resource: &Resource, namespace: Option<&str>) -> bool {
        self.resource == resource.name() && namespace.is_none_or(|namespace| self.namespace == namespace)
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

/// Every object, and what became of it.
#[derive(Debug, Default)]
pub struct Objects {
    /// The objects of all kinds.
    pub all: BTreeMap<Key, Arc<Value>>,
    /// Their changes.
    pub log: Log,
}

impl Objects {
    /// The object.
    pub fn get(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        let found = self.all.get(&Key::new(resource, namespace, name)).cloned();
        found.ok_or_else(|| ApiError::NotFound { resource: resource.name(), name: name.into() })
    }

    /// The objects of a kind, in `namespace` where one is named.
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

    /// The definition a custom kind stands on, `None` for what is built in.
    pub fn definition(&self, resource: &Resource) -> Result<Option<Arc<Value>>, ApiError> {
        let (Some(custom), Some(definitions)) =
            (&resource.custom, resources::find("apiextensions.k8s.io", "customresourcedefinitions"))
        else {
            return Ok(None);
        };
        self.get(definitions, "", &custom.definition).map(Some).map_err(|_| ApiError::NoSuchPath)
    }

    /// Refuses what has no place to live in, or lives there already.
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

    /// The only place where something changes.
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

    /// Removes an object, or asks for it where finalizers hold it or something is in it.
    pub fn delete(&mut self, resource: &Resource, key: Key, old: &Arc<Value>) -> Deleted {
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
    pub fn remove(&mut self, key: Key, last: Value) -> Arc<Value> {
        let removed = self.commit(Change::Deleted, key.clone(), last);
        if let Some(namespaces) = resources::find("", "namespaces") {
            self.settle(namespaces, &key.namespace);
        }
        let definitions = resources::find("apiextensions.k8s.io", "customresourcedefinitions");
        if let Some(definitions) = definitions {
            self.settle(definitions, &key.resource.to_string());
        }
        removed
    }

    /// Takes a container that is being deleted as far as it goes: first what is in it, then itself.
    pub fn settle(&mut self, container: &Resource, name: &str) {
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
            _ => key.resource.to_string() == name,
        };
        let content = |objects: &Self| -> Vec<(Key, Arc<Value>)> {
            let content = objects.all.iter().filter(|(key, _)| is_content(key));
            content.map(|(key, object)| (key.clone(), object.clone())).collect()
        };
        for (key, object) in content(self) {
            match resources::find(key.resource.group, key.resource.plural) {
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

    /// Forgets old Events, so that a long life does not fill the memory.
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
