//! Which paths on the host root can trust: those that only root could have changed, as in sshd's StrictModes.
//!
//! A path is walked component by component. Each directory on the way must belong to root and be closed to writes of
//! group and others, so that no other user can replace the next component. A symlink is followed only if root made it,
//! like the one from /opt to /var/opt on image-based distributions, and its target is walked in the same way. A file
//! system that another user mounted by FUSE is not entered: that user's program invents its owners and modes, and the
//! kernel may deny root access.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, Permissions},
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
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

use super::{
    Root,
    distrust::{Distrust, STICKY},
    mountinfo::{self, Mount},
    opening::{path_of, split},
};
use hostapi::Refusal;

/// The number of symlinks that Linux follows.
const MOST_LINKS: usize = 40;
/// Most bytes read of a file. A roster of ten thousand nodes has some megabytes.
pub const MOST_BYTES: u64 = 64 << 20;
/// Write permission of the group and of others.
pub const WRITABLE_BY_OTHERS: u32 = 0o022;
/// To examine what is there without opening it.
const LOOK: OFlag = OFlag::O_PATH.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// What is trusted: files of root or of this process's own user that are closed to writes of others.
#[derive(Clone, Copy, Debug, Default)]
struct Rule {
    /// The last component may be open to writes of others.
    may_last_be_open: bool,
    /// Directories may belong to any user. Symlinks may not.
    may_directories_be_anybodys: bool,
    /// Directories may be open to writes of others if these can't replace what root has put there, as in /tmp.
    may_directories_be_sticky: bool,
}

impl Rule {
    const CLOSED: Self =
        Self { may_last_be_open: false, may_directories_be_anybodys: false, may_directories_be_sticky: false };

    /// For what an administrator has put somewhere, or wants there.
    const CLOSED_OR_STICKY: Self = Self { may_directories_be_sticky: true, ..Self::CLOSED };

    /// For a directory that is about to be closed, as [`make_closed_directory`] does: a new file system may be open.
    const BEFORE_IT_IS_CLOSED: Self = Self { may_last_be_open: true, ..Self::CLOSED };

    /// To find out which user wrote what is there.
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
        let is_sticky = kind(found) == SFlag::S_IFDIR && found.st_mode & STICKY != 0;
        let may_be_open = kind(found) == SFlag::S_IFLNK
            || (is_last && self.may_last_be_open)
            || (is_sticky && self.may_directories_be_sticky);
        if !may_be_open && found.st_mode & WRITABLE_BY_OTHERS != 0 {
            return Err(Distrust::WritableByOthers { path: path.to_owned(), mode: found.st_mode & 0o7777 });
        }
        Ok(())
    }
}

/// True for root and for this process's own user: no other user may own what root trusts.
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || is_own(uid)
}

/// True for a FUSE mount of a user that root does not trust.
pub fn is_by_user(mount: &Mount) -> bool {
    mount.fuse_user().is_some_and(|uid| !is_trusted(uid))
}

/// True for this process's own user.
pub fn is_own(uid: u32) -> bool {
    uid == own_uid()
}

/// This process's own user.
pub fn own_uid() -> u32 {
    geteuid().as_raw()
}

fn kind(found: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT
}

/// Opens the directory `path` of the host; None if it does not exist.
///
/// # Errors
/// [`Distrust`] of the first component that users other than root own or can change.
pub fn directory(root: &Root, path: &Path) -> Result<Option<OwnedFd>, Distrust> {
    let walked = walk(root, path, Rule::CLOSED, false)?;
    Ok(walked.is_whole.then_some(walked.last))
}

/// Opens the directory `path` of the host as [`directory`] does, but also if others can write to it, as before
/// [`make_closed_directory`].
///
/// # Errors
/// As for [`nearest`].
pub fn directory_to_close(root: &Root, path: &Path) -> Result<Option<OwnedFd>, Distrust> {
    let walked = walk(root, path, Rule::BEFORE_IT_IS_CLOSED, false)?;
    Ok(walked.is_whole.then_some(walked.last))
}

/// Opens the directory `path` of the host if no other user can replace root's files in it: a sticky one such as /tmp will do.
///
/// # Errors
/// As for [`directory`], and if it does not exist.
pub fn directory_for_files(root: &Root, path: &Path) -> Result<OwnedFd, Distrust> {
    let walked = walk(root, path, Rule::CLOSED_OR_STICKY, false)?;
    if walked.is_whole { Ok(walked.last) } else { Err(Distrust::io(path, Errno::ENOENT)) }
}

