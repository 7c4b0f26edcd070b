//! Pods as jobs: a real Flux, a real API server, and kubelets that this test plays.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

#[path = "support/bare_cluster.rs"]
mod bare_cluster;
#[path = "support/needs.rs"]
mod needs;
mod support;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bare_cluster::{BareCluster, NAMESPACE, bridge_to, client, kubelets, make_account, make_node, pod};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Event, Namespace, Node, NodeSystemInfo, Pod, PodCondition, PodSchedulingGroup, ServiceAccount},
    scheduling::{v1::PriorityClass, v1alpha2::PodGroup},
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    runtime::wait::await_condition,
};
use needs::{NODES, Need, skip, skips_without};
use pods::{placeholder, record::ANNOTATION_JOB, world::Settings};
use serde_json::{Value, json};
use support::real_broker::{RealBroker, connect, flux, lead, run, start, until_online};
use tokio::{task::JoinHandle, time::timeout};

const PATIENCE: Duration = Duration::from_mins(1);

/// Three nodes of four cores each, on which pods and jobs run.
struct Bed {
    flux: PathBuf,
    base: tempfile::TempDir,
    client: Client,
    brokers: Vec<RealBroker>,
    kubelet: JoinHandle<()>,
    bridge: JoinHandle<()>,
    /// Of the nodes.
    uids: Vec<String>,
    /// What the agent says about a start of the queues.
    may_start_queues: Arc<AtomicBool>,
    _cluster: BareCluster,
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.kubelet.abort();
        self.bridge.abort();
    }
}

fn serve(client: Client, socket: PathBuf, uids: &[String], may_start_queues: &Arc<AtomicBool>) -> JoinHandle<()> {
    let settings = Settings { max_gang: 6, ..Settings::default() };
    let (sender, mut bridge) = bridge_to(client, socket, uids, 4, settings);
    let asked = Arc::clone(may_start_queues);
    bridge.may_start_queues = Box::new(move || asked.load(Ordering::Relaxed));
    tokio::spawn(async move {
        let _sender = sender;
        bridge::run(bridge).await;
    })
}

impl Bed {
    /// None if the test can't run.
    async fn new() -> Option<Self> {
        Self::with(&[]).await
    }

    /// With these arguments for kube-apiserver. None if the test can't run.
    async fn with(arguments: &[&str]) -> Option<Self> {
        let flux = flux()?;
        if skips_without(NODES.into_iter().chain([Need::ApiServer])) {
            return None;
        }
        let cluster = BareCluster::up(arguments);
        let client = client(&cluster.kubeconfig()).await;
        make_account(&client).await;
        let base = tempfile::tempdir().unwrap();
        let (first, connection) = lead(&flux, base.path(), 3, "0-3").await;
        let brokers = vec![first, start(&flux, base.path(), 1), start(&flux, base.path(), 2)];
        until_online(&connection, "0-2").await;
        let mut uids = Vec::new();
        for rank in 0..3 {
            uids.push(make_node(&client, &format!("machine{rank}"), 4).await);
        }
        let kubelet = tokio::spawn(kubelets(client.clone()));
        let may_start_queues = Arc::new(AtomicBool::new(true));
        let bridge = serve(client.clone(), brokers[0].socket(), &uids, &may_start_queues);
        Some(Self { flux, bridge, uids, may_start_queues, client, brokers, kubelet, base, _cluster: cluster })
    }

