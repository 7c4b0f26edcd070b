//! The directory that holds the archives of a bundle until they are packed.

use std::{
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use crate::{BundleError, files::directory_of};
use host::{
    files::{FileError, absent_is_fine},
    opening::{open_directory, path_of},
    own_directory::own_directory,
};

/// Its directory of archives.
const PKGS: &str = "pkgs";
/// The bundle, until it is complete.
const BUNDLE: &str = "bundle";
/// An empty file, by which the next run knows the directory.
const MARK: &str = "downloads-of-flux-distribute";

/// The directory is beside the bundle, so that a rename finishes it, and has a fixed name, so that the next run finds it.
///
/// Whoever else can write to the directory above can put another directory or a symlink in its place at any time. So what is
/// in it is reached through descriptors.
pub(super) struct Downloads {
    /// For messages, and for the removal in the end.
    path: PathBuf,
    /// Locked until it is closed.
    directory: File,
    pkgs: File,
}

impl Downloads {
    /// Its name, for a bundle of that name; None if that is no file name.
    pub(super) fn name_beside(out: &Path) -> Option<PathBuf> {
        Some(directory_of(out).join(format!(".{}.download", out.file_name()?.to_string_lossy())))
    }

    pub(super) fn beside(out: &Path, parent: &Path) -> Result<Self, BundleError> {
        let Some(path) = Self::name_beside(out) else {
            return Err(BundleError::input(out, "it is not a file name"));
        };
        let write = || FileError::on("write to", &path);
        let directory = own_directory(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => BundleError::input(parent, "there is no such directory"),
            io::ErrorKind::PermissionDenied | io::ErrorKind::NotADirectory => BundleError::input(
                &path,
                format!("{error}: if it is there, move it away, or write the bundle to another directory"),
            ),
            io::ErrorKind::Unsupported => BundleError::input(parent, error.to_string()),
            _ => write()(error).into(),
        })?;
        directory.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => BundleError::Busy { path: out.display().to_string() },
            TryLockError::Error(error) => write()(error).into(),
        })?;
        // Another user may have moved another directory of ours here. Only a download makes the mark.
        let entries = fs::read_dir(path_of(&directory)).map_err(write())?;
        let names: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect();
        if !names.is_empty() && !names.iter().any(|name| name == MARK) {
            let problem = format!(
                "it has no file {MARK}, so it may not be a download's: move it away, or write the bundle to another directory"
            );
            return Err(BundleError::input(&path, problem));
        }
        fs::write(path_of(&directory).join(MARK), "").map_err(write())?;
        let pkgs = path_of(&directory).join(PKGS);
        match DirBuilder::new().mode(0o700).create(&pkgs) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(write()(error).into()),
            _ => {}
        }
        let pkgs = open_directory(&pkgs).map_err(write())?;
        Ok(Self { path, directory, pkgs })
    }

    /// The directory of archives, by its descriptor.
    pub(super) fn pkgs(&self) -> PathBuf {
        path_of(&self.pkgs)
    }

    /// The bundle, until it is complete.
    pub(super) fn bundle(&self) -> PathBuf {
        path_of(&self.directory).join(BUNDLE)
    }

    /// The name of the directory, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Turns a path of an archive into its name for messages.
    pub(super) fn name_of(&self) -> impl Fn(&Path) -> PathBuf + use<> {
        let (pkgs, named) = (self.pkgs(), self.path.join(PKGS));
        move |path| path.strip_prefix(&pkgs).map_or_else(|_| path.to_owned(), |below| named.join(below))
    }

    /// Removes the archives and the directory. The directory can be removed only by its name, which may be another one's by
    /// now: of that, an empty directory is all that can be removed.
    ///
    /// # Errors
    /// If something is left; the bundle is complete all the same.
    pub(super) fn remove(self) -> Result<(), FileError> {
        let below = path_of(&self.directory);
        let removed = fs::remove_dir_all(below.join(PKGS)).and_then(|()| fs::remove_file(below.join(MARK)));
        let removed = removed.and_then(|()| absent_is_fine(fs::remove_dir(&self.path)));
        removed.map_err(FileError::on("remove", &self.path))
    }
}
