//! A broker on a host without systemd: a process of its own session, in cgroups of its own.
//!
//! The stage spawns the *launcher* (this same program, subcommand [`LAUNCHER`]), which makes itself what a broker has to
//! be and then becomes it by exec: pid and start time stay, so it can write the record before. Its stdin is the locked
//! file of the run directory with its order; it holds that lock until the exec. A stage that is killed in between leaves
//! either a broker that has a record, or none.

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

/// What a launcher is told.
#[derive(Serialize, Deserialize, Debug)]
struct LauncherOrder {
    order: LaunchOrder,
    run_dir: PathBuf,
    cgroup: String,
}

/// Has a launcher become the broker. `lock` is held by it until then.
pub(super) fn start(
    order: &LaunchOrder,
    run_dir: &Path,
    cgroup: &str,
    launcher: &Path,
    lock: &File,
) -> Result<(), LaunchError> {
    let told = LauncherOrder { order: order.clone(), run_dir: run_dir.to_owned(), cgroup: cgroup.to_owned() };
    let failed = |source| LaunchError::Spawn { source };
    let mut stdin = lock;
    stdin.set_len(0).map_err(failed)?;
    stdin.seek(SeekFrom::Start(0)).map_err(failed)?;
    stdin
        .write_all(serde_json::to_string(&told).map_err(io::Error::from).map_err(failed)?.as_bytes())
        .map_err(failed)?;
    stdin.seek(SeekFrom::Start(0)).map_err(failed)?;

    let (mut report, writer) = io::pipe().map_err(failed)?;
    let pid = spawn(launcher, lock, writer.into()).map_err(failed)?;
    let mut said = String::new();
    report.read_to_string(&mut said).map_err(failed)?;
    if said.is_empty() {
        return Ok(());
    }
    // It said no: it ends at once, and nobody else would reap it.
    let _ = waitpid(pid, None);
    Err(LaunchError::Launcher { sentence: said.trim().to_owned() })
}

/// std's `Command` leaves ignored signals ignored (a `nohup` far above us would reach the jobs), and this is what can
/// reset them without unsafe code.
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

/// The launcher: to be called before anything else of the program, while there is one thread. Says on stderr why it did
/// not become a broker; otherwise it does not return.
pub fn launcher_main() -> ExitCode {
    // Whatever was open above the standard files belongs to whoever started the stage; the broker must not hold it.
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
    // Inherited from the pod: 1000 (killed first) or -997 (killed last, with all its jobs).
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
    // exec() also resets SIGPIPE, which Rust's runtime has ignored since the start of main.
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
    // The directory's own descriptor is among them and is closed by now.
    for descriptor in open.into_iter().filter(|descriptor| *descriptor > 2) {
        let _ = nix::unistd::close(descriptor);
    }
}

/// What a login gives: jobs need it, and containerd's limits are lower; and no core of a broker. Returns what could not be
/// raised.
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
        // A hard limit needs CAP_SYS_RESOURCE; the soft one may go as far as it.
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
