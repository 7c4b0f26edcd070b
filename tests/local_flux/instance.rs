//! What an instance is, once it is there.

use std::{
    fs,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use api::{FluxInstance, FluxNode};
use k8s_openapi::{
    ByteString,
    api::core::v1::{ConfigMap, Event, Secret},
};
use kube::{Api, Resource, api::ListParams};
use serde_json::json;

use crate::{
    harness::Cluster,
    needs::{Need, skips_without},
};

/// Four nodes that several tests look at, one after the other, and none disturbs; down when the last of them ends.
fn calm() -> Option<(Arc<Cluster>, MutexGuard<'static, ()>)> {
    static CALM: Mutex<Weak<Cluster>> = Mutex::new(Weak::new());
    static TURN: Mutex<()> = Mutex::new(());
    let cluster = {
        let mut calm = CALM.lock().unwrap_or_else(PoisonError::into_inner);
        match calm.upgrade() {
            Some(cluster) => cluster,
            None => {
                let cluster = Arc::new(Cluster::up(4, &[])?);
                *calm = Arc::downgrade(&cluster);
                cluster
            }
        }
    };
    Some((cluster, TURN.lock().unwrap_or_else(PoisonError::into_inner)))
}

/// Waits until `flux resource list` says that these nodes are free, folded into one line: the scheduler hears a moment later
/// than others who is online.
fn are_free(cluster: &Cluster, expected: &[&str]) {
    cluster.until(&format!("{expected:?}"), || {
        let list = cluster.ask("node1", &["flux", "resource", "list", "-s", "free"])?;
        list.lines().last()?.split_whitespace().eq(expected.iter().copied()).then_some(())
    });
}

/// Physical cores, as hwloc counts them.
fn cores(cluster: &Cluster) -> u32 {
    let count = "flux R encode --local | flux R decode --count=core";
    cluster.exec("node1", &["sh", "-c", count]).parse().unwrap()
}

/// The smallest whole main job: all of `nodes` are one instance that runs a job over all of them.
pub fn is_one_instance(cluster: &Cluster, nodes: u32) {
    let names = if nodes == 1 { "node1".to_owned() } else { format!("node[1-{nodes}]") };
    are_free(cluster, &["free", &nodes.to_string(), &(nodes * cores(cluster)).to_string(), "0", &names]);
    let said = cluster.exec("node1", &["flux", "run", &format!("-N{nodes}"), "hostname"]);
    let mut said: Vec<_> = said.lines().collect();
    said.sort_unstable();
    let mut all: Vec<_> = (1..=nodes).map(|number| format!("node{number}")).collect();
    all.sort_unstable();
    assert_eq!(said, all);
}

#[test]
fn four_nodes_are_one_flux_instance() {
    let Some((cluster, _turn)) = calm() else { return };
    is_one_instance(&cluster, 4);

    let overlay = cluster.exec("node1", &["flux", "overlay", "status", "--no-pretty", "--color=never"]);
    for (rank, line) in overlay.lines().take(4).enumerate() {
        // The lead counts the spares, which are offline, as missing.
        let expected = if rank == 0 { "partial" } else { "full" };
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(words[0], rank.to_string(), "{overlay}");
        assert_eq!(words[2], expected, "{overlay}");
    }
    let barrier = cluster.exec("node2", &["flux", "run", "-N4", "flux", "pmi", "barrier"]);
    assert!(barrier.contains("completed pmi barrier on 4 tasks"), "{barrier}");
    for node in cluster.nodes() {
        let rank = cluster.exec(&node.name, &["/flux-connect.sh", "flux", "getattr", "rank"]);
        assert_eq!(Some(rank.parse().unwrap()), node.rank, "{}", node.name);
    }
    let submit = "flux job attach $(flux submit -N1 --requires=host:node2 hostname)";
    assert_eq!(cluster.exec("node3", &["sh", "-c", submit]), "node2");
}

/// Flux runs the script from the broker's rundir.
#[test]
fn a_batch_script_runs_though_run_is_mounted_noexec() {
    let Some((cluster, _turn)) = calm() else { return };
    let mounts = cluster.exec("node1", &["cat", "/proc/mounts"]);
    let run = mounts.lines().find(|line| line.split(' ').nth(1) == Some("/run")).unwrap();
    assert!(run.contains("noexec"), "{run}");
    let batch = "flux job attach $(flux batch -N4 --output=/tmp/batch.out --wrap flux run -N4 hostname) >/dev/null 2>&1; cat /tmp/batch.out";
    let said = cluster.exec("node1", &["sh", "-c", batch]);
    assert_eq!(said.lines().count(), 4, "{said}");
}

#[test]
fn a_job_runs_in_a_clean_process_outside_of_every_pod() {
    let Some((cluster, _turn)) = calm() else { return };
    let look = "ulimit -l; ulimit -n; cat /proc/self/oom_score_adj /proc/self/cgroup";
    let said = cluster.exec("node1", &["flux", "run", "-N4", "--label-io", "sh", "-c", look]);
    for task in 0..4 {
        let prefix = format!("{task}: ");
        let lines: Vec<_> = said.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let [memlock, files, oom, cgroup @ ..] = lines.as_slice() else { panic!("{said}") };
        eprintln!("measured: task {task}: ulimit -l {memlock}, ulimit -n {files}, oom_score_adj {oom}");
        assert_eq!(*oom, "0", "{said}");
        assert!(!cgroup.is_empty() && !cgroup.iter().any(|line| line.contains("kubepods")), "{said}");
        // As high as the host itself allows.
        let host = fs::read_to_string(format!("/proc/{}/limits", cluster.brokers()["node1"].pid)).unwrap();
        let host = host.lines().find(|line| line.starts_with("Max locked memory")).unwrap();
        let hard = host.split_whitespace().nth(4).unwrap();
        let in_kib = hard.parse::<u64>().map_or_else(|_| hard.to_owned(), |bytes| (bytes / 1024).to_string());
        assert_eq!(*memlock, in_kib);
    }
}

#[test]
fn the_secret_key_is_nowhere_but_in_its_secret_and_the_hosts_private_files() {
    let Some((cluster, _turn)) = calm() else { return };
    let secret = cluster.wait(cluster.api::<Secret>().get("flux-curve")).unwrap();
    let text = String::from_utf8(secret.data.unwrap()["curve.cert"].0.clone()).unwrap();
    let quoted = text.lines().find_map(|line| line.trim().strip_prefix("secret-key = ")).unwrap();
    let raw = quoted.trim_matches('"').to_owned();
    let bytes = z85::decode(&raw).unwrap();
    assert_eq!(bytes.len(), 32);
    let base64 = serde_json::to_value(ByteString(bytes.clone())).unwrap().as_str().unwrap().to_owned();
    let base64_of_text = serde_json::to_value(ByteString(raw.clone().into_bytes())).unwrap();
    let forms = [
        raw.clone(),
        hex::encode(&bytes),
        base64.trim_end_matches('=').to_owned(),
        base64_of_text.as_str().unwrap().to_owned(),
    ];
    let holds = |text: &[u8]| forms.iter().any(|form| text.windows(form.len()).any(|found| found == form.as_bytes()));
    assert!(holds(text.as_bytes()));

    let mut looked_at = 0;
    let mut clean = |what: String, content: Vec<u8>| {
        looked_at += 1;
        assert!(!holds(&content) && !content.windows(32).any(|found| found == bytes), "the secret key is in {what}");
    };
    let state = cluster.state();
    for entry in fs::read_dir(&state).unwrap().flatten().filter(|entry| entry.path().is_file()) {
        clean(entry.path().display().to_string(), fs::read(entry.path()).unwrap());
    }
    for node in cluster.nodes() {
        let root = cluster.root(&node.name);
        for entry in fs::read_dir(root.parent().unwrap()).unwrap().flatten().filter(|entry| entry.path().is_file()) {
            clean(entry.path().display().to_string(), fs::read(entry.path()).unwrap());
        }
        for directory in ["", "bin", "etc", "log", "state"] {
            for entry in fs::read_dir(root.join("opt/flux-distribute").join(directory)).into_iter().flatten().flatten()
            {
                if entry.path().is_file() && !entry.path().ends_with("etc/curve.cert") {
                    clean(entry.path().display().to_string(), fs::read(entry.path()).unwrap());
                }
            }
        }
        let mode = cluster.exec(&node.name, &["stat", "-c", "%a", "/opt/flux-distribute/etc/curve.cert"]);
        assert_eq!(mode, "600");
    }
    for process in fs::read_dir("/proc").unwrap().flatten() {
        for file in ["cmdline", "environ"] {
            let content = fs::read(process.path().join(file)).unwrap_or_default();
            clean(process.path().join(file).display().to_string(), content);
        }
    }
    clean("the FluxInstances".to_owned(), objects(&cluster, cluster.api::<FluxInstance>()));
    clean("the FluxNodes".to_owned(), objects(&cluster, cluster.api::<FluxNode>()));
    clean("the ConfigMaps".to_owned(), objects(&cluster, cluster.api::<ConfigMap>()));
    clean("the Events".to_owned(), objects(&cluster, Api::<Event>::all(cluster.client())));
    clean(
        "the Events".to_owned(),
        objects(&cluster, Api::<k8s_openapi::api::events::v1::Event>::all(cluster.client())),
    );
    eprintln!("measured: the secret key is in none of {looked_at} files and objects, in {} forms", forms.len() + 1);
}

fn objects<K>(cluster: &Cluster, api: Api<K>) -> Vec<u8>
where
    K: Resource + Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    let listed = cluster.wait(api.list(&ListParams::default()));
    serde_json::to_vec(&listed.unwrap().items).unwrap()
}

