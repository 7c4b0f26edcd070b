//! Writes files on the host so that nothing half-done is ever visible. For the pod's side: opens the host's files
//! without following the host's symlinks into our own root.

use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2},
    sys::{
        stat::{Mode, UtimensatFlags, mkdirat, utimensat},
        time::TimeSpec,
    },
    unistd::syncfs,
};

pub use super::{
    own_directory::own_directory,
    removal::{mounts_in, open_in, refuse_mounts, remove_all_if_there},
    underneath::{exchange_in, rename_in},
};
use crate::{Root, trust};
use hostapi::Refusal;

/// For `custom_flags` of [`OpenOptions`]: the last part of the path must not be a symlink.
pub const NO_SYMLINK: i32 = OFlag::O_NOFOLLOW.bits();

/// The root of PID 1.
const HOST_ROOT: &str = "/proc/1/root";

/// Most tries to open a file while the kernel answers EAGAIN.
const MOST_TRIES: usize = 1000;

/// An operation on a file or directory failed.
#[derive(Debug, thiserror::Error)]
#[error("can't {what} {}", path.display())]
pub struct FileError {
    /// The operation, a verb for the message: `read`, `write`.
    pub what: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// The system's error.
    #[source]
    pub source: io::Error,
}

impl FileError {
    /// Makes it of the system's error.
    pub fn on(what: &'static str, path: &Path) -> impl Fn(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self { what, path: path.clone(), source }
    }
}

/// Owner of a file, as numeric ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

impl Owner {
    /// root:root.
    pub const ROOT: Self = Self { uid: 0, gid: 0 };

    /// The owner in `metadata`.
    pub fn of(metadata: &fs::Metadata) -> Self {
        Self { uid: metadata.uid(), gid: metadata.gid() }
    }
}

/// Writes `content` to a temporary file and renames it to `path`, durably. Leaves a file alone that already is as
/// wanted.
///
/// Writers of one path must hold the host's lock, because each overwrites the temporary file that a killed one left.
///
/// # Errors
/// A [`Refusal`] that names the path.
pub fn write_atomic(path: &Path, content: &[u8], mode: u32, owner: Owner) -> Result<(), Refusal> {
    if is_already(path, content, mode, owner) {
        return Ok(());
    }
    let aside = aside(path);
    let write = || -> io::Result<()> {
        remove_all_if_there(&aside)?;
        // create_new does not follow a symlink, so the directory's owner can't redirect the write.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
        file.write_all(content)?;
        std::os::unix::fs::fchown(&file, Some(owner.uid), Some(owner.gid))?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()?;
        replace(&aside, path)?;
        sync_parent(path)
    };
    write().map_err(|error| Refusal::io("write", path, &error))
}

/// Renames `from` to `to` in the same directory, even if a user who owns the file at `to` has mounted something over it.
fn replace(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            refuse_mounts(to, trust::is_by_user)?;
            let ((above, from), (_, to)) = (split(from)?, split(to)?);
            rename_in(above, from, to)
        }
        renamed => renamed,
    }
}

fn is_already(path: &Path, content: &[u8], mode: u32, owner: Owner) -> bool {
    let is_same = || -> io::Result<bool> {
        let (above, name) = split(path)?;
        let file = open_plain_below(File::open(above)?, Path::new(name))?;
        let found = file.metadata()?;
        if (found.len(), found.mode() & 0o7777, Owner::of(&found)) != (content.len() as u64, mode, owner) {
            return Ok(false);
        }
        let mut there = Vec::new();
        file.take(found.len()).read_to_end(&mut there)?;
        Ok(there == content)
    };
    is_same().unwrap_or(false)
}

/// Makes the symlink `path` → `target` by one rename, replacing a symlink or file.
///
/// # Errors
/// A [`Refusal`] that names the path.
pub fn symlink_atomic(target: &Path, path: &Path) -> Result<(), Refusal> {
    if fs::read_link(path).is_ok_and(|found| found == target) {
        return Ok(());
    }
    replace_symlink(target, path).map_err(|error| Refusal::io("make the link", path, &error))
}

