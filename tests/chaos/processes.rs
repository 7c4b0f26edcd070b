//! The processes of a cluster's nodes, read from the machine's cgroups and /proc, without asking the program under test.

use std::{fs, path::Path};

use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};

use crate::traces;

/// What a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    Agent,
    /// A host stage.
    Stage,
    Broker {
        rank: u32,
    },
    /// A job's shell.
    Shell,
    Other(String),
}

#[derive(Debug, Clone)]
pub struct Process {
    pub node: String,
    /// On the machine.
    pub pid: i32,
    pub parent: i32,
    /// In the node.
    pub inner_pid: i32,
    /// As proc(5) has it: R, S, D, T, …; zombies are not told of.
    pub state: char,
    pub kind: Kind,
}

impl Process {
    pub fn signal(&self, what: Signal) {
        send(self.pid, what);
    }

    pub fn kill(&self) {
        self.signal(Signal::SIGKILL);
    }
}

/// That it is gone already is fine.
pub fn send(pid: i32, what: Signal) {
    let _ = signal::kill(Pid::from_raw(pid), what);
}

pub fn is_there(pid: i32) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok()
}

/// All of them.
pub fn of(bridge: &str) -> Vec<Process> {
    traces::processes(bridge).into_iter().filter_map(|(node, pid)| look(node, pid)).collect()
}

/// A node's host stages. They last for some milliseconds: nothing else is looked at. What a stage has forked has its command line
/// until it executes another program, and is none: its parent is no agent.
pub fn stages(bridge: &str, node: &str) -> Vec<Process> {
    let runs =
        |pid: i32, words: &[u8]| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(words));
    let own = traces::processes(bridge).into_iter().filter(|(on, pid)| on == node && runs(*pid, STAGE));
    let found = own.filter_map(|(node, pid)| look(node, pid)).filter(|found| found.kind == Kind::Stage);
    found.filter(|stage| runs(stage.parent, AGENT)).collect()
}

/// How the command line of a host stage begins.
const STAGE: &[u8] = b"flux-distribute\0stage";
/// How that of an agent begins.
const AGENT: &[u8] = b"/flux-distribute\0agent";

fn look(node: String, pid: i32) -> Option<Process> {
    let process = Path::new("/proc").join(pid.to_string());
    let read = |file: &str| fs::read_to_string(process.join(file)).unwrap_or_default();
    // Kernel's word on the dead: no executable.
    fs::read_link(process.join("exe")).ok()?;
    let status = read("status");
    let field =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned();
    let name = field("Name:");
    let command = fs::read(process.join("cmdline")).unwrap_or_default();
    let command = String::from_utf8_lossy(&command).trim_end_matches('\0').replace('\0', " ");
    let kind = match command.as_str() {
        "/flux-distribute agent" => Kind::Agent,
        "flux-distribute stage" => Kind::Stage,
        _ => match name.strip_prefix("flux-broker-").and_then(|rank| rank.parse().ok()) {
            Some(rank) => Kind::Broker { rank },
            None if name == "flux-shell" => Kind::Shell,
            None => Kind::Other(command),
        },
    };
    Some(Process {
        node,
        pid,
        parent: field("PPid:").parse().ok()?,
        inner_pid: field("NSpid:").split_whitespace().last()?.parse().ok()?,
        state: field("State:").chars().next()?,
        kind,
    })
}
