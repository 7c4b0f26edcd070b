//! Repairs an environment while processes use it.
//!
//! The environment is built again under a temporary name, from archives with the right sha256; the damaged one's own
//! records are not trusted. Each file that differs is replaced by one rename: it gets a new inode, and a process that
//! has the old one open or mapped keeps it. No file is written in place. Of the files that no package contains, those of
//! other users are removed, since root would run what they wrote; the others never.
//!
//! An environment that other users could write to, or in which one has mounted something, is replaced as a whole: nothing
//! there proves what it is. The old one goes once no process uses it.
//!
//! Names are resolved one directory at a time and never through a symlink: a directory that others could write to for a
//! while may contain links to anywhere.

use std::{
    fs::{self, DirBuilder, File, Metadata, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, fchown},
    path::{Component, Path, PathBuf},
};

use crate::{
    ENVIRONMENT_MARKER,
    environment::{
        build_tree, failed,
        opened::Opened,
        records::{RECORDS, read_own},
        refused,
        transaction::{Environments, Workshop},
        tree::mode,
        verify::{Place, at_most, compare, in_utf8},
    },
    fetch::archive::{self, archives},
};
use base::error_chain;
use host::{
    BrokerProcesses, HostLock, Root,
    files::sync_file_system,
    lock::WAIT,
    opening::{look_in, open_in, open_uncovered, path_of},
    removal::mounts_in,
    state::{ENVIRONMENTS, environment},
    trust::{is_by_user, is_trusted},
};
use hostapi::{Difference, LinkOrder, Mended, Progress, Refusal, What};

/// Repairs the environment of `order`, which must exist.
///
/// Unpacking all packages again and hashing the damaged environment takes minutes and holds only the lock of
/// [`Workshop`], which keeps other repairs out. The locks that an installation, a collection, or a broker's start needs
/// ([`HostLock`], [`Environments`]) are held only for the renames and, after a replacement, while the old environment is
/// removed. While they are held, no other process removes the host's prefix or the environment.
///
/// # Errors
/// A sentence for people; transient if an archive is missing (fetching helps), the disk is full, or the environment went away
/// meanwhile. What was put back until then stays so.
pub fn mend(
    order: &LinkOrder,
    broker: &dyn BrokerProcesses,
    progress: &mut dyn FnMut(Progress),
) -> Result<Mended, Refusal> {
    let LinkOrder { prefix, digest, set, platform, .. } = order;
    if !archive::is_digest(digest) {
        return Err(refused(format!("`{digest}` is not the digest of a package set")));
    }
    let place = environment(prefix, digest);
    let failure = |what: &str, error: &io::Error| failed(format!("can't {what} {}: {error}", place.display()));
    let before = Place::of(&place).map_err(|e| failure("open", &e))?;
    let before = before.ok_or_else(|| refused(format!("there is no environment {}", place.display())))?;
    let archives = archives(set, platform).map_err(|e| refused(error_chain(&e)))?;
    let workshop = Workshop::hold(&prefix.join(ENVIRONMENTS), digest)?;
    let fresh = workshop.tree();
    let linked = build_tree(order, None, &fresh, archives, progress)?;
    let conda = linked.compiled_prefix.is_none();
    let found = match before {
        Place::Directory(..) => damage(&place, &fresh, conda, progress).map_err(|e| failure("compare", &e))?,
        Place::Covered => vec![Difference { path: PathBuf::new(), what: What::Unreadable }],
    };
    let opened = Opened::of(&place);
    let was_open = opened.paths().map_err(|e| failure("read what was open in", &e))?.is_some();
    if found.is_empty() {
        return Ok(Mended::default());
    }
    let mended = {
        let _host = HostLock::take(&Root::host(), prefix, WAIT)?;
        let environments = Environments::hold(prefix, broker)?;
        if Place::of(&place).map_err(|e| failure("open", &e))? != Some(before) {
            return Err(failed(format!(
                "{} was removed while it was being repaired; nothing was changed, and the next check looks at what is there now",
                place.display()
            )));
        }
        // What a user has mounted something on can't be replaced in place.
        let mounts = mounts_in(&place).map_err(|e| failure("look for mounts in", &e))?;
        if was_open || mounts.iter().any(is_by_user) {
            environments.replace(&fresh, digest).map_err(|e| failure("replace", &e))?;
            opened.forget().map_err(|e| failure("forget what was open in", &e))?;
            Mended { mended: at_most(found).into_iter().map(in_utf8).collect(), left: Vec::new() }
        } else {
            Mending { place: &place, fresh: &fresh, moved: 0 }.put_back(found)
        }
    };
    sync_file_system(&place).map_err(|e| failure("sync", &e))?;
    Ok(mended)
}

/// The differences between `place` and `fresh`. RECORDS and the marker come last: if the repair is interrupted, the next
/// check still finds the damage.
fn damage(place: &Path, fresh: &Path, conda: bool, progress: &mut dyn FnMut(Progress)) -> io::Result<Vec<Difference>> {
    // Sync before any rename gives a file its name.
    sync_file_system(fresh)?;
    let mut found = compare(place, fresh, conda, None, progress)?.differences;
    for name in [RECORDS, ENVIRONMENT_MARKER] {
        found.extend(own_damage(place, fresh, name)?);
    }
    Ok(found)
}

