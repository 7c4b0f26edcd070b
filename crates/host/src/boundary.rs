//! The step from the pod into the host: the one module with `unsafe` code.
//!
//! A process with more than one thread can't join a mount namespace, so a child does it between fork and exec, where
//! only async-signal-safe calls are allowed: all files are opened and all strings allocated before the fork.
#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, OsStr, OsString},
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::Path,
    pin::pin,
    process::{Command, Stdio},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures::future::{BoxFuture, Either, ready, select};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, SealFlag, fcntl},
    libc,
    sched::{CloneFlags, setns},
    sys::{
        memfd::{MFdFlags, memfd_create},
        stat::Mode,
    },
    unistd::chdir,
};
use tokio::{io::AsyncWriteExt, time::timeout};

use super::{
    first_process,
    hear::{failed, read_stage_reply},
    host_root::open_in_host_root,
    opening::open_only_path_below,
    users::{User, passwd_from_pod},
};
use api::{BROKER_SOCKET_DIR, RUN_DIR};
use base::redact::LOG_VARIABLE;
use hostapi::{Answer, BEAT, Host, HostError, Order, Progress, Reply};

/// PATH of the host's own programs.
pub const HOST_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The hidden subcommand that runs the host stage.
pub const STAGE: &CStr = c"stage";

/// Joined in this order. The mount namespace is last, because after it /proc/self is the host's view. The user
/// namespace is missing, because joining even one's own fails.
const NAMESPACES: [(&str, CloneFlags); 5] = [
    ("ipc", CloneFlags::CLONE_NEWIPC),
    ("uts", CloneFlags::CLONE_NEWUTS),
    ("net", CloneFlags::CLONE_NEWNET),
    ("cgroup", CloneFlags::CLONE_NEWCGROUP),
    ("mnt", CloneFlags::CLONE_NEWNS),
];

/// The host that this pod runs on; a child that has entered the host's namespaces carries out each order.
#[derive(Debug)]
pub struct NsHost {
    executable: Arc<OwnedFd>,
}

impl NsHost {
    /// Keeps a copy of our own executable. Call it once, at start: each stage then runs the same code as this process,
    /// even if the image is gone.
    ///
    /// # Errors
    /// If the pod lacks hostPID, or our own executable can't be kept.
    pub fn open() -> Result<Self, HostError> {
        Self::with_executable(Path::new("/proc/self/exe"))
    }

    /// [`Self::open`] with stages that run `executable`, which must have the subcommand [`STAGE`].
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn with_executable(executable: &Path) -> Result<Self, HostError> {
        first_process::check()?;
        let executable = keep(executable)
            .map_err(|source| HostError::Stage { what: "has no executable".into(), source: Some(source) })?;
        Ok(Self { executable: Arc::new(executable) })
    }

    async fn run_stage(
        &self,
        order: &Order,
        coming: impl Future<Output = ()>,
        progress: &mut (dyn FnMut(Progress) + Send),
    ) -> Result<Answer, HostError> {
        let patience = order.patience();
        let mut order = serde_json::to_vec(order).map_err(|error| failed("got no order", Some(error.into())))?;
        order.push(b'\n');
        let namespaces = Namespaces::open()?;
        let exec = Exec::new(Arc::clone(&self.executable), stage_env());
        let mut command = tokio::process::Command::new(format!("/proc/self/fd/{}", self.executable.as_raw_fd()));
        command.env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).kill_on_drop(true);
        // SAFETY: both calls only make system calls, with data that was prepared before the fork.
        unsafe {
            command.pre_exec(move || {
                namespaces.join()?;
                Err(exec.now())
            });
        }
        let mut child =
            command.spawn().map_err(|error| spawn_error(error, |source| failed("can't be started", source)))?;
        let stdin = child.stdin.take();
        let may_wait = AtomicBool::new(false);
        let feed = async {
            if let Some(mut stdin) = stdin {
                // If the stage has died, its missing answer shows that.
                let _ = stdin.write_all(&order).await;
                may_wait.store(true, Ordering::Relaxed);
                coming.await;
                may_wait.store(false, Ordering::Relaxed);
            }
        };
        let reading = read_stage_reply(child.stdout.take(), patience, &may_wait, progress);
        // The answer may come before `coming` ends.
        let last = match select(pin!(reading), pin!(feed)).await {
            Either::Left((last, _)) => last,
            Either::Right(((), reading)) => reading.await,
        }?;
        // Its answer counts, even if it does not exit in time: dropping `child` kills it then.
        let ended = timeout(BEAT, child.wait()).await;
        match (last, ended) {
            (Some(Reply::Done(answer)), _) => Ok(*answer),
            (Some(Reply::Failed(refusal)), _) => Err(HostError::Refused(refusal)),
            (_, Ok(Ok(status))) => Err(failed(&format!("exited without an answer ({status})"), None)),
            (_, Ok(Err(error))) => Err(failed("can't be waited for", Some(error))),
            (_, Err(_)) => Err(failed("closed its stdout without an answer and was killed", None)),
        }
    }
}

