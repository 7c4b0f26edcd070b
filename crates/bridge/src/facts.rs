//! Looks up what waiting pods refer to.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{FutureExt, StreamExt, join, stream};
use k8s_openapi::api::{
    core::v1::{PersistentVolume, PersistentVolumeClaim},
    storage::v1::StorageClass,
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind},
};
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use cluster::{ApiError, call};
use pods::{
    facts::{Facts, KubeJob, VolumeClaim, job_sets},
    pod::PodView,
    record::GangKind,
};

/// How long an answer counts.
const KNOWN_FOR: Duration = Duration::from_secs(10);
/// How long a round may look things up: whoever creates pods decides how many there are, and meanwhile no other pod is served.
const SOON: Duration = Duration::from_secs(1);
/// Number of objects that are asked for at once.
const AT_ONCE: usize = 16;

/// Namespace and name.
type Name = (String, String);
/// The kind of gang that a PodGroup makes of its pods, its namespace and its name.
type GroupName = (GangKind, String, String);

/// A PodGroup.
#[derive(Clone, Copy)]
struct PodGroup {
    /// How many pods it needs at once.
    needed: Option<u32>,
}

/// What is known about the objects of one kind that pods refer to.
type Known<N, T> = BTreeMap<N, Entry<T>>;

/// What is known about one object.
struct Entry<T> {
    /// The object, if there is one by the last answer.
    found: Option<T>,
    /// The bridge may not read it.
    is_forbidden: bool,
    is_answered: bool,
    /// When it was asked for last, or wanted first.
    since: Instant,
}

impl<T> Entry<T> {
    /// When to ask for it again: at once if it was never answered.
    fn due(&self) -> Instant {
        if self.is_answered { self.since + KNOWN_FOR } else { self.since }
    }
}

/// The answers so far.
#[derive(Default)]
pub(crate) struct Lookups {
    groups: Known<GroupName, PodGroup>,
    claims: Known<Name, VolumeClaim>,
}

impl Lookups {
    /// When the next of them is due; None if nothing is waited for.
    pub(crate) fn due(&self) -> Option<Instant> {
        let groups = self.groups.values().map(Entry::due);
        groups.chain(self.claims.values().map(Entry::due)).min()
    }

    /// What those of `pods` refer to that wait. All of `pods` are bridged. An object that was never found is left out; one that was found
    /// keeps its last answer until it can be looked up again.
    pub(crate) async fn facts<'a>(
        &mut self,
        client: &Client,
        pods: impl Iterator<Item = &'a PodView> + Clone,
        jobs: &BTreeMap<String, KubeJob>,
    ) -> Facts {
        let waiting = pods.clone().filter(|pod| pod.plan.is_some());
        let (mut groups, mut claims) = (BTreeSet::new(), BTreeSet::new());
        for pod in waiting {
            let named = |name: &String| (pod.namespace.clone(), name.clone());
            groups.extend(pod.hints.pod_groups().map(|(kind, name)| (kind, pod.namespace.clone(), name.clone())));
            claims.extend(pod.plan.iter().flat_map(|plan| &plan.claims).map(named));
        }
        let until = Instant::now() + SOON;
        // Side by side: many of one kind must not use up the time for the other.
        join!(
            look_up(groups, |name| pod_group(client, name), &mut self.groups, until),
            look_up(claims, |name| claim(client, name), &mut self.claims, until),
        );
        let owners = pods.filter_map(|pod| pod.owner.as_ref());
        let owned: BTreeSet<&str> = owners.map(|owner| owner.uid.as_str()).collect();
        let group = |(name, entry): (&GroupName, &Entry<PodGroup>)| Some((name.clone(), entry.found?.needed));
        let forbidden = self.groups.iter().filter(|(_, entry)| entry.is_forbidden);
        let claim = |(name, entry): (&Name, &Entry<VolumeClaim>)| Some((name.clone(), entry.found.clone()?));
        Facts {
            jobs: jobs
                .iter()
                .filter(|(uid, job)| owned.contains(uid.as_str()) || job.suspended_for.is_some())
                .map(|(uid, job)| (uid.clone(), job.clone()))
                .collect(),
            job_sets: job_sets(jobs.values()),
            pod_groups: self.groups.iter().filter_map(group).collect(),
            forbidden_groups: forbidden.map(|(name, _)| name.clone()).collect(),
            claims: self.claims.iter().filter_map(claim).collect(),
        }
    }
}

/// Asks for those of `wanted` that are due, several at a time, until `until`, and notes the answers in `known`. If a look-up fails, an
/// object that was found before stays known, and any other counts as missing until it is due again.
async fn look_up<N, T, F>(wanted: BTreeSet<N>, ask: impl Fn(N) -> F, known: &mut Known<N, T>, until: Instant)
where
    N: Ord + Clone,
    F: Future<Output = Result<Option<T>, ApiError>>,
{
    let due = due(known, wanted, Instant::now());
    let mut begun = Vec::new();
    let asked = due.into_iter().map(|name| {
        begun.push(name.clone());
        ask(name.clone()).map(|found| (name, found))
    });
    let mut answers = Vec::new();
    let mut found = stream::iter(asked).buffer_unordered(AT_ONCE);
    while let Ok(Some(answer)) = timeout_at(until, found.next()).await {
        answers.push(answer);
    }
    drop(found);
    for name in &begun {
        known.entry(name.clone()).and_modify(|entry| entry.since = Instant::now());
    }
    for (name, found) in answers {
        let Some(entry) = known.get_mut(&name) else { continue };
        entry.is_forbidden = found.as_ref().is_err_and(|error| error.code() == Some(403));
        match found {
            Ok(found) => entry.found = found,
            Err(error) => debug!(%error, "can't look up what a pod refers to"),
        }
        entry.is_answered = true;
    }
}

