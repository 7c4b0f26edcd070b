//! The step from the pod to the host: the one place with `unsafe` code.
//!
//! A process with more than one thread can't join a mount namespace, so a child does it between fork and exec, where
//! only async-signal-safe calls are allowed: everything is opened and every string is made before the fork.
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

use super::{first_process, hear::hear, users::User};
use base::redact::LOG_VARIABLE;
use hostapi::{Answer, BEAT, Host, HostError, Order, Progress, Reply};

/// Where a host's own programs are.
pub const HOST_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The hidden subcommand that is the stage.
pub const STAGE: &CStr = c"stage";

/// In the order of joining. The mount namespace is last: after it, /proc/self is the host's view. Never the user
/// namespace, which refuses even its own.
const NAMESPACES: [(&str, CloneFlags); 5] = [
    ("ipc", CloneFlags::CLONE_NEWIPC),
    ("uts", CloneFlags::CLONE_NEWUTS),
    ("net", CloneFlags::CLONE_NEWNET),
    ("cgroup", CloneFlags::CLONE_NEWCGROUP),
    ("mnt", CloneFlags::CLONE_NEWNS),
];

/// The host that this pod runs on: orders are carried out by a child that has entered its namespaces.
#[derive(Debug)]
pub struct NsHost {
    executable: Arc<OwnedFd>,
}

impl NsHost {
    /// To be opened once, at start: the stages run what this process runs, whatever becomes of its image.
    ///
    /// # Errors
    /// Without hostPID, or where our own executable can't be kept.
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
        let mut order =
            serde_json::to_vec(order).map_err(|error| failed("can't be told its order", Some(error.into())))?;
        order.push(b'\n');
        let namespaces = Namespaces::open()?;
        let exec = Exec::new(Arc::clone(&self.executable), stage_env());
        let mut command = tokio::process::Command::new(format!("/proc/self/fd/{}", self.executable.as_raw_fd()));
        command.env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).kill_on_drop(true);
        // SAFETY: both calls only make system calls with what was prepared before the fork.
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
        let telling = async {
            if let Some(mut stdin) = stdin {
                // A stage that has died tells so by its missing answer.
                let _ = stdin.write_all(&order).await;
                may_wait.store(true, Ordering::Relaxed);
                coming.await;
                may_wait.store(false, Ordering::Relaxed);
            }
        };
        let hearing = hear(child.stdout.take(), patience, &may_wait, progress);
        // Its answer may come before the end of what it could have followed.
        let last = match select(pin!(hearing), pin!(telling)).await {
            Either::Left((last, _)) => last,
            Either::Right(((), hearing)) => hearing.await,
        }?;
        // What it has answered is done. One that is stopped before its end is killed where `child` is dropped.
        let ended = timeout(BEAT, child.wait()).await;
        match (last, ended) {
            (Some(Reply::Done(answer)), _) => Ok(*answer),
            (Some(Reply::Failed(refusal)), _) => Err(HostError::Refused(refusal)),
            (_, Ok(Ok(status))) => Err(failed(&format!("ended without an answer ({status})"), None)),
            (_, Ok(Err(error))) => Err(failed("can't be waited for", Some(error))),
            (_, Err(_)) => Err(failed("says nothing more, and is ended", None)),
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
}

pub(super) fn failed(what: &str, source: Option<io::Error>) -> HostError {
    HostError::Stage { what: what.to_owned(), source }
}

/// A command that will run `program`, a path on the host, in the host's namespaces, with `env` as its whole environment.
///
/// # Errors
/// Where the host's namespaces can't be opened.
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
    // SAFETY: only system calls, with what was prepared before the fork; signal dispositions of the child are its own.
    unsafe {
        command.pre_exec(move || {
            // The parent ignores these while it waits.
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::signal(libc::SIGQUIT, libc::SIG_DFL);
            namespaces.join()
        });
    }
    // After the above: who is not root any more can't join.
    if let Some(user) = run_as {
        become_user(&mut command, user);
    }
    Ok(command)
}

