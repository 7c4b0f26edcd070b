use std::{collections::BTreeMap, ffi::OsString, io, path::Path, process::ExitCode};

use super::{
    boundary::{HOST_PATH, enter_command, ignore_terminal_signals, own_env},
    users::User,
};
use base::process::exit_code;

/// Runs a program of the host in the host's namespaces with our own stdin, stdout and stderr, and waits for it.
///
/// Of our environment it gets only TERM, with `env` and a standard PATH added.
///
/// # Errors
/// If the host's namespaces can't be entered or the program can't be started.
pub fn enter(
    program: &Path,
    args: &[OsString],
    env: &[(OsString, OsString)],
    run_as: Option<&User>,
) -> io::Result<ExitCode> {
    let mut all = BTreeMap::from([("PATH".into(), HOST_PATH.into()), ("LANG".into(), "C.UTF-8".into())]);
    if let Some(user) = run_as {
        all.insert("HOME".into(), user.home.clone().into());
        all.insert("USER".into(), user.name.clone().into());
        all.insert("LOGNAME".into(), user.name.clone().into());
    }
    all.extend(own_env("TERM"));
    all.extend(env.iter().cloned());
    let mut command = enter_command(program, args, &all, run_as).map_err(io::Error::other)?;
    ignore_terminal_signals();
    let mut child = command.spawn()?;
    Ok(exit_code(child.wait()?))
}
