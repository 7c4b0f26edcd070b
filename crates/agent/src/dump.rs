//! Dumps of the queue: by hand, and by the lead's agent as often as `spec.state.dumpEvery` says.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use k8s_openapi::jiff::Timestamp;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::{EnterError, decide::Step, run::Agent};
use api::{Roster, parse_duration};
use base::error_chain;
use host::{NsHost, dumps::is_of, files::copy_in_host_root, open_host_file};
use hostapi::{Answer, DumpOrder, Dumped, Host, HostError, HostView, Order, look};

/// See the command.
#[derive(clap::Args, Debug, Clone)]
pub struct DumpArguments {
    /// Also write it to this file on the host (0600), or with - to stdout, to get it off the lead's disk
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// What the agent remembers of its dumps; all of it can be lost.
#[derive(Default)]
pub(super) struct Dumping {
    task: Option<JoinHandle<()>>,
    /// When it was tried last, seconds since the Unix epoch.
    tried: Option<i64>,
}

/// A dump is due. One that has failed is tried again when the next one would be.
fn is_due(every: Option<Duration>, newest: Option<i64>, tried: Option<i64>, now: i64) -> bool {
    let Some(every) = every.and_then(|every| i64::try_from(every.as_secs()).ok()) else { return false };
    // A clock that went back must not put the next one off for ever.
    newest.max(tried).is_none_or(|last| now - last >= every || last > now + every)
}

impl Agent {
    /// Lead only, when nothing else is to be done. It goes on beside what comes next: a large queue takes minutes.
    pub(super) fn dump_if_due(&mut self, step: &Step) {
        let every = self.spec.state.dump_every.as_deref().and_then(parse_duration);
        let now = Timestamp::now().as_second();
        let running = self.dumping.task.as_ref().is_some_and(|task| !task.is_finished());
        let is_wanted = *step == Step::Hold || self.view.statedir_lost;
        if !is_wanted || running || every.is_none() || !self.is_online() {
            return;
        }
        let Ok(order) = order(&self.view) else { return };
        let newest = self.view.dumps.iter().rev().find(|dump| is_of(dump, &order.instance_id));
        if !is_due(every, newest.map(|dump| dump.time.0.as_second()), self.dumping.tried, now) {
            return;
        }
        self.dumping.tried = Some(now);
        let host = self.actor.host.clone();
        self.dumping.task = Some(tokio::spawn(async move {
            match ordered(host.as_ref(), order).await {
                Ok(dumped) => info!(dump = dumped.dump.name, bytes = dumped.dump.bytes, "the queue is dumped"),
                Err(error) => warn!(error = error_chain(&error), "the queue could not be dumped"),
            }
        }));
    }
}

/// Has a dump made and kept, and its way told.
///
/// # Errors
/// The lead's broker does not run here; the stage's.
pub async fn dump(arguments: DumpArguments) -> Result<ExitCode, EnterError> {
    let host = NsHost::open()?;
    let view = look(&host).await?;
    let dumped = ordered(&host, order(&view)?).await?;
    let words = format!("{} ({} KiB)", dumped.path.display(), dumped.dump.bytes.div_ceil(1024));
    let mut stderr = io::stderr();
    if !dumped.warnings.is_empty() {
        writeln!(stderr, "{}", dumped.warnings)?;
    }
    match arguments.out.as_deref() {
        None => writeln!(io::stdout(), "{words}")?,
        Some(out) if out == Path::new("-") => {
            let mut stdout = io::stdout().lock();
            io::copy(&mut open_host_file(&dumped.path)?, &mut stdout)?;
            stdout.flush()?;
            writeln!(stderr, "{words}")?;
        }
        Some(out) => {
            copy_in_host_root(&dumped.path, out).map_err(|source| EnterError::Copy {
                out: out.to_owned(),
                kept: dumped.path.clone(),
                source,
            })?;
            writeln!(io::stdout(), "{words}, and {}", out.display())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn ordered(host: &dyn Host, order: DumpOrder) -> Result<Dumped, EnterError> {
    match host.run(Order::Dump(order), &mut |_| {}).await? {
        Answer::Dumped(dumped) => Ok(dumped),
        other => Err(HostError::unexpected(&other).into()),
    }
}

/// Everything that a dump needs is on the host: no API server is asked.
fn order(view: &HostView) -> Result<DumpOrder, EnterError> {
    let (Some(broker), Some(state)) = (&view.broker, &view.state) else { return Err(EnterError::NoBroker) };
    let copy = view.roster.as_deref().and_then(|text| Roster::parse(text).ok());
    let copy = copy.ok_or_else(|| EnterError::Other("the host's etc/roster.json can't be read".to_owned()))?;
    if broker.record.rank != 0 {
        let lead = copy.lead().map_or("?", |lead| lead.node.as_str());
        let rank = broker.record.rank;
        return Err(EnterError::NotLead(format!("this node has rank {rank}; the queue is on the lead, node {lead}")));
    }
    Ok(DumpOrder {
        prefix: state.prefix.clone(),
        digest: broker.record.digest.clone(),
        instance_id: broker.record.instance_id.clone(),
        run_as: copy.settings.run_as,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_is_due_when_the_last_one_is_old_enough() {
        let hour = Some(Duration::from_secs(3600));
        for (every, newest, tried, due) in [
            (None, None, None, false),
            (hour, None, None, true),
            (hour, Some(10_000), None, false),
            (hour, Some(6400), None, true),
            (hour, Some(6401), None, false),
            (hour, Some(1), Some(9000), false),
            (hour, Some(1), Some(6000), true),
            (hour, Some(99_999), None, true),
        ] {
            assert_eq!(is_due(every, newest, tried, 10_000), due, "{newest:?} {tried:?}");
        }
    }
}
