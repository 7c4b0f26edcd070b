//! Records of an environment as it was built, stored beside its marker: what the packages' own records don't contain.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rattler_conda_types::{PrefixRecord, prefix_record::PathType};
use rayon::prelude::{IntoParallelIterator, ParallelIterator};
use serde::{Deserialize, Serialize};

use crate::{
    Limits,
    environment::{
        extract::{CLOBBERS, MAX_METADATA},
        opened::Opened,
    },
    fetch::archive,
};
use host::{
    host_root::HostRoot,
    mountinfo,
    opening::{host_path, open_only_path, open_uncovered},
    trust::{self, WRITABLE_BY_OTHERS},
};

/// File name of the records in an environment.
pub(crate) const RECORDS: &str = ".flux-distribute.records.json";
/// Concurrent files; more threads would disturb jobs.
const THREADS: usize = 4;
/// Permissions of most files. Only others are recorded.
const USUAL_OF_FILE: u32 = 0o644;
/// Permissions of most directories. Only others are recorded.
const USUAL_OF_DIRECTORY: u32 = 0o755;

/// The write permission of all users.
const WRITABLE_BY_ALL: u32 = 0o002;

/// The entries of a tree by their path below it.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    pub files: BTreeMap<PathBuf, fs::Metadata>,
    pub links: BTreeMap<PathBuf, PathBuf>,
    /// Including the tree itself, as an empty path.
    pub directories: BTreeMap<PathBuf, fs::Metadata>,
    /// Sockets, devices and other special files.
    pub others: BTreeMap<PathBuf, fs::Metadata>,
    /// What can't be looked into, or has something mounted over it.
    pub unreadable: BTreeSet<PathBuf>,
}

impl Tree {
    /// Lists a tree that only root has had its hands on: what can't be looked into there is an error.
    pub(crate) fn walk(root: &Path) -> io::Result<Self> {
        let tree = Self::walk_and(root, None)?;
        match tree.unreadable.first() {
            Some(path) => Err(io::Error::other(format!("{} can't be looked into", root.join(path).display()))),
            None => Ok(tree),
        }
    }

    /// Lists the tree from the top. Never leaves it, whatever other users exchange meanwhile, and enters neither their
    /// directories nor what they have mounted. One entry that can't be looked into keeps no other from being listed. With
    /// `opened`, what others can write to is noted there and closed before it is looked into; the result has the
    /// permissions from before.
    pub(crate) fn walk_and(root: &Path, opened: Option<&Opened>) -> io::Result<Self> {
        let mut tree = Self::default();
        let below = HostRoot::without_mounts(root)?;
        let mount = mountinfo::id(below.open_path(Path::new("/"))?)?;
        let mut next = vec![PathBuf::new()];
        while let Some(path) = next.pop() {
            if let Err(error) = tree.list(&below, &path, mount, opened, &mut next) {
                if path == Path::new("") {
                    return Err(error);
                }
                if error.kind() == io::ErrorKind::NotFound {
                    continue;
                }
                tracing::debug!(path = %path.display(), %error, "can't look into this directory");
                tree.unreadable.insert(path);
            }
        }
        Ok(tree)
    }

    /// Lists the directory `path`, and adds the directories in it to `next`.
    fn list(
        &mut self,
        below: &HostRoot,
        path: &Path,
        mount: u64,
        opened: Option<&Opened>,
        next: &mut Vec<PathBuf>,
    ) -> io::Result<()> {
        let directory = File::from(below.open_path(&Path::new("/").join(path))?);
        let found = metadata_on(mount, &directory)?;
        let is_ours = trust::is_trusted(found.uid());
        if let Some(opened) = opened {
            close(opened, path, &directory, &found)?;
        }
        self.directories.insert(path.to_owned(), found);
        if !is_ours {
            return Ok(());
        }
        for entry in fs::read_dir(host_path(&directory))? {
            let entry = entry?;
            let path = path.join(entry.file_name());
            let kind = entry.file_type()?;
            if kind.is_dir() {
                next.push(path);
            } else if kind.is_symlink() {
                match fs::read_link(entry.path()) {
                    Ok(target) => drop(self.links.insert(path, target)),
                    Err(error) => self.cant_look(path, &error),
                }
            } else {
                match look_at(&directory, &path, mount, opened) {
                    Ok(found) if kind.is_file() => drop(self.files.insert(path, found)),
                    Ok(found) => drop(self.others.insert(path, found)),
                    Err(error) => self.cant_look(path, &error),
                }
            }
        }
        Ok(())
    }

    /// Python removes the temporary names of its byte code meanwhile, which is nothing to report.
    fn cant_look(&mut self, path: PathBuf, error: &io::Error) {
        if error.kind() != io::ErrorKind::NotFound {
            self.unreadable.insert(path);
        }
    }

