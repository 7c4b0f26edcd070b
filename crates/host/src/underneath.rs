//! Works on a directory as its own file system has it, without what is mounted in it.
//!
//! A user who may write in a directory may mount there by FUSE, again and again, and the kernel refuses to remove or rename a
//! mount point. But it refuses only a process in whose mount namespace the mount is. From a namespace without the mounts, a
//! removal takes the mount away everywhere, and a rename takes it along. That holds for root's mounts too: callers first
//! refuse a directory that contains one.

use std::{ffi::OsStr, fs::File, io, panic::resume_unwind, path::Path, thread};

use nix::{
    errno::Errno,
    fcntl::{OFlag, RenameFlags, open, renameat2},
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::stat::Mode,
};

/// Runs `work` with `directory` open, on a thread in whose namespace nothing is mounted in it, whatever users mount
/// meanwhile. `work` uses only the descriptor: on its thread, paths such as /proc lead nowhere.
///
/// If this process's root can't be detached from a mount namespace (an initial ramfs, a chroot), or if this process may not
/// make one, `work` meets the mounts: the kernel refuses to remove or rename their mount points.
///
/// # Errors
/// If no thread can be started, or `directory` can't be opened; those of `work`.
pub(crate) fn underneath<T: Send>(directory: &Path, work: impl FnOnce(&File) -> io::Result<T> + Send) -> io::Result<T> {
    // What this makes of the thread's namespace ends with the thread.
    let alone = || {
        let opened = strip_mounts_and_open(directory).or_else(|error| {
            tracing::debug!(%error, directory = %directory.display(), "can't leave out what is mounted in it");
            open_to_read(directory)
        })?;
        work(&opened)
    };
    thread::scope(|scope| match thread::Builder::new().spawn_scoped(scope, alone)?.join() {
        Ok(done) => done,
        Err(panic) => resume_unwind(panic),
    })
}

