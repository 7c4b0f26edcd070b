//! The directory where rattler puts the other versions of a file that several packages contain.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path};

use rattler_conda_types::PrefixRecord;

use super::{extract::CLOBBERS, tree::Tree};
use host::trust;

/// True if [`CLOBBERS`] is there. rattler writes into it, and this process removes what is in it, so nobody else may
/// choose where that is.
///
/// # Errors
/// It is a symlink or a file, or it belongs to another user.
pub(super) fn has_clobbers(root: &Path) -> io::Result<bool> {
    let away = root.join(CLOBBERS);
    match fs::symlink_metadata(&away) {
        Ok(found) if found.is_dir() && trust::is_own(found.uid()) => Ok(true),
        Ok(_) => Err(io::Error::other(format!(
            "{} is not a directory of this process; look which package or process put it there, and try again",
            away.display()
        ))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// rattler moves the other versions of a file that several packages contain to [`CLOBBERS`]. This removes the empty
/// directories and sorts the records, so that the order of linking leaves no trace: a package set always gives the same
/// tree, bit for bit.
pub(super) fn settle_clobbers(root: &Path) -> io::Result<()> {
    // Not through a symlink, or this would empty a directory of the host.
    if !has_clobbers(root)? {
        return Ok(());
    }
    let away = root.join(CLOBBERS);
    let tree = Tree::walk(&away)?;
    // The deepest first; a directory that isn't empty stays.
    for directory in tree.directories.keys().rev() {
        let _ = fs::remove_dir(away.join(directory));
    }
    for entry in fs::read_dir(root.join("conda-meta"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "json") {
            let mut record = PrefixRecord::from_path(&path)?;
            record.files.sort();
            record.paths_data.paths.sort_by(|a, b| a.relative_path.cmp(&b.relative_path));
            record.write_to_path(path, true)?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_removed_through_a_symlink_to_where_files_are_put_aside() {
        let (root, host) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let away = root.path().join(CLOBBERS);
        fs::create_dir(host.path().join("empty")).unwrap();
        std::os::unix::fs::symlink(host.path(), &away).unwrap();
        for refused in [settle_clobbers(root.path()), has_clobbers(root.path()).map(drop)] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("__clobbers__ is not a directory of this process"), "{error}");
        }
        assert!(host.path().join("empty").is_dir());
        fs::remove_file(&away).unwrap();
        assert!(!has_clobbers(root.path()).unwrap());
        fs::create_dir(&away).unwrap();
        assert!(has_clobbers(root.path()).unwrap());
    }
}