/// Makes `known` have those that are `wanted`, and no others. Returns those to ask for: whatever has waited longest is the first, so that
/// nothing waits for ever if there is never the time for all.
fn due<N: Ord + Clone, T>(known: &mut Known<N, T>, wanted: BTreeSet<N>, now: Instant) -> Vec<N> {
    known.retain(|name, _| wanted.contains(name));
    for name in wanted {
        known.entry(name).or_insert(Entry { found: None, is_forbidden: false, is_answered: false, since: now });
    }
    let mut due: Vec<_> = known.iter().filter(|(_, entry)| entry.due() <= now).collect();
    due.sort_by_key(|(_, entry)| entry.since);
    due.into_iter().map(|(name, _)| name.clone()).collect()
}

/// Where the PodGroups of a kind of gang are, and the number of pods in them.
struct Source {
    group: &'static str,
    /// The versions that have that number at the same place. A cluster serves one of them, or none.
    versions: &'static [&'static str],
    /// JSON pointer.
    needed: &'static str,
}

/// None if a kind of gang has no PodGroups.
fn source(kind: GangKind) -> Option<Source> {
    match kind {
        GangKind::Coscheduling => {
            Some(Source { group: "scheduling.x-k8s.io", versions: &["v1alpha1"], needed: "/spec/minMember" })
        }
        // Those of Kubernetes 1.36 and 1.37.
        GangKind::PodGroup => Some(Source {
            group: "scheduling.k8s.io",
            versions: &["v1alpha2", "v1beta1"],
            needed: "/spec/schedulingPolicy/gang/minCount",
        }),
        _ => None,
    }
}

async fn pod_group(client: &Client, (kind, namespace, name): GroupName) -> Result<Option<PodGroup>, ApiError> {
    let Some(Source { group, versions, needed }) = source(kind) else { return Ok(None) };
    let number = |object: DynamicObject| object.data.pointer(needed)?.as_u64()?.try_into().ok();
    for version in versions {
        let kind = GroupVersionKind::gvk(group, version, "PodGroup");
        let groups: Api<DynamicObject> =
            Api::namespaced_with(client.clone(), &namespace, &ApiResource::from_gvk_with_plural(&kind, "podgroups"));
        // A version that is not served is answered as an object that is not there.
        let found = call(format!("get PodGroup {namespace}/{name}"), groups.get_opt(&name)).await?;
        if let Some(object) = found {
            return Ok(Some(PodGroup { needed: number(object) }));
        }
    }
    Ok(None)
}

async fn claim(client: &Client, (namespace, name): Name) -> Result<Option<VolumeClaim>, ApiError> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &namespace);
    let found = call(format!("get PersistentVolumeClaim {namespace}/{name}"), claims.get_opt(&name)).await?;
    let Some(spec) = found.and_then(|claim| claim.spec) else { return Ok(None) };
    if let Some(volume) = spec.volume_name {
        let volumes: Api<PersistentVolume> = Api::all(client.clone());
        let found = call(format!("get PersistentVolume {volume}"), volumes.get_opt(&volume)).await?;
        let affinity = found.and_then(|volume| volume.spec?.node_affinity?.required);
        return Ok(Some(VolumeClaim::Bound { affinity }));
    }
    let Some(class) = spec.storage_class_name else { return Ok(Some(VolumeClaim::Unbound)) };
    let classes: Api<StorageClass> = Api::all(client.clone());
    let found = call(format!("get StorageClass {class}"), classes.get_opt(&class)).await?;
    let waits = found.and_then(|class| class.volume_binding_mode).as_deref() == Some("WaitForFirstConsumer");
    Ok(Some(if waits { VolumeClaim::WaitsForFirstConsumer } else { VolumeClaim::Unbound }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_waited_longest_is_looked_up_first() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let name = |name: &str| ("default".to_owned(), name.to_owned());
        let entry =
            |is_answered, seconds| Entry::<u32> { found: None, is_forbidden: false, is_answered, since: at(seconds) };
        let mut known: Known<Name, u32> = [
            (name("a"), entry(true, 0)),
            (name("b"), entry(true, 9)),
            (name("c"), entry(false, 8)),
            (name("d"), entry(true, 15)),
            (name("gone"), entry(false, 0)),
        ]
        .into();
        let wanted = ["a", "b", "c", "d", "new"].map(name).into();
        assert_eq!(due(&mut known, wanted, at(20)), ["a", "c", "b", "new"].map(name));
        assert_eq!(known.keys().cloned().collect::<Vec<_>>(), ["a", "b", "c", "d", "new"].map(name));
    }

    #[tokio::test]
    async fn what_is_never_answered_keeps_nothing_else_waiting() {
        let wanted: BTreeSet<Name> =
            (0..100).map(|number| ("default".to_owned(), format!("claim{number:03}"))).collect();
        let hang: BTreeSet<Name> = wanted.iter().take(AT_ONCE).cloned().collect();
        let ask = async |name: Name| match hang.contains(&name) {
            true => std::future::pending().await,
            false => Ok(Some(1)),
        };
        let mut known: Known<Name, u32> = Known::new();
        for _ in 0..2 {
            look_up(wanted.clone(), &ask, &mut known, Instant::now() + Duration::from_millis(10)).await;
        }
        assert!(wanted.difference(&hang).all(|name| known[name].found == Some(1)));
    }
}
