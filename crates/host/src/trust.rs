//! Whose word a path on the host is: what root alone could have put there is believed, as sshd's StrictModes has it, and
//! nothing else.
//!
//! A path is walked component by component. Each directory on the way must belong to root and be closed to the writes of group
//! and others, so nobody can exchange what follows it. A symlink is followed only if root made it, as the one from /opt to
//! /var/opt that image-based distributions have; where it leads is walked in the same way. A file system that a user has mounted
//! by FUSE is not looked into: its owners and modes are that user's inventions, and the kernel may refuse root a look.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, Permissions},
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::fs::{MetadataExt, PermissionsExt},
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open, openat, readlinkat},
    sys::stat::{FileStat, Mode, SFlag, fstat, mkdirat},
    unistd::geteuid,
};

use super::{Root, files::host_path, mountinfo};
use hostapi::Refusal;

/// As many symlinks as Linux follows.
const MOST_LINKS: usize = 40;
/// Of a file that is read whole. A roster of ten thousand nodes has some megabytes.
const MOST_BYTES: u64 = 64 << 20;
/// Write permission of the group and of others.
const OPEN: u32 = 0o022;

/// Why a path is not believed, with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Distrust {
    /// It is another user's.
    #[error("{} belongs to the user with uid {uid}, so root does not trust it; if it is yours, run `chown root {}`", path.display(), path.display())]
    Owner {
        /// What it is about.
        path: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// Others than root can change what is in it.
    #[error(
        "users other than root can write to {} (its mode is {mode:04o}), so root does not trust what is in it; run `chmod go-w {}`",
        path.display(),
        path.display()
    )]
    Open {
        /// What it is about.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It is something else than it must be.
    #[error("{} is not {wanted}; move it away", path.display())]
    Kind {
        /// What it is about.
        path: PathBuf,
        /// What it must be.
        wanted: &'static str,
    },
    /// It is in a file system of which another user's program says what is in it.
    #[error("{} is on a file system that the user with uid {uid} has mounted, so root does not trust what is in it; unmount it", path.display())]
    Mounted {
        /// What it is about.
        path: PathBuf,
        /// That user.
        uid: u32,
    },
    /// It can't be looked at.
    #[error("can't open {}", path.display())]
    Io {
        /// What it is about.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
}

impl Distrust {
    fn io(path: &Path, errno: Errno) -> Self {
        Self::Io { path: path.to_owned(), source: errno.into() }
    }
}

impl From<Distrust> for Refusal {
    fn from(distrust: Distrust) -> Self {
        match distrust {
            Distrust::Io { path, source } => Self::io("open", &path, &source),
            other => Self::new(other.to_string()),
        }
    }
}

/// What is believed: what belongs to root, or to this process's own user, and is closed to the writes of others.
#[derive(Clone, Copy, Debug, Default)]
struct Rule {
    /// The end of the path may be open to the writes of others.
    may_last_be_open: bool,
    /// Directories may be anybody's. Symlinks may not.
    may_directories_be_anybodys: bool,
}

impl Rule {
    const CLOSED: Self = Self { may_last_be_open: false, may_directories_be_anybodys: false };

    /// For a directory that is to be closed to others, as [`make_closed_directory`] does: a new file system may be open.
    const BEFORE_IT_IS_CLOSED: Self = Self { may_last_be_open: true, ..Self::CLOSED };

    /// For a look at who has written what is there.
    const LINKS_ALONE: Self = Self { may_directories_be_anybodys: true, ..Self::CLOSED };

    fn check(self, path: &Path, found: &FileStat, is_last: bool) -> Result<(), Distrust> {
        let uid = found.st_uid;
        if self.may_directories_be_anybodys && kind(found) != SFlag::S_IFLNK {
            return Ok(());
        }
        if !is_trusted(uid) {
            return Err(Distrust::Owner { path: path.to_owned(), uid });
        }
        // A symlink has no permissions of its own.
        let may_be_open = kind(found) == SFlag::S_IFLNK || (is_last && self.may_last_be_open);
        if !may_be_open && found.st_mode & OPEN != 0 {
            return Err(Distrust::Open { path: path.to_owned(), mode: found.st_mode & 0o7777 });
        }
        Ok(())
    }
}

/// True for root and for this process's own user: nobody else may own what root trusts.
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

fn kind(found: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT
}

/// The directory `path` of the host, or None where it is missing.
///
/// # Errors
/// [`Distrust`] of the first thing on the way that others than root have, could have, or can change.
pub fn directory(root: &Root, path: &Path) -> Result<Option<OwnedFd>, Distrust> {
    let walked = walk(root, path, Rule::CLOSED, false)?;
    Ok(walked.is_whole.then_some(walked.last))
}

/// The directory `path` of the host, whoever can change it, if no symlink on the way there is another user's.
pub fn by_roots_links(root: &Root, path: &Path) -> Option<OwnedFd> {
    let walked = walk(root, path, Rule::LINKS_ALONE, false).ok()?;
    walked.is_whole.then_some(walked.last)
}

/// The directory `path` of the host, or the nearest one above it that is there, for [`make_closed_directory`].
///
/// # Errors
/// As for [`directory`]; others may be able to write to `path` itself.
pub fn nearest(root: &Root, path: &Path) -> Result<OwnedFd, Distrust> {
    walk(root, path, Rule::BEFORE_IT_IS_CLOSED, false).map(|walked| walked.last)
}

/// The directory `path` of the host, made with all those above it that are missing (mode 0755). Nothing is made in what is
/// not believed.
///
/// # Errors
/// As for [`directory`].
pub fn make_directories(root: &Root, path: &Path) -> Result<OwnedFd, Distrust> {
    walk(root, path, Rule::CLOSED, true).map(|walked| walked.last)
}

/// The directory `path` of the host, made as by [`make_directories`], with the permission bits `mode`. If it is
/// there and others can write to it, it is closed to them: what they have put into it before is not trusted by that.
///
/// # Errors
/// As for [`directory`], in words.
pub fn make_closed_directory(root: &Root, path: &Path, mode: u32) -> Result<(), Refusal> {
    let Walked { last: directory, .. } = walk(root, path, Rule::BEFORE_IT_IS_CLOSED, true)?;
    let made = host_path(&directory);
    let set = || match fs::metadata(&made)?.mode() & 0o7777 == mode {
        true => Ok(()),
        false => fs::set_permissions(&made, Permissions::from_mode(mode)),
    };
    set().map_err(|error| Refusal::io("make the directory", path, &error))
}

/// The content of the plain file `name` in `directory`, which is the host's `path`; None where there is none.
///
/// # Errors
/// [`Distrust`] of the file; it was not read then.
pub fn read(directory: &OwnedFd, path: &Path, name: &str) -> Result<Option<Vec<u8>>, Distrust> {
    let path = path.join(name);
    // Looked at before it is opened: a pipe would be waited for, and a device does things.
    let found = match openat(directory, name, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty()) {
        Err(Errno::ENOENT) => return Ok(None),
        found => found.map_err(|errno| Distrust::io(&path, errno))?,
    };
    let status = fstat(&found).map_err(|errno| Distrust::io(&path, errno))?;
    if kind(&status) != SFlag::S_IFREG {
        return Err(Distrust::Kind { path, wanted: "a plain file" });
    }
    Rule::CLOSED.check(&path, &status, false)?;
    let mut content = Vec::new();
    let read = File::open(host_path(&found)).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut content));
    read.map(|_| Some(content)).map_err(|source| Distrust::Io { path, source })
}

