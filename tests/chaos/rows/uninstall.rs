//! The end of an instance at inconvenient moments, and a new one right after it.

use std::{fs, time::Duration};

use api::{ANNOTATION_RESTART, FluxInstance, FluxNode, INSTANCE};
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;

use super::{DEEP, Row, row};
use crate::scene::{Hit, Scene};

/// The removal's own grace, and a machine that does several things at once.
const CLEAN_IN: Duration = Duration::from_mins(2);

pub fn rows() -> Vec<Row> {
    // Fifty moments in all.
    let end = |name, inject| Row { runs: 9, job_dies: true, heals_in: 120, ..row(name, inject) };
    vec![
        end("uninstall in the middle of a run", |scene| {
            let all = cancelling(scene);
            scene.dice.pause(Duration::from_secs(3));
            again(scene, all)
        }),
        end("uninstall in the middle of an install", |scene| {
            let all = cancelling(scene);
            remove(scene);
            install(scene);
            scene.dice.pause(Duration::from_secs(15));
            again(scene, all)
        }),
        end("uninstall in the middle of an epoch change", |scene| {
            let all = cancelling(scene);
            let port = 8053 + scene.dice.below(100);
            let word = format!("now {port}");
            scene.cluster.patch(json!({
                "metadata": { "annotations": { ANNOTATION_RESTART: word } },
                "spec": { "broker": { "port": port } },
            }));
            scene.dice.pause(Duration::from_secs(10));
            again(scene, all)
        }),
        end("uninstall with one node down", |scene| {
            let all = cancelling(scene);
            let node = scene.pick_node();
            scene.cluster.must(&["node", &node, "power-off"]);
            scene.dice.pause(Duration::from_secs(3));
            delete(scene);
            scene.dice.pause(Duration::from_secs(10));
            scene.cluster.must(&["node", &node, "power-on"]);
            is_clean(scene);
            install(scene);
            Hit::brokers_of(all)
        }),
        Row {
            shape: &DEEP,
            ..end("uninstall of a deep tree (kary:2)", |scene| {
                let all = cancelling(scene);
                scene.dice.pause(Duration::from_secs(3));
                again(scene, all)
            })
        },
        Row {
            job_dies: false,
            ..end("uninstall that waits for a running job", |scene| {
                let (all, before) = (with_running_jobs(scene, "Wait"), scene.brokers());
                delete(scene);
                scene.until("everybody's word that it waits", Duration::from_secs(30), waits);
                scene.dice.pause(Duration::from_secs(5));
                assert_eq!(scene.job_is_lost(), None);
                assert_eq!(scene.brokers(), before);
                let (nodes, ends) = scene.let_job_end();
                is_clean(scene);
                assert_eq!(ends.iter().filter(|end| end.exists()).count(), nodes, "its end was not its own");
                install(scene);
                Hit::brokers_of(all)
            })
        },
    ]
}

/// Jobs do not delay it. Returns the nodes that take part.
fn cancelling(scene: &mut Scene) -> Vec<String> {
    with_running_jobs(scene, "Cancel")
}

/// Sets what happens to jobs at the end. Returns the nodes that take part.
fn with_running_jobs(scene: &mut Scene, end: &str) -> Vec<String> {
    scene.cluster.patch(json!({ "spec": { "uninstall": { "runningJobs": end } } }));
    let word = format!("\"runningJobs\": \"{end}\"");
    let names = scene.names();
    // An agent at its pod's end has no other word than what its host remembers.
    scene.until("hosts that remember it", Duration::from_secs(30), |scene| {
        let states = names.iter().map(|node| scene.cluster.root(node).join("opt/flux-distribute/state.json"));
        let forgetful = states.into_iter().find(|state| !fs::read_to_string(state).is_ok_and(|s| s.contains(&word)));
        forgetful.map_or(Ok(()), |state| Err(state.display().to_string()))
    });
    names
}

