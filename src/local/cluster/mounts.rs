//! Mounts, as far as nodes and pods are made of them. All of it happens in mount namespaces of their own: nothing is
//! ever mounted where the machine would see it.

use std::{
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::statvfs::{FsFlags, statvfs},
    unistd::{chdir, pivot_root},
};

use crate::local::error::{Context, LocalError};

const NONE: Option<&str> = None;

/// One line of mountinfo (proc_pid_mountinfo(5)).
#[derive(Clone, Debug)]
pub(crate) struct Mount {
    pub(crate) target: PathBuf,
    pub(crate) kind: String,
    pub(crate) super_options: String,
}

/// The mounts that this thread sees.
pub(crate) fn table() -> io::Result<Vec<Mount>> {
    Ok(parse(&fs::read_to_string("/proc/thread-self/mountinfo")?))
}

pub(crate) fn parse(text: &str) -> Vec<Mount> {
    text.lines()
        .filter_map(|line| {
            let (mount, filesystem) = line.split_once(" - ")?;
            let mut filesystem = filesystem.split(' ');
            Some(Mount {
                target: unescape(mount.split(' ').nth(4)?),
                kind: filesystem.next()?.to_owned(),
                super_options: filesystem.nth(1).unwrap_or_default().to_owned(),
            })
        })
        .collect()
}

/// Blanks, tabs, line ends and backslashes are written as three octal digits.
fn unescape(field: &str) -> PathBuf {
    let bytes = field.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = field.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (bytes[at], octal) {
            (b'\\', Some(byte)) => {
                plain.push(byte);
                at += 4;
            }
            (byte, _) => {
                plain.push(byte);
                at += 1;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(plain))
}

/// Nothing that happens from here on in this mount namespace is seen in another.
pub(crate) fn make_private() -> Result<(), LocalError> {
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)
        .context(|| "can't make the mount namespace private".to_owned())
}

/// Mounts a file system of the kernel, such as proc.
pub(crate) fn kernel(kind: &str, target: &Path, options: Option<&str>) -> Result<(), LocalError> {
    make_directory(target)?;
    mount(Some(kind), target, Some(kind), MsFlags::empty(), options)
        .context(|| format!("can't mount {kind} on {}", target.display()))
}

/// Shows `source` with all that is mounted in it at `target`.
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

/// As [`bind`], read-only.
pub(crate) fn bind_read_only(source: &Path, target: &Path) -> Result<(), LocalError> {
    bind(source, target)?;
    if !source.is_dir() {
        // Nothing is mounted in a file; and a pod's files are bound where our own /proc is out of reach.
        return remount_read_only(target);
    }
    let table = table().context(|| "can't read /proc/thread-self/mountinfo".to_owned())?;
    for mounted in table.iter().filter(|mounted| mounted.target.starts_with(target)) {
        remount_read_only(&mounted.target)?;
    }
    Ok(())
}

fn remount_read_only(target: &Path) -> Result<(), LocalError> {
    let mut flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    // What a remount does not name again is taken off.
    let kept = statvfs(target).map(|found| found.flags()).unwrap_or(FsFlags::empty());
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
    // pivot_root(2), "pivot_root(".", ".")": the old root is stacked on the new one, so it needs no place in it.
    pivot_root(".", ".").context(failed)?;
    umount2(".", MntFlags::MNT_DETACH).context(failed)?;
    chdir("/").context(failed)
}

/// Takes off whatever is mounted at `directory` or below, in this mount namespace.
pub(crate) fn unmount_all(directory: &Path) -> Result<(), LocalError> {
    let table = table().context(|| "can't read /proc/thread-self/mountinfo".to_owned())?;
    for mounted in table.iter().rev().filter(|mounted| mounted.target.starts_with(directory)) {
        umount2(&mounted.target, MntFlags::MNT_DETACH)
            .context(|| format!("can't unmount {}", mounted.target.display()))?;
    }
    Ok(())
}

pub(crate) fn make_directory(path: &Path) -> Result<(), LocalError> {
    fs::create_dir_all(path).context(|| format!("can't make {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_with_blanks_is_read_as_it_is() {
        let table = parse("36 35 98:0 / /mnt/a\\040b\\134 rw,noatime shared:1 - ext3 /dev/root rw,errors=continue\n");
        assert_eq!(table[0].target, Path::new("/mnt/a b\\"));
        assert_eq!(table[0].kind, "ext3");
        assert_eq!(table[0].super_options, "rw,errors=continue");
    }
}
