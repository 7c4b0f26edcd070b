//! The command `uninstall`: removes everything from a host by hand. It needs no API server, so it works after the cluster is gone.

use std::{io::Write, path::Path, process::ExitCode, sync::Arc};

use futures::{FutureExt, future::select_all};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{
    decide::jobs::ends_with,
    drains::{self, drained_for},
    error::StepError,
    execute::{
        ask::jobs_may_run_here,
        queues::{self, UNINSTALLED_BY_HAND},
    },
    inputs::{broker_state, local_roster::host_roster},
    node_ops::removal_grace,
    other_process::other_process,
};
use api::{IdSet, Roster};
use base::error_chain;
use broker::{
    rfc3::RpcError,
    status::{self, DrainMode, InstanceStatus},
};
use host::NsHost;
use hostapi::{Host, HostError, HostView, Order, RemoveOrder, StopOrder, look};

/// Arguments of the command.
#[derive(clap::Args, Debug, Clone)]
pub struct UninstallArguments {
    /// Also remove the queue (statedirs and dumps), which is kept otherwise
    #[arg(long)]
    purge: bool,
    /// Uninstall even while jobs run, which ends them, or while an agent runs here that will install everything again
    #[arg(long)]
    force: bool,
}

/// Why a host was not cleaned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UninstallError {
    /// The host stage refused before anything was changed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The host stage failed during the removal: what was removed stays removed.
    #[error(transparent)]
    CutShort(HostError),
    /// A job could begin and be lost.
    #[error(
        "can't keep new jobs from starting on this host: run the command again, or add --force, which ends any job that starts \
         meanwhile"
    )]
    KeepOff(#[source] StepError),
    /// A signal ended the command.
    #[error("interrupted before this host was clean: run the command again")]
    Interrupted,
    /// Signal handlers can't be installed; nothing was changed.
    #[error("can't wait for signals")]
    Signals(#[source] std::io::Error),
    /// Jobs run that would end with this host's broker.
    #[error("{0}: wait until they have ended, or add --force to end them")]
    Jobs(&'static str),
    /// An agent on this host would install everything again.
    #[error(
        "an agent (process {0}) runs on this host and would install again: delete the FluxInstance, which cleans all hosts, or \
         keep the DaemonSet off this node; or add --force"
    )]
    Agent(i32),
    /// Standard output can't be written.
    #[error("can't write to standard output")]
    Write(#[from] std::io::Error),
}

impl UninstallError {
    /// 2 if nothing was changed and trying again alone won't help.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Jobs(_) | Self::Agent(_) => 2,
            Self::Host(error) => error.exit_code(),
            Self::CutShort(_) | Self::KeepOff(_) | Self::Interrupted | Self::Signals(_) | Self::Write(_) => 1,
        }
    }
}

/// Stops the broker and removes everything, once no job runs that would end with the broker and none can start. If the command ends
/// before that, jobs may start again.
///
/// # Errors
/// See [`UninstallError`]. What was done stays done, and the next run goes on from there.
pub async fn uninstall(arguments: UninstallArguments) -> Result<ExitCode, UninstallError> {
    let UninstallArguments { purge, force } = arguments;
    let host = NsHost::open()?;
    let view = look(&host).await?;
    if force {
        take_off(&host, &view, purge).await?;
    } else {
        if let Some(reason) = jobs_may_run_here(&view).await {
            return Err(UninstallError::Jobs(reason));
        }
        if let Some(agent) = other_process("agent") {
            return Err(UninstallError::Agent(agent));
        }
        let mut signals = signals().map_err(UninstallError::Signals)?;
        let barrier = Barrier::of(&view).await;
        // Not cut off by a signal: a `flux` command that goes on alone may stop the queues after they were started again.
        let raised = match &barrier {
            Some(barrier) => barrier.raise(&host).await.map_err(UninstallError::KeepOff),
            None => Ok(()),
        };
        let done = async {
            raised?;
            take_off_if_idle(&host, &view, purge).await
        };
        let done = tokio::select! {
            biased;
            _ = select_all(signals.iter_mut().map(|signal| signal.recv().boxed())) => Err(UninstallError::Interrupted),
            done = done => done,
        };
        if let (Err(_), Some(barrier)) = (&done, barrier) {
            barrier.lower(&host).await;
        }
        done?;
    }
    writeln!(std::io::stdout(), "{}", outcome(&view, purge))?;
    Ok(ExitCode::SUCCESS)
}