/// Has `command` run as `user`, with the user's groups.
pub fn become_user(command: &mut Command, user: &User) {
    // SAFETY: only system calls; the groups were collected before the fork.
    unsafe {
        command.pre_exec(user.becoming());
    }
}

/// Ignores what a terminal sends to everybody in its foreground, for as long as a child there is to hear it.
pub fn ignore_terminal_signals() {
    // SAFETY: ignoring runs no code of ours.
    unsafe {
        libc::signal(libc::SIGINT, libc::SIG_IGN);
        libc::signal(libc::SIGQUIT, libc::SIG_IGN);
    }
}

/// Lets this thread, and those that it starts from here on, use processor and disk only when nobody else wants them
/// (`SCHED_IDLE` of sched(7), `IOPRIO_CLASS_IDLE` of ioprio_set(2)). A kernel that refuses does no harm: it takes longer for
/// others then.
pub fn use_idle_priority() {
    const WHO_PROCESS: libc::c_int = 1;
    const CLASS_IDLE: libc::c_int = 3 << 13;
    // struct sched_param of the kernel. Not by the C library: musl's function refuses.
    let priority: libc::c_int = 0;
    // SAFETY: the parameter is read during the call only; 0 is the calling thread in both.
    unsafe {
        libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_IDLE, &raw const priority);
        libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE);
    }
}

/// The host's namespaces that are not ours too.
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

    /// In the child: no allocation. The error that crosses the fork is one number, so it carries the namespace along.
    fn join(&self) -> io::Result<()> {
        for (index, fd) in &self.0 {
            setns(fd, NAMESPACES[*index].1)
                .map_err(|errno| io::Error::from_raw_os_error(errno as i32 | (*index as i32 + 1) << NAMESPACE_SHIFT))?;
        }
        chdir(c"/")?;
        Ok(())
    }
}

/// Above every errno.
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

/// Everything that execveat(2) wants, made before the fork.
struct Exec {
    executable: Arc<OwnedFd>,
    argv: Vec<*const libc::c_char>,
    envp: Vec<*const libc::c_char>,
    _strings: [Vec<CString>; 2],
}

// SAFETY: the pointers lead into `_strings`, which is never changed, and whose heap memory does not move with it.
unsafe impl Send for Exec {}
// SAFETY: as above; nothing is ever written.
unsafe impl Sync for Exec {}

impl Exec {
    fn new(executable: Arc<OwnedFd>, env: Vec<CString>) -> Self {
        let args = vec![c"flux-distribute".to_owned(), STAGE.to_owned()];
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect();
        let (argv, envp) = (pointers(&args), pointers(&env));
        Self { executable, argv, envp, _strings: [args, env] }
    }

    /// Through the descriptor itself, so that it does not matter what is at /proc in the host's mount namespace. Returns
    /// only if it fails.
    fn now(&self) -> io::Error {
        // SAFETY: both arrays end with a null pointer and lead to strings that live as long as `self`.
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

/// The stage's environment: nothing of the pod's but how much to log.
fn stage_env() -> Vec<CString> {
    let log = std::env::var(LOG_VARIABLE).ok().map(|log| format!("{LOG_VARIABLE}={log}"));
    [format!("PATH={HOST_PATH}"), "LANG=C.UTF-8".to_owned()]
        .into_iter()
        .chain(log)
        .filter_map(|variable| CString::new(variable).ok())
        .collect()
}

/// A copy of `executable` that needs no file system. Where the kernel forbids to run memory (vm.memfd_noexec=2), the file
/// itself, which pins its file system for as long.
fn keep(executable: &Path) -> io::Result<OwnedFd> {
    let exec = MFdFlags::from_bits_retain(libc::MFD_EXEC);
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let made = match memfd_create(c"flux-distribute", flags | exec) {
        // Kernels before 6.3 don't know the flag, and don't need it.
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
    // A descriptor that is open for writing can't be executed (ETXTBSY).
    let path = super::files::host_path(&memory);
    Ok(nix::fcntl::open(&path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?)
}

/// The value of one variable of our own environment, to hand on.
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
