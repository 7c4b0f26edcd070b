//! What lies in a tree: listed without leaving it, whatever other users do to it meanwhile.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use crate::environment::opened::Opened;
use host::{
    host_root::HostRoot,
    mountinfo,
    opening::{open_only_path, path_of},
    trust::{self, WRITABLE_BY_OTHERS},
};

/// Permissions of most files. Only others are recorded.
pub(super) const USUAL_OF_FILE: u32 = 0o644;
/// Permissions of most directories. Only others are recorded.
pub(super) const USUAL_OF_DIRECTORY: u32 = 0o755;

/// The write permission of all users.
const WRITABLE_BY_ALL: u32 = 0o002;

/// The entries of a tree by their path below it.
#[derive(Debug, Default)]
pub(super) struct Tree {
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
    pub(super) fn walk(root: &Path) -> io::Result<Self> {
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
    pub(super) fn walk_and(root: &Path, opened: Option<&Opened>) -> io::Result<Self> {
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
        for entry in fs::read_dir(path_of(&directory))? {
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
    pub(super) fn close_to_others(&mut self, root: &Path) -> io::Result<()> {
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
    pub(super) fn bytes(&self) -> u64 {
        let links = self.links.values().map(|target| target.as_os_str().len() as u64);
        self.files.values().map(std::fs::Metadata::len).chain(links).sum()
    }

    /// The modes that differ from the usual one for a file or directory.
    pub(super) fn modes(&self) -> BTreeMap<PathBuf, u32> {
        let files = self.files.iter().map(|(path, found)| (path, mode(found), USUAL_OF_FILE));
        let directories = self.directories.iter().map(|(path, found)| (path, mode(found), USUAL_OF_DIRECTORY));
        let unusual = files.chain(directories).filter(|(path, mode, usual)| mode != usual && is_utf8(path));
        unusual.map(|(path, mode, _)| (path.clone(), mode)).collect()
    }

    /// A file with another hard link outside the tree: an edit there would change this file.
    pub(super) fn shared(&self) -> Option<&Path> {
        let mut names = HashMap::<_, u64>::new();
        let several = || self.files.iter().filter(|(_, file)| file.nlink() > 1);
        several().for_each(|(_, file)| *names.entry((file.dev(), file.ino())).or_default() += 1);
        let (path, _) = several().find(|(_, file)| names.get(&(file.dev(), file.ino())) != Some(&file.nlink()))?;
        Some(path)
    }
}

/// True if users other than root can write to it. Root's group has no other member.
pub(super) fn is_open(found: &fs::Metadata) -> bool {
    mode(found) & others_bits(found.gid()) != 0
}

pub(super) fn others_bits(gid: u32) -> u32 {
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
    let file = open_only_path(&path_of(directory).join(path.file_name().unwrap_or_default()))?;
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
    fs::set_permissions(path_of(file), fs::Permissions::from_mode(mode(found) & !WRITABLE_BY_OTHERS))
}

/// The permissions with the set-user-ID, set-group-ID and sticky bits.
pub(super) fn mode(found: &fs::Metadata) -> u32 {
    found.mode() & 0o7777
}

/// True if the path is UTF-8. JSON can't represent other names; no package has any, so they are simply not recorded.
pub(super) fn is_utf8(path: &Path) -> bool {
    path.to_str().is_some()
}

/// Opens a file of a tree that others may be changing: never leads out of the tree, nor waits for a pipe.
pub(super) fn open_below(root: &HostRoot, path: &Path) -> io::Result<File> {
    root.open_file(&Path::new("/").join(path))
}
