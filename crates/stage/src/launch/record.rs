//! What is remembered of a started broker, and the lock that keeps two starts apart.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::fcntl::Flock;
use serde::{Deserialize, Serialize};

use host::{
    files::{Owner, remove_if_there, write_atomic},
    lock,
    process::Identity,
};
use hostapi::{LaunchRecord, Refusal};

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
    /// A sentence that names the record.
    pub fn store(&self, run_dir: &Path) -> Result<(), Refusal> {
        let path = run_dir.join(RECORD);
        let text = serde_json::to_vec(self).map_err(|error| Refusal::io("write", &path, &error.into()))?;
        write_atomic(&path, &text, 0o644, Owner::ROOT)
    }

    /// Takes the record off.
    ///
    /// # Errors
    /// The file system's, except that a record that is not there is no error.
    pub fn remove(run_dir: &Path) -> io::Result<()> {
        remove_if_there(&run_dir.join(RECORD))
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
/// See [`lock::take`].
pub fn lock(run_dir: &Path, wait: Duration) -> io::Result<Flock<File>> {
    lock::take(&run_dir.join(LOCK), wait)
}

/// Takes the lock's file off.
///
/// # Errors
/// The file system's.
pub fn remove_lock(run_dir: &Path) -> io::Result<()> {
    remove_if_there(&run_dir.join(LOCK))
}
