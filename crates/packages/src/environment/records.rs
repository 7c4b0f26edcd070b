//! What an environment was when it was made: beside its marker, what no package's own record tells.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rattler_conda_types::{PrefixRecord, prefix_record::PathType};
use rayon::prelude::{IntoParallelIterator, ParallelIterator};
use serde::{Deserialize, Serialize};

use crate::fetch::archive;

/// Name of the records in an environment.
pub(crate) const RECORDS: &str = ".flux-distribute.records.json";
/// Files at a time: more would only disturb jobs.
const THREADS: usize = 4;
/// Permissions of most files …
const USUAL_OF_FILE: u32 = 0o644;
/// … and of most directories.
const USUAL_OF_DIRECTORY: u32 = 0o755;

/// Permission of group and others to write.
pub(crate) const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Permission of all users to write.
const WRITABLE_BY_ALL: u32 = 0o002;

/// Everything in a tree, by its path below it.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    pub files: BTreeMap<PathBuf, fs::Metadata>,
    pub links: BTreeMap<PathBuf, PathBuf>,
    /// The tree's own among them, as an empty path.
    pub directories: BTreeMap<PathBuf, fs::Metadata>,
    /// Sockets, devices and the like.
    pub others: Vec<PathBuf>,
}

impl Tree {
    pub(crate) fn walk(root: &Path) -> io::Result<Self> {
        let mut tree = Self::default();
        let mut next = vec![PathBuf::new()];
        while let Some(directory) = next.pop() {
            tree.directories.insert(directory.clone(), fs::symlink_metadata(root.join(&directory))?);
            for entry in fs::read_dir(root.join(&directory))? {
                let entry = entry?;
                let path = directory.join(entry.file_name());
                let kind = entry.file_type()?;
                if kind.is_dir() {
                    next.push(path);
                } else if kind.is_symlink() {
                    tree.links.insert(path, fs::read_link(entry.path())?);
                } else if kind.is_file() {
                    tree.files.insert(path, entry.metadata()?);
                } else {
                    tree.others.push(path);
                }
            }
        }
        Ok(tree)
    }

    /// Takes the permission to write from all but the owner.
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

    /// Bytes of all files and of the targets of symlinks.
    pub(crate) fn bytes(&self) -> u64 {
        let links = self.links.values().map(|target| target.as_os_str().len() as u64);
        self.files.values().map(|file| file.len()).chain(links).sum()
    }

    /// Modes of those that have another than most of their kind.
    fn modes(&self) -> BTreeMap<PathBuf, u32> {
        let files = self.files.iter().map(|(path, found)| (path, mode(found), USUAL_OF_FILE));
        let directories = self.directories.iter().map(|(path, found)| (path, mode(found), USUAL_OF_DIRECTORY));
        let unusual = files.chain(directories).filter(|(path, mode, usual)| mode != usual && can_be_told(path));
        unusual.map(|(path, mode, _)| (path.clone(), mode)).collect()
    }

    /// A file that has a name outside the tree too: an edit there would be an edit here.
    pub(crate) fn shared(&self) -> Option<&Path> {
        let mut names = HashMap::<_, u64>::new();
        let several = || self.files.iter().filter(|(_, file)| file.nlink() > 1);
        several().for_each(|(_, file)| *names.entry((file.dev(), file.ino())).or_default() += 1);
        let (path, _) = several().find(|(_, file)| names.get(&(file.dev(), file.ino())) != Some(&file.nlink()))?;
        Some(path)
    }
}

/// What a package's record says of one of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Told {
    /// Of a file, as it is here.
    pub sha256: Option<String>,
    /// Of a file that is here as it was in the package.
    pub bytes: Option<u64>,
}

/// What conda's own records of the environment at `root` say of its files. Second, the records that can't be read.
pub(crate) fn by_packages(root: &Path, tree: &Tree) -> (BTreeMap<PathBuf, Told>, Vec<PathBuf>) {
    let (mut told, mut unreadable) = (BTreeMap::new(), Vec::new());
    for path in tree.files.keys().filter(|path| is_package_record(path)) {
        match PrefixRecord::from_path(root.join(path)) {
            Ok(record) => told.extend(record.paths_data.paths.into_iter().map(|entry| {
                let as_packed = entry.path_type == PathType::HardLink && entry.prefix_placeholder.is_none();
                let bytes = entry.size_in_bytes.filter(|_| as_packed);
                let sha256 = entry.sha256_in_prefix.or(entry.sha256).map(hex::encode);
                (entry.relative_path, Told { sha256, bytes })
            })),
            Err(_) => unreadable.push(path.clone()),
        }
    }
    (told, unreadable)
}

