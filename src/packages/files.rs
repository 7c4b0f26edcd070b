//! Files that people name on the command line.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use nix::libc::O_NONBLOCK;

/// Opens a plain file. A pipe would be waited for, and a device has no end.
pub(in crate::packages) fn open_plain(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
    match file.metadata()? {
        found if found.is_file() => Ok(file),
        found if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a plain file")),
    }
}

/// Where a file that is wanted at `path` is to be renamed to: a symlink stays one, and what is no plain file, such as a
/// device, is never replaced.
pub(in crate::packages) fn rename_target(path: &Path) -> io::Result<PathBuf> {
    let target = match fs::canonicalize(path) {
        Ok(target) => target,
        Err(e) if e.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(path).is_err() => {
            return Ok(path.to_owned());
        }
        Err(e) => return Err(e),
    };
    match fs::metadata(&target)?.is_file() {
        true => Ok(target),
        false => Err(io::Error::new(io::ErrorKind::AlreadyExists, "something else than a plain file is there")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_file_is_replaced_and_a_link_stays_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("plain"), "").unwrap();
        std::os::unix::fs::symlink("plain", path("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", path("dangling")).unwrap();
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        let real = fs::canonicalize(path("plain")).unwrap();
        assert_eq!(rename_target(&path("new")).unwrap(), path("new"));
        assert_eq!(rename_target(&path("plain")).unwrap(), real);
        assert_eq!(rename_target(&path("link")).unwrap(), real);
        for name in ["dangling", "pipe", "."] {
            assert!(rename_target(&path(name)).is_err(), "{name}");
        }
        assert!(open_plain(&path("link")).is_ok());
        for name in ["pipe", ".", "new"] {
            assert!(open_plain(&path(name)).is_err(), "{name}");
        }
    }
}
