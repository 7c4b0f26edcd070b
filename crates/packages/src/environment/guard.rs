//! The only place where an archive's entry becomes a file. Archives are untrusted: no entry may end up outside the
//! tree, be written through a symlink, or be anything but a file, a directory or a link. The limits on an archive's
//! size are in [`crate::environment::limits`].

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink},
    path::{Component, Path, PathBuf},
};

use tar::{Entry, EntryType};

use crate::unpack_error::{UnpackError, broken};
use host::files::set_times;

/// The mode bits that are kept. Everything is unpacked as root, so no set-user-ID or set-group-ID program may survive,
/// and only root may write, because root runs the files.
pub(crate) const KEPT_MODE: u32 = 0o755;

/// Most names of one file. rattler links each once more, and copies the file once the file system allows no further link
/// (ext4 allows 65,000), so a small archive could fill the disk.
const MAX_LINKS: u64 = 10_000;

/// Most names in an entry's path. All of Flux with an MPI has twelve.
const MOST_NAMES_IN_PATH: usize = 100;
/// Most directories of an archive, with those that only the paths of files imply. All of Flux with an MPI has less than 2,000.
const MOST_DIRECTORIES: usize = 100_000;

/// An entry that passed the checks.
pub(crate) struct Checked {
    /// The path below the tree; empty for the tree itself.
    pub path: PathBuf,
    pub what: EntryKind,
    mode: u32,
    mtime: i64,
    /// It is a file with a set-user-ID or set-group-ID bit.
    privileged: bool,
}

/// The type of an entry, and a link's target.
pub(crate) enum EntryKind {
    Directory,
    File,
    Symlink(PathBuf),
    HardLink(PathBuf),
}

impl Checked {
    /// Checks an entry. `symlink` gets a symlink's path and target, and returns what is wrong with it, if anything.
    pub(crate) fn new(
        entry: &Entry<'_, impl Read>,
        symlink: impl Fn(&Path, &Path) -> Option<String>,
    ) -> Result<Self, UnpackError> {
        let given = entry.path().map_err(broken)?.into_owned();
        let refuse = |reason: String| UnpackError::Entry { path: given.display().to_string(), reason };
        let path = inside(&given).ok_or_else(|| refuse("would be outside of the tree".to_owned()))?;
        if path.components().count() > MOST_NAMES_IN_PATH {
            return Err(refuse(format!("has more than {MOST_NAMES_IN_PATH} names in its path")));
        }
        let target = |what: &str| {
            let target = entry.link_name().map_err(broken)?.filter(|target| !target.as_os_str().is_empty());
            Ok::<_, UnpackError>(target.ok_or_else(|| refuse(format!("is a {what} to nothing")))?.into_owned())
        };
        let header = entry.header();
        let what = match header.entry_type() {
            EntryType::Directory => EntryKind::Directory,
            // Old tars mark a directory only by the slash after its name.
            EntryType::Regular if header.as_ustar().is_none() && entry.path_bytes().ends_with(b"/") => {
                EntryKind::Directory
            }
            EntryType::Regular | EntryType::Continuous => EntryKind::File,
            EntryType::Symlink => {
                let target = target("symlink")?;
                if let Some(reason) = symlink(&path, &target) {
                    return Err(refuse(reason));
                }
                EntryKind::Symlink(target)
            }
            EntryType::Link => {
                let target = inside(&target("hard link")?).filter(|t| !t.as_os_str().is_empty());
                EntryKind::HardLink(target.ok_or_else(|| refuse("is a hard link out of the tree".to_owned()))?)
            }
            EntryType::GNUSparse => {
                return Err(refuse("is a sparse file; pack it without sparse files".to_owned()));
            }
            _ => {
                let reason = "is a device, a fifo or another type that no installation contains";
                return Err(refuse(reason.to_owned()));
            }
        };
        if path.as_os_str().is_empty() && !matches!(what, EntryKind::Directory) {
            return Err(refuse("would replace the tree itself".to_owned()));
        }
        let given = header.mode().map_err(broken)?;
        let (mode, privileged) = (given & KEPT_MODE, given & 0o6000 != 0 && matches!(what, EntryKind::File));
        let mtime = header.mtime().ok().and_then(|t| i64::try_from(t).ok()).unwrap_or(0);
        Ok(Self { path, what, mode, mtime, privileged })
    }
}

/// The path relative to the tree, or `None` if it leads out of the tree or is absolute.
pub(crate) fn inside(path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(clean)
}

/// True if a symlink's relative target, resolved from `from`, never climbs above the tree.
pub(crate) fn stays_inside(from: &Path, target: &Path) -> bool {
    let mut depth = from.components().count();
    target.components().all(|component| match component {
        Component::Normal(_) => {
            depth += 1;
            true
        }
        Component::CurDir => true,
        Component::ParentDir if depth > 0 => {
            depth -= 1;
            true
        }
        _ => false,
    })
}

