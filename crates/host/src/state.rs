//! `state.json`: which FluxInstance has claimed this host, and what must be undone here.
//!
//! It is at `<prefix>/state.json`. The prefix can be found without any input, even after a reboot and when the
//! FluxInstance is gone: it is one of the [`PREFIX_CANDIDATES`], or one of those directories holds a [`POINTER`] to it.
//! The pointer is written before the prefix is made and removed after it, so that an interrupted claim or removal is
//! found too.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    Root,
    distrust::Distrust,
    files::{Owner, remove_if_there, sync_parent, write_atomic},
    lock::{HostLock, WAIT},
    machine, trust,
};
use api::{PREFIX_CANDIDATES, RUN_DIR, check_prefix};
use hostapi::{ClaimOrder, HostState, Machine, Refusal, Undo};

/// The sysctls that we raise, with their least values. They are limits per user for the whole host: job shells open
/// inotify instances, and so do the kubelet and containerd, and the kernel's default of 128 is soon used up.
pub const RAISED: [(&str, u64); 2] =
    [("fs.inotify.max_user_instances", 8192), ("fs.inotify.max_user_watches", 524_288)];

/// The format of `state.json` that this version writes.
pub const FORMAT: u32 = 1;
/// Name of the file below the prefix.
pub const STATE: &str = "state.json";
/// Name of the directory of environments below the prefix.
pub const ENVIRONMENTS: &str = "envs";
/// Name of the file below a prefix candidate that holds a [`HostState`] whose `prefix` is elsewhere.
pub const POINTER: &str = "prefix.json";
/// The script for people at the host's root.
pub const CONNECT_AT_ROOT: &str = "/flux-connect.sh";

/// A new claim, with nothing to undo yet.
pub fn fresh(root: &Root, order: &ClaimOrder) -> HostState {
    HostState {
        format: FORMAT,
        instance_uid: order.instance_uid.clone(),
        prefix: order.prefix.clone(),
        undo: Vec::new(),
        uninstall: order.uninstall.clone(),
        machine: machine::here(root),
    }
}

/// Who has claimed a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimedBy {
    /// There is no claim, or only one that can't be trusted.
    Nobody,
    /// This host has.
    ThisMachine(HostState),
    /// Another machine has: nodes share the directory.
    AnotherMachine(Machine),
}

/// Finds this host's claim, wherever its prefix is. Skips what another machine left in a directory that nodes share.
///
/// # Errors
/// If a file of ours can't be read, or is in a place where users other than root could have changed it.
pub fn find(root: &Root) -> Result<Option<HostState>, Refusal> {
    for candidate in PREFIX_CANDIDATES {
        if let Some(state) = load(root, Path::new(candidate))? {
            return Ok(Some(state));
        }
    }
    for dir in pointer_places().map(Path::new) {
        let Some(pointer) = read(root, dir, POINTER)?.filter(|pointer| is_of_this_machine(root, pointer)) else {
            continue;
        };
        check_prefix(&pointer.prefix).map_err(|reason| {
            Refusal::new(format!("{}: {reason}; correct it by hand, or move it away", dir.join(POINTER).display()))
        })?;
        match claimed_by(root, &pointer.prefix)? {
            ClaimedBy::ThisMachine(state) => return Ok(Some(state)),
            // An interrupted claim or removal: the pointer says what to clean.
            ClaimedBy::Nobody => {
                trust::directory(root, &pointer.prefix)?;
                return Ok(Some(pointer));
            }
            ClaimedBy::AnotherMachine(_) => {}
        }
    }
    Ok(None)
}

/// Takes the host's lock and loads the state of the prefix that an order names.
///
/// # Errors
/// If this host is not claimed there (claim it first), or the lock can't be taken.
pub fn lock_claimed(root: &Root, prefix: &Path) -> Result<(HostLock, HostState), Refusal> {
    load_claimed(root, prefix)?;
    let lock = HostLock::take(root, prefix, WAIT)?;
    // Loaded again: a removal may have held the lock.
    Ok((lock, load_claimed(root, prefix)?))
}

fn load_claimed(root: &Root, prefix: &Path) -> Result<HostState, Refusal> {
    load(root, prefix)?.ok_or_else(|| {
        Refusal::transient(format!("{} is not claimed: it has no state.json; run `claim` first", prefix.display()))
    })
}