    /// As [`Self::new`], with a pod of another scheduler on each node that uses two cores: one job holds them all.
    async fn beside_others() -> Option<Self> {
        let mut bed = Self::new().await?;
        bed.bridge.abort();
        for rank in 0..3 {
            bed.make_other(&format!("other{rank}"), 2, rank).await;
        }
        bed.bridge = serve(bed.client.clone(), bed.brokers[0].socket(), &bed.uids, &bed.may_start_queues);
        bed.until_allocated(6).await;
        assert_eq!(bed.jobs(), "other-pods/3-nodes RUN [0-2]");
        Some(bed)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    async fn make(&self, name: &str, cores: u32, annotations: Value) {
        self.pods().create(&PostParams::default(), &pod(name, cores, &annotations)).await.unwrap();
    }

    /// A pod of another scheduler, on the node of this rank.
    async fn make_other(&self, name: &str, cores: u32, rank: u32) {
        let mut pod = pod(name, cores, &json!({}));
        let spec = pod.spec.as_mut().unwrap();
        spec.scheduler_name = Some("other".to_owned());
        spec.node_name = Some(format!("machine{rank}"));
        self.pods().create(&PostParams::default(), &pod).await.unwrap();
    }

    /// Waits until `holds` of the pod.
    async fn until(&self, name: &str, holds: impl Fn(&Pod) -> bool) -> Pod {
        let met = await_condition(self.pods(), name, move |pod: Option<&Pod>| pod.is_some_and(&holds));
        if let Ok(found) = timeout(PATIENCE, met).await {
            return found.unwrap().unwrap();
        }
        panic!("{name}: {:#?}\n{}", self.pods().get(name).await, self.jobs())
    }

    async fn until_bound(&self, name: &str) -> Pod {
        self.until(name, |pod| pod.spec.as_ref().unwrap().node_name.is_some()).await
    }

    async fn delete(&self, name: &str) {
        self.pods().delete(name, &DeleteParams::default()).await.unwrap();
        let gone = await_condition(self.pods(), name, |pod: Option<&Pod>| pod.is_none());
        timeout(PATIENCE, gone).await.unwrap().unwrap();
    }

    fn flux(&self, words: &[&str]) -> String {
        run(&self.flux, &self.brokers[0], words)
    }

    /// Name, state, rank and cores of each active job.
    fn jobs(&self) -> String {
        self.flux(&["jobs", "-n", "-o", "{name} {state} {ranks}"])
    }

    /// Waits until this many jobs are pending.
    async fn until_pending(&self, jobs: usize) {
        let pending = async {
            while self.flux(&["jobs", "-nf", "pending", "-o", "{id}"]).lines().count() != jobs {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        assert!(timeout(PATIENCE, pending).await.is_ok(), "not {jobs} jobs wait:\n{}", self.jobs());
    }

    /// Waits until this many cores are allocated.
    async fn until_allocated(&self, cores: usize) {
        let client = connect(&self.brokers[0]).await;
        let allocated = async {
            while broker::status::instance(&client).await.unwrap().allocated.cores != cores {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        assert!(timeout(PATIENCE, allocated).await.is_ok(), "not {cores} cores:\n{}", self.jobs());
    }

    /// The cores of a bound pod, by its record.
    fn record(pod: &Pod) -> Value {
        serde_json::from_str(&pod.annotations()[ANNOTATION_JOB]).unwrap()
    }
}

/// Such as `Kubernetes v1.36.2`.
fn version_of_api_server() -> String {
    let program = PathBuf::from(std::env::var_os("KUBEBUILDER_ASSETS").unwrap()).join("kube-apiserver");
    let output = std::process::Command::new(program).arg("--version").output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn has_condition(pod: &Pod, holds: impl Fn(&PodCondition) -> bool) -> bool {
    pod.status.iter().flat_map(|status| status.conditions.iter().flatten()).any(holds)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_gets_the_cores_that_flux_gives_it_and_flux_gets_them_back() {
    let Some(bed) = Bed::new().await else { return };
    bed.make("one", 3, json!({})).await;
    let pod = bed.until_bound("one").await;
    let record = Bed::record(&pod);
    let node = pod.spec.as_ref().unwrap().node_name.clone().unwrap();
    assert_eq!(format!("machine{}", record["rank"]), node);
    assert_eq!(bed.jobs(), format!("default/one RUN {}", record["rank"]));
    bed.until_allocated(3).await;
    bed.delete("one").await;
    bed.until_allocated(0).await;
    assert_eq!(bed.jobs(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gang_waits_until_it_is_whole_and_is_bound_as_a_whole() {
    let Some(bed) = Bed::new().await else { return };
    let gang = json!({"distribute.flux-framework.org/gang": "g", "distribute.flux-framework.org/gang-size": "3"});
    bed.make("g0", 3, gang.clone()).await;
    bed.make("g1", 3, gang.clone()).await;
    let says = |pod: &Pod, words: &str| {
        has_condition(pod, |condition| condition.message.as_ref().is_some_and(|said| said.contains(words)))
    };
    bed.until("g0", |pod| says(pod, "2 of 3")).await;
    assert_eq!(bed.jobs(), "");
    bed.make("g2", 3, gang).await;
    let mut nodes = Vec::new();
    for name in ["g0", "g1", "g2"] {
        nodes.extend(bed.until_bound(name).await.spec.unwrap().node_name);
    }
    nodes.sort();
    assert_eq!(nodes, ["machine0", "machine1", "machine2"]);
    assert_eq!(bed.jobs(), "default/g RUN [0-2]");
    // Nine of twelve cores are taken, and no node has room for two.
    bed.make("late", 2, json!({})).await;
    bed.until("late", |pod| says(pod, "")).await;
    bed.delete("g1").await;
    // The gang's job holds what it has until its last pod ends.
    bed.delete("g0").await;
    bed.delete("g2").await;
    bed.until_bound("late").await;
}

/// The API of Kubernetes 1.36. Other versions serve other ones.
#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_pod_group_of_kubernetes_are_a_gang() {
    const SWITCHES: [&str; 2] =
        ["--feature-gates=GenericWorkload=true", "--runtime-config=scheduling.k8s.io/v1alpha2=true"];
    if skips_without([Need::ApiServer]) {
        return;
    }
    if !version_of_api_server().contains(" v1.36.") {
        return skip(Need::ApiServer, "this kube-apiserver is not of Kubernetes 1.36");
    }
    let Some(bed) = Bed::with(&SWITCHES).await else { return };
    let in_group = |name: &str, group: &str| {
        let mut pod = pod(name, 1, &json!({}));
        let group = PodSchedulingGroup { pod_group_name: Some(group.to_owned()) };
        pod.spec.as_mut().unwrap().scheduling_group = Some(group);
        pod
    };
    let make = async |pod: Pod| bed.pods().create(&PostParams::default(), &pod).await;
    let says = |pod: &Pod, words: &str| {
        has_condition(pod, |condition| condition.message.as_ref().is_some_and(|said| said.contains(words)))
    };
    let groups: Api<PodGroup> = Api::namespaced(bed.client.clone(), NAMESPACE);
    for (name, policy) in [("g", json!({"gang": {"minCount": 2}})), ("b", json!({"basic": {}}))] {
        let group = json!({"metadata": {"name": name}, "spec": {"schedulingPolicy": policy}});
        made(groups.clone(), group).await;
    }
    for (name, group) in [("g0", "g"), ("b0", "b"), ("lost", "none")] {
        make(in_group(name, group)).await.unwrap();
    }
    make(in_group("odd", "odd\u{7}name")).await.unwrap_err();
    bed.until_bound("b0").await;
    bed.until("g0", |pod| says(pod, "1 of 2 pods of gang default/g exist")).await;
    bed.until("lost", |pod| says(pod, "PodGroup none was not found")).await;
    make(in_group("g1", "g")).await.unwrap();
    for name in ["g0", "g1"] {
        bed.until_bound(name).await;
    }
    let jobs = bed.jobs();
    let mut names: Vec<_> = jobs.lines().filter_map(|line| line.split(' ').next()).collect();
    names.sort_unstable();
    assert_eq!(names, ["default/b0", "default/g"], "{jobs}");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_hosts_are_told_apart_from_pods_on_the_same_node() {
    let Some(bed) = Bed::new().await else { return };
    let gang = json!({"distribute.flux-framework.org/gang": "g", "distribute.flux-framework.org/gang-size": "2"});
    bed.make("single", 2, json!({})).await;
    let single = Bed::record(&bed.until_bound("single").await)["rank"].clone();
    for name in ["g0", "g1"] {
        bed.make(name, 3, gang.clone()).await;
    }
    let mut ranks = Vec::new();
    for name in ["g0", "g1"] {
        ranks.push(Bed::record(&bed.until_bound(name).await)["rank"].as_u64().unwrap());
    }
    ranks.sort_unstable();
    let gangs: api::IdSet = ranks.iter().map(|rank| u32::try_from(*rank).unwrap()).collect();
    let client = connect(&bed.brokers[0]).await;
    let mut occupancy = bridge::Occupancy::of(&client);
    let mut held = async || {
        let instance = broker::status::instance(&client).await.unwrap();
        occupancy.ask(&instance).await.unwrap()
    };
    let before = held().await;
    assert_eq!((before.by_host_jobs.to_string(), before.by_gangs), (String::new(), gangs.clone()));
    // A name says nothing, and neither does a record without our form.
    let on = format!("--requires=rank:{single}");
    let record = r#"--setattr=user.k8s={"gang":{},"members":[]}"#;
    for words in
        [&["submit", &on, "--job-name=default/single", "sleep", "600"][..], &["submit", &on, record, "sleep", "600"]]
    {
        bed.flux(words);
    }
    bed.until_allocated(10).await;
    let beside = held().await;
    assert_eq!((beside.by_host_jobs.to_string(), beside.by_gangs), (single.to_string(), gangs));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_never_run_is_told_and_holds_up_nobody() {
    let Some(bed) = Bed::new().await else { return };
    bed.make("huge", 5, json!({})).await;
    bed.until("huge", |pod| has_condition(pod, |condition| condition.reason.as_deref() == Some("Unschedulable"))).await;
    bed.make("small", 1, json!({})).await;
    bed.until_bound("small").await;
    let gang = json!({"distribute.flux-framework.org/gang": "g", "distribute.flux-framework.org/gang-size": "1000000"});
    bed.make("greedy", 1, gang).await;
    bed.until("greedy", |pod| has_condition(pod, |condition| condition.reason.as_deref() == Some("Refused"))).await;
    let events: Api<Event> = Api::namespaced(bed.client.clone(), NAMESPACE);
    let events = events.list(&ListParams::default()).await.unwrap();
    assert!(events.iter().any(|event| event.reason.as_deref() == Some("Refused")));
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_run_on_while_the_leads_broker_restarts_and_keep_their_cores() {
    let Some(mut bed) = Bed::new().await else { return };
    for number in 0..4 {
        bed.make(&format!("p{number}"), 2, json!({})).await;
    }
    let mut before = Vec::new();
    for number in 0..4 {
        before.push(
            bed.until(&format!("p{number}"), |pod| pod.status.as_ref().is_some_and(|s| s.start_time.is_some())).await,
        );
    }
    // Killed as by a power cut. Then somebody uninstalls the lead's host by hand, and stops doing so.
    bed.may_start_queues.store(false, Ordering::Relaxed);
    bed.brokers.clear();
    bed.brokers.extend((0..3).map(|rank| start(&bed.flux, bed.base.path(), rank)));
    let client = connect(&bed.brokers[0]).await;
    until_online(&client, "0-2").await;
    bed.until_pending(4).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let status = bed.flux(&["queue", "status"]);
    assert!(status.contains("Scheduling is stopped: "), "{status}");
    bed.may_start_queues.store(true, Ordering::Relaxed);
    bed.until_allocated(8).await;
    // The queue is open again.
    bed.make("after", 2, json!({})).await;
    bed.until_bound("after").await;
    for pod in before {
        let now = bed.pods().get(&pod.name_any()).await.unwrap();
        assert_eq!(now.spec.unwrap().node_name, pod.spec.unwrap().node_name);
        assert_eq!((now.metadata.uid, now.metadata.deletion_timestamp), (pod.metadata.uid, None));
    }
    for number in 0..4 {
        bed.delete(&format!("p{number}")).await;
    }
    bed.until_allocated(2).await;
}

/// Flux stores R, then says that a job has it. If the lead's broker dies in between, it takes the next R for a fault of the scheduler, and goes on
/// without one.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_for_which_flux_has_stored_cores_and_told_nobody_is_bound_after_a_restart() {
    let Some(mut bed) = Bed::new().await else { return };
    bed.make("runs", 4, json!({})).await;
    let free = (Bed::record(&bed.until_bound("runs").await)["rank"].as_u64().unwrap() + 1) % 3;
    bed.flux(&["queue", "stop"]);
    bed.make("waits", 4, json!({})).await;
    bed.until_pending(1).await;
    bed.bridge.abort();
    let pending = ["jobs", "-nf", "pending", "-o", "{id}"];
    let id = bed.flux(&pending);
    let directory = bed.flux(&["job", "id", "--to=kvs", &id]);
    let r = bed.flux(&["R", "encode", &format!("-r{free}"), "-c0-3"]);
    bed.flux(&["kvs", "put", "--sync", &format!("{directory}.R={r}")]);
    // As broker.toml has it where pods are on.
    let config = bed.base.path().join("etc/broker.toml");
    let text = std::fs::read_to_string(&config).unwrap() + "[job-manager]\nstop-queues-on-restart = true\n";
    std::fs::write(&config, text).unwrap();
    bed.brokers.clear();
    bed.brokers.extend((0..3).map(|rank| start(&bed.flux, bed.base.path(), rank)));
    until_online(&connect(&bed.brokers[0]).await, "0-2").await;
    bed.bridge = serve(bed.client.clone(), bed.brokers[0].socket(), &bed.uids, &bed.may_start_queues);
    let replaced = async {
        while bed.flux(&pending).lines().any(|pending| pending == id) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    assert!(timeout(PATIENCE, replaced).await.is_ok(), "{}", bed.jobs());
    bed.flux(&["queue", "start"]);
    bed.until_bound("waits").await;
    let status = bed.flux(&["queue", "status"]);
    assert!(status.contains("Scheduling is started"), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cores_that_other_pods_use_are_given_to_no_job() {
    let Some(mut bed) = Bed::new().await else { return };
    bed.make_other("other", 3, 1).await;
    bed.until_allocated(3).await;
    assert_eq!(bed.jobs(), "other-pods/machine1 RUN 1");
    bed.make("big", 4, json!({})).await;
    let node = bed.until_bound("big").await.spec.unwrap().node_name.unwrap();
    assert_ne!(node, "machine1");
    let host = ["submit", "--requires=rank:1", "-c2", "--job-name=host", "sleep", "600"];
    bed.flux(&host);
    bed.until_pending(1).await;
    let client = connect(&bed.brokers[0]).await;
    let instance = broker::status::instance(&client).await.unwrap();
    let held = bridge::Occupancy::of(&client).ask(&instance).await.unwrap();
    assert_eq!((held.by_host_jobs.to_string(), held.by_gangs.to_string()), (String::new(), String::new()));

    // Killed as by a power cut.
    drop(client);
    bed.brokers.clear();
    bed.brokers.extend((0..3).map(|rank| start(&bed.flux, bed.base.path(), rank)));
    until_online(&connect(&bed.brokers[0]).await, "0-2").await;
    bed.until_allocated(7).await;
    assert!(bed.jobs().contains("other-pods/machine1 RUN 1"), "{}", bed.jobs());

    bed.delete("big").await;
    bed.until_allocated(3).await;
    // The power cut has lost the one before.
    bed.flux(&host);
    bed.until_pending(1).await;
    bed.delete("other").await;
    bed.until_allocated(2).await;
    // The host job has them now, and keeps them: those of a pod that comes later are held as they come free.
    bed.make_other("late", 4, 1).await;
    bed.until_allocated(4).await;
    bed.until_pending(2).await;
    let running = bed.flux(&["jobs", "-nf", "running", "-o", "{name} {id}"]);
    let id = running.lines().find_map(|line| line.strip_prefix("host ")).unwrap();
    bed.flux(&["cancel", id]);
    bed.until_pending(0).await;
    bed.until_allocated(4).await;
    assert!(!bed.jobs().contains("host"), "{}", bed.jobs());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_other_pods_use_of_many_nodes_is_held_by_one_job() {
    let Some(mut bed) = Bed::beside_others().await else { return };
    bed.flux(&["submit", "-N3", "-n3", "-c3", "--job-name=waits", "sleep", "0"]);
    bed.until_pending(1).await;
    bed.delete("other1").await;
    bed.until_allocated(4).await;
    assert_eq!(bed.jobs(), "waits SCHED \nother-pods/2-nodes RUN [0,2]");

    // Killed as by a power cut.
    bed.brokers.clear();
    bed.brokers.extend((0..3).map(|rank| start(&bed.flux, bed.base.path(), rank)));
    until_online(&connect(&bed.brokers[0]).await, "0-2").await;
    bed.until_allocated(4).await;
    bed.delete("other0").await;
    bed.until_allocated(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_was_drained_a_moment_ago_costs_no_other_rank_the_cores_of_its_pods() {
    let Some(bed) = Bed::beside_others().await else { return };
    bed.flux(&["submit", "-n1", "-c3", "--requires=rank:0", "--job-name=waits", "sleep", "0"]);
    bed.until_pending(1).await;
    // The agent here tells the bridge nothing of it.
    bed.flux(&["resource", "drain", "2", "memory"]);
    bed.delete("other1").await;
    bed.until_pending(2).await;
    let jobs = bed.jobs();
    let mut jobs: Vec<_> = jobs.lines().map(str::trim).collect();
    jobs.sort_unstable();
    assert_eq!(jobs, ["other-pods/machine0 RUN 0", "other-pods/machine2 SCHED", "waits SCHED"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_host_jobs_use_is_requested_in_kubernetes() {
    let Some(bed) = Bed::new().await else { return };
    for document in serde_norway::Deserializer::from_str(include_str!("../deploy/pods.yaml")) {
        let document: Value = serde::Deserialize::deserialize(document).unwrap();
        match document["kind"].as_str().unwrap() {
            "Namespace" => made(Api::<Namespace>::all(bed.client.clone()), document).await,
            "PriorityClass" => made(Api::<PriorityClass>::all(bed.client.clone()), document).await,
            _ => {}
        }
    }
    let accounts = Api::<ServiceAccount>::namespaced(bed.client.clone(), placeholder::NAMESPACE);
    made(accounts, json!({"metadata": {"name": "default"}})).await;
    let agents = Api::<DaemonSet>::namespaced(bed.client.clone(), api::NAMESPACE).get(api::DAEMONSET).await.unwrap();
    let agents_image = agents.spec.unwrap().template.spec.unwrap().containers[0].image.clone();
    for rank in 0..3 {
        can_resize(&bed.client, &format!("machine{rank}")).await;
    }
    let placeholders = Api::<Pod>::namespaced(bed.client.clone(), placeholder::NAMESPACE);
    let until_asks = async |cpu: &'static str| {
        let asks = move |pod: Option<&Pod>| {
            let requests = |pod: &Pod| pod.spec.as_ref()?.containers[0].resources.as_ref()?.requests.clone();
            pod.and_then(requests).is_some_and(|requests| requests["cpu"].0 == cpu)
        };
        let met = timeout(PATIENCE, await_condition(placeholders.clone(), "machine1", asks)).await;
        assert!(met.is_ok(), "not {cpu}: {:#?}", placeholders.get("machine1").await);
        met.unwrap().unwrap().unwrap()
    };
    bed.flux(&["submit", "--requires=rank:1", "-c2", "--job-name=host", "sleep", "600"]);
    let pod = until_asks("2").await;
    assert_eq!(pod.spec.unwrap().containers[0].image, agents_image);
    assert_eq!(pod.metadata.owner_references.unwrap()[0].name, "machine1");
    bed.flux(&["submit", "--requires=rank:1", "-c1", "--job-name=host", "sleep", "600"]);
    until_asks("3").await;
    bed.flux(&["cancel", "--all"]);
    until_asks("1m").await;
    assert_eq!(placeholders.list(&ListParams::default()).await.unwrap().items.len(), 1, "no job ran elsewhere");
    bridge::remove_placeholder_pods(&bed.client).await.unwrap();
    let left = placeholders.list(&ListParams::default()).await.unwrap();
    assert!(left.iter().all(|pod| pod.metadata.deletion_timestamp.is_some()));
}

/// kubelet of this Node can resize pods in place.
async fn can_resize(client: &Client, name: &str) {
    let info = NodeSystemInfo { kubelet_version: "v1.33.0".to_owned(), ..NodeSystemInfo::default() };
    let status = Patch::Merge(json!({"status": {"nodeInfo": info}}));
    Api::<Node>::all(client.clone()).patch_status(name, &PatchParams::default(), &status).await.unwrap();
}

async fn made<K>(api: Api<K>, object: Value)
where
    K: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}
