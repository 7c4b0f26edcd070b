//! `local exec`: runs a command in all namespaces of a node or of its agent's pod.

use std::{
    ffi::OsStr,
    io::Write,
    os::unix::ffi::OsStrExt,
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::Duration,
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
    shim::enter_node,
};
use crate::error::{Context, LocalError};
use base::process::exit_code;
use broker::command::{NO_ANSWER, PING_LEAD};
use host::HOST_PATH;

/// How long a command of Flux is silent before rank 0 is asked whether it answers.
const PATIENCE: Duration = Duration::from_secs(3);

/// Finds a node by name.
pub(crate) async fn find_node(layout: &Layout, node: &str) -> Result<NodeView, LocalError> {
    let views = Client::connect(layout).await?.ask(Request::Status).await?;
    let view = views.into_iter().find(|view| view.name == node);
    view.ok_or_else(|| LocalError::NoNode(node.to_owned()))
}

/// Where a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the node, as after a login.
    Node,
    /// In the agent's pod, as with `kubectl exec`. Only `flux-distribute` itself is there, as in the image.
    Pod,
}

/// Runs `words` in `node` and returns the exit code.
///
/// # Errors
/// There is no such node, it is off, or for [`Place::Pod`] no agent runs there at the moment.
pub(crate) async fn run(layout: &Layout, node: &str, place: Place, words: Vec<String>) -> Result<ExitCode, LocalError> {
    let cluster = layout.load()?;
    let view = find_node(layout, node).await?;
    let Some(init) = view.init_pid else {
        return Err(LocalError::PoweredOff(node.to_owned()));
    };
    let pid = match (place, view.agent_pid) {
        (Place::Node, _) => init,
        (Place::Pod, Some(agent)) => agent,
        (Place::Pod, None) => return Err(LocalError::NoAgent(node.to_owned())),
    };
    // Before entering the namespaces, where the machine's hierarchies are invisible. Processes that outlive the command
    // belong to the node, as after a login.
    cgroup::enter(&format!("{}/user", cluster.node_cgroup(node)))?;

    // The terminal sends these signals to the command as well, which decides how to react.
    let failed = || "can't handle signals".to_owned();
    let (_interrupt, _quit) =
        (signal(SignalKind::interrupt()).context(failed)?, signal(SignalKind::quit()).context(failed)?);
    let mut terminate = signal(SignalKind::terminate()).context(failed)?;
    let mut hang_up = signal(SignalKind::hangup()).context(failed)?;

    let prefix = cluster.prefix.unwrap_or_else(|| api::DEFAULT_PREFIX.to_owned());
    // Ends with this command's runtime.
    if place == Place::Node && words.first().is_some_and(|word| word == "flux") {
        tokio::spawn(tell_if_lead_is_silent(pid, prefix.clone()));
    }
    let mut command = match place {
        Place::Node => command(&prefix, &words),
        Place::Pod => pod_command(pid, &words)?,
    };
    let (started, child) = oneshot::channel();
    let mut ended = tokio::task::spawn_blocking(move || {
        let thread = std::thread::spawn(move || {
            enter_node(pid)?;
            let directory = Path::new(if place == Place::Node { "/root" } else { "/" });
            chdir(directory).context(|| format!("can't change to {}", directory.display()))?;
            let mut child = command.spawn().context(|| format!("can't run {}", words[0]))?;
            let _ = started.send(child.id());
            child.wait().context(|| format!("lost {}", words[0]))
        });
        thread.join().unwrap_or_else(|_| Err(LocalError::Panicked("runs the command".to_owned())))
    });
    let child = child.await.ok();
    loop {
        let forwarded = tokio::select! {
            status = &mut ended => return Ok(exit_code(status.context(|| "lost the command".to_owned())??)),
            _ = terminate.recv() => Signal::SIGTERM,
            _ = hang_up.recv() => Signal::SIGHUP,
        };
        if let Some(pid) = child {
            let _ = kill(Pid::from_raw(pid.cast_signed()), forwarded);
        }
    }
}

/// Most commands of Flux need rank 0, and wait for it without a word.
async fn tell_if_lead_is_silent(node: i32, prefix: String) {
    tokio::time::sleep(PATIENCE).await;
    let ask = move || {
        enter_node(node).ok()?;
        let ping = PING_LEAD.map(str::to_owned);
        command(&prefix, &ping).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().ok()?.code()
    };
    let asked = tokio::task::spawn_blocking(|| std::thread::spawn(ask).join().ok().flatten()).await;
    if asked.is_ok_and(|code| code == Some(NO_ANSWER)) {
        let words = "flux-distribute: the broker of rank 0 does not answer, and this command may wait until it does; \
                     `flux-distribute local status` says what is wrong";
        // Nobody may listen any more.
        let _ = writeln!(std::io::stderr(), "{words}");
    }
}

/// A command with the environment of `agent`. As with `kubectl exec`, the program's name may come first.
fn pod_command(agent: i32, words: &[String]) -> Result<Command, LocalError> {
    let ours = words.first().is_some_and(|word| matches!(word.as_str(), "flux-distribute" | "/flux-distribute"));
    let environment = format!("/proc/{agent}/environ");
    let environment = std::fs::read(&environment).context(|| format!("can't read {environment}"))?;
    let variables = environment.split(|byte| *byte == 0).filter_map(|variable| {
        let at = variable.iter().position(|byte| *byte == b'=')?;
        Some((OsStr::from_bytes(&variable[..at]), OsStr::from_bytes(&variable[at + 1..])))
    });
    let mut command = Command::new("/flux-distribute");
    command.args(&words[usize::from(ours)..]).env_clear().envs(variables);
    command.envs(std::env::var_os("TERM").map(|terminal| ("TERM", terminal)));
    Ok(command)
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
