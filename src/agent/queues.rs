//! The queues are stopped for the moment between the last look at the jobs and the end of the lead's broker. Only those that
//! were started are, with words of ours, so that they are found and started again if the epoch doesn't end after all, by
//! whichever agent; what an administrator has stopped is his.

use super::act::{Actor, StepError};
use crate::{api::Roster, host::Preflight};

/// What `flux queue status` shows of a queue that we have stopped.
const MESSAGE: &str = "flux-distribute: the epoch ends";

impl Actor {
    /// Has no further job begin.
    ///
    /// # Errors
    /// flux's.
    pub async fn stop_queues(&self, preflight: &Preflight, roster: &Roster) -> Result<(), StepError> {
        let list = self.flux(preflight, roster, &["queue", "list", "-no", "{queue}|{started}"]).await?;
        for queue in started(&list) {
            let stop = ["queue", "stop", "--nocheckpoint", "--message", MESSAGE];
            self.flux(preflight, roster, &[&stop[..], queue.as_slice()].concat()).await?;
        }
        Ok(())
    }

    /// Takes that back.
    ///
    /// # Errors
    /// flux's.
    pub async fn start_queues(&self, preflight: &Preflight, roster: &Roster) -> Result<(), StepError> {
        let status = self.flux(preflight, roster, &["queue", "status"]).await?;
        for queue in stopped_by_us(&status) {
            self.flux(preflight, roster, &[&["queue", "start"], queue.as_slice()].concat()).await?;
        }
        Ok(())
    }
}

/// The queues that are started; an instance without queues has one without a name.
fn started(list: &str) -> Vec<Option<&str>> {
    let rows = list.lines().filter_map(|line| line.trim().rsplit_once('|'));
    rows.filter(|(_, started)| *started == "✔").map(|(queue, _)| named(queue)).collect()
}

fn stopped_by_us(status: &str) -> Vec<Option<&str>> {
    let ours = format!("Scheduling is stopped: {MESSAGE}");
    let rows = status.lines().filter_map(|line| line.trim().strip_suffix(ours.as_str()));
    rows.map(|queue| named(queue.trim_end_matches(": "))).collect()
}

fn named(queue: &str) -> Option<&str> {
    Some(queue.trim()).filter(|queue| !queue.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_started_queues_are_stopped_and_only_what_we_have_stopped_is_started() {
        assert_eq!(started("|✔\n"), [None]);
        assert_eq!(started("|✗\n"), []);
        assert_eq!(started("batch|✔\ndebug|✗\nlong|✔\n"), [Some("batch"), Some("long")]);
        let status = format!(
            "batch: Job submission is enabled\nbatch: Scheduling is stopped: {MESSAGE}\nlong: Scheduling is stopped: \
             maintenance\ndebug: Scheduling is started\n"
        );
        assert_eq!(stopped_by_us(&status), [Some("batch")]);
        assert_eq!(stopped_by_us(&format!("Job submission is enabled\nScheduling is stopped: {MESSAGE}\n")), [None]);
    }
}