struct Walked {
    last: OwnedFd,
    /// `last` is the end of the path, and not only the nearest directory above it.
    is_whole: bool,
}

fn walk(root: &Root, path: &Path, rule: Rule, makes: bool) -> Result<Walked, Distrust> {
    const LOOK: OFlag = OFlag::O_PATH.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);
    let at_top = PathBuf::from("/");
    let top = open(&root.path("/"), OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty());
    let top = top.map_err(|errno| Distrust::io(&at_top, errno))?;
    rule.check(&at_top, &fstat(&top).map_err(|errno| Distrust::io(&at_top, errno))?, false)?;
    let mut mount = mountinfo::id(&top).map_err(|source| Distrust::Io { path: at_top.clone(), source })?;
    // What is open, from the top to where the walk is.
    let mut open = vec![(at_top, top)];
    // What is still to be walked, the next part last.
    let mut left = Vec::new();
    push_parts(&mut left, path);
    let mut links = 0;
    while let Some(part) = left.pop() {
        if part == ".." {
            open.truncate(open.len().saturating_sub(1).max(1));
            continue;
        }
        let Some((above, directory)) = open.last() else { break };
        let here = above.join(&part);
        let failed = |errno| Distrust::io(&here, errno);
        let found = match openat(directory, part.as_os_str(), LOOK, Mode::empty()) {
            Err(Errno::ENOENT) if makes => {
                match mkdirat(directory, part.as_os_str(), Mode::from_bits_truncate(0o755)) {
                    // It is opened as whatever it is then.
                    Ok(()) | Err(Errno::EEXIST) => openat(directory, part.as_os_str(), LOOK, Mode::empty()),
                    Err(errno) => Err(errno),
                }
            }
            found => found,
        };
        let found = match found {
            Err(Errno::ENOENT) if !makes => {
                let last = open.pop().map(|(_, directory)| directory).ok_or(Errno::ENOENT).map_err(failed)?;
                return Ok(Walked { last, is_whole: false });
            }
            found => found.map_err(failed)?,
        };
        let of_mount = |source| Distrust::Io { path: here.clone(), source };
        let above = std::mem::replace(&mut mount, mountinfo::id(&found).map_err(of_mount)?);
        if mount != above
            && let Some(uid) = mountinfo::fuse_user(mount).map_err(of_mount)?
            && !is_trusted(uid)
        {
            return Err(Distrust::Mounted { path: here, uid });
        }
        let status = fstat(&found).map_err(failed)?;
        rule.check(&here, &status, left.is_empty())?;
        if kind(&status) == SFlag::S_IFLNK {
            links += 1;
            if links > MOST_LINKS {
                return Err(failed(Errno::ELOOP));
            }
            let target = PathBuf::from(readlinkat(&found, OsStr::new("")).map_err(failed)?);
            if target.is_absolute() {
                open.truncate(1);
            }
            push_parts(&mut left, &target);
        } else if kind(&status) == SFlag::S_IFDIR {
            open.push((here, found));
        } else {
            return Err(Distrust::Kind { path: here, wanted: "a directory" });
        }
    }
    let last = open.pop().map(|(_, directory)| directory).ok_or_else(|| Distrust::io(path, Errno::ENOENT))?;
    Ok(Walked { last, is_whole: true })
}

