//! The broker's process on the host: starting it out of the pod's reach, finding it again, stopping it.
//!
//! At most one broker runs: start, stop and forget exclude each other by a lock in the run directory, and a start that
//! finds a broker returns that one. A difference between what runs and what was ordered is not looked at here: it never
//! restarts a broker.

mod detached;
mod error;
mod found;
mod members;
mod record;
pub mod shutdown;
pub mod systemd;

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{errno::Errno, sys::signal::Signal};

pub use detached::{LAUNCHER, launcher_main};
pub use error::LaunchError;
pub use found::UnknownBroker;

use self::{error::file, found::Found, record::RunRecord, systemd::Systemd};
use api::{BROKER_RUN_DIR, RUN_DIR};
use host::{
    Root, cgroup, facts,
    files::remove_all_if_there,
    log,
    process::Identity,
    users::{self, User},
};
use hostapi::{LaunchOrder, LaunchRecord, Refusal, RunningBroker, StopOrder};

/// How long a start waits for another one that is under way.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Between SIGKILL and the end of a process.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// A broker that is there, or why the last one is not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BrokerView {
    /// The broker that runs, verified by boot id, pid, start time and state.
    pub running: Option<RunningBroker>,
    /// A broker of ours was started in this boot and is gone: the last lines of its log that tell why.
    pub died: Option<String>,
    /// What the broker that is gone was started with.
    pub last_record: Option<LaunchRecord>,
    /// A broker runs, and nothing tells for sure which.
    pub unknown: Option<UnknownBroker>,
    /// Shells of jobs that run in the broker's unit or cgroup, whether it lives or not.
    pub job_shells: usize,
}

/// Where things are on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Record and lock.
    pub run_dir: PathBuf,
    /// The broker's rundir.
    pub broker_run_dir: PathBuf,
    /// The broker's cgroup, below the mount of each hierarchy.
    pub cgroup: String,
    /// This program, as it can be run again.
    pub launcher: PathBuf,
    /// systemd, where it runs.
    pub systemd: Option<Systemd>,
}

impl Places {
    /// Where things are on the host that this process sees.
    pub fn of_host() -> Self {
        Self {
            run_dir: RUN_DIR.into(),
            broker_run_dir: BROKER_RUN_DIR.into(),
            cgroup: "flux-distribute/broker".to_owned(),
            launcher: "/proc/self/exe".into(),
            systemd: Systemd::of(Path::new("/")),
        }
    }
}

/// Starts the broker, or returns the one that runs.
///
/// # Errors
/// A sentence that says what failed.
pub fn start(order: &LaunchOrder) -> Result<RunningBroker, Refusal> {
    Places::of_host().start(order)
}

/// Stops the broker and whatever it left in its cgroup, and waits until they are gone.
///
/// # Errors
/// A sentence that says what failed.
pub fn stop(order: &StopOrder) -> Result<(), Refusal> {
    Places::of_host().stop(order)
}

/// Looks for the broker, and makes its record again where that was lost. Without `prefix`, its log is looked for where it was
/// started.
pub fn observe(prefix: Option<&Path>) -> BrokerView {
    Places::of_host().observe(prefix)
}

/// Takes off what start left on the host outside the prefix: unit, record, rundir, cgroups.
///
/// # Errors
/// A sentence that says what failed; a broker that still runs is refused.
pub fn forget() -> Result<(), Refusal> {
    Places::of_host().forget()
}

