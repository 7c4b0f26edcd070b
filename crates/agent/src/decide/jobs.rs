//! Job safety: whether jobs may be running that would end with a broker, and what a step that ends brokers must do about them.

use std::io::ErrorKind;

use crate::inputs::local_roster::host_roster;
use api::{Closing, IdSet, Rank, RunningJobs, Uninstall};
use broker::rfc3::RpcError;
use hostapi::HostView;
use model::tree::topology;

/// What the broker of this host answered about jobs.
pub struct JobsAnswer {
    /// The lead's answer, through this host's broker: the ranks on which host jobs hold resources. The jobs of gangs are not among them:
    /// pods run on without a broker.
    pub lead: Result<IdSet, RpcError>,
    /// Other brokers may be below this one in the overlay: it says so, or does not answer.
    pub may_have_others_below: bool,
}

/// Why jobs may be running on ranks for which `counts` is true; None if none can. They may
/// - if the lead names such a rank,
/// - if this host has a job shell, whatever the lead says,
/// - if the lead does not answer, and the broker of this host lives and is the lead's or has others below it: they would end with it.
pub fn running_jobs(view: &HostView, answer: &JobsAnswer, counts: impl Fn(Rank) -> bool) -> Option<&'static str> {
    // A broker without a socket was not up yet, and has given out no job.
    let nothing_listens = !view.socket_lost
        && matches!(&answer.lead, Err(RpcError::Connect { source, .. })
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused));
    let rank = view.broker.as_ref().map(|broker| broker.record.rank);
    let has_others_below = |rank| {
        let Some(roster) = host_roster(view).filter(|_| answer.may_have_others_below) else { return false };
        topology(&roster).is_none_or(|topology| topology.is_interior(rank, roster.settings.max_size))
    };
    match &answer.lead {
        Ok(ranks) if ranks.0.iter().any(|rank| counts(*rank)) => Some("jobs are running"),
        _ if view.job_shells > 0 => Some("jobs are running here"),
        Err(_) if rank == Some(0) && !nothing_listens => {
            Some("the lead's broker lives but does not answer, so jobs may be running")
        }
        Err(_) if !nothing_listens && rank.is_some_and(has_others_below) => Some(
            "the lead does not answer, and jobs may be running on ranks below this node's broker (if you know better: \
                 `flux-distribute uninstall --force` in this node's pod)",
        ),
        _ => None,
    }
}

/// The broker of `rank` ends with the one of this host. True for each rank if this host's rank is not known.
pub fn ends_with(view: &HostView, rank: Rank) -> bool {
    let (Some(broker), Some(roster)) = (&view.broker, host_roster(view)) else { return true };
    let own = broker.record.rank;
    own == 0
        || own == rank
        || topology(&roster).is_none_or(|topology| topology.ancestors(rank).any(|above| above == own))
}

/// Why the broker is not stopped yet, although `reason` asks for it: it waits for the jobs of this host. None if it does not.
pub fn why_stop_waits(view: &HostView, reason: &str, waits_for_jobs: bool) -> Option<String> {
    (view.job_shells > 0 && waits_for_jobs).then(|| format!("{reason}; it is stopped when the jobs here have ended"))
}

/// What the end of an epoch does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EpochEnd {
    /// Jobs run: try again later.
    Wait,
    /// Keep new jobs from starting, then ask again.
    StopQueues,
    /// A job started before the queues stopped. It wins: start them again, and wait.
    StartQueuesAndWait,
    /// Stop the lead's broker.
    StopBroker,
}

/// Decides what the end of an epoch does next. `jobs_run`: as the lead's broker says now.
pub fn end_epoch(closing: Closing, jobs_run: bool, queues_are_stopped: bool) -> EpochEnd {
    match (closing, jobs_run, queues_are_stopped) {
        (Closing::AtOnce, ..) | (Closing::WhenIdle, false, true) => EpochEnd::StopBroker,
        (Closing::WhenIdle, true, false) => EpochEnd::Wait,
        (Closing::WhenIdle, false, false) => EpochEnd::StopQueues,
        (Closing::WhenIdle, true, true) => EpochEnd::StartQueuesAndWait,
    }
}

/// What the removal of a host does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removal {
    /// Keep new jobs from starting, then ask again. Every agent does, so that none stops its broker in an idle moment between two
    /// jobs because the lead's agent was slower.
    StopQueues,
    /// Jobs run, and spec.uninstall says that they win; the text is for people.
    Wait(String),
    /// Stop the broker and remove everything.
    Remove,
}

/// True if running jobs keep a host from being cleaned.
pub fn jobs_win(uninstall: &Uninstall) -> bool {
    uninstall.running_jobs != RunningJobs::Cancel
}

/// What a removal knows about the queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuesAtRemoval {
    /// The lead answers, and the host knows its instance.
    pub can_be_stopped: bool,
    /// This removal has tried to stop them.
    pub stop_was_tried: bool,
    /// This agent has stopped them for the end of the instance.
    pub were_stopped: bool,
}

/// Decides what the removal of a host does next. `jobs`: see [`running_jobs`].
pub fn removal(uninstall: &Uninstall, jobs: Option<&str>, queues: QueuesAtRemoval) -> Removal {
    let QueuesAtRemoval { can_be_stopped, stop_was_tried, were_stopped } = queues;
    if !jobs_win(uninstall) {
        return Removal::Remove;
    }
    // If no job runs, stop them once more: somebody may have started them since.
    let stay_stopped = jobs.is_some() && were_stopped;
    if can_be_stopped && !stop_was_tried && !stay_stopped {
        return Removal::StopQueues;
    }
    jobs.map_or(Removal::Remove, |reason| Removal::Wait(kept_for_jobs(reason, were_stopped, uninstall.keep_state)))
}

