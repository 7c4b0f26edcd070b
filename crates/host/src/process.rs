//! Identifies processes, signals them and waits for their end. A pid alone proves nothing: it is reused, and a zombie keeps it.

use std::{
    fs, io,
    path::Path,
    time::{Duration, Instant},
};

pub use nix::sys::signal::Signal;
use nix::{errno::Errno, sys::signal::kill, unistd::Pid};
use serde::{Deserialize, Serialize};

use crate::{Root, facts};

/// One process of one boot. Pid and start time may repeat after a reboot, hence the boot id.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Content of /proc/sys/kernel/random/boot_id.
    pub boot_id: String,
    /// Process id in the host's PID namespace.
    pub pid: i32,
    /// Clock ticks from boot to the start of the process: field 22 of `/proc/<pid>/stat`.
    pub start_time: u64,
}

/// Three fields of `/proc/<pid>/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// State: `R`, `S`, `D`, `Z` and others.
    pub state: char,
    /// Number of threads, the first one among them.
    pub threads: u32,
    /// Clock ticks from boot to the process's start.
    pub start_time: u64,
}

impl Stat {
    /// Parses `/proc/<pid>/stat`; None if it has another format. The second field is a name in parentheses that the process
    /// itself may choose, UTF-8 or not, so the fields are counted from the last `)`.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let end_of_name = line.iter().rposition(|byte| *byte == b')')?;
        let mut fields = std::str::from_utf8(&line[end_of_name + 1..]).ok()?.split_ascii_whitespace();
        // Fields 3, 20 and 22.
        let state = fields.next()?.chars().next()?;
        let threads = fields.nth(16)?.parse().ok()?;
        let start_time = fields.nth(1)?.parse().ok()?;
        Some(Self { state, threads, start_time })
    }

    /// True for a zombie, which keeps pid and start time until its parent reaps it, and for a process in its last
    /// moments. A process whose first thread alone has ended looks like a zombie, and lives.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x') && self.threads <= 1
    }
}

impl Identity {
    /// The process that has `pid` now; None if there is none, if that is a zombie, or if /proc can't be read.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = stat(pid).filter(|stat| !stat.is_dead())?;
        Some(Self { boot_id: facts::boot_id(&Root::host()), pid, start_time: stat.start_time })
    }

    /// The calling process.
    ///
    /// # Errors
    /// If /proc belongs to another PID namespace.
    pub fn own() -> io::Result<Self> {
        Self::of(nix::unistd::getpid().as_raw()).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "/proc does not show this process; it belongs to another PID namespace",
            )
        })
    }

    /// True while exactly this process lives.
    pub fn lives(&self) -> bool {
        stat(self.pid).is_some_and(|stat| stat.start_time == self.start_time && !stat.is_dead())
            && facts::boot_id(&Root::host()) == self.boot_id
    }

    /// Sends `signal` if exactly this process still lives. For a wrong process to get it, the pid would have to be freed and
    /// reused between check and signal, after a full cycle of `pid_max`; that window is microseconds.
    ///
    /// # Errors
    /// If the kernel refuses the signal. A process that is gone is no error.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        if !self.lives() {
            return Ok(());
        }
        match kill(Pid::from_raw(self.pid), signal) {
            Ok(()) | Err(Errno::ESRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits for the end of the process; false if the process still lives after `timeout`. Polls /proc, because the process
    /// is not a child of the caller.
    pub fn wait_gone(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        while self.lives() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }
}

fn stat(pid: i32) -> Option<Stat> {
    Stat::parse(&fs::read(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_of_a_process_hides_its_state() {
        let tail = "S 1 2 3 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 1 0 538384 1000 200";
        for name in [&b"flux-broker-0"[..], b"a b", b") R 1 (", b"(((", b"cut at 15 byt\xc3"] {
            let stat = Stat::parse(&[b"590 (", name, b") ", tail.as_bytes()].concat());
            assert_eq!(stat, Some(Stat { state: 'S', threads: 1, start_time: 538_384 }), "{}", name.escape_ascii());
        }
        for cut in ["", "590", "590 (x", "590 (x) S 1 2", "590 (x) S 1 2 3 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 nonsense"] {
            assert_eq!(Stat::parse(cut.as_bytes()), None, "{cut}");
        }
    }

    #[test]
    fn a_zombie_is_dead() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while stat(pid).unwrap().state != 'Z' {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        assert_eq!(Identity::of(pid), None);
        child.wait().unwrap();
    }

    #[test]
    #[allow(unsafe_code)]
    fn a_process_whose_first_thread_has_ended_lives_and_can_be_killed() {
        // SAFETY: the child only starts a thread and ends its own first one.
        let child = match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Parent { child } => child,
            nix::unistd::ForkResult::Child => {
                std::thread::spawn(|| std::thread::sleep(Duration::from_mins(1)));
                // SAFETY: ends this thread, which holds nothing.
                unsafe { nix::libc::syscall(nix::libc::SYS_exit, 0) };
                unreachable!()
            }
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        while stat(child.as_raw()).unwrap().state != 'Z' {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        let identity = Identity::of(child.as_raw()).unwrap();
        identity.signal(Signal::SIGKILL).unwrap();
        assert!(identity.wait_gone(Duration::from_secs(10)));
        nix::sys::wait::waitpid(child, None).unwrap();
    }

    #[test]
    fn the_same_pid_with_another_start_or_boot_is_another_process() {
        let own = Identity::own().unwrap();
        assert!(own.lives());
        assert!(!Identity { start_time: own.start_time + 1, ..own.clone() }.lives());
        assert!(!Identity { boot_id: "another".to_owned(), ..own }.lives());
    }
}
