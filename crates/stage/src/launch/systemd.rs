//! Runs a broker on a host with systemd: as a unit of the host, controlled by the host's own systemctl.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::LaunchError;
use broker::unit::{SERVICE, SLICE_DROP_IN, service, slice};
use host::{
    child::{Kept, wait_until},
    facts,
    files::{Owner, remove_if_there, write_atomic},
    log,
    process::Identity,
    users::User,
};
use hostapi::{LaunchOrder, Refusal};

const TIMEOUT: Duration = Duration::from_secs(30);
/// Longer, because `start` of a Type=exec unit waits for the exec.
const START_TIMEOUT: Duration = Duration::from_mins(1);

/// The host's systemd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Systemd {
    /// Directory for units that last until the next boot.
    pub unit_dir: PathBuf,
    /// Path of the host's systemctl.
    pub systemctl: PathBuf,
}

/// The state of the unit, from `systemctl show`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitState {
    /// `active`, `activating`, `deactivating`, `inactive`, `failed`.
    pub active: String,
    /// Pid of the main process; 0 if there is none.
    pub main_pid: i32,
}

impl Systemd {
    /// The systemd of the host whose root is `root`; None if it does not run there: it must have booted the host, and
    /// answer on its own socket or on D-Bus.
    pub fn of(root: &Path) -> Option<Self> {
        Some(Self { systemctl: facts::systemctl(root)?, unit_dir: root.join("run/systemd/system") })
    }

    /// The unit's present state.
    ///
    /// # Errors
    /// If systemctl fails, or is silent for too long.
    pub fn state(&self) -> Result<UnitState, LaunchError> {
        Ok(parse_show(&self.run(&["show", "-p", "ActiveState,MainPID", SERVICE], TIMEOUT)?))
    }

    /// The unit's main process; None if it has none.
    ///
    /// # Errors
    /// As for [`Self::state`].
    pub fn process(&self) -> Result<Option<Identity>, LaunchError> {
        let pid = self.state()?.main_pid;
        Ok(if pid > 0 { Identity::of(pid) } else { None })
    }

