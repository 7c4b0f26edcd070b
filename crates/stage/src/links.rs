//! What we create outside the prefix: the link at a tree bundle's compiled-in prefix, and `/flux-connect.sh`.

use std::{
    ffi::OsStr,
    fs,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

use api::{DEFAULT_PREFIX, PREFIX_CANDIDATES};
use broker::command::CONNECT_HEADER;
use host::{
    Root,
    files::{Owner, missing_parents, remove_if_there, replace_symlink, symlink_atomic, write_atomic},
    machine::shared_by_nodes,
    opening::path_of,
    room::FileSystem,
    state::{self, CONNECT_AT_ROOT, ENVIRONMENTS},
    trust,
};
use hostapi::{ConfigureOrder, HostState, Refusal, Undo};

/// Name below the prefix of the link to the newest environment, for people.
pub const CURRENT: &str = "current";
/// Path below the prefix of the connect script, which is copied to the host's root.
pub const CONNECT: &str = "bin/flux-connect.sh";
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
/// If there is something at the compiled-in prefix that is not ours, or no link of ours yet and users other than root
/// can write to a directory above it.
pub fn flip(root: &Root, state: &mut HostState, order: &ConfigureOrder) -> Result<(), Refusal> {
    let current = root.path(&order.prefix).join(CURRENT);
    if order.live && fs::symlink_metadata(&current).is_ok() {
        return Ok(());
    }
    if !order.live
        && let Some(path) = compiled_prefix(root, &order.prefix, &order.digest)?
    {
        link_compiled_prefix(root, state, &path, &state::environment(&order.prefix, &order.digest))?;
    }
    symlink_atomic(&Path::new(ENVIRONMENTS).join(&order.digest), &current)
}

/// Opens or makes the link's directory before it records anything: only root may be able to change it and the
/// directories above, else another user could redirect Flux, and our removal, elsewhere.
fn link_compiled_prefix(root: &Root, state: &mut HostState, path: &Path, target: &Path) -> Result<(), Refusal> {
    if path == target {
        return Ok(());
    }
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Refusal::new(format!(
            "this bundle's Flux was built for {}, where no link can be made; use a bundle with another prefix",
            path.display()
        )));
    };
    let refused = |distrust| {
        let Refusal { message, transient } = Refusal::from(distrust);
        let message = format!("this bundle's Flux was built for {}, where a link is needed: {message}", path.display());
        Refusal { message, transient }
    };
    let nearest = trust::nearest(root, above).ok();
    let shared = nearest.and_then(|directory| shared_by_nodes(&path_of(&directory)));
    check_shared(path, shared, is_remembered(state, path))?;
    let found = match trust::directory(root, above) {
        Ok(found) => found,
        // An older version made links in such places, and an instance with such a link must be able to start again.
        Err(distrust) => match with_remembered_link(root, state, above, name) {
            Some(directory) => {
                tracing::warn!("other users could redirect {}: {}", path.display(), base::error_chain(&distrust));
                Some(directory)
            }
            None => return Err(refused(distrust)),
        },
    };
    let is_others = |directory: &OwnedFd| {
        let at = path_of(directory).join(name);
        fs::symlink_metadata(&at).is_ok() && !is_ours(&at, &state.prefix)
    };
    if found.as_ref().is_some_and(is_others) {
        return Err(Refusal::new(format!(
            "this bundle's Flux was built for {}, where this host already has something that does not belong to \
             flux-distribute; move it away, or use a bundle with another prefix",
            path.display()
        )));
    }
    let made_parent = missing_parents(&root.path(path)).first().map(|parent| root.unpath(parent));
    state::record(root, state, Undo::Symlink { path: path.to_owned(), made_parent })?;
    let directory = match found {
        Some(directory) => directory,
        None => trust::make_directories(root, above).map_err(refused)?,
    };
    replace_symlink(target, &path_of(&directory).join(name)).map_err(|error| Refusal::io("make the link", path, &error))
}

/// Refuses a link in a directory that nodes share, on a file system of `kind`: all their Flux would run through one link,
/// and the first node to be uninstalled would remove it. An older version made such links, and an instance that has one
/// must be able to start again.
fn check_shared(path: &Path, kind: Option<&str>, is_remembered: bool) -> Result<(), Refusal> {
    let Some(kind) = kind else { return Ok(()) };
    let path = path.display();
    if is_remembered {
        tracing::warn!("the link {path} is on {kind}, which nodes share: it leads all of them to one environment");
        return Ok(());
    }
    Err(Refusal::new(format!(
        "this bundle's Flux was built for {path}, where a link is needed, but that is on {kind}, which nodes share: the first \
         node to be uninstalled would remove the link of all; mount a file system of this node's own there, or use a bundle \
         with another prefix"
    )))
}

/// True if the undo list has our link at `path`.
fn is_remembered(state: &HostState, path: &Path) -> bool {
    state.undo.iter().any(|undo| matches!(undo, Undo::Symlink { path: known, .. } if known == path))
}

/// Opens the directory `above`, even if other users can change it, if `name` in it is a link of ours that root owns and
/// the undo list has. Any user can make a link that looks like ours, and replace it later.
fn with_remembered_link(root: &Root, state: &HostState, above: &Path, name: &OsStr) -> Option<OwnedFd> {
    let path = above.join(name);
    if !is_remembered(state, &path) {
        return None;
    }
    let directory = trust::by_roots_links(root, above)?;
    let link = path_of(&directory).join(name);
    let is_roots = fs::symlink_metadata(&link).is_ok_and(|found| found.uid() == 0);
    (is_roots && is_ours(&link, &state.prefix)).then_some(directory)
}

