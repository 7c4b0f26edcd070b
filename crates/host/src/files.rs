//! Writing on the host so that nothing half-done is ever visible, and, for the pod's side, finding the host's files
//! without following the host's symlinks into our own root.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
    sys::stat::{Mode, mkdirat},
};

use super::mountinfo;
use hostapi::Refusal;

/// Owner of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl Owner {
    /// root:root.
    pub const ROOT: Self = Self { uid: 0, gid: 0 };

    /// The owner of what `metadata` speaks of.
    pub fn of(metadata: &fs::Metadata) -> Self {
        Self { uid: metadata.uid(), gid: metadata.gid() }
    }
}

/// Writes `content` aside and renames it to `path`, durably. A file that is already just so is not touched.
///
/// Writers of one path must hold the host's lock: what a killed one left aside is overwritten.
///
/// # Errors
/// A [`Refusal`] that names the path.
pub fn write_atomic(path: &Path, content: &[u8], mode: u32, owner: Owner) -> Result<(), Refusal> {
    if is_already(path, content, mode, owner) {
        return Ok(());
    }
    let aside = aside(path);
    let write = || -> io::Result<()> {
        remove_if_there(&aside)?;
        // create_new does not follow a symlink, so a directory's owner can't lead us elsewhere.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
        file.write_all(content)?;
        std::os::unix::fs::fchown(&file, Some(owner.uid), Some(owner.gid))?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&aside, path)?;
        sync_parent(path)
    };
    write().map_err(|error| Refusal::io("write", path, &error))
}

fn is_already(path: &Path, content: &[u8], mode: u32, owner: Owner) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| {
        metadata.is_file()
            && metadata.len() == content.len() as u64
            && metadata.mode() & 0o7777 == mode
            && Owner::of(&metadata) == owner
    }) && fs::read(path).is_ok_and(|found| found == content)
}

/// Makes the symlink `path` → `target`, in place of whatever symlink or file is there, by one rename.
///
/// # Errors
/// A [`Refusal`] that names the path.
pub fn symlink_atomic(target: &Path, path: &Path) -> Result<(), Refusal> {
    if fs::read_link(path).is_ok_and(|found| found == target) {
        return Ok(());
    }
    replace_symlink(target, path).map_err(|error| Refusal::io("make the link", path, &error))
}

/// As [`symlink_atomic`].
///
/// # Errors
/// What the system says.
pub fn replace_symlink(target: &Path, path: &Path) -> io::Result<()> {
    let aside = aside(path);
    remove_if_there(&aside)?;
    std::os::unix::fs::symlink(target, &aside)?;
    fs::rename(&aside, path)?;
    sync_parent(path)
}

/// Where [`write_atomic`] and [`symlink_atomic`] prepare what they then rename to `path`.
pub fn aside(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".new");
    path.with_file_name(name)
}

/// Removes a file or symlink; that there is none is success.
///
/// # Errors
/// What the system says.
pub fn remove_if_there(path: &Path) -> io::Result<()> {
    absent_is_fine(fs::remove_file(path))
}

/// Removes a directory with all that is in it, or a file; that there is none is success.
///
/// # Errors
/// What the system says; [`refuse_mounts`], and then nothing was removed.
pub fn remove_all_if_there(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => refuse_mounts(path, |_| false).and_then(|()| fs::remove_dir_all(path)),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    absent_is_fine(removed)
}

/// What is mounted in a directory of ours is somebody else's, and a removal would go through it. `is_spared`: what is not
/// removed, of the paths as they are without symlinks.
///
/// # Errors
/// `ResourceBusy` with the first mount point; no /proc.
pub fn refuse_mounts(directory: &Path, is_spared: impl Fn(&Path) -> bool) -> io::Result<()> {
    // mountinfo knows nothing of the symlinks that lead there.
    let directory = match directory.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    let points = mountinfo::own()?.into_iter().map(|mount| mount.point);
    let mut inside = points.filter(|point| point.starts_with(&directory) && !is_spared(point));
    match inside.next() {
        Some(point) => {
            let words = format!("something is mounted on {}: unmount it", point.display());
            Err(io::Error::new(io::ErrorKind::ResourceBusy, words))
        }
        None => Ok(()),
    }
}

/// What is not there need not be taken off.
///
/// # Errors
/// Any but `NotFound`.
pub fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Makes a directory with that mode and owner, or gives them to the one that is there. A symlink in its place is not followed;
/// what is above it must be trusted already.
///
/// # Errors
/// A [`Refusal`] that names the path.
pub fn make_dir(path: &Path, mode: u32, owner: Owner) -> Result<(), Refusal> {
    let make = || -> io::Result<()> {
        match fs::create_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other?,
        }
        let flags = (OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits();
        let dir = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        let metadata = dir.metadata()?;
        if Owner::of(&metadata) != owner {
            std::os::unix::fs::fchown(&dir, Some(owner.uid), Some(owner.gid))?;
        }
        if metadata.mode() & 0o7777 != mode {
            dir.set_permissions(Permissions::from_mode(mode))?;
        }
        Ok(())
    };
    make().map_err(|error| Refusal::io("make the directory", path, &error))
}

