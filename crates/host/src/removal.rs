//! Removes whole directories in which other users may still do things: mount, rename, exchange.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt, fchown},
    path::Path,
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, open, openat, openat2},
    libc,
    mount::{MntFlags, umount2},
    sys::stat::Mode,
    unistd::{UnlinkatFlags, unlinkat},
};

use super::{
    files::{absent_is_fine, host_path},
    mountinfo, trust,
};

/// Most mounts that [`unmount_users`] takes away.
const MOST_UNMOUNTED: usize = 1000;
/// Most directories of one directory that [`remove_tree`] remembers: a user may have made any number.
const MOST_NAMES: usize = 1000;
/// The right to write of group and others.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Removes a directory with its content, or a file; succeeds if there is none.
///
/// # Errors
/// If it can't be removed; as for [`refuse_mounts`], and then nothing was removed.
pub fn remove_all_if_there(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => refuse_mounts(path, |_| false).and_then(|()| remove_tree(path)),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    absent_is_fine(removed)
}

/// A directory on the way from the top of a removal to where it is.
struct Level {
    name: OsString,
    /// Device and inode.
    identity: (u64, u64),
    /// The directories in it that are still to be removed.
    left: Vec<OsString>,
}

/// Removes a directory. However deep it is, this opens no more than a few directories at once, because a user can nest
/// more of them than a process may open.
fn remove_tree(path: &Path) -> io::Result<()> {
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no directory to remove"));
    };
    // A relative path with one part.
    let above = if above == Path::new("") { Path::new(".") } else { above };
    let above = File::from(open(above, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?);
    let (mut here, top) = enter(&above, name)?;
    let mut way = vec![top];
    while let Some(level) = way.last_mut() {
        if level.left.is_empty() {
            level.left = remove_files(&here)?;
        }
        if let Some(name) = level.left.pop() {
            match enter(&here, &name) {
                Ok((below, level)) => {
                    here = below;
                    way.push(level);
                }
                // Exchanged or removed meanwhile: the next look at this directory takes what is there now.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP)) => {}
                Err(error) => return Err(error),
            }
            continue;
        }
        let Some(Level { name, .. }) = way.pop() else { break };
        let Some(level) = way.last() else {
            return Ok(unlinkat(&above, name.as_os_str(), UnlinkatFlags::RemoveDir)?);
        };
        here = back(&here, level)?;
        match unlinkat(&here, name.as_os_str(), UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Opens the directory `name` in `above`, and closes it to other users.
fn enter(above: &File, name: &OsStr) -> io::Result<(File, Level)> {
    let directory = open_beside(above, name)?;
    let found = directory.metadata()?;
    if !trust::is_own(found.uid()) || found.mode() & WRITABLE_BY_OTHERS != 0 {
        // Its user could else fill it as fast as it is emptied. A file system without owners refuses this, but can be
        // emptied nevertheless.
        let closed = fchown(&directory, Some(trust::own_uid()), None)
            .and_then(|()| directory.set_permissions(Permissions::from_mode(0o700)));
        if let Err(error) = closed {
            tracing::debug!(?name, %error, "can't close this directory before its removal");
        }
    }
    Ok((directory, Level { name: name.to_owned(), identity: (found.dev(), found.ino()), left: Vec::new() }))
}

/// Opens the directory that `here` was entered from, unless a user has moved `here` elsewhere meanwhile: the removal
/// would go on there.
fn back(here: &File, level: &Level) -> io::Result<File> {
    let above = open_beside(here, OsStr::new(".."))?;
    let found = above.metadata()?;
    if (found.dev(), found.ino()) != level.identity {
        let moved = format!("somebody moved a directory out of {} meanwhile", Path::new(&level.name).display());
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, moved));
    }
    Ok(above)
}

/// Opens a directory through neither a symlink nor a mount point: what a user mounts after [`refuse_mounts`] would hang
/// the removal.
fn open_beside(directory: &File, name: &OsStr) -> io::Result<File> {
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV);
    Ok(File::from(openat2(directory, name, how)?))
}

/// Removes what is in a directory except other directories, and returns the first of these.
fn remove_files(directory: &File) -> io::Result<Vec<OsString>> {
    let mut directories = Vec::new();
    for entry in fs::read_dir(host_path(directory))? {
        let name = entry?.file_name();
        match unlinkat(directory, name.as_os_str(), UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(Errno::EISDIR) => directories.push(name),
            Err(errno) => return Err(errno.into()),
        }
        if directories.len() == MOST_NAMES {
            break;
        }
    }
    Ok(directories)
}

/// Fails if something is mounted inside `directory`: it is not ours, and a removal would go through the mount point.
/// `is_spared` gets each mount point (without symlinks) and is true if the removal leaves it alone.
///
/// # Errors
/// `ResourceBusy` with the first mount point; or if /proc can't be read.
pub fn refuse_mounts(directory: &Path, is_spared: impl Fn(&Path) -> bool) -> io::Result<()> {
    // mountinfo lists paths without symlinks.
    let directory = match directory.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    let points = mountinfo::own()?.into_iter().map(|mount| mount.point);
    let mut inside = points.filter(|point| point.starts_with(&directory) && !is_spared(point));
    match inside.next() {
        Some(point) => Err(mounted_on(&point)),
        None => Ok(()),
    }
}

fn mounted_on(point: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, format!("something is mounted on {}: unmount it", point.display()))
}

/// Unmounts what other users have mounted inside `directory` by FUSE: such a mount is theirs to make wherever they could
/// write once, and must not keep root from a removal. What they have mounted inside goes with it.
///
/// # Errors
/// `ResourceBusy` if something else is mounted on or inside such a mount, which would go with it; or if /proc can't be
/// read, or a mount stays.
pub fn unmount_users(directory: &Path) -> io::Result<()> {
    unmount_at_most(MOST_UNMOUNTED, directory)
}

