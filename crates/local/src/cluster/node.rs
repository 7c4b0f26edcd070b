//! Boots a node: a helper process that makes its namespaces and its PID 1, and stays as the parent of that.
//!
//! It is a process of its own because it goes into the node's cgroup, and the namespaces are entered on a thread that
//! nobody else sees: the process itself stays where it was.

use std::{
    fs::File,
    os::unix::process::CommandExt,
    process::{Command, ExitCode, Stdio},
    sync::mpsc,
};

use nix::sched::{CloneFlags, unshare};
use tokio::sync::oneshot;

use super::{
    cgroup,
    control::tell,
    layout::{DIRECTORY_VARIABLE, Layout, node_number},
    mounts,
    network::Network,
};
use crate::error::{Context, LocalError};

/// Answers on stdout with the pid of the node's PID 1; that one writes `ready` after it. Ends with it.
pub(crate) async fn boot(layout: &Layout, name: &str) -> Result<ExitCode, LocalError> {
    let cluster = layout.load()?;
    let number = node_number(name).ok_or_else(|| LocalError::Usage(format!("{name} is no node's name")))?;
    let network = Network::connect()?;
    // What the cgroup namespace takes for its root is where its maker is.
    cgroup::enter(&cluster.node_cgroup(name))?;

    let (made, namespace) = oneshot::channel();
    let (plugged_in, go) = mpsc::channel();
    let (directory, executable) = (layout.directory().to_owned(), layout.executable());
    let (init_group, init_name) = (format!("{}/init", cluster.node_cgroup(name)), name.to_owned());
    let thread = std::thread::spawn(move || {
        unshare(
            CloneFlags::CLONE_NEWNS
                | CloneFlags::CLONE_NEWUTS
                | CloneFlags::CLONE_NEWIPC
                | CloneFlags::CLONE_NEWNET
                | CloneFlags::CLONE_NEWCGROUP
                | CloneFlags::CLONE_NEWPID,
        )
        .context(|| "can't make namespaces; this needs root on the machine itself".to_owned())?;
        mounts::make_private()?;
        let own = File::open("/proc/thread-self/ns/net").context(|| "can't open a namespace".to_owned())?;
        // The receiver is gone only if booting has failed already.
        let _ = made.send(own);
        if go.recv().is_err() {
            return Err(LocalError::Refused(format!("booting {init_name} was given up")));
        }
        // Below the node's own cgroup, whose processes cgroup v2 would count against its children.
        cgroup::enter(&init_group)?;
        let mut init = Command::new(executable);
        init.args(["local", "node-init", &init_name]).arg0(format!("init [{init_name}]"));
        init.env_clear().env(DIRECTORY_VARIABLE, directory).current_dir("/").stdin(Stdio::piped());
        init.spawn().context(|| format!("can't start PID 1 of {init_name}"))
    });
    if let Ok(namespace) = namespace.await {
        network.plug_in(&cluster, number, &namespace).await?;
        let _ = plugged_in.send(());
    }
    let finished = tokio::task::spawn_blocking(move || thread.join()).await;
    let mut init = match finished {
        Ok(Ok(started)) => started?,
        _ => return Err(LocalError::Refused(format!("booting {name} broke off"))),
    };
    tell(&init.id().to_string())?;
    // Waiting closes its stdin, and only then does it say that it is ready: both speak on the same stdout.
    tokio::task::spawn_blocking(move || init.wait())
        .await
        .context(|| format!("lost PID 1 of {name}"))?
        .context(|| format!("lost PID 1 of {name}"))?;
    Ok(ExitCode::SUCCESS)
}