/// The directories above `path` that are not there yet, topmost first.
pub fn missing_parents(path: &Path) -> Vec<PathBuf> {
    let mut missing: Vec<_> =
        path.ancestors().skip(1).take_while(|parent| !parent.exists()).map(Path::to_path_buf).collect();
    missing.reverse();
    missing
}

/// Makes what is renamed or made in `path`'s directory durable.
///
/// # Errors
/// What the system says.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
}

/// True for a relative path that stays below where it starts.
pub fn stays_below(path: &Path) -> bool {
    !path.as_os_str().is_empty() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// The host's root directory as the pod sees it. Every path is resolved inside it, symlinks too, as if it were `/`.
#[derive(Debug)]
pub struct HostRoot(OwnedFd);

impl HostRoot {
    /// The root of PID 1.
    ///
    /// # Errors
    /// Without hostPID and privileged.
    pub fn open() -> io::Result<Self> {
        Self::at(Path::new("/proc/1/root"))
    }

    /// Some other directory.
    ///
    /// # Errors
    /// What the system says.
    pub fn at(dir: &Path) -> io::Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Self(nix::fcntl::open(dir, flags, Mode::empty())?))
    }

    fn resolve(&self, path: &Path, flags: OFlag, mode: u32) -> io::Result<OwnedFd> {
        let how = OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC)
            .mode(Mode::from_bits_truncate(mode))
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        loop {
            match openat2(&self.0, path, how) {
                // The kernel could not rule out that a rename moved us out of the root meanwhile.
                Err(Errno::EAGAIN) => {}
                other => return Ok(other?),
            }
        }
    }

    /// What is at `path`, without opening it: for [`host_path`], and to connect to a socket.
    ///
    /// # Errors
    /// What the system says.
    pub fn open_path(&self, path: &Path) -> io::Result<OwnedFd> {
        self.resolve(path, OFlag::O_PATH, 0)
    }

    /// The file or directory at `path`, to read. A pipe, which somebody may have put there, is not waited for.
    ///
    /// # Errors
    /// What the system says; `InvalidInput` if it is neither a file nor a directory.
    pub fn open_file(&self, path: &Path) -> io::Result<File> {
        let file = File::from(self.resolve(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK, 0)?);
        let found = file.metadata()?;
        if !(found.is_file() || found.is_dir()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is neither a file nor a directory"));
        }
        Ok(file)
    }

    /// The directory `path`, made with all those above it where they are missing (mode 0755).
    ///
    /// # Errors
    /// What the system says.
    pub fn make_dirs(&self, path: &Path) -> io::Result<OwnedFd> {
        let mut so_far = PathBuf::from("/");
        let mut dir = self.resolve(&so_far, OFlag::O_PATH | OFlag::O_DIRECTORY, 0)?;
        for part in path.components() {
            let Component::Normal(name) = part else { continue };
            match mkdirat(&dir, Path::new(name), Mode::from_bits_truncate(0o755)) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(error) => return Err(error.into()),
            }
            so_far.push(name);
            dir = self.resolve(&so_far, OFlag::O_PATH | OFlag::O_DIRECTORY, 0)?;
        }
        Ok(dir)
    }
}

/// The host's `path` for the pod's side, found inside the host's root; see [`host_path`].
///
/// # Errors
/// What the system says.
pub fn open_in_host_root(path: &Path) -> io::Result<OwnedFd> {
    HostRoot::open()?.open_path(path)
}

/// Opens a file of the host for reading, from the pod's side.
///
/// # Errors
/// What the system says.
pub fn open_host_file(path: &Path) -> io::Result<File> {
    HostRoot::open()?.open_file(path)
}

/// Makes a directory of the host from the pod's side; see [`HostRoot::make_dirs`].
///
/// # Errors
/// What the system says.
pub fn make_dirs_in_host_root(path: &Path) -> io::Result<OwnedFd> {
    HostRoot::open()?.make_dirs(path)
}

/// Copies the host's file `from` to the host's path `to`: written aside and renamed, readable by root alone.
///
/// # Errors
/// Either file's; then `to` is as it was.
pub fn copy_in_host_root(from: &Path, to: &Path) -> io::Result<()> {
    let name = to.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::IsADirectory))?;
    let dir = open_in_host_root(to.parent().unwrap_or(Path::new("/")))?;
    let (to, new) = (host_path(&dir).join(name), aside(&host_path(&dir).join(name)));
    // A copy that was killed.
    remove_if_there(&new)?;
    let written = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        io::copy(&mut open_host_file(from)?, &mut file)?;
        file.sync_all()?;
        fs::rename(&new, &to)
    };
    written().inspect_err(|_| drop(fs::remove_file(&new)))
}

/// A path that leads to what `fd` holds, for as long as `fd` is open.
pub fn host_path(fd: &impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}
