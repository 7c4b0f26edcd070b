//! PID 1 of a node: builds the node's mounts and network around itself, then reaps orphans until it is killed.

use std::process::ExitCode;

use nix::{
    errno::Errno,
    sys::wait::{WaitPidFlag, WaitStatus, waitpid},
    unistd::{getpid, sethostname},
};
use tokio::signal::unix::{SignalKind, signal};

use super::{
    cgroup,
    control::tell,
    layout::{Layout, node_number},
    network::Network,
    root,
};
use crate::error::{Context, LocalError};

/// Says so once the node is ready; never ends by itself.
pub(crate) async fn run(layout: &Layout, name: &str) -> Result<ExitCode, LocalError> {
    // Anywhere else it would build its mounts over the machine's own.
    if getpid().as_raw() != 1 {
        return Err(LocalError::Usage("node-init runs as PID 1 of a local node only".to_owned()));
    }
    // Asked for before the first child can end.
    let mut child = signal(SignalKind::child()).context(|| "can't wait for children".to_owned())?;
    let cluster = layout.load()?;
    let number = node_number(name).ok_or_else(|| LocalError::Usage(format!("{name} is no node's name")))?;
    sethostname(name).context(|| format!("can't set the host name {name}"))?;
    Network::connect()?.settle_in(&cluster, number).await?;
    let hierarchies = cgroup::hierarchies()?;
    root::mount(layout, &cluster, name, &hierarchies)?;
    // Its end says that our parent has told our pid, which comes first.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).context(|| "can't read stdin".to_owned())?;
    tell("ready")?;
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