/// The state at one prefix, if it is this host's.
///
/// # Errors
/// As for [`claimed_by`].
pub fn load(root: &Root, prefix: &Path) -> Result<Option<HostState>, Refusal> {
    match claimed_by(root, prefix)? {
        ClaimedBy::ThisMachine(state) => Ok(Some(state)),
        ClaimedBy::Nobody | ClaimedBy::AnotherMachine(_) => Ok(None),
    }
}

/// The claim at one prefix.
///
/// # Errors
/// If `state.json` can't be read, is for another prefix, or users other than root could have changed it.
pub fn claimed_by(root: &Root, prefix: &Path) -> Result<ClaimedBy, Refusal> {
    let Some(state) = read(root, prefix, STATE)? else { return Ok(ClaimedBy::Nobody) };
    if state.prefix != prefix {
        return Err(Refusal::new(format!(
            "{} lists what to undo below {}, which is another directory; correct it by hand, or move it away",
            prefix.join(STATE).display(),
            state.prefix.display()
        )));
    }
    Ok(match &state.machine {
        Some(machine) if !is_of_this_machine(root, &state) => ClaimedBy::AnotherMachine(machine.clone()),
        _ => ClaimedBy::ThisMachine(state),
    })
}

/// Older versions did not record the machine: a state without it counts as this machine's.
fn is_of_this_machine(root: &Root, state: &HostState) -> bool {
    let machines = state.machine.as_ref().zip(machine::here(root));
    machines.is_none_or(|(written, here)| written.may_be(&here))
}

/// Reads the file `name` in `dir`. If users other than root can write there, a file that root did not write for this
/// place is ignored: it can't be trusted, and it must not block a claim either.
fn read(root: &Root, dir: &Path, name: &str) -> Result<Option<HostState>, Refusal> {
    let path = dir.join(name);
    let directory = match trust::directory(root, dir) {
        Ok(Some(directory)) => directory,
        Ok(None) => return Ok(None),
        // Something on the way is no directory, so the file can't exist.
        Err(Distrust::Kind { .. }) => return Ok(None),
        // A directory that can't be examined may still be there.
        Err(distrust @ Distrust::Io { .. }) => return Err(distrust.into()),
        Err(distrust) if is_roots_own(root, dir, name) => return Err(distrust.into()),
        Err(distrust) => {
            tracing::debug!(path = %path.display(), %distrust, "ignoring a file that other users may have written");
            return Ok(None);
        }
    };
    trust::read(&directory, dir, name)?.map(|text| parse(&path, &text)).transpose()
}

/// True if root wrote the file for this place, as an older version may have done. A link that another user made may
/// lead to a file that root wrote for another place.
fn is_roots_own(root: &Root, dir: &Path, name: &str) -> bool {
    let text = trust::by_roots_links(root, dir).and_then(|directory| trust::read_roots_own(&directory, name));
    let state = text.and_then(|text| serde_json::from_slice::<HostState>(&text).ok());
    state.is_some_and(|state| name == POINTER || state.prefix == dir)
}

fn parse(path: &Path, text: &[u8]) -> Result<HostState, Refusal> {
    let state: HostState = serde_json::from_slice(text).map_err(|error| {
        Refusal::new(format!(
            "{} lists what to undo on this host and can't be parsed: {error}; correct it by hand, or move it away",
            path.display()
        ))
    })?;
    if state.format > FORMAT {
        return Err(Refusal::new(format!(
            "{} has format {}, and this version knows only {FORMAT}: use the newer flux-distribute that wrote it",
            path.display(),
            state.format
        )));
    }
    Ok(state)
}

/// True if this program writes such an entry for `prefix`. Any other entry, whoever wrote it, is not carried out: root
/// would remove or change what is not ours.
pub fn is_ever_written(undo: &Undo, prefix: &Path) -> bool {
    let is_above = |above: &Path, path: &Path| check_prefix(path).is_ok() && path != above && path.starts_with(above);
    match undo {
        Undo::Sysctl { name, .. } => RAISED.iter().any(|(raised, _)| raised == name),
        // Any absolute path is fine: we only remove a link into our environments, and empty directories.
        Undo::Symlink { path, made_parent } => {
            path.is_absolute() && made_parent.as_ref().is_none_or(|parent| is_above(parent, path))
        }
        Undo::File { path } => path == Path::new(CONNECT_AT_ROOT),
        Undo::Directory { path } => is_above(path, prefix),
    }
}