    /// Writes the unit and starts it. If somebody started it by hand, and it is starting or stopping, stops it first.
    pub(super) fn start(&self, order: &LaunchOrder, user: &User) -> Result<Identity, LaunchError> {
        let write = |path: &Path, text: &str| {
            let made = path.parent().map_or(Ok(()), fs::create_dir_all);
            made.map_err(|error| Refusal::io("write", path, &error))?;
            write_atomic(path, text.as_bytes(), 0o644, Owner::ROOT)
        };
        let setpriv = facts::program(Path::new("/"), "setpriv");
        let text = service(order, user, setpriv.as_deref())?;
        if self.state()?.active != "inactive" {
            self.run(&["stop", SERVICE], START_TIMEOUT)?;
        }
        write(&self.unit_dir.join(SERVICE), &text)?;
        write(&self.unit_dir.join(SLICE_DROP_IN), &slice(order.cpu_weight))?;
        self.run(&["daemon-reload"], TIMEOUT)?;
        // Resets the failure counter. Fails on a unit that never failed.
        let _ = self.run(&["reset-failed", SERVICE], TIMEOUT);
        let path = log::path(&order.prefix);
        let since = log::length(&path);
        let started = self.run(&["start", SERVICE], START_TIMEOUT);
        let said = || log::tail(&path, since);
        match (started, self.process()?) {
            (Ok(_), Some(process)) => Ok(process),
            (Ok(_), None) => Err(LaunchError::Gone { why: log::explain_end(&said()) }),
            // The program's own log tells more than systemctl's advice where to look.
            (Err(LaunchError::Systemctl { .. }), _) if !said().trim().is_empty() => {
                Err(LaunchError::Gone { why: log::explain_end(&said()) })
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Stops the unit; kills it after `grace`.
    pub(super) fn stop(&self, grace: Duration) -> Result<(), LaunchError> {
        match self.run(&["stop", SERVICE], grace) {
            Err(LaunchError::Slow { .. }) => {
                self.run(&["kill", "--signal=SIGKILL", SERVICE], TIMEOUT)?;
                self.run(&["stop", SERVICE], TIMEOUT).map(drop)
            }
            // The unit was never loaded or is forgotten already, and systemd confirms that no process is left.
            Err(error) => self.process().ok().filter(Option::is_none).map(drop).ok_or(error),
            Ok(_) => Ok(()),
        }
    }

    /// Removes the unit.
    pub(super) fn forget(&self) -> Result<(), LaunchError> {
        let (unit, drop_in) = (self.unit_dir.join(SERVICE), self.unit_dir.join(SLICE_DROP_IN));
        let is_off = !unit.exists() && !drop_in.exists();
        for path in [unit, drop_in.clone()] {
            let failed = |source| LaunchError::Step { what: format!("remove {}", path.display()), source };
            remove_if_there(&path).map_err(failed)?;
        }
        // Fails if an administrator's drop-ins are beside ours; then the directory stays.
        let _ = drop_in.parent().map(fs::remove_dir);
        let reloaded = self.run(&["daemon-reload"], TIMEOUT);
        let _ = self.run(&["reset-failed", SERVICE], TIMEOUT);
        // If the files were removed before, systemd may still know the unit; then its reload is only tried.
        if is_off { Ok(()) } else { reloaded.map(drop) }
    }

    fn run(&self, arguments: &[&str], timeout: Duration) -> Result<String, LaunchError> {
        let command = || format!("systemctl {}", arguments.join(" "));
        let failed = |source| LaunchError::Step { what: format!("run {}", command()), source };
        let (reader, writer) = io::pipe().map_err(failed)?;
        let mut child = Command::new(&self.systemctl)
            .args(arguments)
            .env_clear()
            .envs([("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), ("LC_ALL", "C"), ("SYSTEMD_PAGER", "")])
            .stdin(Stdio::null())
            .stdout(writer.try_clone().map_err(failed)?)
            .stderr(writer)
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let output = Kept::of(Some(reader));
        match wait_until(&mut child, Instant::now() + timeout).map_err(failed)? {
            None => Err(LaunchError::Slow { command: command(), seconds: timeout.as_secs() }),
            Some(status) if status.success() => Ok(output.text()),
            Some(_) => Err(LaunchError::Systemctl { command: command(), output: output.text().trim().to_owned() }),
        }
    }
}

/// Reads the answer of `systemctl show`.
pub fn parse_show(text: &str) -> UnitState {
    let fields: BTreeMap<&str, &str> = text.lines().filter_map(|line| line.split_once('=')).collect();
    UnitState {
        active: fields.get("ActiveState").copied().unwrap_or_default().to_owned(),
        main_pid: fields.get("MainPID").and_then(|pid| pid.trim().parse().ok()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use hostapi::LaunchRecord;

    use super::*;
    use crate::launch::{
        HostPlaces,
        record::{RunRecord, make_run_dir},
    };

    #[test]
    fn systemctl_show_is_parsed_in_any_order_and_with_missing_fields() {
        for (text, active, main_pid) in [
            ("MainPID=42\nActiveState=active\n", "active", 42),
            ("ActiveState=activating\nMainPID=0\n", "activating", 0),
            ("Warning: something\nActiveState=failed\n", "failed", 0),
            ("", "", 0),
        ] {
            assert_eq!(parse_show(text), UnitState { active: active.to_owned(), main_pid });
        }
    }

    /// Each round of an agent observes its broker.
    #[test]
    fn systemd_is_asked_for_the_broker_only_once_the_recorded_process_has_ended() {
        let directory = tempfile::tempdir().unwrap();
        let (asked, systemctl) = (directory.path().join("asked"), directory.path().join("systemctl"));
        let own = Identity::own().unwrap();
        let script = format!("#!/bin/sh\ntouch {}\necho MainPID={}\n", asked.display(), own.pid);
        fs::write(&systemctl, script).unwrap();
        fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
        let places = HostPlaces {
            run_dir: directory.path().join("run"),
            systemd: Some(Systemd { systemctl, unit_dir: directory.path().to_owned() }),
            ..HostPlaces::of_host()
        };
        make_run_dir(&places.run_dir).unwrap();
        let ended = Identity { start_time: own.start_time + 1, ..own.clone() };
        for (process, expected) in [(Some(own.clone()), false), (Some(ended), true), (None, true)] {
            let record = RunRecord {
                process,
                boot_id: own.boot_id.clone(),
                systemd: true,
                log_start: 0,
                prefix: directory.path().to_owned(),
                record: LaunchRecord::default(),
            };
            record.store(&places.run_dir).unwrap();
            let running = places.observe(None).running.unwrap();
            assert_eq!((running.pid, running.start_time), (own.pid, own.start_time));
            assert_eq!(asked.exists(), expected, "{:?}", record.process);
            let _ = fs::remove_file(&asked);
        }
    }

    #[test]
    fn systemd_counts_as_running_if_it_booted_the_host_and_answers() {
        let root = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        assert_eq!(Systemd::of(root.path()), None);
        make("usr/bin/systemctl");
        fs::create_dir_all(root.path().join("run/systemd/system")).unwrap();
        assert_eq!(Systemd::of(root.path()), None);
        make("run/systemd/private");
        assert_eq!(Systemd::of(root.path()).unwrap().systemctl, root.path().join("usr/bin/systemctl"));
    }
}