impl Host for NsHost {
    fn run<'a>(
        &'a self,
        order: Order,
        progress: &'a mut (dyn FnMut(Progress) + Send),
    ) -> BoxFuture<'a, Result<Answer, HostError>> {
        self.run_while(order, Box::pin(ready(())), progress)
    }

    fn run_while<'a>(
        &'a self,
        order: Order,
        coming: BoxFuture<'a, ()>,
        progress: &'a mut (dyn FnMut(Progress) + Send),
    ) -> BoxFuture<'a, Result<Answer, HostError>> {
        Box::pin(async move { self.run_stage(&order, coming, progress).await })
    }

    fn broker_socket(&self) -> io::Result<OwnedFd> {
        broker_socket()
    }

    fn passwd(&self) -> io::Result<String> {
        passwd_from_pod()
    }
}

/// The socket of the broker that runs on this host, opened for its path only.
///
/// # Errors
/// There is none, or the way to it leads elsewhere.
pub fn broker_socket() -> io::Result<OwnedFd> {
    let socket = Path::new(BROKER_SOCKET_DIR).join("local");
    // The brokers' user owns that directory, and may have mounted something over it.
    let below = socket.strip_prefix(RUN_DIR).unwrap_or(Path::new(""));
    Ok(open_only_path_below(open_in_host_root(Path::new(RUN_DIR))?, below)?.into())
}

/// A command that runs `program`, a path on the host, in the host's namespaces, with `env` as its whole environment.
///
/// # Errors
/// If the host's namespaces can't be opened.
pub fn enter_command(
    program: &Path,
    args: &[OsString],
    env: &BTreeMap<OsString, OsString>,
    run_as: Option<&User>,
) -> Result<Command, HostError> {
    first_process::check()?;
    let namespaces = Namespaces::open()?;
    let mut command = Command::new(program);
    command.args(args).env_clear().envs(env);
    // SAFETY: only system calls, with data that was prepared before the fork; they change the child's signal
    // dispositions only.
    unsafe {
        command.pre_exec(move || {
            // Back to the default: the parent ignores both while it waits, and a child inherits that.
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::signal(libc::SIGQUIT, libc::SIG_DFL);
            namespaces.join()
        });
    }
    // After the hook above: only root can join namespaces.
    if let Some(user) = run_as {
        become_user(&mut command, user);
    }
    Ok(command)
}

/// Makes `command` run as `user`, with the user's groups.
pub fn become_user(command: &mut Command, user: &User) {
    // SAFETY: only system calls; the groups were collected before the fork.
    unsafe {
        command.pre_exec(user.becoming());
    }
}

/// Ignores the signals that a terminal sends to its whole foreground process group: they are meant for the child.
pub fn ignore_terminal_signals() {
    // SAFETY: to ignore a signal runs no code of ours.
    unsafe {
        libc::signal(libc::SIGINT, libc::SIG_IGN);
        libc::signal(libc::SIGQUIT, libc::SIG_IGN);
    }
}

/// Lets this thread, and the threads that it starts from now on, use processor and disk only when no other process
/// wants them (`SCHED_IDLE` of sched(7), `IOPRIO_CLASS_IDLE` of ioprio_set(2)). Ignores a kernel's refusal, which only
/// makes the work compete with the host's.
pub fn use_idle_priority() {
    const WHO_PROCESS: libc::c_int = 1;
    const CLASS_IDLE: libc::c_int = 3 << 13;
    // The kernel's struct sched_param. A direct system call, because musl's sched_setscheduler() always fails.
    let priority: libc::c_int = 0;
    // SAFETY: the kernel reads the parameter only during the call; 0 means the calling thread in both calls.
    unsafe {
        libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_IDLE, &raw const priority);
        libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE);
    }
}

/// The namespaces of the host that this process is not in, as (index in [`NAMESPACES`], descriptor).
struct Namespaces(Vec<(usize, OwnedFd)>);

impl Namespaces {
    fn open() -> Result<Self, HostError> {
        let mut differing = Vec::new();
        for (index, (namespace, _)) in NAMESPACES.into_iter().enumerate() {
            let failed = |source| HostError::Namespace { namespace, source };
            let host = format!("/proc/1/ns/{namespace}");
            if fs::read_link(&host).map_err(failed)?
                != fs::read_link(format!("/proc/self/ns/{namespace}")).map_err(failed)?
            {
                differing.push((index, File::open(host).map_err(failed)?.into()));
            }
        }
        Ok(Self(differing))
    }

