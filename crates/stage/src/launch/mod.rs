//! The broker's process on the host: starts it outside the pod's cgroup, finds it again, and stops it.
//!
//! At most one broker runs: start, stop and forget exclude each other by a lock in the run directory, and start returns
//! a broker that already runs. This module ignores differences between the order and the running broker: they never
//! cause a restart.

mod detached;
mod error;
mod found;
mod members;
mod record;
pub mod shutdown;
pub mod systemd;

use std::{
    fs, io,
    os::unix::fs::{MetadataExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

pub use detached::{LAUNCHER, launcher_main};
pub use error::LaunchError;
pub use found::{UnknownBroker, Unrestored};

use self::{found::UnrecordedBroker, record::RunRecord, systemd::Systemd};
use api::{BROKER_SOCKET_DIR, RUN_DIR};
use broker::command::rundir;
use host::{
    Root, cgroup, facts,
    files::FileError,
    lock::FileLock,
    log,
    process::{Identity, Signal},
    removal::remove_all_if_there,
    trust,
    users::{self, User},
};
use hostapi::{LaunchOrder, LaunchRecord, Refusal, RunningBroker, StopOrder};

/// How long a start waits for another start or stop.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a process may take to end after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of the broker on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BrokerView {
    /// The running broker, verified by boot id, pid, start time and state.
    pub running: Option<RunningBroker>,
    /// If a broker of ours was started in this boot and no longer runs: the line of its log that explains why.
    pub died: Option<String>,
    /// The record of a broker that no longer runs.
    pub last_record: Option<LaunchRecord>,
    /// A running broker whose instance is uncertain.
    pub unknown: Option<UnknownBroker>,
    /// Number of job shells in the broker's unit or cgroup, whether the broker runs or not.
    pub job_shells: usize,
}

/// Paths of the broker's files on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlaces {
    /// Directory of record and lock.
    pub run_dir: PathBuf,
    /// Directory of the broker's socket.
    pub socket_dir: PathBuf,
    /// The broker's cgroup, relative to the mount of each hierarchy.
    pub cgroup: String,
    /// Path by which this program can be executed again.
    pub launcher: PathBuf,
    /// systemd, if it runs on this host.
    pub systemd: Option<Systemd>,
}

impl HostPlaces {
    /// The paths on the host that this process sees.
    pub fn of_host() -> Self {
        Self {
            run_dir: RUN_DIR.into(),
            socket_dir: BROKER_SOCKET_DIR.into(),
            cgroup: "flux-distribute/broker".to_owned(),
            launcher: "/proc/self/exe".into(),
            systemd: Systemd::of(Path::new("/")),
        }
    }
}

/// Starts the broker, or returns the one that runs.
///
/// # Errors
/// If it can't be started, or an unknown broker runs; see [`LaunchError`].
pub fn start(order: &LaunchOrder) -> Result<RunningBroker, Refusal> {
    HostPlaces::of_host().start(order)
}

/// Stops the broker and all other processes in its cgroup, and waits for their end.
///
/// # Errors
/// If one does not end, or an unknown broker runs; see [`LaunchError`].
pub fn stop(order: &StopOrder) -> Result<(), Refusal> {
    HostPlaces::of_host().stop(order)
}

/// Looks for the broker, and restores its record if that was lost. Its log is below `prefix`, or if that is None, below
/// the prefix that it was started with.
pub fn observe(prefix: Option<&Path>) -> BrokerView {
    HostPlaces::of_host().observe(prefix)
}

/// Removes what a start left on the host outside the prefix: unit, record, the socket's directory, cgroups.
///
/// # Errors
/// If a broker still runs, or something can't be removed; see [`LaunchError`].
pub fn forget() -> Result<(), Refusal> {
    HostPlaces::of_host().forget()
}

impl HostPlaces {
    /// See [`start`].
    ///
    /// # Errors
    /// See [`start`].
    pub fn start(&self, order: &LaunchOrder) -> Result<RunningBroker, Refusal> {
        Ok(self.try_start(order)?)
    }

