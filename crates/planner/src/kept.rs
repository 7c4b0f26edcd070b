//! What the planner has read of an object, kept for as long as a watch says that the object is the same.

use std::collections::HashMap;

use api::{CONFIGMAP_BROKER, CONFIGMAP_DEFAULT, CONFIGMAP_PACKAGES, CONFIGMAP_ROSTER, NAMESPACE, SECRET_CURVE};
use cluster::version::{self, Version, WatchedVersion};
use futures::{Stream, StreamExt, stream::select_all};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client, core::PartialObjectMeta};

/// The versions of the ConfigMaps and of the Secret that each round depends on. Only their metadata are watched: the planner has written
/// most of their content itself.
#[derive(Clone)]
pub struct Versions(HashMap<&'static str, WatchedVersion>);

impl Versions {
    /// Returns the versions, and a stream that keeps them up to date while it is polled. It yields an item for each change.
    pub fn watch(client: &Client) -> (Self, impl Stream<Item = ()> + Send + use<>) {
        let maps = Api::<PartialObjectMeta<ConfigMap>>::namespaced(client.clone(), NAMESPACE);
        let secrets = Api::<PartialObjectMeta<Secret>>::namespaced(client.clone(), NAMESPACE);
        let names = [CONFIGMAP_DEFAULT, CONFIGMAP_ROSTER, CONFIGMAP_BROKER, CONFIGMAP_PACKAGES];
        let of_map = |name| {
            let (version, changes) = version::watch(maps.clone(), name);
            ((name, version), changes.boxed())
        };
        let (secret, of_secret) = version::watch(secrets, SECRET_CURVE);
        let (versions, changes): (Vec<_>, Vec<_>) =
            names.into_iter().map(of_map).chain([((SECRET_CURVE, secret), of_secret.boxed())]).unzip();
        (Self(versions.into_iter().collect()), select_all(changes))
    }

    /// The version of object `name`.
    pub fn of(&self, name: &str) -> Version {
        self.0.get(name).and_then(WatchedVersion::now)
    }
}

/// A value, and the versions that the watch may tell while the value is current.
#[derive(Debug)]
pub struct Kept<T>(Option<(Vec<Option<String>>, T)>);

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: Clone> Kept<T> {
    /// The value, if the watch tells one of these versions.
    pub fn at(&self, version: &Version) -> Option<&T> {
        let ((at, value), now) = self.0.as_ref().zip(version.as_ref())?;
        at.contains(now).then_some(value)
    }

    /// Keeps a value that was read after the watch told `version`.
    pub fn keep(&mut self, version: Version, value: T) {
        self.0 = version.map(|version| (vec![version], value));
    }

    /// Keeps what this planner has just written. `version`: what the watch told before the write, and tells until it catches up; `written`: the version in
    /// the API server's answer. A write by somebody else has a third version, so the value is read again.
    pub fn keep_written(&mut self, version: Version, written: Option<String>, value: T) {
        // "No such object" may come back: made, and deleted again.
        self.0 = version.map(|before| ([before, written].into_iter().flatten().map(Some).collect(), value));
    }

    /// To be called before each write of the object, which may succeed without an answer.
    pub fn forget(&mut self) {
        self.0 = None;
    }

    /// The kept value, or what `read` returns.
    ///
    /// # Errors
    /// Those of `read`. Nothing is kept then.
    pub async fn or_read<E>(&mut self, version: Version, read: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        if let Some(value) = self.at(&version) {
            return Ok(value.clone());
        }
        self.forget();
        let value = read.await?;
        self.keep(version, value.clone());
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_value_is_read_again_only_if_the_object_has_changed_or_its_version_is_unknown() {
        let mut kept = Kept::default();
        let version = |number: u32| Some(Some(number.to_string()));
        for (version, next, expected) in [
            (None, 1, 1),
            (None, 2, 2),
            (version(5), 3, 3),
            (version(5), 4, 3),
            (version(6), 5, 5),
            (Some(None), 6, 6),
            (Some(None), 7, 6),
            (None, 8, 8),
            (Some(None), 9, 9),
        ] {
            let read = kept.or_read(version.clone(), async { Ok::<_, ()>(next) }).await;
            assert_eq!(read, Ok(expected), "{version:?}");
        }
        assert_eq!(kept.or_read(version(1), async { Err(()) }).await, Err::<i32, _>(()));
        assert_eq!(kept.or_read(Some(None), async { Ok::<_, ()>(10) }).await, Ok(10), "nothing is kept of an error");
        kept.forget();
        assert_eq!(kept.at(&Some(None)), None, "after a write of ours");
        kept.keep_written(version(1), Some("2".to_owned()), 11);
        let known = [version(1), version(2), version(3), None].map(|version| kept.at(&version).copied());
        assert_eq!(
            known,
            [Some(11), Some(11), None, None],
            "the watch is behind our write, tells of it, tells of somebody else's, or knows nothing"
        );
        kept.keep_written(Some(None), Some("2".to_owned()), 12);
        let known = [Some(None), version(2)].map(|version| kept.at(&version).copied());
        assert_eq!(known, [None, Some(12)], "made, and perhaps deleted again");
    }
}
