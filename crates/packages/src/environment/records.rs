//! Records of an environment as it was built, stored beside its marker: what the packages' own records don't contain.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rattler_conda_types::{PrefixRecord, prefix_record::PathType};
use serde::{Deserialize, Serialize};

use super::{
    digests::digests,
    extract::MAX_METADATA,
    tree::{Tree, USUAL_OF_DIRECTORY, USUAL_OF_FILE, is_open, is_utf8, mode, open_below, others_bits},
};
use host::{
    host_root::HostRoot,
    opening::open_uncovered,
    trust::{self, MOST_BYTES},
};

/// File name of the records in an environment.
pub(crate) const RECORDS: &str = ".flux-distribute.records.json";

/// Reads one of our own files in the environment at `root`: a plain file of root's that nobody else can write.
pub(super) fn read_own(root: &Path, name: &str) -> io::Result<Vec<u8>> {
    let content = trust::read(&open_uncovered(root)?.into(), root, name).map_err(io::Error::other)?;
    content.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// A package's record of one of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RecordedFile {
    /// The sha256 as installed; `None` if the record has none.
    pub sha256: Option<String>,
    /// The size, if the file is installed unchanged.
    pub bytes: Option<u64>,
}

/// The files in conda's own records of the environment at `root`, and the records that can't be read or that
/// others may write.
pub(super) fn by_packages(root: &Path, tree: &Tree) -> (BTreeMap<PathBuf, RecordedFile>, Vec<PathBuf>) {
    let (mut recorded_files, mut unreadable) = (BTreeMap::new(), Vec::new());
    let below = HostRoot::without_mounts(root);
    let read = |path: &Path, found: &fs::Metadata| -> io::Result<PrefixRecord> {
        // What others may write proves nothing, and a user who owns it can make its reader wait (F_SETLEASE).
        if !trust::is_trusted(found.uid()) || is_open(found) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut text = Vec::new();
        let below = below.as_ref().map_err(|error| io::Error::from(error.kind()))?;
        open_below(below, path)?.take(MAX_METADATA).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    };
    for (path, found) in tree.files.iter().filter(|(path, _)| is_package_record(path)) {
        match read(path, found) {
            Ok(record) => recorded_files.extend(record.paths_data.paths.into_iter().map(|entry| {
                let as_packed = entry.path_type == PathType::HardLink && entry.prefix_placeholder.is_none();
                let bytes = entry.size_in_bytes.filter(|_| as_packed);
                let sha256 = entry.sha256_in_prefix.or(entry.sha256).map(hex::encode);
                (entry.relative_path, RecordedFile { sha256, bytes })
            })),
            Err(_) => unreadable.push(path.clone()),
        }
    }
    (recorded_files, unreadable)
}

fn is_package_record(path: &Path) -> bool {
    path.parent() == Some(Path::new("conda-meta")) && path.extension().is_some_and(|end| end == "json")
}

/// The content of the file [`RECORDS`].
#[derive(Serialize, Deserialize, Debug, Default)]
pub(super) struct Records {
    /// Path → sha256 of every file that no package's record covers, including the packages' records themselves.
    pub files: BTreeMap<PathBuf, String>,
    /// Path → target.
    pub links: BTreeMap<PathBuf, PathBuf>,
    /// Path → permissions, of files that don't have 0644 and directories that don't have 0755.
    pub modes: BTreeMap<PathBuf, u32>,
    /// uid and gid of the whole environment.
    pub owner: (u32, u32),
}

impl Records {
    /// Records a tree that has just been built; with `conda`, the packages' own records are used. Also checks that all
    /// files are complete, because a full disk has been seen to truncate files without an error.
    pub(super) fn of(root: &Path, tree: &Tree, conda: bool) -> io::Result<Self> {
        let wrong = |path: &Path, how: &str| Err(io::Error::other(format!("{} {how}", path.display())));
        let (recorded_files, unreadable) = if conda { by_packages(root, tree) } else { Default::default() };
        if let Some(record) = unreadable.first() {
            return wrong(record, "was written incompletely");
        }
        for (path, recorded) in &recorded_files {
            match (tree.files.get(path), recorded.bytes) {
                (Some(file), Some(bytes)) if file.len() < bytes => return wrong(path, "was written incompletely"),
                (None, Some(_)) if !tree.links.contains_key(path) => return wrong(path, "was not written"),
                _ => {}
            }
        }
        let is_recorded = |path: &Path| recorded_files.get(path).is_some_and(|recorded| recorded.sha256.is_some());
        let unrecorded = tree.files.keys().filter(|path| !is_recorded(path) && is_utf8(path)).cloned().collect();
        let files = digests(root, unrecorded)?.into_iter();
        let files = files.map(|(path, digest)| Ok((path, digest?))).collect::<io::Result<_>>()?;
        let links = tree.links.iter().filter(|(path, target)| is_utf8(path) && is_utf8(target));
        let links = links.map(|(path, target)| (path.clone(), target.clone())).collect();
        let made = fs::symlink_metadata(root)?;
        Ok(Self { files, links, modes: tree.modes(), owner: (made.uid(), made.gid()) })
    }

    /// True if the file or directory has the permissions that it was built with. Older versions recorded permissions
    /// that let others write. These are wrong nevertheless, except for root's group: many packages were built with a
    /// umask of 002, and replacing all their files beside running jobs would not protect from anyone.
    pub(super) fn has_its_mode(&self, path: &Path, found: &fs::Metadata) -> bool {
        let usual = if found.is_dir() { USUAL_OF_DIRECTORY } else { USUAL_OF_FILE };
        mode(found) == self.modes.get(path).unwrap_or(&usual) & !others_bits(self.owner.1)
    }

    /// True if the file still has the environment's owner and group.
    pub(super) fn has_its_owner(&self, found: &fs::Metadata) -> bool {
        (found.uid(), found.gid()) == self.owner
    }

    pub(super) fn read(root: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&read_own(root, RECORDS)?)?)
    }

    pub(super) fn write(&self, root: &Path) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        // What can't be read again would never be checked.
        if text.len() as u64 > MOST_BYTES {
            let what = format!("the names of its files take {} bytes, more than {MOST_BYTES}", text.len());
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
        }
        write_public(&root.join(RECORDS), &text)
    }
}

/// Writes a world-readable file, whatever the umask.
pub(super) fn write_public(path: &Path, content: &[u8]) -> io::Result<()> {
    fs::write(path, content)?;
    fs::set_permissions(path, fs::Permissions::from_mode(USUAL_OF_FILE))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn records_that_could_not_be_read_again_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let long = usize::try_from(MOST_BYTES / 6).unwrap();
        for (name, is_written) in [("a", true), ("\u{1}", false)] {
            let links = [(PathBuf::from("link"), PathBuf::from(name.repeat(long)))].into();
            let written = Records { links, ..Records::default() }.write(directory.path());
            assert_eq!(
                written.map_err(|error| error.kind()).err(),
                (!is_written).then_some(io::ErrorKind::FileTooLarge)
            );
        }
        assert_eq!(
            fs::metadata(directory.path().join(RECORDS)).unwrap().len() / MOST_BYTES,
            0,
            "the first one is left"
        );
    }
}