fn waits(scene: &Scene) -> Result<(), String> {
    let nodes = scene.cluster.wait(scene.cluster.api::<FluxNode>().list(&ListParams::default()));
    let told = nodes.map_err(|error| error.to_string())?.items.into_iter().map(|node| node.status?.message);
    let told: Vec<_> = told.map(Option::unwrap_or_default).collect();
    let all_wait = told.iter().all(|told| told.contains("pending jobs are not started any more"));
    if all_wait { Ok(()) } else { Err(format!("{told:?}")) }
}

fn again(scene: &mut Scene, all: Vec<String>) -> Hit {
    remove(scene);
    install(scene);
    Hit::brokers_of(all)
}

fn remove(scene: &mut Scene) {
    delete(scene);
    is_clean(scene);
}

fn delete(scene: &mut Scene) {
    let instances = scene.cluster.api::<FluxInstance>();
    scene.spec = scene.cluster.instance().spec;
    // Another begins with the port that is usual.
    scene.spec.broker.port = None;
    scene.cluster.wait(instances.delete(INSTANCE, &DeleteParams::default())).unwrap();
}

fn install(scene: &Scene) {
    let instances = scene.cluster.api::<FluxInstance>();
    let instance = FluxInstance::new(INSTANCE, scene.spec.clone());
    scene.cluster.wait(instances.create(&PostParams::default(), &instance)).unwrap();
}

/// Nothing of ours is on any host.
fn is_clean(scene: &Scene) {
    scene.until("clean hosts", CLEAN_IN, |scene| {
        let nodes = scene.cluster.api::<FluxNode>();
        let left = scene.cluster.wait(nodes.list(&ListParams::default())).map_err(|error| error.to_string())?;
        let left: Vec<_> = left.items.into_iter().map(|node| (node.spec.node_name, node.status)).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    });
    assert!(scene.brokers().is_empty(), "{:?}", scene.brokers());
    // A host stage that looks once more may have a cgroup for a moment.
    scene.until("nothing of ours", Duration::from_secs(10), nothing_is_left);
}

/// The whole root, but for what is the machine's; what is new in /etc; /run, cgroups, mounts, processes. No sysctls: those that
/// agents raise are the machine's, so that the first agent of all clusters has raised them for all. scripts/cluster_faults.py
/// looks at them, on kubelets.
const LOOK: &str = "
find / -xdev -path /usr -prune -o -path /etc -prune -o -path /var/lib/kubelet -prune -o -print
find /etc -newer /etc/hosts
find /run -mindepth 1
find /sys/fs/cgroup -name 'flux*'
grep flux /proc/mounts | grep -v flux-distribute-local
for process in /proc/[0-9]*; do read -r name < $process/comm; case $name in flux-*) echo $process $name;; esac; done
true";

/// What a simulated node has before anything of ours, and the files that end jobs.
fn is_its_own(line: &str) -> bool {
    let top = ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sys", "/dev", "/run", "/run/boot-id"];
    let own = ["/", "/opt", "/var", "/var/lib", "/var/log", "/var/tmp", "/var/run", "/root", "/home", "/srv", "/tmp"];
    // Where the bundle of this machine is shown.
    let shown = env!("CARGO_TARGET_TMPDIR");
    let is_shown = shown.starts_with(line) || line.contains(shown);
    let is_agent = line.ends_with(" flux-distribute");
    top.contains(&line) || own.contains(&line) || is_shown || is_agent || line.starts_with("/root/end-")
}

fn nothing_is_left(scene: &Scene) -> Result<(), String> {
    for node in scene.cluster.nodes() {
        let found = scene.ask_on(&node.name, &["sh", "-c", LOOK])?;
        let left: Vec<_> = found.lines().filter(|line| !is_its_own(line)).collect();
        if !left.is_empty() {
            return Err(format!("left on {}: {left:?}", node.name));
        }
    }
    Ok(())
}
