//! The cgroups of local mode: the same path in every hierarchy of the machine, v1 and v2. All processes in them belong
//! to the local cluster, and no process outside of them is ever killed.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::error::{Context, LocalError};
use host::cgroup::{CgroupError, Mount, make_tree, members_below, own_mounts, remove_tree};

/// How long killed processes may take to exit: more than one with gigabytes of memory needs.
const PATIENCE: Duration = Duration::from_secs(20);

/// One cgroup hierarchy of this mount namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    pub(crate) mount: PathBuf,
    /// `None` for cgroup v2; for v1 the mount options that identify the hierarchy.
    pub(crate) controllers: Option<String>,
}

/// The hierarchies that are mounted here.
///
/// # Errors
/// No hierarchy is mounted, or /proc can't be read.
pub(crate) fn hierarchies() -> Result<Vec<Hierarchy>, LocalError> {
    let found = from_mounts(own_mounts().context(|| "can't read /proc/thread-self/mountinfo".to_owned())?);
    if found.is_empty() {
        return Err(LocalError::NoCgroups);
    }
    Ok(found)
}

fn from_mounts(mounts: Vec<Mount>) -> Vec<Hierarchy> {
    let mut found: Vec<Hierarchy> = Vec::new();
    for Mount { point, options, .. } in mounts {
        let controllers = options.map(|options| v1_options(&options));
        // The same hierarchy may be mounted more than once.
        if !found.iter().any(|known| known.controllers == controllers) {
            found.push(Hierarchy { mount: point, controllers });
        }
    }
    found
}

/// The options that identify a v1 hierarchy. Others, such as `xattr` and `release_agent`, are settings of its first
/// mount.
fn v1_options(options: &[String]) -> String {
    let named: Vec<&str> = options
        .iter()
        .map(String::as_str)
        .filter(|option| !matches!(*option, "rw" | "ro" | "xattr" | "noprefix" | "clone_children"))
        .filter(|option| !option.starts_with("release_agent="))
        .collect();
    match named.as_slice() {
        // A hierarchy without controllers is identified by its name alone.
        [name] if name.starts_with("name=") => format!("none,{name}"),
        _ => named.join(","),
    }
}

/// Creates `group` if it is missing and moves this process with all its threads into it, in every hierarchy.
///
/// # Errors
/// A cgroup can't be created or entered.
pub(crate) fn enter(group: &str) -> Result<(), LocalError> {
    for hierarchy in hierarchies()? {
        make_tree(&hierarchy.mount, group, hierarchy.controllers.is_none())
            .context(|| "can't create a cgroup; is its file system mounted read-only?".to_owned())?;
        let procs = hierarchy.mount.join(group).join("cgroup.procs");
        fs::write(&procs, "0").context(|| format!("can't enter the cgroup {}", procs.display()))?;
    }
    Ok(())
}

/// The processes in `group` and below it.
pub(crate) fn processes(group: &str) -> Result<BTreeSet<i32>, LocalError> {
    Ok(members_below(hierarchies()?.iter().map(|hierarchy| hierarchy.mount.join(group))))
}

/// SIGKILLs everything in `group` and below it, repeatedly, since a process may fork between reading and killing.
///
/// # Errors
/// Processes remain after [`PATIENCE`].
pub(crate) fn kill_all(group: &str) -> Result<(), LocalError> {
    let own = std::process::id().cast_signed();
    let end = Instant::now() + PATIENCE;
    loop {
        let mut pids = processes(group)?;
        pids.remove(&own);
        if pids.is_empty() {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(LocalError::Undying { pids, group: group.to_owned() });
        }
        for pid in pids {
            // ESRCH: it has exited already.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        // The kernel offers no event for an empty v1 cgroup.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Removes `group` and everything below it, in every hierarchy.
///
/// # Errors
/// It is still busy after [`PATIENCE`].
pub(crate) fn remove(group: &str) -> Result<(), LocalError> {
    let end = Instant::now() + PATIENCE;
    for hierarchy in hierarchies()? {
        let path = hierarchy.mount.join(group);
        // `remove_tree` waits, too, but less long than a process with gigabytes of memory takes to exit, which no list
        // shows.
        let mut removed = remove_tree(&path);
        while matches!(removed, Err(CgroupError::Busy { .. })) && Instant::now() < end {
            removed = remove_tree(&path);
        }
        removed.context(|| format!("can't remove the cgroup {}", path.display()))?;
    }
    Ok(())
}

/// Removes `group`'s parents if they are empty: other local clusters share them.
pub(crate) fn remove_empty_parents(group: &str) -> Result<(), LocalError> {
    for hierarchy in hierarchies()? {
        for parent in Path::new(group).ancestors().skip(1).filter(|path| !path.as_os_str().is_empty()) {
            let _ = fs::remove_dir(hierarchy.mount.join(parent));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::cgroup::mounts;

    #[test]
    fn hierarchies_are_found_on_v1_and_v2_machines() {
        let hybrid = "30 1 0:1 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                      31 1 0:2 / /sys/fs/cgroup/systemd rw - cgroup systemd rw,xattr,name=systemd\n\
                      32 1 0:3 / /sys/fs/cgroup/unified rw - cgroup2 none rw,nsdelegate\n\
                      33 1 0:3 / /mnt/again rw - cgroup2 none rw,nsdelegate\n\
                      34 1 0:4 / /proc rw - proc proc rw\n";
        let found: Vec<_> = from_mounts(mounts(hybrid))
            .into_iter()
            .map(|hierarchy| (hierarchy.mount.display().to_string(), hierarchy.controllers))
            .collect();
        assert_eq!(
            found,
            [
                ("/sys/fs/cgroup/cpu,cpuacct".to_owned(), Some("cpu,cpuacct".to_owned())),
                ("/sys/fs/cgroup/systemd".to_owned(), Some("none,name=systemd".to_owned())),
                ("/sys/fs/cgroup/unified".to_owned(), None),
            ]
        );
    }
}
