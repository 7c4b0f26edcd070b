//! Runs a broker on a host without systemd: in a session of its own, and in cgroups of its own.
//!
//! The stage spawns the *launcher* (this same program, subcommand [`LAUNCHER`]), which sets up its own process as a
//! broker needs it and then becomes the broker by exec. Exec keeps pid and start time, so the launcher can write the
//! record before it. Its stdin is the run directory's lock file, which contains its order; it holds that lock until the
//! exec. If the stage is killed in between, there is either a broker with a record, or no broker.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use serde::{Deserialize, Serialize};

use super::{LaunchError, record::RunRecord};
use base::error_chain;
use host::{Root, cgroup, detach, limits, log, process::Identity, users};
use hostapi::LaunchOrder;

/// The hidden subcommand of the launcher.
pub const LAUNCHER: &str = "launch";

/// The launcher's order, in the lock file.
#[derive(Serialize, Deserialize, Debug)]
struct LauncherOrder {
    order: LaunchOrder,
    run_dir: PathBuf,
    cgroup: String,
}

/// Starts a launcher and waits until it has become the broker. The launcher holds `lock` until then.
pub(super) fn start(
    order: &LaunchOrder,
    run_dir: &Path,
    cgroup: &str,
    launcher: &Path,
    lock: &File,
) -> Result<(), LaunchError> {
    let launcher_order = LauncherOrder { order: order.clone(), run_dir: run_dir.to_owned(), cgroup: cgroup.to_owned() };
    let failed = |source| LaunchError::Spawn { source };
    let mut stdin = lock;
    stdin.set_len(0).map_err(failed)?;
    stdin.seek(SeekFrom::Start(0)).map_err(failed)?;
    stdin
        .write_all(serde_json::to_string(&launcher_order).map_err(io::Error::from).map_err(failed)?.as_bytes())
        .map_err(failed)?;
    stdin.seek(SeekFrom::Start(0)).map_err(failed)?;

    let (mut report, writer) = io::pipe().map_err(failed)?;
    let launched = detach::spawn(launcher, &["flux-distribute", LAUNCHER], lock, writer.into()).map_err(failed)?;
    let mut said = String::new();
    report.read_to_string(&mut said).map_err(failed)?;
    if said.is_empty() {
        return Ok(());
    }
    // It failed and exits at once. We are its parent, so nothing else would reap it.
    launched.reap();
    Err(LaunchError::Launcher { sentence: said.trim().to_owned() })
}

/// Main function of the launcher. Call it before anything else, while the process has a single thread. Returns only if
/// it could not become a broker, and writes the reason to stderr.
pub fn launcher_main() -> ExitCode {
    // Descriptors above stderr belong to the stage's parent; the broker must not keep them open.
    detach::close_inherited();
    let report = io::stderr().as_fd().try_clone_to_owned();
    let error = match report {
        Ok(report) => match become_broker() {
            Err(error) => (Some(report), error),
            Ok(never) => match never {},
        },
        Err(source) => (None, LaunchError::Step { what: "copy stderr".to_owned(), source }),
    };
    if let (Some(report), error) = error {
        let _ = write!(File::from(report), "{}", error_chain(&error));
    }
    ExitCode::FAILURE
}

enum Never {}

fn become_broker() -> Result<Never, LaunchError> {
    let lock = io::stdin().as_fd().try_clone_to_owned().map_err(step("copy stdin"))?;
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).map_err(step("read the order"))?;
    let LauncherOrder { order, run_dir, cgroup } =
        serde_json::from_str(&text).map_err(io::Error::from).map_err(step("read the order"))?;
    let user = users::resolve_on(&Root::host(), &order.run_as)?;

    cgroup::enter(&cgroup, order.cpu_weight)?;
    detach::start_session().map_err(step("start a session"))?;
    detach::reset_umask();
    // The pod's value would be inherited: 1000 (killed first) or -997 (killed last, with all its jobs).
    fs::write("/proc/self/oom_score_adj", "0").map_err(step("write oom_score_adj"))?;
    let log_start = log::length(&log::path(&order.prefix));
    let warnings = limits::raise_for_jobs();
    log::open(&order.prefix)
        .and_then(|log| detach::redirect_to(&log))
        .map_err(step("redirect output to the broker's log"))?;
    std::env::set_current_dir(log::directory(&order.prefix)).map_err(step("go to the log's directory"))?;
    if !warnings.is_empty() {
        let _ = writeln!(io::stderr(), "flux-distribute: can't raise the limits {} for jobs", warnings.join(", "));
    }

    let process = Identity::own().map_err(step("read /proc"))?;
    let record = RunRecord {
        boot_id: process.boot_id.clone(),
        process: Some(process),
        systemd: false,
        prefix: order.prefix.clone(),
        log_start,
        record: order.record.clone(),
    };
    record.store(&run_dir)?;

    user.becoming()().map_err(step("become the broker's user"))?;
    let (program, arguments) = order.argv.split_first().ok_or(LaunchError::NoCommand)?;
    // exec() also resets SIGPIPE, which Rust's runtime ignores from the start of main.
    let source = Command::new(program).args(arguments).env_clear().envs(&order.env).exec();
    drop(lock);
    Err(LaunchError::Step { what: format!("run {program}"), source })
}

fn step(what: &str) -> impl FnOnce(io::Error) -> LaunchError {
    let what = what.to_owned();
    move |source| LaunchError::Step { what, source }
}
