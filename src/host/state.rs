//! `state.json`: whose this host is, and what we did here that must be undone.
//!
//! It is at `<prefix>/state.json`. The prefix is found again without anybody's help, also after a reboot and when the
//! FluxInstance is gone: it is one of the [`PREFIX_CANDIDATES`], or one of those directories holds a [`POINTER`] to it.
//! The pointer is written before the prefix is made and removed after it, so a claim or a removal that was cut short is
//! found too.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{
    ClaimOrder, HostState, Refusal, Root, Undo,
    files::{Owner, remove_if_there, sync_parent, write_atomic},
    lock::{HostLock, WAIT},
};
use crate::api::{PREFIX_CANDIDATES, RUN_DIR};

/// Format of `state.json` that this version writes.
pub const FORMAT: u32 = 1;
/// Name below the prefix.
pub const STATE: &str = "state.json";
/// Name below the prefix of what holds the environments.
pub const ENVIRONMENTS: &str = "envs";
/// Name below a prefix candidate: a [`HostState`] whose `prefix` is elsewhere.
pub const POINTER: &str = "prefix.json";

/// A claim without anything to undo yet.
pub fn fresh(order: &ClaimOrder) -> HostState {
    HostState {
        format: FORMAT,
        instance_uid: order.instance_uid.clone(),
        prefix: order.prefix.clone(),
        undo: Vec::new(),
        uninstall: order.uninstall.clone(),
    }
}

/// Whose this host is, wherever its prefix is.
///
/// # Errors
/// Where a file of ours can't be read.
pub fn find(root: &Root) -> Result<Option<HostState>, Refusal> {
    for candidate in PREFIX_CANDIDATES {
        if let Some(state) = load(root, Path::new(candidate))? {
            return Ok(Some(state));
        }
    }
    for dir in pointer_places() {
        if let Some(pointer) = read(&root.path(dir).join(POINTER))? {
            return Ok(Some(load(root, &pointer.prefix)?.unwrap_or(pointer)));
        }
    }
    Ok(None)
}

/// The state at a prefix that an order names, and the right to write below it.
///
/// # Errors
/// This host is not claimed there: the rung claim comes first.
pub fn lock_claimed(root: &Root, prefix: &Path) -> Result<(HostLock, HostState), Refusal> {
    claimed(root, prefix)?;
    let lock = HostLock::take(root, prefix, WAIT)?;
    // Again: a removal may have had the lock.
    Ok((lock, claimed(root, prefix)?))
}

fn claimed(root: &Root, prefix: &Path) -> Result<HostState, Refusal> {
    load(root, prefix)?
        .ok_or_else(|| Refusal::transient(format!("{} is not claimed: state.json is not there", prefix.display())))
}

/// The state at one prefix.
///
/// # Errors
/// Where it is there and can't be read.
pub fn load(root: &Root, prefix: &Path) -> Result<Option<HostState>, Refusal> {
    read(&root.path(prefix).join(STATE))
}

fn read(path: &Path) -> Result<Option<HostState>, Refusal> {
    let text = match fs::read(path) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        other => other.map_err(|error| Refusal::io("read", path, &error))?,
    };
    let state: HostState = serde_json::from_slice(&text).map_err(|error| {
        Refusal::new(format!(
            "{} lists what is to be undone on this host and can't be understood: {error}; mend it by hand",
            path.display()
        ))
    })?;
    if state.format > FORMAT {
        return Err(Refusal::new(format!(
            "{} has format {}, this version knows {FORMAT}: use the newer flux-distribute that wrote it",
            path.display(),
            state.format
        )));
    }
    Ok(Some(state))
}

/// Writes `<prefix>/state.json`.
///
/// # Errors
/// Where it can't be written.
pub fn save(root: &Root, state: &HostState) -> Result<(), Refusal> {
    write_json(&root.path(&state.prefix).join(STATE), state)
}

fn write_json(path: &Path, state: &HostState) -> Result<(), Refusal> {
    let mut text = serde_json::to_vec_pretty(state).map_err(|error| Refusal::new(error.to_string()))?;
    text.push(b'\n');
    write_atomic(path, &text, 0o644, Owner::ROOT)
}

/// Remembers `undo` durably: to be called before the thing itself is done.
///
/// # Errors
/// Where it can't be written.
pub fn record(root: &Root, state: &mut HostState, undo: Undo) -> Result<(), Refusal> {
    if state.undo.iter().any(|known| same_thing(known, &undo)) {
        return Ok(());
    }
    state.undo.push(undo);
    save(root, state)
}

/// The first record of a link or file knows what was there before us, so a later one adds nothing.
fn same_thing(a: &Undo, b: &Undo) -> bool {
    match (a, b) {
        (Undo::Symlink { path: a, .. }, Undo::Symlink { path: b, .. }) => a == b,
        (a, b) => a == b,
    }
}

fn pointer_places() -> impl Iterator<Item = &'static str> {
    PREFIX_CANDIDATES.into_iter().chain([RUN_DIR])
}

/// Remembers where a prefix is that is none of the candidates.
///
/// # Errors
/// Where none of them can be written.
pub fn write_pointer(root: &Root, state: &HostState) -> Result<(), Refusal> {
    if is_candidate(&state.prefix) {
        return Ok(());
    }
    let directories = state.undo.iter().filter(|undo| matches!(undo, Undo::Directory { .. })).cloned().collect();
    let pointer = HostState { undo: directories, ..state.clone() };
    let mut refusal = None;
    for place in pointer_places() {
        let dir = root.path(place);
        if fs::create_dir(&dir).is_err_and(|error| error.kind() != io::ErrorKind::AlreadyExists) {
            continue;
        }
        match write_json(&dir.join(POINTER), &pointer) {
            Ok(()) => return Ok(()),
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.unwrap_or_else(|| {
        Refusal::new(format!(
            "none of {} can be written, so this host could not be cleaned after a reboot",
            PREFIX_CANDIDATES.join(", ")
        ))
    }))
}

/// Removes pointers, and directories that were made for them alone.
///
/// # Errors
/// What the system says.
pub fn remove_pointer(root: &Root) -> Result<(), Refusal> {
    for place in pointer_places() {
        let dir = root.path(place);
        let path = dir.join(POINTER);
        if fs::symlink_metadata(&path).is_ok() {
            remove_if_there(&path)
                .and_then(|()| sync_parent(&path))
                .map_err(|error| Refusal::io("remove", &path, &error))?;
            // Not empty: it holds more than the pointer, and is not ours.
            let _ = fs::remove_dir(&dir);
        }
    }
    Ok(())
}

/// True for a prefix that is found without a pointer.
pub fn is_candidate(prefix: &Path) -> bool {
    PREFIX_CANDIDATES.iter().any(|candidate| Path::new(candidate) == prefix)
}

/// `<prefix>/envs/<digest>`.
pub fn environment(prefix: &Path, digest: &str) -> PathBuf {
    prefix.join(ENVIRONMENTS).join(digest)
}