/// Like [`symlink_atomic`], but does not check first whether the link is already there.
///
/// # Errors
/// If the link can't be made or renamed.
pub fn replace_symlink(target: &Path, path: &Path) -> io::Result<()> {
    let aside = aside(path);
    remove_if_there(&aside)?;
    std::os::unix::fs::symlink(target, &aside)?;
    fs::rename(&aside, path)?;
    sync_parent(path)
}

/// The temporary name that [`write_atomic`] and [`symlink_atomic`] then rename to `path`.
pub fn aside(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".new");
    path.with_file_name(name)
}

/// Removes a file or symlink; succeeds if there is none.
///
/// # Errors
/// If it can't be removed.
pub fn remove_if_there(path: &Path) -> io::Result<()> {
    absent_is_fine(fs::remove_file(path))
}

/// Turns `NotFound` into success, for removals.
///
/// # Errors
/// Every other error of `result`.
pub fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Makes a directory with this mode and owner, or sets them on the directory that is there. Does not follow a symlink
/// at `path`; the directories above must be trusted already.
///
/// # Errors
/// A [`Refusal`] that names the path.
pub fn make_dir(path: &Path, mode: u32, owner: Owner) -> Result<(), Refusal> {
    let make = || -> io::Result<()> {
        match fs::create_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other?,
        }
        let dir = open_directory(path)?;
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

/// The directories above `path` that do not exist, topmost first.
pub fn missing_parents(path: &Path) -> Vec<PathBuf> {
    let mut missing: Vec<_> =
        path.ancestors().skip(1).take_while(|parent| !parent.exists()).map(Path::to_path_buf).collect();
    missing.reverse();
    missing
}

/// Makes entries of `path`'s directory durable: what was created or renamed there.
///
/// # Errors
/// If the directory can't be opened or synced.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
}

/// Writes everything on the file system of `path` to the disk: for many files, faster than to sync each of them.
///
/// # Errors
/// If `path` can't be opened, or syncfs(2) fails.
pub fn sync_file_system(path: &Path) -> io::Result<()> {
    Ok(syncfs(File::open(path)?)?)
}

/// Sets the times of access and change of a file, a directory, or a symlink itself, in seconds since 1970.
///
/// # Errors
/// If utimensat(2) fails.
pub fn set_times(path: &Path, seconds: i64) -> io::Result<()> {
    let time = TimeSpec::new(seconds, 0);
    Ok(utimensat(AT_FDCWD, path, &time, &time, UtimensatFlags::NoFollowSymlink)?)
}

/// The directory that `path` is in, and its name there.
///
/// # Errors
/// `InvalidInput` if the path ends in no name, such as `/` or `..`.
pub(crate) fn split(path: &Path) -> io::Result<(&Path, &OsStr)> {
    let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "the path ends in no name");
    let name = path.file_name().ok_or_else(no_name)?;
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    Ok((above.unwrap_or(Path::new(".")), name))
}

/// Opens a regular file for reading. Anything else is an error: reading a pipe could block, and a device has no end.
///
/// # Errors
/// If it can't be opened; `IsADirectory` for a directory, `InvalidInput` for anything else but a regular file.
pub fn open_plain(path: &Path) -> io::Result<File> {
    plain(OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?)
}

fn plain(file: File) -> io::Result<File> {
    match file.metadata()? {
        found if found.is_file() => Ok(file),
        found if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    }
}

/// The first `longest` bytes of a file, or all of a shorter one.
///
/// # Errors
/// If it can't be opened or read.
pub fn beginning_of(file: &Path, longest: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(file)?.take(longest).read_to_end(&mut text)?;
    Ok(text)
}

