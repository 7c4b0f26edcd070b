//! Stops and starts queues. Between the last look at the jobs and the end of the lead's broker, no job may start. The agent stops only
//! queues that are started, with a message of its own, so that any agent finds and starts them again if the epoch does not end after
//! all. Queues that an administrator has stopped stay stopped. At the end of the instance it stops all, and nothing starts them again.

use std::path::Path;

use crate::error::{StepError, unexpected};
use api::Roster;
use broker::reload::SCHEDULER_IS_OFFLINE;
use hostapi::{Answer, FluxOrder, Host, Order};

/// Time limit of one `flux` command, in seconds.
const FLUX_TIMEOUT_SECS: u64 = 60;

/// Message of a queue that an agent stopped for the end of an epoch, as `flux queue status` shows it.
pub const EPOCH_ENDS: &str = "flux-distribute: the epoch ends";
/// The same for the end of the instance; nothing starts such a queue again.
pub const INSTANCE_ENDS: &str = "flux-distribute: the instance is being removed";
/// The same for `flux-distribute uninstall` on the lead's host, until its broker has ended.
pub const UNINSTALLED_BY_HAND: &str = "flux-distribute: a host is being uninstalled by hand";

/// Stops the queues that are started, with `message`, so that no further job starts.
///
/// # Errors
/// [`StepError::Flux`] or [`StepError::Host`]; some queues may be stopped.
pub async fn stop(host: &dyn Host, prefix: &Path, roster: &Roster, message: &str) -> Result<(), StepError> {
    let list = flux(host, prefix, roster, &["queue", "list", "-no", "{queue}|{started}"]).await?;
    for queue in started(&list) {
        let stop = ["queue", "stop", "--nocheckpoint", "--message", message];
        flux(host, prefix, roster, &[&stop[..], queue.as_slice()].concat()).await?;
    }
    Ok(())
}

/// Stops all queues for the end of the instance, so that no job ever starts again. Those that are stopped get another message: else a bridge
/// that doesn't know of the end yet would start those that wait for it after a restart of the lead's broker. A scheduler that comes online
/// later finds them stopped.
///
/// # Errors
/// [`StepError::Flux`] or [`StepError::Host`]; some queues may be stopped.
pub async fn end(host: &dyn Host, prefix: &Path, roster: &Roster) -> Result<(), StepError> {
    let stop = ["queue", "stop", "--all", "--nocheckpoint", "--message", INSTANCE_ENDS];
    flux(host, prefix, roster, &stop).await.map(drop)
}

/// Starts the queues that were stopped with one of `messages`.
///
/// # Errors
/// [`StepError::NotYet`] while the scheduler is offline, which hides the messages; [`StepError::Flux`] or [`StepError::Host`].
pub async fn start(host: &dyn Host, prefix: &Path, roster: &Roster, messages: &[&str]) -> Result<(), StepError> {
    let status = flux(host, prefix, roster, &["queue", "status"]).await?;
    let hidden = || {
        StepError::NotYet(
            "can't see why queues are stopped while the scheduler is offline; the agent tries again".to_owned(),
        )
    };
    for queue in stopped_with(messages, &status).ok_or_else(hidden)? {
        flux(host, prefix, roster, &[&["queue", "start"], queue.as_slice()].concat()).await?;
    }
    Ok(())
}

async fn flux(host: &dyn Host, prefix: &Path, roster: &Roster, args: &[&str]) -> Result<String, StepError> {
    let order = FluxOrder {
        prefix: prefix.to_owned(),
        digest: roster.settings.digest.clone(),
        args: args.iter().map(|arg| (*arg).to_owned()).collect(),
        run_as: roster.settings.run_as.clone(),
        timeout_secs: FLUX_TIMEOUT_SECS,
    };
    match host.run(Order::Flux(order), &mut |_| {}).await? {
        Answer::Ran(ran) if ran.code == 0 => Ok(ran.stdout + &ran.stderr),
        Answer::Ran(ran) => {
            let output = ran.stderr.trim().lines().last().unwrap_or("no output").to_owned();
            Err(StepError::Flux { command: args.join(" "), output })
        }
        other => Err(unexpected(&other)),
    }
}

/// The queues that are started. An instance without named queues has one without a name.
fn started(list: &str) -> Vec<Option<&str>> {
    let rows = list.lines().filter_map(|line| line.trim().rsplit_once('|'));
    rows.filter(|(_, started)| *started == "✔").map(|(queue, _)| named(queue)).collect()
}

/// None if the messages are hidden: without a scheduler, `flux queue status` says so of each queue instead of its message.
fn stopped_with<'a>(messages: &[&str], status: &'a str) -> Option<Vec<Option<&'a str>>> {
    if status.contains(&format!("Scheduling is stopped: {SCHEDULER_IS_OFFLINE}")) {
        return None;
    }
    let stopped = status.lines().filter_map(|line| line.trim().split_once("Scheduling is stopped: "));
    let ours = stopped.filter(|(_, message)| messages.contains(message));
    Some(ours.map(|(queue, _)| named(queue.trim_end_matches(": "))).collect())
}

fn named(queue: &str) -> Option<&str> {
    Some(queue.trim()).filter(|queue| !queue.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use hostapi::{FakeHost, Ran};

    #[tokio::test]
    async fn the_end_of_the_instance_stops_queues_that_wait_for_a_bridge_as_well() {
        let host =
            FakeHost::answering([Ok(Answer::Ran(Ran { code: 0, stdout: String::new(), stderr: String::new() }))]);
        end(&host, Path::new("/opt"), fixture::inputs().roster.as_ref().unwrap()).await.unwrap();
        let [Order::Flux(order)] = &host.orders()[..] else { panic!("{:?}", host.orders()) };
        assert_eq!(order.args, ["queue", "stop", "--all", "--nocheckpoint", "--message", INSTANCE_ENDS]);
    }

    #[test]
    fn only_started_queues_are_stopped_and_only_what_we_have_stopped_is_started() {
        assert_eq!(started("|✔\n"), [None]);
        assert_eq!(started("|✗\n"), []);
        assert_eq!(started("batch|✔\ndebug|✗\nlong|✔\n"), [Some("batch"), Some("long")]);
        let status = format!(
            "batch: Job submission is enabled\nbatch: Scheduling is stopped: {EPOCH_ENDS}\nlong: Scheduling is stopped: \
             maintenance\nlast: Scheduling is stopped: {INSTANCE_ENDS}\ndebug: Scheduling is started\n"
        );
        assert_eq!(stopped_with(&[EPOCH_ENDS], &status), Some(vec![Some("batch")]));
        assert_eq!(stopped_with(&[UNINSTALLED_BY_HAND], &status), Some(vec![]));
        let both = stopped_with(&[EPOCH_ENDS, INSTANCE_ENDS], &status);
        assert_eq!(both, Some(vec![Some("batch"), Some("last")]));
        let without_name = format!("Job submission is enabled\nScheduling is stopped: {EPOCH_ENDS}\n");
        assert_eq!(stopped_with(&[EPOCH_ENDS], &without_name), Some(vec![None]));
        assert_eq!(stopped_with(&[EPOCH_ENDS], "batch: Scheduling is stopped: Scheduler is offline\n"), None);
    }
}
