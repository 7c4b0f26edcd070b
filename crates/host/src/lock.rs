//! File locks (flock(2)) on files that only we can open: whoever can open a file can lock it, even without the right to
//! write. Every wait has a limit.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    libc::{O_NOFOLLOW, O_NONBLOCK},
    unistd::geteuid,
};

use super::{Root, files::remove_if_there};
use hostapi::{HostState, Refusal};

/// Name of the lock below the prefix.
pub const LOCK: &str = "lock";

/// Name of the lock in a directory whose entries are listed: lists leave out names that begin with a dot.
pub const HIDDEN: &str = ".lock";

/// How long an order waits for another one before it is refused as transient: less than the time after which an agent takes
/// a host stage for stopped (60 s).
pub const WAIT: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(20);

/// Name below the prefix of the lock under which [`LOCK`] is replaced.
pub const LOCK_REPLACING: &str = "lock.replacing";

/// Appended to a lock's path: the lock under which the file there is replaced.
const REPLACING: &str = ".replacing";

/// Permission bits of group and others.
const OTHERS: u32 = 0o077;

/// A locked file. Dropping it releases the lock, even if a child process has inherited the file. If this process is killed,
/// the kernel releases the lock once no child process has the file open.
pub type FileLock = Flock<File>;

/// The right to write below the prefix. One host stage at a time holds it. If the holder removes the lock's file, waiting
/// stages lock a new one, so they must look for the claim again.
#[derive(Debug)]
pub struct HostLock {
    _file: FileLock,
}

impl HostLock {
    /// Takes the lock of an existing prefix.
    ///
    /// # Errors
    /// A transient refusal if it is still held after `wait`.
    pub fn take(root: &Root, prefix: &Path, wait: Duration) -> Result<Self, Refusal> {
        let path = root.path(prefix).join(LOCK);
        take(&path, wait).map(|file| Self { _file: file }).map_err(|error| refusal(&path, wait, &error))
    }

    /// Takes the lock of a host's prefix; None if the prefix is gone.
    ///
    /// # Errors
    /// As for [`Self::take`].
    pub fn take_if_there(root: &Root, state: Option<&HostState>) -> Result<Option<Self>, Refusal> {
        let is_there = |prefix: &&Path| root.path(prefix).is_dir();
        let Some(prefix) = state.map(|state| state.prefix.as_path()).filter(is_there) else { return Ok(None) };
        match Self::take(root, prefix, WAIT) {
            Ok(lock) => Ok(Some(lock)),
            // Another stage removed it while we waited.
            Err(_) if !is_there(&prefix) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }
}

/// The refusal for a lock at `path` that could not be taken within `wait`; transient if another process held it.
pub fn refusal(path: &Path, wait: Duration, error: &io::Error) -> Refusal {
    match error.kind() {
        io::ErrorKind::WouldBlock => Refusal::transient(format!(
            "other work on this host still holds {} after {} s",
            path.display(),
            wait.as_secs()
        )),
        _ => Refusal::io("lock", path, error),
    }
}

/// Locks the file `path`, which it creates if missing and replaces if other users could open it.
///
/// # Errors
/// `WouldBlock` if another process still holds the lock after `wait`; `PermissionDenied` on a file system that keeps no
/// owners or modes; else why the file can't be opened or locked.
pub fn take(path: &Path, wait: Duration) -> io::Result<FileLock> {
    let deadline = Instant::now() + wait;
    loop {
        if let Some(lock) = take_if_ours_alone(path, deadline)? {
            return Ok(lock);
        }
        replace(path, deadline)?;
    }
}

/// Removes the file `path` if other users could open it. Under a lock of its own: of two processes that have seen the
/// old file, the second would else remove the new one, which the first has locked by then.
fn replace(path: &Path, deadline: Instant) -> io::Result<()> {
    let mut replacing = path.as_os_str().to_owned();
    replacing.push(REPLACING);
    let replacing = Path::new(&replacing);
    // Only we make this file, closed to others. If others can open it, the file system does not keep modes.
    let Some(_lock) = take_if_ours_alone(replacing, deadline)? else {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "its file can't be closed to other users; this file system keeps no owners or modes",
        ));
    };
    if fs::symlink_metadata(path).is_ok_and(|found| !is_ours_alone(&found)) {
        tracing::warn!(path = %path.display(), "other users could hold this lock; replacing its file");
        remove_if_there(path)?;
    }
    remove_if_there(replacing)
}

/// None if other users could open the file.
fn take_if_ours_alone(path: &Path, deadline: Instant) -> io::Result<Option<FileLock>> {
    loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(O_NOFOLLOW | O_NONBLOCK);
        let file = options.open(path)?;
        if !is_ours_alone(&file.metadata()?) {
            return Ok(None);
        }
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            // The holder of a lock may remove its file: then this lock is of a file that is gone.
            Ok(lock) if is_still_at(&lock, path) => return Ok(Some(lock)),
            Ok(_) => {}
            Err((_, Errno::EWOULDBLOCK)) if Instant::now() < deadline => std::thread::sleep(POLL),
            Err((_, errno)) => return Err(errno.into()),
        }
    }
}

/// True if no other user can open the file.
fn is_ours_alone(found: &fs::Metadata) -> bool {
    found.is_file() && found.uid() == geteuid().as_raw() && found.mode() & OTHERS == 0
}

fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(held), Ok(there)) => (held.dev(), held.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::PermissionsExt,
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
    };

    use nix::unistd::{Uid, setfsuid};

    use super::*;
    use crate::needs::{Need, skips_without};

    #[test]
    fn a_lock_that_others_could_open_is_replaced_and_waits_have_a_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LOCK);
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let others = Flock::lock(File::open(&path).unwrap(), FlockArg::LockExclusive).unwrap();
        let ours = take(&path, Duration::ZERO).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        drop(others);
        assert_eq!(take(&path, Duration::ZERO).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(ours);
        take(&path, Duration::ZERO).unwrap();
    }

    #[test]
    fn one_process_at_a_time_holds_a_lock_whose_file_several_replace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LOCK);
        let (holders, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        for _ in 0..50 {
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let lock = take(&path, WAIT).unwrap();
                        most.fetch_max(1 + holders.fetch_add(1, SeqCst), SeqCst);
                        std::thread::yield_now();
                        holders.fetch_sub(1, SeqCst);
                        drop(lock);
                    });
                }
            });
        }
        assert_eq!(most.into_inner(), 1);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "only the lock is left");
    }

    /// As on vfat, or on a network file system that maps root to nobody.
    #[test]
    fn a_file_system_that_gives_every_file_to_somebody_else_is_refused_and_not_tried_for_ever() {
        if skips_without([Need::Root]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let path = dir.path().join(LOCK);
        // Of this thread alone.
        setfsuid(Uid::from_raw(65534));
        let taken = take(&path, Duration::ZERO);
        setfsuid(geteuid());
        let error = taken.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_symlink_in_place_of_a_lock_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, target) = (dir.path().join(LOCK), dir.path().join("target"));
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(take(&path, Duration::ZERO).is_err());
        assert!(!target.exists());
    }
}