    /// See [`stop`].
    ///
    /// # Errors
    /// See [`stop`].
    pub fn stop(&self, order: &StopOrder) -> Result<(), Refusal> {
        Ok(self.try_stop(Duration::from_secs(order.grace_secs))?)
    }

    /// See [`forget`].
    ///
    /// # Errors
    /// See [`forget`].
    pub fn forget(&self) -> Result<(), Refusal> {
        Ok(self.try_forget()?)
    }

    /// See [`observe`].
    pub fn observe(&self, prefix: Option<&Path>) -> BrokerView {
        let view = self.observe_broker(prefix);
        let unit = view.running.as_ref().filter(|broker| broker.systemd).map(|broker| broker.pid);
        // If the cgroups can't be read, assume one job: a job must not be overlooked.
        let job_shells = self.job_shells(unit).unwrap_or(1);
        BrokerView { job_shells, ..view }
    }

    fn observe_broker(&self, prefix: Option<&Path>) -> BrokerView {
        let Some(record) = self.record() else {
            // If systemd does not answer this time, nothing is known about its unit.
            return match self.find().ok().flatten() {
                None => BrokerView::default(),
                Some(UnrecordedBroker::Unknown(unknown)) => {
                    BrokerView { unknown: Some(unknown), ..BrokerView::default() }
                }
                Some(UnrecordedBroker::Known(record)) => {
                    self.remember(&record);
                    let running = record.process.clone().map(|process| running(process, *record));
                    BrokerView { running, ..BrokerView::default() }
                }
            };
        };
        match self.process(&record) {
            Some(process) => BrokerView { running: Some(running(process, record)), ..BrokerView::default() },
            None => {
                let log = log::path(prefix.unwrap_or(&record.prefix));
                let died = Some(log::explain_end(&log::tail(&log, record.log_start)));
                BrokerView { died, last_record: Some(record.record), ..BrokerView::default() }
            }
        }
    }

    /// The record, if it is of this boot.
    fn record(&self) -> Option<RunRecord> {
        RunRecord::load(&self.run_dir).filter(|record| facts::boot_id(&Root::host()) == record.boot_id)
    }

    /// Restores a lost record. If a start or stop holds the lock, does nothing: that one writes or removes the record
    /// itself.
    fn remember(&self, record: &RunRecord) {
        let stored = || -> Result<(), LaunchError> {
            record::make_run_dir(&self.run_dir).map_err(FileError::on("make", &self.run_dir))?;
            let _lock = record::lock(&self.run_dir, Duration::ZERO).map_err(|_| LaunchError::UnderWay)?;
            if self.record().is_none() && record.process.as_ref().is_some_and(Identity::lives) {
                record.store(&self.run_dir)?;
            }
            Ok(())
        };
        if let Err(error) = stored() {
            tracing::debug!(%error, "can't restore the broker's record yet");
        }
    }

    /// The broker's process. Under systemd it is the unit's main process, which after a manual restart is another one than the
    /// record's. systemd starts that once the recorded one has ended, so it is asked only then: each round of an agent looks here.
    fn process(&self, record: &RunRecord) -> Option<Identity> {
        let recorded = record.process.clone().filter(Identity::lives);
        match (&self.systemd, record.systemd) {
            (Some(systemd), true) if recorded.is_none() => systemd.process().ok().flatten(),
            _ => recorded,
        }
    }