/// Opens the plain file `path` of the host for reading, if nobody but root can have written it.
///
/// # Errors
/// As for [`directory_for_files`] and [`read`].
pub fn open_file(root: &Root, path: &Path) -> Result<File, Distrust> {
    let failed = |source| Distrust::Io { path: path.to_owned(), source };
    let (above, name) = split(path).map_err(failed)?;
    let directory = directory_for_files(root, above)?;
    let found = look_at_plain(&directory, path, name)?.ok_or_else(|| Distrust::io(path, Errno::ENOENT))?;
    File::open(path_of(&found)).map_err(failed)
}

/// Opens the directory `path` of the host, even if other users can change it, unless a symlink on the way is another
/// user's.
pub fn by_roots_links(root: &Root, path: &Path) -> Option<OwnedFd> {
    let walked = walk(root, path, Rule::LINKS_ALONE, false).ok()?;
    walked.is_whole.then_some(walked.last)
}

/// Opens the directory `path` of the host, or the nearest existing one above it, for [`make_closed_directory`].
///
/// # Errors
/// As for [`directory`], except that others may be able to write to `path` itself.
pub fn nearest(root: &Root, path: &Path) -> Result<OwnedFd, Distrust> {
    walk(root, path, Rule::BEFORE_IT_IS_CLOSED, false).map(|walked| walked.last)
}

/// Opens the directory `path` of the host, after making it and the missing directories above it (mode 0755). Makes
/// nothing in a directory that is not trusted.
///
/// # Errors
/// As for [`directory`].
pub fn make_directories(root: &Root, path: &Path) -> Result<OwnedFd, Distrust> {
    walk(root, path, Rule::CLOSED, true).map(|walked| walked.last)
}

/// Makes the directory `path` of the host as [`make_directories`] does, with the permission bits `mode`. If it exists
/// and others can write to it, it is closed to them; that does not make its present content trustworthy.
///
/// # Errors
/// As for [`directory`].
pub fn make_closed_directory(root: &Root, path: &Path, mode: u32) -> Result<(), Refusal> {
    let Walked { last: directory, .. } = walk(root, path, Rule::BEFORE_IT_IS_CLOSED, true)?;
    let made = path_of(&directory);
    let set = || match fs::metadata(&made)?.mode() & 0o7777 == mode {
        true => Ok(()),
        false => fs::set_permissions(&made, Permissions::from_mode(mode)),
    };
    set().map_err(|error| Refusal::io("make the directory", path, &error))
}

/// Reads the plain file `name` in `directory`, which is the host's `path`; None if there is none.
///
/// # Errors
/// [`Distrust`] of the file, which was then not read.
pub fn read(directory: &OwnedFd, path: &Path, name: &str) -> Result<Option<Vec<u8>>, Distrust> {
    let path = path.join(name);
    let found = look_at_plain(directory, &path, OsStr::new(name))?;
    found.map(|found| content(&found)).transpose().map_err(|source| Distrust::Io { path, source })
}

/// Opens the plain file `name` in `directory` only to examine it, if nobody but root can have written it. `path` is that of the file.
fn look_at_plain(directory: &OwnedFd, path: &Path, name: &OsStr) -> Result<Option<OwnedFd>, Distrust> {
    // Examined before it is opened for reading: a pipe would block, and opening a device may have effects.
    let Some(found) = look(directory, path, name)? else { return Ok(None) };
    let status = fstat(&found).map_err(|errno| Distrust::io(path, errno))?;
    if kind(&status) != SFlag::S_IFREG {
        return Err(Distrust::Kind { path: path.to_owned(), wanted: "a plain file" });
    }
    Rule::CLOSED.check(path, &status, false)?;
    Ok(Some(found))
}

/// uid of the owner of `name` in `directory`, which is the host's `path`; None if there is no such entry.
///
/// # Errors
/// If a user has mounted a file system over it by FUSE, or it can't be examined.
pub fn owner(directory: &OwnedFd, path: &Path, name: &OsStr) -> Result<Option<u32>, Distrust> {
    let path = path.join(name);
    let Some(found) = look(directory, &path, name)? else { return Ok(None) };
    fstat(&found).map(|status| Some(status.st_uid)).map_err(|errno| Distrust::io(&path, errno))
}

/// Opens the directory at `path`, whoever owns it, unless a user has mounted a file system over it by FUSE, which may never answer.
/// `path` is this process's, and leads to it through no directory of another user. Does not follow a symlink at its end.
///
/// # Errors
/// If there is none, something else is there, or a user has mounted something over it.
pub fn open_unless_user_mounted(path: &Path) -> io::Result<File> {
    let (above, name) = split(path)?;
    let found = look(&File::open(above)?, path, name)?.ok_or(io::ErrorKind::NotFound)?;
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    Ok(File::from(openat(found, c".", flags, Mode::empty())?))
}

