//! The pods that are bound to a node: what its kubelet does for them, as far as it is simulated. The first container of a
//! pod is a process on the node. There are no images, volumes, probes, restarts, and no check whether the node has room.

use std::{
    collections::BTreeSet, convert::Infallible, future::pending, net::Ipv4Addr, pin::pin, sync::Arc, time::Duration,
};

use futures::StreamExt;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
    runtime::{
        WatchStreamExt, reflector,
        reflector::{ObjectRef, Store},
        watcher,
    },
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tokio::{
    process::Child,
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::{info, warn};

use super::{
    cgroup,
    container::Process,
    container_status::{self, End},
    control::{read_pid, start_helper},
    layout::{Cluster, Layout},
    mounts,
};
use crate::error::{Context, LocalError};
use base::error_chain;

/// Pause before the API server is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// All pods of the cluster, as the API server last sent them.
#[derive(Clone)]
pub(crate) struct AllPods {
    store: Store<Pod>,
    changed: watch::Receiver<()>,
}

impl AllPods {
    /// Follows them as long as the process lives.
    pub(crate) fn follow(client: &Client) -> Self {
        let (store, writer) = reflector::store();
        let (sender, changed) = watch::channel(());
        let pods = watcher(Api::<Pod>::all(client.clone()), watcher::Config::default()).default_backoff();
        tokio::spawn(async move {
            let mut events = pin!(reflector(writer, pods));
            while events.next().await.is_some() {
                sender.send_replace(());
            }
        });
        Self { store, changed }
    }

    /// The pods that are bound to a Node. The agent's is not among them: a kubelet starts that one by itself.
    fn of_node(&self, node: &str) -> Vec<Arc<Pod>> {
        let is_bound = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node);
        let is_agent = |pod: &Pod| {
            let app = pod.labels().get("app").map(String::as_str);
            pod.namespace().as_deref() == Some(api::NAMESPACE) && app == Some(api::DAEMONSET)
        };
        self.store.state().into_iter().filter(|pod| is_bound(pod) && !is_agent(pod)).collect()
    }

    /// How long the process of `pod` may take to end; None unless the pod is being deleted, or is gone.
    fn grace(&self, pod: &Pod) -> Option<Duration> {
        // Another pod may have got its name.
        let found = self.store.get(&ObjectRef::from_obj(pod)).filter(|found| found.uid() == pod.uid());
        let Some(found) = found else { return Some(Duration::ZERO) };
        found.metadata.deletion_timestamp.as_ref()?;
        let seconds = found.metadata.deletion_grace_period_seconds.unwrap_or_default();
        Some(Duration::from_secs(seconds.try_into().unwrap_or_default()))
    }

    /// Waits until `holds`, looking again whenever a pod has changed.
    async fn until(&self, holds: impl Fn() -> bool) {
        let mut changed = self.changed.clone();
        while !holds() {
            if changed.changed().await.is_err() {
                pending::<()>().await;
            }
        }
    }

    /// Waits until `pod` is being deleted, or is gone.
    async fn until_deleted(&self, pod: &Pod) {
        self.until(|| self.grace(pod).is_some()).await;
    }

    /// Waits until the grace period of `pod`, which is being deleted, is over. A second delete can shorten it.
    async fn until_overdue(&self, pod: &Pod) {
        loop {
            let grace = self.grace(pod);
            // If the period changes before it is over, the new one begins.
            if timeout(grace.unwrap_or_default(), self.until(|| self.grace(pod) != grace)).await.is_err() {
                return;
            }
        }
    }

    /// Deletes the pods that are bound to a Node which is gone, as Kubernetes' garbage collection does.
    pub(crate) async fn forget_node(&self, client: &Client, node: &str) {
        for pod in self.of_node(node) {
            remove(client, &pod).await;
        }
    }
}

/// The pods that are bound to one node, from a boot until the node is off.
pub(crate) struct BoundPods {
    pub(crate) layout: Layout,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) client: Client,
    pub(crate) all: AllPods,
    /// The simulated node.
    pub(crate) machine: String,
    /// The Node object's name.
    pub(crate) node: String,
    pub(crate) address: Ipv4Addr,
    /// The PID of the node's PID 1.
    pub(crate) init: i32,
}

impl BoundPods {
    /// Serves them until the future is dropped.
    pub(crate) async fn run(self) -> Infallible {
        let pods = Arc::new(self);
        let mut changed = pods.all.changed.clone();
        let mut known = BTreeSet::new();
        let mut served = JoinSet::new();
        loop {
            for pod in pods.all.of_node(&pods.node) {
                if known.insert(pod.uid()) {
                    let pods = pods.clone();
                    served.spawn(async move { pods.serve(&pod).await });
                }
            }
            while served.try_join_next().is_some() {}
            if changed.changed().await.is_err() {
                pending::<()>().await;
            }
        }
    }

