//! What planning reads of the objects of one kind. Only that is kept: a Node, with its images and conditions, is ten times as large.

use std::{
    collections::HashMap,
    future::ready,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures::{Stream, StreamExt};
use kube::{
    Api, Resource, ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use tracing::debug;

/// The views of all objects of one kind, as last received from the API server.
pub(super) struct Views<V>(Arc<Mutex<Listed<V>>>);

struct Listed<V> {
    known: HashMap<String, Viewed<V>>,
    /// Those of a list that has not ended yet.
    coming: HashMap<String, Viewed<V>>,
    /// A list has ended.
    is_complete: bool,
}

/// What is kept of one object.
#[derive(Debug)]
pub(super) struct Viewed<V> {
    /// Its metadata.resourceVersion.
    pub version: Option<String>,
    pub view: Arc<V>,
}

impl<V> Clone for Viewed<V> {
    fn clone(&self) -> Self {
        Self { version: self.version.clone(), view: self.view.clone() }
    }
}

impl<V> Views<V> {
    /// Those of all objects, in any order.
    pub(super) fn all(&self) -> Vec<Arc<V>> {
        self.listed().known.values().map(|viewed| viewed.view.clone()).collect()
    }

    /// That of the object with this name.
    pub(super) fn named(&self, name: &str) -> Option<Viewed<V>> {
        self.listed().known.get(name).cloned()
    }

    /// True once all objects have been listed: before that, a missing one proves nothing.
    pub(super) fn are_complete(&self) -> bool {
        self.listed().is_complete
    }

    fn listed(&self) -> MutexGuard<'_, Listed<V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The views of no object yet, and the stream that fills them while it is polled: it yields an item whenever one has changed. An object of
/// which `view` returns None counts as missing.
pub(super) fn viewed<K, V>(
    api: Api<K>,
    config: watcher::Config,
    view: impl Fn(&K) -> Option<V> + Send + 'static,
) -> (Views<V>, impl Stream<Item = ()> + Send)
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
    V: PartialEq + Send + Sync + 'static,
{
    let listed = Arc::new(Mutex::new(Listed::default()));
    let views = Views(listed.clone());
    let events = watcher(api, config).default_backoff().filter_map(|event| ready(arrived(event)));
    let changes = events.filter_map(move |event| {
        let mut listed = listed.lock().unwrap_or_else(PoisonError::into_inner);
        ready(listed.take(event, &view).then_some(()))
    });
    (views, changes)
}

/// None, and a line in the log, if the watch was interrupted instead.
pub(super) fn arrived<T>(event: watcher::Result<T>) -> Option<T> {
    event.inspect_err(|error| debug!(%error, "a watch was interrupted")).ok()
}

impl<V> Default for Listed<V> {
    fn default() -> Self {
        Self { known: HashMap::new(), coming: HashMap::new(), is_complete: false }
    }
}

impl<V: PartialEq> Listed<V> {
    /// Returns true if a view has changed, or the first list has ended.
    fn take<K: Resource<DynamicType = ()>>(
        &mut self,
        event: watcher::Event<K>,
        view: impl Fn(&K) -> Option<V>,
    ) -> bool {
        match event {
            watcher::Event::Apply(object) => {
                let (name, now) = (object.name_any(), self.seen(&object, view));
                let before = match now.clone() {
                    Some(now) => self.known.insert(name, now),
                    None => self.known.remove(&name),
                };
                !is_same(before.as_ref(), now.as_ref())
            }
            watcher::Event::Delete(object) => self.known.remove(&object.name_any()).is_some(),
            watcher::Event::Init => {
                self.coming.clear();
                false
            }
            watcher::Event::InitApply(object) => {
                self.coming.extend(self.seen(&object, view).map(|now| (object.name_any(), now)));
                false
            }
            watcher::Event::InitDone => {
                let before = std::mem::replace(&mut self.known, std::mem::take(&mut self.coming));
                let is_first = !std::mem::replace(&mut self.is_complete, true);
                let is_as_before = |(name, now): (&String, &Viewed<V>)| is_same(before.get(name), Some(now));
                is_first || before.len() != self.known.len() || !self.known.iter().all(is_as_before)
            }
        }
    }

    /// What is to be kept of `object`. A view that has not changed is in memory once, also while all objects are listed again.
    fn seen<K: Resource<DynamicType = ()>>(&self, object: &K, view: impl Fn(&K) -> Option<V>) -> Option<Viewed<V>> {
        let view = view(object)?;
        let known = self.known.get(&object.name_any()).map(|known| &known.view).filter(|known| ***known == view);
        let view = known.cloned().unwrap_or_else(|| Arc::new(view));
        Some(Viewed { version: object.resource_version(), view })
    }
}

/// `Listed::seen` keeps a view that has not changed.
fn is_same<V>(before: Option<&Viewed<V>>, now: Option<&Viewed<V>>) -> bool {
    match (before, now) {
        (Some(before), Some(now)) => Arc::ptr_eq(&before.view, &now.view),
        (None, None) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use model::eligibility::NodeView;
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_change_of_what_planning_reads_is_told_and_versions_are_known_of_all() {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        let node = |name: &str, uid: &str, ready: &str, version: u32| -> Node {
            let condition = json!({"type": "Ready", "status": ready, "lastHeartbeatTime": "2026-01-01T00:00:00Z"});
            let metadata = json!({"name": name, "uid": uid, "resourceVersion": version.to_string()});
            serde_json::from_value(json!({"metadata": metadata, "status": {"conditions": [condition]}})).unwrap()
        };
        let mut listed = Listed::default();
        let none: [(&str, &str, &str); 0] = [];
        for (what, event, is_told, expected) in [
            ("a list begins", Init, false, &none[..]),
            ("its objects count only at its end", InitApply(node("n1", "a", "False", 1)), false, &[]),
            ("its end", InitDone, true, &[("n1", "a", "1")]),
            ("a heartbeat", Apply(node("n1", "a", "False", 2)), false, &[("n1", "a", "2")]),
            ("Ready", Apply(node("n1", "a", "True", 3)), true, &[("n1", "a", "3")]),
            ("another machine", Apply(node("n1", "b", "True", 4)), true, &[("n1", "b", "4")]),
            ("one that planning does not see", Apply(node("hidden", "c", "True", 5)), false, &[("n1", "b", "4")]),
            ("listed again", Init, false, &[("n1", "b", "4")]),
            ("all as before", InitApply(node("n1", "b", "True", 6)), false, &[("n1", "b", "4")]),
            ("but for the version", InitDone, false, &[("n1", "b", "6")]),
            ("a new one", Apply(node("n2", "d", "True", 7)), true, &[("n1", "b", "6"), ("n2", "d", "7")]),
            ("listed again", Init, false, &[("n1", "b", "6"), ("n2", "d", "7")]),
            (
                "cut off in the middle",
                InitApply(node("n1", "b", "False", 8)),
                false,
                &[("n1", "b", "6"), ("n2", "d", "7")],
            ),
            ("and again", Init, false, &[("n1", "b", "6"), ("n2", "d", "7")]),
            (
                "one was deleted meanwhile",
                InitApply(node("n2", "d", "True", 9)),
                false,
                &[("n1", "b", "6"), ("n2", "d", "7")],
            ),
            ("which the end tells", InitDone, true, &[("n2", "d", "9")]),
            ("a deletion", Delete(node("n2", "d", "True", 10)), true, &[]),
            ("of one that nobody knew", Delete(node("n3", "e", "True", 11)), false, &[]),
        ] {
            let view = |node: &Node| Some(NodeView::from(node)).filter(|view| view.name != "hidden");
            assert_eq!(listed.take(event, view), is_told, "{what}");
            let mut known: Vec<_> = listed.known.iter().collect();
            known.sort_by_key(|(name, _)| *name);
            let known = known.into_iter().map(|(name, viewed)| {
                assert_eq!(*name, viewed.view.name);
                (name.as_str(), viewed.view.uid.as_str(), viewed.version.as_deref().unwrap_or_default())
            });
            assert_eq!(known.collect::<Vec<_>>(), expected, "{what}");
        }
    }
}
