use std::{fs, io, path::Path};

use super::{claim, launch::BrokerView, links};
use api::{PREFIX_CANDIDATES, RUN_DIR};
use host::{
    Root,
    files::{aside, host_path, refuse_mounts, remove_all_if_there, remove_if_there},
    lock::{HostLock, LOCK},
    machine,
    state::{self, STATE},
    statedir, sysctl, trust,
};
use hostapi::{HostState, Refusal, RemoveOrder, StopOrder, Undo};

/// Seconds a broker gets that still runs when its host is cleaned: the agent has stopped it in peace before.
const LAST_GRACE: u64 = 30;

/// What removing needs of the broker's side.
pub trait Brokers {
    /// See [`super::launch`].
    fn observe(&self, prefix: Option<&Path>) -> BrokerView;
    /// Stops the broker and waits until it is gone.
    ///
    /// # Errors
    /// Where it does not go.
    fn stop(&self, order: &StopOrder) -> Result<(), Refusal>;
    /// Takes off units and cgroups.
    ///
    /// # Errors
    /// Where they can't be removed.
    fn forget(&self) -> Result<(), Refusal>;
}

/// Takes off everything that we did to this host. `state.json` goes last, and after it only what names the prefix, so a
/// removal that was cut short is finished by the next one.
///
/// # Errors
/// A broker that nobody knows runs, something of somebody else's is mounted in what is ours, or the prefix has become another
/// directory than the claimed one: nothing was removed. Or the first thing that could not be undone; then `state.json` is still
/// there.
pub fn remove(root: &Root, brokers: &dyn Brokers, order: &RemoveOrder) -> Result<(), Refusal> {
    let seen = state::find(root)?;
    let _lock = HostLock::take_if_there(root, seen.as_ref())?;
    // Again: while we waited, another stage may have removed it, and another machine that shares the directory claimed it.
    let state = state::find(root)?;
    let prefix = state.as_ref().map(|state| state.prefix.as_path());
    if prefix.is_some() && prefix != seen.as_ref().map(|seen| seen.prefix.as_path()) {
        return Err(Refusal::transient("this host was claimed at another place just now"));
    }
    let view = brokers.observe(prefix);
    if let Some(unknown) = view.unknown {
        return Err(Refusal::transient(unknown.to_string()));
    }
    if let Some(state) = &state {
        // Only a pointer tells of a prefix without a state.json, and by now a disk may be mounted over what it was.
        claim::check_content(root, &state.prefix, &state.instance_uid).map_err(|refusal| {
            Refusal::new(format!("nothing was removed: {}; the removal goes on once that is done", refusal.message))
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
    refuse_mounts(&run_dir, |_| false).map_err(|error| Refusal::io("remove", &run_dir, &error))?;
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

/// Versions before this one took prefixes that nodes share, and did not write which machine has one.
fn refuse_shared(state: &HostState, file_system: Option<&str>) -> Result<(), Refusal> {
    let (Some(kind), None) = (file_system, &state.machine) else { return Ok(()) };
    Err(Refusal::new(format!(
        "{} is on {kind}, and other nodes may use what is there: remove it by hand once no node does",
        state.prefix.display()
    )))
}

/// The prefix may have a disk of its own, and so may a statedir that is kept.
fn refuse_mounts_in_prefix(prefix: &Path, keep_state: bool) -> Result<(), Refusal> {
    let Ok(prefix) = prefix.canonicalize() else { return Ok(()) };
    let is_spared = |point: &Path| {
        let child = point.strip_prefix(&prefix).ok().and_then(|below| below.components().next());
        child.is_none_or(|child| keep_state && statedir::is_kept(&prefix.join(child)))
    };
    refuse_mounts(&prefix, is_spared).map_err(|error| Refusal::io("remove", &prefix, &error))
}

/// Goes on after a failure, so that one thing that is stuck does not keep the others.
fn undo_all(root: &Root, state: &HostState) -> Result<(), Refusal> {
    let mut first = Ok(());
    let (ours, others): (Vec<_>, Vec<_>) =
        state.undo.iter().rev().partition(|undo| state::is_ever_written(undo, &state.prefix));
    if !others.is_empty() {
        tracing::warn!(?others, "state.json lists changes that flux-distribute never makes; they are not undone");
    }
    for undo in ours {
        let undone = match undo {
            Undo::Sysctl { name, old, new } => sysctl::put_back(root, name, *old, *new),
            Undo::Symlink { path, made_parent } => links::unlink(root, &state.prefix, path, made_parent.as_deref()),
            Undo::File { path } => remove_file(root, path),
            // Nothing is in it only after the prefix is gone.
            Undo::Directory { .. } => Ok(()),
        };
        if let Err(refusal) = undone {
            tracing::warn!(%refusal, "not undone");
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
    for path in last.iter().rev() {
        remove_all(path)?;
    }
    // Kept statedirs hold the prefix, and what others have put beside it holds the directories above.
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

/// A claim that was cut short before `state.json` left a directory that is empty but for these.
fn remove_unfinished_claims(root: &Root) {
    for candidate in PREFIX_CANDIDATES {
        // Not by a link, or in a place, of somebody else's.
        let Ok(Some(opened)) = trust::directory(root, Path::new(candidate)) else { continue };
        let dir = host_path(&opened);
        let early = [dir.join(LOCK), aside(&dir.join(STATE))];
        let only_early =
            fs::read_dir(&dir).is_ok_and(|entries| entries.flatten().all(|entry| early.contains(&entry.path())));
        if only_early {
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
    fn a_shared_prefix_of_which_nobody_knows_whose_it_is_stays() {
        let known = Some(Machine { name: "n1".into(), ..Machine::default() });
        for (machine, kind, is_refused) in
            [(None, Some("NFS"), true), (None, None, false), (known.clone(), Some("NFS"), false), (known, None, false)]
        {
            let state = HostState { machine, ..HostState::default() };
            assert_eq!(refuse_shared(&state, kind).is_err(), is_refused, "{kind:?}");
        }
    }
}
