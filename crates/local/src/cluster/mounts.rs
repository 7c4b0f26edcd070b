//! Mounts for nodes and pods. All of them happen in separate mount namespaces, so the machine never sees them.

use std::{fs, path::Path};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::statvfs::{FsFlags, statvfs},
    unistd::{chdir, pivot_root},
};

use crate::error::{Context, LocalError};
use host::mountinfo;

const NONE: Option<&str> = None;

/// Stops the propagation of mounts from and to other mount namespaces.
pub(crate) fn make_private() -> Result<(), LocalError> {
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)
        .context(|| "can't make the mount namespace private".to_owned())
}

/// Mounts one of the kernel's file systems, such as proc.
pub(crate) fn kernel(kind: &str, target: &Path, options: Option<&str>) -> Result<(), LocalError> {
    make_directory(target)?;
    mount(Some(kind), target, Some(kind), MsFlags::empty(), options)
        .context(|| format!("can't mount {kind} on {}", target.display()))
}

/// Lets nobody run a program from the file system that is mounted at `target`.
pub(crate) fn forbid_programs(target: &Path) -> Result<(), LocalError> {
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_NOEXEC | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(None::<&str>, target, None::<&str>, flags, None::<&str>)
        .context(|| format!("can't mount {} anew", target.display()))
}

/// Bind-mounts `source`, including everything mounted in it, at `target`.
pub(crate) fn bind(source: &Path, target: &Path) -> Result<(), LocalError> {
    if source.is_dir() {
        make_directory(target)?;
    } else if !target.exists() {
        if let Some(parent) = target.parent() {
            make_directory(parent)?;
        }
        fs::File::create(target).context(|| format!("can't make {}", target.display()))?;
    }
    mount(Some(source), target, NONE, MsFlags::MS_BIND | MsFlags::MS_REC, NONE)
        .context(|| format!("can't bind {} to {}", source.display(), target.display()))
}

/// Like [`bind`], but read-only.
pub(crate) fn bind_read_only(source: &Path, target: &Path) -> Result<(), LocalError> {
    bind(source, target)?;
    if !source.is_dir() {
        // Nothing can be mounted in a file, and when a pod's files are bound, our own /proc is out of reach.
        return remount_read_only(target);
    }
    let table = mountinfo::own().context(|| "can't read /proc/thread-self/mountinfo".to_owned())?;
    for mounted in table.iter().filter(|mounted| mounted.point.starts_with(target)) {
        remount_read_only(&mounted.point)?;
    }
    Ok(())
}

fn remount_read_only(target: &Path) -> Result<(), LocalError> {
    let mut flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    // A remount clears every flag that it doesn't repeat.
    let kept = statvfs(target).map_or(FsFlags::empty(), |found| found.flags());
    for (has, keep) in [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
    ] {
        flags.set(keep, kept.contains(has));
    }
    mount(NONE, target, NONE, flags, NONE).context(|| format!("can't make {} read-only", target.display()))
}

/// Makes `root`, which must be a mount point, the root of this mount namespace and drops the old one.
pub(crate) fn enter_root(root: &Path) -> Result<(), LocalError> {
    let failed = || format!("can't make {} the root directory", root.display());
    chdir(root).context(failed)?;
    // See pivot_root(2), "pivot_root(".", ".")": the old root is stacked on the new one, so it needs no directory in
    // it.
    pivot_root(".", ".").context(failed)?;
    umount2(".", MntFlags::MNT_DETACH).context(failed)?;
    chdir("/").context(failed)
}

/// Unmounts everything at `directory` or below, in this mount namespace.
pub(crate) fn unmount_all(directory: &Path) -> Result<(), LocalError> {
    let table = mountinfo::own().context(|| "can't read /proc/thread-self/mountinfo".to_owned())?;
    for mounted in table.iter().rev().filter(|mounted| mounted.point.starts_with(directory)) {
        umount2(&mounted.point, MntFlags::MNT_DETACH)
            .context(|| format!("can't unmount {}", mounted.point.display()))?;
    }
    Ok(())
}

pub(crate) fn make_directory(path: &Path) -> Result<(), LocalError> {
    fs::create_dir_all(path).context(|| format!("can't make {}", path.display()))
}

/// Removes everything in a directory of the cluster but the file `kept`. File systems mounted in it are unmounted first, never deleted.
pub(crate) fn empty(directory: &Path, kept: &Path) -> Result<(), LocalError> {
    let failed = || format!("can't remove what is in {}", directory.display());
    let directory = directory.canonicalize().context(failed)?;
    unmount_all(&directory)?;
    for entry in fs::read_dir(&directory).context(failed)? {
        let entry = entry.context(failed)?;
        let is_directory = entry.file_type().context(failed)?.is_dir();
        match entry.path() {
            path if path.file_name() == kept.file_name() => {}
            path if is_directory => fs::remove_dir_all(path).context(failed)?,
            path => fs::remove_file(path).context(failed)?,
        }
    }
    Ok(())
}

/// Removes a directory of the cluster. File systems mounted in it are unmounted first, never deleted.
pub(crate) fn remove_files(directory: &Path) -> Result<(), LocalError> {
    let failed = || format!("can't remove {}", directory.display());
    match directory.canonicalize() {
        Ok(directory) => {
            unmount_all(&directory)?;
            fs::remove_dir_all(&directory).context(failed)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).context(failed),
    }
}
