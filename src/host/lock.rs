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
};

use super::{HostState, Refusal, Root};

/// Name of the lock below the prefix.
pub const LOCK: &str = "lock";

/// How long an order waits for another one: longer than a start takes, shorter than an agent's patience.
pub const WAIT: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(20);

/// The right to write below the prefix, held by one stage at a time; given back when dropped, or by the kernel when its
/// process is killed.
#[derive(Debug)]
pub struct HostLock {
    _file: Flock<File>,
}

impl HostLock {
    /// Takes the lock of a prefix that is there.
    ///
    /// # Errors
    /// A transient refusal when it is still held after `wait`.
    pub fn take(root: &Root, prefix: &Path, wait: Duration) -> Result<Self, Refusal> {
        let path = root.path(prefix).join(LOCK);
        take(&path, wait).map(|file| Self { _file: file }).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => Refusal::transient(format!(
                "other work on this host still holds {} after {} s",
                path.display(),
                wait.as_secs()
            )),
            _ => Refusal::io("lock", &path, &error),
        })
    }

    /// Takes the lock of a host whose prefix may be gone, and then none.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn take_if_there(root: &Root, state: Option<&HostState>) -> Result<Option<Self>, Refusal> {
        let prefix = state.map(|state| state.prefix.as_path()).filter(|prefix| root.path(prefix).is_dir());
        prefix.map(|prefix| Self::take(root, prefix, WAIT)).transpose()
    }
}

/// Takes the lock whose file is `path`, and makes that file where it is missing.
///
/// # Errors
/// `WouldBlock` when another one still holds it after `wait`.
pub fn take(path: &Path, wait: Duration) -> io::Result<Flock<File>> {
    let deadline = Instant::now() + wait;
    loop {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            // Whoever removes the file holds it meanwhile: who waited for that one must look again.
            Ok(lock) if is_still_at(&lock, path) => return Ok(lock),
            Ok(_) => continue,
            Err((_, Errno::EWOULDBLOCK)) if Instant::now() < deadline => std::thread::sleep(POLL),
            Err((_, errno)) => return Err(errno.into()),
        }
    }
}

fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(held), Ok(there)) => (held.dev(), held.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}