/// Where users can write on most hosts, and /proc, in which names such as `self/root` lead anywhere. What a symlink finds
/// there is not what its author meant, and root may run it.
const OPEN_TO_USERS: [&str; 20] = [
    "/dev/fd",
    "/dev/mqueue",
    "/dev/shm",
    "/dev/stderr",
    "/dev/stdin",
    "/dev/stdout",
    "/home",
    "/proc",
    "/run/lock",
    "/run/screen",
    "/run/shm",
    "/run/user",
    "/tmp",
    "/usr/tmp",
    "/var/crash",
    "/var/lock",
    "/var/run/lock",
    "/var/run/screen",
    "/var/run/user",
    "/var/tmp",
];

/// What is wrong with a symlink to this absolute path, if anything. Packages contain symlinks to the host's own files, such
/// as /etc/localtime.
pub(crate) fn leads_to_users(target: &Path) -> Option<String> {
    let shown = target.display();
    if target.components().any(|part| part == Component::ParentDir) {
        return Some(format!("is a symlink to {shown}; an absolute target must have no `..`"));
    }
    // With a symlink to /, another one would reach /tmp through it.
    let meets = |place: &&&str| target.starts_with(place) || Path::new(place).starts_with(target);
    let place = OPEN_TO_USERS.iter().find(meets)?;
    Some(format!("is a symlink to {shown}, and users can write to {place} on many hosts"))
}

/// A tree that is being unpacked.
pub(crate) struct UnpackedTree<'a> {
    root: &'a Path,
    /// Directories that were created or checked. No entry replaces a directory, so checking each once suffices.
    made: HashSet<PathBuf>,
    most_directories: usize,
    /// Modes and times of directories, set at the end: a directory may be read-only, and adding a file changes its
    /// time.
    directories: Vec<(PathBuf, u32, i64)>,
    /// The first file that lost a set-user-ID or set-group-ID bit.
    privileged: Option<PathBuf>,
    buffer: Vec<u8>,
}

impl<'a> UnpackedTree<'a> {
    /// Unpacks into `root`, an empty directory that no other process writes to.
    pub(crate) fn new(root: &'a Path) -> Self {
        Self {
            root,
            made: HashSet::new(),
            most_directories: MOST_DIRECTORIES,
            directories: Vec::new(),
            privileged: None,
            buffer: vec![0; 1 << 17],
        }
    }

    pub(crate) fn add(&mut self, entry: &Checked, content: &mut impl Read) -> Result<(), UnpackError> {
        let Checked { path, what, mode, mtime, privileged } = entry;
        let full = self.root.join(path);
        let write = |source| UnpackError::Write { path: path.display().to_string(), source };
        if *privileged && self.privileged.is_none() {
            self.privileged = Some(path.clone());
        }
        if let EntryKind::Directory = what {
            self.create_real_directory(path, path)?;
            self.directories.push((full, mode | 0o700, *mtime));
            return Ok(());
        }
        self.create_real_directory(path.parent().unwrap_or(Path::new("")), path)?;
        match what {
            EntryKind::Directory => Ok(()),
            EntryKind::File => {
                let file = create_or_replace(&full, path, || {
                    let mut options = File::options();
                    options.write(true).create_new(true).mode(0o600).open(&full)
                })?;
                self.fill(&file, content).map_err(|e| e.at(path))?;
                file.set_permissions(fs::Permissions::from_mode(*mode)).map_err(write)?;
                set_times(&full, *mtime).map_err(write)
            }
            EntryKind::Symlink(target) => {
                create_or_replace(&full, path, || symlink(target, &full))?;
                set_times(&full, *mtime).map_err(write)
            }
            EntryKind::HardLink(target) => {
                self.check_parents(target, path)?;
                let from = self.root.join(target);
                let refuse = |reason| Err(UnpackError::Entry { path: path.display().to_string(), reason });
                let Some(found) = fs::symlink_metadata(&from).ok().filter(fs::Metadata::is_file) else {
                    return refuse(format!("is a hard link to {}, which is not a file before it", target.display()));
                };
                if found.nlink() >= MAX_LINKS {
                    return refuse(format!("is one of more than {MAX_LINKS} names of one file"));
                }
                if target == path {
                    return Ok(());
                }
                create_or_replace(&full, path, || fs::hard_link(&from, &full))
            }
        }
    }

    fn fill(&mut self, mut file: &File, content: &mut impl Read) -> Result<(), CopyError> {
        loop {
            match content.read(&mut self.buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => file.write_all(&self.buffer[..n]).map_err(CopyError::Write)?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(CopyError::Read(e)),
            }
        }
    }

