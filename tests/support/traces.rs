//! What a local cluster has on the machine.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The name of the cluster's bridge, after which everything else is named.
pub fn bridge(state: &Path) -> String {
    let record: serde_json::Value = serde_json::from_slice(&fs::read(state.join("cluster.json")).unwrap()).unwrap();
    record["bridge"].as_str().unwrap().to_owned()
}

#[allow(dead_code, reason = "each target takes what it needs")]
/// The processes of its nodes, each with its node's name, as the kernel shows them; the dead among them, for the moment that they
/// take. Every hierarchy knows all of them, and to ask one is far cheaper than to look through the whole of /proc.
pub fn processes(bridge: &str) -> Vec<(String, i32)> {
    let Some(cluster) = cgroups(bridge).into_iter().next() else { return Vec::new() };
    let mut found = Vec::new();
    for node in below(&cluster) {
        let name = node.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut left = vec![node];
        while let Some(group) = left.pop() {
            let members = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
            found.extend(members.lines().filter_map(|pid| Some((name.clone(), pid.parse().ok()?))));
            left.extend(below(&group));
        }
    }
    found
}

/// The cluster's cgroup in each hierarchy: v1 has several, v2 is one itself.
fn cgroups(bridge: &str) -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    let places = below(&root).chain([root]).map(|place| place.join("flux-distribute-local").join(bridge));
    places.filter(|group| group.exists()).collect()
}

fn below(group: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir())
}

/// Files, mounts, links, cgroups and processes, anywhere on the machine.
pub fn traces(state: &Path, bridge: &str) -> Vec<String> {
    let path = state.display().to_string();
    let mut traces: Vec<String> = Vec::new();
    if state.exists() {
        traces.push(path.clone());
    }
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    traces.extend(mounts.lines().filter(|line| line.contains(&path)).map(str::to_owned));
    let links = fs::read_dir("/sys/class/net").unwrap().map(|link| link.unwrap().file_name().into_string().unwrap());
    traces.extend(links.filter(|link| link == bridge || link.starts_with(&format!("{bridge}n"))));
    traces.extend(cgroups(bridge).iter().map(|group| group.display().to_string()));
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let environment = fs::read(process.path().join("environ")).unwrap_or_default();
        let ours = String::from_utf8_lossy(&environment).contains(&format!("FLUX_DISTRIBUTE_LOCAL_DIR={path}\0"));
        let cgroup = fs::read_to_string(process.path().join("cgroup")).unwrap_or_default();
        let status = fs::read_to_string(process.path().join("status")).unwrap_or_default();
        // A zombie holds nothing any more: the machine's PID 1 takes it off when it comes to it.
        let is_dead = status.contains("State:\tZ");
        if !is_dead && (ours || cgroup.contains(&format!("flux-distribute-local/{bridge}/"))) {
            let told: Vec<_> =
                status.lines().filter(|line| line.starts_with("Name:") || line.starts_with("State:")).collect();
            traces.push(format!("{} {} {cgroup:?}", process.path().display(), told.join(" ")));
        }
    }
    traces
}
