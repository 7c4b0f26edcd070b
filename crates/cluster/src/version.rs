//! Which version an object has, by a watch on its metadata alone.

use std::{fmt, fmt::Debug, sync::Arc};

use futures::{FutureExt, Stream, StreamExt};
use kube::{
    Api, Resource, ResourceExt,
    core::PartialObjectMeta,
    runtime::{WatchStreamExt, reflector, reflector::Store, watcher},
};
use serde::de::DeserializeOwned;

/// metadata.resourceVersion of an object, as a watch tells it: `Some(None)` if there is no such object. None until the watch has listed
/// it, which it never has if an older manifest does not grant the right. A watch that fails later tells the last version.
pub type Version = Option<Option<String>>;

/// The version of one object, as a watch keeps it.
#[derive(Clone)]
pub struct WatchedVersion(Arc<dyn Fn() -> Version + Send + Sync>);

impl WatchedVersion {
    /// The version now.
    pub fn now(&self) -> Version {
        (self.0)()
    }
}

impl Debug for WatchedVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WatchedVersion").field(&self.now()).finish()
    }
}

/// Returns the version of object `name`, and a stream that keeps it up to date while it is polled. It yields an item for each
/// change.
pub fn watch<K>(api: Api<PartialObjectMeta<K>>, name: &str) -> (WatchedVersion, impl Stream<Item = ()> + Send + use<K>)
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let (store, writer) = reflector::store::<PartialObjectMeta<K>>();
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let events = watcher(api, config).default_backoff().reflect(writer);
    let changes = events.filter_map(async |event| event.ok().map(drop));
    (WatchedVersion(Arc::new(move || version(&store))), changes)
}

fn version<K>(store: &Store<PartialObjectMeta<K>>) -> Version
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    store.wait_until_ready().now_or_never()?.ok()?;
    Some(store.state().first().and_then(|object| object.resource_version()))
}