/// True if the link's target is one of our environments. The undo list does not count, because it may have been lost
/// with the prefix; and others have no reason to link there.
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

/// Removes links and a script that look like ours but are in no undo list, because it was lost with the prefix.
///
/// # Errors
/// If one can't be removed.
pub fn remove_unremembered(root: &Root, prefix: Option<&Path>) -> Result<(), Refusal> {
    let prefix = prefix.unwrap_or(Path::new(DEFAULT_PREFIX));
    for path in USUAL.map(Path::new) {
        // We never make a link where other users could have changed it. What nodes share may be another node's.
        let Ok(Some(directory)) = trust::directory(root, path) else { continue };
        if shared_by_nodes(&path_of(&directory)).is_some() {
            continue;
        }
        for entry in fs::read_dir(path_of(&directory)).into_iter().flatten().flatten() {
            if is_ours(&entry.path(), prefix) {
                let removed = remove_if_there(&entry.path());
                removed.map_err(|error| Refusal::io("remove", &path.join(entry.file_name()), &error))?;
            }
        }
    }
    let script = root.path(CONNECT_AT_ROOT);
    if is_our_script(&script) {
        remove_if_there(&script).map_err(|error| Refusal::io("remove", &script, &error))?;
    }
    Ok(())
}

/// Removes a link of ours, and the directories that were made for it if they are empty. If users other than root can
/// change its directory by now, leaves the link and logs a warning: root must not remove anything by a path that
/// another user can redirect. The same if nodes share the directory: other nodes' Flux may run through the link.
///
/// # Errors
/// If the link can't be removed.
pub fn unlink(root: &Root, prefix: &Path, path: &Path, made_parent: Option<&Path>) -> Result<(), Refusal> {
    let Some((directory, name)) = directory_of(root, path) else { return Ok(()) };
    // The open descriptor ensures that the link that was checked and the one that is removed are in the same directory.
    let here = path_of(&directory).join(name);
    if is_ours(&here, prefix) {
        remove_if_there(&here).map_err(|error| Refusal::io("remove", path, &error))?;
    }
    let _ = remove_if_there(&host::files::aside(&here));
    let Some(topmost) = made_parent else { return Ok(()) };
    for made in path.ancestors().skip(1).take_while(|made| made.starts_with(topmost)) {
        let Some((above, name)) = directory_of(root, made) else { break };
        if fs::remove_dir(path_of(&above).join(name)).is_err() {
            break;
        }
    }
    Ok(())
}

/// Opens the directory that contains `path`, and returns it with the last part of `path`. None if it does not exist, if
/// users other than root can change it, or if nodes share it.
fn directory_of<'a>(root: &Root, path: &'a Path) -> Option<(OwnedFd, &'a OsStr)> {
    let (above, name) = (path.parent()?, path.file_name()?);
    match trust::directory(root, above) {
        Ok(directory) => {
            let directory = directory?;
            if let Some(kind) = shared_by_nodes(&path_of(&directory)) {
                tracing::warn!(
                    "{} stays, because it is on {kind}, which nodes share; remove it by hand once no node needs it",
                    path.display()
                );
                return None;
            }
            Some((directory, name))
        }
        Err(distrust) => {
            tracing::warn!(
                "can't remove {}: {}; remove it by hand if it links into flux-distribute",
                path.display(),
                base::error_chain(&distrust)
            );
            None
        }
    }
}

/// Copies the connect script to the host's root. Leaves another file there alone, and does without the copy if the root
/// is read-only: the script is also at `<prefix>/bin/flux-connect.sh`.
///
/// # Errors
/// If the undo list can't be written.
pub fn connect_at_root(root: &Root, state: &mut HostState, content: &str) -> Result<(), Refusal> {
    let undo = Undo::File { path: CONNECT_AT_ROOT.into() };
    let at = root.path(CONNECT_AT_ROOT);
    let is_read_only = FileSystem::of(&root.path("/")).is_ok_and(|found| found.is_read_only);
    if is_read_only || (fs::symlink_metadata(&at).is_ok() && !state.undo.contains(&undo) && !is_our_script(&at)) {
        return Ok(());
    }
    state::record(root, state, undo)?;
    if let Err(refusal) = write_atomic(&at, content.as_bytes(), 0o755, Owner::ROOT) {
        tracing::debug!(%refusal, "can't write the connect script at the host's root");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_link_is_made_in_a_directory_that_nodes_share() {
        let path = Path::new("/opt/flux");
        for (kind, is_remembered, is_made) in
            [(None, false, true), (None, true, true), (Some("NFS"), false, false), (Some("NFS"), true, true)]
        {
            let checked = check_shared(path, kind, is_remembered);
            assert_eq!(checked.is_ok(), is_made, "{kind:?} {is_remembered}");
            if let Err(refusal) = checked {
                assert!(!refusal.transient, "{refusal}");
                for part in ["/opt/flux", "NFS", "use a bundle with another prefix"] {
                    assert!(refusal.message.contains(part), "{refusal}");
                }
            }
        }
    }
}
