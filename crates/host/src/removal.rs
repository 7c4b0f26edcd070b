//! Removes whole directories in which other users may still do things: mount, rename, exchange.

use std::{
    ffi::{OsStr, OsString},
    fs::{File, Permissions},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, fchown},
    },
    path::Path,
};

use nix::{
    dir::Dir,
    errno::Errno,
    libc,
    unistd::{UnlinkatFlags, unlinkat},
};

use super::{
    mountinfo::{self, Mount},
    opening::{is_there, open_in, split},
    trust,
    underneath::underneath,
};

/// Most directories of one directory that [`remove_tree`] remembers: a user may have made any number.
const MOST_NAMES: usize = 1000;
/// Most levels of a tree at which [`remove_tree`] remembers directories: a user may have nested any number.
const MOST_LEVELS: usize = 64;
/// How often [`remove_tree`] lists a directory: a damaged one, or one that root's own processes fill, is never empty.
const MOST_LISTS: u32 = 100_000;

/// Removes a directory with its content, or a file; succeeds if there is none. What other users have mounted in it by FUSE
/// goes with it: such a mount is theirs to make wherever they could write once, and must not keep root from a removal.
///
/// # Errors
/// If it can't be removed; as for [`refuse_mounts`], and then nothing was removed.
pub fn remove_all_if_there(path: &Path) -> io::Result<()> {
    let (above, name) = split(path)?;
    if !is_there(path)? {
        return Ok(());
    }
    refuse_mounts(path, trust::is_by_user)?;
    let removed = underneath(above, |above| match unlinkat(above, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(Errno::EISDIR) => remove_tree(above, name),
        Err(errno) => Err(errno.into()),
    });
    match removed {
        // The removal met what users have mounted. The kernel's error does not say which mount is in the way.
        Err(error) if matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::CrossesDevices) => {
            refuse_mounts(path, |_| false).and(Err(error))
        }
        removed => removed,
    }
}

/// A directory on the way from the top of a removal to where it is.
struct Level {
    /// Device and inode.
    identity: (u64, u64),
    /// Some of the directories in it that are still to be removed.
    left: Vec<OsString>,
    /// How often it was listed.
    lists: u32,
}

/// Removes the directory `name` in `above`. However deep it is, this opens no more than a few directories at once, because
/// a user can nest more of them than a process may open.
fn remove_tree(above: &File, name: &OsStr) -> io::Result<()> {
    let (mut here, top) = enter(above, name)?;
    let mut way = vec![top];
    while let Some(level) = way.last_mut() {
        if level.left.is_empty() {
            level.lists += 1;
            if level.lists > MOST_LISTS {
                return Err(Errno::ENOTEMPTY.into());
            }
            level.left = empty_but_for_full_directories(&here)?;
        }
        if let Some(name) = level.left.pop() {
            match enter(&here, &name) {
                Ok((below, level)) => {
                    here = below;
                    way.push(level);
                    // Listed again on the way back.
                    if let Some(forgotten) = way.len().checked_sub(MOST_LEVELS) {
                        way[forgotten].left = Vec::new();
                    }
                }
                // Exchanged or removed meanwhile: the next look at this directory takes what is there now.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP)) => {}
                Err(error) => return Err(error),
            }
            continue;
        }
        way.pop();
        match way.last() {
            Some(level) => here = back(&here, level)?,
            None => break,
        }
    }
    Ok(unlinkat(above, name, UnlinkatFlags::RemoveDir)?)
}

/// Opens the directory `name` in `above`, and closes it to other users.
fn enter(above: &File, name: &OsStr) -> io::Result<(File, Level)> {
    let directory = open_in(above, name)?;
    let found = directory.metadata()?;
    if !trust::is_own(found.uid()) || found.mode() & trust::WRITABLE_BY_OTHERS != 0 {
        // Its user could else fill it as fast as it is emptied. A file system without owners refuses this, but can be
        // emptied nevertheless.
        let closed = fchown(&directory, Some(trust::own_uid()), None)
            .and_then(|()| directory.set_permissions(Permissions::from_mode(0o700)));
        if let Err(error) = closed {
            tracing::debug!(?name, %error, "can't close this directory before its removal");
        }
    }
    Ok((directory, Level { identity: (found.dev(), found.ino()), left: Vec::new(), lists: 0 }))
}

/// Opens the directory that `here` was entered from, unless a user has moved `here` elsewhere meanwhile: the removal
/// would go on there.
fn back(here: &File, level: &Level) -> io::Result<File> {
    let above = open_in(here, OsStr::new(".."))?;
    let found = above.metadata()?;
    if (found.dev(), found.ino()) != level.identity {
        return Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "somebody moved a directory elsewhere during the removal",
        ));
    }
    Ok(above)
}

