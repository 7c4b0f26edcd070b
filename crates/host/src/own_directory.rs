//! A directory that only this user can use, beside files of others.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::Path,
};

use nix::unistd::geteuid;

use super::{opening::open_directory, trust::WRITABLE_BY_OTHERS};

/// Makes a directory that only this user can use. One that is there is used, and closed to others, if this user owns it and
/// nobody else could write to it. In a directory that users share, another user may have made it first, or may replace it
/// later: reach what is in it through the result (see [`path_of`](super::opening::path_of)), not through the path.
///
/// # Errors
/// If it can't be made or opened; `PermissionDenied` if another user owns it or may write to it; `Unsupported` if the file
/// system gives away what this user makes.
pub fn own_directory(path: &Path) -> io::Result<File> {
    let is_new = match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(error),
    };
    let directory = open_directory(path)?;
    let found = directory.metadata()?;
    if let Err(error) = check(found.uid(), found.mode(), geteuid().as_raw(), is_new) {
        if is_new {
            // The next run would take it for another user's.
            let _ = fs::remove_dir(path);
        }
        return Err(error);
    }
    directory.set_permissions(Permissions::from_mode(0o700))?;
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
                 or on a file system without modes; use a directory on a local disk, or run the command as another user",
                mode & 0o7777
            ),
        )
    } else {
        io::Error::new(io::ErrorKind::PermissionDenied, "another user owns it or can write to it")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_directory_that_nfs_gives_to_nobody_is_refused_with_a_remedy() {
        let error = check(65534, 0o700, 0, true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        let said = error.to_string();
        assert!(said.contains("uid 65534") && said.contains("use a directory on a local disk"), "{said}");
        assert_eq!(check(0, 0o777, 0, true).unwrap_err().kind(), io::ErrorKind::Unsupported);
        for (owner, mode) in [(65534, 0o700), (0, 0o720), (0, 0o702)] {
            assert_eq!(check(owner, mode, 0, false).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        }
        assert!(check(0, 0o755, 0, false).is_ok() && check(0, 0o700, 0, true).is_ok());
    }
}
