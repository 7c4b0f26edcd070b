//! Claims a host: the prefix, and `state.json` in it, before anything else is written.

use std::{
    ffi::OsStr,
    fs::{self, DirEntry, Permissions},
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    path::{Path, PathBuf},
};

use super::links::CURRENT;
use api::{PrefixError, check_prefix, check_prefix_characters};
use broker::command::RUNDIR;
use host::{
    Root,
    distrust::Distrust,
    dumps::DUMPS,
    files::{aside, missing_parents},
    lock::{HostLock, LOCK, LOCK_REPLACING, WAIT},
    opening::path_of,
    state::{self, ClaimedBy, ENVIRONMENTS, POINTER, STATE},
    statedir::{self, STATEDIR},
    trust,
};
use hostapi::{ClaimOrder, HostState, Machine, Refusal, Undo};

/// Directories below the prefix. [`super::configure`] makes `state`, on the lead only.
const DIRECTORIES: [&str; 5] = [ENVIRONMENTS, "pkgs", "etc", "log", "bin"];

/// Makes the prefix and its `state.json`.
///
/// # Errors
/// If the prefix holds files that are not ours, lies where users other than root can write, or belongs to another
/// machine; or if the host is claimed for another FluxInstance.
pub fn claim(root: &Root, order: &ClaimOrder) -> Result<(), Refusal> {
    let refused = |error: PrefixError| Refusal::new(format!("spec.prefix: {error}"));
    check_prefix(&order.prefix).map_err(refused)?;
    match find_claim(root, &order.prefix)? {
        Some(found) => check_same_claim(&found, order)?,
        None => check_prefix_characters(&order.prefix).map_err(refused)?,
    }
    // Before anything is made: the directories may belong to other users.
    trust::nearest(root, &order.prefix)?;
    let dir = root.path(&order.prefix);
    let writable_mode = match trust::directory(root, &order.prefix) {
        Ok(_) => None,
        Err(Distrust::WritableByOthers { mode, .. }) => Some(mode),
        Err(distrust) => return Err(distrust.into()),
    };
    let check = || {
        // The owners first: what a user owns is not looked into.
        if writable_mode.is_some() {
            check_owners(root, &order.prefix)?;
        }
        check_content(root, &order.prefix, &order.instance_uid)
    };
    check()?;
    let mut state = state::fresh(root, order);
    state.undo.extend(missing_parents(&dir).iter().map(|parent| Undo::Directory { path: root.unpath(parent) }));
    state::write_pointer(root, &state)?;
    trust::make_closed_directory(root, &order.prefix, 0o755)?;
    // Checked again now that the prefix is closed: until then others may have been able to write there.
    if let Err(refusal) = check() {
        if let Some(mode) = writable_mode {
            // Restored, else the next claim would take the closed prefix for root's own.
            let _ = fs::set_permissions(&dir, Permissions::from_mode(mode));
            // The pointer would lead every later order to a directory that can't be trusted.
            let _ = state::remove_pointer(root);
        }
        return Err(refusal);
    }

    let _lock = HostLock::take(root, &order.prefix, WAIT)?;
    // Looked up again: another machine that shares the directory may have held the lock.
    match state::claimed_by(root, &order.prefix)? {
        ClaimedBy::ThisMachine(found) => {
            check_same_claim(&found, order)?;
            let machine = state.machine.or_else(|| found.machine.clone());
            let updated = HostState { uninstall: order.uninstall.clone(), machine, ..found.clone() };
            if updated != found {
                state::write_pointer(root, &updated)?;
                state::save(root, &updated)?;
            }
        }
        ClaimedBy::Nobody => state::save(root, &state)?,
        ClaimedBy::AnotherMachine(machine) => return Err(Refusal::new(claimed_by_another(&order.prefix, &machine))),
    }
    for name in DIRECTORIES {
        trust::make_closed_directory(root, &order.prefix.join(name), 0o755)?;
    }
    Ok(())
}

/// The claim of this host. A prefix that is none of the default directories is found by its pointer. If that is lost, the
/// prefix's own state.json counts, and the pointer is written again.
fn find_claim(root: &Root, prefix: &Path) -> Result<Option<HostState>, Refusal> {
    if let Some(found) = state::find(root)? {
        return Ok(Some(found));
    }
    match state::claimed_by(root, prefix)? {
        ClaimedBy::Nobody => Ok(None),
        ClaimedBy::ThisMachine(found) => state::write_pointer(root, &found).map(|()| Some(found)),
        ClaimedBy::AnotherMachine(machine) => Err(Refusal::new(claimed_by_another(prefix, &machine))),
    }
}

/// The message for a prefix that another machine has claimed.
pub fn claimed_by_another(prefix: &Path, machine: &Machine) -> String {
    format!(
        "{} is claimed by another machine (host name {}): nodes share this directory, or its disk was copied from it; \
         set spec.prefix to a directory of a local disk, or remove {} if no other node uses it",
        prefix.display(),
        if machine.name.is_empty() { "unknown" } else { &machine.name },
        prefix.join(STATE).display()
    )
}

