//! `local exec`: a command in all namespaces of a node.

use std::{
    path::Path,
    process::{Command, ExitCode},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, chdir},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use super::{
    cgroup,
    control::{Client, NodeView, Request},
    layout::Layout,
    pod::enter_node,
};
use crate::{
    api,
    host::{HOST_PATH, exit_code},
    local::error::{Context, LocalError},
};

/// The node of this name.
pub(crate) async fn known(layout: &Layout, node: &str) -> Result<NodeView, LocalError> {
    let views = Client::connect(layout).await?.ask(Request::Status).await?;
    let view = views.into_iter().find(|view| view.name == node);
    view.ok_or_else(|| LocalError::Usage(format!("there is no node {node}; see `flux-distribute local status`")))
}

/// Runs `words` in `node` and ends with its exit code.
pub(crate) async fn run(layout: &Layout, node: &str, words: Vec<String>) -> Result<ExitCode, LocalError> {
    let cluster = layout.load()?;
    let Some(init) = known(layout, node).await?.init_pid else {
        return Err(LocalError::Refused(format!("{node} is powered off")));
    };
    // Before the namespaces, in which the machine's hierarchies can't be seen. What is left behind when the command
    // ends belongs to the node, as after a login.
    cgroup::enter(&format!("{}/user", cluster.node_cgroup(node)))?;

    // The terminal sends these to the command as well, and it is the command that decides what they mean.
    let failed = || "can't handle signals".to_owned();
    let (_interrupt, _quit) =
        (signal(SignalKind::interrupt()).context(failed)?, signal(SignalKind::quit()).context(failed)?);
    let mut terminate = signal(SignalKind::terminate()).context(failed)?;
    let mut hang_up = signal(SignalKind::hangup()).context(failed)?;

    let prefix = cluster.prefix.unwrap_or_else(|| api::DEFAULT_PREFIX.to_owned());
    let (started, pid) = oneshot::channel();
    let mut ended = tokio::task::spawn_blocking(move || {
        let thread = std::thread::spawn(move || {
            enter_node(init)?;
            chdir(Path::new("/root")).context(|| "can't change to /root".to_owned())?;
            let mut child = command(&prefix, &words).spawn().context(|| format!("can't run {}", words[0]))?;
            let _ = started.send(child.id());
            child.wait().context(|| format!("lost {}", words[0]))
        });
        thread.join().unwrap_or_else(|_| Err(LocalError::Refused("the command broke off".to_owned())))
    });
    let pid = pid.await.ok();
    loop {
        let forwarded = tokio::select! {
            status = &mut ended => return Ok(exit_code(status.context(|| "lost the command".to_owned())??)),
            _ = terminate.recv() => Signal::SIGTERM,
            _ = hang_up.recv() => Signal::SIGHUP,
        };
        if let Some(pid) = pid {
            let _ = kill(Pid::from_raw(pid.cast_signed()), forwarded);
        }
    }
}

fn command(prefix: &str, words: &[String]) -> Command {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).env_clear();
    command.env("PATH", format!("{prefix}/current/bin:{HOST_PATH}"));
    command.env("FLUX_URI", api::BROKER_URI).env("HOME", "/root").env("USER", "root").env("SHELL", "/bin/sh");
    for kept in ["TERM", "LANG", "LC_ALL"] {
        if let Some(value) = std::env::var_os(kept) {
            command.env(kept, value);
        }
    }
    command
}
