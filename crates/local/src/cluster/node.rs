//! Boots a node: a helper process that makes the namespaces, starts PID 1 in them, and remains as its parent.
//!
//! It is a process of its own because it enters the node's cgroup. The namespaces are entered on a separate thread, so
//! that the process itself stays in the machine's.

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
    control::report_line,
    layout::{DIRECTORY_VARIABLE, Layout, node_number},
    mounts,
    network::Network,
};
use crate::error::{Context, LocalError};

/// Reports the PID of the node's PID 1 on stdout; then PID 1 reports `ready`. Returns when PID 1 has exited.
pub(crate) async fn boot(layout: &Layout, name: &str) -> Result<ExitCode, LocalError> {
    let cluster = layout.load()?;
    let number = node_number(name).ok_or_else(|| LocalError::Usage(format!("{name} is not the name of a node")))?;
    let network = Network::connect()?;
    // A cgroup namespace gets the current cgroup as its root.
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
        .context(|| "can't create namespaces; this needs root on the machine, not in a container".to_owned())?;
        mounts::make_private()?;
        let own = File::open("/proc/thread-self/ns/net").context(|| "can't open a namespace".to_owned())?;
        // The receiver is gone only if booting has failed already.
        let _ = made.send(own);
        if go.recv().is_err() {
            return Err(LocalError::Aborted(init_name));
        }
        // A child cgroup, because in cgroup v2 a cgroup with processes of its own can't have controllers for its
        // children.
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
        _ => return Err(LocalError::Panicked(format!("boots {name}"))),
    };
    report_line(&init.id().to_string())?;
    // Waiting closes init's stdin, and only then init reports `ready`: both write to the same stdout.
    tokio::task::spawn_blocking(move || init.wait())
        .await
        .context(|| format!("lost PID 1 of {name}"))?
        .context(|| format!("lost PID 1 of {name}"))?;
    Ok(ExitCode::SUCCESS)
}