/// Opens `name` in `directory` only to examine it, unless a user has mounted a file system over it by FUSE; None if
/// there is no such entry. `path` is that of the entry.
fn look(directory: impl AsFd, path: &Path, name: &OsStr) -> Result<Option<OwnedFd>, Distrust> {
    let found = match openat(&directory, name, LOOK, Mode::empty()) {
        Err(Errno::ENOENT) => return Ok(None),
        found => found.map_err(|errno| Distrust::io(path, errno))?,
    };
    let above = mountinfo::id(directory).map_err(|source| Distrust::Io { path: path.to_owned(), source })?;
    mount_of(path, &found, above)?;
    Ok(Some(found))
}

/// The number of the mount of `found`, which was opened in a directory of the mount `above`. Comes before fstat, which
/// already asks the file system.
///
/// # Errors
/// If it is another mount, which another user made by FUSE.
fn mount_of(path: &Path, found: &OwnedFd, above: u64) -> Result<u64, Distrust> {
    let failed = |source| Distrust::Io { path: path.to_owned(), source };
    let mount = mountinfo::id(found).map_err(failed)?;
    if mount != above
        && let Some(uid) = mountinfo::fuse_user(mount).map_err(failed)?
        && !is_trusted(uid)
    {
        return Err(Distrust::Mounted { path: path.to_owned(), uid });
    }
    Ok(mount)
}

/// Reads the plain file `name` in `directory`, which any user may own, if root made it there: it belongs to root, has
/// no other name, and nobody has mounted anything over it. A file system that a user mounts by FUSE shows whatever that
/// user likes, and may never answer.
pub fn read_roots_own(directory: &OwnedFd, name: &str) -> Option<Vec<u8>> {
    let found = openat(directory, name, LOOK, Mode::empty()).ok()?;
    // First, because fstat already asks the file system.
    if mountinfo::id(&found).ok()? != mountinfo::id(directory).ok()? {
        return None;
    }
    let status = fstat(&found).ok()?;
    let is_roots = kind(&status) == SFlag::S_IFREG && status.st_uid == 0 && status.st_nlink == 1;
    if is_roots { content(&found).ok() } else { None }
}

/// What is in a file that was opened with [`LOOK`].
fn content(found: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path_of(found))?.take(MOST_BYTES).read_to_end(&mut content)?;
    Ok(content)
}

struct Walked {
    last: OwnedFd,
    /// True if `last` is the end of the path, false if it is only the nearest directory above it.
    is_whole: bool,
}

