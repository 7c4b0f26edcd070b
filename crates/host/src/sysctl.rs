//! Kernel settings: raised where they are lower, and put back.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use super::{Root, state};
use hostapi::{HostState, Refusal, Undo};

/// What is raised, and to what. It holds for the host as a whole: job shells open inotify instances, and so do kubelet and
/// containerd, and the kernel's default of 128 is soon used up.
pub const RAISED: [(&str, u64); 2] =
    [("fs.inotify.max_user_instances", 8192), ("fs.inotify.max_user_watches", 524_288)];

/// Raises each sysctl to its least value. One that this kernel does not have or does not let us set is left alone: a
/// broker runs without it.
///
/// # Errors
/// Where the old value can't be remembered.
pub fn raise(root: &Root, state: &mut HostState, least: &BTreeMap<String, u64>) -> Result<(), Refusal> {
    for (name, &new) in least {
        let path = path(root, name)?;
        let Some(old) = read(&path) else {
            tracing::debug!(sysctl = name, "this kernel does not have it");
            continue;
        };
        if old >= new {
            continue;
        }
        state::record(root, state, Undo::Sysctl { name: name.clone(), old, new })?;
        if let Err(error) = fs::write(&path, new.to_string()) {
            tracing::warn!(sysctl = name, value = new, %error, "can't be raised");
        }
    }
    Ok(())
}

/// Puts a sysctl back, if it still has our value. A setting that we raised twice was recorded twice, so undoing the
/// records in reverse reaches the first value from wherever a kill left us.
///
/// # Errors
/// Where it can't be written.
pub fn put_back(root: &Root, name: &str, old: u64, new: u64) -> Result<(), Refusal> {
    let path = path(root, name)?;
    if read(&path) != Some(new) {
        return Ok(());
    }
    fs::write(&path, old.to_string()).map_err(|error| Refusal::io("put back", &path, &error))
}

fn read(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn path(root: &Root, name: &str) -> Result<PathBuf, Refusal> {
    let plain = name
        .split('.')
        .all(|part| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-'));
    if !plain {
        return Err(Refusal::new(format!("{name} is not the name of a sysctl")));
    }
    Ok(root.path("/proc/sys").join(name.replace('.', "/")))
}