/// Why a host is kept, and what becomes of pending jobs.
fn kept_for_jobs(reason: &str, queues_were_stopped: bool, keep_state: bool) -> String {
    let pending = match (queues_were_stopped, keep_state) {
        (false, _) => "",
        (true, true) => "; pending jobs are not started any more, and stay in the queue that is kept",
        (true, false) => "; pending jobs are not started any more, and end with the instance",
    };
    format!("{reason}: this host is kept until they have ended (spec.uninstall.runningJobs is Wait){pending}")
}

#[cfg(test)]
mod tests {
    use std::io::Error;

    use super::*;
    use crate::fixture::tree;

    #[test]
    fn jobs_may_run_if_the_lead_or_this_host_says_so_or_if_a_broker_is_silent() {
        let uses = |ranks: u32| Ok((7..7 + ranks).collect());
        let silent = || Err(RpcError::Connect { path: "/s".into(), source: Error::from(ErrorKind::TimedOut) });
        let no_socket = || Err(RpcError::Connect { path: "/s".into(), source: Error::from(ErrorKind::NotFound) });
        let mut lost = tree(Some(0), 0);
        lost.socket_lost = true;
        for (view, lead, may) in [
            (tree(Some(0), 0), uses(0), false),
            (tree(Some(1), 0), uses(2), true),
            (tree(Some(1), 0), uses(0), false),
            (tree(Some(1), 1), uses(0), true),
            (tree(Some(1), 0), silent(), true),
            (tree(Some(1), 0), no_socket(), false),
            (tree(Some(5), 0), silent(), false),
            (tree(Some(5), 1), silent(), true),
            (tree(Some(0), 0), silent(), true),
            (tree(Some(0), 0), no_socket(), false),
            (lost, no_socket(), true),
            (tree(None, 0), no_socket(), false),
        ] {
            let answer = JobsAnswer { lead, may_have_others_below: true };
            assert_eq!(running_jobs(&view, &answer, |_| true).is_some(), may, "{view:?} {:?}", answer.lead);
        }
        let joins = JobsAnswer { lead: silent(), may_have_others_below: false };
        assert_eq!(running_jobs(&tree(Some(1), 0), &joins, |_| true), None);
        // Rank 7 is below ranks 3, 1 and 0.
        for (rank, ends) in [(0, true), (1, true), (3, true), (7, true), (2, false), (4, false)] {
            let (view, answer) = (tree(Some(rank), 0), JobsAnswer { lead: uses(1), may_have_others_below: true });
            assert_eq!(running_jobs(&view, &answer, |busy| ends_with(&view, busy)).is_some(), ends, "{rank}");
        }
    }

    #[test]
    fn an_epoch_ends_only_after_the_queues_stopped_while_no_job_runs() {
        for (closing, jobs_run, queues_are_stopped, expected) in [
            (Closing::WhenIdle, true, false, EpochEnd::Wait),
            (Closing::WhenIdle, false, false, EpochEnd::StopQueues),
            (Closing::WhenIdle, true, true, EpochEnd::StartQueuesAndWait),
            (Closing::WhenIdle, false, true, EpochEnd::StopBroker),
            (Closing::AtOnce, true, false, EpochEnd::StopBroker),
        ] {
            assert_eq!(end_epoch(closing, jobs_run, queues_are_stopped), expected, "{closing:?} {jobs_run}");
        }
    }

    #[test]
    fn a_removal_stops_the_queues_first_and_waits_for_running_jobs() {
        let wait = Uninstall::default();
        let cancel = Uninstall { running_jobs: RunningJobs::Cancel, ..Uninstall::default() };
        let runs = Some("jobs are running");
        for (what, uninstall, jobs, can_be_stopped, stop_was_tried, were_stopped, expected) in [
            ("cancel", &cancel, runs, true, false, false, "remove"),
            ("jobs run", &wait, runs, true, false, false, "stop"),
            ("jobs run and the queues are stopped", &wait, runs, true, false, true, "wait"),
            ("jobs run and the queues can't be stopped", &wait, runs, false, false, false, "wait"),
            ("idle", &wait, None, true, false, false, "stop"),
            ("idle, as an earlier try found it", &wait, None, true, false, true, "stop"),
            ("idle after the stop", &wait, None, true, true, true, "remove"),
            ("a job slipped in", &wait, runs, true, true, true, "wait"),
            ("idle, and the stop failed", &wait, None, true, true, false, "remove"),
            ("no broker", &wait, None, false, false, false, "remove"),
        ] {
            let found = match removal(uninstall, jobs, QueuesAtRemoval { can_be_stopped, stop_was_tried, were_stopped })
            {
                Removal::StopQueues => "stop",
                Removal::Wait(_) => "wait",
                Removal::Remove => "remove",
            };
            assert_eq!(found, expected, "{what}");
        }
    }

    #[test]
    fn a_kept_host_says_what_becomes_of_pending_jobs() {
        for (were_stopped, keep_state, expected) in
            [(false, false, "is Wait)"), (true, false, "end with the instance"), (true, true, "queue that is kept")]
        {
            let words = kept_for_jobs("jobs are running", were_stopped, keep_state);
            assert!(words.starts_with("jobs are running: ") && words.ends_with(expected), "{words}");
        }
    }
}
