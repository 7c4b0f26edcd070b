use std::{
    fs,
    path::{Component, Path},
};

use super::{
    ClaimOrder, HostState, Refusal, Root, Undo,
    files::{Owner, aside, make_dir, missing_parents},
    lock::{HostLock, LOCK, WAIT},
    state::{self, STATE},
    statedir,
};

/// Directories below the prefix; `state` is made by [`super::configure`], on the lead alone.
const DIRECTORIES: [&str; 5] = ["envs", "pkgs", "etc", "log", "bin"];

/// Makes the prefix and `state.json` in it.
///
/// # Errors
/// Where the prefix holds what is not ours, or the host is claimed for another FluxInstance.
pub fn claim(root: &Root, order: &ClaimOrder) -> Result<(), Refusal> {
    check_prefix(&order.prefix)?;
    if let Some(found) = find_claim(root, &order.prefix)? {
        may_have(&found, order)?;
    }
    let dir = root.path(&order.prefix);
    check_content(&dir)?;
    let parents = missing_parents(&dir);
    let mut state = state::fresh(order);
    state.undo.extend(parents.iter().map(|parent| Undo::Directory { path: root.unpath(parent) }));
    state::write_pointer(root, &state)?;
    for parent in &parents {
        make_dir(parent, 0o755, Owner::ROOT)?;
    }
    make_dir(&dir, 0o755, Owner::ROOT)?;

    let _lock = HostLock::take(root, &order.prefix, WAIT)?;
    match state::load(root, &order.prefix)? {
        Some(mut found) => {
            may_have(&found, order)?;
            if found.uninstall != order.uninstall {
                found.uninstall = order.uninstall;
                state::save(root, &found)?;
            }
        }
        None => state::save(root, &state)?,
    }
    for name in DIRECTORIES {
        make_dir(&dir.join(name), 0o755, Owner::ROOT)?;
    }
    Ok(())
}

/// A prefix outside the candidates may have lost its pointer: then what is there says whose it is.
fn find_claim(root: &Root, prefix: &Path) -> Result<Option<HostState>, Refusal> {
    if let Some(found) = state::find(root)? {
        return Ok(Some(found));
    }
    let found = state::load(root, prefix)?;
    if let Some(found) = &found {
        state::write_pointer(root, found)?;
    }
    Ok(found)
}

fn may_have(found: &HostState, order: &ClaimOrder) -> Result<(), Refusal> {
    if found.prefix != order.prefix {
        return Err(Refusal::new(format!(
            "this host is already claimed at {}; it must be cleaned before {} can be used",
            found.prefix.display(),
            order.prefix.display()
        )));
    }
    if found.instance_uid != order.instance_uid {
        return Err(Refusal::new(format!(
            "{} belongs to the FluxInstance with uid {}; it must be removed before {} can have it",
            found.prefix.display(),
            found.instance_uid,
            order.instance_uid
        )));
    }
    Ok(())
}

fn check_prefix(prefix: &Path) -> Result<(), Refusal> {
    let mut parts = prefix.components();
    let plain = parts.next() == Some(Component::RootDir)
        && prefix.components().count() > 1
        && parts.all(|part| matches!(part, Component::Normal(_)));
    if plain {
        return Ok(());
    }
    Err(Refusal::new(format!(
        "spec.prefix {} must be an absolute path without `..`, and a directory of its own",
        prefix.display()
    )))
}

/// What a claim that was cut short left is ours, and so are statedirs that a removal kept.
fn check_content(dir: &Path) -> Result<(), Refusal> {
    if dir.join(STATE).exists() {
        return Ok(());
    }
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    let early = [dir.join(LOCK), aside(&dir.join(STATE))];
    let foreign =
        entries.flatten().map(|entry| entry.path()).find(|path| !early.contains(path) && !statedir::is_kept(path));
    match foreign {
        None => Ok(()),
        Some(path) => Err(Refusal::new(format!(
            "{} exists and is not of flux-distribute (it holds {}); move it away, or choose another spec.prefix",
            dir.display(),
            path.file_name().unwrap_or_default().display()
        ))),
    }
}