fn check_same_claim(found: &HostState, order: &ClaimOrder) -> Result<(), Refusal> {
    if found.prefix != order.prefix {
        return Err(Refusal::new(format!(
            "this host is already claimed at {}; it must be cleaned before {} can be used",
            found.prefix.display(),
            order.prefix.display()
        )));
    }
    if found.instance_uid != order.instance_uid {
        return Err(Refusal::new(format!(
            "{} belongs to the FluxInstance with uid {}; it must be removed before the FluxInstance with uid {} can \
             claim the host",
            found.prefix.display(),
            found.instance_uid,
            order.instance_uid
        )));
    }
    Ok(())
}

/// Accepts a prefix without `state.json` if it holds only the remains of an interrupted claim, statedirs that a removal
/// kept, or files that we put there before its `state.json` was lost.
///
/// # Errors
/// If the prefix holds anything else, or something that a user has mounted by FUSE, or was configured for a FluxInstance
/// with a uid other than `wanted`.
pub fn check_content(root: &Root, prefix: &Path, wanted: &str) -> Result<(), Refusal> {
    let dir = root.path(prefix);
    let Some(directory) = trust::directory_to_close(root, prefix)? else { return Ok(()) };
    if trust::owner(&directory, prefix, OsStr::new(STATE))?.is_some() {
        return Ok(());
    }
    // Through the open directory: by now something else may be mounted at its path.
    let inside = path_of(&directory);
    let remains = [inside.join(LOCK), inside.join(LOCK_REPLACING), aside(&inside.join(STATE))];
    let mut found: Vec<PathBuf> = entries(&directory, prefix)?.iter().map(DirEntry::path).collect();
    // Called for its error only: it refuses what a user has mounted there by FUSE.
    for path in &found {
        trust::owner(&directory, prefix, path.file_name().unwrap_or_default())?;
    }
    found.retain(|path| !remains.contains(path) && !statedir::is_kept(path));
    let Some(first) = found.first() else { return Ok(()) };
    let Some(instance_uid) = configured_for(root, prefix) else {
        return Err(Refusal::new(format!(
            "{} exists and does not belong to flux-distribute (it holds {}); move it away, or choose another \
             spec.prefix",
            dir.display(),
            first.file_name().unwrap_or_default().display()
        )));
    };
    if instance_uid != wanted {
        return Err(Refusal::new(format!(
            "{} belongs to the FluxInstance with uid {instance_uid} and its state.json is gone; move it away before \
             {wanted} can claim it",
            dir.display()
        )));
    }
    found.retain(|path| !is_ours(path));
    if found.is_empty() {
        tracing::warn!(prefix = %dir.display(), "state.json is gone, but everything in it is ours: claiming it again");
        return Ok(());
    }
    let mut names: Vec<_> = found.iter().map(|path| path.file_name().unwrap_or_default().to_string_lossy()).collect();
    names.sort();
    Err(Refusal::new(format!(
        "{} belongs to flux-distribute, but its state.json is gone and it holds other files: {}; move those away, and \
         the prefix is claimed again",
        dir.display(),
        names.join(", ")
    )))
}

/// Lists a prefix. If that fails, the claim does: an unreadable prefix must not pass for an empty one.
fn entries(directory: &OwnedFd, prefix: &Path) -> Result<Vec<DirEntry>, Refusal> {
    let found = fs::read_dir(path_of(directory)).and_then(Iterator::collect);
    found.map_err(|error| Refusal::new(format!("can't read directory {}: {error}", prefix.display())))
}

/// Requires that root owns everything in the prefix. What a removal kept is recognised by name and content and may
/// belong to the user of any broker, but if others can write to the prefix, they may have put it there.
fn check_owners(root: &Root, prefix: &Path) -> Result<(), Refusal> {
    let Some(directory) = trust::directory_to_close(root, prefix)? else { return Ok(()) };
    for entry in entries(&directory, prefix)? {
        let Some(uid) = trust::owner(&directory, prefix, &entry.file_name())? else { continue };
        if !trust::is_trusted(uid) {
            return Err(Refusal::new(format!(
                "users other than root can write to {prefix}, and it holds {name}, owned by uid {uid}; move that \
                 away, or run `chmod go-w {prefix}` if a removal kept it there",
                prefix = prefix.display(),
                name = entry.file_name().display()
            )));
        }
    }
    Ok(())
}

/// uid of the FluxInstance that a prefix without `state.json` was configured for; None if it is not ours.
fn configured_for(root: &Root, prefix: &Path) -> Option<String> {
    let etc = prefix.join("etc");
    let text = trust::read(&trust::directory(root, &etc).ok()??, &etc, "roster.json").ok()??;
    let roster: serde_json::Value = serde_json::from_slice(&text).ok()?;
    Some(roster.get("instanceUID")?.as_str()?.to_owned())
}

/// True if we write something by this name into a prefix.
fn is_ours(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let known = |name: &str| {
        DIRECTORIES.contains(&name)
            || [RUNDIR, STATEDIR, DUMPS, CURRENT, LOCK, LOCK_REPLACING, STATE, POINTER].contains(&name)
    };
    // A temporary file of a writer that was killed.
    let written = name.strip_prefix('.').and_then(|name| name.strip_suffix(".new"));
    known(&name) || written.is_some_and(known) || name.starts_with("state.")
}
