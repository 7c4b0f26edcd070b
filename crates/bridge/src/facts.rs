//! Looks up what waiting pods refer to.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{FutureExt, StreamExt, stream};
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
    facts::{Claim, Facts, KubeJob},
    pod::PodView,
    record::GangKind,
};

/// How long an answer counts.
const KNOWN_FOR: Duration = Duration::from_secs(10);
/// How long a round may look things up: whoever creates pods decides how many there are, and meanwhile no other pod is served.
const SOON: Duration = Duration::from_secs(1);
/// Number of objects that are asked for at once.
const AT_ONCE: usize = 16;

type Name = (String, String);

/// A PodGroup of coscheduling.
#[derive(Clone, Copy)]
struct PodGroup {
    /// spec.minMember
    min_member: Option<u32>,
}

/// The answers so far; None for an object that does not exist.
#[derive(Default)]
pub(crate) struct Lookups {
    groups: BTreeMap<Name, (Option<PodGroup>, Instant)>,
    claims: BTreeMap<Name, (Option<Claim>, Instant)>,
}

impl Lookups {
    /// What the waiting ones of `pods`, which are bridged, refer to. What can't be looked up, or not soon enough, is left out.
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
            groups.extend(pod.hints.coscheduling.as_ref().map(named));
            claims.extend(pod.plan.iter().flat_map(|plan| &plan.claims).map(named));
        }
        self.groups.retain(|name, (_, asked)| groups.contains(name) && asked.elapsed() < KNOWN_FOR);
        self.claims.retain(|name, (_, asked)| claims.contains(name) && asked.elapsed() < KNOWN_FOR);
        groups.retain(|name| !self.groups.contains_key(name));
        let until = Instant::now() + SOON;
        look_up(groups, |name| pod_group(client, name), &mut self.groups, until).await;
        claims.retain(|name| !self.claims.contains_key(name));
        look_up(claims, |name| claim(client, name), &mut self.claims, until).await;
        let owners = pods.filter_map(|pod| pod.owner.as_ref());
        let owned: BTreeSet<&str> = owners.map(|owner| owner.uid.as_str()).collect();
        let group = |((namespace, name), (found, _)): (&Name, &(Option<PodGroup>, Instant))| {
            Some(((GangKind::Coscheduling, namespace.clone(), name.clone()), found.as_ref()?.min_member))
        };
        let claim = |(name, (found, _)): (&Name, &(Option<Claim>, Instant))| Some((name.clone(), found.clone()?));
        Facts {
            jobs: jobs
                .iter()
                .filter(|(uid, job)| owned.contains(uid.as_str()) || job.suspended_for.is_some())
                .map(|(uid, job)| (uid.clone(), job.clone()))
                .collect(),
            pod_groups: self.groups.iter().filter_map(group).collect(),
            claims: self.claims.iter().filter_map(claim).collect(),
        }
    }
}

/// Asks for `names`, several at a time, until `until`, and adds the answers to `known`. A failed look-up counts as missing, as long as
/// an answer counts.
async fn look_up<T, F>(
    names: BTreeSet<Name>,
    ask: impl Fn(Name) -> F,
    known: &mut BTreeMap<Name, (Option<T>, Instant)>,
    until: Instant,
) where
    F: Future<Output = Result<Option<T>, ApiError>>,
{
    let asked = names.into_iter().map(|name| ask(name.clone()).map(|found| (name, found)));
    let mut found = stream::iter(asked).buffer_unordered(AT_ONCE);
    while let Ok(Some((name, found))) = timeout_at(until, found.next()).await {
        let found = found.inspect_err(|error| debug!(%error, "can't look up what a pod refers to")).ok().flatten();
        known.insert(name, (found, Instant::now()));
    }
}

async fn pod_group(client: &Client, (namespace, name): Name) -> Result<Option<PodGroup>, ApiError> {
    let kind = GroupVersionKind::gvk("scheduling.x-k8s.io", "v1alpha1", "PodGroup");
    let groups: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), &namespace, &ApiResource::from_gvk_with_plural(&kind, "podgroups"));
    let found = call(format!("get PodGroup {namespace}/{name}"), groups.get_opt(&name)).await?;
    let min_member = |group: DynamicObject| group.data.pointer("/spec/minMember")?.as_u64()?.try_into().ok();
    Ok(found.map(|group| PodGroup { min_member: min_member(group) }))
}

async fn claim(client: &Client, (namespace, name): Name) -> Result<Option<Claim>, ApiError> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &namespace);
    let found = call(format!("get PersistentVolumeClaim {namespace}/{name}"), claims.get_opt(&name)).await?;
    let Some(spec) = found.and_then(|claim| claim.spec) else { return Ok(None) };
    if let Some(volume) = spec.volume_name {
        let volumes: Api<PersistentVolume> = Api::all(client.clone());
        let found = call(format!("get PersistentVolume {volume}"), volumes.get_opt(&volume)).await?;
        let affinity = found.and_then(|volume| volume.spec?.node_affinity?.required);
        return Ok(Some(Claim::Bound { affinity }));
    }
    let Some(class) = spec.storage_class_name else { return Ok(Some(Claim::Unbound)) };
    let classes: Api<StorageClass> = Api::all(client.clone());
    let found = call(format!("get StorageClass {class}"), classes.get_opt(&class)).await?;
    let waits = found.and_then(|class| class.volume_binding_mode).as_deref() == Some("WaitForFirstConsumer");
    Ok(Some(if waits { Claim::WaitsForFirstConsumer } else { Claim::Unbound }))
}