    /// Removes all write permissions except the owner's.
    pub(crate) fn close_to_others(&mut self, root: &Path) -> io::Result<()> {
        for (path, found) in self.files.iter_mut().chain(&mut self.directories) {
            if mode(found) & WRITABLE_BY_OTHERS != 0 {
                let path = root.join(path);
                fs::set_permissions(&path, fs::Permissions::from_mode(mode(found) & !WRITABLE_BY_OTHERS))?;
                *found = fs::symlink_metadata(&path)?;
            }
        }
        Ok(())
    }

    /// Total size of all files and of the symlinks' targets.
    pub(crate) fn bytes(&self) -> u64 {
        let links = self.links.values().map(|target| target.as_os_str().len() as u64);
        self.files.values().map(std::fs::Metadata::len).chain(links).sum()
    }

    /// The modes that differ from the usual one for a file or directory.
    fn modes(&self) -> BTreeMap<PathBuf, u32> {
        let files = self.files.iter().map(|(path, found)| (path, mode(found), USUAL_OF_FILE));
        let directories = self.directories.iter().map(|(path, found)| (path, mode(found), USUAL_OF_DIRECTORY));
        let unusual = files.chain(directories).filter(|(path, mode, usual)| mode != usual && is_utf8(path));
        unusual.map(|(path, mode, _)| (path.clone(), mode)).collect()
    }

    /// A file with another hard link outside the tree: an edit there would change this file.
    pub(crate) fn shared(&self) -> Option<&Path> {
        let mut names = HashMap::<_, u64>::new();
        let several = || self.files.iter().filter(|(_, file)| file.nlink() > 1);
        several().for_each(|(_, file)| *names.entry((file.dev(), file.ino())).or_default() += 1);
        let (path, _) = several().find(|(_, file)| names.get(&(file.dev(), file.ino())) != Some(&file.nlink()))?;
        Some(path)
    }
}

/// True if users other than root can write to it. Root's group has no other member.
pub(crate) fn is_open(found: &fs::Metadata) -> bool {
    mode(found) & others_bits(found.gid()) != 0
}

fn others_bits(gid: u32) -> u32 {
    if gid == 0 { WRITABLE_BY_ALL } else { WRITABLE_BY_OTHERS }
}