fn push_parts(left: &mut Vec<OsString>, path: &Path) {
    left.extend(path.components().rev().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    }));
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;
    use crate::needs::{Need, skips_without};

    fn told<T>(result: Result<T, Distrust>) -> String {
        result.map_or_else(|distrust| distrust.to_string(), |_| "believed".to_owned())
    }

    /// A root directory with /opt/ours in it, in which the file `state` says "ours".
    fn host() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        fs::create_dir_all(root.path("/opt/ours")).unwrap();
        fs::write(root.path("/opt/ours/state"), "ours").unwrap();
        (dir, root)
    }

    fn read_state(root: &Root) -> Result<Option<Vec<u8>>, Distrust> {
        let path = Path::new("/opt/ours");
        match directory(root, path)? {
            Some(directory) => read(&directory, path, "state"),
            None => Ok(None),
        }
    }

    #[test]
    fn what_others_than_root_could_have_put_there_is_not_believed_and_the_remedy_is_told() {
        if skips_without([Need::Root]) {
            return;
        }
        for (path, mode, uid, expected) in [
            ("/opt", 0o755, 0, "believed"),
            ("/opt", 0o700, 0, "believed"),
            ("/", 0o777, 0, "chmod go-w /`"),
            ("/opt", 0o775, 0, "chmod go-w /opt`"),
            ("/opt", 0o1777, 0, "its mode is 1777"),
            ("/opt/ours", 0o757, 0, "chmod go-w /opt/ours`"),
            ("/opt", 0o755, 500, "/opt belongs to the user with uid 500"),
            ("/opt/ours/state", 0o644, 0, "believed"),
            ("/opt/ours/state", 0o664, 0, "chmod go-w /opt/ours/state`"),
            ("/opt/ours/state", 0o644, 500, "chown root /opt/ours/state`"),
        ] {
            let (_dir, root) = host();
            chown(root.path(path), Some(uid), None).unwrap();
            fs::set_permissions(root.path(path), fs::Permissions::from_mode(mode)).unwrap();
            let told = told(read_state(&root));
            assert!(told.contains(expected), "{path} {mode:o} {uid}: {told}");
        }
    }

    #[test]
    fn what_is_no_plain_file_is_neither_read_nor_waited_for() {
        let (_dir, root) = host();
        let state = root.path("/opt/ours/state");
        fs::remove_file(&state).unwrap();
        assert!(read_state(&root).unwrap().is_none());
        nix::unistd::mkfifo(&state, Mode::S_IRUSR).unwrap();
        assert!(told(read_state(&root)).contains("is not a plain file"));
        fs::remove_file(&state).unwrap();
        fs::write(root.path("/secret"), "secret").unwrap();
        symlink("../../secret", &state).unwrap();
        assert!(told(read_state(&root)).contains("is not a plain file"));
    }

    #[test]
    fn roots_own_links_are_followed_inside_the_root_and_no_other_ones() {
        if skips_without([Need::Root]) {
            return;
        }
        for target in ["/var/opt", "var/opt", "../../var/./opt", "/var/lib/../opt"] {
            let (_dir, root) = host();
            fs::create_dir_all(root.path("/var/lib")).unwrap();
            fs::rename(root.path("/opt"), root.path("/var/opt")).unwrap();
            symlink(target, root.path("/opt")).unwrap();
            assert_eq!(read_state(&root).unwrap().as_deref(), Some(b"ours".as_slice()), "{target}");
            make_directories(&root, Path::new("/opt/new/deep")).unwrap();
            assert!(root.path("/var/opt/new/deep").is_dir(), "{target}");
            std::os::unix::fs::lchown(root.path("/opt"), Some(500), None).unwrap();
            assert!(told(read_state(&root)).contains("/opt belongs to the user with uid 500"), "{target}");
            assert!(make_directories(&root, Path::new("/opt/other")).is_err());
            assert!(!root.path("/var/opt/other").exists());
        }
        let (_dir, root) = host();
        symlink("loop", root.path("/loop")).unwrap();
        assert!(matches!(directory(&root, Path::new("/loop/x")), Err(Distrust::Io { .. })));
    }

    #[test]
    fn no_directory_is_made_in_what_belongs_to_a_user() {
        if skips_without([Need::Root]) {
            return;
        }
        let (_dir, root) = host();
        for (uid, is_made) in [(500, false), (0, true)] {
            chown(root.path("/opt/ours"), Some(uid), None).unwrap();
            let path = Path::new("/opt/ours/new");
            assert_eq!(make_directories(&root, path).is_ok(), is_made, "{uid}");
            assert_eq!(root.path(path).exists(), is_made, "{uid}");
        }
    }
}