    fn try_start(&self, order: &LaunchOrder) -> Result<RunningBroker, LaunchError> {
        let user = users::resolve_on(&Root::host(), &order.run_as)?;
        if order.argv.is_empty() {
            return Err(LaunchError::NoCommand);
        }
        record::make_run_dir(&self.run_dir).map_err(FileError::on("make", &self.run_dir))?;
        let lock = self.lock()?;
        let BrokerView { running, unknown, .. } = self.observe(Some(&order.prefix));
        if let Some(running) = running {
            return Ok(running);
        }
        if let Some(unknown) = unknown {
            return Err(LaunchError::Unrecorded(unknown));
        }
        match &self.systemd {
            // systemd may not have answered `observe`, so an unrecorded main process may run.
            Some(systemd) => {
                if let Some(process) = systemd.process()? {
                    return Err(LaunchError::StillRuns { pid: process.pid });
                }
            }
            // Processes that a crashed broker left hold cores that the next broker will allocate, and may write into its rundir.
            None => self.kill_left_behind()?,
        }
        make_owned_dir(&self.socket_dir, &user).map_err(FileError::on("make", &self.socket_dir))?;
        let rundir = rundir(&order.prefix);
        if rundir.starts_with(&order.prefix) {
            // Jobs of a broker that was killed have left their temporary directories there.
            if let Err(error) = remove_all_if_there(&rundir) {
                // A job of root may have mounted something there.
                tracing::warn!(%error, path = %rundir.display(), "can't remove what jobs have left");
            }
            make_owned_dir(&rundir, &user).map_err(FileError::on("make", &rundir))?;
        }
        let log = log::open(&order.prefix);
        let log = log.map_err(FileError::on("open", &log::path(&order.prefix)))?;
        // A full disk must not prevent a start.
        if let Err(error) = shutdown::mark(&log, &order.record) {
            tracing::warn!(%error, "can't write to the broker's log");
        }

        match &self.systemd {
            Some(systemd) => {
                // Stored before the start, so that a unit that is found running always has a record.
                let (prefix, order_record) = (order.prefix.clone(), order.record.clone());
                let mut record = RunRecord {
                    process: None,
                    boot_id: facts::boot_id(&Root::host()),
                    systemd: true,
                    log_start: log::length(&log::path(&prefix)),
                    prefix,
                    record: order_record,
                };
                record.store(&self.run_dir)?;
                record.process = Some(systemd.start(order, &user)?);
                record.store(&self.run_dir)?;
            }
            None => {
                if let Err(error) = detached::start(order, &self.run_dir, &self.cgroup, &self.launcher, &lock) {
                    let _ = RunRecord::remove(&self.run_dir);
                    return Err(error);
                }
            }
        }
        let view = self.observe(Some(&order.prefix));
        view.running.ok_or_else(|| LaunchError::Gone { why: view.died.unwrap_or_default() })
    }

    fn try_stop(&self, grace: Duration) -> Result<(), LaunchError> {
        if !self.run_dir.is_dir() && self.find()?.is_none() {
            return Ok(());
        }
        record::make_run_dir(&self.run_dir).map_err(FileError::on("make", &self.run_dir))?;
        let _lock = self.lock()?;
        let record = match self.record() {
            Some(record) => record,
            None => match self.find()? {
                Some(UnrecordedBroker::Known(record)) => *record,
                Some(UnrecordedBroker::Unknown(unknown)) => return Err(LaunchError::Unrecorded(unknown)),
                None => return Ok(()),
            },
        };
        if let (Some(systemd), true) = (&self.systemd, record.systemd) {
            systemd.stop(grace)?;
        } else {
            self.stop_detached(&record, grace)?;
        }
        // Without a record, a broker that was stopped does not count as died.
        Ok(RunRecord::remove(&self.run_dir).map_err(FileError::on("remove record in", &self.run_dir))?)
    }

    fn stop_detached(&self, record: &RunRecord, grace: Duration) -> Result<(), LaunchError> {
        if let Some(process) = self.process(record) {
            let pid = process.pid;
            let signal = |signal| process.signal(signal).map_err(|source| LaunchError::Signal { pid, source });
            signal(Signal::SIGTERM)?;
            if !process.wait_gone(grace) {
                signal(Signal::SIGKILL)?;
                if !process.wait_gone(KILL_TIMEOUT) {
                    return Err(LaunchError::Unkillable { pid });
                }
            }
        }
        self.kill_left_behind()
    }

