//! A directory that only this user can write to, beside files of others.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::Path,
};

use nix::unistd::geteuid;

use super::trust::{WRITABLE_BY_OTHERS, open_unless_user_mounted};

/// Makes a directory with mode 0700, or opens one that belongs to this user and that no other user can write to. One that was there
/// keeps its mode; a file system without modes, such as FAT, shows its mount's for all directories. Where others can write above it,
/// they may have made it, or may put another directory of this user's there at any time: check what it holds, and reach that through
/// the result (see [`path_of`](super::opening::path_of)), not through the path.
///
/// # Errors
/// If it can't be made or opened; `PermissionDenied` if other users own one that is there, or can write to it; `Unsupported` if the file
/// system gives away what this user makes.
pub fn own_directory(path: &Path) -> io::Result<File> {
    let is_new = match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(error),
    };
    let directory = open_unless_user_mounted(path)?;
    let found = directory.metadata()?;
    if let Err(error) = check(found.uid(), found.mode(), geteuid().as_raw(), is_new) {
        if is_new {
            // The next run would take it for another user's.
            let _ = fs::remove_dir(path);
        }
        return Err(error);
    }
    Ok(directory)
}

fn check(owner: u32, mode: u32, own: u32, is_new: bool) -> io::Result<()> {
    if owner == own && mode & WRITABLE_BY_OTHERS == 0 {
        return Ok(());
    }
    Err(if is_new {
        io::Error::new(
            io::ErrorKind::Unsupported,
            format!(
                "what this user makes there belongs to uid {owner} and has mode {:o}, as on an NFS server that squashes root, \
                 or on a file system whose mount lets all users write; use a directory on another disk, or run the command as \
                 another user",
                mode & 0o7777
            ),
        )
    } else {
        io::Error::new(io::ErrorKind::PermissionDenied, "other users own it or can write to it")
    })
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_new_directory_that_nfs_gives_to_nobody_is_refused_with_a_remedy() {
        let error = check(65534, 0o700, 0, true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        let said = error.to_string();
        assert!(said.contains("uid 65534") && said.contains("use a directory on another disk"), "{said}");
        assert_eq!(check(0, 0o777, 0, true).unwrap_err().kind(), io::ErrorKind::Unsupported);
        // A FAT file system shows the mode of its mount.
        assert!([0o700, 0o2700, 0o755].iter().all(|mode| check(0, *mode, 0, true).is_ok()));
    }

    #[test]
    fn an_existing_directory_that_others_can_write_to_is_refused_and_keeps_its_mode() {
        for (owner, mode) in [(65534, 0o700), (0, 0o720), (0, 0o702)] {
            assert_eq!(check(owner, mode, 0, false).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        }
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("directory");
        own_directory(&path).unwrap();
        own_directory(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o775)).unwrap();
        assert_eq!(own_directory(&path).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o775);
    }
}
