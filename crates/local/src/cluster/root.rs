//! A node's root directory: the part on disk, made once ([`prepare`]), and the mounts of each boot ([`mount`]). /usr is
//! the machine's, read-only; everything writable is the node's own.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use super::{
    cgroup::Hierarchy,
    io::write,
    layout::{Cluster, Layout},
    mounts,
};
use crate::error::{Context, LocalError};

/// Writable directories of the root. /run is a tmpfs, so a reboot empties it, as on a real machine.
const WRITABLE: [(&str, u32); 9] = [
    ("etc", 0o755),
    ("opt", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
    ("var/tmp", 0o1777),
    ("root", 0o700),
    ("home", 0o755),
    ("srv", 0o755),
    ("tmp", 0o1777),
];
/// Mount points.
const MOUNTED: [&str; 5] = ["usr", "proc", "sys", "dev", "run"];
/// Links or directories, whichever the machine has.
const MERGED: [&str; 6] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"];
/// Parts of /etc that are not copied: the machine's secrets, and files that are written anew.
const NOT_COPIED: [&str; 14] = [
    "shadow",
    "shadow-",
    "gshadow",
    "gshadow-",
    "ssh",
    "ssl/private",
    "sudoers",
    "sudoers.d",
    "security/opasswd",
    "krb5.keytab",
    "hostname",
    "hosts",
    "machine-id",
    "mtab",
];
/// Where a node sees [`Layout::image`]; a real node has the directories of kubelet and containerd there.
pub(crate) const IMAGE: &str = "/var/lib/kubelet/flux-distribute-local";

/// Makes the part of a node's root that is on disk.
pub(crate) fn prepare(root: &Path, name: &str, hosts: &str) -> Result<(), LocalError> {
    for (directory, mode) in WRITABLE {
        let path = root.join(directory);
        mounts::make_directory(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))
            .context(|| format!("can't set the mode of {}", path.display()))?;
    }
    for directory in MOUNTED {
        mounts::make_directory(&root.join(directory))?;
    }
    for name in MERGED {
        let machine = Path::new("/").join(name);
        if machine.is_symlink() {
            let target = fs::read_link(&machine).context(|| format!("can't read the link {}", machine.display()))?;
            replace_link(&target, &root.join(name))?;
        } else if machine.is_dir() {
            mounts::make_directory(&root.join(name))?;
        }
    }
    replace_link(Path::new("../run"), &root.join("var/run"))?;
    let not_copied: Vec<PathBuf> = NOT_COPIED.iter().map(|name| Path::new("/etc").join(name)).collect();
    copy_tree(Path::new("/etc"), &root.join("etc"), &not_copied)?;
    write(&root.join("etc/hostname"), &format!("{name}\n"))?;
    write(&root.join("etc/machine-id"), &format!("{}\n", uuid::Uuid::new_v4().simple()))?;
    write(&root.join("etc/hosts"), hosts)
}

/// Makes the node's mounts in this mount namespace, which is private, and makes `root` its root directory. Called by
/// the first process in the node's PID namespace, which is also in the node's other namespaces.
pub(crate) fn mount(
    layout: &Layout,
    cluster: &Cluster,
    name: &str,
    hierarchies: &[Hierarchy],
) -> Result<(), LocalError> {
    let root = layout.node_root(name);
    let root = root.canonicalize().context(|| format!("can't find {}", root.display()))?;
    mounts::bind(&root, &root)?;
    mounts::bind_read_only(Path::new("/usr"), &root.join("usr"))?;
    for name in MERGED {
        let machine = Path::new("/").join(name);
        if !machine.is_symlink() && machine.is_dir() {
            mounts::bind_read_only(&machine, &root.join(name))?;
        }
    }
    mounts::kernel("proc", &root.join("proc"), None)?;
    mounts::kernel("sysfs", &root.join("sys"), None)?;
    layout.kind(name)?.mount(&root)?;
    mount_cgroups(&root, hierarchies)?;
    mounts::bind(Path::new("/dev"), &root.join("dev"))?;
    mounts::kernel("tmpfs", &root.join("dev/shm"), Some("mode=1777"))?;
    if root.join("dev/mqueue").is_dir() {
        mounts::kernel("mqueue", &root.join("dev/mqueue"), None)?;
    }
    mounts::kernel("tmpfs", &root.join("run"), Some("mode=755"))?;
    // As on Debian and Ubuntu, so that nothing comes to rely on programs there.
    mounts::forbid_programs(&root.join("run"))?;
    new_boot(&root)?;
    mounts::bind_read_only(&layout.image(), &inside(&root, Path::new(IMAGE)))?;
    for shown in &cluster.shown {
        mounts::bind_read_only(shown, &inside(&root, shown))?;
    }
    mounts::enter_root(&root)
}

