//! The command `uninstall`: takes everything off a host by hand. It asks nobody, so it works where the cluster is gone.

use std::{fs, io::Write, process::ExitCode};

use super::{
    act::{REMOVE_GRACE_SECS, STOP_GRACE_SECS},
    climb::jobs_may_run,
};
use crate::host::{Host, HostError, HostView, NsHost, Order, RemoveOrder, StopOrder, look};

/// See the command.
#[derive(clap::Args, Debug, Clone)]
pub struct UninstallArguments {
    /// Also the queue: statedirs and dumps, which stay otherwise
    #[arg(long)]
    purge: bool,
    /// Whatever runs: jobs, and an agent that will install everything again
    #[arg(long)]
    force: bool,
}

/// Why a host was not cleaned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UninstallError {
    /// The host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Somebody computes.
    #[error("{0}: wait until they have ended, or add --force to end them")]
    Jobs(&'static str),
    /// Somebody would install again.
    #[error(
        "an agent (process {0}) runs on this host and would install again: delete the FluxInstance, which cleans all hosts, or \
         keep the DaemonSet off this node; or add --force"
    )]
    Agent(i32),
    /// stdout.
    #[error("can't write")]
    Write(#[from] std::io::Error),
}

impl UninstallError {
    /// 2 where nothing was changed and nothing will be before somebody does something.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Self::Jobs(_) | Self::Agent(_)) { 2 } else { 1 }
    }
}

/// Does what the agent does at the end of an instance.
///
/// # Errors
/// Jobs or an agent run here; the stage's: what is done is done then, and the next run goes on from there.
pub async fn uninstall(arguments: UninstallArguments) -> Result<ExitCode, UninstallError> {
    let UninstallArguments { purge, force } = arguments;
    let host = NsHost::open()?;
    let view = look(&host).await?;
    if !force {
        if let Some(reason) = jobs_may_run(&view).await {
            return Err(UninstallError::Jobs(reason));
        }
        if let Some(agent) = agent() {
            return Err(UninstallError::Agent(agent));
        }
    }
    let grace_secs = if purge { REMOVE_GRACE_SECS } else { STOP_GRACE_SECS };
    host.run(Order::Stop(StopOrder { grace_secs }), &mut |_| {}).await?;
    host.run(Order::Remove(RemoveOrder { keep_state: !purge }), &mut |_| {}).await?;
    writeln!(std::io::stdout(), "{}", outcome(&view, purge))?;
    Ok(ExitCode::SUCCESS)
}

fn outcome(view: &HostView, purge: bool) -> String {
    match &view.state {
        None => "nothing was claimed on this host; it is clean".to_owned(),
        Some(_) if purge => "this host is clean".to_owned(),
        Some(state) => format!("this host is clean but for the queue, if it had it: see {}", state.prefix.display()),
    }
}

/// An agent on this host, in whichever pod: all processes can be seen from here.
fn agent() -> Option<i32> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut agents = processes.filter_map(|process| {
        let pid = process.file_name().to_str()?.parse().ok()?;
        is_agent(&fs::read(process.path().join("cmdline")).ok()?).then_some(pid)
    });
    agents.next()
}

fn is_agent(cmdline: &[u8]) -> bool {
    let mut words = cmdline.split(|byte| *byte == 0);
    let program = words.next().unwrap_or_default();
    program.rsplit(|byte| *byte == b'/').next() == Some(b"flux-distribute") && words.next() == Some(b"agent")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_known_by_its_command_line() {
        for (cmdline, is) in [
            (&b"/flux-distribute\0agent\0"[..], true),
            (b"flux-distribute\0agent\0--node-name\0n\0", true),
            (b"/flux-distribute\0uninstall\0", false),
            (b"/usr/bin/other\0agent\0", false),
            (b"", false),
        ] {
            assert_eq!(is_agent(cmdline), is);
        }
    }
}
