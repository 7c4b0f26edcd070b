//! Files that the user names on the command line, read and written atomically.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use host::{
    files::FileError,
    opening::{look_in, open_only_path, open_plain_below, target_of},
    trust::{is_own, is_trusted},
};

/// Prefix of the names of unfinished files; six letters or digits follow.
const ASIDE: &str = ".flux-distribute-";

/// The unfinished files of this process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Linux follows as many symlinks.
const MOST_LINKS: usize = 40;

/// Prints the command's result to stdout.
pub(crate) fn print(text: &str) -> Result<(), FileError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(FileError::on("write to", Path::new("stdout")))
}

/// The path that a rename must replace in order to write `path`. If `path` is a symlink, that is the file it points to,
/// so that the link survives. Fails if anything but a regular file is there, so that a device is never replaced.
///
/// # Errors
/// Also if another user made the symlink in a directory that users share: it would choose which file is replaced. The kernel
/// refuses a write through it in directories such as /tmp (`fs.protected_symlinks` in proc_sys_fs(5)), but no rename.
pub(crate) fn rename_target(path: &Path) -> io::Result<PathBuf> {
    if fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(path.to_owned());
    }
    let mut target = path.to_owned();
    let mut links = 0;
    while let Some(next) = pointed_to(&target)? {
        links += 1;
        if links > MOST_LINKS {
            return Err(io::Error::other("it is one of too many symlinks to each other"));
        }
        target = next;
    }
    // Only the directory: a symlink that takes the file's place after the look above must not be followed.
    let name = target.file_name().unwrap_or_default();
    let target = fs::canonicalize(directory_of(&target))?.join(name);
    match fs::symlink_metadata(&target)?.is_file() {
        true => Ok(target),
        false => Err(io::Error::new(io::ErrorKind::AlreadyExists, "something other than a regular file is there")),
    }
}

/// Where `path` points to, if it is a symlink.
fn pointed_to(path: &Path) -> io::Result<Option<PathBuf>> {
    // One look: another user may put another symlink there between two.
    let link = open_only_path(path)?;
    let found = link.metadata()?;
    if !found.is_symlink() {
        return Ok(None);
    }
    if !is_trusted(found.uid()) {
        let words = format!("it is a symlink that the user with uid {} has made; name another file", found.uid());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, words));
    }
    Ok(Some(directory_of(path).join(target_of(&link)?)))
}

/// The directory of a file.
pub(crate) fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file under a temporary name that gets its final name when it is complete. Dropping it removes it; what a killed
/// run left behind, the next run that writes to the same directory removes.
pub(crate) struct Aside {
    /// Locked until it is closed.
    file: File,
    path: tempfile::TempPath,
    _listed: Listed,
}

/// A file in [`UNFINISHED`], until this is dropped.
struct Listed(PathBuf);

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Listed {
    fn drop(&mut self) {
        unfinished().retain(|path| *path != self.0);
    }
}

/// Removes the unfinished files of this process, which is about to end. While the result lives, no other one is made.
pub(crate) fn remove_unfinished() -> impl Drop {
    let mut files = unfinished();
    for path in files.drain(..) {
        let _ = fs::remove_file(path);
    }
    files
}

impl Aside {
    /// Creates the file in `directory`, which must be the target's own so that a rename suffices in the end.
    pub(crate) fn in_directory(directory: &Path) -> io::Result<Self> {
        drop_leftovers(directory);
        loop {
            let (file, path, listed) = {
                let mut files = unfinished();
                let (file, path) = tempfile::Builder::new().prefix(ASIDE).tempfile_in(directory)?.into_parts();
                files.push(path.to_path_buf());
                let listed = Listed(path.to_path_buf());
                (file, path, listed)
            };
            file.lock()?;
            // Until the lock was held, another run could take this file for a leftover and delete it.
            if file.metadata()?.nlink() > 0 {
                return Ok(Self { file, path, _listed: listed });
            }
        }
    }

    /// A handle for writing.
    pub(crate) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Syncs the file, makes it world-readable and renames it to `target`.
    pub(crate) fn keep(self, target: &Path) -> io::Result<()> {
        publish(&self.file)?;
        self.path.persist(target).map_err(|error| error.error)
    }
}

