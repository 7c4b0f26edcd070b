//! The record of a started broker, and the lock that prevents two starts at the same time.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use host::{
    files::{Owner, remove_if_there, write_atomic},
    lock::{self, FileLock},
    process::Identity,
};
use hostapi::{LaunchRecord, Refusal};

/// `broker.json` in the run directory.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct RunRecord {
    /// The broker's process. Under systemd this is only the first one: after a restart the unit's main process counts.
    /// None between the decision to start the unit and its start.
    pub process: Option<Identity>,
    /// ID of the boot in which it was started.
    pub boot_id: String,
    /// True if systemd supervises it.
    pub systemd: bool,
    /// The prefix that contains its log.
    pub prefix: PathBuf,
    /// Size of its log before the start, in bytes.
    pub log_start: u64,
    /// Rank, instance, epoch and environment that it was started with.
    pub record: LaunchRecord,
}

const RECORD: &str = "broker.json";
const LOCK: &str = "launch.lock";

impl RunRecord {
    /// Loads the record of this host; None if there is none, or it can't be parsed.
    pub fn load(run_dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(run_dir.join(RECORD)).ok()?).ok()
    }

    /// Replaces the record by one rename.
    ///
    /// # Errors
    /// A [`Refusal`] that names the record.
    pub fn store(&self, run_dir: &Path) -> Result<(), Refusal> {
        let path = run_dir.join(RECORD);
        let text = serde_json::to_vec(self).map_err(|error| Refusal::io("write", &path, &error.into()))?;
        write_atomic(&path, &text, 0o644, Owner::ROOT)
    }

    /// Removes the record; succeeds if there is none.
    ///
    /// # Errors
    /// If it can't be removed.
    pub fn remove(run_dir: &Path) -> io::Result<()> {
        remove_if_there(&run_dir.join(RECORD))
    }
}

/// Makes the run directory.
///
/// # Errors
/// If it can't be made.
pub fn make_run_dir(run_dir: &Path) -> io::Result<()> {
    fs::create_dir_all(run_dir)?;
    fs::set_permissions(run_dir, fs::Permissions::from_mode(0o755))
}

/// Takes the lock that start, stop and forget share. A launcher inherits it and releases it by its exec, after it has
/// written the record. So whoever gets the lock sees either a record or no process that could still become a broker,
/// even if the stage that began the start was killed.
///
/// # Errors
/// See [`lock::take`].
pub fn lock(run_dir: &Path, wait: Duration) -> io::Result<FileLock> {
    lock::take(&run_dir.join(LOCK), wait)
}

/// Removes the lock file.
///
/// # Errors
/// If it can't be removed.
pub fn remove_lock(run_dir: &Path) -> io::Result<()> {
    remove_if_there(&run_dir.join(LOCK))
}
