//! Pods that Flux schedules and that the nodes' kubelets run, beside jobs of the hosts.

use std::fs;

use k8s_openapi::api::core::v1::{ContainerStateTerminated, Pod};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use serde_json::{Value, json};

use crate::{harness::Cluster, traces};

fn pods(cluster: &Cluster) -> Api<Pod> {
    Api::namespaced(cluster.client(), "default")
}

/// Makes a pod of one core that runs `script`.
fn make(cluster: &Cluster, name: &str, annotations: Value, more: Value, script: &str) {
    let mut pod = json!({
        "metadata": {"name": name, "annotations": annotations},
        "spec": {
            "schedulerName": "flux",
            "restartPolicy": "Never",
            "containers": [{
                "name": "c", "image": "none", "command": ["sh", "-c"], "args": [script],
                "env": [{"name": "NAME", "value": name}], "resources": {"requests": {"cpu": "1"}},
            }],
        },
    });
    pod["spec"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let pod = serde_json::from_value(pod).unwrap();
    cluster.wait(pods(cluster).create(&PostParams::default(), &pod)).unwrap();
}

fn get(cluster: &Cluster, name: &str) -> Option<Pod> {
    cluster.wait(pods(cluster).get_opt(name)).unwrap()
}

/// Waits for a phase. Returns the pod.
fn until_phase(cluster: &Cluster, name: &str, phase: &str) -> Pod {
    cluster.until(&format!("{name} {phase}"), || {
        get(cluster, name).filter(|pod| pod.status.as_ref().unwrap().phase.as_deref() == Some(phase))
    })
}

fn node_of(pod: &Pod) -> String {
    pod.spec.as_ref().unwrap().node_name.clone().unwrap()
}

/// Why a pod is not scheduled.
fn waits_for(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|one| one.type_ == "PodScheduled" && one.status == "False")?.message.clone()
}

fn terminated(pod: &Pod) -> ContainerStateTerminated {
    let containers = pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap();
    containers[0].state.clone().unwrap().terminated.unwrap()
}

/// Waits until this many cores are allocated.
fn until_allocated(cluster: &Cluster, cores: &str) {
    cluster.until(&format!("{cores} cores allocated"), || {
        let words = ["flux", "resource", "list", "-s", "allocated", "-no", "{ncores}"];
        (cluster.ask("node1", &words)?.lines().last() == Some(cores)).then_some(())
    });
}

/// The nodes on which a process runs that has `words` in its command line.
fn nodes_with(cluster: &Cluster, words: &str) -> Vec<String> {
    let line = |pid: i32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().replace('\0', " ");
    let has_words = |pid: i32| line(pid).contains(words);
    let mut nodes: Vec<_> = traces::processes(cluster.bridge())
        .into_iter()
        .filter(|(_, pid)| has_words(*pid))
        .map(|(node, _)| node)
        .collect();
    nodes.sort();
    nodes
}

#[test]
fn a_node_whose_kubelet_gives_cpus_to_single_pods_gets_no_more_pods_until_it_does_not() {
    let Some(cluster) = Cluster::up(1, &["--pods", "--cores", "2"]) else { return };
    let make = |name: &str| make(&cluster, name, json!({}), json!({}), "sleep 600");
    make("before");
    until_phase(&cluster, "before", "Running");
    let file = cluster.root("node1").join("var/lib/kubelet/cpu_manager_state");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    let use_policy = |policy: &str| {
        fs::write(&file, json!({"policyName": policy, "defaultCpuSet": "0", "checksum": 1}).to_string()).unwrap();
        let is_static = || Some(cluster.roster()?.ranks.get(&0)?.static_cpus);
        cluster.until("the policy in the roster", || (is_static()? == (policy == "static")).then_some(()));
    };
    use_policy("static");
    make("after");
    let reason = cluster.until("a reason", || waits_for(&get(&cluster, "after")?));
    assert!(reason.contains("1 with kubelet's CPU manager policy static"), "{reason}");
    until_phase(&cluster, "before", "Running");
    cluster.wait(pods(&cluster).delete("before", &DeleteParams::default())).unwrap();
    use_policy("none");
    until_phase(&cluster, "after", "Running");
}

