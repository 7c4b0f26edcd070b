//! What is remembered of a started broker, and the lock that keeps two starts apart.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use serde::{Deserialize, Serialize};

use super::process::Identity;
use crate::host::LaunchRecord;

/// `broker.json` in the run directory.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct RunRecord {
    /// The broker's process. Under systemd only the first one: after a restart the unit's main process counts.
    /// None between the decision to start the unit and its start.
    pub process: Option<Identity>,
    /// The boot it was started in.
    pub boot_id: String,
    /// systemd is its supervisor.
    pub systemd: bool,
    /// Where its log is.
    pub prefix: PathBuf,
    /// How long its log was before it was started.
    pub log_start: u64,
    /// What it was started with.
    pub record: LaunchRecord,
}

const RECORD: &str = "broker.json";
const LOCK: &str = "launch.lock";

impl RunRecord {
    /// The record of this host; None where there is none that can be read: it then says nothing.
    pub fn load(run_dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(run_dir.join(RECORD)).ok()?).ok()
    }

    /// Replaces the record as a whole.
    ///
    /// # Errors
    /// The file system's.
    pub fn store(&self, run_dir: &Path) -> io::Result<()> {
        write_atomically(&run_dir.join(RECORD), serde_json::to_string(self)?.as_bytes(), 0o644)
    }

    /// Takes the record off.
    ///
    /// # Errors
    /// The file system's, except that a record that is not there is no error.
    pub fn remove(run_dir: &Path) -> io::Result<()> {
        absent_is_fine(fs::remove_file(run_dir.join(RECORD)))
    }
}

/// Writes `path` aside and renames it into place. There is one writer (see [`lock`]), so the name aside can be a fixed
/// one: what a killed writer left is overwritten by the next.
///
/// # Errors
/// The file system's.
pub fn write_atomically(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&aside)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(content)?;
    fs::rename(&aside, path)
}

/// What is not there need not be taken off.
///
/// # Errors
/// Any but `NotFound`.
pub fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Makes the run directory.
///
/// # Errors
/// The file system's.
pub fn make_run_dir(run_dir: &Path) -> io::Result<()> {
    fs::create_dir_all(run_dir)?;
    fs::set_permissions(run_dir, fs::Permissions::from_mode(0o755))
}

/// Takes the one lock of start, stop and forget. A launcher inherits it and lets go by its exec, after it has written the
/// record: whoever gets the lock sees either a record or nothing that could still become a broker, even where the stage
/// that began the start was killed.
///
/// # Errors
/// `WouldBlock` when another one holds it for longer than `timeout`.
pub fn lock(run_dir: &Path, timeout: Duration) -> io::Result<Flock<File>> {
    let path = run_dir.join(LOCK);
    let deadline = Instant::now() + timeout;
    loop {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            // A forget may have taken the file off between open and lock: then the lock holds nobody back.
            Ok(lock) if is_still_at(&lock, &path) => return Ok(lock),
            Ok(_) => continue,
            Err((_, errno)) if errno != Errno::EWOULDBLOCK || Instant::now() >= deadline => return Err(errno.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn is_still_at(file: &File, path: &Path) -> bool {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(held), Ok(there)) => identity(held) == identity(there),
        _ => false,
    }
}

/// Takes the lock's file off.
///
/// # Errors
/// The file system's.
pub fn remove_lock(run_dir: &Path) -> io::Result<()> {
    absent_is_fine(fs::remove_file(run_dir.join(LOCK)))
}
