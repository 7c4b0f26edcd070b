//! Unpacks a bundle of kind `tree`: no entry may end up outside the directory, or be written through a symlink.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink},
    path::{Component, Path, PathBuf},
};

use nix::sys::{
    stat::{UtimensatFlags, utimensat},
    time::TimeSpec,
};
use tar::{Entries, Entry, EntryType};

use super::{
    BundleManifest, Limits,
    unpack::{UnpackError, Unpacked, broken, copy},
};

/// Reads all that follows the manifest; without `into` it only looks.
pub(super) fn unpack<R: Read>(
    entries: Entries<'_, R>,
    manifest: BundleManifest,
    into: Option<&Path>,
    limits: Limits,
    mut progress: impl FnMut(u64),
) -> Result<Unpacked, UnpackError> {
    let mut tree = into.map(Tree::new);
    let mut unpacked = Unpacked { manifest, entries: 0, bytes: 0, contents: None };
    for entry in entries {
        let mut entry = entry.map_err(broken)?;
        if entry.header().entry_type() == EntryType::XGlobalHeader {
            continue;
        }
        unpacked.entries += 1;
        if unpacked.entries > limits.entries {
            return Err(UnpackError::Limit { limit: format!("{} files", limits.entries) });
        }
        if entry.header().entry_type().is_file() {
            unpacked.bytes += entry.size();
        }
        let checked = Checked::new(&entry, &unpacked.manifest.prefix)?;
        if let Some(tree) = &mut tree {
            tree.add(checked, &mut entry)?;
            progress(unpacked.entries);
        }
    }
    if let Some(tree) = tree {
        tree.finish()?;
    }
    Ok(unpacked)
}

/// An entry that may be unpacked.
struct Checked {
    /// Below the tree; empty for the tree itself.
    path: PathBuf,
    what: What,
    mode: u32,
    mtime: i64,
}

enum What {
    Directory,
    File,
    Symlink(PathBuf),
    HardLink(PathBuf),
}

impl Checked {
    fn new(entry: &Entry<'_, impl Read>, compiled_prefix: &Path) -> Result<Self, UnpackError> {
        let given = entry.path().map_err(broken)?.into_owned();
        let refuse = |reason: &str| UnpackError::Entry { path: given.display().to_string(), reason: reason.to_owned() };
        let path = inside(&given).ok_or_else(|| refuse("would be outside of the tree"))?;
        let target = |what: &str| {
            let target =
                entry.link_name().map_err(broken)?.ok_or_else(|| refuse(&format!("is a {what} to nothing")))?;
            Ok::<_, UnpackError>(target.into_owned())
        };
        let header = entry.header();
        let what = match header.entry_type() {
            EntryType::Directory => What::Directory,
            EntryType::Regular | EntryType::Continuous => What::File,
            EntryType::Symlink => {
                let target = target("symlink")?;
                // An absolute one is looked up on the host, where the compiled-in prefix will be a symlink to this tree.
                if target.is_relative() && !stays_inside(path.parent().unwrap_or(Path::new("")), &target) {
                    return Err(refuse(&format!("is a symlink out of {}", compiled_prefix.display())));
                }
                What::Symlink(target)
            }
            EntryType::Link => {
                let target = inside(&target("hard link")?).filter(|t| !t.as_os_str().is_empty());
                What::HardLink(target.ok_or_else(|| refuse("is a hard link out of the tree"))?)
            }
            EntryType::GNUSparse => return Err(refuse("is a sparse file; pack it without sparse files")),
            _ => {
                return Err(refuse("is a device, a fifo or something else that is no part of an installation"));
            }
        };
        if path.as_os_str().is_empty() && !matches!(what, What::Directory) {
            return Err(refuse("would replace the tree itself"));
        }
        let mode = header.mode().map_err(broken)? & 0o777;
        let mtime = header.mtime().ok().and_then(|t| i64::try_from(t).ok()).unwrap_or(0);
        Ok(Self { path, what, mode, mtime })
    }
}

