//! The processes of a host, from its /proc.

use std::{fs, io, path::PathBuf};

use super::Root;

/// A process that existed when /proc was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id in /proc's PID namespace: the host's, in a host stage and in the agent.
    pub pid: i32,
    /// Its directory below /proc.
    pub dir: PathBuf,
}

impl Process {
    /// The kernel's name for it (`comm`); empty if it has ended.
    pub fn name(&self) -> String {
        fs::read_to_string(self.dir.join("comm")).unwrap_or_default().trim().to_owned()
    }

    /// True if the host's root runs it. All four user IDs must be 0, because a set-user-ID program keeps its caller's
    /// real one. And it must be in the host's PID namespace, which a pod's root is in only with hostPID: then NSpid has
    /// just one number (proc_pid_status(5)).
    pub fn is_hosts_root(&self) -> bool {
        let status = fs::read_to_string(self.dir.join("status")).unwrap_or_default();
        let values = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_default().split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        values("Uid:") == ["0"; 4] && values("NSpid:").len() == 1
    }
}

/// All processes in the /proc of `root`.
///
/// # Errors
/// If /proc can't be read completely: a partial list would hide processes.
pub fn processes(root: &Root) -> io::Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root.path("/proc"))? {
        let entry = entry?;
        // /proc has many other entries.
        if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
            found.push(Process { pid, dir: entry.path() });
        }
    }
    Ok(found)
}
