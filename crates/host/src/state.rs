//! `state.json`: whose this host is, and what we did here that must be undone.
//!
//! It is at `<prefix>/state.json`. The prefix is found again without anybody's help, also after a reboot and when the
//! FluxInstance is gone: it is one of the [`PREFIX_CANDIDATES`], or one of those directories holds a [`POINTER`] to it.
//! The pointer is written before the prefix is made and removed after it, so a claim or a removal that was cut short is
//! found too.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{OFlag, openat},
    sys::stat::Mode,
};

use super::{
    Root,
    files::{Owner, remove_if_there, sync_parent, write_atomic},
    lock::{HostLock, WAIT},
    machine, sysctl,
    trust::{self, Distrust},
};
use api::{PREFIX_CANDIDATES, RUN_DIR, check_prefix};
use hostapi::{ClaimOrder, HostState, Machine, Refusal, Undo};

/// Format of `state.json` that this version writes.
pub const FORMAT: u32 = 1;
/// Name below the prefix.
pub const STATE: &str = "state.json";
/// Name below the prefix of what holds the environments.
pub const ENVIRONMENTS: &str = "envs";
/// Name below a prefix candidate: a [`HostState`] whose `prefix` is elsewhere.
pub const POINTER: &str = "prefix.json";
/// The script for people at the host's root.
pub const CONNECT_AT_ROOT: &str = "/flux-connect.sh";

/// A claim without anything to undo yet.
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

/// What a prefix says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Nothing that is to be believed.
    None,
    /// This host is claimed there.
    Ours(HostState),
    /// Another machine's host is: nodes share the directory.
    AnotherMachine(Machine),
}

/// Whose this host is, wherever its prefix is. What another machine has left in a directory that nodes share is not this
/// host's.
///
/// # Errors
/// A file of ours can't be read, or it is in a place where others than root could have changed it.
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
        match look(root, &pointer.prefix)? {
            Claim::Ours(state) => return Ok(Some(state)),
            // What is to be removed of a claim or a removal that was cut short.
            Claim::None => {
                trust::directory(root, &pointer.prefix)?;
                return Ok(Some(pointer));
            }
            Claim::AnotherMachine(_) => {}
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

/// This host's state at one prefix.
///
/// # Errors
/// As for [`look`].
pub fn load(root: &Root, prefix: &Path) -> Result<Option<HostState>, Refusal> {
    match look(root, prefix)? {
        Claim::Ours(state) => Ok(Some(state)),
        Claim::None | Claim::AnotherMachine(_) => Ok(None),
    }
}

/// What is claimed at one prefix.
///
/// # Errors
/// `state.json` is there and can't be read, is of another prefix, or others than root could have changed it.
pub fn look(root: &Root, prefix: &Path) -> Result<Claim, Refusal> {
    let Some(state) = read(root, prefix, STATE)? else { return Ok(Claim::None) };
    if state.prefix != prefix {
        return Err(Refusal::new(format!(
            "{} lists what is to be undone below {}, which is another directory; correct it by hand, or move it away",
            prefix.join(STATE).display(),
            state.prefix.display()
        )));
    }
    Ok(match &state.machine {
        Some(machine) if !is_of_this_machine(root, &state) => Claim::AnotherMachine(machine.clone()),
        _ => Claim::Ours(state),
    })
}

/// Versions before this one did not write which machine it was.
fn is_of_this_machine(root: &Root, state: &HostState) -> bool {
    let machines = state.machine.as_ref().zip(machine::here(root));
    machines.is_none_or(|(written, here)| written.may_be(&here))
}

/// The file `name` in `dir`. In a place where others than root can write, one that they may have put there is no file of ours:
/// it is not believed, and it is in nobody's way.
fn read(root: &Root, dir: &Path, name: &str) -> Result<Option<HostState>, Refusal> {
    let path = dir.join(name);
    let directory = match trust::directory(root, dir) {
        Ok(Some(directory)) => directory,
        Ok(None) => return Ok(None),
        // On the way is no directory: then there is no file.
        Err(Distrust::Kind { .. }) => return Ok(None),
        // What can't be looked at has not gone.
        Err(distrust @ Distrust::Io { .. }) => return Err(distrust.into()),
        Err(distrust) if is_roots_own(root, dir, name) => return Err(distrust.into()),
        Err(distrust) => {
            tracing::debug!(path = %path.display(), %distrust, "not believed");
            return Ok(None);
        }
    };
    trust::read(&directory, dir, name)?.map(|text| parse(&path, &text)).transpose()
}

/// True if root wrote the file for this very place, as a version before this one may have done. A user's link on the way may lead
/// to what root wrote for another place, and so may a hard link, which a user can make where `fs.protected_hardlinks` is 0.
fn is_roots_own(root: &Root, dir: &Path, name: &str) -> bool {
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let Some(directory) = trust::by_roots_links(root, dir) else { return false };
    let Ok(file) = openat(&directory, name, flags, Mode::empty()).map(fs::File::from) else { return false };
    let is_roots = file.metadata().is_ok_and(|found| found.is_file() && found.uid() == 0 && found.nlink() == 1);
    let state = is_roots.then(|| serde_json::from_reader::<_, HostState>(file).ok()).flatten();
    state.is_some_and(|state| name == POINTER || state.prefix == dir)
}

fn parse(path: &Path, text: &[u8]) -> Result<HostState, Refusal> {
    let state: HostState = serde_json::from_slice(text).map_err(|error| {
        Refusal::new(format!(
            "{} lists what is to be undone on this host and can't be understood: {error}; correct it by hand, or move it away",
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
    Ok(state)
}

/// Whether `undo` is one of those that are written for `prefix`. Another one is not carried out, whoever has written it: root
/// would remove or change what is not ours.
pub fn is_ever_written(undo: &Undo, prefix: &Path) -> bool {
    let is_above = |above: &Path, path: &Path| check_prefix(path).is_ok() && path != above && path.starts_with(above);
    match undo {
        Undo::Sysctl { name, .. } => sysctl::RAISED.iter().any(|(raised, _)| raised == name),
        // Only a link into our environments is taken off there, and only empty directories.
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
/// None of the places can be written, or can be trusted.
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
            "none of {} can be written, so this host could not be cleaned after a reboot",
            PREFIX_CANDIDATES.join(", ")
        ))
    }))
}

/// False where it can't be: the directory above is missing, or nodes share the place and it is another machine's.
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

/// Removes this host's pointers, and directories that were made for them alone.
///
/// # Errors
/// What the system says.
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