/// Mounts the cgroup hierarchies. In the node's cgroup namespace, each shows the node's cgroup as its root.
fn mount_cgroups(root: &Path, hierarchies: &[Hierarchy]) -> Result<(), LocalError> {
    if !hierarchies.iter().any(|hierarchy| hierarchy.mount == Path::new("/sys/fs/cgroup")) {
        mounts::kernel("tmpfs", &root.join("sys/fs/cgroup"), Some("mode=755"))?;
    }
    for hierarchy in hierarchies.iter().filter(|hierarchy| hierarchy.mount.starts_with("/sys/fs/cgroup")) {
        let target = inside(root, &hierarchy.mount);
        match &hierarchy.controllers {
            Some(controllers) => mounts::kernel("cgroup", &target, Some(controllers))?,
            None => mounts::kernel("cgroup2", &target, None)?,
        }
    }
    // If several controllers share a hierarchy, a symlink per controller points to the mount.
    for entry in fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten() {
        if let Ok(target) = fs::read_link(entry.path()) {
            replace_link(&target, &root.join("sys/fs/cgroup").join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Gives the node a new boot id; the kernel's is the machine's.
fn new_boot(root: &Path) -> Result<(), LocalError> {
    let file = root.join("run/boot-id");
    write(&file, &format!("{}\n", uuid::Uuid::new_v4()))?;
    mounts::bind_read_only(&file, &root.join("proc/sys/kernel/random/boot_id"))
}

/// The path in a node's root that corresponds to an absolute path.
fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn replace_link(target: &Path, link: &Path) -> Result<(), LocalError> {
    let _ = fs::remove_file(link);
    symlink(target, link).context(|| format!("can't make the link {}", link.display()))
}

/// Copies files, directories and symlinks, with permissions but not owners; everything else (sockets) is skipped.
fn copy_tree(from: &Path, to: &Path, not_copied: &[PathBuf]) -> Result<(), LocalError> {
    let failed = || format!("can't copy {}", from.display());
    for entry in fs::read_dir(from).context(failed)? {
        let entry = entry.context(failed)?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if not_copied.contains(&source) {
            continue;
        }
        let kind = entry.file_type().context(failed)?;
        if kind.is_symlink() {
            let link = fs::read_link(&source).context(failed)?;
            // /etc/resolv.conf is often a symlink into the machine's /run, which the node doesn't have.
            if link.starts_with("/run") || link.starts_with("../run") {
                let _ = fs::copy(&source, &target);
            } else {
                replace_link(&link, &target)?;
            }
        } else if kind.is_dir() {
            mounts::make_directory(&target)?;
            let mode = fs::metadata(&source).context(failed)?.permissions();
            fs::set_permissions(&target, mode).context(|| format!("can't set the mode of {}", target.display()))?;
            copy_tree(&source, &target, not_copied)?;
        } else if kind.is_file() {
            fs::copy(&source, &target).context(|| format!("can't copy {}", source.display()))?;
        }
    }
    Ok(())
}