/// Opens a directory. The last part of `path` must not be a symlink.
///
/// # Errors
/// If it can't be opened; `NotADirectory` for anything else, a symlink too.
pub fn open_directory(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits()).open(path)
}

/// Opens a directory, unless something is mounted on it: what a user has mounted may never answer.
///
/// # Errors
/// As for [`open_directory`]; `CrossesDevices` if something is mounted on it.
pub fn open_uncovered(path: &Path) -> io::Result<File> {
    let (above, name) = split(path)?;
    open_in(&File::open(above)?, name)
}

/// Opens what is at `way` below `directory`, through neither a symlink nor a mount point: what a user has mounted may never answer.
///
/// # Errors
/// If it can't be opened; `CrossesDevices` if something is mounted on the way.
pub(crate) fn open_below(directory: impl AsFd, way: &Path, flags: OFlag) -> io::Result<File> {
    let how = OpenHow::new()
        .flags(flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV);
    Ok(File::from(openat2(directory, way, how)?))
}

/// A descriptor of what is at `way` below `directory`, a symlink itself, without opening it: for [`host_path`], and to connect to a
/// socket.
///
/// # Errors
/// As for [`open_below`].
pub fn open_only_path_below(directory: impl AsFd, way: &Path) -> io::Result<File> {
    open_below(directory, way, OFlag::O_PATH)
}

/// Opens the regular file at `way` below `directory` for reading, as [`open_below`] does.
///
/// # Errors
/// As for [`open_below`]; `InvalidInput` if it is something else.
pub fn open_plain_below(directory: impl AsFd, way: &Path) -> io::Result<File> {
    // Another user may have put a pipe there.
    plain(open_below(directory, way, OFlag::O_RDONLY | OFlag::O_NONBLOCK)?)
}

/// Examines `name` in `directory`, a symlink itself.
///
/// # Errors
/// If there is nothing; `CrossesDevices` if something is mounted on it.
pub fn look_in(directory: &File, name: &OsStr) -> io::Result<fs::Metadata> {
    open_only_path_below(directory, Path::new(name))?.metadata()
}

/// A descriptor of what is at `path`, a symlink too, without opening it; see [`host_path`].
///
/// # Errors
/// If there is nothing.
pub fn open_only_path(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags((OFlag::O_PATH | OFlag::O_NOFOLLOW).bits()).open(path)
}

/// True if something is at `path`, a symlink too. Does not ask what a user may have mounted over it.
///
/// # Errors
/// If the way to it can't be followed.
pub fn is_there(path: &Path) -> io::Result<bool> {
    match open_only_path(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        found => found.map(|_| true),
    }
}

