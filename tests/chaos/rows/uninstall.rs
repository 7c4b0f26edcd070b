//! The end of an instance, at moments at which it suits nobody, and a new one right after it.

use std::{fs, time::Duration};

use flux_distribute::api::{ANNOTATION_RESTART, FluxInstance, FluxNode, INSTANCE};
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;

use super::{Row, row};
use crate::scene::{Hit, Scene};

/// The removal's own grace, and a machine that does several things at once.
const CLEAN_IN: Duration = Duration::from_secs(120);

pub fn rows() -> Vec<Row> {
    // Fifty moments in all.
    let end = |name, inject| Row { runs: 13, job_dies: true, heals_in: 120, ..row(name, inject) };
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
            let node = scene.pick_follower();
            scene.cluster.must(&["node", &node, "power-off"]);
            scene.dice.pause(Duration::from_secs(3));
            delete(scene);
            scene.dice.pause(Duration::from_secs(10));
            scene.cluster.must(&["node", &node, "power-on"]);
            is_clean(scene);
            install(scene);
            Hit::brokers_of(all)
        }),
    ]
}

/// Jobs do not hold it up. Returns who is there.
fn cancelling(scene: &mut Scene) -> Vec<String> {
    scene.cluster.patch(json!({ "spec": { "uninstall": { "runningJobs": "Cancel" } } }));
    let names = scene.names();
    // An agent at its pod's end has no other word than what its host remembers.
    scene.until("hosts that remember it", Duration::from_secs(30), |scene| {
        let states = names.iter().map(|node| scene.cluster.root(node).join("opt/flux-distribute/state.json"));
        let forgetful = states.into_iter().find(|state| !fs::read_to_string(state).is_ok_and(|s| s.contains("Cancel")));
        forgetful.map_or(Ok(()), |state| Err(state.display().to_string()))
    });
    names
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

/// The whole root, but for what is the machine's; what is new in /etc; /run, cgroups, mounts, processes.
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