/// The signals by which a terminal, a shell or a pod ends a command.
fn signals() -> std::io::Result<Vec<Signal>> {
    [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].into_iter().map(signal).collect()
}

/// A job that started meanwhile wins.
async fn take_off_if_idle(host: &dyn Host, view: &HostView, purge: bool) -> Result<(), UninstallError> {
    match jobs_may_run_here(&look(host).await?).await {
        Some(reason) => Err(UninstallError::Jobs(reason)),
        None => take_off(host, view, purge).await,
    }
}

async fn take_off(host: &dyn Host, view: &HostView, purge: bool) -> Result<(), UninstallError> {
    let rank = view.broker.as_ref().map(|broker| broker.record.rank);
    let grace_secs = removal_grace(rank, !purge, false);
    for order in [Order::Stop(StopOrder { grace_secs }), Order::Remove(RemoveOrder { keep_state: !purge })] {
        host.run(order, &mut |_| {}).await.map_err(UninstallError::CutShort)?;
    }
    Ok(())
}

/// What keeps jobs from starting that would end with the broker of this host.
#[derive(Debug, PartialEq, Eq)]
enum Measure {
    /// On the lead, whose end is the end of the whole instance.
    StopQueues,
    /// On a follower: the rest of the instance goes on without these ranks.
    Drain(IdSet),
}

/// None if the broker of this host carries no job. Ranks that people have drained stay as they are.
fn measure(view: &HostView, instance: &InstanceStatus) -> Option<Measure> {
    let rank = view.broker.as_ref()?.record.rank;
    if rank == 0 {
        return Some(Measure::StopQueues);
    }
    // What an earlier run drained is drained again, so that its time is new: the lead's agent undrains old drains of ours.
    let by_others = || instance.drained.iter().filter(|drained| drained.reason != drains::THIS_HOST_UNINSTALLED);
    let is_drained = |rank: u32| by_others().any(|drained| drained.ranks.contains(rank));
    let gets_jobs = |rank: &u32| ends_with(view, *rank) && !is_drained(*rank) && !instance.excluded.contains(*rank);
    let ranks: IdSet = instance.online.0.iter().copied().filter(gets_jobs).collect();
    (!ranks.is_empty()).then_some(Measure::Drain(ranks))
}

/// A [`Measure`] on one host.
struct Barrier<'a> {
    measure: Measure,
    prefix: &'a Path,
    roster: Arc<Roster>,
}

impl<'a> Barrier<'a> {
    /// None if no job can start here, for example because this host is cut off from the lead.
    async fn of(view: &'a HostView) -> Option<Self> {
        let (prefix, roster) = (view.state.as_ref()?.prefix.as_path(), host_roster(view)?);
        let socket = broker_state::connect().await.ok()?;
        let measure = measure(view, &status::instance(&socket).await.ok()?)?;
        Some(Self { measure, prefix, roster })
    }

    /// Takes the measure. After an error a part of it may be done, such as one of several queues.
    async fn raise(&self, host: &dyn Host) -> Result<(), StepError> {
        match &self.measure {
            Measure::StopQueues => queues::stop(host, self.prefix, &self.roster, UNINSTALLED_BY_HAND).await,
            Measure::Drain(ranks) => Ok(drain_ranks(ranks).await?),
        }
    }