/// Renames `from` to `to`, both names in `directory`, even if a user has mounted something over `from`.
///
/// # Errors
/// Those of renameat2(2).
pub fn rename_in(directory: &Path, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> io::Result<()> {
    let (from, to) = (from.as_ref(), to.as_ref());
    underneath(directory, |directory| Ok(renameat2(directory, from, directory, to, RenameFlags::empty())?))
}

/// Exchanges `one` and `other`, in `directory`, in one step, as [`rename_in`].
///
/// # Errors
/// If they can't be exchanged, such as because the file system has no such operation.
pub fn exchange_in(directory: &Path, one: &str, other: &str) -> io::Result<()> {
    underneath(directory, |directory| Ok(renameat2(directory, one, directory, other, RenameFlags::RENAME_EXCHANGE)?))
}

/// Opens `directory` as its file system has it. This thread has a mount namespace of its own afterwards, with nothing in it.
fn strip_mounts_and_open(directory: &Path) -> nix::Result<File> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none = None::<&Path>;
    // Nothing that is done here shows in the host's namespace, nor the other way round.
    mount(none, Path::new("/"), none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    // Without MS_REC, so without what is mounted inside.
    mount(Some(directory), directory, none, MsFlags::MS_BIND, none)?;
    let opened = open_to_read(directory)?;
    // The namespace began as a copy of all mounts, and while a mount is in it, the kernel refuses. `opened` stays usable.
    umount2(Path::new("/"), MntFlags::MNT_DETACH)?;
    Ok(opened)
}

fn open_to_read(directory: &Path) -> Result<File, Errno> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    Ok(File::from(open(directory, flags, Mode::empty())?))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::{fd::AsRawFd, unix::ffi::OsStrExt, unix::fs::symlink},
        sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    };

    use nix::fcntl::AT_FDCWD;

    use super::*;
    use crate::{
        mountinfo,
        needs::{Need, skips_without},
        opening::path_of,
        removal::remove_all_if_there,
        removal::tests::nest,
    };

    /// Mounts a FUSE file system as the program of user 500 does. Nobody serves it.
    fn mount_as_user(point: &Path) -> File {
        try_to_mount_as_user(point).unwrap()
    }

    fn try_to_mount_as_user(point: &Path) -> io::Result<File> {
        let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
        let fd = device.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id=500,group_id=500,allow_other");
        mount(Some("theirs"), point, Some("fuse"), MsFlags::MS_NOSUID, Some(&*options))?;
        Ok(device)
    }

    fn is_mounted_in(directory: &Path) -> bool {
        mountinfo::own().unwrap().iter().any(|mount| mount.point.starts_with(directory))
    }

    #[test]
    fn a_users_mount_goes_with_its_directory_whatever_bytes_its_name_has() {
        if skips_without([Need::Fuse]) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        for theirs in ["a", "a/b", "."].map(|way| directory.path().join("environment").join(way)) {
            let theirs = theirs.join(OsStr::from_bytes(b"theirs\xff \n\\"));
            fs::create_dir_all(&theirs).unwrap();
            let _device = mount_as_user(&theirs);
            remove_all_if_there(&directory.path().join("environment")).unwrap();
            assert!(!is_mounted_in(directory.path()) && !directory.path().join("environment").exists());
        }
    }

    #[test]
    fn a_users_mount_goes_with_its_directory_however_long_the_path_to_it_is() {
        if skips_without([Need::Fuse]) {
            return;
        }
        let environment = tempfile::tempdir().unwrap();
        let theirs = environment.path().join("s");
        fs::create_dir_all(theirs.join("m")).unwrap();
        let _device = mount_as_user(&theirs.join("m"));
        let deep = nest(environment.path(), &"d".repeat(200), 30);
        fs::rename(&theirs, path_of(&deep).join("s")).unwrap();
        remove_all_if_there(environment.path()).unwrap();
        assert!(!is_mounted_in(environment.path()) && !environment.path().exists());
    }

    /// If other users may write to the directory itself, they may mount over it, too.
    #[test]
    fn a_file_system_that_a_user_mounted_over_a_directory_is_never_called_and_goes_with_it() {
        if skips_without([Need::Fuse]) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let theirs = directory.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        let _device = mount_as_user(&theirs);
        let moved = directory.path().join("moved");
        rename_in(directory.path(), "theirs", "moved").unwrap();
        assert!(is_mounted_in(&moved));
        remove_all_if_there(&moved).unwrap();
        assert!(!is_mounted_in(directory.path()));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_removal_ends_while_users_mount_in_it() {
        if skips_without([Need::Fuse]) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let environment = directory.path().join("environment");
        let (stop, mounted) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let theirs = environment.join("theirs");
                while !stop.load(Ordering::Relaxed) {
                    // A user who is in the directory mounts there whatever happens to the way to it.
                    if fs::create_dir_all(&theirs).is_ok()
                        && let Ok(device) = try_to_mount_as_user(&theirs)
                    {
                        mounted.fetch_add(1, Ordering::Relaxed);
                        drop(device);
                    }
                }
            });
            let mut removals = 0;
            while removals < 100 || mounted.load(Ordering::Relaxed) < 10 {
                removals += 1;
                let removed = remove_all_if_there(&environment);
                // The thread has filled again what was just emptied.
                removed.unwrap_or_else(|error| assert_eq!(error.kind(), io::ErrorKind::DirectoryNotEmpty));
            }
            stop.store(true, Ordering::Relaxed);
        });
        remove_all_if_there(&environment).unwrap();
        assert!(!is_mounted_in(directory.path()) && mounted.into_inner() > 0);
    }

    #[test]
    fn what_root_has_mounted_stays_and_keeps_all_around_it() {
        if skips_without([Need::Fuse]) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (inside, file) = (directory.path().join("ours"), directory.path().join("file"));
        fs::create_dir(&inside).unwrap();
        fs::write(&file, "").unwrap();
        mount(Some("ours"), &inside, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        let error = remove_all_if_there(directory.path()).unwrap_err();
        assert!(error.to_string().contains("ours: unmount it"), "{error}");
        assert!(is_mounted_in(&inside) && file.exists());
        nix::mount::umount(&inside).unwrap();
    }

    /// The way to a user's mount is the user's, who can exchange a directory on it for a symlink at any moment.
    #[test]
    fn no_mount_of_the_host_is_unmounted_in_place_of_a_users() {
        if skips_without([Need::Fuse]) {
            return;
        }
        let (directory, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let environment = directory.path().join("environment");
        let (theirs, link, ours) = (environment.join("a"), environment.join("b"), outside.path().join("home"));
        fs::create_dir(&ours).unwrap();
        mount(Some("ours"), &ours, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        for _ in 0..50 {
            fs::create_dir_all(theirs.join("home")).unwrap();
            symlink(outside.path(), &link).unwrap();
            let _device = mount_as_user(&theirs.join("home"));
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let _ = renameat2(AT_FDCWD, &theirs, AT_FDCWD, &link, RenameFlags::RENAME_EXCHANGE);
                    }
                });
                let _ = remove_all_if_there(&environment);
                stop.store(true, Ordering::Relaxed);
            });
            assert!(is_mounted_in(&ours), "a mount of the host is gone");
            remove_all_if_there(&environment).unwrap();
            assert!(!is_mounted_in(directory.path()));
        }
        nix::mount::umount(&ours).unwrap();
    }
}