    fn try_forget(&self) -> Result<(), LaunchError> {
        let lock = if self.run_dir.is_dir() { Some(self.lock()?) } else { None };
        let BrokerView { running, unknown, .. } = self.observe(None);
        if let Some(running) = running {
            return Err(LaunchError::StillRuns { pid: running.pid });
        }
        if let Some(unknown) = unknown {
            return Err(LaunchError::Unrecorded(unknown));
        }
        if let Some(systemd) = &self.systemd {
            // systemd may not have answered `observe`.
            if let Some(process) = systemd.process()? {
                return Err(LaunchError::StillRuns { pid: process.pid });
            }
            systemd.forget()?;
        }
        // A broker that crashed and whose record was lost was never stopped, so its processes may still run.
        self.kill_left_behind()?;
        cgroup::remove(&self.cgroups()?)?;
        if lock.is_none() {
            return Ok(());
        }
        RunRecord::remove(&self.run_dir).map_err(FileError::on("remove record in", &self.run_dir))?;
        remove_all_if_there(&self.socket_dir).map_err(FileError::on("remove", &self.socket_dir))?;
        record::remove_lock(&self.run_dir).map_err(FileError::on("remove lock in", &self.run_dir))?;
        // Fails if the directory holds other files; then it stays.
        let _ = fs::remove_dir(&self.run_dir);
        Ok(())
    }

    fn lock(&self) -> Result<FileLock, LaunchError> {
        record::lock(&self.run_dir, LOCK_TIMEOUT).map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => LaunchError::UnderWay,
            _ => FileError::on("lock", &self.run_dir)(source).into(),
        })
    }

    fn cgroups(&self) -> Result<Vec<cgroup::Place>, LaunchError> {
        let read = FileError::on("read", Path::new("/proc/self/cgroup"));
        Ok(cgroup::places_here(&self.cgroup).map_err(read)?)
    }

    /// Kills all processes in the broker's cgroup once the broker is gone, as systemd does with KillMode=mixed.
    fn kill_left_behind(&self) -> Result<(), LaunchError> {
        let places = self.cgroups()?;
        let deadline = Instant::now() + KILL_TIMEOUT;
        loop {
            // Processes that fork faster than they can be listed would get away. A stage that was killed may have left them frozen.
            let frozen = cgroup::freeze(&places);
            let left = kill_members(&places);
            match (cgroup::thaw(&places), frozen) {
                (Err(error), Ok(())) => return Err(error.into()),
                (_, Err(error)) => tracing::warn!(%error, "can't freeze what a broker left behind"),
                (Ok(()), Ok(())) => {}
            }
            let Some(first) = left?.into_iter().next() else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(LaunchError::Unkillable { pid: first.pid });
            }
            first.wait_gone(Duration::from_millis(500));
        }
    }
}

/// Sends SIGKILL to all processes in and below the cgroups of `places`; returns them.
fn kill_members(places: &[cgroup::Place]) -> Result<Vec<Identity>, LaunchError> {
    let found: Vec<Identity> = cgroup::members(places).into_iter().filter_map(Identity::of).collect();
    for process in &found {
        process.signal(Signal::SIGKILL).map_err(|source| LaunchError::Signal { pid: process.pid, source })?;
    }
    Ok(found)
}

fn running(process: Identity, record: RunRecord) -> RunningBroker {
    RunningBroker { pid: process.pid, start_time: process.start_time, systemd: record.systemd, record: record.record }
}

/// Flux refuses a rundir that its own user does not own, and makes its socket in a directory of its own. Other users may enter both: the socket
/// checks who they are, and each job's directory is closed.
fn make_owned_dir(path: &Path, user: &User) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    let owner = trust::open_unless_user_mounted(path).and_then(|found| Ok(found.metadata()?.uid()));
    // The last broker's user may have mounted something over it, or put a directory in the socket's place, which would end each start.
    if !matches!(owner, Ok(owner) if owner == user.uid) {
        if !matches!(&owner, Err(error) if error.kind() == io::ErrorKind::NotFound) {
            tracing::warn!(?owner, path = %path.display(), "a directory of the broker's can't be used and is made again");
        }
        remove_all_if_there(path)?;
        fs::create_dir(path)?;
    }
    let made = trust::open_unless_user_mounted(path)?;
    made.set_permissions(fs::Permissions::from_mode(0o755))?;
    fchown(&made, Some(user.uid), Some(user.gid))
}