/// Makes `file` world-readable (mode 0644) and syncs it to disk.
pub(crate) fn publish(file: &File) -> io::Result<()> {
    file.set_permissions(fs::Permissions::from_mode(0o644))?;
    file.sync_all()
}

/// Removes the files that killed runs left: a running one holds a lock on its file. Failures are ignored, since a
/// leftover does no harm.
fn drop_leftovers(directory: &Path) {
    let is_ours = |name: &str| {
        let end = name.strip_prefix(ASIDE).filter(|end| end.len() == 6);
        end.is_some_and(|end| end.bytes().all(|letter| letter.is_ascii_alphanumeric()))
    };
    let Ok(above) = File::open(directory) else { return };
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        // In a directory that users share, anybody can have put a device, a pipe or a file system of their own there.
        if name.to_str().is_some_and(is_ours)
            && look_in(&above, &name).is_ok_and(|found| found.is_file() && is_own(found.uid()))
            && let Ok(file) = open_plain_below(&above, Path::new(&name))
            && file.try_lock().is_ok()
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::needs::{Need, skips_without};

    #[test]
    fn only_a_regular_file_is_replaced_and_a_symlink_survives() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("plain"), "").unwrap();
        std::os::unix::fs::symlink("plain", path("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", path("dangling")).unwrap();
        std::os::unix::fs::symlink("loop", path("loop")).unwrap();
        let _socket = UnixListener::bind(path("socket")).unwrap();
        let real = fs::canonicalize(path("plain")).unwrap();
        assert_eq!(rename_target(&path("new")).unwrap(), path("new"));
        assert_eq!(rename_target(&path("plain")).unwrap(), real);
        assert_eq!(rename_target(&path("link")).unwrap(), real);
        for name in ["dangling", "loop", "socket", ".", "..", "plain/.."] {
            assert!(rename_target(&path(name)).is_err(), "{name}");
        }
    }

    #[test]
    fn a_symlink_that_another_user_made_is_not_followed() {
        if skips_without([Need::Root]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (link, file) = (dir.path().join("link"), dir.path().join("file"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        assert_eq!(rename_target(&link).unwrap(), fs::canonicalize(&file).unwrap());
        std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
        // Also not in that user's own directory, whatever its mode.
        for (owner, mode) in [(0, 0o1777), (0, 0o755), (65534, 0o700), (65534, 0o755)] {
            std::os::unix::fs::chown(dir.path(), Some(owner), None).unwrap();
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
            let target = rename_target(&link);
            assert!(target.is_err(), "{owner} {mode:o}: {target:?}");
        }
    }

    #[test]
    fn what_other_users_put_beside_the_target_is_not_opened() {
        if skips_without([Need::Root]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("file"), "").unwrap();
        std::os::unix::fs::symlink("file", path(".flux-distribute-symlin")).unwrap();
        fs::write(path(".flux-distribute-theirs"), "").unwrap();
        std::os::unix::fs::chown(path(".flux-distribute-theirs"), Some(65534), None).unwrap();
        drop(Aside::in_directory(dir.path()).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn leftovers_of_killed_runs_are_removed_but_files_of_running_ones_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let others = [".flux-distribute-other", ".flux-distribute-a.b.c", ".lock-abcdef", ".flux-distribute.json"];
        for name in others.iter().chain(&[".flux-distribute-abc123"]) {
            fs::write(dir.path().join(name), "").unwrap();
        }
        fs::create_dir(dir.path().join(".flux-distribute-direct")).unwrap();
        let living = Aside::in_directory(dir.path()).unwrap();
        let second = Aside::in_directory(dir.path()).unwrap();
        assert!(living.path.exists() && second.path.exists());
        assert!(!dir.path().join(".flux-distribute-abc123").exists());
        assert!(others.iter().all(|name| dir.path().join(name).exists()));
        drop(second);
        living.file().unwrap().write_all(b"whole").unwrap();
        living.keep(&dir.path().join("named")).unwrap();
        assert_eq!(fs::read(dir.path().join("named")).unwrap(), b"whole");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), others.len() + 2);
    }
}