/// Writes `<prefix>/state.json`.
///
/// # Errors
/// If it can't be written.
pub fn save(root: &Root, state: &HostState) -> Result<(), Refusal> {
    write_json(&root.path(&state.prefix).join(STATE), state)
}

fn write_json(path: &Path, state: &HostState) -> Result<(), Refusal> {
    let mut text = serde_json::to_vec_pretty(state).map_err(|error| Refusal::new(error.to_string()))?;
    text.push(b'\n');
    write_atomic(path, &text, 0o644, Owner::ROOT)
}

/// Adds `undo` to the undo list, durably. Call it before the change itself.
///
/// # Errors
/// If `state.json` can't be written.
pub fn record(root: &Root, state: &mut HostState, undo: Undo) -> Result<(), Refusal> {
    if state.undo.iter().any(|known| same_thing(known, &undo)) {
        return Ok(());
    }
    state.undo.push(undo);
    save(root, state)
}

/// Only the first record of a link knows which parents were missing before, so a later one for the same path adds
/// nothing.
fn same_thing(a: &Undo, b: &Undo) -> bool {
    match (a, b) {
        (Undo::Symlink { path: a, .. }, Undo::Symlink { path: b, .. }) => a == b,
        (a, b) => a == b,
    }
}

fn pointer_places() -> impl Iterator<Item = &'static str> {
    PREFIX_CANDIDATES.into_iter().chain([RUN_DIR])
}

/// Writes a pointer to a prefix that is not one of the candidates.
///
/// # Errors
/// If none of the places can be written, or trusted.
pub fn write_pointer(root: &Root, state: &HostState) -> Result<(), Refusal> {
    if is_candidate(&state.prefix) {
        return Ok(());
    }
    let directories = state.undo.iter().filter(|undo| matches!(undo, Undo::Directory { .. })).cloned().collect();
    let pointer = HostState { undo: directories, ..state.clone() };
    let mut refusal = None;
    for place in pointer_places().map(Path::new) {
        match write_pointer_at(root, place, &pointer) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.unwrap_or_else(|| {
        Refusal::new(format!(
            "can't write to any of {}, so this host could not be cleaned after a reboot; make one of them writable",
            PREFIX_CANDIDATES.join(", ")
        ))
    }))
}

/// Returns false if it can't be written here: the directory above is missing, or the place holds another machine's
/// pointer.
fn write_pointer_at(root: &Root, place: &Path, pointer: &HostState) -> Result<bool, Refusal> {
    let above = place.parent().unwrap_or(place);
    if trust::directory(root, above)?.is_none() {
        return Ok(false);
    }
    trust::make_closed_directory(root, place, 0o755)?;
    if read(root, place, POINTER)?.is_some_and(|there| !is_of_this_machine(root, &there)) {
        return Ok(false);
    }
    write_json(&root.path(place).join(POINTER), pointer).map(|()| true)
}

/// Removes this host's pointers, and the directories that were made only for them.
///
/// # Errors
/// If a pointer can't be removed.
pub fn remove_pointer(root: &Root) -> Result<(), Refusal> {
    for place in pointer_places() {
        let dir = root.path(place);
        let path = dir.join(POINTER);
        let is_ours = read(root, Path::new(place), POINTER)
            .is_ok_and(|pointer| pointer.is_some_and(|pointer| is_of_this_machine(root, &pointer)));
        if is_ours {
            remove_if_there(&path)
                .and_then(|()| sync_parent(&path))
                .map_err(|error| Refusal::io("remove", &path, &error))?;
            // Fails if the directory holds more than the pointer; then it stays.
            let _ = fs::remove_dir(&dir);
        }
    }
    Ok(())
}

/// True for a prefix that can be found without a pointer.
pub fn is_candidate(prefix: &Path) -> bool {
    PREFIX_CANDIDATES.iter().any(|candidate| Path::new(candidate) == prefix)
}

/// `<prefix>/envs/<digest>`.
pub fn environment(prefix: &Path, digest: &str) -> PathBuf {
    prefix.join(ENVIRONMENTS).join(digest)
}
