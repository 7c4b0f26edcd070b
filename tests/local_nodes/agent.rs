//! Stands in for the agent: tells where it is, serves its node's name on a port, and leaves two processes behind, one in
//! the pod's cgroup and one that has left it.

use std::{
    fs,
    io::Write,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    process::{Command, id},
    thread::sleep,
    time::Duration,
};

const LONG: Duration = Duration::from_secs(3600);
const HOST: &str = "/proc/1/root";

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("stays") => return sleep(LONG),
        Some("leaves") => {
            leave();
            return sleep(LONG);
        }
        _ => {}
    }
    // Once: what has left must not become more with every restart.
    if !fs::exists(format!("{HOST}/root/left")).unwrap() {
        let left = Command::new("/proc/self/exe").arg("leaves").spawn().unwrap();
        fs::write(format!("{HOST}/root/left"), left.id().to_string()).unwrap();
    }
    let stayed = Command::new("/proc/self/exe").arg("stays").spawn().unwrap();
    let variables: String = std::env::vars().map(|(name, value)| format!("{name}={value}\n")).collect();
    let kubeconfig = fs::metadata("/kubeconfig").unwrap().permissions().mode() & 0o777;
    fs::write(format!("{HOST}/root/environment"), format!("{variables}kubeconfig={kubeconfig:o}\n")).unwrap();
    let listener = TcpListener::bind("0.0.0.0:8051").unwrap();
    // Written last, so that a test that waits for it finds everything.
    fs::write(format!("{HOST}/root/agent.new"), format!("{} {}", id(), stayed.id())).unwrap();
    fs::rename(format!("{HOST}/root/agent.new"), format!("{HOST}/root/agent")).unwrap();
    for stream in listener.incoming() {
        stream.unwrap().write_all(std::env::var("NODE_NAME").unwrap().as_bytes()).unwrap();
    }
}

/// As a broker does: into a cgroup beside the pods', in every hierarchy.
fn leave() {
    let hierarchies = format!("{HOST}/sys/fs/cgroup");
    let mounts = fs::read_dir(&hierarchies).unwrap().map(|entry| entry.unwrap().path());
    for mount in mounts.chain([hierarchies.clone().into()]) {
        if !mount.join("cgroup.procs").exists() || mount.is_symlink() {
            continue;
        }
        let group = mount.join("outside");
        fs::create_dir_all(&group).unwrap();
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(all) = fs::read(mount.join(file)) {
                let _ = fs::write(group.join(file), all);
            }
        }
        fs::write(group.join("cgroup.procs"), "0").unwrap();
    }
}
