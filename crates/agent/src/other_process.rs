//! Other processes of this program on this host.

use std::fs;

use host::{
    Root,
    opening::beginning_of,
    processes::{Process, processes},
};

/// More than the beginning of a command line of ours: its owner can make one of any length out of nothing (`PR_SET_MM` of
/// prctl(2)).
const LONGEST: u64 = 4096;

/// `flux-distribute uninstall` runs on this host.
pub fn uninstall_is_under_way() -> bool {
    other_process("uninstall").is_some()
}

/// Process ID of another process on this host, in any pod, that runs `command` of this program. Only processes of the host's root
/// with our executable count: by arguments alone, any user could keep a host from being cleaned.
pub fn other_process(command: &str) -> Option<i32> {
    let is_ours = |process: &Process| {
        let program = fs::read_link(process.dir.join("exe")).unwrap_or_default();
        program.file_name().is_some_and(|name| name.to_string_lossy().contains("flux-distribute"))
    };
    let runs_command = |process: &&Process| {
        let line = || beginning_of(&process.dir.join("cmdline"), LONGEST);
        process.is_hosts_root() && is_ours(process) && line().is_ok_and(|line| runs(&line, command))
    };
    processes(&Root::host()).ok()?.iter().find(runs_command).map(|process| process.pid)
}

fn runs(cmdline: &[u8], command: &str) -> bool {
    let mut words = cmdline.split(|byte| *byte == 0);
    let program = words.next().unwrap_or_default();
    program.rsplit(|byte| *byte == b'/').next() == Some(b"flux-distribute") && words.next() == Some(command.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_command_is_known_by_its_command_line() {
        for (cmdline, agent, uninstall) in [
            (&b"/flux-distribute\0agent\0"[..], true, false),
            (b"flux-distribute\0agent\0--node-name\0n\0", true, false),
            (b"/flux-distribute\0uninstall\0", false, true),
            (b"/usr/bin/other\0agent\0", false, false),
            (b"", false, false),
        ] {
            assert_eq!((runs(cmdline, "agent"), runs(cmdline, "uninstall")), (agent, uninstall));
        }
    }

    #[test]
    fn of_a_command_line_of_any_length_only_the_beginning_is_read() {
        assert_eq!(beginning_of(Path::new("/dev/zero"), LONGEST).map(|text| text.len()).ok(), Some(4096));
    }
}
