//! The command `uninstall`: takes everything off a host by hand. It asks nobody, so it works where the cluster is gone.

use std::{fs, io::Write, process::ExitCode};

use super::{
    act::removal_grace,
    climb::{ask, jobs_may_run},
    copied::host_roster,
    queues::{self, UNINSTALLED_BY_HAND},
};
use crate::{
    error_chain,
    host::{
        Host, HostError, HostView, NsHost, Order, RemoveOrder, Root, StopOrder, look,
        processes::{Process, processes},
    },
};

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
    /// The host; nothing was changed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The host, when it had begun; what is done is done.
    #[error(transparent)]
    CutShort(HostError),
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
        match self {
            Self::Jobs(_) | Self::Agent(_) => 2,
            Self::Host(error) => error.exit_code(),
            Self::CutShort(_) | Self::Write(_) => 1,
        }
    }
}

/// Stops the broker and takes everything off, once no job runs and none can begin: it stops the queues, as the agents do at the
/// end of an instance.
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
        if let Some(reason) = last_jobs(&host, &view).await? {
            return Err(UninstallError::Jobs(reason));
        }
    }
    let rank = view.broker.as_ref().map(|broker| broker.record.rank);
    let grace_secs = removal_grace(rank, !purge, false);
    for order in [Order::Stop(StopOrder { grace_secs }), Order::Remove(RemoveOrder { keep_state: !purge })] {
        host.run(order, &mut |_| {}).await.map_err(UninstallError::CutShort)?;
    }
    writeln!(std::io::stdout(), "{}", outcome(&view, purge))?;
    Ok(ExitCode::SUCCESS)
}

/// Sees to it that no further job begins, and looks once more whether one runs: a job that has slipped in wins, and the queues go
/// on.
async fn last_jobs(host: &dyn Host, view: &HostView) -> Result<Option<&'static str>, UninstallError> {
    let (Some(state), Some(roster), Some(_)) = (&view.state, host_roster(view), &view.broker) else { return Ok(None) };
    if ask().await.lead.is_err() {
        // Cut off from the lead: no job begins here.
        return Ok(None);
    }
    let warn = |error| say(&format!("the queues stay as they are: {}", error_chain(&error)));
    let stopped = queues::stop(host, &state.prefix, &roster, UNINSTALLED_BY_HAND).await;
    let reason = jobs_may_run(&look(host).await?).await;
    match (stopped, reason) {
        (Err(error), _) => warn(error),
        (Ok(()), Some(_)) => {
            queues::start(host, &state.prefix, &roster, UNINSTALLED_BY_HAND).await.unwrap_or_else(warn);
        }
        (Ok(()), None) => say(
            "the queues are stopped, so that no job begins; if the instance goes on without this host, run `flux queue start \
             --all` on another one",
        ),
    }
    Ok(reason)
}

fn say(words: &str) {
    // Nobody may be there to read it.
    let _ = writeln!(std::io::stderr(), "flux-distribute: {words}");
}

fn outcome(view: &HostView, purge: bool) -> String {
    match &view.state {
        None => "nothing was claimed on this host; it is clean".to_owned(),
        Some(_) if purge => "this host is clean".to_owned(),
        Some(state) => format!("this host is clean but for the queue, if it had it: see {}", state.prefix.display()),
    }
}

/// An agent on this host, in whichever pod: all processes can be seen from here. Only the host's root runs one: else any user
/// could keep a host from being cleaned.
fn agent() -> Option<i32> {
    let root = Root::host();
    let is_agent = |process: &Process| {
        fs::read(process.dir.join("cmdline")).is_ok_and(|line| is_agent(&line)) && process.is_hosts_root()
    };
    processes(&root).ok()?.iter().find(|process| is_agent(process)).map(|process| process.pid)
}

fn is_agent(cmdline: &[u8]) -> bool {
    let mut words = cmdline.split(|byte| *byte == 0);
    let program = words.next().unwrap_or_default();
    program.rsplit(|byte| *byte == b'/').next() == Some(b"flux-distribute") && words.next() == Some(b"agent")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{Answer, Refusal};

    #[test]
    fn only_a_host_on_which_nothing_was_changed_is_told_as_one() {
        let wrong = || HostError::Refused(Refusal::new("state.json is of a newer version"));
        let busy = || HostError::Refused(Refusal::transient("the host is locked"));
        for (error, code) in [
            (UninstallError::Jobs("jobs are running"), 2),
            (UninstallError::Agent(7), 2),
            (UninstallError::Host(wrong()), 2),
            (UninstallError::Host(busy()), 1),
            (UninstallError::Host(HostError::unexpected(&Answer::Done)), 1),
            (UninstallError::CutShort(wrong()), 1),
        ] {
            assert_eq!(error.exit_code(), code, "{error}");
        }
    }

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
