//! What we put outside the prefix: the link at a tree bundle's compiled-in prefix, and `/flux-connect.sh`.

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
    files::{Owner, host_path, missing_parents, remove_if_there, replace_symlink, symlink_atomic, write_atomic},
    state::{self, CONNECT_AT_ROOT, ENVIRONMENTS},
    trust,
};
use hostapi::{ConfigureOrder, HostState, Refusal, Undo};

/// Name below the prefix: the newest environment, for people.
pub const CURRENT: &str = "current";
/// Below the prefix, and copied to the host's root.
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
/// Something that is not ours is at the compiled-in prefix, or there is no link of ours yet and others than root can write to a
/// directory above it.
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

/// The directory of the link is opened, or made, before anything is recorded: root alone may be able to change what is in it
/// and above it, else somebody could lead Flux, and our removal, elsewhere.
fn link_compiled_prefix(root: &Root, state: &mut HostState, path: &Path, target: &Path) -> Result<(), Refusal> {
    if path == target {
        return Ok(());
    }
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Refusal::new(format!(
            "this bundle's Flux was built for {}, where no link can be; use a bundle with another prefix",
            path.display()
        )));
    };
    let refused = |distrust| {
        let Refusal { message, transient } = Refusal::from(distrust);
        let message = format!("this bundle's Flux was built for {}, where a link is needed: {message}", path.display());
        Refusal { message, transient }
    };
    let found = match trust::directory(root, above) {
        Ok(found) => found,
        // A version before this one made links there, and an instance that has one must come up again.
        Err(distrust) => match with_remembered_link(root, state, above, name) {
            Some(directory) => {
                tracing::warn!("the link {} can be led elsewhere: {}", path.display(), base::error_chain(&distrust));
                Some(directory)
            }
            None => return Err(refused(distrust)),
        },
    };
    let is_others = |directory: &OwnedFd| {
        let at = host_path(directory).join(name);
        fs::symlink_metadata(&at).is_ok() && !is_ours(&at, &state.prefix)
    };
    if found.as_ref().is_some_and(is_others) {
        return Err(Refusal::new(format!(
            "this bundle's Flux was built for {}, and there is something on this host already that is not of \
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
    replace_symlink(target, &host_path(&directory).join(name))
        .map_err(|error| Refusal::io("make the link", path, &error))
}

/// The directory `above`, whoever can change it, if the link called `name` in it is the one that root made there and remembers.
/// Anybody can make a link that looks like ours, and exchange it later.
fn with_remembered_link(root: &Root, state: &HostState, above: &Path, name: &OsStr) -> Option<OwnedFd> {
    let path = above.join(name);
    if !state.undo.iter().any(|undo| matches!(undo, Undo::Symlink { path: known, .. } if *known == path)) {
        return None;
    }
    let directory = trust::by_roots_links(root, above)?;
    let link = host_path(&directory).join(name);
    let is_roots = fs::symlink_metadata(&link).is_ok_and(|found| found.uid() == 0);
    (is_roots && is_ours(&link, &state.prefix)).then_some(directory)
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
    for path in USUAL.map(Path::new) {
        // No link of ours is made where others could have changed it.
        let Ok(Some(directory)) = trust::directory(root, path) else { continue };
        for entry in fs::read_dir(host_path(&directory)).into_iter().flatten().flatten() {
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

/// Removes a link of ours, and the directories that were made for it and are empty now. In a directory that others than root
/// can change by now, the link stays, and the log says so: root removes nothing by a way that somebody else can turn.
///
/// # Errors
/// What the system says.
pub fn unlink(root: &Root, prefix: &Path, path: &Path, made_parent: Option<&Path>) -> Result<(), Refusal> {
    let Some((directory, name)) = directory_of(root, path) else { return Ok(()) };
    // Held open: what is looked at and what is removed are in one directory, whatever becomes of the way there.
    let here = host_path(&directory).join(name);
    if is_ours(&here, prefix) {
        remove_if_there(&here).map_err(|error| Refusal::io("remove", path, &error))?;
    }
    let _ = remove_if_there(&host::files::aside(&here));
    let Some(topmost) = made_parent else { return Ok(()) };
    for made in path.ancestors().skip(1).take_while(|made| made.starts_with(topmost)) {
        let Some((above, name)) = directory_of(root, made) else { break };
        if fs::remove_dir(host_path(&above).join(name)).is_err() {
            break;
        }
    }
    Ok(())
}

/// The directory that `path` is in, if it is there and only root can change it, and the name of `path` in it.
fn directory_of<'a>(root: &Root, path: &'a Path) -> Option<(OwnedFd, &'a OsStr)> {
    let (above, name) = (path.parent()?, path.file_name()?);
    match trust::directory(root, above) {
        Ok(directory) => Some((directory?, name)),
        Err(distrust) => {
            tracing::warn!(
                "{} is not removed: {}; remove it by hand if it leads into flux-distribute",
                path.display(),
                base::error_chain(&distrust)
            );
            None
        }
    }
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