/// Removes everything in a directory except directories with content, and returns the names of up to [`MOST_NAMES`] of
/// these.
fn empty_but_for_full_directories(directory: &File) -> io::Result<Vec<OsString>> {
    let mut full = Vec::new();
    let mut listed = Dir::from_fd(open_in(directory, OsStr::new("."))?.into())?;
    for entry in listed.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if [c".", c".."].contains(&name) {
            continue;
        }
        let removed = match unlinkat(directory, name, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::EISDIR) => unlinkat(directory, name, UnlinkatFlags::RemoveDir),
            removed => removed,
        };
        match removed {
            // Exchanged meanwhile, if it is no directory now.
            Ok(()) | Err(Errno::ENOENT | Errno::ENOTDIR) => {}
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => full.push(OsStr::from_bytes(name.to_bytes()).to_owned()),
            Err(errno) => return Err(errno.into()),
        }
        if full.len() == MOST_NAMES {
            break;
        }
    }
    Ok(full)
}

/// What is mounted on or inside `directory`, in mount order. Points have no symlinks.
///
/// # Errors
/// If the directory above can't be examined, or /proc can't be read.
pub fn mounts_in(directory: &Path) -> io::Result<Vec<Mount>> {
    let (above, name) = split(directory)?;
    // mountinfo lists paths without symlinks. The last part is not examined, because a user may have mounted something
    // over it.
    let directory = match above.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        above => above?.join(name),
    };
    Ok(mountinfo::own()?.into_iter().filter(|mount| mount.point.starts_with(&directory)).collect())
}

/// Fails if something is mounted inside `directory`: it is not ours, and would go with its mount point. `is_spared` gets
/// each mount (its point without symlinks) and is true for one that may go or is left alone.
///
/// # Errors
/// `ResourceBusy` with the first mount point; or if /proc can't be read.
pub fn refuse_mounts(directory: &Path, is_spared: impl Fn(&Mount) -> bool) -> io::Result<()> {
    match mounts_in(directory)?.into_iter().find(|mount| !is_spared(mount)) {
        Some(Mount { point, .. }) => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            format!("something is mounted on {}: unmount it", point.display()),
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        fs,
        os::unix::fs::symlink,
        sync::atomic::{AtomicBool, Ordering},
    };

    use nix::sys::{
        resource::{Resource, getrlimit, setrlimit},
        stat::{Mode, mkdirat},
    };

    use super::*;
    use crate::{
        needs::{Need, skips_without},
        opening::path_of,
    };

    /// Nests directories below `top`, deeper than a path can say.
    pub(crate) fn nest(top: &Path, name: &str, depth: usize) -> File {
        let mut here = File::open(top).unwrap();
        for _ in 0..depth {
            mkdirat(&here, name, Mode::S_IRWXU).unwrap();
            here = open_in(&here, OsStr::new(name)).unwrap();
        }
        here
    }

    #[test]
    fn a_tree_that_is_deeper_than_a_process_may_open_files_is_removed() {
        // What most processes have: a machine may give a test any number.
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, most.min(1024), most).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (tree, outside) = (directory.path().join("tree"), directory.path().join("outside"));
        fs::create_dir(&tree).unwrap();
        fs::write(&outside, "").unwrap();
        let deep = nest(&tree, "d", 5000);
        for place in [&tree, &path_of(&deep)] {
            fs::write(place.join("file"), "").unwrap();
            symlink(directory.path(), place.join("link")).unwrap();
            for number in 0..=2 * MOST_NAMES {
                fs::create_dir(place.join(number.to_string())).unwrap();
            }
        }
        remove_all_if_there(&tree).unwrap();
        assert!(!tree.exists() && outside.exists());
    }

    /// Root alone may enter what another user owns, and take it away from its owner.
    #[test]
    fn nobody_can_fill_a_directory_as_fast_as_it_is_emptied() {
        if skips_without([Need::Root]) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let theirs = directory.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        std::os::unix::fs::chown(&theirs, Some(500), Some(500)).unwrap();
        let above = File::open(directory.path()).unwrap();
        let (entered, _) = enter(&above, OsStr::new("theirs")).unwrap();
        let found = entered.metadata().unwrap();
        assert_eq!((found.uid(), found.mode() & 0o7777), (0, 0o700));
    }

    #[test]
    fn a_removal_does_not_go_on_where_a_user_has_moved_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let at = |path: &str| directory.path().join(path);
        for path in ["tree/a/b", "other/b"] {
            fs::create_dir_all(at(path)).unwrap();
        }
        let (a, level) = enter(&File::open(at("tree")).unwrap(), OsStr::new("a")).unwrap();
        let (b, _) = enter(&a, OsStr::new("b")).unwrap();
        fs::rename(at("tree/a/b"), at("other/b")).unwrap();
        assert_eq!(back(&b, &level).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        assert!(at("other/b").is_dir());
    }

    #[test]
    fn a_removal_ends_while_directories_in_it_are_exchanged_for_symlinks() {
        let directory = tempfile::tempdir().unwrap();
        let (tree, outside) = (directory.path().join("tree"), directory.path().join("outside"));
        fs::create_dir_all(outside.join("kept")).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let theirs = tree.join("a");
                    let _ = fs::create_dir(&theirs);
                    let _ = fs::rename(&theirs, tree.join("b"));
                    let _ = symlink(&outside, &theirs);
                }
            });
            for _ in 0..300 {
                let _ = fs::create_dir(&tree);
                let _ = remove_all_if_there(&tree);
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(outside.join("kept").is_dir());
    }
}
