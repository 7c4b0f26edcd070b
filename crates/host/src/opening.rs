//! Opens files and directories that other users may own. Each function says what it does not follow: symlinks, pipes, or what somebody
//! has mounted.

use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Component, Path, PathBuf},
};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2, readlinkat};

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

/// Opens a regular file for reading, and follows symlinks. Anything else is an error: reading a pipe could block, and a device has no end.
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

/// The first `longest` bytes of a file, or all of a shorter one. Follows symlinks and may block on a pipe: only for files that no user
/// can replace, such as those in /proc.
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

/// Opens the directory `name` in `directory` through neither a symlink nor a mount point: what a user has mounted may never
/// answer.
///
/// # Errors
/// If it can't be opened; `CrossesDevices` if something is mounted on it.
pub fn open_in(directory: &File, name: &OsStr) -> io::Result<File> {
    open_below(directory, Path::new(name), OFlag::O_RDONLY | OFlag::O_DIRECTORY)
}

/// A descriptor of what is at `way` below `directory`, a symlink itself, without opening it: for [`path_of`], and to connect to a
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

/// A descriptor of what is at `path`, a symlink too, without opening it; see [`path_of`].
///
/// # Errors
/// If there is nothing.
pub fn open_only_path(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags((OFlag::O_PATH | OFlag::O_NOFOLLOW).bits()).open(path)
}

/// Where the symlink leads that [`open_only_path`] has found, even if another one has taken its place since.
///
/// # Errors
/// `NotFound` if it is no symlink.
pub fn target_of(symlink: &File) -> io::Result<PathBuf> {
    Ok(readlinkat(symlink, "")?.into())
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

/// A path to what `fd` refers to, below /proc/self/fd: valid in this process while `fd` is open.
pub fn path_of(fd: &impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}
