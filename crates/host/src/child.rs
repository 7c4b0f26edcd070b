//! Child processes with a deadline, and the first part of their output.

use std::{
    io::{self, ErrorKind, Read},
    process::{Child, ExitStatus},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

/// Bytes of an output that are kept.
const KEEP: usize = 64 << 10;
const POLL: Duration = Duration::from_millis(10);
/// How long to wait for more output after the command has ended: one of its children can hold the pipe open for ever.
const LINGER: Duration = Duration::from_secs(1);

/// Waits for the child's end. At the deadline it kills the child's process group and returns None. Only this thread
/// reaps the child, so its process group id can't have been reused.
///
/// # Errors
/// If the child can't be waited for.
pub fn wait_until(child: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
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

/// Kills the process group of a child that has not been reaped.
pub fn kill_group(pid: u32) {
    if let Ok(pid) = i32::try_from(pid) {
        let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

/// The first part of a stream that a thread reads to its end.
pub struct Kept {
    bytes: Arc<Mutex<Vec<u8>>>,
    end: Receiver<()>,
}

impl Kept {
    /// Begins to read it, on a thread of its own.
    pub fn of(stream: Option<impl Read + Send + 'static>) -> Self {
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

    /// The kept part, once the stream has ended or its time limit has passed.
    pub fn text(self) -> String {
        let _ = self.end.recv_timeout(LINGER);
        String::from_utf8_lossy(&self.bytes.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

/// True if a program could not be started because it is not built for this processor.
pub fn is_of_another_architecture(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::ENOEXEC as i32)
}
