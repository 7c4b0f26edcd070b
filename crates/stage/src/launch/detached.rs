//! Runs a broker on a host without systemd: in a session of its own, and in cgroups of its own.
//!
//! The stage spawns the *launcher* (this same program, subcommand [`LAUNCHER`]), which sets up its own process as a
//! broker needs it and then becomes the broker by exec. Exec keeps pid and start time, so the launcher can write the
//! record before it. Its stdin is the run directory's lock file, which contains its order; it holds that lock until the
//! exec. If the stage is killed in between, there is either a broker with a record, or no broker.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{ffi::OsStrExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use nix::{
    spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::SigSet,
        stat::{Mode, umask},
        wait::waitpid,
    },
    unistd::{dup2_stderr, dup2_stdin, dup2_stdout, setsid},
};
use serde::{Deserialize, Serialize};

use super::{LaunchError, record::RunRecord};
use base::error_chain;
use host::{Root, cgroup, core_dump, log, process::Identity, users};
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
    let pid = spawn(launcher, lock, writer.into()).map_err(failed)?;
    let mut said = String::new();
    report.read_to_string(&mut said).map_err(failed)?;
    if said.is_empty() {
        return Ok(());
    }
    // It failed and exits at once. We are its parent, so nothing else would reap it.
    let _ = waitpid(pid, None);
    Err(LaunchError::Launcher { sentence: said.trim().to_owned() })
}

/// Starts the launcher with default signal dispositions: std's `Command` would leave ignored signals ignored, so that a
/// `nohup` far above us would affect the jobs. posix_spawn can reset them without unsafe code.
fn spawn(launcher: &Path, stdin: &File, stderr: OwnedFd) -> io::Result<nix::unistd::Pid> {
    let null = fs::OpenOptions::new().write(true).open("/dev/null")?;
    let mut files = PosixSpawnFileActions::init()?;
    files.add_dup2(stdin.as_raw_fd(), 0)?;
    files.add_dup2(null.as_raw_fd(), 1)?;
    files.add_dup2(stderr.as_raw_fd(), 2)?;
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK)?;
    attributes.set_sigdefault(&SigSet::all())?;
    attributes.set_sigmask(&SigSet::empty())?;
    let program = CString::new(launcher.as_os_str().as_bytes())?;
    let arguments = [CString::new("flux-distribute")?, CString::new(LAUNCHER)?];
    Ok(posix_spawn(program.as_c_str(), &files, &attributes, &arguments, &[] as &[CString])?)
}

/// Main function of the launcher. Call it before anything else, while the process has a single thread. Returns only if
/// it could not become a broker, and writes the reason to stderr.
pub fn launcher_main() -> ExitCode {
    // Descriptors above stderr belong to the stage's parent; the broker must not keep them open.
    close_inherited();
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
    setsid().map_err(io::Error::from).map_err(step("start a session"))?;
    umask(Mode::from_bits_truncate(0o022));
    // The pod's value would be inherited: 1000 (killed first) or -997 (killed last, with all its jobs).
    fs::write("/proc/self/oom_score_adj", "0").map_err(step("write oom_score_adj"))?;
    let log_start = log::length(&log::path(&order.prefix));
    let warnings = raise_limits();
    redirect(&order.prefix).map_err(step("redirect output to the broker's log"))?;
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

fn close_inherited() {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else {
        return;
    };
    let open: Vec<i32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    // The list includes the directory's own descriptor, which is closed by now; close() then fails harmlessly.
    for descriptor in open.into_iter().filter(|descriptor| *descriptor > 2) {
        let _ = nix::unistd::close(descriptor);
    }
}

/// Sets the limits of a login session, which jobs need and containerd lowers, and prevents the broker's own core dumps.
/// Returns the limits that could not be raised.
fn raise_limits() -> Vec<&'static str> {
    const INFINITY: u64 = u64::MAX;
    let wanted = [
        ("NOFILE", Resource::RLIMIT_NOFILE, 1_048_576, 1_048_576),
        ("MEMLOCK", Resource::RLIMIT_MEMLOCK, INFINITY, INFINITY),
        ("CORE", Resource::RLIMIT_CORE, core_dump::SOFT_LIMIT, INFINITY),
    ];
    let raise = |(name, resource, soft, hard)| {
        if setrlimit(resource, soft, hard).is_ok() {
            return None;
        }
        // Raising a hard limit needs CAP_SYS_RESOURCE. Without it, raise the soft limit up to the present hard one.
        if let Ok((_, hard)) = getrlimit(resource) {
            let _ = setrlimit(resource, hard.min(soft), hard);
        }
        Some(name)
    };
    wanted.into_iter().filter_map(raise).collect()
}

fn redirect(prefix: &Path) -> io::Result<()> {
    let log = log::open(prefix)?;
    dup2_stdin(File::open("/dev/null")?)?;
    dup2_stdout(&log)?;
    dup2_stderr(&log)?;
    Ok(())
}
