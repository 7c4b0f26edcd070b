//! Runs a program of a package set under [`TRIAL_ID`], which no other process has, and for at most [`TIMEOUT`]. In a user namespace without
//! that id: as nobody(5).

use std::{
    fs, io,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use base::process::code;
use host::{
    boundary,
    child::{Kept, wait_until},
    process::Signal,
    users::User,
};

/// Long, because a slow disk is no reason to refuse an environment.
const TIMEOUT: Duration = Duration::from_secs(20);
/// uid and gid of a trial. Programs of a package set get no rights that their broker would not have, and an id that no
/// other process has: a user with the same uid could kill the trial, or forge its result by ptrace(2), as any process
/// of nobody(5) could. The id is in an unassigned range: above systemd's for containers, which end at 1879048191, and
/// SSSD's for directories, which end at 2000200000, and below systemd's for foreign images, which begin at 2147352576
/// (https://systemd.io/UIDS-GIDS/, sssd-ldap(5)).
const TRIAL_ID: u32 = 2_100_000_000;
/// nobody(5), for a user namespace that does not have [`TRIAL_ID`].
const NOBODY: u32 = 65534;

/// A command with the environment variables of a trial.
pub(super) fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", "/usr/bin:/bin").env("LANG", "C.UTF-8");
    command
}

/// How a tried program ended.
pub(super) enum Ended {
    /// It exited. `text` is its stdout, then its stderr.
    Exited { code: i32, text: String },
    /// Nothing follows from its end, described here. A signal may come from a kernel without memory, or from a person.
    Inconclusive(String),
}

/// Runs `command` until it ends, or [`TIMEOUT`] is over.
///
/// # Errors
/// If it can't be started or waited for.
pub(super) fn run(mut command: Command) -> io::Result<Ended> {
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let id = trial_id(
        &["uid_map", "gid_map"].map(|map| fs::read_to_string(format!("/proc/self/{map}")).unwrap_or_default()),
    );
    let trial_user = User {
        name: id.to_string(),
        uid: id,
        gid: id,
        home: PathBuf::from("/"),
        shell: PathBuf::new(),
        groups: Vec::new(),
        known: false,
    };
    boundary::become_user(&mut command, &trial_user);
    let mut child = command.spawn()?;
    let (stdout, stderr) = (Kept::of(child.stdout.take()), Kept::of(child.stderr.take()));
    let status = wait_until(&mut child, Instant::now() + TIMEOUT)?;
    let text = stdout.text() + &stderr.text();
    let Some(status) = status else {
        return Ok(Ended::Inconclusive(format!("did not end within {} s", TIMEOUT.as_secs())));
    };
    Ok(match status.signal() {
        None => Ended::Exited { code: code(status), text },
        // SIGILL comes from the processor: it lacks an instruction, and a broker would die in the same way.
        Some(signal) if signal == Signal::SIGILL as i32 => {
            Ended::Exited { code: code(status), text: "it is built for a newer processor (SIGILL)".to_owned() }
        }
        Some(signal) => Ended::Inconclusive(format!("was killed by signal {signal}")),
    })
}

/// uid and gid of the trial: [`TRIAL_ID`], if the uid_map and gid_map of this user namespace include it
/// (user_namespaces(7)).
fn trial_id(maps: &[String; 2]) -> u32 {
    let has_it = |map: &String| {
        map.lines().any(|line| {
            let numbers: Vec<u64> = line.split_whitespace().filter_map(|number| number.parse().ok()).collect();
            matches!(numbers[..], [first, _, count] if (first..first.saturating_add(count)).contains(&TRIAL_ID.into()))
        })
    };
    if maps.iter().all(has_it) { TRIAL_ID } else { NOBODY }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trial_uses_its_own_id_if_the_user_namespace_has_it() {
        let whole = "         0          0 4294967295\n";
        for (maps, expected) in [
            ([whole, whole], TRIAL_ID),
            (["0 100000 65536\n", "0 100000 65536\n"], NOBODY),
            ([whole, "0 0 1\n1 100000 65536\n"], NOBODY),
            (["", ""], NOBODY),
        ] {
            assert_eq!(trial_id(&maps.map(str::to_owned)), expected, "{maps:?}");
        }
    }
}