fn walk(root: &Root, path: &Path, rule: Rule, makes: bool) -> Result<Walked, Distrust> {
    let at_top = PathBuf::from("/");
    let top = open(&root.path("/"), OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty());
    let top = top.map_err(|errno| Distrust::io(&at_top, errno))?;
    rule.check(&at_top, &fstat(&top).map_err(|errno| Distrust::io(&at_top, errno))?, false)?;
    let mount = mountinfo::id(&top).map_err(|source| Distrust::Io { path: at_top.clone(), source })?;
    // The open directories and their mounts, from the top to where the walk is. In a changed root, mountinfo does not list
    // that of the top.
    let mut open = vec![(at_top, top, mount)];
    // The components that are still to be walked, the next one last.
    let mut left = Vec::new();
    push_parts(&mut left, path);
    let mut links = 0;
    while let Some(part) = left.pop() {
        if part == ".." {
            open.truncate(open.len().saturating_sub(1).max(1));
            continue;
        }
        let Some((above, directory, mount)) = open.last() else { break };
        let here = above.join(&part);
        let failed = |errno| Distrust::io(&here, errno);
        let found = match openat(directory, part.as_os_str(), LOOK, Mode::empty()) {
            Err(Errno::ENOENT) if makes => {
                match mkdirat(directory, part.as_os_str(), Mode::from_bits_truncate(0o755)) {
                    // Opened as whatever is there now, and checked below.
                    Ok(()) | Err(Errno::EEXIST) => openat(directory, part.as_os_str(), LOOK, Mode::empty()),
                    Err(errno) => Err(errno),
                }
            }
            found => found,
        };
        let found = match found {
            Err(Errno::ENOENT) if !makes => {
                let last = open.pop().map(|(_, directory, _)| directory).ok_or(Errno::ENOENT).map_err(failed)?;
                return Ok(Walked { last, is_whole: false });
            }
            found => found.map_err(failed)?,
        };
        let mount = mount_of(&here, &found, *mount)?;
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
            open.push((here, found, mount));
        } else {
            return Err(Distrust::Kind { path: here, wanted: "a directory" });
        }
    }
    let last = open.pop().map(|(_, directory, _)| directory).ok_or_else(|| Distrust::io(path, Errno::ENOENT))?;
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
    use std::{
        os::unix::fs::{chown, symlink},
        thread,
    };

    use nix::{
        mount::{MsFlags, mount},
        sched::{CloneFlags, unshare},
        unistd::chroot,
    };

    use super::*;
    use crate::needs::{Need, skips_without};

    fn verdict<T>(result: Result<T, Distrust>) -> String {
        result.map_or_else(|distrust| distrust.to_string(), |_| "trusted".to_owned())
    }

    /// A root directory with /opt/ours in it, and in that the file `state` with the content "ours".
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
    fn what_other_users_could_have_changed_is_not_trusted_and_has_a_remedy() {
        if skips_without([Need::Root]) {
            return;
        }
        for (path, mode, uid, expected) in [
            ("/opt", 0o755, 0, "trusted"),
            ("/opt", 0o700, 0, "trusted"),
            ("/", 0o777, 0, "chmod go-w /`"),
            ("/opt", 0o775, 0, "chmod go-w /opt`"),
            ("/opt", 0o1777, 0, "its mode is 1777"),
            ("/opt/ours", 0o757, 0, "chmod go-w /opt/ours`"),
            ("/opt", 0o755, 500, "/opt belongs to the user with uid 500"),
            ("/opt/ours/state", 0o644, 0, "trusted"),
            ("/opt/ours/state", 0o664, 0, "chmod go-w /opt/ours/state`"),
            ("/opt/ours/state", 0o644, 500, "chown root /opt/ours/state`"),
        ] {
            let (_dir, root) = host();
            chown(root.path(path), Some(uid), None).unwrap();
            fs::set_permissions(root.path(path), fs::Permissions::from_mode(mode)).unwrap();
            let verdict = verdict(read_state(&root));
            assert!(verdict.contains(expected), "{path} {mode:o} {uid}: {verdict}");
        }
    }

    #[test]
    fn a_file_that_is_not_plain_is_neither_read_nor_waited_for() {
        let (_dir, root) = host();
        let state = root.path("/opt/ours/state");
        fs::remove_file(&state).unwrap();
        assert!(read_state(&root).unwrap().is_none());
        nix::unistd::mkfifo(&state, Mode::S_IRUSR).unwrap();
        assert!(verdict(read_state(&root)).contains("is not a plain file"));
        fs::remove_file(&state).unwrap();
        fs::write(root.path("/secret"), "secret").unwrap();
        symlink("../../secret", &state).unwrap();
        assert!(verdict(read_state(&root)).contains("is not a plain file"));
    }

    #[test]
    fn only_links_of_root_are_followed_and_only_inside_the_root() {
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
            assert!(verdict(read_state(&root)).contains("/opt belongs to the user with uid 500"), "{target}");
            assert!(make_directories(&root, Path::new("/opt/other")).is_err());
            assert!(!root.path("/var/opt/other").exists());
        }
        let (_dir, root) = host();
        symlink("loop", root.path("/loop")).unwrap();
        assert!(matches!(directory(&root, Path::new("/loop/x")), Err(Distrust::Io { .. })));
    }

    #[test]
    fn no_directory_is_made_in_a_directory_of_another_user() {
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

    /// In such a root, mountinfo does not list the mount of the root itself.
    #[test]
    fn a_link_back_from_another_mount_is_followed_in_a_changed_root() {
        if skips_without([Need::Namespaces]) {
            return;
        }
        let (dir, root) = host();
        for made in ["/proc", "/data"] {
            fs::create_dir(root.path(made)).unwrap();
        }
        // On a thread of its own, which alone has the other mounts and the other root.
        let looked = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            mount(Some("/proc"), &root.path("/proc"), none, MsFlags::MS_BIND | MsFlags::MS_REC, none).unwrap();
            mount(Some("data"), &root.path("/data"), Some("tmpfs"), MsFlags::empty(), Some("mode=755")).unwrap();
            symlink("/opt", root.path("/data/link")).unwrap();
            chroot(dir.path()).unwrap();
            verdict(directory(&Root::host(), Path::new("/data/link/ours")))
        });
        assert_eq!(looked.join().unwrap(), "trusted");
    }

    #[test]
    fn a_directory_for_roots_files_may_be_sticky() {
        let (_dir, root) = host();
        let verdict_of = |mode: u32| {
            fs::set_permissions(root.path("/opt/ours"), Permissions::from_mode(mode)).unwrap();
            verdict(directory_for_files(&root, Path::new("/opt/ours")))
        };
        assert_eq!([0o755, 0o1777].map(verdict_of), ["trusted", "trusted"]);
        assert!(verdict_of(0o777).contains("users other than root can write to /opt/ours"));
        assert!(verdict(directory_for_files(&root, Path::new("/opt/gone"))).contains("/opt/gone"));
    }
}
