//! Writes files on the host so that nothing half-done is ever visible.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{AT_FDCWD, OFlag},
    sys::{
        stat::{UtimensatFlags, utimensat},
        time::TimeSpec,
    },
    unistd::syncfs,
};

use super::{
    opening::{open_directory, open_plain_below, split},
    removal::{refuse_mounts, remove_all_if_there},
    trust,
    underneath::rename_in,
};
use hostapi::Refusal;

/// For `custom_flags` of [`OpenOptions`]: the last part of the path must not be a symlink.
pub const NO_SYMLINK: i32 = OFlag::O_NOFOLLOW.bits();

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

/// Like [`symlink_atomic`], for a path through an open directory, which an error must not name.
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

/// Turns `NotFound` into success.
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