    /// Runs a pod, and removes it when it is deleted.
    async fn serve(&self, pod: &Pod) {
        let status = pod.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref());
        if !matches!(phase, Some("Succeeded" | "Failed")) {
            let end = match status.and_then(|status| status.start_time.as_ref()) {
                // It was started before this boot.
                Some(started) => End::lost(started.0),
                None => self.run_container(pod).await,
            };
            self.clear(pod).await;
            info!(node = self.machine, pod = pod.name_any(), ?end, "a pod has ended");
            self.report(pod, container_status::ended(pod, &end, Timestamp::now())).await;
        }
        self.all.until_deleted(pod).await;
        remove(&self.client, pod).await;
    }

    async fn run_container(&self, pod: &Pod) -> End {
        if pod.metadata.deletion_timestamp.is_some() {
            return End::not_started("it was deleted before it began".to_owned());
        }
        let (mut shim, pid) = match self.start(pod).await {
            Ok(started) => started,
            Err(error) => return End::not_started(error_chain(&error)),
        };
        let started = Timestamp::now();
        info!(node = self.machine, pod = pod.name_any(), pid, "a pod runs");
        self.report(pod, container_status::running(pod, self.address, started)).await;
        let ended = tokio::select! {
            ended = shim.wait() => ended,
            () = self.all.until_deleted(pod) => {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
                tokio::select! {
                    ended = shim.wait() => ended,
                    () = self.all.until_overdue(pod) => {
                        self.clear(pod).await;
                        shim.wait().await
                    }
                }
            }
        };
        End::exited(ended.ok().and_then(|status| status.code()), started)
    }

    /// Returns the container's parent, and the PID of its process.
    async fn start(&self, pod: &Pod) -> Result<(Child, i32), LocalError> {
        let (namespace, name) = (namespace_of(pod), pod.name_any());
        let container = container_status::container(pod).ok_or_else(|| LocalError::NoCommand(name.clone()))?;
        let process = serde_json::to_vec(&Process::of(container)?).context(|| format!("can't start {name}"))?;
        let log = self.layout.pod_log(&self.machine, &namespace, &name);
        log.parent().map_or(Ok(()), mounts::make_directory)?;
        let words = ["make-container", &self.machine, &self.init.to_string(), &pod.uid().unwrap_or_default()];
        let (shim, mut reports) = start_helper(&self.layout, &words, &log, &process).await?;
        let pid = read_pid(&mut reports, &format!("container {}", container.name)).await?;
        Ok((shim, pid))
    }

    /// Kills what is left in the pod's cgroup, as the container runtime does.
    async fn clear(&self, pod: &Pod) {
        let group = self.cluster.pod_cgroup(&self.machine, &pod.uid().unwrap_or_default());
        let cleared =
            tokio::task::spawn_blocking(move || cgroup::kill_all(&group).and_then(|()| cgroup::remove(&group)));
        if let Ok(Err(error)) = cleared.await {
            warn!(node = self.machine, pod = pod.name_any(), error = error_chain(&error), "can't clear a pod");
        }
    }

    async fn report(&self, pod: &Pod, status: Value) {
        let (pods, name) = (Api::<Pod>::namespaced(self.client.clone(), &namespace_of(pod)), pod.name_any());
        // Another uid than the object's is refused.
        let patch = Patch::Strategic(json!({ "metadata": { "uid": pod.uid() }, "status": status }));
        let parameters = PatchParams::default();
        insist(&name, || pods.patch_status(&name, &parameters, &patch)).await;
    }
}

/// Removes the object of a pod that runs no more.
async fn remove(client: &Client, pod: &Pod) {
    let (pods, name) = (Api::<Pod>::namespaced(client.clone(), &namespace_of(pod)), pod.name_any());
    let only_if = Preconditions { uid: pod.uid(), resource_version: None };
    let parameters = DeleteParams::default().grace_period(0).preconditions(only_if);
    insist(&name, || pods.delete(&name, &parameters)).await;
}

/// Asks the API server until it has done it, or until there is no such pod any more.
async fn insist<T, F: Future<Output = kube::Result<T>>>(pod: &str, ask: impl Fn() -> F) {
    loop {
        match ask().await {
            Ok(_) => return,
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return,
            Err(error) => warn!(pod, error = error_chain(&error), "can't write to a pod; it is tried again"),
        }
        sleep(AGAIN).await;
    }
}

fn namespace_of(pod: &Pod) -> String {
    pod.namespace().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_second_delete_ends_a_pod_at_once() {
        let pod = |grace: Option<i64>| -> Pod {
            let deleted = grace.map(|_| "2026-01-01T00:00:00Z");
            serde_json::from_value(
                json!({"metadata": {"name": "a", "namespace": "default", "uid": "u", "deletionTimestamp": deleted,
                "deletionGracePeriodSeconds": grace}}),
            )
            .unwrap()
        };
        for (what, second) in [
            ("with --force, which removes the pod", watcher::Event::Delete(pod(Some(30)))),
            ("with no grace", watcher::Event::Apply(pod(Some(0)))),
        ] {
            let (store, mut writer) = reflector::store();
            let (sender, changed) = watch::channel(());
            let all = AllPods { store, changed };
            let own = pod(None);
            writer.apply_watcher_event(&watcher::Event::Apply(own.clone()));
            assert_eq!(all.grace(&own), None);
            writer.apply_watcher_event(&watcher::Event::Apply(pod(Some(30))));
            all.until_deleted(&own).await;
            let mut overdue = pin!(all.until_overdue(&own));
            assert!(timeout(Duration::from_millis(20), &mut overdue).await.is_err(), "{what}");
            writer.apply_watcher_event(&second);
            sender.send_replace(());
            assert!(timeout(Duration::from_secs(5), overdue).await.is_ok(), "{what}");
        }
    }
}