    /// Lets jobs start again, if the broker still runs.
    async fn lower(&self, host: &dyn Host) {
        // A stop that was cut short may have told the broker to end: a job that started now would end with it.
        let is_ending = match broker_state::connect().await {
            Ok(socket) => status::state(&socket).await.is_ok_and(|state| state.state != "run"),
            Err(_) => look(host).await.is_ok_and(|view| view.broker.is_none()),
        };
        if is_ending {
            return say("the broker has ended, or is about to: run the command again to remove what is left");
        }
        let (lowered, done, remedy) = match &self.measure {
            Measure::StopQueues => {
                let started = queues::start(host, self.prefix, &self.roster, &[UNINSTALLED_BY_HAND]).await;
                let remedy = "run `flux queue status`, and `flux queue start NAME` for each queue that is stopped because a \
                              host is being uninstalled by hand";
                (started, "the queues are started again".to_owned(), remedy.to_owned())
            }
            Measure::Drain(ranks) => {
                let undrained = undrain_ranks(ranks).await.map_err(StepError::from);
                (undrained, format!("rank {ranks} gets jobs again"), format!("run `flux resource undrain {ranks}`"))
            }
        };
        match lowered {
            Ok(()) => say(&done),
            Err(error) => {
                say(&format!("can't let jobs begin again: {}; if the instance goes on, {remedy}", error_chain(&error)));
            }
        }
    }
}

async fn drain_ranks(ranks: &IdSet) -> Result<(), RpcError> {
    let socket = broker_state::connect().await?;
    let again = drained_for(drains::THIS_HOST_UNINSTALLED, ranks, &status::instance(&socket).await?);
    status::drain(&socket, ranks, drains::THIS_HOST_UNINSTALLED, DrainMode::Keep).await?;
    if again.is_empty() {
        return Ok(());
    }
    status::drain(&socket, &again, drains::THIS_HOST_UNINSTALLED, DrainMode::Renew).await
}

async fn undrain_ranks(ranks: &IdSet) -> Result<(), RpcError> {
    let socket = broker_state::connect().await?;
    let ours = drained_for(drains::THIS_HOST_UNINSTALLED, ranks, &status::instance(&socket).await?);
    if ours.is_empty() { Ok(()) } else { status::undrain(&socket, &ours).await }
}

fn say(words: &str) {
    // Nothing depends on these lines.
    let _ = writeln!(std::io::stderr(), "flux-distribute: {words}");
}

fn outcome(view: &HostView, purge: bool) -> String {
    match &view.state {
        None => "nothing was claimed on this host; it is clean".to_owned(),
        Some(_) if purge => "this host is clean".to_owned(),
        Some(state) => {
            format!("this host is clean, except for the queue if it was here: see {}", state.prefix.display())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::tree;
    use broker::status::Drained;
    use hostapi::{Answer, Refusal};

    #[test]
    fn only_an_unchanged_host_gives_exit_code_2() {
        let wrong = || HostError::Refused(Refusal::new("state.json is of a newer version"));
        let busy = || HostError::Refused(Refusal::transient("the host is locked"));
        for (error, code) in [
            (UninstallError::Jobs("jobs are running"), 2),
            (UninstallError::Agent(7), 2),
            (UninstallError::Host(wrong()), 2),
            (UninstallError::Host(busy()), 1),
            (UninstallError::Host(HostError::unexpected(&Answer::Done)), 1),
            (UninstallError::CutShort(wrong()), 1),
            (UninstallError::Interrupted, 1),
        ] {
            assert_eq!(error.exit_code(), code, "{error}");
        }
    }

    #[test]
    fn a_lead_stops_the_queues_and_a_follower_drains_what_ends_with_it() {
        let set = |text: &str| text.parse::<IdSet>().unwrap();
        // In a binary tree ranks 3 and 4 are below rank 1, and 7 below rank 3.
        for (rank, online, drained, expected) in [
            (Some(0), "0-7", "", Some(Measure::StopQueues)),
            (Some(1), "0-7", "", Some(Measure::Drain(set("1,3-4,7")))),
            (Some(1), "0-2,4", "4", Some(Measure::Drain(set("1")))),
            (Some(5), "0-7", "", Some(Measure::Drain(set("5")))),
            (Some(5), "0-7", "5", None),
            (Some(6), "0-7", "", Some(Measure::Drain(set("6")))),
            (None, "0-7", "", None),
        ] {
            let drained = Drained { ranks: set(drained), reason: "bad disk".to_owned(), since: 0.0 };
            let by_hand = Drained { ranks: set("6"), reason: drains::THIS_HOST_UNINSTALLED.to_owned(), since: 0.0 };
            let told =
                InstanceStatus { drained: vec![drained, by_hand], online: set(online), ..InstanceStatus::default() };
            assert_eq!(measure(&tree(rank, 0), &told), expected, "{rank:?} {online}");
        }
    }
}