impl Places {
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
        // If nobody can look, there may be one.
        let job_shells = self.job_shells(unit).unwrap_or(1);
        BrokerView { job_shells, ..view }
    }

    fn observe_broker(&self, prefix: Option<&Path>) -> BrokerView {
        let Some(record) = self.record() else {
            // A systemd that does not answer for once says nothing.
            return match self.find().ok().flatten() {
                None => BrokerView::default(),
                Some(Found::Unknown(unknown)) => BrokerView { unknown: Some(unknown), ..BrokerView::default() },
                Some(Found::Known(record)) => {
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
                let died = Some(log::why(&log::tail(&log, record.log_start)));
                BrokerView { died, last_record: Some(record.record), ..BrokerView::default() }
            }
        }
    }

    /// The record of this boot.
    fn record(&self) -> Option<RunRecord> {
        RunRecord::load(&self.run_dir).filter(|record| facts::boot_id(&Root::host()) == record.boot_id)
    }

    /// Makes a record again that was lost. Whoever starts or stops the broker just now has the lock, and knows better.
    fn remember(&self, record: &RunRecord) {
        let stored = || -> Result<(), LaunchError> {
            record::make_run_dir(&self.run_dir).map_err(|source| file("make", &self.run_dir, source))?;
            let _lock = record::lock(&self.run_dir, Duration::ZERO).map_err(|_| LaunchError::UnderWay)?;
            if self.record().is_none() && record.process.as_ref().is_some_and(Identity::lives) {
                record.store(&self.run_dir)?;
            }
            Ok(())
        };
        if let Err(error) = stored() {
            tracing::debug!(%error, "the broker's record is not made again yet");
        }
    }

    /// Under systemd the unit's main process: after a restart by hand it is another one than the record's. A systemd that does
    /// not answer for once says nothing about the process that is recorded.
    fn process(&self, record: &RunRecord) -> Option<Identity> {
        let recorded = || record.process.clone().filter(Identity::lives);
        match (&self.systemd, record.systemd) {
            (Some(systemd), true) => systemd.process().unwrap_or_else(|_| recorded()),
            _ => recorded(),
        }
    }

    fn try_start(&self, order: &LaunchOrder) -> Result<RunningBroker, LaunchError> {
        let user = users::resolve_on(&Root::host(), &order.run_as)?;
        if order.argv.is_empty() {
            return Err(LaunchError::NoCommand);
        }
        record::make_run_dir(&self.run_dir).map_err(|source| file("make", &self.run_dir, source))?;
        let lock = self.lock()?;
        let BrokerView { running, unknown, .. } = self.observe(Some(&order.prefix));
        if let Some(running) = running {
            return Ok(running);
        }
        if let Some(unknown) = unknown {
            return Err(LaunchError::Unrecorded(unknown));
        }
        make_broker_run_dir(&self.broker_run_dir, &user)
            .map_err(|source| file("make", &self.broker_run_dir, source))?;
        let log = log::open(&order.prefix);
        let log = log.map_err(|source| file("open", &log::path(&order.prefix), source))?;
        // A full disk keeps no broker from being started.
        if let Err(error) = shutdown::mark(&log, &order.record) {
            tracing::warn!(%error, "can't write to the broker's log");
        }

        match &self.systemd {
            Some(systemd) => {
                // One that could not be asked while we looked: its main process is recorded by nobody.
                if let Some(process) = systemd.process()? {
                    return Err(LaunchError::StillRuns { pid: process.pid });
                }
                // First the record: a unit that is started and then found must have one.
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
                // What a broker that crashed has left behind holds cores that the next one will give out.
                self.kill_left_behind()?;
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
        record::make_run_dir(&self.run_dir).map_err(|source| file("make", &self.run_dir, source))?;
        let _lock = self.lock()?;
        let record = match self.record() {
            Some(record) => record,
            None => match self.find()? {
                Some(Found::Known(record)) => *record,
                Some(Found::Unknown(unknown)) => return Err(LaunchError::Unrecorded(unknown)),
                None => return Ok(()),
            },
        };
        if let (Some(systemd), true) = (&self.systemd, record.systemd) {
            systemd.stop(grace)?;
        } else {
            self.stop_detached(&record, grace)?;
        }
        // A broker that was told to end has not died.
        RunRecord::remove(&self.run_dir).map_err(|source| file("remove record in", &self.run_dir, source))
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
            // It may not have answered while we looked.
            if let Some(process) = systemd.process()? {
                return Err(LaunchError::StillRuns { pid: process.pid });
            }
            systemd.forget()?;
        }
        // Of a broker that crashed and whose record was lost: nobody has stopped it.
        self.kill_left_behind()?;
        cgroup::remove(&self.cgroups()?)?;
        if lock.is_none() {
            return Ok(());
        }
        RunRecord::remove(&self.run_dir).map_err(|source| file("remove record in", &self.run_dir, source))?;
        remove_all_if_there(&self.broker_run_dir).map_err(|source| file("remove", &self.broker_run_dir, source))?;
        record::remove_lock(&self.run_dir).map_err(|source| file("remove lock in", &self.run_dir, source))?;
        // Others may still have something in it.
        let _ = fs::remove_dir(&self.run_dir);
        Ok(())
    }

    fn lock(&self) -> Result<nix::fcntl::Flock<fs::File>, LaunchError> {
        record::lock(&self.run_dir, LOCK_TIMEOUT).map_err(|source| match source.raw_os_error() {
            Some(code) if code == Errno::EWOULDBLOCK as i32 => LaunchError::UnderWay,
            _ => file("lock", &self.run_dir, source),
        })
    }

    fn cgroups(&self) -> Result<Vec<cgroup::Place>, LaunchError> {
        cgroup::places_here(&self.cgroup).map_err(|source| file("read", Path::new("/proc/self/cgroup"), source))
    }

    /// What systemd does by KillMode=mixed: once the broker is gone, nothing of its cgroup lives on.
    fn kill_left_behind(&self) -> Result<(), LaunchError> {
        let places = self.cgroups()?;
        let deadline = Instant::now() + KILL_TIMEOUT;
        loop {
            let left: Vec<Identity> = cgroup::members(&places).into_iter().filter_map(Identity::of).collect();
            let Some(first) = left.first() else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(LaunchError::Unkillable { pid: first.pid });
            }
            for process in &left {
                process.signal(Signal::SIGKILL).map_err(|source| LaunchError::Signal { pid: process.pid, source })?;
            }
            first.wait_gone(Duration::from_millis(500));
        }
    }
}

fn running(process: Identity, record: RunRecord) -> RunningBroker {
    RunningBroker { pid: process.pid, start_time: process.start_time, systemd: record.systemd, record: record.record }
}

/// Flux refuses a rundir that is not its user's own; others may come in, the socket looks at who they are.
fn make_broker_run_dir(path: &Path, user: &User) -> io::Result<()> {
    fs::create_dir_all(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    chown(path, Some(user.uid), Some(user.gid))
}
