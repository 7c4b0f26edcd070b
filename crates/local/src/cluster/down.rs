//! `local down`: removes everything that `local up` may have made, going by the files, the cgroups and the bridge. It
//! works without the daemon, and may be killed at any point and run again.

use std::{
    fs,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{
    cgroup,
    io::{print_line, read_line},
    layout::{Cluster, Layout},
    mounts,
    network::Network,
};
use crate::error::{Context, LocalError};
use host::{Root, facts, state};

/// How long the daemon may take to stop and reap its nodes before everything is killed.
const GRACE: Duration = Duration::from_secs(10);

/// Returns false if there was nothing to take down.
pub(crate) async fn run(layout: &Layout) -> Result<bool, LocalError> {
    let _lock = match layout.lock() {
        Err(LocalError::NotUp) => return Ok(false),
        taken => taken?,
    };
    match layout.load() {
        Ok(cluster) => {
            // Who closed stdout wants the cluster removed all the same.
            let _ = print_line("stopping the nodes, which takes some seconds");
            let group = cluster.clone();
            tokio::task::spawn_blocking(move || end_processes(&group))
                .await
                .context(|| "the task that ends the processes panicked".to_owned())??;
            Network::connect()?.remove_all(&cluster).await?;
            put_back_sysctls(&cluster);
        }
        // `local up` was killed before it wrote the record: the directory is all that it made.
        Err(LocalError::NotUp) if layout.is_unused()? => {}
        Err(LocalError::NotUp) => return Err(LocalError::NotOurs(layout.directory().to_owned())),
        Err(error) => return Err(error),
    }
    // The record goes last: without it, nothing in the directory counts as ours.
    mounts::empty(layout.directory(), &layout.cluster())?;
    mounts::remove_files(layout.directory())?;
    Ok(true)
}

fn end_processes(cluster: &Cluster) -> Result<(), LocalError> {
    let group = cluster.cgroup();
    let end = Instant::now() + GRACE;
    // The daemon goes first because it reaps its children, which not every machine's PID 1 does.
    for pid in cgroup::processes(&cluster.daemon_cgroup())? {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
    while Instant::now() < end && !cgroup::processes(&cluster.daemon_cgroup())?.is_empty() {
        std::thread::sleep(Duration::from_millis(20));
    }
    cgroup::kill_all(&group)?;
    cgroup::remove(&group)?;
    cgroup::remove_empty_parents(&group)
}

/// The machine's current values of the sysctls that an agent raises, for [`put_back_sysctls`].
pub(crate) fn sysctls() -> std::collections::BTreeMap<String, String> {
    state::RAISED
        .iter()
        .map(|(name, _)| ((*name).to_owned(), read_line(&sysctl(name))))
        .filter(|(_, value)| !value.is_empty())
        .collect()
}

fn put_back_sysctls(cluster: &Cluster) {
    // A reboot has restored them already.
    if cluster.boot_id != facts::boot_id(&Root::host()) {
        return;
    }
    for (name, value) in &cluster.sysctls {
        if read_line(&sysctl(name)) != *value
            && let Err(error) = fs::write(sysctl(name), value)
        {
            tracing::warn!(name, %error, "can't restore the sysctl");
        }
    }
}

fn sysctl(name: &str) -> String {
    format!("/proc/sys/{}", name.replace('.', "/"))
}