/// The metadata of a file or directory that was opened with `O_PATH`. One of another mount than `mount` is not asked for
/// it: a file system of another user may never answer.
fn metadata_on(mount: u64, file: &File) -> io::Result<fs::Metadata> {
    if mountinfo::id(file)? != mount {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    file.metadata()
}

/// Examines what is at the end of `path` in `directory`, without opening it. With `opened`, closes it to others.
fn look_at(directory: &File, path: &Path, mount: u64, opened: Option<&Opened>) -> io::Result<fs::Metadata> {
    let file = open_only_path(&host_path(directory).join(path.file_name().unwrap_or_default()))?;
    let found = metadata_on(mount, &file)?;
    if let Some(opened) = opened {
        close(opened, path, &file, &found)?;
    }
    Ok(found)
}

/// Takes the right to write from others, if this process owns the file or directory, and notes that they had it. A file
/// with another name stays as it is, for that may be anywhere; a repair replaces it.
fn close(opened: &Opened, path: &Path, file: &File, found: &fs::Metadata) -> io::Result<()> {
    let may_be_open = found.is_file() || found.is_dir();
    if !may_be_open || !is_open(found) || !trust::is_own(found.uid()) {
        return Ok(());
    }
    if !found.is_dir() && found.nlink() > 1 {
        return opened.note_once(path);
    }
    opened.note(path)?;
    // By the descriptor, without opening the file: its permissions are those of this inode, whatever has its name now.
    fs::set_permissions(host_path(file), fs::Permissions::from_mode(mode(found) & !WRITABLE_BY_OTHERS))
}

/// Reads one of our own files in the environment at `root`: a plain file of root's that nobody else can write.
pub(crate) fn read_own(root: &Path, name: &str) -> io::Result<Vec<u8>> {
    let content = trust::read(&open_uncovered(root)?.into(), root, name).map_err(io::Error::other)?;
    content.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// A package's record of one of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordedFile {
    /// The sha256 as installed; `None` if the record has none.
    pub sha256: Option<String>,
    /// The size, if the file is installed unchanged.
    pub bytes: Option<u64>,
}

/// The files in conda's own records of the environment at `root`, and the records that can't be read or that
/// others may write.
pub(crate) fn by_packages(root: &Path, tree: &Tree) -> (BTreeMap<PathBuf, RecordedFile>, Vec<PathBuf>) {
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

/// True if [`CLOBBERS`] is there. rattler writes into it, and this process removes what is in it, so nobody else may
/// choose where that is.
///
/// # Errors
/// It is a symlink or a file, or it belongs to another user.
pub(crate) fn has_clobbers(root: &Path) -> io::Result<bool> {
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
pub(crate) fn settle_clobbers(root: &Path) -> io::Result<()> {
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

fn is_package_record(path: &Path) -> bool {
    path.parent() == Some(Path::new("conda-meta")) && path.extension().is_some_and(|end| end == "json")
}

/// The content of the file [`RECORDS`].
#[derive(Serialize, Deserialize, Debug, Default)]
pub(crate) struct Records {
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
    pub(crate) fn of(root: &Path, tree: &Tree, conda: bool) -> io::Result<Self> {
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
    pub(crate) fn has_its_mode(&self, path: &Path, found: &fs::Metadata) -> bool {
        let usual = if found.is_dir() { USUAL_OF_DIRECTORY } else { USUAL_OF_FILE };
        mode(found) == self.modes.get(path).unwrap_or(&usual) & !others_bits(self.owner.1)
    }

    /// True if the file still has the environment's owner and group.
    pub(crate) fn has_its_owner(&self, found: &fs::Metadata) -> bool {
        (found.uid(), found.gid()) == self.owner
    }

    pub(crate) fn read(root: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&read_own(root, RECORDS)?)?)
    }

    pub(crate) fn write(&self, root: &Path) -> io::Result<()> {
        write_public(&root.join(RECORDS), &serde_json::to_vec(self)?)
    }
}

/// The permissions with the set-user-ID, set-group-ID and sticky bits.
pub(crate) fn mode(found: &fs::Metadata) -> u32 {
    found.mode() & 0o7777
}

/// Writes a world-readable file, whatever the umask.
pub(crate) fn write_public(path: &Path, content: &[u8]) -> io::Result<()> {
    fs::write(path, content)?;
    fs::set_permissions(path, fs::Permissions::from_mode(USUAL_OF_FILE))
}

/// True if the path is UTF-8. JSON can't represent other names; no package has any, so they are simply not recorded.
pub(crate) fn is_utf8(path: &Path) -> bool {
    path.to_str().is_some()
}

/// A file and its sha256.
pub(crate) type Hashed = (PathBuf, io::Result<String>);

/// Like [`digests`], in batches of `AT_A_TIME` files. Calls `report` before each batch with the number of files done.
pub(crate) fn digests_while(root: &Path, paths: Vec<PathBuf>, mut report: impl FnMut(u64)) -> io::Result<Vec<Hashed>> {
    const AT_A_TIME: usize = 64;
    let pool = pool()?;
    let mut all = Vec::with_capacity(paths.len());
    for some in paths.chunks(AT_A_TIME) {
        report(all.len() as u64);
        all.extend(hash(&pool, root, some.to_vec()));
    }
    Ok(all)
}

/// The sha256 of each file below `root`.
pub(crate) fn digests(root: &Path, paths: Vec<PathBuf>) -> io::Result<Vec<Hashed>> {
    Ok(hash(&pool()?, root, paths))
}

/// The pool's threads inherit the priority of the calling thread.
fn pool() -> io::Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().map_err(io::Error::other)
}

/// Opens a file of a tree that others may be changing: never leads out of the tree, nor waits for a pipe.
fn open_below(root: &HostRoot, path: &Path) -> io::Result<File> {
    root.open_file(&Path::new("/").join(path))
}

/// The sha256 of a file of this `length`, or another one if the file is longer. Who has it open could make it grow for as long as
/// it is read; one byte more is enough for another sha256.
fn digest_up_to(file: impl Read, length: u64) -> io::Result<String> {
    Ok(archive::sha256_of(file.take(length + 1))?.0)
}

fn hash(pool: &rayon::ThreadPool, root: &Path, paths: Vec<PathBuf>) -> Vec<Hashed> {
    let below = HostRoot::without_mounts(root);
    let digest = |path: &Path| -> io::Result<String> {
        let below = below.as_ref().map_err(|error| io::Error::from(error.kind()))?;
        let file = open_below(below, path)?;
        let length = file.metadata()?.len();
        // A file with holes can be of any length.
        if length > Limits::default().bytes {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        digest_up_to(file, length)
    };
    pool.install(|| {
        paths
            .into_par_iter()
            .map(|path| {
                let digest = digest(&path);
                (path, digest)
            })
            .collect()
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn of_a_file_that_grows_meanwhile_no_more_is_hashed_than_shows_it() {
        let wanted = hex::encode(<sha2::Sha256 as sha2::Digest>::digest([0; 10]));
        assert_eq!(digest_up_to(io::repeat(0).take(10), 10).unwrap(), wanted);
        assert_ne!(digest_up_to(io::repeat(0), 10).unwrap(), wanted);
    }

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
