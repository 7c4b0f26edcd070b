use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{claim, launch::BrokerView, links};
use api::{PREFIX_CANDIDATES, RUN_DIR};
use host::{
    Root,
    files::{aside, remove_if_there},
    lock::{self, HostLock, LOCK, LOCK_REPLACING},
    machine,
    mountinfo::Mount,
    opening::path_of,
    removal::{refuse_mounts, remove_all_if_there},
    state::{self, STATE},
    statedir, sysctl, trust,
};
use hostapi::{HostState, Refusal, RemoveOrder, StopOrder, Undo};

/// SIGTERM to SIGKILL, in seconds, for a broker that still runs at removal. The agent has already tried to stop it
/// gracefully.
const LAST_GRACE: u64 = 30;

/// What a removal needs of the launch side; tests replace it.
pub trait Brokers {
    /// See [`super::launch::observe`].
    fn observe(&self, prefix: Option<&Path>) -> BrokerView;
    /// Stops the broker and waits for its end.
    ///
    /// # Errors
    /// If it does not end.
    fn stop(&self, order: &StopOrder) -> Result<(), Refusal>;
    /// Removes our units and cgroups.
    ///
    /// # Errors
    /// If they can't be removed.
    fn forget(&self) -> Result<(), Refusal>;
}

/// Undoes everything that we did to this host. `state.json` goes almost last, and after it only its lock and the pointer to
/// the prefix, so that the next run resumes an interrupted removal.
///
/// # Errors
/// If an unknown broker runs, something is mounted inside our directories, or the prefix now is another directory than
/// the one that was claimed: then nothing was removed. Else the first thing that could not be undone: then `state.json`
/// is still there.
pub fn remove(root: &Root, brokers: &dyn Brokers, order: &RemoveOrder) -> Result<(), Refusal> {
    let seen = state::find(root)?;
    let _lock = HostLock::take_if_there(root, seen.as_ref())?;
    // Looked up again: while we waited, another stage may have removed the claim, or another machine may have claimed
    // the shared directory.
    let state = state::find(root)?;
    let prefix = state.as_ref().map(|state| state.prefix.as_path());
    if prefix.is_some() && prefix != seen.as_ref().map(|seen| seen.prefix.as_path()) {
        return Err(Refusal::transient("this host was claimed at another prefix in the meantime"));
    }
    let view = brokers.observe(prefix);
    if let Some(unknown) = view.unknown {
        return Err(Refusal::transient(unknown.to_string()));
    }
    if let Some(state) = &state {
        // A prefix without a state.json is known from a pointer only, and by now another disk may be mounted there.
        claim::check_content(root, &state.prefix, &state.instance_uid).map_err(|refusal| {
            Refusal::new(format!("nothing was removed: {}; the removal continues once that is done", refusal.message))
        })?;
    }
    if view.running.is_some() {
        brokers.stop(&StopOrder { grace_secs: LAST_GRACE })?;
    }
    if let Some(state) = &state {
        let prefix = root.path(&state.prefix);
        refuse_shared(state, machine::shared_by_nodes(&prefix))?;
        refuse_mounts_in_prefix(&prefix, order.keep_state)?;
    }
    let run_dir = root.path(RUN_DIR);
    refuse_mounts(&run_dir, trust::is_by_user).map_err(|error| Refusal::io("remove", &run_dir, &error))?;
    if let Some(state) = &state {
        undo_all(root, state)?;
    }
    links::remove_unremembered(root, prefix)?;
    brokers.forget()?;
    if let Some(state) = &state {
        remove_prefix(root, state, order.keep_state)?;
    }
    state::remove_pointer(root)?;
    remove_all(&root.path(RUN_DIR))?;
    remove_unfinished_claims(root);
    Ok(())
}

/// Older versions accepted prefixes on file systems that nodes share, and did not record the machine that claimed one.
fn refuse_shared(state: &HostState, file_system: Option<&str>) -> Result<(), Refusal> {
    let (Some(kind), None) = (file_system, &state.machine) else { return Ok(()) };
    Err(Refusal::new(format!(
        "{} is on {kind}, and other nodes may use its files: remove it by hand once none does",
        state.prefix.display()
    )))
}

/// Refuses if anything is mounted inside the prefix, except in a statedir that is kept. The prefix itself may be a mount
/// point. A user's FUSE mount is removed together with the directory that it is in. Such a mount over a statedir that is to be kept is refused: what it
/// hides is unknown.
fn refuse_mounts_in_prefix(prefix: &Path, keep_state: bool) -> Result<(), Refusal> {
    let Ok(prefix) = prefix.canonicalize() else { return Ok(()) };
    let is_spared = |mount: &Mount| {
        let below = mount.point.strip_prefix(&prefix).ok().and_then(|below| below.components().next());
        let Some(child) = below.map(|name| prefix.join(name)) else { return true };
        let hides_it = trust::is_by_user(mount) && child == mount.point;
        if keep_state && statedir::is_kept(&child) { !hides_it } else { trust::is_by_user(mount) }
    };
    refuse_mounts(&prefix, is_spared).map_err(|error| Refusal::io("remove", &prefix, &error))
}