#[test]
fn a_single_node_is_an_instance_of_size_1_and_down_leaves_nothing_of_it() {
    let Some(cluster) = Cluster::up(1, &[]) else { return };
    is_one_instance(&cluster, 1);
    let status = cluster.instance().status.unwrap();
    assert_eq!((status.size, status.online, status.lead.as_deref()), (1, 1, Some("node1")));

    let bridge = cluster.bridge().to_owned();
    cluster.must(&["down"]);
    // Dead processes stay visible until the machine's PID 1 has reaped them.
    let end = std::time::Instant::now() + crate::harness::PATIENCE;
    while !crate::traces::traces(&cluster.state(), &bridge).is_empty() {
        assert!(std::time::Instant::now() < end, "{:?}", crate::traces::traces(&cluster.state(), &bridge));
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

#[test]
fn no_node_applies_a_prefix_that_is_changed_later() {
    let Some(cluster) = Cluster::up(1, &[]) else { return };
    cluster.patch(json!({"spec": {"prefix": "/srv/elsewhere"}}));
    cluster.must(&["add-node"]);
    cluster.all_online(2);
    for node in cluster.wait(cluster.api::<FluxNode>().list(&ListParams::default())).unwrap() {
        assert_eq!(node.status.unwrap().facts.unwrap().prefix, "/opt/flux-distribute");
    }
    assert_eq!(cluster.exec("node1", &["flux", "run", "-N2", "hostname"]).lines().count(), 2);
}

#[test]
fn a_real_api_server_serves_the_same_instance() {
    if skips_without([Need::ApiServer]) {
        return;
    }
    let Some(cluster) = Cluster::up(2, &["--api", "real"]) else { return };
    is_one_instance(&cluster, 2);
    let job = cluster.job(&["-N2", "-n2"]);
    let before = cluster.brokers();
    cluster.must(&["agent", "node1", "kill"]);
    cluster.must(&["add-node"]);
    cluster.all_online(3);
    let mut after = cluster.brokers();
    after.remove("node3");
    assert_eq!(after, before);
    job.finish();
    is_one_instance_of_three(&cluster);
}

/// A node that came later has a spare's name until the next epoch.
fn is_one_instance_of_three(cluster: &Cluster) {
    let said = cluster.exec("node1", &["flux", "run", "-N3", "hostname"]);
    assert_eq!(said.lines().count(), 3, "{said}");
}
