//! Kernel settings that we raise, and restore at removal.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use super::{Root, state};
use hostapi::{HostState, Refusal, Undo};

/// Raises each sysctl to its least value. Skips one that this kernel does not have or does not let us set: a broker
/// runs without it.
///
/// # Errors
/// If a name is invalid, or the old value can't be recorded.
pub fn raise(root: &Root, state: &mut HostState, least: &BTreeMap<String, u64>) -> Result<(), Refusal> {
    for (name, &new) in least {
        let path = path(root, name)?;
        let Some(old) = read(&path) else {
            tracing::debug!(sysctl = name, "this kernel does not have this sysctl");
            continue;
        };
        if old >= new {
            continue;
        }
        state::record(root, state, Undo::Sysctl { name: name.clone(), old, new })?;
        if let Err(error) = fs::write(&path, new.to_string()) {
            tracing::warn!(sysctl = name, value = new, %error, "can't raise this sysctl");
        }
    }
    Ok(())
}

/// Restores a sysctl if it still has our value. A setting that we raised twice is recorded twice, so undoing the
/// records in reverse restores the first value, whichever step a kill interrupted.
///
/// # Errors
/// If the name is invalid, or the value can't be written.
pub fn put_back(root: &Root, name: &str, old: u64, new: u64) -> Result<(), Refusal> {
    let path = path(root, name)?;
    if read(&path) != Some(new) {
        return Ok(());
    }
    fs::write(&path, old.to_string()).map_err(|error| Refusal::io("restore", &path, &error))
}

fn read(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn path(root: &Root, name: &str) -> Result<PathBuf, Refusal> {
    let plain = name
        .split('.')
        .all(|part| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-'));
    if !plain {
        return Err(Refusal::new(format!("{name} is not a valid sysctl name")));
    }
    Ok(root.path("/proc/sys").join(name.replace('.', "/")))
}