/// Continues after a failure, so that one thing that can't be undone does not keep the rest in place.
fn undo_all(root: &Root, state: &HostState) -> Result<(), Refusal> {
    let mut first = Ok(());
    let (ours, others): (Vec<_>, Vec<_>) =
        state.undo.iter().rev().partition(|undo| state::is_ever_written(undo, &state.prefix));
    if !others.is_empty() {
        tracing::warn!(?others, "state.json lists changes that flux-distribute never makes; leaving them as they are");
    }
    for undo in ours {
        let undone = match undo {
            Undo::Sysctl { name, old, new } => sysctl::put_back(root, name, *old, *new),
            Undo::Symlink { path, made_parent } => links::unlink(root, &state.prefix, path, made_parent.as_deref()),
            Undo::File { path } => remove_file(root, path),
            // Can be empty only after the prefix is gone; `remove_prefix` removes it.
            Undo::Directory { .. } => Ok(()),
        };
        if let Err(refusal) = undone {
            tracing::warn!(%refusal, "can't undo a change to this host");
            first = first.and(Err(refusal));
        }
    }
    first
}

fn remove_file(root: &Root, path: &Path) -> Result<(), Refusal> {
    let path = root.path(path);
    remove_if_there(&aside(&path))
        .and_then(|()| remove_if_there(&path))
        .map_err(|error| Refusal::io("remove", &path, &error))
}

fn remove_prefix(root: &Root, state: &HostState, keep_state: bool) -> Result<(), Refusal> {
    let prefix = root.path(&state.prefix);
    // In this order: another stage takes a lock whose file is gone, and must find no claim then.
    let last = [prefix.join(STATE), prefix.join(LOCK)];
    let entries = match fs::read_dir(&prefix) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(Refusal::io("read", &prefix, &error)),
    };
    for path in entries {
        if !(last.contains(&path) || (keep_state && statedir::is_kept(&path))) {
            remove_all(&path)?;
        }
    }
    for path in &last {
        remove_all(path)?;
    }
    // Fails if kept statedirs are in the prefix; directories above it stay if they hold other users' files.
    let _ = fs::remove_dir(&prefix);
    for undo in state.undo.iter().rev().filter(|undo| state::is_ever_written(undo, &state.prefix)) {
        if let Undo::Directory { path } = undo {
            let _ = fs::remove_dir(root.path(path));
        }
    }
    Ok(())
}

fn remove_all(path: &Path) -> Result<(), Refusal> {
    remove_all_if_there(path).map_err(|error| Refusal::io("remove", path, &error))
}

/// A claim that was interrupted before it wrote `state.json` left a directory with at most these files, and so did a removal
/// that was interrupted after it, beside statedirs that it kept. Under its lock, because a claim may begin meanwhile.
fn remove_unfinished_claims(root: &Root) {
    for candidate in PREFIX_CANDIDATES {
        // Not through another user's link, and not where other users can write.
        let Ok(Some(opened)) = trust::directory(root, Path::new(candidate)) else { continue };
        let dir = path_of(&opened);
        let early = [aside(&dir.join(STATE)), dir.join(LOCK_REPLACING), dir.join(LOCK)];
        let is_early = |path: PathBuf| early.contains(&path) || statedir::is_kept(&path);
        let only_early =
            || fs::read_dir(&dir).is_ok_and(|entries| entries.flatten().all(|entry| is_early(entry.path())));
        if only_early()
            && let Ok(_lock) = lock::take(&dir.join(LOCK), Duration::ZERO)
            && only_early()
        {
            early.iter().for_each(|path| drop(remove_if_there(path)));
            let _ = fs::remove_dir(root.path(candidate));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hostapi::Machine;

    #[test]
    fn a_shared_prefix_that_no_machine_is_recorded_for_is_not_removed() {
        let known = Some(Machine { name: "n1".into(), ..Machine::default() });
        for (machine, kind, is_refused) in
            [(None, Some("NFS"), true), (None, None, false), (known.clone(), Some("NFS"), false), (known, None, false)]
        {
            let state = HostState { machine, ..HostState::default() };
            assert_eq!(refuse_shared(&state, kind).is_err(), is_refused, "{kind:?}");
        }
    }
}
