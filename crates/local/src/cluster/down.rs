//! `local down`: takes off everything that `local up` can have made, from what is on disk, in the cgroups and on the
//! bridge. It needs no daemon, may be killed anywhere, and may be run again.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{
    cgroup,
    layout::{Cluster, Layout},
    mounts,
    network::Network,
    objects::read_line,
};
use crate::error::{Context, LocalError};
use host::{Root, facts, sysctl};

/// How long the daemon may take to end its nodes and reap them, before it is killed with them.
const GRACE: Duration = Duration::from_secs(10);

/// Returns false where there was nothing to take down.
pub(crate) async fn run(layout: &Layout) -> Result<bool, LocalError> {
    let _lock = match layout.lock() {
        Err(LocalError::NotUp) => return Ok(false),
        taken => taken?,
    };
    match layout.load() {
        Ok(cluster) => {
            let group = cluster.clone();
            tokio::task::spawn_blocking(move || end_processes(&group))
                .await
                .context(|| "taking down broke off".to_owned())??;
            Network::connect()?.remove_all(&cluster).await?;
            put_back_sysctls(&cluster);
        }
        // Killed before the record was there: nothing but files had been made.
        Err(LocalError::NotUp) => {}
        Err(error) => return Err(error),
    }
    remove_files(layout.directory())?;
    Ok(true)
}

fn end_processes(cluster: &Cluster) -> Result<(), LocalError> {
    let group = cluster.cgroup();
    let end = Instant::now() + GRACE;
    // Asked first: it reaps its children, and not every machine's PID 1 does.
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

/// What an agent raises, as it is on this machine, for [`put_back_sysctls`].
pub(crate) fn sysctls() -> std::collections::BTreeMap<String, String> {
    sysctl::RAISED
        .iter()
        .map(|(name, _)| ((*name).to_owned(), read_line(&sysctl(name))))
        .filter(|(_, value)| !value.is_empty())
        .collect()
}

fn put_back_sysctls(cluster: &Cluster) {
    // After a reboot they are the machine's own again.
    if cluster.boot_id != facts::boot_id(&Root::host()) {
        return;
    }
    for (name, value) in &cluster.sysctls {
        if read_line(&sysctl(name)) != *value
            && let Err(error) = fs::write(sysctl(name), value)
        {
            tracing::warn!(name, %error, "can't put back the sysctl");
        }
    }
}

fn sysctl(name: &str) -> String {
    format!("/proc/sys/{}", name.replace('.', "/"))
}

/// Removes a directory of ours. What is mounted in it, if anything is, is unmounted and not removed.
pub(crate) fn remove_files(directory: &Path) -> Result<(), LocalError> {
    let failed = || format!("can't remove {}", directory.display());
    match directory.canonicalize() {
        Ok(directory) => {
            mounts::unmount_all(&directory)?;
            fs::remove_dir_all(&directory).context(failed)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).context(failed),
    }
}
