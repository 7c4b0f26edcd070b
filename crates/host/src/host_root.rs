//! The host's root directory as the pod sees it: files of the host, without following its symlinks into our own root.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt},
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
    sys::stat::{Mode, mkdirat},
};

use super::{
    files::{aside, remove_if_there},
    opening::{open_uncovered, path_of, split},
};
use crate::{Root, trust};

/// The root of PID 1.
const HOST_ROOT: &str = "/proc/1/root";

/// Most tries to open a file while the kernel answers EAGAIN.
const MOST_TRIES: usize = 1000;

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

    /// A descriptor of what is at `path`, without opening it: for [`path_of`], and to connect to a socket.
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

/// Resolves the host's `path` for the pod's side; see [`path_of`].
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
    let (to, new) = (path_of(&dir).join(name), aside(&path_of(&dir).join(name)));
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