/// A path below the tree, or None if it leads out or is absolute.
fn inside(path: &Path) -> Option<PathBuf> {
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

/// Whether a symlink's relative target, seen from `from`, never climbs above the tree.
pub(super) fn stays_inside(from: &Path, target: &Path) -> bool {
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

/// The tree that grows.
struct Tree<'a> {
    root: &'a Path,
    /// The directory that was checked last: entries come in order, so most have the same one as the entry before.
    checked: Option<PathBuf>,
    /// Modes and times are set at the end: a directory may be read-only, and every file in it changes its time.
    directories: Vec<(PathBuf, u32, i64)>,
}

impl<'a> Tree<'a> {
    fn new(root: &'a Path) -> Self {
        Self { root, checked: None, directories: Vec::new() }
    }

    fn add(&mut self, entry: Checked, content: &mut impl Read) -> Result<(), UnpackError> {
        let Checked { path, what, mode, mtime } = entry;
        let full = self.root.join(&path);
        if path.as_os_str().is_empty() {
            self.directories.push((full, mode | 0o700, mtime));
            return Ok(());
        }
        self.make_parents(&path)?;
        let write = |source| UnpackError::write(&path, source);
        if matches!(what, What::Directory) {
            self.make_directory(&path)?;
            self.directories.push((full, mode | 0o700, mtime));
            return Ok(());
        }
        match fs::symlink_metadata(&full) {
            Ok(there) if there.is_dir() => {
                return Err(UnpackError::Entry {
                    path: path.display().to_string(),
                    reason: "would replace a directory".to_owned(),
                });
            }
            // Later entries win, as with tar.
            Ok(_) => fs::remove_file(&full).map_err(write)?,
            Err(_) => {}
        }
        match what {
            What::Directory => {}
            What::File => self.write_file(&path, content, mode)?,
            What::Symlink(target) => symlink(target, &full).map_err(write)?,
            What::HardLink(target) => {
                self.check_parents(&target)?;
                let from = self.root.join(&target);
                if !fs::symlink_metadata(&from).is_ok_and(|m| m.is_file()) {
                    return Err(UnpackError::Entry {
                        path: path.display().to_string(),
                        reason: format!("is a hard link to {}, which is not a file before it", target.display()),
                    });
                }
                return fs::hard_link(from, &full).map_err(write);
            }
        }
        set_mtime(&full, mtime).map_err(write)
    }

    fn write_file(&self, path: &Path, content: &mut impl Read, mode: u32) -> Result<(), UnpackError> {
        let write = |source| UnpackError::write(path, source);
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .custom_flags(nix::libc::O_NOFOLLOW)
            .mode(0o600)
            .open(self.root.join(path))
            .map_err(write)?;
        copy(content, &mut file, path)?;
        file.set_permissions(fs::Permissions::from_mode(mode)).map_err(write)
    }

    fn make_parents(&mut self, path: &Path) -> Result<(), UnpackError> {
        let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) else {
            return Ok(());
        };
        if self.checked.as_deref() == Some(parent) {
            return Ok(());
        }
        self.check_parents(path)?;
        let write = |source| UnpackError::write(&parent, source);
        fs::create_dir_all(self.root.join(parent)).map_err(write)?;
        self.checked = Some(parent.to_owned());
        Ok(())
    }

    /// Every parent that is there must be a directory and no symlink: nothing is written through one.
    fn check_parents(&self, path: &Path) -> Result<(), UnpackError> {
        for parent in path.ancestors().skip(1).filter(|p| !p.as_os_str().is_empty()) {
            if fs::symlink_metadata(self.root.join(parent)).is_ok_and(|m| !m.is_dir()) {
                return Err(UnpackError::Entry {
                    path: path.display().to_string(),
                    reason: format!("would be written through {}, which is not a directory", parent.display()),
                });
            }
        }
        Ok(())
    }

    fn make_directory(&self, path: &Path) -> Result<(), UnpackError> {
        let full = self.root.join(path);
        match fs::create_dir(&full) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                let is_directory = fs::symlink_metadata(&full).is_ok_and(|m| m.is_dir());
                is_directory.then_some(()).ok_or_else(|| UnpackError::Entry {
                    path: path.display().to_string(),
                    reason: "is a directory in the place of a file".to_owned(),
                })
            }
            Err(source) => Err(UnpackError::write(&path, source)),
        }
    }

    fn finish(self) -> Result<(), UnpackError> {
        for (path, mode, mtime) in self.directories.into_iter().rev() {
            let write = |source| UnpackError::write(&path, source);
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(write)?;
            set_mtime(&path, mtime).map_err(write)?;
        }
        Ok(())
    }
}

fn set_mtime(path: &Path, mtime: i64) -> io::Result<()> {
    let time = TimeSpec::new(mtime, 0);
    Ok(utimensat(nix::fcntl::AT_FDCWD, path, &time, &time, UtimensatFlags::NoFollowSymlink)?)
}
