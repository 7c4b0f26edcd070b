use std::{
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use api::BROKER_URI;
use base::process::code;
use host::{
    Root, boundary,
    child::{Kept, wait_until},
    state, users,
};
use hostapi::{FluxOrder, Ran, Refusal};

/// Runs an environment's `flux` as the broker's user, and waits for its end.
///
/// # Errors
/// If it can't be started, or does not end within the order's timeout.
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

/// Starts an environment's `flux` as the broker's user, in a process group of its own.
///
/// # Errors
/// If the user is unknown, or it can't be started.
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