fn unmount_at_most(most: usize, directory: &Path) -> io::Result<()> {
    let directory = match directory.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    let is_users = |mount: &&mountinfo::Mount| mount.fuse_user().is_some_and(|uid| !trust::is_trusted(uid));
    // Each round takes one away; a user may make another one meanwhile. The last one only looks.
    for rounds_left in (0..=most).rev() {
        let mounts = mountinfo::own()?;
        let inside = mounts.iter().filter(|mount| mount.point.starts_with(&directory));
        // From the top, because the way to a mount inside another one leads through a file system that may not answer.
        let Some(mount) = inside.filter(is_users).min_by_key(|mount| mount.point.components().count()) else {
            return Ok(());
        };
        let other = mounts.iter().find(|other| other.point.starts_with(&mount.point) && !is_users(other));
        if let Some(other) = other {
            return Err(mounted_on(&other.point));
        }
        if rounds_left == 0 {
            break;
        }
        let found = match open_step_by_step(&mount.point) {
            Ok(found) => found,
            // Its user was faster.
            Err(Errno::ENOENT | Errno::ENOTDIR) => continue,
            Err(errno) => return Err(errno.into()),
        };
        let id = mountinfo::id(&found)?;
        if mounts.iter().any(|mount| mount.id == id && mount.point.starts_with(&directory) && is_users(&mount)) {
            match umount2(&host_path(&found), MntFlags::MNT_DETACH) {
                Ok(()) | Err(Errno::EINVAL) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("users go on mounting in {}", directory.display())))
}

/// Opens what is at an absolute path, only to name it. By descriptors, through no symlink, because a user can exchange what
/// is on the way for a symlink to a mount of the host's. One part at a time, because that user can make the way longer
/// than any path that the kernel takes.
fn open_step_by_step(path: &Path) -> nix::Result<File> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut found = openat(AT_FDCWD, Path::new("/"), flags, Mode::empty())?;
    for part in path.components().skip(1) {
        // A symlink is opened itself, so that the step after it fails.
        found = openat(&found, part.as_os_str(), flags, Mode::empty())?;
    }
    Ok(File::from(found))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        os::{fd::AsRawFd, unix::ffi::OsStrExt, unix::fs::symlink},
        sync::atomic::{AtomicBool, Ordering},
    };

    use nix::{
        mount::{MsFlags, mount},
        sys::{
            resource::{Resource, getrlimit, setrlimit},
            stat::mkdirat,
        },
    };

    use super::*;
    use crate::needs::{Need, skips_without};

    /// Mounts a FUSE file system as the program of user 500 does. Nobody serves it.
    fn mount_as_user(point: &Path) -> File {
        let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let fd = device.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id=500,group_id=500,allow_other");
        mount(Some("theirs"), point, Some("fuse"), MsFlags::MS_NOSUID, Some(&*options)).unwrap();
        device
    }

    fn is_mounted_in(directory: &Path) -> bool {
        mountinfo::own().unwrap().iter().any(|mount| mount.point.starts_with(directory))
    }

    /// Nests directories below `top`, deeper than a path can say.
    pub(crate) fn nest(top: &Path, name: &str, depth: usize) -> File {
        let mut here = File::open(top).unwrap();
        for _ in 0..depth {
            mkdirat(&here, name, Mode::S_IRWXU).unwrap();
            here = open_beside(&here, OsStr::new(name)).unwrap();
        }
        here
    }

    #[test]
    fn a_users_mount_is_unmounted_whatever_bytes_its_name_has() {
        if skips_without([Need::Fuse]) {
            return;
        }
        let environment = tempfile::tempdir().unwrap();
        let theirs = environment.path().join(OsStr::from_bytes(b"theirs\xff \n\\"));
        fs::create_dir(&theirs).unwrap();
        let _device = mount_as_user(&theirs);
        unmount_users(environment.path()).unwrap();
        assert!(!is_mounted_in(environment.path()));
        remove_all_if_there(environment.path()).unwrap();
    }

    #[test]
    fn a_users_mount_is_unmounted_however_long_the_way_to_it_is() {
        if skips_without([Need::Fuse]) {
            return;
        }
        let environment = tempfile::tempdir().unwrap();
        let theirs = environment.path().join("s");
        fs::create_dir_all(theirs.join("m")).unwrap();
        let _device = mount_as_user(&theirs.join("m"));
        let deep = nest(environment.path(), &"d".repeat(200), 30);
        fs::rename(&theirs, host_path(&deep).join("s")).unwrap();
        unmount_users(environment.path()).unwrap();
        assert!(!is_mounted_in(environment.path()));
        remove_all_if_there(environment.path()).unwrap();
        assert!(!environment.path().exists());
    }

    #[test]
    fn as_many_mounts_as_may_be_taken_away_are_no_failure() {
        if skips_without([Need::Fuse]) {
            return;
        }
        let environment = tempfile::tempdir().unwrap();
        let theirs = ["a", "b", "c"].map(|name| environment.path().join(name));
        let _devices = theirs.each_ref().map(|point| {
            fs::create_dir(point).unwrap();
            mount_as_user(point)
        });
        let error = unmount_at_most(2, environment.path()).unwrap_err();
        assert!(error.to_string().contains("users go on mounting"), "{error}");
        let _device = mount_as_user(&theirs[0]);
        let _other = mount_as_user(&theirs[1]);
        unmount_at_most(3, environment.path()).unwrap();
        assert!(!is_mounted_in(environment.path()));
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
        for place in [&tree, &host_path(&deep)] {
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
