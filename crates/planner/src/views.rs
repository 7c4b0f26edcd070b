//! Caches the part of each watched object that planning reads. A whole Node, with its images and conditions, is much larger.

use std::{
    collections::HashMap,
    future::ready,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures::{Stream, StreamExt};
use kube::{
    Api, Resource, ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use tracing::debug;

/// The views of all objects of one kind, as last received from the API server.
pub(super) struct Views<V>(Arc<Mutex<Contents<V>>>);

struct Contents<V> {
    /// By name.
    entries: HashMap<String, Entry<V>>,
    /// Entries of a list that has not ended.
    listing: HashMap<String, Entry<V>>,
    /// A list has ended.
    is_complete: bool,
}

/// What is kept of one object.
#[derive(Debug)]
pub(super) struct Entry<V> {
    /// metadata.resourceVersion
    pub version: Option<String>,
    pub view: Arc<V>,
}

impl<V> Clone for Entry<V> {
    fn clone(&self) -> Self {
        Self { version: self.version.clone(), view: self.view.clone() }
    }
}

impl<V> Views<V> {
    /// All views, in any order.
    pub(super) fn all(&self) -> Vec<Arc<V>> {
        self.contents().entries.values().map(|entry| entry.view.clone()).collect()
    }

    /// What is kept of the object with this name.
    pub(super) fn named(&self, name: &str) -> Option<Entry<V>> {
        self.contents().entries.get(name).cloned()
    }

    /// True once all objects have been listed: before that, a missing one proves nothing.
    pub(super) fn are_complete(&self) -> bool {
        self.contents().is_complete
    }

    fn contents(&self) -> MutexGuard<'_, Contents<V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An empty cache, and the stream that fills it while it is polled: it yields an item whenever a view has changed. `view_of` makes the view of an object;
/// one for which it returns None counts as missing.
pub(super) fn watch_views<K, V>(
    api: Api<K>,
    config: watcher::Config,
    view_of: impl Fn(K) -> Option<V> + Send + 'static,
) -> (Views<V>, impl Stream<Item = ()> + Send)
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
    V: PartialEq + Send + Sync + 'static,
{
    let views = Views(Arc::default());
    let filled = Views(Arc::clone(&views.0));
    let events = watcher(api, config).default_backoff().filter_map(|event| ready(arrived(event)));
    let changes = events.filter_map(move |event| ready(filled.contents().apply(event, &view_of).then_some(())));
    (views, changes)
}

/// None, and a line in the log, if the watch was interrupted instead.
pub(super) fn arrived<T>(event: watcher::Result<T>) -> Option<T> {
    event.inspect_err(|error| debug!(%error, "a watch was interrupted")).ok()
}

impl<V> Default for Contents<V> {
    fn default() -> Self {
        Self { entries: HashMap::new(), listing: HashMap::new(), is_complete: false }
    }
}

impl<V: PartialEq> Contents<V> {
    /// Returns true if a view has changed, or the first list has ended.
    fn apply<K: Resource<DynamicType = ()>>(
        &mut self,
        event: watcher::Event<K>,
        view_of: impl Fn(K) -> Option<V>,
    ) -> bool {
        match event {
            watcher::Event::Apply(object) => {
                let name = object.name_any();
                let now = self.entry_of(&name, object, view_of);
                let view = now.as_ref().map(|now| now.view.clone());
                let before = match now {
                    Some(now) => self.entries.insert(name, now),
                    None => self.entries.remove(&name),
                };
                before.map(|before| before.view) != view
            }
            watcher::Event::Delete(object) => self.entries.remove(&object.name_any()).is_some(),
            watcher::Event::Init => {
                self.listing.clear();
                false
            }
            watcher::Event::InitApply(object) => {
                let name = object.name_any();
                if let Some(entry) = self.entry_of(&name, object, view_of) {
                    self.listing.insert(name, entry);
                }
                false
            }
            watcher::Event::InitDone => {
                let before = mem::replace(&mut self.entries, mem::take(&mut self.listing));
                let is_first = !mem::replace(&mut self.is_complete, true);
                is_first || !are_same(&before, &self.entries)
            }
        }
    }

    /// What is to be kept of `object`, which has this name. A view that has not changed is the known one, so that listing all objects again
    /// does not hold each view twice.
    fn entry_of<K: Resource<DynamicType = ()>>(
        &self,
        name: &str,
        object: K,
        view_of: impl Fn(K) -> Option<V>,
    ) -> Option<Entry<V>> {
        let version = object.resource_version();
        let view = view_of(object)?;
        let known = self.entries.get(name).map(|known| &known.view).filter(|known| ***known == view);
        let view = known.cloned().unwrap_or_else(|| Arc::new(view));
        Some(Entry { version, view })
    }
}

fn are_same<V: PartialEq>(before: &HashMap<String, Entry<V>>, now: &HashMap<String, Entry<V>>) -> bool {
    let is_known = |(name, entry): (&String, &Entry<V>)| before.get(name).is_some_and(|known| known.view == entry.view);
    before.len() == now.len() && now.iter().all(is_known)
}

#[cfg(test)]
impl<V: PartialEq> Views<V> {
    /// Those of these objects.
    pub(super) fn of<K: Resource<DynamicType = ()>>(
        objects: impl IntoIterator<Item = K>,
        view_of: impl Fn(K) -> Option<V>,
    ) -> Self {
        let views = Self(Arc::default());
        for object in objects {
            views.contents().apply(watcher::Event::Apply(object), &view_of);
        }
        views
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use model::eligibility::NodeView;
    use serde_json::json;

    use super::*;

    fn node(name: &str, uid: &str, ready: &str, version: u32) -> Node {
        let condition = json!({"type": "Ready", "status": ready, "lastHeartbeatTime": "2026-01-01T00:00:00Z"});
        let metadata = json!({"name": name, "uid": uid, "resourceVersion": version.to_string()});
        serde_json::from_value(json!({"metadata": metadata, "status": {"conditions": [condition]}})).unwrap()
    }

    fn view_of(node: Node) -> Option<NodeView> {
        Some(NodeView::from(&node)).filter(|view| view.uid != "hidden")
    }

    #[test]
    fn views_follow_the_watch_and_a_heartbeat_is_no_change() {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        let mut contents = Contents::default();
        for (what, event, is_change, expected) in vec![
            ("a list begins", Init, false, &[][..]),
            ("its objects count only at its end", InitApply(node("n1", "a", "False", 1)), false, &[]),
            ("which is a change", InitDone, true, &[("n1", "a", "1")]),
            ("a heartbeat", Apply(node("n1", "a", "False", 2)), false, &[("n1", "a", "2")]),
            ("Ready", Apply(node("n1", "a", "True", 3)), true, &[("n1", "a", "3")]),
            ("another machine", Apply(node("n1", "b", "True", 4)), true, &[("n1", "b", "4")]),
            ("one that planning does not see", Apply(node("n2", "hidden", "True", 5)), false, &[("n1", "b", "4")]),
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
            ("listed again", Init, false, &[("n2", "d", "9")]),
            ("one has changed meanwhile", InitApply(node("n2", "d", "False", 10)), false, &[("n2", "d", "9")]),
            ("which the end tells", InitDone, true, &[("n2", "d", "10")]),
            ("listed again", Init, false, &[("n2", "d", "10")]),
            (
                "one stands in the place of another",
                InitApply(node("n3", "d", "False", 11)),
                false,
                &[("n2", "d", "10")],
            ),
            ("which the end tells", InitDone, true, &[("n3", "d", "11")]),
            ("planning does not see it any more", Apply(node("n3", "hidden", "False", 12)), true, &[]),
            ("a new one", Apply(node("n4", "e", "True", 13)), true, &[("n4", "e", "13")]),
            ("a deletion", Delete(node("n4", "e", "True", 14)), true, &[]),
            ("of one that nobody knew", Delete(node("n5", "f", "True", 15)), false, &[]),
        ] {
            assert_eq!(contents.apply(event, view_of), is_change, "{what}");
            let mut entries: Vec<_> = contents.entries.iter().collect();
            entries.sort_by_key(|(name, _)| *name);
            let entries = entries.into_iter().map(|(name, entry)| {
                assert_eq!(*name, entry.view.name);
                (name.as_str(), entry.view.uid.as_str(), entry.version.as_deref().unwrap_or_default())
            });
            assert_eq!(entries.collect::<Vec<_>>(), expected, "{what}");
        }
    }

    #[test]
    fn an_empty_list_completes_the_cache_too() {
        let mut contents = Contents::default();
        for (event, is_change, is_complete) in [
            (watcher::Event::Init, false, false),
            (watcher::Event::InitDone, true, true),
            (watcher::Event::Init, false, true),
            (watcher::Event::InitDone, false, true),
        ] {
            assert_eq!(contents.apply(event, view_of), is_change);
            assert_eq!(contents.is_complete, is_complete);
        }
    }
}
