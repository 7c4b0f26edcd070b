//! What we put outside the prefix: the link at a tree bundle's compiled-in prefix, and `/flux-connect.sh`.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use super::{
    ConfigureOrder, HostState, Refusal, Root, Undo,
    files::{Owner, host_path, missing_parents, remove_if_there, symlink_atomic, write_atomic},
    state::{self, ENVIRONMENTS},
    trust::{self, Owners},
    users::User,
};
use crate::{
    api::{DEFAULT_PREFIX, PREFIX_CANDIDATES},
    broker::command::CONNECT_HEADER,
    packages,
};

/// Name below the prefix: the newest environment, for people.
pub const CURRENT: &str = "current";
/// Below the prefix, and copied to the host's root.
pub const CONNECT: &str = "bin/flux-connect.sh";
/// The copy at the host's root.
pub const CONNECT_AT_ROOT: &str = "/flux-connect.sh";
/// Where the compiled-in prefixes of tree bundles usually are.
const USUAL: [&str; 4] = ["/", "/opt", "/usr", "/usr/local"];

fn compiled_prefix(root: &Root, prefix: &Path, digest: &str) -> Result<Option<PathBuf>, Refusal> {
    let Some(linked) = packages::linked(&root.path(prefix), digest) else {
        let environment = state::environment(prefix, digest);
        return Err(Refusal::transient(format!("the environment {} is not ready", environment.display())));
    };
    Ok(linked.compiled_prefix)
}

/// Points `current` and the compiled-in prefix to the order's environment, unless a running broker uses them.
///
/// # Errors
/// Where something that is not ours is at the compiled-in prefix.
pub fn flip(root: &Root, state: &mut HostState, order: &ConfigureOrder, user: &User) -> Result<(), Refusal> {
    let current = root.path(&order.prefix).join(CURRENT);
    if order.live && fs::symlink_metadata(&current).is_ok() {
        return Ok(());
    }
    if !order.live
        && let Some(path) = compiled_prefix(root, &order.prefix, &order.digest)?
    {
        link_compiled_prefix(root, state, &path, &state::environment(&order.prefix, &order.digest), user)?;
    }
    symlink_atomic(&Path::new(ENVIRONMENTS).join(&order.digest), &current)
}

fn link_compiled_prefix(
    root: &Root,
    state: &mut HostState,
    path: &Path,
    target: &Path,
    user: &User,
) -> Result<(), Refusal> {
    if path == target {
        return Ok(());
    }
    let at = root.path(path);
    match fs::symlink_metadata(&at) {
        Ok(_) if !is_ours(&at, &state.prefix) => {
            return Err(Refusal::new(format!(
                "this bundle's Flux was built for {}, and there is something on this host already that is not of \
                 flux-distribute; move it away, or use a bundle with another prefix",
                path.display()
            )));
        }
        _ => {}
    }
    let missing = missing_parents(&at);
    let made_parent = missing.first().map(|parent| root.unpath(parent));
    state::record(root, state, Undo::Symlink { path: path.to_owned(), made_parent })?;
    if !missing.is_empty() {
        trust::make_directories(root, path.parent().unwrap_or(path), Owners::root_and(user.uid))?;
    }
    symlink_atomic(target, &at)
}

/// By its target, not by what is remembered: the undo list may have been lost with the prefix, and others have no reason to
/// point there.
fn is_ours(link: &Path, prefix: &Path) -> bool {
    let is_within = |target: &Path| {
        let mut prefixes = PREFIX_CANDIDATES.into_iter().map(Path::new).chain([prefix]);
        prefixes.any(|prefix| target.starts_with(prefix.join(ENVIRONMENTS)))
    };
    fs::read_link(link).is_ok_and(|target| is_within(&target))
}

fn is_our_script(path: &Path) -> bool {
    let is_file = fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
    is_file && fs::read(path).is_ok_and(|text| text.starts_with(CONNECT_HEADER.as_bytes()))
}

/// Removes what is ours by its looks, though nothing is remembered of it: the undo list was lost with the prefix.
///
/// # Errors
/// What the system says.
pub fn remove_unremembered(root: &Root, prefix: Option<&Path>) -> Result<(), Refusal> {
    let prefix = prefix.unwrap_or(Path::new(DEFAULT_PREFIX));
    let entries = USUAL.iter().filter_map(|directory| fs::read_dir(root.path(directory)).ok()).flatten().flatten();
    let links = entries.map(|entry| entry.path()).filter(|path| is_ours(path, prefix));
    let script = Some(root.path(CONNECT_AT_ROOT)).filter(|path| is_our_script(path));
    for path in links.chain(script) {
        remove_if_there(&path).map_err(|error| Refusal::io("remove", &path, &error))?;
    }
    Ok(())
}

/// Removes a link of ours, and the directories that were made for it and are empty now.
///
/// # Errors
/// What the system says.
pub fn unlink(root: &Root, prefix: &Path, path: &Path, made_parent: Option<&Path>) -> Result<(), Refusal> {
    let at = root.path(path);
    // Held open: what is looked at and what is removed are in one directory, whatever becomes of the way there.
    if let (Some(Ok(parent)), Some(name)) = (at.parent().map(File::open), at.file_name()) {
        let here = host_path(&parent).join(name);
        if is_ours(&here, prefix) {
            remove_if_there(&here).map_err(|error| Refusal::io("remove", &at, &error))?;
        }
        let _ = remove_if_there(&super::files::aside(&here));
    }
    if let Some(topmost) = made_parent {
        let topmost = root.path(topmost);
        for parent in at.ancestors().skip(1).take_while(|parent| parent.starts_with(&topmost)) {
            if fs::remove_dir(parent).is_err() {
                break;
            }
        }
    }
    Ok(())
}

/// Copies the connect script to the host's root. Somebody else's file stays, and a root that can't be written is fine:
/// the script is at `<prefix>/bin/flux-connect.sh` in any case.
///
/// # Errors
/// Where it can't be remembered.
pub fn connect_at_root(root: &Root, state: &mut HostState, content: &str) -> Result<(), Refusal> {
    let undo = Undo::File { path: CONNECT_AT_ROOT.into() };
    let at = root.path(CONNECT_AT_ROOT);
    let read_only = nix::sys::statvfs::statvfs(&root.path("/"))
        .is_ok_and(|found| found.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY));
    if read_only || (fs::symlink_metadata(&at).is_ok() && !state.undo.contains(&undo) && !is_our_script(&at)) {
        return Ok(());
    }
    state::record(root, state, undo)?;
    if let Err(refusal) = write_atomic(&at, content.as_bytes(), 0o755, Owner::ROOT) {
        tracing::debug!(%refusal, "no script at the host's root");
    }
    Ok(())
}
