//! What containerd's shim does for a container: it enters the node, starts a process there, and exits with it.

use std::{
    fs::File,
    process::{Child, ExitCode},
};

use nix::sched::{CloneFlags, setns, unshare};

use super::control::report_line;
use crate::error::{Context, LocalError};
use base::process::exit_code;

/// Namespaces of a node's PID 1 in the order in which they are entered. The last one makes our own /proc unreachable.
const NAMESPACES: [(&str, CloneFlags); 6] = [
    ("ipc", CloneFlags::CLONE_NEWIPC),
    ("uts", CloneFlags::CLONE_NEWUTS),
    ("net", CloneFlags::CLONE_NEWNET),
    ("cgroup", CloneFlags::CLONE_NEWCGROUP),
    ("pid", CloneFlags::CLONE_NEWPID),
    ("mnt", CloneFlags::CLONE_NEWNS),
];

/// Moves the calling thread into all namespaces of a node; no other code may use this thread. Its children are in the
/// node's PID namespace.
pub(crate) fn enter_node(init: i32) -> Result<(), LocalError> {
    let mut open = Vec::new();
    for (name, flag) in NAMESPACES {
        let path = format!("/proc/{init}/ns/{name}");
        open.push((name, flag, File::open(&path).context(|| format!("can't open {path}"))?));
    }
    // A thread that shares its root and working directory with other threads can't enter a mount namespace.
    unshare(CloneFlags::CLONE_FS).context(|| "can't unshare the thread's file system attributes".to_owned())?;
    for (name, flag, namespace) in open {
        setns(&namespace, flag).context(|| format!("can't enter the node's {name} namespace"))?;
    }
    Ok(())
}

/// Has `start`, which may enter a node, start a process on a thread of its own, reports its PID on stdout, and returns its exit code
/// when it has exited. `what`: for people.
pub(crate) async fn run(
    what: &'static str,
    start: impl FnOnce() -> Result<Child, LocalError> + Send + 'static,
) -> Result<ExitCode, LocalError> {
    let lost = move || format!("lost the {what}");
    let finished = tokio::task::spawn_blocking(move || {
        let mut child = match std::thread::spawn(start).join() {
            Ok(started) => started?,
            Err(_) => return Err(LocalError::Panicked(format!("starts the {what}"))),
        };
        report_line(&child.id().to_string())?;
        child.wait().context(lost)
    });
    Ok(exit_code(finished.await.context(lost)??))
}