/// True for a relative path without `..` or other special parts.
pub fn stays_below(path: &Path) -> bool {
    !path.as_os_str().is_empty() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// The host's root directory as the pod sees it. Paths and symlinks are resolved inside it, as if it were `/`.
#[derive(Debug)]
pub struct HostRoot {
    top: OwnedFd,
    /// Limits on the way to a file.
    way: ResolveFlag,
}

impl HostRoot {
    /// The root of PID 1.
    ///
    /// # Errors
    /// If the pod lacks hostPID or is not privileged.
    pub fn open() -> io::Result<Self> {
        Self::at(Path::new(HOST_ROOT))
    }

    /// Another directory in place of the host's root.
    ///
    /// # Errors
    /// If it can't be opened.
    pub fn at(dir: &Path) -> io::Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Self { top: nix::fcntl::open(dir, flags, Mode::empty())?, way: ResolveFlag::empty() })
    }

    /// As [`Self::at`], without what is mounted in the directory or on it: what a user has mounted may never answer.
    ///
    /// # Errors
    /// As for [`open_uncovered`].
    pub fn without_mounts(dir: &Path) -> io::Result<Self> {
        Ok(Self { top: open_uncovered(dir)?.into(), way: ResolveFlag::RESOLVE_NO_XDEV })
    }

    fn resolve(&self, path: &Path, flags: OFlag, mode: u32) -> io::Result<OwnedFd> {
        let how = OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC)
            .mode(Mode::from_bits_truncate(mode))
            .resolve(self.way | ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let mut tries = MOST_TRIES;
        loop {
            tries -= 1;
            match openat2(&self.top, path, how) {
                // A concurrent rename might have led out of the root: try again. But not for ever: while a user holds a
                // lease on the file (F_SETLEASE), the answer is the same.
                Err(Errno::EAGAIN) if tries > 0 => {}
                other => return Ok(other?),
            }
        }
    }

    /// A descriptor of what is at `path`, without opening it: for [`host_path`], and to connect to a socket.
    ///
    /// # Errors
    /// If the path can't be resolved.
    pub fn open_path(&self, path: &Path) -> io::Result<OwnedFd> {
        self.resolve(path, OFlag::O_PATH, 0)
    }

    /// As [`Self::open_path`], but of a symlink itself.
    ///
    /// # Errors
    /// If the path can't be resolved.
    pub fn open_link(&self, path: &Path) -> io::Result<File> {
        Ok(File::from(self.resolve(path, OFlag::O_PATH | OFlag::O_NOFOLLOW, 0)?))
    }

    /// Opens the file or directory at `path` for reading. Does not block on a pipe, which other users may have put
    /// there.
    ///
    /// # Errors
    /// If it can't be opened; `InvalidInput` if it is neither a file nor a directory.
    pub fn open_file(&self, path: &Path) -> io::Result<File> {
        let file = File::from(self.resolve(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK, 0)?);
        let found = file.metadata()?;
        if !(found.is_file() || found.is_dir()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a file nor a directory"));
        }
        Ok(file)
    }

    /// Opens the directory `path`, after making it and the missing directories above it (mode 0755).
    ///
    /// # Errors
    /// If one can't be made or opened.
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

/// Resolves the host's `path` for the pod's side; see [`host_path`].
///
/// # Errors
/// As for [`HostRoot::open`] and [`HostRoot::open_path`].
pub fn open_in_host_root(path: &Path) -> io::Result<OwnedFd> {
    HostRoot::open()?.open_path(path)
}

/// Opens a file of the host for reading, from the pod's side.
///
/// # Errors
/// As for [`HostRoot::open`] and [`HostRoot::open_file`].
pub fn open_host_file(path: &Path) -> io::Result<File> {
    HostRoot::open()?.open_file(path)
}

/// Makes a directory of the host from the pod's side; see [`HostRoot::make_dirs`].
///
/// # Errors
/// As for [`HostRoot::open`] and [`HostRoot::make_dirs`].
pub fn make_dirs_in_host_root(path: &Path) -> io::Result<OwnedFd> {
    HostRoot::open()?.make_dirs(path)
}

/// Copies the host's file `from` to the host's path `to`, under a temporary name that is then renamed; only root can
/// read it.
///
/// # Errors
/// If other users can change what root has in the directory of `to`, or either file can't be opened, read or written; then `to` is
/// unchanged.
pub fn copy_in_host_root(from: &Path, to: &Path) -> io::Result<()> {
    if !to.is_absolute() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not an absolute path"));
    }
    let (above, name) = split(to)?;
    let dir = trust::directory_for_files(&Root::at(HOST_ROOT), above)?;
    let (to, new) = (host_path(&dir).join(name), aside(&host_path(&dir).join(name)));
    // Left by a copy that was killed.
    remove_if_there(&new)?;
    let written = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        io::copy(&mut open_host_file(from)?, &mut file)?;
        file.sync_all()?;
        fs::rename(&new, &to)
    };
    written().inspect_err(|_| drop(fs::remove_file(&new)))
}

/// A path to what `fd` refers to, valid while `fd` is open.
pub fn host_path(fd: &impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}