    /// Creates `directory` and its parents for `entry`. Fails if one of them is a symlink or a file, so that nothing is
    /// written through it.
    fn create_real_directory(&mut self, directory: &Path, entry: &Path) -> Result<(), UnpackError> {
        if directory.as_os_str().is_empty() || self.made.contains(directory) {
            return Ok(());
        }
        self.create_real_directory(directory.parent().unwrap_or(Path::new("")), entry)?;
        if self.made.len() >= self.most_directories {
            let reason = format!("is beyond the {} directories that an archive may have", self.most_directories);
            return Err(UnpackError::Entry { path: entry.display().to_string(), reason });
        }
        let full = self.root.join(directory);
        match fs::create_dir(&full) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                if !fs::symlink_metadata(&full).is_ok_and(|m| m.is_dir()) {
                    let reason = match directory == entry {
                        true => "is a directory in the place of a file".to_owned(),
                        false => through(directory),
                    };
                    return Err(UnpackError::Entry { path: entry.display().to_string(), reason });
                }
            }
            Err(source) => return Err(UnpackError::Write { path: directory.display().to_string(), source }),
        }
        self.made.insert(directory.to_owned());
        Ok(())
    }

    /// Checks that all existing parents are directories, not symlinks.
    fn check_parents(&self, target: &Path, entry: &Path) -> Result<(), UnpackError> {
        for parent in target.ancestors().skip(1).filter(|p| !p.as_os_str().is_empty()) {
            if fs::symlink_metadata(self.root.join(parent)).is_ok_and(|m| !m.is_dir()) {
                return Err(UnpackError::Entry { path: entry.display().to_string(), reason: through(parent) });
            }
        }
        Ok(())
    }

    /// Sets the directories' modes and times. Returns the first file that lost a set-user-ID or set-group-ID bit.
    pub(crate) fn finish(self) -> Result<Option<PathBuf>, UnpackError> {
        for (path, mode, mtime) in self.directories.into_iter().rev() {
            let write = |source| UnpackError::Write { path: path.display().to_string(), source };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(write)?;
            set_times(&path, mtime).map_err(write)?;
        }
        Ok(self.privileged)
    }
}

fn through(parent: &Path) -> String {
    format!("would be written through {}, which is not a directory", parent.display())
}

/// Creates a file or link with `make`. As in tar, a later entry replaces an earlier one, but never a directory.
fn create_or_replace<T>(full: &Path, path: &Path, make: impl Fn() -> io::Result<T>) -> Result<T, UnpackError> {
    let write = |source| UnpackError::Write { path: path.display().to_string(), source };
    match make() {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            if fs::symlink_metadata(full).is_ok_and(|there| there.is_dir()) {
                return Err(UnpackError::Entry {
                    path: path.display().to_string(),
                    reason: "would replace a directory".to_owned(),
                });
            }
            fs::remove_file(full).map_err(write)?;
            make().map_err(write)
        }
        made => made.map_err(write),
    }
}

enum CopyError {
    Read(io::Error),
    Write(io::Error),
}

impl CopyError {
    fn at(self, path: &Path) -> UnpackError {
        match self {
            Self::Read(error) => broken(error),
            Self::Write(source) => UnpackError::Write { path: path.display().to_string(), source },
        }
    }
}

/// What is wrong with the symlink `path` of a tree that was built for `prefix`, if anything. An absolute target is
/// resolved on the host, where `prefix` will be a symlink to this tree.
pub(crate) fn bad_symlink(prefix: &Path, path: &Path, target: &Path) -> Option<String> {
    if target.is_absolute() {
        let inside = target.strip_prefix(prefix).is_ok_and(|below| stays_inside(Path::new(""), below));
        return if inside { None } else { leads_to_users(target) };
    }
    let out = !stays_inside(path.parent().unwrap_or(Path::new("")), target);
    out.then(|| format!("is a symlink to {}, out of {}", target.display(), prefix.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]
mod tests {
    use super::*;

    /// Unpacks an archive of empty files with these paths, and `most` directories at most.
    fn unpack(paths: &[String], most: usize) -> Result<(), UnpackError> {
        let mut archive = tar::Builder::new(Vec::new());
        for path in paths {
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            header.set_mode(0o644);
            archive.append_data(&mut header, path, io::empty()).unwrap();
        }
        let bytes = archive.into_inner().unwrap();
        let root = tempfile::tempdir().unwrap();
        let mut tree = UnpackedTree { most_directories: most, ..UnpackedTree::new(root.path()) };
        tar::Archive::new(&bytes[..]).entries().unwrap().try_for_each(|entry| {
            let mut entry = entry.unwrap();
            tree.add(&Checked::new(&entry, |_, _| None)?, &mut entry)
        })
    }

    #[test]
    fn an_archive_with_too_many_or_too_deep_directories_is_refused() {
        let deep = |count| format!("{}x", "d/".repeat(count));
        unpack(&[deep(MOST_NAMES_IN_PATH - 1)], MOST_DIRECTORIES).unwrap();
        let refused = unpack(&[deep(MOST_NAMES_IN_PATH)], MOST_DIRECTORIES).unwrap_err();
        assert!(refused.to_string().contains("has more than 100 names in its path"), "{refused}");

        let wide: Vec<_> = (0..10).map(|number| format!("{number}/a/x")).collect();
        unpack(&wide, 20).unwrap();
        let refused = unpack(&wide, 19).unwrap_err();
        assert!(refused.to_string().contains("9/a/x is beyond the 19 directories"), "{refused}");
    }
}
