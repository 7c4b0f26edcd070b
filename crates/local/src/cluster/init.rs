//! PID 1 of a node: sets up the node's mounts and network, then reaps orphans until it is killed.

use std::process::ExitCode;

use nix::{
    errno::Errno,
    sys::wait::{WaitPidFlag, WaitStatus, waitpid},
    unistd::{getpid, sethostname},
};
use tokio::signal::unix::{SignalKind, signal};

use super::{
    cgroup,
    control::report_line,
    layout::{Layout, node_number},
    network::Network,
    root,
};
use crate::error::{Context, LocalError};

/// Reports "ready" once the node is set up; never returns.
pub(crate) async fn run(layout: &Layout, name: &str) -> Result<ExitCode, LocalError> {
    // In any other process, it would mount over the machine's own directories.
    if getpid().as_raw() != 1 {
        return Err(LocalError::Usage("node-init must run as PID 1 of a local node".to_owned()));
    }
    // Registered before the first child can exit.
    let mut child = signal(SignalKind::child()).context(|| "can't wait for children".to_owned())?;
    let cluster = layout.load()?;
    let number = node_number(name).ok_or_else(|| LocalError::Usage(format!("{name} is not the name of a node")))?;
    sethostname(name).context(|| format!("can't set the host name {name}"))?;
    Network::connect()?.settle_in(&cluster, number).await?;
    let hierarchies = cgroup::hierarchies()?;
    root::mount(layout, &cluster, name, &hierarchies)?;
    // The parent closes the pipe once it has reported our PID, which must come before "ready".
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).context(|| "can't read stdin".to_owned())?;
    report_line("ready")?;
    loop {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => break,
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error).context(|| "can't reap orphans".to_owned()),
            }
        }
        child.recv().await;
    }
}