#[test]
fn objects_are_made_changed_and_deleted_without_kubectl() {
    let Some(cluster) = Cluster::up(1, &["--pods", "--cores", "2"]) else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    let write = |label: &str| {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "default", "labels": {"of": label}},
            "spec": {"schedulerName": "flux", "containers": [{"name": "c", "image": "x", "command": ["sleep", "infinity"]}]},
        });
        let instance = json!({"apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance",
            "metadata": {"name": "flux", "namespace": "flux-distribute"}, "spec": {"ranks": {"retain": "1h"}}});
        fs::write(file.path(), format!("{pod}\n---\n{instance}\n")).unwrap();
    };
    let run = |verb: &str| cluster.must(&[verb, file.path().to_str().unwrap()]);
    write("a");
    assert_eq!(run("apply").trim(), "Pod p created\nFluxInstance flux changed");
    until_phase(&cluster, "p", "Running");
    assert_eq!(run("apply").trim(), "Pod p unchanged\nFluxInstance flux unchanged");
    write("b");
    assert_eq!(run("apply").trim(), "Pod p changed\nFluxInstance flux unchanged");
    assert_eq!(get(&cluster, "p").unwrap().metadata.labels.unwrap()["of"], "b");

    fs::write(file.path(), "{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: default}}").unwrap();
    assert_eq!(run("delete").trim(), "Pod p deleted");
    cluster.until("the end of the pod", || get(&cluster, "p").is_none().then_some(()));
    assert_eq!(run("delete").trim(), "Pod p does not exist");

    // Nothing of a file with a kind that local mode lacks, and what the API server says of what it refuses.
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: q, namespace: default}, spec: {containers: []}}";
    for (object, words) in [
        ("{apiVersion: apps/v1, kind: Deployment, metadata: {name: d}}", "local mode has no apps/v1 Deployment"),
        ("{apiVersion: v1, kind: ConfigMap, metadata: {name: c, namespace: nowhere}}", "nowhere"),
        (
            "{apiVersion: distribute.flux-framework.org/v1alpha1, kind: FluxInstance, metadata: {name: flux}, spec: {sise: 1}}",
            "sise",
        ),
    ] {
        fs::write(file.path(), format!("{pod}\n---\n{object}\n")).unwrap();
        let refused = cluster.run(&["apply", file.path().to_str().unwrap()]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(words), "{refused:?}");
        assert_eq!(get(&cluster, "q").is_some(), !words.contains("Deployment"), "{words}");
    }
}

