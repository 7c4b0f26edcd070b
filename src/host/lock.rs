use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

use super::{Refusal, Root};

/// Name of the lock below the prefix.
pub const LOCK: &str = "lock";

/// How long an order waits for another one: longer than a start takes, shorter than an agent's patience.
pub const WAIT: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(50);

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
        let deadline = Instant::now() + wait;
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path)
                .map_err(|error| Refusal::io("open the lock", &path, &error))?;
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                // A removal deletes the file while it holds it: who waited for that one must look again.
                Ok(file) if is_still_at(&file, &path) => return Ok(Self { _file: file }),
                Ok(_) => continue,
                Err((_, Errno::EWOULDBLOCK)) if Instant::now() < deadline => std::thread::sleep(POLL),
                Err((_, Errno::EWOULDBLOCK)) => {
                    return Err(Refusal::transient(format!(
                        "other work on this host still holds {} after {} s",
                        path.display(),
                        wait.as_secs()
                    )));
                }
                Err((_, error)) => return Err(Refusal::io("lock", &path, &error.into())),
            }
        }
    }
}

fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(held), Ok(there)) => (held.dev(), held.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}