/// The difference in one of the files that we add to the packages' files.
fn own_damage(place: &Path, fresh: &Path, name: &str) -> io::Result<Option<Difference>> {
    let what = match read_own(place, name) {
        Ok(found) if found == read_own(fresh, name)? => return Ok(None),
        Ok(_) => What::Changed,
        Err(e) if e.kind() == io::ErrorKind::NotFound => What::Missing,
        Err(_) => What::Replaced,
    };
    Ok(Some(Difference { path: name.into(), what }))
}

struct Mending<'a> {
    place: &'a Path,
    /// A correct copy of [`Self::place`].
    fresh: &'a Path,
    /// Number of entries moved from [`Self::place`] to [`Self::fresh`].
    moved: u32,
}

impl Mending<'_> {
    fn put_back(mut self, found: Vec<Difference>) -> Mended {
        let mut mended = Mended::default();
        for difference in found {
            match self.repair(&difference) {
                Ok(true) => mended.mended.push(difference),
                Ok(false) => mended.left.push(difference),
                Err(error) => {
                    tracing::warn!(%difference, error = error_chain(&error), "can't repair this file");
                    mended.left.push(difference);
                }
            }
        }
        let named = |differences| at_most(differences).into_iter().map(in_utf8).collect();
        Mended { mended: named(mended.mended), left: named(mended.left) }
    }

    /// Repairs one difference. Returns false if no package contains the file.
    fn repair(&mut self, difference: &Difference) -> io::Result<bool> {
        let path = &difference.path;
        let wanted = match (difference.what, fs::symlink_metadata(self.fresh.join(path))) {
            (What::Owner, Err(_)) => return self.remove_strangers(path),
            (What::Extra, _) | (_, Err(_)) => return Ok(false),
            (_, Ok(wanted)) => wanted,
        };
        // The empty path is the environment itself.
        let Some(name) = path.file_name() else {
            set_rights(&open_uncovered(self.place)?, &wanted)?;
            return Ok(true);
        };
        let parent = path.parent().unwrap_or(Path::new(""));
        let live = self.directory(parent)?;
        if wanted.is_dir() {
            self.directory(path)?;
            return Ok(true);
        }
        let fresh = descend(self.fresh, parent)?;
        let (from, to) = (path_of(&fresh).join(name), path_of(&live).join(name));
        match fs::rename(&from, &to) {
            // A directory is in the way.
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                self.move_away(&live, Path::new(name))?;
                fs::rename(from, to)?;
            }
            other => other?,
        }
        Ok(true)
    }

    /// Moves another user's file at `path` into the [`Workshop`], which deletes it. Returns false if root owns the file.
    fn remove_strangers(&mut self, path: &Path) -> io::Result<bool> {
        let name = path.file_name().map(Path::new).ok_or(io::ErrorKind::InvalidInput)?;
        let parent = descend(self.place, path.parent().unwrap_or(Path::new("")))?;
        let found = look_in(&parent, name.as_os_str())?;
        if is_trusted(found.uid()) {
            return Ok(false);
        }
        self.move_away(&parent, name)?;
        Ok(true)
    }

    /// Opens a directory of the environment. Creates or repairs it and its parents on the way.
    fn directory(&mut self, path: &Path) -> io::Result<File> {
        let (mut at, mut below) = (open_uncovered(self.place)?, PathBuf::new());
        for part in names(path) {
            below.push(part);
            let wanted = fs::symlink_metadata(self.fresh.join(&below))?;
            at = match open_in(&at, part.as_os_str()) {
                Ok(next) if is_trusted(next.metadata()?.uid()) => next,
                found => {
                    let is_missing = found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
                    if !is_missing {
                        self.move_away(&at, part)?;
                    }
                    DirBuilder::new().mode(0o700).create(path_of(&at).join(part))?;
                    open_in(&at, part.as_os_str())?
                }
            };
            set_rights(&at, &wanted)?;
        }
        Ok(at)
    }

    /// Moves what has `name` out of the environment.
    fn move_away(&mut self, parent: &File, name: &Path) -> io::Result<()> {
        self.moved += 1;
        let fresh = open_uncovered(self.fresh)?;
        fs::rename(path_of(parent).join(name), path_of(&fresh).join(format!(".replaced.{}", self.moved)))
    }
}

fn descend(root: &Path, path: &Path) -> io::Result<File> {
    names(path).try_fold(open_uncovered(root)?, |at, part| open_in(&at, part.as_os_str()))
}

fn names(path: &Path) -> impl Iterator<Item = &Path> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(Path::new(name)),
        _ => None,
    })
}

/// Sets the owner and permissions of a directory if they differ.
fn set_rights(directory: &File, wanted: &Metadata) -> io::Result<()> {
    let found = directory.metadata()?;
    if (found.uid(), found.gid()) != (wanted.uid(), wanted.gid()) {
        fchown(directory, Some(wanted.uid()), Some(wanted.gid()))?;
    }
    if mode(&found) != mode(wanted) {
        directory.set_permissions(Permissions::from_mode(mode(wanted)))?;
    }
    Ok(())
}