#[test]
fn a_gang_of_pods_runs_beside_a_host_job_and_gives_its_cores_back() {
    let Some(cluster) = Cluster::up(4, &["--pods", "--cores", "1"]) else { return };
    let job = cluster.job(&["-N1", "-n1"]);
    let gang = json!({"distribute.flux-framework.org/gang": "g", "distribute.flux-framework.org/gang-size": "3"});
    let script = "hostname > /root/ran-$NAME; until test -e /root/gang-ends; do sleep 0.3; done";
    for name in ["g0", "g1"] {
        make(&cluster, name, gang.clone(), json!({}), script);
    }
    cluster.until("the word that the gang is not complete", || {
        waits_for(&get(&cluster, "g0")?).filter(|message| message.contains("2 of 3"))
    });
    assert_eq!(nodes_with(&cluster, "gang-ends"), [""; 0]);
    make(&cluster, "g2", gang, json!({}), script);
    let mut nodes: Vec<_> =
        ["g0", "g1", "g2"].iter().map(|name| node_of(&until_phase(&cluster, name, "Running"))).collect();
    let shown = cluster.must(&["pods"]);
    for (name, node) in ["g0", "g1", "g2"].iter().zip(&nodes) {
        let ran = fs::read_to_string(cluster.root(node).join(format!("root/ran-{name}"))).unwrap();
        assert_eq!(ran.trim(), node, "{name}");
        let is_shown = |line: &str| line.split_whitespace().eq(["default", name, "Running", node.as_str()]);
        assert!(shown.lines().any(is_shown), "{shown}");
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "# flux-distribute\n\nwords").unwrap();
    let refused = cluster.run(&["apply", file.path().to_str().unwrap()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    let words = "it holds something that is not a Kubernetes object";
    assert!(!refused.status.success() && said.trim_end().ends_with(words), "{refused:?}");
    nodes.sort();
    assert_eq!(nodes_with(&cluster, "gang-ends"), nodes, "each in its node");
    nodes.dedup();
    assert_eq!(nodes.len(), 3, "one core each");
    until_allocated(&cluster, "4");
    let jobs = cluster.exec("node1", &["flux", "jobs", "-no", "{name} {state} {nnodes}"]);
    assert!(jobs.lines().any(|line| line == "default/g RUN 3") && jobs.lines().count() == 2, "{jobs}");

    for node in &nodes {
        fs::write(cluster.root(node).join("root/gang-ends"), "").unwrap();
    }
    for name in ["g0", "g1", "g2"] {
        assert_eq!(terminated(&until_phase(&cluster, name, "Succeeded")).exit_code, 0);
    }
    until_allocated(&cluster, "1");
    job.finish();
    until_allocated(&cluster, "0");
}

#[test]
fn a_pod_ends_with_its_deletion_and_fails_with_its_command_or_its_node() {
    let Some(cluster) = Cluster::up(2, &["--pods", "--cores", "1"]) else { return };
    let polite = "trap 'touch /root/said-bye; exit 0' TERM; touch /root/began; while true; do sleep 0.2; done";
    make(&cluster, "polite", json!({}), json!({}), polite);
    let node = node_of(&until_phase(&cluster, "polite", "Running"));
    cluster.until("its beginning", || cluster.root(&node).join("root/began").exists().then_some(()));
    let stubborn = json!({"terminationGracePeriodSeconds": 1});
    make(&cluster, "stubborn", json!({}), stubborn, "trap '' TERM; while true; do sleep 0.3; done");
    until_phase(&cluster, "stubborn", "Running");
    until_allocated(&cluster, "2");
    for name in ["polite", "stubborn"] {
        cluster.wait(pods(&cluster).delete(name, &DeleteParams::default())).unwrap();
        cluster.until(&format!("the end of {name}"), || get(&cluster, name).is_none().then_some(()));
    }
    assert!(cluster.root(&node).join("root/said-bye").exists());
    assert_eq!(nodes_with(&cluster, "while true"), [""; 0]);
    until_allocated(&cluster, "0");

    make(&cluster, "wrong", json!({}), json!({}), "exit 3");
    assert_eq!(terminated(&until_phase(&cluster, "wrong", "Failed")).exit_code, 3);
    let image = json!({"containers": [{"name": "c", "image": "none"}]});
    make(&cluster, "image", json!({}), image, "");
    let message = terminated(&until_phase(&cluster, "image", "Failed")).message.unwrap();
    assert!(message.contains("container c has no command"), "{message}");

    // Not the lead: its end is that of the instance.
    let node = cluster.holder(1);
    let there = json!({"nodeSelector": {"kubernetes.io/hostname": node}});
    make(&cluster, "cut", json!({}), there, "sleep 600");
    until_phase(&cluster, "cut", "Running");
    cluster.must(&["node", &node, "power-off"]);
    assert_eq!(nodes_with(&cluster, "sleep 600"), [""; 0]);
    until_phase(&cluster, "cut", "Running");
    cluster.must(&["node", &node, "power-on"]);
    assert_eq!(terminated(&until_phase(&cluster, "cut", "Failed")).reason.as_deref(), Some("ContainerStatusUnknown"));
    until_allocated(&cluster, "0");
}
