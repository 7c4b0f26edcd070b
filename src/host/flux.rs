use std::{
    io::{ErrorKind, Read},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

use super::{FluxOrder, Ran, Refusal, Root, boundary, state, users};
use crate::api::BROKER_URI;

/// What is kept of each of stdout and stderr.
const KEEP: usize = 64 << 10;
const POLL: Duration = Duration::from_millis(10);
/// How long output may still come after the end: a child of the command can hold the pipe for ever.
const LINGER: Duration = Duration::from_secs(1);

/// Runs `flux` of an environment to its end, as the broker's user.
///
/// # Errors
/// Where it can't be started, or has not ended in time.
pub fn flux(root: &Root, order: &FluxOrder) -> Result<Ran, Refusal> {
    let mut child = spawn(root, &order.prefix, &order.digest, &order.args, &order.run_as)?;
    let stdout = Kept::of(child.stdout.take());
    let stderr = Kept::of(child.stderr.take());
    let deadline = Instant::now() + Duration::from_secs(order.timeout_secs);
    let Some(status) = wait_until(&mut child, deadline)
        .map_err(|error| Refusal::transient(format!("can't wait for flux: {error}")))?
    else {
        return Err(Refusal::transient(format!(
            "flux {} did not end within {} s",
            order.args.first().map_or("", String::as_str),
            order.timeout_secs
        )));
    };
    Ok(Ran { code: code(status), stdout: stdout.text(), stderr: stderr.text() })
}

/// Starts `flux` of an environment as the broker's user, in a process group of its own.
///
/// # Errors
/// Where it can't be started.
pub(super) fn spawn(root: &Root, prefix: &Path, digest: &str, args: &[String], run_as: &str) -> Result<Child, Refusal> {
    let user = users::resolve_on(root, run_as)?;
    let bin = root.path(state::environment(prefix, digest)).join("bin");
    let program = bin.join("flux");
    let mut command = Command::new(&program);
    command
        .args(args)
        .env_clear()
        .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
        .env("HOME", &user.home)
        .env("LANG", "C.UTF-8")
        .env("FLUX_URI", BROKER_URI)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    boundary::become_user(&mut command, &user);
    command.spawn().map_err(|error| Refusal::io("run", &program, &error))
}

/// Exit code as a shell counts it: 128 + signal where it was killed.
pub fn code(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(255)
}

/// None: it was killed, with its children. Only this thread reaps it, so its process group can't be another's.
pub(super) fn wait_until(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            kill_group(child.id());
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

/// Ends a child that has not been reaped, and its children.
pub(super) fn kill_group(pid: u32) {
    if let Ok(pid) = i32::try_from(pid) {
        let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

/// The beginning of a stream that is read to its end.
pub(super) struct Kept {
    bytes: Arc<Mutex<Vec<u8>>>,
    end: Receiver<()>,
}

impl Kept {
    pub(super) fn of(stream: Option<impl Read + Send + 'static>) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let (tell, end) = channel();
        let kept = Arc::clone(&bytes);
        thread::spawn(move || {
            let mut buffer = [0; 8192];
            let mut stream = stream;
            while let Some(stream) = &mut stream {
                match stream.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(length) => {
                        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                        let room = KEEP.saturating_sub(kept.len()).min(length);
                        kept.extend_from_slice(&buffer[..room]);
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            let _ = tell.send(());
        });
        Self { bytes, end }
    }

    pub(super) fn text(self) -> String {
        let _ = self.end.recv_timeout(LINGER);
        String::from_utf8_lossy(&self.bytes.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}