/// Where more than one package has a file, the others' are put away. In which order they came must leave no trace: the same
/// package set is the same tree, bit by bit.
pub(crate) fn settle_clobbers(root: &Path) -> io::Result<()> {
    let away = root.join("__clobbers__");
    if !away.is_dir() {
        return Ok(());
    }
    let tree = Tree::walk(&away)?;
    // The deepest first; a directory that holds something stays.
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

/// See [`RECORDS`].
#[derive(Serialize, Deserialize, Debug, Default)]
pub(crate) struct Records {
    /// Path → sha256, of every file that no package's record tells of, these records themselves among them.
    pub files: BTreeMap<PathBuf, String>,
    /// Path → target.
    pub links: BTreeMap<PathBuf, PathBuf>,
    /// Path → permissions, of files that don't have 0644 and of directories that don't have 0755.
    pub modes: BTreeMap<PathBuf, u32>,
    /// uid and gid of all of it.
    pub owner: (u32, u32),
}

impl Records {
    /// Of a tree that has just been made; `conda` says that packages' own records are to be believed. A full disk has
    /// been seen to cut files short without an error of anybody's, so it is looked whether all of it is there.
    pub(crate) fn of(root: &Path, tree: &Tree, conda: bool) -> io::Result<Self> {
        let wrong = |path: &Path, how: &str| Err(io::Error::other(format!("{} {how}", path.display())));
        let (told, unreadable) = if conda { by_packages(root, tree) } else { Default::default() };
        if let Some(record) = unreadable.first() {
            return wrong(record, "was written incompletely");
        }
        for (path, told) in &told {
            match (tree.files.get(path), told.bytes) {
                (Some(file), Some(bytes)) if file.len() < bytes => return wrong(path, "was written incompletely"),
                (None, Some(_)) if !tree.links.contains_key(path) => return wrong(path, "was not written"),
                _ => {}
            }
        }
        let is_told = |path: &Path| told.get(path).is_some_and(|told| told.sha256.is_some());
        let untold = tree.files.keys().filter(|path| !is_told(path) && can_be_told(path)).cloned().collect();
        let files = digests(root, untold)?.into_iter();
        let files = files.map(|(path, digest)| Ok((path, digest?))).collect::<io::Result<_>>()?;
        let links = tree.links.iter().filter(|(path, target)| can_be_told(path) && can_be_told(target));
        let links = links.map(|(path, target)| (path.clone(), target.clone())).collect();
        let made = fs::symlink_metadata(root)?;
        Ok(Self { files, links, modes: tree.modes(), owner: (made.uid(), made.gid()) })
    }

    /// Whether what is now at `path` has the permissions that it was made with. Older versions recorded permissions that let
    /// others write. Those are wrong all the same, except for root's group: many packages were built with a umask of 002, and
    /// replacing all their files beside running jobs would protect from nobody.
    pub(crate) fn has_its_mode(&self, path: &Path, found: &fs::Metadata) -> bool {
        let usual = if found.is_dir() { USUAL_OF_DIRECTORY } else { USUAL_OF_FILE };
        let wrong = if self.owner.1 == 0 { WRITABLE_BY_ALL } else { WRITABLE_BY_OTHERS };
        mode(found) == self.modes.get(path).unwrap_or(&usual) & !wrong
    }

    /// Whether it still belongs to whom the environment was made for.
    pub(crate) fn has_its_owner(&self, found: &fs::Metadata) -> bool {
        (found.uid(), found.gid()) == self.owner
    }

    pub(crate) fn read(root: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(root.join(RECORDS))?)?)
    }

    pub(crate) fn write(&self, root: &Path) -> io::Result<()> {
        write_public(&root.join(RECORDS), &serde_json::to_vec(self)?)
    }
}

/// Permissions, and what goes beyond them.
pub(crate) fn mode(found: &fs::Metadata) -> u32 {
    found.mode() & 0o7777
}

/// A file that all may read, whatever the umask.
pub(crate) fn write_public(path: &Path, content: &[u8]) -> io::Result<()> {
    fs::write(path, content)?;
    fs::set_permissions(path, fs::Permissions::from_mode(USUAL_OF_FILE))
}

/// JSON has no words for other names; no package has such, and a tree's few are not worth an encoding of their own.
pub(crate) fn can_be_told(path: &Path) -> bool {
    path.to_str().is_some()
}

/// A file, and its sha256.
pub(crate) type Hashed = (PathBuf, io::Result<String>);

/// As [`digests`], `AT_A_TIME` files at a time: before each time, `said` is called with the number of files that are done.
pub(crate) fn digests_while(root: &Path, paths: Vec<PathBuf>, mut said: impl FnMut(u64)) -> io::Result<Vec<Hashed>> {
    const AT_A_TIME: usize = 64;
    let pool = pool()?;
    let mut all = Vec::with_capacity(paths.len());
    for some in paths.chunks(AT_A_TIME) {
        said(all.len() as u64);
        all.extend(hash(&pool, root, some.to_vec()));
    }
    Ok(all)
}

/// sha256 of each file below `root`.
pub(crate) fn digests(root: &Path, paths: Vec<PathBuf>) -> io::Result<Vec<Hashed>> {
    Ok(hash(&pool()?, root, paths))
}

/// Its threads have the priority of the thread that calls this.
fn pool() -> io::Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().map_err(io::Error::other)
}

fn hash(pool: &rayon::ThreadPool, root: &Path, paths: Vec<PathBuf>) -> Vec<Hashed> {
    let digest = |path: &Path| File::open(root.join(path)).and_then(archive::sha256_of).map(|(digest, _)| digest);
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