    /// Runs in the child, so it must not allocate. Only one number crosses the fork as an error, so it encodes the
    /// namespace too.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "there are fewer than ten namespaces"
    )]
    fn join(&self) -> io::Result<()> {
        for (index, fd) in &self.0 {
            setns(fd, NAMESPACES[*index].1)
                .map_err(|errno| io::Error::from_raw_os_error(errno as i32 | (*index as i32 + 1) << NAMESPACE_SHIFT))?;
        }
        chdir(c"/")?;
        Ok(())
    }
}

/// The namespace's index is encoded above the bits of any errno.
const NAMESPACE_SHIFT: i32 = 16;

fn spawn_error(error: io::Error, other: impl FnOnce(Option<io::Error>) -> HostError) -> HostError {
    let code = error.raw_os_error().unwrap_or_default();
    let index = usize::try_from(code >> NAMESPACE_SHIFT).ok().and_then(|index| index.checked_sub(1));
    match index.and_then(|index| NAMESPACES.get(index)) {
        Some(&(namespace, _)) => HostError::Namespace {
            namespace,
            source: io::Error::from_raw_os_error(code & ((1 << NAMESPACE_SHIFT) - 1)),
        },
        None => other(Some(error)),
    }
}

/// The arguments of execveat(2), allocated before the fork.
struct Exec {
    executable: Arc<OwnedFd>,
    argv: Vec<*const libc::c_char>,
    envp: Vec<*const libc::c_char>,
    _strings: [Vec<CString>; 2],
}

// SAFETY: the pointers lead into `_strings`, which never changes, and whose heap memory stays in place when it moves.
unsafe impl Send for Exec {}
// SAFETY: as above; nothing is written after `new`.
unsafe impl Sync for Exec {}

impl Exec {
    fn new(executable: Arc<OwnedFd>, env: Vec<CString>) -> Self {
        let args = vec![c"flux-distribute".to_owned(), STAGE.to_owned()];
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect();
        let (argv, envp) = (pointers(&args), pointers(&env));
        Self { executable, argv, envp, _strings: [args, env] }
    }

    /// Executes the descriptor itself, whatever /proc is in the host's mount namespace. Returns only on failure.
    fn now(&self) -> io::Error {
        // SAFETY: both arrays end with a null pointer, and their strings live as long as `self`.
        unsafe {
            libc::syscall(
                libc::SYS_execveat,
                self.executable.as_raw_fd(),
                c"".as_ptr(),
                self.argv.as_ptr(),
                self.envp.as_ptr(),
                libc::AT_EMPTY_PATH,
            );
        }
        io::Error::last_os_error()
    }
}

/// The stage's environment: of the pod's variables only the log filter.
fn stage_env() -> Vec<CString> {
    let log = std::env::var(LOG_VARIABLE).ok().map(|log| format!("{LOG_VARIABLE}={log}"));
    [format!("PATH={HOST_PATH}"), "LANG=C.UTF-8".to_owned()]
        .into_iter()
        .chain(log)
        .filter_map(|variable| CString::new(variable).ok())
        .collect()
}

/// Copies `executable` to memory, so that it needs no file system. If the kernel forbids executing memory
/// (vm.memfd_noexec=2), returns the file itself, which keeps its file system busy.
fn keep(executable: &Path) -> io::Result<OwnedFd> {
    let exec = MFdFlags::from_bits_retain(libc::MFD_EXEC);
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let made = match memfd_create(c"flux-distribute", flags | exec) {
        // Kernels before 6.3 neither know nor need the flag.
        Err(Errno::EINVAL) => memfd_create(c"flux-distribute", flags),
        other => other,
    };
    let memory = match made {
        Ok(fd) => fd,
        Err(Errno::EACCES) => {
            return Ok(nix::fcntl::open(executable, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?);
        }
        Err(error) => return Err(error.into()),
    };
    let mut memory = File::from(memory);
    io::copy(&mut File::open(executable)?, &mut memory)?;
    let seals = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
    fcntl(memory.as_fd(), FcntlArg::F_ADD_SEALS(seals))?;
    // Reopened, because a descriptor that is open for writing can't be executed (ETXTBSY).
    let path = super::opening::path_of(&memory);
    Ok(nix::fcntl::open(&path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?)
}

/// A variable of our own environment, to pass on.
pub(super) fn own_env(name: &str) -> Option<(OsString, OsString)> {
    Some((OsStr::new(name).to_owned(), std::env::var_os(name)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_child_names_the_namespace() {
        let code = libc::EPERM | (4 + 1) << NAMESPACE_SHIFT;
        let other = |source| HostError::Stage { what: "other".into(), source };
        match spawn_error(io::Error::from_raw_os_error(code), other) {
            HostError::Namespace { namespace: "mnt", source } => assert_eq!(source.raw_os_error(), Some(libc::EPERM)),
            other => panic!("{other:?}"),
        }
        assert!(matches!(spawn_error(io::Error::from_raw_os_error(libc::ENOENT), other), HostError::Stage { .. }));
    }
}
