//! Frees a process from what it inherits from the agent's pod: ignored signals, open files, session and umask.

use std::{
    ffi::CString,
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use nix::{
    spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn},
    sys::{
        signal::SigSet,
        stat::{Mode, umask},
        wait::waitpid,
    },
    unistd::{Pid, close, dup2_stderr, dup2_stdin, dup2_stdout, setsid},
};

/// A child process, which nothing reaps if it is dropped.
pub struct Detached(Pid);

impl Detached {
    /// Waits for its end and frees its pid.
    pub fn reap(self) {
        let _ = waitpid(self.0, None);
    }
}

/// Starts `program` with default signal dispositions, no variables and no stdout. std's `Command` would leave ignored
/// signals ignored, so that a `nohup` far above us would affect the jobs. posix_spawn can reset them without unsafe code.
/// `arguments` begin with the program's own name.
///
/// # Errors
/// If `program` can't be started.
pub fn spawn(program: &Path, arguments: &[&str], stdin: &File, stderr: OwnedFd) -> io::Result<Detached> {
    let null = OpenOptions::new().write(true).open("/dev/null")?;
    let mut files = PosixSpawnFileActions::init()?;
    files.add_dup2(stdin.as_raw_fd(), 0)?;
    files.add_dup2(null.as_raw_fd(), 1)?;
    files.add_dup2(stderr.as_raw_fd(), 2)?;
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK)?;
    attributes.set_sigdefault(&SigSet::all())?;
    attributes.set_sigmask(&SigSet::empty())?;
    let program = CString::new(program.as_os_str().as_bytes())?;
    let arguments = arguments.iter().map(|word| CString::new(*word)).collect::<Result<Vec<_>, _>>()?;
    Ok(Detached(posix_spawn(program.as_c_str(), &files, &attributes, &arguments, &[] as &[CString])?))
}

/// Closes all files except stdin, stdout and stderr.
pub fn close_inherited() {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else {
        return;
    };
    let open: Vec<i32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    // The list includes the directory's own descriptor, which is closed by now; close() then fails harmlessly.
    for descriptor in open.into_iter().filter(|descriptor| *descriptor > 2) {
        let _ = close(descriptor);
    }
}

/// Starts a session that this process leads (setsid(2)).
///
/// # Errors
/// If this process leads a process group.
pub fn start_session() -> io::Result<()> {
    Ok(setsid().map(drop)?)
}

/// Lets all users read new files, as in a login session, whatever this process inherited.
pub fn reset_umask() {
    umask(Mode::from_bits_truncate(0o022));
}

/// Gives this process an empty stdin, and `log` as its stdout and stderr.
///
/// # Errors
/// If there is no /dev/null, or dup2(2) fails.
pub fn redirect_to(log: &File) -> io::Result<()> {
    dup2_stdin(File::open("/dev/null")?)?;
    dup2_stdout(log)?;
    dup2_stderr(log)?;
    Ok(())
}
